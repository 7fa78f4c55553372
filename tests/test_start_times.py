"""Parts of the startup time: they add up to the time since the failure."""

import os
import pathlib
import subprocess
import time

import pytest

from jaxdist.runtime import StartTimes, start_times


def test_parts_add_up_to_the_time_since_the_failure(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(start_times.time, "monotonic", lambda: now[0])
    times = StartTimes(99.5, failed_at=98.0)
    for seconds, part in [(1, "imports"), (2, "join"), (4, "imports"), (8, "setup")]:
        now[0] += seconds
        times.mark(part)
    assert not times.done
    now[0] += 16
    times.end("first_step")
    assert times.done and times.follows_failure
    assert times.parts == {
        "relaunch": 1.5, "imports": 5.5, "join": 2.0, "setup": 8.0, "first_step": 16.0
    }  # fmt: skip
    assert times.total == now[0] - 98.0


def test_a_process_counts_from_its_start_or_from_the_previous_failure(monkeypatch):
    age = lambda: int(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())]))
    monkeypatch.delenv(start_times.FAILED_AT, raising=False)
    before = age()
    times = StartTimes.of_process()
    times.mark("imports")
    assert not times.follows_failure and times.parts.keys() == {"imports"}
    assert before <= times.parts["imports"] <= age() + 1
    failed_at = time.monotonic() - times.total - 30
    monkeypatch.setenv(start_times.FAILED_AT, repr(failed_at))
    (relaunch,) = StartTimes.of_process().parts.values()
    assert relaunch == pytest.approx(30, abs=2.0)


def test_without_a_process_start_time_the_count_starts_now(monkeypatch):
    monkeypatch.delenv(start_times.FAILED_AT, raising=False)
    monkeypatch.setattr(start_times, "Path", lambda path: pathlib.Path("/no" + path))
    times = StartTimes.of_process()
    times.mark("imports")
    assert times.parts == {"imports": pytest.approx(0.0, abs=0.5)}
