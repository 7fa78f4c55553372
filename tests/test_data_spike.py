"""`jaxdist data spike` finds the rows behind a loss, on any mesh, with each row's own loss."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import environment, run_here
from refusals import refused

from jaxdist.data import __main__ as data
from jaxdist.run.metrics_log import read_records
from jaxdist.run.trained_run import open_run
from jaxdist.tools.spike import main

FLAGS = [
    "--data.sources=good.txt,bad.txt", "--data.tokenizer=bytes", "--model.vocab_size=256",
    "--model.d_model=32", "--model.num_layers=2", "--model.num_heads=4", "--model.mlp_dim=32",
    "--model.num_kv_heads=4", "--train.seq_len=64", "--train.global_batch_size=8",
    "--optim.warmup_steps=1", "--optim.peak_lr=0.01", "--monitoring.tracker=", "--mesh=dp=8",
    "--eval.interval_steps=0", "--checkpoint.save_interval_steps=20", "--seed=3",
]  # fmt: skip
GARBAGE = "".join(map(chr, np.random.default_rng(0).integers(33, 127, 150)))


@pytest.fixture(scope="module")
def spike(tmp_path_factory):
    """Train on a text with garbage in the middle of its second file; return the step that reads it.

    Rows 3 and 4 of the second file have 42 and 64 tokens of it.
    """
    patch = pytest.MonkeyPatch()
    patch.chdir(tmp_path_factory.mktemp("spike"))
    patch.setenv("JAXDIST_CACHE", "cache")
    line = "one line of a text\n"
    Path("good.txt").write_text(line * 150)
    Path("bad.txt").write_text((line * 12)[:214] + GARBAGE + line * 60)
    assert run_here("train", *FLAGS, "--run-dir=run", "--steps=45") == 0
    losses = [r["loss"] for r in read_records("run/metrics.jsonl") if r["kind"] == "train"]
    yield 26 + int(np.argmax(losses[25:])), losses
    patch.undo()


def listed(capsys, *argv) -> dict:
    capsys.readouterr()
    assert main(["run", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_planted_garbage_is_first(spike, capsys):
    step, losses = spike
    files = sorted(Path("run").rglob("*"))
    result = listed(capsys, step)
    rows = result["rows"]
    assert result["loss"] == losses[step - 1] > 1.2 * np.median(losses[25:])
    assert (result["checkpoint"], result["repeated_steps"]) == (
        (step - 1) // 20 * 20,
        (step - 1) % 20,
    )
    assert result["mean_row_loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert len(rows) == 8 and rows[0]["source"] == "bad.txt"
    assert rows[0]["row_of_source"] in (3, 4, 5)
    assert rows[0]["text"][:8] in GARBAGE
    assert rows[0]["loss"] > 2 * rows[3]["loss"] and rows[0]["share"] > 0.2
    assert [r["loss"] for r in rows] == sorted((r["loss"] for r in rows), reverse=True)
    assert sum(r["share"] for r in rows) == pytest.approx(1)
    assert main(["run", str(step), "--top=1"]) == 0
    out = capsys.readouterr().out
    assert f"{rows[0]['loss']:.4f}" in out and repr(rows[0]["text"]) in out
    assert f"{rows[1]['loss']:.4f}" not in out
    assert sorted(Path("run").rglob("*")) == files  # nothing is written


def test_row_losses_equal_those_of_batches_with_one_labeled_row(spike, capsys):
    """At the step after a checkpoint; the reference is the compiled evaluation of a single row."""
    rows = listed(capsys, 41)["rows"]
    run = open_run("run", step=40)
    params = run.parts.in_execution_order(run.weights(40).params)
    data = run.open_held_out(["good.txt", "bad.txt"])  # in the same order of rows
    data = data.rows(np.arange(data.num_rows))
    train_rows = [row for row in rows if row["source"] == "good.txt"]
    assert train_rows
    for row in train_rows[:2]:
        batch = {k: np.repeat(v[row["row"]][None], 8, axis=0) for k, v in data.items()}
        batch["weights"][1:] = 0
        sums = jax.device_get(run.parts_for().step.evaluate(params, batch))
        assert row["loss"] == pytest.approx(float(sums["loss"] / sums["weight"]), rel=1e-5)
        assert row["tokens"] == float(sums["weight"])


@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "pp=2,fsdp=4"])
def test_losses_are_equal_on_every_mesh(spike, capsys, mesh):
    one, many = (listed(capsys, 41, *flags)["rows"] for flags in ([], [f"--mesh={mesh}"]))
    assert [row["row"] for row in one] == [row["row"] for row in many]
    for a, b in zip(one, many, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert (a["text"], a["tokens"]) == (b["text"], b["tokens"])


def test_command_runs_as_typed(spike):
    """`data` is a folder below `run`, so the command is in `tools`."""
    typed = [sys.executable, "-m", "jaxdist", "data", "spike", "run", "41", "--json", "--top=1"]
    done = subprocess.run(typed, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 1
    with refused("data spike", "-m jaxdist.spike"):
        data.main(["spike", "run", "41"])


def test_steps_without_a_record_are_rejected(spike):
    with refused("step 99", "steps 1 to 45"):
        main(["run", "99"])
