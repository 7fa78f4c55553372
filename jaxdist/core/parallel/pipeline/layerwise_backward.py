"""Manual forward and backward of a stack of layers, layer by layer.

Differentiating a scan over layers would return a second float32 copy of all gradients, and a stack
of residuals to copy into a buffer. Here, the forward writes the residuals of each layer into the
buffer of the stage, and the backward reads them there and adds each layer's gradient to the totals.

x, y and their gradients are [microbatch, seq_shard, d_model]. Residuals are a list of
[slots, layers, size], a slot for each microbatch in flight of a virtual stage. Weights and totals
(float32) are [virtual_stages, layers, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.parallel import tensor
from jaxdist.core.parallel.pipeline.executor import run_if
from jaxdist.core.parallel.pipeline.layer_vjp import LayerVjp
from jaxdist.core.types import Array, Params, Sums


class Layers(NamedTuple):
    """The layers of one virtual stage.

    Attributes:
        weights, frozen: this stage's trained, frozen parameters, [virtual_stages, layers, ...].
        virtual: int32 [], index of these layers among the virtual stages.
        indices: model index of each layer, int32 [layers].
        aux: further inputs, identical for every layer.
        num_layers: int32 [], number of layers to run; the others are padding, or the stage is idle.
        least: smallest number of layers to run.
        as_loops: how layers are skipped, see `run_if`.
    """

    weights: Params
    frozen: Params
    virtual: Array
    indices: Array
    aux: Any
    num_layers: Array
    least: int
    as_loops: bool

    def one(self, slot: Any) -> tuple[Params, tuple[tuple[Array, Params], Any]]:
        """Return the trained weights [...] of layer `slot`, int32 [], and its other inputs."""

        def leaf(x: Array) -> Array:
            start = (self.virtual, slot, *([0] * (x.ndim - 2)))
            return lax.dynamic_slice(x, start, (1, 1, *x.shape[2:])).reshape(x.shape[2:])

        weights, frozen = jax.tree.map(leaf, (self.weights, self.frozen))
        index = lax.dynamic_index_in_dim(self.indices, slot, 0, keepdims=False)
        return weights, ((index, frozen), self.aux)


class LayerwiseBackward:
    """Runs a stack of layers, `unroll` per iteration; `reduce` maps each layer's gradients."""

    def __init__(self, layer: LayerVjp, reduce: Callable[[Params], Params], unroll: int) -> None:
        self._layer, self._reduce, self._unroll = layer, reduce, unroll

    def residuals_of_layer(self, layers: Layers, x: Array) -> list[Array]:
        """Return the arrays that one layer's forward of x [rows, seq_shard, d_model] saves."""
        weights, constants = layers.one(0)
        return self._layer.forward(weights, x, constants)[2]

    def forward(
        self, layers: Layers, x: Array, residuals: list[Array], slot: Array
    ) -> tuple[Array, Sums, list[Array]]:
        """Return (y, sums, residuals with those of x [rows, seq_shard, d_model] in `slot`)."""

        def run(x: Array, _: Any, weights: Params, others: Any) -> tuple[Array, list[Array], Sums]:
            y, sums, saved = self._layer.forward(weights, x, others)
            return y, saved, sums

        def write(residuals: list[Array], saved: list[Array], index: Any) -> list[Array]:
            """Write a layer's saved values [size] to residuals [slots, layers, size]."""
            start = lambda value: (slot, index, *([0] * value.ndim))
            leaf = lambda x, new: lax.dynamic_update_slice(x, new[None, None], start(new))
            return list(map(leaf, residuals, saved))

        y, residuals, sums = over_layers(layers, run, write, x, residuals, unroll=self._unroll)
        return y, tensor.add_layers(sums), residuals

    def gradient(
        self,
        layers: Layers,
        residuals: list[Array],
        slot: Array,
        dy: Array,
        totals: Params,
        mask: Callable[[Params], Params],
    ) -> tuple[Array, Params]:
        """Return dx [rows, seq_shard, d_model] of all layers, totals plus masked gradients."""

        def run(dy: Array, index: Any, weights: Params, others: Any) -> tuple[Array, Params, None]:
            """Return dx [rows, seq_shard, d_model] and weight gradients of the layer at `index`."""
            read = lambda buffer: lax.dynamic_slice(
                buffer, (slot, index, *([0] * (buffer.ndim - 2))), (1, 1, *buffer.shape[2:])
            ).reshape(buffer.shape[2:])
            dx, grads = self._layer.backward(weights, others, list(map(read, residuals)), dy)
            return dx, self._reduce(grads), None

        def add(totals: Params, grads: Params, index: Array) -> Params:
            """Add a layer's gradients [...] to totals [virtual_stages, layers, ...], in place."""

            def leaf(total: Array, grad: Array) -> Array:
                start: Any = (layers.virtual, index, *([0] * grad.ndim))
                old = lax.dynamic_slice(total, start, (1, 1, *grad.shape))
                return lax.dynamic_update_slice(total, old + grad.astype(total.dtype), start)

            return jax.tree.map(leaf, totals, mask(grads))

        options: dict[str, Any] = dict(reverse=True, unroll=self._unroll)
        return over_layers(layers, run, add, dy, totals, **options)[:2]


def over_layers(
    layers: Layers,
    run: Callable[[Array, Any, Params, Any], tuple[Array, Any, Any]],
    write: Callable[[Any, Any, Any], Any],
    x: Array,
    buffers: Any,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Array, Any, Any]:
    """Run the virtual stage's layers 0, 1, ... on x [rows, seq_shard, d_model].

    `run` maps (x, slot, *`Layers.one`) to (x, values, sums); `write` stores the values in buffers.
    Returns (x, buffers, sums [layers, ...]); sums of layers that do not run are 0.
    """

    def one(carry: tuple[Array, Any], slot: Any) -> tuple[tuple[Array, Any], Any]:
        """Run the layer at `slot`, int32 []."""
        x, values, sums = run(carry[0], slot, *layers.one(slot))
        return (x, write(carry[1], values, slot)), sums

    def maybe(carry: tuple[Array, Any], slot: Any) -> tuple[tuple[Array, Any], Any]:
        """Run the layer at `slot`, int32 [], unless it is padding or the stage is idle."""
        needed, inputs = slot < layers.num_layers, layers.one(slot)
        kinds = jax.eval_shape(lambda x: run(x, slot, *inputs), carry[0])
        values, sums = jax.tree.map(collectives.zeros_like, kinds[1:])
        if layers.as_loops:
            return run_if(needed, lambda now: one(now[0], slot), (carry, sums), as_loops=True)
        # XLA would copy buffers that a branch returns.
        compute = lambda now: run(now[0], slot, *inputs)
        x, values, sums = run_if(needed, compute, (carry[0], values, sums), as_loops=False)
        return (x, write(carry[1], values, slot)), sums

    every, least = range(layers.indices.shape[0]), layers.least
    carry, outputs = (x, buffers), []
    for part, body in ((every[:least], one), (every[least:], maybe))[:: -1 if reverse else 1]:
        # Known slots spare a branch the copies of its weights. XLA:GPU overlaps more in loops.
        if len(part) > (1 if layers.as_loops else unroll):
            slots = jnp.asarray(part)
            carry, out = lax.scan(body, carry, slots, reverse=reverse, unroll=unroll)
            outputs.append(out)
            continue
        for slot in part[:: -1 if reverse else 1]:
            carry, out = body(carry, slot)
            outputs.append(jax.tree.map(lambda x: x[None], out))
    return *carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
