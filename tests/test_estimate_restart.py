"""The estimated restart time: its closed form, and comparison with measured restarts."""

import dataclasses
import re

import pytest
from commands import ROOT
from test_estimate import job

from jaxdist.plan.estimate.restart import LOCAL_BYTES_PER_S, restart_of, restore_seconds
from jaxdist.runtime.start_times import StartTimes

BIG = {"checkpoint_bytes": 840e9, "storage_bytes_per_s": 8e9, "step_s": 10.0, "compile_s": 60.0}
STATED_ERROR = 0.35
MEASURED = (ROOT / "scripts" / "bench" / "results" / "restart.md").read_text()


def test_estimated_parts_equal_those_that_a_run_reports():
    reported = re.findall(r"^    \| `(\w+)` \|", StartTimes.__doc__, flags=re.M)
    assert list(restart_of(job("fsdp=8"), **BIG).parts) == ["notice", *reported]


def test_restore_time_is_bytes_over_bandwidth():
    """840 GB at 20 GB/s; 8 processes verify 1.5 GB/s and copy 10 GB/s each."""
    read, verify, copy = 840 / 20, 840 / 8 / 1.5, 840 / 8 / 10
    estimate = restore_seconds(840e9, 8, 20e9)
    assert estimate.low == pytest.approx(0.55 + read)
    assert estimate.likely == pytest.approx(1.1 + verify + copy)
    assert estimate.high == pytest.approx(2.2 + 2 * read + verify + copy)
    many = restore_seconds(840e9, 64, 20e9)  # storage is the slower one
    assert many.likely == pytest.approx(1.1 + read + copy / 8)


def test_facts_of_the_plan_enter_the_estimate():
    one = restart_of(job("fsdp=8"), **BIG)
    assert one.parts["first_step"].likely == pytest.approx(10.34)
    assert one.parts["compile"].likely == 12.0 and one.parts["compile"].high == 60.0
    assert one.parts["join"].likely == pytest.approx(0.26 + 8 * 5 / 2048)
    assert one.lost_host_s == job("fsdp=8").config.runtime.heartbeat_timeout_s
    total = one.total
    assert total.likely == pytest.approx(sum(part.likely for part in one.parts.values()))
    assert all(part.low <= part.likely <= part.high for part in one.parts.values())
    assert total.low < total.likely < total.high


def test_a_failure_costs_detection_another_host_and_the_restart():
    """49 of 419 failures are hangs, detected after the watchdog's limit or three steps."""
    quick, slow = (restart_of(job("fsdp=8"), **{**BIG, "step_s": s}) for s in (10.0, 200.0))
    assert (quick.hang_s, slow.hang_s) == (300.0, 600.0)
    detection = 370 / 419 * 30 + 49 / 419 * 300
    assert quick.after_failure_s == pytest.approx(detection + 120 + quick.total.likely)


def test_the_nearest_tier_is_read():
    there = job("fsdp=8")
    saving = dataclasses.replace(there.config.checkpoint, local_dir="/nvme")
    here = dataclasses.replace(there, config=dataclasses.replace(there.config, checkpoint=saving))
    estimates = [restart_of(one, **{**BIG, "storage_bytes_per_s": 1e9}) for one in (there, here)]
    assert [one.tier for one in estimates] == ["run directory", "local disks"]
    expected = [restore_seconds(840e9, 8, rate) for rate in (1e9, LOCAL_BYTES_PER_S)]
    assert [one.parts["restore"] for one in estimates] == expected


def rows() -> list[list[float]]:
    """Return measured medians: of each part, and the total."""
    matches = re.findall(r"^\| forked, [^|]*\|(.*)\|[^|]*\|$", MEASURED, flags=re.M)
    return [[float(cell) for cell in row.split("|")] for row in matches]


def test_measured_restarts_are_within_the_stated_error():
    """The tiny model has no bytes and no step time, and compiles in about 2.5 s."""
    tiny = {"checkpoint_bytes": 1e6, "storage_bytes_per_s": 1e9, "step_s": 0.0, "compile_s": 2.5}
    estimate = restart_of(job("dp=4"), **tiny).total
    assert len(rows()) >= 3
    for *parts, total in rows():
        assert sum(parts) == pytest.approx(total, rel=0.1)
        assert estimate.low < total < estimate.high
        assert estimate.likely == pytest.approx(total, rel=STATED_ERROR)
