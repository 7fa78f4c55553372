"""A split backward pass gives the full gradients and runs each matmul once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_pipeline_program import products

from jaxdist.core import collectives
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.split_backward import split_layer


def layer(weights, x, constants):
    """Compute a gated layer with a norm, a cast weight, random bits and a constant."""
    key, angle = constants
    normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * weights["scale"]
    kept = jax.random.bernoulli(key, 0.7, x.shape)
    up = normed @ weights["up"].astype(jnp.bfloat16).astype(jnp.float32)
    hidden = jax.nn.silu(up) * jnp.cos(angle)
    return x + jnp.where(kept, hidden @ weights["down"], 0.0), None, {}


@pytest.fixture
def arguments():
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    weights = {"scale": 1 + 0.1 * draw(8), "up": draw(8, 32), "down": draw(32, 8)}
    return weights, draw(3, 5, 8), (jax.random.key(3), draw(32)), draw(3, 5, 8)


def test_sum_of_both_halves_is_the_full_gradient(arguments):
    weights, x, constants, dy = arguments
    split = split_layer(layer, weights, x, constants)
    y, _, saved = split.forward(weights, x, constants)
    dx, kept = split.input_gradient(weights, constants, saved, dy)
    grads = split.weight_gradient(weights, constants, kept)
    expected_y, pull = jax.vjp(lambda w, x: layer(w, x, constants)[0], weights, x)
    expected_grads, expected_dx = pull(dy)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, expected_grads)


def test_every_matmul_runs_once(arguments):
    weights, x, constants, dy = arguments
    split = split_layer(layer, weights, x, constants)
    _, _, saved = split.forward(weights, x, constants)
    _, kept = split.input_gradient(weights, constants, saved, dy)
    count = lambda function, *args: products(jax.make_jaxpr(function)(*args).jaxpr)
    forward = count(layer, weights, x, constants)
    assert forward > 0
    assert count(split.forward, weights, x, constants) == forward
    assert count(split.input_gradient, weights, constants, saved, dy) == forward
    assert count(split.weight_gradient, weights, constants, kept) == forward


def test_values_computed_from_weights_and_constants_are_not_saved(arguments):
    weights, x, constants, dy = arguments
    split = split_layer(layer, weights, x, constants)
    _, _, saved = split.forward(weights, x, constants)
    _, kept = split.input_gradient(weights, constants, saved, dy)
    rows = x.shape[:-1]
    assert all(value.shape[:2] == rows for value in saved), "activations only"
    others = [value for value in kept if value.shape[:2] != rows]
    # The gradient of the scale is a sum: it is saved as the sum, not as its terms.
    expected = jax.grad(lambda w: jnp.vdot(layer(w, x, constants)[0], dy))(weights)["scale"]
    assert len(others) == 1
    np.testing.assert_allclose(others[0], expected, rtol=1e-5)
    # The inputs of both matmuls, and the gradients of their outputs.
    assert sorted(value.shape[2:] for value in kept if value.shape[:2] == rows) == [
        (8,),
        (8,),
        (32,),
        (32,),
    ]


def test_gathered_and_upcast_values_are_saved_in_their_original_form():
    """Two devices, each with 4 of 8 tokens of width 16 in bfloat16, and half of 64 hidden units."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    weights = {"up": draw(16, 64), "down": draw(64, 16)}
    x, dy = draw(3, 8, 16).astype(jnp.bfloat16), draw(3, 8, 16).astype(jnp.bfloat16)
    between = []

    def sharded_layer(weights, x, _):
        full = collectives.all_gather(x, "tensor", dim=1).astype(jnp.float32)
        hidden = jnp.tanh(full @ weights["up"])
        out = collectives.reduce_scatter(hidden @ weights["down"], "tensor", dim=1)
        return x + out.astype(x.dtype), None, {}

    def halved(weights, x, dy):
        halves = split_layer(sharded_layer, weights, x, (), recompute_enlarged=True)
        _, _, saved = halves.forward(weights, x, ())
        dx, kept = halves.input_gradient(weights, (), saved, dy)
        between.extend([saved, kept])
        return dx, halves.weight_gradient(weights, (), kept)

    def full(weights, x, dy):
        _, pull = jax.vjp(lambda weights, x: sharded_layer(weights, x, ())[0], weights, x)
        weight_grads, dx = pull(dy)
        return dx, weight_grads

    split = {"up": P(None, "tensor"), "down": P("tensor", None)}
    by_sequence = P(None, "tensor", None)
    run = lambda function: jax.jit(
        jax.shard_map(
            function,
            mesh=MeshSpec.parse("tp=2").build(jax.devices()[:2]),
            in_specs=(split, by_sequence, by_sequence),
            out_specs=(by_sequence, split),
        )
    )(weights, x, dy)
    dx, grads = run(halved)
    expected_dx, expected = run(full)
    np.testing.assert_array_equal(dx, expected_dx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, expected)
    for values in between:
        tokens = [value for value in values if value.shape[-1] == 16]
        assert tokens
        assert all(value.shape == (3, 4, 16) and value.dtype == jnp.bfloat16 for value in tokens)
