"""Cost of a run: money, checkpoint intervals, spot capacity, restarts."""

import dataclasses
import math
import re

import numpy as np
import pytest
from commands import ROOT
from test_estimate import job

from jaxdist.core.mesh import MeshSpec
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models.weights import weights_of
from jaxdist.plan.estimate import cost
from jaxdist.plan.estimate.cost import LOCAL_BYTES_PER_S, restart_of, restore_seconds
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.search import Candidate
from jaxdist.plan.options import clusters_of, read_plan
from jaxdist.plan.planner import price_run
from jaxdist.runtime.start_times import StartTimes


def test_run_cost_is_tokens_over_throughput():
    bill = cost.run_cost(tokens=3.6e9, tokens_per_s=1e6, num_gpus=8, price=2.0, lost=0.5)
    assert bill.gpu_hours == pytest.approx(16.0)
    assert (bill.days, bill.money) == (pytest.approx(2 / 24), pytest.approx(32.0))


@pytest.mark.parametrize("mean_h", [2, 24, 1000])
@pytest.mark.parametrize("saving_s", [1, 60, 600])
def test_daly_interval_minimizes_the_expected_time(saving_s, mean_h):
    """Expected time of an hour's work with exponential failures: Daly 2006, equation 20."""
    mean, work_s = mean_h * 3600.0, 3600.0

    def expected(interval: float) -> float:
        return mean * (math.exp((interval + saving_s) / mean) - 1) * work_s / interval

    grid = np.geomspace(1, 20 * mean, 20001)
    best = min(grid, key=expected)
    assert expected(cost.daly(saving_s, mean)) == pytest.approx(expected(best), rel=2e-3)


def test_checkpoint_size_is_parameters_and_moments():
    params = sum(w.size for w in weights_of(job().model))
    for mesh, zero in (("dp=1", 0), ("dp=8", 1), ("fsdp=4,tp=2", 0)):
        assert cost.checkpoint_bytes(job(mesh, zero=zero)) == pytest.approx(12 * params, rel=1e-3)


def test_break_even_is_where_both_costs_are_equal():
    one = job("fsdp=8")
    saving = cost.checkpoint_cost(one, failures_per_day=0.1, storage_bytes_per_s=2e9, restart_s=300)
    even = cost.break_even(saving, price_share=0.5)
    spot = cost.checkpoint_cost(one, failures_per_day=even, storage_bytes_per_s=2e9, restart_s=300)
    money = [0.5 / (1 - spot.lost), 1.0 / (1 - saving.lost)]
    assert money[0] == pytest.approx(money[1], rel=1e-3)


def test_storage_does_not_grow_with_the_number_of_nodes_without_limit():
    rates = [cost.storage_rate(2e9, Cluster.of(GPUS["h100"], gpus)) for gpus in (8, 64, 16384)]
    assert rates == [2e9, 16e9, 2e12]


def test_a_save_costs_its_copy_its_write_and_the_agreement_of_all_processes():
    one = job("fsdp=8")
    saving = cost.checkpoint_cost(one, failures_per_day=1, storage_bytes_per_s=2e9, restart_s=300)
    write = saving.bytes / 2e9 + 8 * 5 / 2048
    assert saving.write_s == pytest.approx(write)
    assert saving.stall_s == pytest.approx(saving.bytes / 8 / 10e9 + 0.1 + 0.1 * write)
    assert saving.interval_s == pytest.approx(max(write, cost.daly(saving.stall_s, 86400.0)))


def test_405b_on_16384_gpus_saves_every_few_minutes_and_makes_progress_as_published():
    """Llama 3's training made progress for more than 90 % of the time (section 3.3.4)."""
    flags = ["--config", str(ROOT / "configs" / "llama3_405b.toml"), "--gpus", "h100:16384"]
    batch = ["--train.global-batch-size=2048", "--compile=false"]
    config, _ = read_plan([*flags, *batch, "--data.sources=stdlib", "--data.tokenizer=bytes"])
    (cluster,) = clusters_of(config)
    spec = MeshSpec.parse("dp=64,fsdp=32,tp=8")
    choice = Candidate.of(Job.of(config.run, spec, cluster))
    saving, _ = price_run(config, choice)
    small, _ = price_run(config, Candidate.of(job("fsdp=8")))
    assert 120 < saving.interval_s < 900
    assert 0.02 < saving.lost < 0.10
    assert small.restart_s + 30 < saving.restart_s < 900
    set_by_user, _ = price_run(dataclasses.replace(config, restart_s=7.0), choice)
    assert set_by_user.restart_s == 7.0


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
