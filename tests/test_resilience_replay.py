"""Replay reports whether a bad step comes from the batch, the state, or a transient error."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
from commands import run_here
from refusals import missing, refused
from test_resilience_losses import BAD_ROW, SEED, bad_step, module, train  # noqa: F401

from jaxdist import open as open_run
from jaxdist.checkpoint import CheckpointConfig
from jaxdist.run.metrics_log import encode
from jaxdist.run.replay import loss_and_norm, read_history, state_before, verdict
from jaxdist.run.resilience.anomalies import Anomaly
from jaxdist.run.run_directory import RunDirectory
from jaxdist.settings import ConfigError
from jaxdist.tools.compare.__main__ import _recorded_otherwise
from jaxdist.tools.compare.rerun import RerunStep

OFFENCE = Anomaly(
    step=3, kind="loss_spike", loss=9.0, grad_norm=1.0, limit=4.0, action="report",
    first_sample=8, num_samples=4, rows=[1, 2, 3, 4], left_out=[],
)  # fmt: skip
GOOD, BAD = {"loss": 3.0, "grad_norm": 1.0}, {"loss": 8.0, "grad_norm": 1.0}
NAN = {"loss": math.nan, "grad_norm": 1.0}


@pytest.mark.parametrize(
    ("again", "following", "word"),
    [
        ([BAD, BAD, NAN], GOOD, "data: bad in 3 of 3"),
        ([BAD, BAD, BAD], BAD, "deterministic: bad in 3 of 3"),
        ([GOOD, GOOD, GOOD], GOOD, "transient: not reproduced"),
        ([GOOD, BAD, GOOD], GOOD, "transient: reproduced in 1 of 3"),
    ],
)
def test_verdict(again, following, word):
    assert verdict(OFFENCE.is_bad, again, following).startswith(word)


def test_step_without_anomaly_is_compared_with_the_record():
    same = lambda values: values == GOOD
    assert verdict(same, [GOOD, GOOD], None).startswith("deterministic: 2 replays")
    verdict_of_two = verdict(same, [BAD, GOOD], None)
    assert verdict_of_two.startswith("transient: ") and "1 of 2" in verdict_of_two


class Batches:
    """A loader of batches of four samples that reports the start of each batch."""

    digest = ""

    def __init__(self, position):
        self.next, self.left_out, self.closed = position.sample, position.left_out, False

    def __next__(self):
        while any(first <= self.next < end for first, end in self.left_out):
            self.next += 4
        self.first_sample, self.next = self.next, self.next + 4
        return self.first_sample

    def close(self):
        self.closed = True


def write_run(path, lines, anomalies):
    path.mkdir()
    trained = lambda step, first: {
        "kind": "train", "step": step, "loss": 1.0, "grad_norm": 1.0, "first_sample": first
    }  # fmt: skip
    written = [trained(*line) if isinstance(line, tuple) else line for line in lines]
    (path / "metrics.jsonl").write_text("".join(encode(line) + "\n" for line in written))
    anomaly_lines = [json.dumps(dataclasses.asdict(anomaly)) + "\n" for anomaly in anomalies]
    (path / "anomalies.jsonl").write_text("".join(anomaly_lines))
    return RunDirectory.existing(path)


def steps_before(run, step):
    done, loaders = [], []

    def open_loader(dataset, position, step):
        loaders.append(Batches(position))
        return loaders[-1]

    parts = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig()),
        init_state=lambda: 0,
        open_loader=open_loader,
        step=SimpleNamespace(train=lambda state, batch, limit: (done.append((batch, limit)), 0)),
    )
    parts.in_stage = lambda step: parts
    try:
        state_before(parts, None, run, step, read_history(run, step))
    except ConfigError as error:
        return error, loaders[-1]
    return done, loaders[-1]


def anomaly(step, first, action):
    return dataclasses.replace(OFFENCE, step=step, first_sample=first, action=action)


def test_replay_skips_the_updates_that_were_skipped(tmp_path):
    skipped = [anomaly(2, 4, "skip"), anomaly(1, 4, "skip")]  # the second one uses another batch
    run = write_run(tmp_path / "run", [(1, 0), (2, 4), (3, 8), (4, 12)], skipped)
    done, loader = steps_before(run, 4)
    assert done == [(0, math.inf), (4, OFFENCE.limit), (8, math.inf)]
    assert not loader.closed


def test_replay_after_a_rollback_uses_the_recorded_rows(tmp_path):
    rollback = {"kind": "event", "event": "rollback", "step": 1}
    lines = [(1, 0), (2, 4), (3, 8), rollback, (2, 4), (3, 12), (4, 16)]
    run = write_run(tmp_path / "run", lines, [anomaly(3, 8, "rollback")])
    assert [first for first, _ in steps_before(run, 4)[0]] == [0, 4, 12]
    # The anomaly is at the step that failed, not at the good step that replaced it.
    history = read_history(run, 3)
    assert history.recorded[3]["first_sample"] == 8 and history.anomalies.keys() == {3}
    assert not history.left_out and read_history(run).left_out == ((8, 12),)


def test_step_with_other_rows_or_without_a_record_is_rejected(tmp_path):
    run = write_run(tmp_path / "run", [(1, 0), (2, 6), (3, 12)], [])
    error, loader = steps_before(run, 3)
    assert isinstance(error, ConfigError) and "step 2" in str(error) and loader.closed
    with refused("step 9", "steps 1 to 3"):
        read_history(run, 9)


@pytest.mark.slow
@pytest.mark.usefixtures("module")
def test_replay_distinguishes_data_errors_from_transient_ones(tmp_path, capsys):
    def replayed(step: int) -> str:
        capsys.readouterr()
        assert run_here("train", "--replay", f"run:{step}") == 0
        return capsys.readouterr().out

    run_dir = tmp_path / "run"
    assert train("nan", run_dir) == 0
    bad = bad_step(SEED)
    files = sorted(run_dir.rglob("*"))
    out = replayed(bad)
    assert "verdict: data" in out and str(BAD_ROW) in out
    assert missing(out, f"step {bad} of", f"after step {(bad - 1) // 5 * 5}") == []
    # An anomaly that is not in the data: the same step numbers, another step's record.
    planted = json.loads((run_dir / "anomalies.jsonl").read_text())
    planted |= {"step": bad - 1, "first_sample": planted["first_sample"] - planted["num_samples"]}
    with open(run_dir / "anomalies.jsonl", "a") as file:
        file.write(json.dumps(planted) + "\n")
    out = replayed(bad - 1)
    assert "verdict: transient" in out and out.count("same bits") == 3
    assert sorted(run_dir.rglob("*")) == files


def test_replay_of_a_missing_run_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("nowhere", "RUN:STEP"):
        run_here("train", "--replay", "nowhere:3")


@pytest.mark.slow
def test_step_without_labels_is_replayed_and_compared(tmp_path, capsys):
    """A prompt that fills the row leaves no label; one sample of a plain answer follows."""
    chat = lambda prompt: {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "ok"}]
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(chat(p)) + "\n" for p in ("long " * 60, "hi")))
    flags = [
        f"--data.sources={rows}", "--data.records=chat", "--data.packing=documents",
        "--data.tokenizer=bytes", "--data.eval_fraction=0", "--model.vocab_size=256",
        "--model.num_layers=2", "--model.d_model=32", "--train.seq_len=32", "--mesh=pp=2,tp=4",
        "--train.global_batch_size=4", "--train.num_microbatches=2", "--eval.interval_steps=0",
    ]  # fmt: skip
    assert run_here("train", *flags, f"--run-dir={tmp_path / 'a'}", "--steps=9") == 0
    run = open_run(tmp_path / "a")
    empty = [math.isnan(loss) for loss in run.losses]
    assert any(empty) and not all(empty)
    assert [r["loss"] is None for r in run.metrics] == empty
    step = empty.index(True) + 1
    capsys.readouterr()
    assert run_here("train", *flags, f"--replay={tmp_path / 'a'}:{step}") == 0
    out = capsys.readouterr().out
    assert "recorded: no labels" in out and out.count("the same bits") == 3
    again = RerunStep(step=step, digests={}, numbers=loss_and_norm(run.metrics[step - 1]))
    directory = RunDirectory.existing(tmp_path / "a")
    lines = _recorded_otherwise((directory, directory), [(again, again)], None, "pp=2,tp=4")
    assert "recorded" not in "".join(lines)
