"""The processes of one attempt: why they ended, whatever the clock does meanwhile. Shells do."""

import json
import time
from types import SimpleNamespace

import pytest

from jaxdist.run.monitoring.timers import steady_clock
from jaxdist.tools.launch import resources, worker, worker_group
from jaxdist.tools.launch.worker_group import GroupResult, Placement, WorkerGroup


def run(tmp_path, script: str) -> GroupResult:
    placement = Placement(
        nproc_per_node=1, nnodes=1, node_rank=0, coordinator_address="127.0.0.1:1"
    )
    return WorkerGroup(["sh", "-c", script], placement, 0, tmp_path).run(5.0)


@pytest.fixture
def clock_set_back(monkeypatch):
    """The host's clock goes an hour back at every look."""
    times = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 137"])
@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_process_is_told_from_one_that_ran_out_of_memory(
    tmp_path, monkeypatch, script, kills
):
    counts = iter([4, *[4 + kills] * 9])
    monkeypatch.setattr(worker, "count_oom_kills", lambda: next(counts))
    result = run(tmp_path, script)
    assert result.exit_code == 137 and "SIGKILL" in result.cause
    assert ("memory ran out" in result.cause, "--mem" in result.advice) == (bool(kills),) * 2


def test_the_kernel_s_count_of_processes_killed_for_memory_is_read(tmp_path, monkeypatch):
    table = tmp_path / "vmstat"
    table.write_text("pgfault 12\noom_kill 3\nnr_free 7\n")
    monkeypatch.setattr(resources, "locate", lambda path: SimpleNamespace(text=table.read_text))
    assert resources.count_oom_kills() == 3
    table.write_text("pgfault 12\n")  # a kernel that does not count
    assert resources.count_oom_kills() == 0
    table.unlink()
    assert resources.count_oom_kills() == 0


def test_a_clock_that_is_set_back_leaves_durations_as_they_are(tmp_path, clock_set_back):
    assert 0 <= run(tmp_path, "sleep 0.05; exit 3").seconds < 60
    clock = steady_clock()
    first, second = clock(), clock()
    assert 0 <= second - first < 60 and first > 1_900_000_000


def test_who_failed_first_does_not_depend_on_the_clock():
    """The first wrote its record before the clock was set back by an hour, the second after."""
    failed = []
    for number, (at, wall) in enumerate([(10.0, 7200.0), (11.0, 3601.0)]):
        record = {"time": wall, "monotonic": at, "error": "ValueError: boom"}
        failed.append(
            SimpleNamespace(
                number=number,
                killed=False,
                ended_at=12.0,
                error_record=lambda record=record: json.loads(json.dumps(record)),
            )
        )
    first = min(failed, key=lambda one: worker_group._cause_order(one, True))
    assert first.number == 0
