"""Two real processes: each planted fault is found and named, and a clean run has no finding."""

import json
import re
import socket
import statistics
import sys
from pathlib import Path

import fault_scenarios
import numpy as np
import pytest
from faulty_dataset import COUNT
from launched_job import PACE_S, RECOVER_S, Job

from jaxdist.data.order import Order
from jaxdist.run.metrics_log import read_records
from jaxdist.run.resilience.anomalies import read_anomalies

STEPS, BATCH = 60, 4
HOST = socket.gethostname()
FINDINGS = {"sdc", "loss_anomaly", "rollback", "skipped_step", "straggler", "replica_norm_outlier"}
# Every fifth step is followed by a save, which reads that step at once; at a step of 15 ms that is
# seldom enough for what the other steps say.
SELDOM_SAVED = "--checkpoint.save_interval_steps=10"
HEAVIER = ["--model.d_model=256", "--model.num_layers=2", "--train.seq_len=128"]
HEAVIER += ["--checkpoint.save_interval_steps=1000"]
FLIPPING = f"--program={sys.executable} {Path(__file__).with_name('bit_flip_train.py')}"

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path):
    """Makes a job; its processes end with the test."""
    made = []

    def make(name: str, *flags: str, steps: int = STEPS) -> Job:
        made.append(Job(tmp_path / name, steps, *flags))
        return made[-1]

    yield make
    for one in made:
        one.close()


def events(job: Job) -> list[dict]:
    return [r for r in read_records(job.run_dir / "metrics.jsonl") if r["kind"] == "event"]


def findings(job: Job) -> list[dict]:
    return [event for event in events(job) if event["event"] in FINDINGS]


def step_times(job: Job) -> list[float]:
    path = job.run_dir / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    return [r["step_time_s"] for r in records if r["kind"] == "train"]


def test_a_flipped_bit_on_another_process_is_found_and_ends_or_is_undone(job, monkeypatch):
    monkeypatch.setenv("FLIP", "3:17")  # of four copies, the last on process 1
    four = ("--simulate=2", "--mesh=dp=4", "--resilience.sdc_check_interval_steps=3")
    stopped = job("stopped", *four)
    stopped.start(FLIPPING)
    assert fault_scenarios.finish(stopped) == 85
    # At once, not at 18: they are compared before every save, and one is due halfway.
    named = rf"replicas differ after step 17: device \d+ of process 1 on {HOST} in params/head"
    assert re.search(named, stopped.output()), stopped.output()[-4000:]
    assert "without a majority" not in stopped.output()
    assert "restart" not in stopped.output()
    assert [event["step"] for event in findings(stopped)] == [17]
    undone = job("undone", *four, "--resilience.sdc_policy=rollback")
    undone.start(FLIPPING)
    assert fault_scenarios.finish(undone) == 0, undone.output()[-4000:]
    assert re.search(named, undone.output())
    assert [event["event"] for event in findings(undone)] == ["sdc", "rollback"]
    clean = job("clean", *four)
    clean.start()
    assert fault_scenarios.finish(clean) == 0
    assert findings(clean) == []
    assert fault_scenarios.step_results(undone.run_dir) == fault_scenarios.step_results(
        clean.run_dir
    )


def test_a_nan_batch_is_named_with_its_rows_and_left_out(job):
    row = int(Order([COUNT], [], 0).rows(np.arange(COUNT))[16 * BATCH + 2])  # in step 17
    faulty = job("nan", "--resilience.nonfinite_policy=skip")
    (faulty.folder / f"nan-{row}").touch()
    faulty.start()
    assert fault_scenarios.finish(faulty) == 0, faulty.output()[-4000:]
    (anomaly,) = read_anomalies(faulty.run_dir / "anomalies.jsonl")
    assert (anomaly.step, anomaly.kind, anomaly.action) == (17, "nonfinite_loss", "skip")
    assert row in anomaly.rows and len(anomaly.rows) == BATCH
    assert {event["step"] for event in findings(faulty)} == {17}


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_process_is_named_with_its_host_and_cause(job, slow):
    faulty = job("slow", "--monitoring.log_interval_steps=2", SELDOM_SAVED, steps=24)
    (faulty.folder / f"slow-{slow}").write_text("0.25")  # of each row: much on any machine
    faulty.start()
    assert fault_scenarios.finish(faulty) == 0, faulty.output()[-4000:]
    found = findings(faulty)
    assert {(event["process"], event["cause"]) for event in found} == {(slow, "data")}
    assert f"process {slow} on {HOST}" in faulty.output()


@pytest.mark.parametrize(
    ("logs", "flags"), [(2, [SELDOM_SAVED]), (10, HEAVIER)], ids=["tiny", "heavier"]
)
def test_a_loader_that_turns_slow_amid_the_run_is_named(job, logs, flags, capsys):
    """From step 24 on; prefetched batches hide it at first, and saves read a step at once."""
    faulty = job("turned", f"--monitoring.log_interval_steps={logs}", *flags)
    faulty.start()
    faulty.wait(lambda: len(step_times(faulty)) >= 24, "step 24", RECOVER_S)
    usual_s = statistics.median(step_times(faulty)[4:])
    row_s = max(0.03, 2 * usual_s)  # of two rows; other programs may slow steps down meanwhile
    (faulty.folder / "slow-1").write_text(f"{row_s:.3f}")
    assert fault_scenarios.finish(faulty) == 0, faulty.output()[-4000:]
    found = findings(faulty)
    assert {(event["process"], event["cause"]) for event in found} == {(1, "data")}
    with capsys.disabled():
        print(
            f" steps of {1e3 * usual_s:.0f} ms, then batches of {2e3 * row_s:.0f}: named at step "
            f"{found[0]['step']}",
            end="",
        )


def test_stuck_processes_are_named_and_the_run_goes_on_to_the_same_bits(job):
    faulty, clean = job("stuck"), job("clean")
    faulty.pace(PACE_S)
    faulty.start()
    for stuck in (1, 0):
        size, since = faulty.num_bytes(), faulty.position()
        faulty.wait(lambda: faulty.trains(size), "new steps", RECOVER_S)  # noqa: B023
        (faulty.folder / f"stuck-{stuck}").touch()
        line = rf"watchdog: .*process {stuck} on {HOST} \(pid \d+\), last step \d+, phase data"
        faulty.wait_for_line(line, since)
        faulty.wait_for_line("launch: restart", since)
    assert fault_scenarios.finish(faulty) == 0, faulty.output()[-4000:]
    clean.start()
    assert fault_scenarios.finish(clean) == 0
    assert fault_scenarios.step_results(faulty.run_dir) == fault_scenarios.step_results(
        clean.run_dir
    )


def test_two_thousand_clean_steps_under_every_guard_have_no_finding(job, capsys):
    """`train.replica_norms` is left out: with two rows per replica its reports are noise."""
    clean = job(
        "clean",
        "--resilience.sdc_check_interval_steps=10",
        "--resilience.spike_policy=stop",
        "--resilience.sdc_policy=stop",
        "--resilience.nonfinite_policy=stop",
        "--resilience.step_timeout_s=3",
        "--checkpoint.save_interval_steps=100",
        steps=2000,
    )
    clean.start()
    assert fault_scenarios.finish(clean) == 0, clean.output()[-4000:]
    assert findings(clean) == []
    assert not (clean.run_dir / "anomalies.jsonl").exists()
    assert not (clean.run_dir / "logs" / "abort.json").exists()
    assert "watchdog" not in clean.output() and "restart" not in clean.output()
    assert len(fault_scenarios.step_results(clean.run_dir)) == 2000
    with capsys.disabled():
        summary = json.loads((clean.run_dir / "summary.json").read_text())
        print(f" {summary['step']} steps, {summary.get('warnings', 0)} warnings", end="")
