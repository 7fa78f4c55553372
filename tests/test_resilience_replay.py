"""A step done again says whether what was bad comes from the batch, the state, or nowhere."""

import dataclasses
import json
import math

import pytest
from commands import run
from refusals import missing
from test_resilience_losses import BAD_ROW, SEED, bad_step, train

from jaxdist.run.replay import verdict
from jaxdist.run.resilience.anomalies import Anomaly

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
        ([GOOD, GOOD, GOOD], GOOD, "transient: it does not come back"),
        ([GOOD, BAD, GOOD], GOOD, "transient: it comes back in 1 of 3"),
    ],
)
def test_verdict(again, following, word):
    assert verdict(OFFENCE.is_bad, again, following).startswith(word)


def test_a_step_without_anomaly_is_the_recorded_one_or_not():
    same = lambda values: values == GOOD
    assert verdict(same, [GOOD, GOOD], None).startswith("deterministic: 2 replays")
    verdict_of_two = verdict(same, [BAD, GOOD], None)
    assert verdict_of_two.startswith("transient: ") and "1 of 2" in verdict_of_two


def replayed(tmp_path, what, *flags) -> str:
    done = run("train", "--replay", what, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_replay_tells_data_from_transient(tmp_path):
    done, run_dir = train(tmp_path, "nan", "--run-dir=run")
    assert done.returncode == 0, done.stderr
    bad = bad_step(SEED)
    files = sorted(run_dir.rglob("*"))
    out = replayed(tmp_path, f"run:{bad}")
    assert "verdict: data" in out and str(BAD_ROW) in out
    assert missing(out, f"step {bad} of", f"from step {(bad - 1) // 5 * 5}") == []
    # An anomaly that the data does not hold: the same step numbers, another step's record.
    planted = json.loads((run_dir / "anomalies.jsonl").read_text())
    with open(run_dir / "anomalies.jsonl", "a") as file:
        file.write(json.dumps({**planted, "step": bad - 1}) + "\n")
    out = replayed(tmp_path, f"run:{bad - 1}")
    assert "verdict: transient" in out and out.count("same bits") == 3
    assert sorted(run_dir.rglob("*")) == files


def test_replay_of_no_run_is_refused(tmp_path):
    done = run("train", "--replay", "nowhere:3", cwd=tmp_path)
    assert done.returncode == 2 and "RUN:STEP" in done.stderr


def test_an_anomaly_survives_its_file():
    assert Anomaly(**json.loads(json.dumps(dataclasses.asdict(OFFENCE)))) == OFFENCE
