"""`train.epochs`: the length of a run in passes over its training rows."""

import json
import math
from pathlib import Path

import pytest
from refusals import refused

from jaxdist.config import read_run
from jaxdist.config.command_line import stored_run
from jaxdist.data import open_datasets
from jaxdist.run.epochs import with_steps
from jaxdist.train import main as train

FLAGS = [
    "--data.sources=text.txt", "--data.tokenizer=bytes", "--model.vocab_size=256",
    "--model.d_model=16", "--model.num_layers=1", "--model.num_heads=2", "--model.mlp_dim=16",
    "--train.seq_len=16", "--train.global_batch_size=8", "--optim.warmup_steps=1", "--mesh=dp=8",
    "--monitoring.tracker=", "--eval.interval_steps=0", "--run-dir=run",
]  # fmt: skip


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {number} of a text\n" for number in range(100)))


def steps_of(epochs: float) -> int:
    return with_steps(read_run([*FLAGS, f"--train.epochs={epochs}"], command="x")).train.steps


def test_steps_cover_the_rows_as_often_as_epochs_say():
    rows = open_datasets(read_run(FLAGS, command="x").data, seq_len=16)[0].num_rows
    assert rows % 8
    assert [steps_of(n) for n in (1, 2, 0.5)] == [math.ceil(n * rows / 8) for n in (1, 2, 0.5)]
    assert steps_of(1e-6) == 1
    config = read_run(FLAGS, command="x")
    assert with_steps(config) is config


def test_run_of_two_epochs_is_the_run_of_its_steps():
    assert train([*FLAGS, "--train.epochs=2"]) == 0
    stored, steps = stored_run("run/config.toml"), steps_of(2)
    assert stored.train.steps == steps and stored.train.epochs == 0
    flags = [flag for flag in FLAGS if "run-dir" not in flag]
    assert train([*flags, f"--steps={steps}", "--run-dir=other"]) == 0
    records = [
        [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "other")
    ]
    losses = [[x["loss"] for x in lines if x["kind"] == "train"] for lines in records]
    assert losses[0] == losses[1]
    assert train([*FLAGS, "--train.epochs=2"]) == 0  # nothing is left
    assert stored_run("run/config.toml") == stored


def test_stream_has_no_epochs():
    Path("rows.py").write_text(
        "import grain, numpy as np\n"
        "def make(*, seq_len, seed):\n"
        "    row = {name: np.zeros(seq_len, np.int32) for name in ('tokens', 'targets')}\n"
        "    row['weights'] = np.ones(seq_len, np.float32)\n"
        "    rows = grain.MapDataset.source([row] * 64)\n"
        "    return rows.seed(seed).repeat().to_iter_dataset()\n"
    )
    config = read_run([*FLAGS[1:], "--data.sources=rows:make", "--train.epochs=1"], command="x")
    with refused("train.epochs=1", "rows:make", "train.steps"):
        with_steps(config)
