"""`--try`: each shipped config scaled down, on data that every machine has."""

import json
from pathlib import Path

import pytest

from jaxdist.config import read_run
from jaxdist.config.command_line import stored_run
from jaxdist.settings.sources import NAMED_FILES
from jaxdist.train import main as train

CONFIGS = sorted(path.stem for path in NAMED_FILES.glob("*.toml"))
FAST, SLOW = ("cifar10_cnn",), ("gpt2_124m", "llama3_8b_lora", "cifar10_resnet")
"""Configs of each kind of model and of training; others differ in sizes and options."""
SAME = (
    "kind", "norm", "norm_eps", "norm_placement", "positions", "activation", "qk_norm", "bias",
    "tie_embeddings", "rope_theta", "rope_scaling", "dropout",
)  # fmt: skip


def small_run(config: str, *flags: str):
    return read_run(["--config", config, "--try", *flags], command="jaxdist.train")


@pytest.mark.parametrize("config", CONFIGS)
def test_architecture_is_that_of_the_config(config, capsys):
    run, small = stored_run(NAMED_FILES / f"{config}.toml"), small_run(config)
    for name in SAME:
        assert getattr(small.model, name, None) == getattr(run.model, name, None), name
    if run.model.kind == "decoder":
        ratio = lambda model: model.num_heads / model.kv_heads
        wide = lambda model: model.num_heads * model.head_width / model.d_model
        deep = lambda model: model.mlp_dim / model.d_model
        for measure in (ratio, wide, deep):
            assert measure(small.model) == pytest.approx(measure(run.model), rel=0.03)
        assert small.model.d_model <= 128 and small.model.num_layers <= 8
        is_bytes = run.data.tokenizer == "bytes"
        assert small.data.tokenizer_name == ("bytes" if is_bytes else "code")
        line = capsys.readouterr().err
        assert run.name in line and (is_bytes or f"{run.model.vocab_size:,}" in line)
    assert bool(small.lora.rank) == bool(run.lora.rank)
    assert small.optim.optimizer == run.optim.optimizer


def test_flags_override_the_small_run():
    small = small_run("gpt2_124m", "--model.num_layers=3", "--steps=7", "--name=x")
    assert (small.model.num_layers, small.train.steps, small.name) == (3, 7, "x")
    assert small.model.positions == "learned"
    default = read_run(["--try"], command="jaxdist.train")
    assert default.model.num_layers == read_run([], command="jaxdist.train").model.num_layers


@pytest.mark.parametrize(
    "config", [*FAST, *(pytest.param(config, marks=pytest.mark.slow) for config in SLOW)]
)
def test_loss_falls(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--steps=30", "--run-dir=run", "--monitoring.tracker=", "--optim.warmup_steps=3"]
    flags += ["--eval.final_max_batches=1", "--monitoring.log_interval_steps=1"]
    assert train(["--config", config, "--try", *flags]) == 0
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 30
    limit = 0.97 if "lora" in config else 0.95  # the head of adapters is frozen at random values
    assert sum(losses[-5:]) / 5 < limit * losses[0], losses
