"""Manual forward and backward of a stack of layers, layer by layer.

Differentiating a scan over layers would return a second float32 copy of all gradients. Here the
backward is a separate scan that adds each layer's gradient to the totals.

x, y and their gradients are [microbatch, seq_shard, d_model]. Residuals are a list of
[layers, ...]. Totals are float32 [virtual_stages, layers, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core.parallel import tensor
from jaxdist.core.parallel.pipeline.split_backward import SplitLayer
from jaxdist.core.types import Array, Params, Sums


class Layers(NamedTuple):
    """The layers of one virtual stage.

    Attributes:
        constants: non-differentiated inputs, [layers, ...]: index in the model, frozen weights.
        aux: further inputs, identical for every layer.
        virtual: int32 [], index of these layers in totals [virtual_stages, layers, ...].
    """

    weights: Params
    constants: tuple[Array, Params]
    aux: Any
    virtual: Array


class LayerwiseBackward:
    """Runs a layer with split backward (`split_backward.py`) over a stack of layers.

    Its constants are ((index, frozen weights), aux). `reduce` reduces the gradients of one layer.
    """

    def __init__(self, layer: SplitLayer, reduce: Callable[[Params], Params]) -> None:
        self._layer = layer
        self._reduce = reduce

    def forward(self, layers: Layers, x: Array) -> tuple[Array, Sums, list[Array]]:
        """Return (y, sums, residuals [layers, ...]) from x [rows, seq_shard, d_model]."""

        def one(x: Array, layer: tuple[Any, Params]) -> tuple[Array, tuple[Sums, list[Array]]]:
            fixed, weights = layer
            y, sums, saved = self._layer.forward(weights, x, (fixed, layers.aux))
            return y, (sums, saved)

        y, (sums, saved) = lax.scan(one, x, (layers.constants, layers.weights))
        return y, tensor.add_layers(sums), saved

    def gradient(
        self, layers: Layers, saved: list[Array], dy: Array, totals: Params
    ) -> tuple[Array, Params]:
        """Return dx [rows, seq_shard, d_model] and the totals plus this stack's weight gradients.

        `saved` are the residuals of `forward`, [layers, ...] each.
        """

        def one(
            carry: tuple[Array, Params], layer: tuple[Array, Any, Params, list[Array]]
        ) -> tuple[tuple[Array, Params], None]:
            """Run one layer; totals are [virtual_stages, layers, ...] with its gradients added."""
            dy, totals = carry
            slot, fixed, weights, own = layer
            dx, grads = self._layer.backward(weights, (fixed, layers.aux), own, dy)
            return (dx, self._add(totals, grads, layers.virtual, slot)), None

        xs = (_layer_slots(layers), layers.constants, layers.weights, saved)
        return lax.scan(one, (dy, totals), xs, reverse=True)[0]

    def input_gradient(
        self, layers: Layers, saved: list[Array], dy: Array
    ) -> tuple[Array, list[Array]]:
        """Return dx [rows, seq_shard, d_model] and the inputs of the deferred weight gradients."""

        def one(dy: Array, layer: tuple[Any, Params, list[Array]]) -> tuple[Array, list[Array]]:
            fixed, weights, own = layer
            return self._layer.input_gradient(weights, (fixed, layers.aux), own, dy)

        return lax.scan(one, dy, (layers.constants, layers.weights, saved), reverse=True)

    def weight_gradient(self, layers: Layers, kept: list[Array], totals: Params) -> Params:
        """Add the deferred weight gradients to totals [virtual_stages, layers, ...]."""

        def one(
            totals: Params, layer: tuple[Array, Any, Params, list[Array]]
        ) -> tuple[Params, None]:
            """Add one layer's deferred weight gradients to totals [virtual_stages, layers, ...]."""
            slot, fixed, weights, own = layer
            grads = self._layer.weight_gradient(weights, (fixed, layers.aux), own)
            return self._add(totals, grads, layers.virtual, slot), None

        return lax.scan(
            one, totals, (_layer_slots(layers), layers.constants, layers.weights, kept)
        )[0]

    def _add(self, totals: Params, grads: Params, virtual: Array, slot: Array) -> Params:
        """Add a layer's gradients to totals [virtual_stages, layers, ...], in place."""

        def leaf(total: Array, grad: Array) -> Array:
            start: list[Any] = [virtual, slot, *([0] * grad.ndim)]
            old = lax.dynamic_slice(total, start, (1, 1, *grad.shape))
            return lax.dynamic_update_slice(total, old + grad.astype(total.dtype), start)

        return jax.tree.map(leaf, totals, self._reduce(grads))


def _layer_slots(layers: Layers) -> Array:
    """Return the index of each layer in its virtual stage, int32 [layers]."""
    return jnp.arange(layers.constants[0].shape[0])
