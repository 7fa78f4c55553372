"""Frozen parameters: they do not change, cost nothing, and do not affect the others."""

import dataclasses

import jax
import numpy as np
import pytest
from refusals import missing, refused
from test_step import put_batch
from tiny import (
    LEARNING_RATE,
    Case,
    initial_state,
    largest,
    make_update,
    model_of,
    reference,
    step_of,
    text_batch,
)

from jaxdist import optim
from jaxdist.optim import OptimConfig, make_optimizer

FROZEN = ["embed", "layers/attention", "params/layers/mlp/down"]


@pytest.mark.parametrize(
    "optimizer, mesh",
    [("adamw", "dp=2,fsdp=2,tp=2"), ("lion", "pp=2,tp=2"), ("muon", "dp=2,fsdp=2,tp=2")],
)
def test_frozen_parts_stay_and_the_rest_trains_as_if_they_had_no_gradient(optimizer, mesh):
    start, grads = initial_state("rotary").params, reference("rotary").grads
    config = OptimConfig(optimizer=optimizer, eps=1e-3, freeze=FROZEN)
    axes = model_of("rotary").axes
    moves = jax.tree_util.tree_map_with_path(lambda path, _: named(path) not in STAYING, start)
    assert sum(jax.tree.leaves(moves)) == len(jax.tree.leaves(moves)) - len(STAYING)
    norm = np.sqrt(
        sum(
            np.square(g, dtype=np.float64).sum()
            for g, move in zip(jax.tree.leaves(grads), jax.tree.leaves(moves), strict=True)
            if move
        )
    )
    clip = 0.5 * norm
    unfrozen = make_optimizer(dataclasses.replace(config, freeze=[]), axes)
    scaled = jax.tree.map(lambda g: g * np.float32(clip / norm), grads)
    directions, _ = make_update(unfrozen)(scaled, unfrozen.init(start), start)
    step, state = step_of(
        Case("rotary", mesh),
        rule=make_optimizer(config, optim.with_frozen(config, axes)),
        max_grad_norm=clip,
        axes=optim.with_frozen(config, axes),
    )
    state, metrics = step.train(state, put_batch(step, text_batch()), np.inf)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    allowed = 2e-3 if optimizer == "lion" else 0  # signs of values that are 0 up to rounding

    def check(path, new, old, direction, move):
        if not move:
            np.testing.assert_array_equal(new, old, err_msg=named(path))
            return
        apart = np.abs((old - new) / LEARNING_RATE - direction)
        bound = 1e-3 * largest(jax.device_get(directions)) + 2e-5
        assert np.mean(apart > bound) <= allowed, named(path)

    jax.tree_util.tree_map_with_path(
        check, jax.device_get(state.params), start, jax.device_get(directions), moves
    )


def named(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


STAYING = {
    named(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(initial_state("rotary").params)
    if named(path).startswith(("embed/", "layers/attention/")) or named(path) == "layers/mlp/down"
}


def test_frozen_parts_have_no_moments_and_no_weight_gradients():
    config = OptimConfig(freeze=["layers/mlp", "layers/attention"])

    def program(config):
        axes = optim.with_frozen(config, model_of("rotary").axes)
        step, state = step_of(Case("rotary", "1"), rule=make_optimizer(config, axes), axes=axes)
        lowered = step.train.lower(state, put_batch(step, text_batch()), np.inf)
        elements = sum(x.size for x in jax.tree.leaves(state.opt_state))
        return elements, lowered.compile().cost_analysis()["flops"]

    small, few = program(config)
    large, many = program(OptimConfig())
    params = initial_state("rotary").params
    inside = sum(
        x.size for x in jax.tree.leaves([params["layers"][k] for k in ("mlp", "attention")])
    )
    missing = 2 * inside - 2 * len(
        jax.tree.leaves([params["layers"]["mlp"], params["layers"]["attention"]])
    )
    assert large - small == missing  # a scalar replaces each moment
    assert few < 0.9 * many


def test_invalid_freeze_settings_are_reported():
    axes = model_of("rotary").axes
    (unknown,) = optim.frozen_problems(OptimConfig(freeze=["layers/mlpp", "embed"]), axes)
    assert "'layers/mlpp'" in unknown and "layers/mlp/down" in unknown
    (everything,) = optim.frozen_problems(OptimConfig(freeze=sorted(axes)), axes)
    assert missing(everything, "optim.freeze=", "nothing") == []
    with refused(everything, error=ValueError):
        optim.with_frozen(OptimConfig(freeze=sorted(axes)), axes)
