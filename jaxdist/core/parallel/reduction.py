"""Sums of gradients over the mesh, their norm, and `Context.sum`.

Parameters enter the differentiated function as varying (`collectives.vary` over
`Layout.summed_axes`), so each device gets its own part of the gradient. All functions run inside
`jax.shard_map`: arrays are local. Specs are trees with the structure of the parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import axes_of, dim_of
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.types import Array, Params
from jaxdist.core.weights import SumOver


def scatter_gradients(
    grads: Params, from_specs: Any, to_specs: Any, axes: tuple[str, ...]
) -> Params:
    """Reduce-scatter over `axes` the leaves [..., n · d, ...] that only `to_specs` shards."""

    def leaf(source: P, target: P, grad: Array) -> Array:
        """Return the local gradient [*dims], or this device's shard of its sum."""
        for axis in axes:
            dim = dim_of(target, axis)
            if dim is not None and dim_of(source, axis) is None:
                grad = collectives.reduce_scatter(grad, axis, dim=dim)
        return grad

    return jax.tree.map(leaf, from_specs, to_specs, grads)


def reduce_gradients(
    grads: Params, from_specs: Any, to_specs: Any, axes: tuple[str, ...]
) -> Params:
    """Sum gradients [*dims] over the `axes` that do not shard `from_specs`, into `to_specs`."""

    def leaf(target: P, grad: Array) -> Array:
        rest = tuple(axis for axis in axes if dim_of(target, axis) is None)
        return collectives.all_reduce(grad, rest) if rest else grad

    grads = scatter_gradients(grads, from_specs, to_specs, axes)
    return jax.tree.map(leaf, to_specs, grads)


def squared_norm(grads: Params, specs: Any, axes: tuple[str, ...]) -> Array:
    """Return the sum of squares of reduced gradients, float32 [], the same on every device."""
    by_axes: dict[tuple[str, ...], Array] = {}
    for spec, grad in zip(
        jax.tree.leaves(specs),
        jax.tree.leaves(grads),
        strict=True,
    ):
        over = tuple(sorted(axis for axis in axes_of(spec) if axis in axes))
        square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
        by_axes[over] = by_axes.get(over, jnp.zeros((), jnp.float32)) + square
    return sum(
        (collectives.all_reduce(part, over) if over else part for over, part in by_axes.items()),
        start=jnp.zeros((), jnp.float32),
    )


def make_sum(layout: Layout) -> SumOver:
    """Make `Context.sum` for the axes of a layout."""
    positions = tuple(axis.name for axis in layout.used if axis.splits_positions)
    tensor = (TENSOR.name,) if TENSOR in layout.used else ()
    axes = {
        "batch": layout.batch_axes,
        "seq": positions,
        "seq_shard": positions + (tensor if layout.sequence_parallel else ()),
        "tensor": tensor,
    }

    def total(x: Any, over: str) -> Any:
        return collectives.all_reduce(x, axes[over]) if axes[over] else x

    return total
