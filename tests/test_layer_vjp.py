"""Forward and backward of a layer: gradients, products and saved values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_pipeline import products

from jaxdist.core import collectives
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.layer_vjp import layer_vjp


def layer(weights, x, constants):
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


def test_forward_and_backward_equal_jax(arguments):
    weights, x, constants, dy = arguments
    vjp = layer_vjp(layer, weights, x, constants)
    y, _, saved = vjp.forward(weights, x, constants)
    dx, grads = vjp.backward(weights, constants, saved, dy)
    expected_y, pull = jax.vjp(lambda w, x: layer(w, x, constants)[0], weights, x)
    expected_grads, expected_dx = pull(dy)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, expected_grads)


def test_every_product_runs_once(arguments):
    weights, x, constants, dy = arguments
    vjp = layer_vjp(layer, weights, x, constants)
    _, _, saved = vjp.forward(weights, x, constants)
    count = lambda function, *args: products(jax.make_jaxpr(function)(*args).jaxpr)
    forward = count(layer, weights, x, constants)
    assert forward > 0
    assert count(vjp.forward, weights, x, constants) == forward
    assert count(vjp.backward, weights, constants, saved, dy) == 2 * forward


def test_a_remat_policy_decides_what_is_saved(arguments):
    weights, x, constants, dy = arguments
    everything = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    vjp = layer_vjp(everything, weights, x, constants)
    _, _, saved = vjp.forward(weights, x, constants)
    assert [value.shape for value in saved] == [(x.size,)]
    count = lambda function, *args: products(jax.make_jaxpr(function)(*args).jaxpr)
    forward = count(layer, weights, x, constants)
    assert count(vjp.backward, weights, constants, saved, dy) > 2 * forward


def test_values_computed_from_weights_and_constants_are_not_saved(arguments):
    weights, x, constants, _ = arguments
    _, _, saved = layer_vjp(layer, weights, x, constants).forward(weights, x, constants)
    assert saved
    rows = x.size // x.shape[-1]
    assert {value.size // rows for value in saved} <= {1, 8, 32}, "activations only"
    assert not any(value.size in (8 * 32, 8, 32) for value in saved), "no weights, no constants"


def test_gathered_and_upcast_values_are_saved_in_their_original_form():
    """Two devices, each with 4 of 8 tokens of width 16 in bfloat16, and half of 64 hidden units."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    weights = {"up": draw(16, 64), "down": draw(64, 16)}
    x, dy = draw(3, 8, 16).astype(jnp.bfloat16), draw(3, 8, 16).astype(jnp.bfloat16)
    saved_values = []

    def sharded_layer(weights, x, _):
        full = collectives.all_gather(x, "tensor", dim=1).astype(jnp.float32)
        hidden = jnp.tanh(full @ weights["up"])
        out = collectives.reduce_scatter(hidden @ weights["down"], "tensor", dim=1)
        return x + out.astype(x.dtype), None, {}

    def ours(weights, x, dy):
        vjp = layer_vjp(sharded_layer, weights, x, ())
        _, _, saved = vjp.forward(weights, x, ())
        saved_values.extend(saved)
        return vjp.backward(weights, (), saved, dy)

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
    dx, grads = run(ours)
    expected_dx, expected = run(full)
    np.testing.assert_array_equal(dx, expected_dx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, expected)
    assert (jnp.dtype("bfloat16"), 3 * 4 * 16) in [(x.dtype, x.size) for x in saved_values]
    assert all(x.size != 3 * 8 * 16 for x in saved_values), "the gathered tokens are not saved"
