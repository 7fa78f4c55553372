"""Number formats and the float16 loss scale in isolation; test_step tests them in a step."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from jaxdist.core import precision
from jaxdist.core.precision import PrecisionConfig, initial_loss_scale, update_loss_scale
from jaxdist.core.state import TrainState
from jaxdist.core.step.train_step import _make_begin, _make_train, move_copies


@pytest.mark.parametrize(
    ("setting", "platform", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "gpu", "bfloat16"),
        ("float32", "gpu", "float32"),
        ("float16", "cpu", "float16"),
    ],
)
def test_auto_dtype_depends_on_the_platform(setting, platform, dtype):
    assert PrecisionConfig(compute_dtype=setting).resolve(platform) == jnp.dtype(dtype)


@pytest.mark.parametrize(
    ("setting", "compute", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_gradients_are_summed_in_the_compute_dtype_by_default(setting, compute, dtype):
    """float16 is the exception, because its range is narrow."""
    assert PrecisionConfig(reduce_dtype=setting).resolve_reduce(compute) == jnp.dtype(dtype)


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
    # The first overflow is on the step that would double the scale; the second is not.
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


@pytest.mark.parametrize(
    "loss, weight, norm, limit, applied, scale",
    [
        (1.0, 1.0, 1.0, math.inf, True, 16.0),
        (1.0, 1.0, math.inf, math.inf, False, 4.0),
        (math.nan, 1.0, 1.0, math.inf, False, 4.0),
        (1.0, 1.0, 1.0, 0.5, False, 16.0),  # a finite loss above the limit is no overflow
        (0.0, 0.0, 0.0, math.inf, False, 8.0),  # no labels: nothing was measured
        (0.0, 0.0, math.nan, math.inf, False, 8.0),
    ],
)
def test_step_on_which_the_loss_scale_doubles(
    monkeypatch, loss, weight, norm, limit, applied, scale
):
    """Check the update, the average and the loss scale of one step at the scale's boundary."""
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    state = TrainState(
        step=jnp.int32(7),
        params={"w": jnp.float32(2)},
        opt_state=jnp.float32(5),
        loss_scale={"scale": jnp.float32(8), "finite_steps": jnp.int32(2)},
        key=jax.random.key(0),
        copies={"ema": {"w": jnp.float32(1)}},
    )
    sums = {"loss": jnp.float32(loss), "weight": jnp.float32(weight)}
    step = _make_train(
        _make_begin(
            lambda params, batch, key, scale: (sums, {"w": scale}, jnp.float32(norm)),
            lambda step: jnp.float32(0.1),
        ),
        lambda state, grads, norm, rate: ({"w": jnp.float32(4)}, jnp.float32(6)),
        None,
        functools.partial(move_copies, decays={"ema": 0.75}),
    )
    state, metrics = step(state, {}, jnp.float32(limit))
    assert (bool(metrics["applied"]), float(metrics["loss_scale"])) == (applied, 8.0)
    assert (float(state.params["w"]), float(state.opt_state)) == ((4, 6) if applied else (2, 5))
    assert float(state.copies["ema"]["w"]) == (0.75 * 1 + 0.25 * 4 if applied else 1)
    assert (float(state.loss_scale["scale"]), int(state.step)) == (scale, 8)
    assert int(state.loss_scale["finite_steps"]) == (2 if scale == 8 else 0)
