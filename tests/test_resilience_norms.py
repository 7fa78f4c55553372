"""The gradient norm of each data replica is that of its rows alone, and an odd one is reported."""

import math

import jax
import numpy as np
import pytest
import tiny as reference
from commands import records, run_here, tiny

from jaxdist.run.resilience.sdc_check import uneven_norms


@pytest.mark.parametrize("mesh", ["dp=4,tp=2", "dp=4,fsdp=2", "pp=2,dp=4"])
def test_norms_are_those_of_each_replicas_rows(mesh, expected):
    case = reference.Case("rotary", mesh)
    step, state = reference.step_of(case, replica_norms=True)
    batch = jax.device_put(reference.batch_of("rotary"), step.batch_sharding)
    _, metrics = step.train(state, batch, np.inf)
    norms = np.asarray(metrics["replica_norms"])
    assert norms.shape == (4,)
    # Sums of other orders in float32.
    np.testing.assert_allclose(norms, expected, rtol=1e-4)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """On one device, the gradient of each replica's rows alone."""
    step, _ = reference.step_of(reference.Case("rotary", "dp=1"), global_batch_size=4)
    batch = reference.batch_of("rotary")
    norms = []
    for first in range(0, 16, 4):
        _, start = reference.step_of(reference.Case("rotary", "dp=1"), global_batch_size=4)
        part = {field: values[first : first + 4] for field, values in batch.items()}
        _, metrics = step.train(start, jax.device_put(part, step.batch_sharding), np.inf)
        norms.append(float(metrics["grad_norm"]))
    return norms


def test_an_odd_norm_is_named_and_even_ones_are_not():
    assert uneven_norms([1.0, 1.05, 0.95, 1.0]) == ""
    assert "data replica 2: 1.2 (+20 %)" in uneven_norms([1.0, 1.0, 1.2, 1.0])
    assert "data replica 0: nan" in uneven_norms([math.nan, 1.0, 1.0])
    assert "data replica 1" not in uneven_norms([math.nan, 1.0, 1.0])
    assert "data replica 1: 0.5" in uneven_norms([1.0, 0.5, 1.0])


def test_a_run_reports_them(tmp_path):
    flags = ["--mesh=dp=4,tp=2", "--steps=3", "--train.replica_norms=true"]
    assert run_here("train", *tiny(*flags, f"--run-dir={tmp_path / 'run'}")) == 0
    assert "replica_norms" not in records(tmp_path / "run", "train")[0]
    uneven = [r for r in records(tmp_path / "run", "event") if r["event"] == "replica_norm_outlier"]
    assert uneven and "data replica" in uneven[0]["message"]  # two rows each: noise is above 10 %
