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
from jaxdist.core.parallel.pipeline.executor import loop_over, run_if
from jaxdist.core.parallel.pipeline.layer_vjp import LayerVjp
from jaxdist.core.types import Array, Params, Sums


class Layers(NamedTuple):
    """The layers of one virtual stage.

    Attributes:
        weights, frozen: this stage's trained, frozen parameters, [virtual_stages, layers, ...].
        virtual: int32 [], index of these layers among the virtual stages.
        indices: model index of each layer, int32 [layers].
        aux: further inputs, identical for every layer.
        num_layers: int32 [], number of layers; the others are padding.
        least: smallest number of layers of a virtual stage.
        as_loops: how padding is skipped, see `run_if`.
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

        def one(carry: tuple[Array, list[Array]], index: Array) -> tuple[Any, Sums]:
            """Run the layer at int32 [] `index`."""
            x, residuals = carry
            weights, constants = layers.one(index)
            y, sums, saved = self._layer.forward(weights, x, constants)
            write = lambda buffer, value: lax.dynamic_update_slice(
                buffer, value[None, None], (slot, index, *([0] * value.ndim))
            )
            return (y, list(map(write, residuals, saved))), sums

        (y, residuals), sums = over_layers(layers, one, (x, residuals), unroll=self._unroll)
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

        def one(carry: tuple[Array, Params], index: Array) -> tuple[tuple[Array, Params], None]:
            """Run a layer backward; add its gradients to totals [virtual_stages, layers, ...]."""
            dy, totals = carry
            weights, constants = layers.one(index)
            read = lambda buffer: lax.dynamic_slice(
                buffer, (slot, index, *([0] * (buffer.ndim - 2))), (1, 1, *buffer.shape[2:])
            ).reshape(buffer.shape[2:])
            dx, grads = self._layer.backward(weights, constants, list(map(read, residuals)), dy)
            grads = mask(self._reduce(grads))
            return (dx, _add(totals, grads, layers.virtual, index)), None

        return over_layers(layers, one, (dy, totals), reverse=True, unroll=self._unroll)[0]


def _add(totals: Params, grads: Params, virtual: Array, slot: Array) -> Params:
    """Add a layer's gradients to totals [virtual_stages, layers, ...], in place."""

    def leaf(total: Array, grad: Array) -> Array:
        start: Any = (virtual, slot, *([0] * grad.ndim))
        old = lax.dynamic_slice(total, start, (1, 1, *grad.shape))
        return lax.dynamic_update_slice(total, old + grad.astype(total.dtype), start)

    return jax.tree.map(leaf, totals, grads)


def over_layers(
    layers: Layers,
    one: Callable[[Any, Array], tuple[Any, Any]],
    carry: Any,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Scan `one` over the virtual stage's layers 0, 1, ...; outputs [layers, ...], padding 0."""
    slots, least = jnp.arange(layers.indices.shape[0]), layers.least
    options: dict[str, Any] = dict(reverse=reverse, unroll=unroll)
    if least == slots.size:
        return loop_over(slots, one, carry, **options)
    kinds = jax.eval_shape(one, carry, slots[0])[1]

    def maybe(carry: Any, index: Array) -> tuple[Any, Any]:
        skipped = carry, jax.tree.map(collectives.zeros_like, kinds)
        run = lambda value: one(value[0], index)
        return run_if(index < layers.num_layers, run, skipped, layers.as_loops)

    outputs = []
    for part, body in ((slots[:least], one), (slots[least:], maybe))[:: -1 if reverse else 1]:
        if part.size:
            carry, out = loop_over(part, body, carry, **options)
            outputs.append(out)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
