"""A launched training is hit by faults: each is named, the job goes on, and the bits are the same.

One fault of each way to recover: a restart after a loss, a restart by the watchdog after a stopped
process and after a stuck loader, a preemption that is resumed. The others are tested without
training (`test_launch`, `test_runtime_job`, `test_full_disk`); `scripts/bench/faults.py` injects
all of them many times at random moments, and looks for false alarms in thousands of clean steps.
"""

import random

import fault_scenarios
import pytest
from fault_scenarios import FAULTS, GUARDS, findings
from launched_job import PACE_S, Job

NAMES = [
    "SIGKILL of process 0, the coordinator",
    "SIGSTOP of one process",
    "stuck loader of process 1",
    "SIGTERM or SIGUSR1 to one process",
]
STEPS = 60 * len(NAMES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing happens to, under every guard."""
    job = Job(tmp_path_factory.mktemp("undisturbed") / "job", STEPS, *GUARDS)
    try:
        job.start()
        assert fault_scenarios.finish(job) == 0, job.output()[-3000:]
        yield job
    finally:
        job.close()


def test_clean_steps_under_every_guard_have_no_finding(undisturbed):
    assert findings(undisturbed.run_dir) == []
    assert not (undisturbed.run_dir / "anomalies.jsonl").exists()
    assert not (undisturbed.run_dir / "logs" / "abort.json").exists()
    assert "watchdog" not in undisturbed.output() and "restart" not in undisturbed.output()
    assert len(fault_scenarios.step_results(undisturbed.run_dir)) == STEPS


def test_faults_are_named_and_the_job_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path, undisturbed
):
    job = Job(tmp_path / "faulty", STEPS)
    generator = random.Random(1)
    try:
        job.pace(PACE_S)
        job.start()
        for name in NAMES:
            result = fault_scenarios.inject(job, FAULTS[name], generator)
            print(f"\n{result}", end="")
            assert not result.problem, job.output()[-6000:]
        assert fault_scenarios.finish(job) == 0, job.output()[-6000:]
        found = fault_scenarios.step_results(job.run_dir)
        assert len(found) == STEPS
        assert found == fault_scenarios.step_results(undisturbed.run_dir)
        stacks = (job.run_dir / "logs" / "process-1.stacks.txt").read_text()
        assert "faulty_dataset.py" in stacks  # where its loader stood
    finally:
        job.close()
