"""Gradients over the mesh: each device's own sums, and their one reduction per step.

Parameters enter the differentiated function as varying (`collectives.vary` over
`Layout.summed_axes`), so its gradients are each device's own sums. Everything here runs inside
`jax.shard_map`: arrays are local. Specs are trees like the parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import axes_of, dim_of
from jaxdist.core.types import Array, Params


def scatter_gradients(
    grads: Params, from_specs: Any, to_specs: Any, axes: tuple[str, ...]
) -> Params:
    """Reduce-scatter over `axes` the local gradients that `to_specs` shards and `from_specs` not.

    Such a float32 leaf [..., n · d, ...] becomes [..., d, ...]. The others stay local sums.
    """

    def leaf(source: P, target: P, grad: Array) -> Array:
        """Return the local sum [*dims], or this device's shard of it if `target` shards it."""
        for axis in axes:
            dim = dim_of(target, axis)
            if dim is not None and dim_of(source, axis) is None:
                grad = collectives.reduce_scatter(grad, axis, dim=dim)
        return grad

    return jax.tree.map(leaf, from_specs, to_specs, grads, is_leaf=lambda x: isinstance(x, P))


def reduce_gradients(
    grads: Params, from_specs: Any, to_specs: Any, axes: tuple[str, ...]
) -> Params:
    """Sum local float32 gradients [...] of `from_specs` over those `axes` that do not shard them.

    The layout of the result, `to_specs`, may shard over more axes, by reduce-scatter.
    """

    def leaf(target: P, grad: Array) -> Array:
        rest = tuple(axis for axis in axes if dim_of(target, axis) is None)
        return collectives.all_reduce(grad, rest) if rest else grad

    grads = scatter_gradients(grads, from_specs, to_specs, axes)
    return jax.tree.map(leaf, to_specs, grads, is_leaf=lambda x: isinstance(x, P))


def squared_norm(grads: Params, specs: Any, axes: tuple[str, ...]) -> Array:
    """Sum squares of reduced gradients over all parameters, float32 [], equal on every device."""
    by_axes: dict[tuple[str, ...], Array] = {}
    for spec, grad in zip(
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
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
