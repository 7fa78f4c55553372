"""Adapters against PEFT in PyTorch, one device, and complete weights."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest
from adapter_runs import (
    ROWS,
    SEQ,
    VOCAB,
    adapter_run,
    batches,
    check_equal_to_peft,
    train,
    train_with_peft,
)
from commands import run_here
from decoders import FAMILIES
from hf_models import rewrite_tensors, write_model
from refusals import refused

from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import RunConfig
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.weights import frozen
from jaxdist.models.adapters import LoraConfig, LoraWeight, merge, num_trained
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.run.setup import assemble
from jaxdist.settings import problems_of
from jaxdist.tools.convert.__main__ import main as convert


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """Return a function: family -> directory of a model with random weights."""
    folder = tmp_path_factory.mktemp("base")

    def make(family):
        path = folder / family
        if not path.exists():
            config = FAMILIES.get(family) or dataclasses.replace(FAMILIES["qwen3"], num_layers=4)
            config = dataclasses.replace(config, vocab_size=VOCAB, max_seq_len=SEQ)
            write_model(path, config, scale=0.1)
        return path

    return make


def config_of(path, mesh="dp=1", microbatches=0, virtual=1, **lora) -> RunConfig:
    return adapter_run(
        path, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches, virtual=virtual,
        lora=lora,
    )  # fmt: skip


CASES = {
    "llama2": dict(
        targets=["attention", "mlp"], ranks=["q_proj=8", "down_proj=2"], variant="rslora"
    ),
    "gpt2": dict(targets=["attention", "mlp"], variant="dora"),
    "qwen2": dict(targets=["q_proj", "v_proj", "gate_proj"]),
}


# transformers 5.23 warns of what PEFT 0.21 calls.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    "family", ["llama2", "gpt2", pytest.param("qwen2", marks=pytest.mark.product)]
)
def test_twenty_steps_equal_peft_in_pytorch(base_of, family):
    config = config_of(base_of(family), **CASES[family])
    losses, _, before, after = train(config)
    expected, end = train_with_peft(config, base_of(family), before)
    check_equal_to_peft(config, losses, after, expected, end)
    assert losses[0] - losses[-1] != 0


MESHES = {
    "fsdp=2,tp=2": {},
    "pp=2,cp=2": {"microbatches": 4, "virtual": 2},
    "fsdp=2,pp=2": {"microbatches": 2},
    "pp=2,tp=2": {"microbatches": 4, "virtual": 2},
    "dp=2,cp=2": {},
    "dp=4": {},
    "fsdp=4": {},
    "tp=2": {},
    "dp=2,fsdp=2,tp=2": {},
    "cp=2,tp=2": {},
    "fsdp=2,cp=2": {},
    "pp=2": {"microbatches": 2},
    "dp=2,fsdp=2,pp=2": {"microbatches": 2},
}


@pytest.fixture(scope="module")
def alone(base_of):
    """Return a function: variant -> losses on one device."""
    return functools.cache(
        lambda variant: train(config_of(base_of("mesh"), ranks=["v_proj=3"], variant=variant))[0]
    )


@pytest.mark.parametrize(
    "mesh, variant",
    [
        ("fsdp=2,tp=2", "dora"),
        pytest.param("pp=2,cp=2", "lora", marks=pytest.mark.slow),
        *(
            pytest.param(mesh, variant, marks=pytest.mark.product)
            for mesh, variant in itertools.product([*MESHES][2:], ["lora", "dora"])
        ),
    ],
)
def test_a_mesh_trains_the_same_adapters_as_one_device(base_of, alone, mesh, variant):
    options = MESHES[mesh]
    config = config_of(base_of("mesh"), mesh, ranks=["v_proj=3"], variant=variant, **options)
    losses, parts, before, after = train(config)
    np.testing.assert_allclose(losses[0], alone(variant)[0], rtol=1e-6)
    np.testing.assert_allclose(losses, alone(variant), rtol=2e-5)
    start, end = (frozen(tree, parts.model.axes) for tree in (before, after))
    jax.tree.map(np.testing.assert_array_equal, start, end)  # every bit of the base stayed
    changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), before, after)
    assert sum(jax.tree.leaves(changed)) == len(jax.tree.leaves(after)) - len(jax.tree.leaves(end))


def test_no_byte_of_the_base_is_reduced(base_of):
    parts = assemble(config_of(base_of("mesh"), "dp=2"), jax.devices()[:2])
    step = parts.step.train.lower(parts.abstract_state(), parts.abstract_batch(), np.inf).compile()
    results = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)\(", step.as_text())
    shapes = re.findall(r"f32\[([\d,]*)\]", " ".join(results))
    reduced = sum(math.prod(int(d) for d in dims.split(",") if d) for dims in shapes)
    number = num_trained(parts.model)
    assert number <= reduced <= number + 64  # and scalars


FLAGS = [
    "--lora.rank=4", "--lora.variant=dora", "--lora.base_format=float32", "--data.tokenizer=bytes",
    "--train.seq_len=32", "--train.global_batch_size=8", "--eval.final_max_batches=1",
    "--monitoring.tracker=", "--model.vocab_size=320",
]  # fmt: skip


def last_logits(model, torch) -> np.ndarray:
    tokens = torch.from_numpy(next(batches())["tokens"]).long()
    with torch.no_grad():
        return model(tokens).logits.numpy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_from_training_to_peft_and_merged_weights(tmp_path):
    """Adapters survive a resume on another mesh and every export, with equal logits."""
    base, run = tmp_path / "base", tmp_path / "run"
    config = dataclasses.replace(FAMILIES["llama2"], vocab_size=320, num_layers=4)
    write_model(base, config, scale=0.1)
    start = ["--init-from", base, "--run-dir", run, *FLAGS, "--optim.peak_lr=0.05"]
    assert run_here("train", *start, "--mesh=dp=2,fsdp=2,tp=2", "--train.steps=6") == 0
    more = ["--mesh=dp=2,cp=2,pp=2", "--pipeline.num_virtual_stages=2", "--train.steps=8"]
    assert run_here("train", "--resume", run, *more) == 0
    stored = StoredArrays(run / "checkpoints" / "8")
    adapters = {name for name in stored.entries if name.startswith("params/")}
    assert adapters and all("/adapters/" in name for name in adapters)

    assert convert(["to-peft", str(run), str(tmp_path / "peft")]) == 0
    assert convert(["from-peft", str(tmp_path / "peft"), str(tmp_path / "again")]) == 0
    imported = StoredArrays(tmp_path / "again" / "checkpoints" / "0")
    assert adapters == imported.entries.keys()
    for name in adapters:
        np.testing.assert_array_equal(stored.read(name), imported.read(name), err_msg=name)
    assert convert(["merge", str(run), str(tmp_path / "merged")]) == 0
    assert convert(["to-hf", str(tmp_path / "merged"), str(tmp_path / "hf")]) == 0
    with refused("to-peft", "merge"):
        convert(["to-hf", str(run), str(tmp_path / "no")])

    changed = lambda values: values.update({n: x * 1.01 for n, x in values.items() if "q_pr" in n})
    rewrite_tensors(base, changed)
    with refused("init-from", "other weights"):
        run_here("train", "--resume", run, "--train.steps=9", "--mesh=dp=8")
    rewrite_tensors(base, lambda values: values.update(
        {n: x / np.float32(1.01) for n, x in values.items() if "q_pr" in n}
    ))  # fmt: skip

    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    peft = pytest.importorskip("peft", reason="needs the reference extra (peft)")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(base, dtype=torch.float32).eval()
    before = last_logits(plain, torch)
    with_adapters = last_logits(peft.PeftModel.from_pretrained(plain, tmp_path / "peft"), torch)
    merged = last_logits(load(tmp_path / "hf", dtype=torch.float32).eval(), torch)
    assert np.abs(with_adapters - before).max() > 0.05
    np.testing.assert_allclose(with_adapters, merged, atol=5e-6 * np.abs(merged).max())


def test_merged_weights_compute_the_same_logits(base_of):
    config = config_of(base_of("qwen3"), variant="dora")
    _, parts, before, _ = train(config, steps=0)
    flat = jax.tree_util.tree_leaves(before, is_leaf=lambda x: isinstance(x, LoraWeight))
    assert sum(isinstance(x, LoraWeight) for x in flat) == 4
    complete = assemble(dataclasses.replace(config, lora=LoraConfig()), jax.devices()[:1])
    batch = next(batches())
    losses = [
        float(one.step.evaluate(params, place_batch(batch, one.step.batch_sharding))["loss"])
        for one, params in ((parts, before), (complete, jax.jit(merge)(before)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_invalid_settings_are_reported_together(base_of):
    config = config_of(base_of("llama2"), targets=["q_prj", "lm_head"], ranks=["v_proj", "x=3"])
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, freeze=["embed"]))
    problems = [*problems_of(config.lora, "lora"), *config.problems()]
    for name in ("q_prj", "q_proj", "lm_head", "'v_proj'", "'x'", "optim.freeze"):
        assert any(name in problem for problem in problems), name
    alone = problems_of(LoraConfig(targets=["mlp"], alpha=2.0), "lora")
    assert len(alone) == 2 and all("lora.rank" in problem for problem in alone)


def test_peft_settings_that_are_not_supported_are_reported(base_of):
    config = config_of(base_of("llama2"))
    good = peft_format.write_config(config.model, config.lora, "base")
    assert peft_format.read_config(good, config.model, "dir").rank == 4
    everything = {**good, "target_modules": "all-linear"}
    assert len(peft_format.read_config(everything, config.model, "dir").targets) == 7
    for key, value in (
        ("bias", "all"), ("modules_to_save", ["lm_head"]), ("new_key", 3),
        ("init_lora_weights", "pissa"), ("peft_type", "IA3"), ("target_modules", ["lm_head"]),
        ("layers_to_transform", [0]), ("alpha_pattern", {"q_proj": 3}),
    ):  # fmt: skip
        with refused(key if key != "target_modules" else "lm_head"):
            peft_format.read_config({**good, key: value}, config.model, "dir")
    with refused("use_dora", "use_rslora"):
        both = {**good, "use_dora": True, "use_rslora": True}
        peft_format.read_config(both, config.model, "dir")
