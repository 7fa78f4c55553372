"""Two real processes: each injected fault is detected and reported with process, host and cause."""

import json
import re
import sys
from pathlib import Path

import fault_scenarios
import numpy as np
import pytest
from fault_scenarios import HOST, findings
from faulty_dataset import COUNT
from launched_job import Job

from jaxdist.data.order import Order
from jaxdist.run.metrics_log import read_records
from jaxdist.run.resilience.anomalies import read_anomalies

BATCH = 4
# A save follows every fifth step and reads that step at once. With steps of 15 ms this is rare
# enough not to hide the measurements of the other steps.
INFREQUENT_SAVES = "--checkpoint.save_interval_steps=10"
FLIPPING = f"--program={sys.executable} {Path(__file__).with_name('bit_flip_train.py')}"

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path):
    made = []

    def make(name: str, *flags: str, steps: int) -> Job:
        made.append(Job(tmp_path / name, steps, *flags))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_flipped_bit_on_another_process_is_detected_and_rolled_back(job, monkeypatch):
    """`test_resilience_sdc` tests the policy that ends a run with exit code 85, in one process."""
    monkeypatch.setenv("FLIP", "3:17")  # of four copies, the last on process 1
    flags = ("--simulate=2", "--mesh=dp=4", "--resilience.sdc_check_interval_steps=3")
    undone = job("undone", *flags, "--resilience.sdc_policy=rollback", steps=30)
    undone.start(FLIPPING)
    assert fault_scenarios.finish(undone) == 0, undone.output()[-4000:]
    # At once, not at 18: replicas are compared before every save, and one is due halfway.
    named = rf"replicas differ after step 17: device \d+ of process 1 on {HOST} in params/head"
    assert re.search(named, undone.output()), undone.output()[-4000:]
    assert "without a majority" not in undone.output()
    events = [(event["event"], event["step"]) for event in findings(undone.run_dir)]
    assert events == [("sdc", 17), ("rollback", 15)]
    clean = job("clean", *flags, steps=30)
    clean.start()
    assert fault_scenarios.finish(clean) == 0
    assert findings(clean.run_dir) == []
    assert fault_scenarios.step_results(undone.run_dir) == fault_scenarios.step_results(
        clean.run_dir
    )


def test_slow_process_and_nan_batch_are_named_with_their_cause(job):
    """The coordinator itself is slow; either process may read the row with NaN."""
    row = int(Order([COUNT], [], 0).rows(np.arange(COUNT))[16 * BATCH + 2])  # in step 17
    flags = ["--monitoring.log_interval_steps=2", "--resilience.nonfinite_policy=skip"]
    faulty = job("faulty", *flags, INFREQUENT_SAVES, steps=30)
    (faulty.folder / "slow-0").write_text("0.2")  # for each row: slow on any machine
    (faulty.folder / f"nan-{row}").touch()
    faulty.start()
    assert fault_scenarios.finish(faulty) == 0, faulty.output()[-4000:]

    events = findings(faulty.run_dir)
    slow = [event for event in events if event["event"] == "straggler"]
    assert [(event["process"], event["cause"]) for event in slow] == [(0, "data")]  # once
    assert f"process 0 on {HOST}" in faulty.output()
    tables = [
        record
        for record in read_records(faulty.run_dir / "metrics.jsonl")
        if record.get("event") == "process_times"
    ]
    steps = [event["step"] for event in tables]  # newest interval that both have reported
    assert steps == sorted(set(steps)) and set(steps) <= {10, 20, 30} and len(steps) >= 2
    assert tables[-1]["of"] == [0, 1]
    slow_s, other_s = tables[-1]["means"]["data_wait_s"]
    assert slow_s > 0.3 > other_s
    summary = json.loads((faulty.run_dir / "summary.json").read_text())
    (summed,) = summary["stragglers"]
    assert summed["process"] == 0 and 1 <= summed["intervals"] <= len(steps)

    (anomaly,) = read_anomalies(faulty.run_dir / "anomalies.jsonl")
    assert (anomaly.step, anomaly.kind, anomaly.action) == (17, "nonfinite_loss", "skip")
    assert row in anomaly.rows and len(anomaly.rows) == BATCH
    assert {event["step"] for event in events if event["event"] != "straggler"} == {17}
