"""A launched training is hit by faults: each is named, the job goes on, and the bits are the same.

One fault of each way to recover: a restart after a loss, a restart by the watchdog, a preemption
that is resumed. The others are tested without training (`test_launch`, `test_runtime_job`,
`test_full_disk`); `scripts/bench/faults.py` injects all of them many times at random moments.
"""

import random

import fault_scenarios
import pytest
from fault_scenarios import FAULTS
from launched_job import PACE_S, Job

NAMES = [
    "SIGKILL of process 0, the coordinator",
    "SIGSTOP of one process",
    "SIGTERM or SIGUSR1 to one process",
]
STEPS = 80 * len(NAMES)

pytestmark = pytest.mark.slow


def test_faults_are_named_and_the_job_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    undisturbed = Job(tmp_path / "undisturbed", STEPS)
    job = Job(tmp_path / "faulty", STEPS)
    generator = random.Random(1)
    try:
        undisturbed.start()
        assert fault_scenarios.finish(undisturbed) == 0, undisturbed.output()[-3000:]
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
    finally:
        job.close()
        undisturbed.close()
