"""The length of a run: in passes over its training rows, and until its loss no longer falls."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from monitored import scalars
from refusals import refused

from jaxdist.config import read_run
from jaxdist.config.command_line import stored_run
from jaxdist.data import open_datasets
from jaxdist.run.data_checks import with_steps
from jaxdist.run.evaluation_loop import EarlyStopping
from jaxdist.tools.report.page import draw_curves
from jaxdist.tools.report.runs import read_runs
from jaxdist.tools.report.table import text_table
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


def in_steps(config):
    data, _ = open_datasets(config.data, seq_len=config.train.seq_len)
    return with_steps(config, data)


def steps_of(epochs: float) -> int:
    return in_steps(read_run([*FLAGS, f"--train.epochs={epochs}"], command="x")).train.steps


def test_steps_cover_the_rows_as_often_as_epochs_say():
    rows = open_datasets(read_run(FLAGS, command="x").data, seq_len=16)[0].num_rows
    assert rows % 8
    assert [steps_of(n) for n in (1, 2, 0.5)] == [math.ceil(n * rows / 8) for n in (1, 2, 0.5)]
    assert steps_of(1e-6) == 1
    config = read_run(FLAGS, command="x")
    assert in_steps(config) is config


@pytest.mark.slow
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
        in_steps(config)


def test_patience_counts_evaluations_since_the_lowest_loss():
    stopping = EarlyStopping(2)
    over = []
    for loss in (3.0, 2.0, 2.5, 1.9, math.nan, 1.9):
        stopping.update({"loss": loss})
        stopping.update({})
        over.append(stopping.is_over)
        restored = EarlyStopping(2)
        restored.restore(json.loads(json.dumps(stopping.state())))
        assert restored.state() == stopping.state()
    assert over == [False, False, False, False, False, True]
    assert not EarlyStopping(0).is_over
    with refused("eval.patience=1", "eval.interval_steps=0"):
        read_run([*FLAGS, "--eval.patience=1"], command="x")


def test_run_stops_early_and_stays_stopped():
    """A rate of almost 0 lowers no loss; a resume in between keeps the count."""
    flags = [flag for flag in FLAGS if "interval" not in flag]
    flags += ["--optim.peak_lr=1e-30", "--eval.interval_steps=2", "--eval.patience=4"]
    assert train([*flags, "--steps=5"]) == 0  # two evaluations, the first is the lowest
    assert json.loads(Path("run/summary.json").read_text())["exit_reason"] == "finished"
    flags += ["--steps=30"]
    for _ in range(2):
        assert train(flags) == 0
        summary = json.loads(Path("run/summary.json").read_text())
        assert (summary["exit_reason"], summary["step"]) == ("stopped_early", 10)
    assert Path("run/checkpoints/10").is_dir()


def test_named_sets_reach_metrics_tensorboard_report_and_log():
    for name in ("wiki", "code"):
        Path(f"{name}.txt").write_text("".join(f"{name} {n}\n" * (n % 3) for n in range(200)))
    flags = [flag for flag in FLAGS if "tracker" not in flag and "interval" not in flag]
    flags += ["--data.eval_sources=wiki=wiki.txt,code=code.txt", "--eval.interval_steps=2"]
    assert train([*flags, "--steps=4", "--checkpoint.keep_best=code/loss:1"]) == 0
    records = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    evals = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in evals] == [2, 4]
    last = evals[-1]
    assert last["wiki/loss"] == last["loss"] != last["code/loss"]
    assert last["code/bits_per_byte"] == pytest.approx(last["code/loss"] / math.log(2), rel=0.02)
    log = Path("run/logs/process-0.log").read_text().splitlines()
    lines = [line for line in log if " eval " in line and "code/loss" in line]
    assert f"code/loss {last['code/loss']:8.4f}" in lines[-1] and "tokens" not in lines[-1]
    points = scalars(Path("run/tensorboard"))
    assert (4, "eval/code/loss", float(np.float32(last["code/loss"]))) in points
    runs = read_runs(["run"])
    assert f"{last['code/loss']:.4f}" in text_table(runs)
    titles = [axes.get_title() for axes in draw_curves(runs, ["red"]).axes]
    assert {"evaluation loss, code", "evaluation loss, wiki"} <= set(titles)
