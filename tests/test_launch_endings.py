"""A launched job is struck in every way it may end badly; it says why, goes on, and ends the same.

`JAXDIST_CHAOS=20 pytest -s tests/test_launch_endings.py` strikes 20 times in each way;
`scripts/bench/endings.py` does that and writes the table.
"""

import os
import random

import endings
import pytest
from endings import KINDS, Told
from launched_job import PACE_S, Job, no_mounts

REPEATS = int(os.environ.get("JAXDIST_CHAOS", "1"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What every blow led to, the launcher's last exit code, the run, and an unharmed one."""
    unmountable = no_mounts()
    kinds = [kind for kind in KINDS.values() if not (kind.mounts and unmountable)]
    steps = 80 * REPEATS * len(kinds)
    unharmed = Job(tmp_path_factory.mktemp("unharmed") / "job", steps)
    job = Job(tmp_path_factory.mktemp("harmed") / "job", steps, disk_mb=0 if unmountable else 24)
    generator = random.Random(REPEATS)
    try:
        unharmed.start()
        assert endings.finish(unharmed) == 0, unharmed.error_record()[-3000:]
        job.pace(PACE_S)
        job.start()
        told: list[Told] = []
        for number in range(REPEATS * len(kinds)):
            moment = "start" if number % 3 == 2 else "training"
            told.append(endings.suffer(job, kinds[number % len(kinds)], generator, moment))
            if told[-1].problem:
                break
        code = -1 if told[-1].problem else endings.finish(job)
        for one in told:
            print(f"\n{one}", end="")
        yield told, code, job, endings.bits(unharmed.run_dir)
    finally:
        job.close()
        unharmed.close()


@pytest.mark.parametrize("name", KINDS)
def test_the_cause_is_named_and_the_job_goes_on(story, name):
    told, _, job, _ = story
    mine = [one for one in told if one.kind == name]
    if not mine and KINDS[name].mounts and no_mounts():
        pytest.skip(no_mounts())
    assert len(mine) == REPEATS, [one.problem for one in told if one.problem]
    assert [one.problem for one in mine if one.problem] == [], job.error_record()[-6000:]


def test_the_job_ends_well_and_with_the_bits_of_an_unharmed_one(story):
    _, code, job, expected = story
    assert code == 0, job.error_record()[-6000:]
    assert len(expected) == job.steps
    assert endings.bits(job.run_dir) == expected
