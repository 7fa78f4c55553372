"""Inject faults into a launched training: each is named, the job continues, and the bits match.

One fault for each way to recover: a restart after a loss, a restart by the watchdog after a stopped
process and after a stuck loader. `test_slurm_jobs` resumes a preempted job; the others are tested
without training (`test_launch`, `test_runtime_job`, `test_full_disk`). `scripts/bench/faults.py`
injects all many times at random moments, and counts false alarms in thousands of clean steps.
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
]
STEPS = 60 * len(NAMES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Run without faults, with every guard on."""
    job = Job(tmp_path_factory.mktemp("undisturbed") / "job", STEPS, *GUARDS)
    try:
        job.start()
        assert fault_scenarios.finish(job) == 0, job.output()[-3000:]
        yield job
    finally:
        job.close()


def test_run_without_faults_has_no_findings(undisturbed):
    assert findings(undisturbed.run_dir) == []
    assert not (undisturbed.run_dir / "anomalies.jsonl").exists()
    assert not (undisturbed.run_dir / "logs" / "abort.json").exists()
    assert "watchdog" not in undisturbed.output() and "restart" not in undisturbed.output()
    assert len(fault_scenarios.step_results(undisturbed.run_dir)) == STEPS


def test_job_with_faults_names_them_and_matches_an_undisturbed_run(tmp_path, undisturbed):
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
        results = fault_scenarios.step_results(job.run_dir)
        assert len(results) == STEPS
        assert results == fault_scenarios.step_results(undisturbed.run_dir)
        stacks = (job.run_dir / "logs" / "process-1.stacks.txt").read_text()
        assert "faulty_dataset.py" in stacks  # position of its loader
    finally:
        job.close()
