"""Number formats and the float16 loss scale, alone; in a step they are tested in test_step."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist.core import precision
from jaxdist.core.precision import PrecisionConfig, initial_loss_scale, update_loss_scale


@pytest.mark.parametrize(
    ("asked", "platform", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "gpu", "bfloat16"),
        ("float32", "gpu", "float32"),
        ("float16", "cpu", "float16"),
    ],
)
def test_auto_follows_the_platform(asked, platform, dtype):
    assert PrecisionConfig(compute_dtype=asked).resolve(platform) == jnp.dtype(dtype)


@pytest.mark.parametrize(
    ("asked", "compute", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_gradients_are_summed_as_they_leave_products_unless_asked_otherwise(asked, compute, dtype):
    """Not in float16, whose range is narrow."""
    assert PrecisionConfig(reduce_dtype=asked).resolve_reduce(compute) == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_float16_has_a_loss_scale(dtype):
    assert initial_loss_scale(dtype) == {}
    assert update_loss_scale({}, jnp.array(False)) == {}


def test_the_scale_halves_on_overflow_and_doubles_after_a_run_of_finite_steps(monkeypatch):
    monkeypatch.setattr(precision, "INITIAL_LOSS_SCALE", 8.0)
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    state = initial_loss_scale(jnp.float16)
    update = jax.jit(update_loss_scale)
    seen = []
    # The first overflow is on the step that would double the scale, the second is not.
    for finite in (True, True, True, True, True, False, True, False, True, True, True):
        state = update(state, finite)
        seen.append((float(state["scale"]), int(state["finite_steps"])))
    assert seen[:6] == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (8, 0)]
    assert seen[6:] == [(8, 1), (4, 0), (4, 1), (4, 2), (8, 0)]


def test_the_scale_never_falls_below_one(monkeypatch):
    monkeypatch.setattr(precision, "INITIAL_LOSS_SCALE", 2.0)
    state = initial_loss_scale(jnp.float16)
    for _ in range(3):
        state = update_loss_scale(state, jnp.array(False))
    assert float(state["scale"]) == 1
