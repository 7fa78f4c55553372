"""Cost of a run: money, checkpoint intervals, spot capacity."""

import math

import numpy as np
import pytest
from test_estimate import job

from jaxdist.models.weights import weights_of
from jaxdist.plan.estimate import cost


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


def test_no_checkpoint_is_needed_without_failures():
    one = job("fsdp=8")
    saving = cost.checkpoint_cost(one, failures_per_day=0, storage_bytes_per_s=2e9, restart_s=300)
    assert math.isinf(saving.interval_s) and saving.lost == 0.0


def test_checkpoint_size_is_parameters_and_moments():
    params = sum(w.size for w in weights_of(job().model))
    for mesh, zero in (("dp=1", 0), ("dp=8", 1), ("fsdp=4,tp=2", 0)):
        assert cost.checkpoint_bytes(job(mesh, zero=zero)) == pytest.approx(12 * params, rel=1e-3)


def test_break_even_is_where_both_costs_are_equal():
    one = job("fsdp=8")
    saving = cost.checkpoint_cost(one, failures_per_day=0.1, storage_bytes_per_s=2e9, restart_s=300)
    even = cost.break_even(saving, price_share=0.5, restart_s=300)
    spot = cost.checkpoint_cost(one, failures_per_day=even, storage_bytes_per_s=2e9, restart_s=300)
    money = [0.5 / (1 - spot.lost), 1.0 / (1 - saving.lost)]
    assert money[0] == pytest.approx(money[1], rel=1e-3)
