"""The data axes: rows of a batch on each replica, and one reduction of their gradients per step.

Parameters enter the differentiated function marked as varying (`localise`), so that its gradients
are each device's own sums; `reduce_gradients` then adds them over every axis a leaf is not sharded
on, by reduce-scatter where ZeRO wants the result sharded and by all-reduce elsewhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.sharding import Layout, axes_of, dim_of
from jaxdist.core.types import Array, Batch, Params


def summed_axes(layout: Layout) -> tuple[str, ...]:
    """Axes in use over which a replicated parameter's local gradients differ.

    `tensor` belongs to them only under sequence parallelism, where each device sees other tokens;
    `pipeline` always, since only the first stage embeds and only the last computes the loss.
    """
    axes = layout.batch_axes
    if layout.sequence_parallel and layout.sizes["tensor"] > 1:
        axes = (*axes, "tensor")
    if layout.sizes["pipeline"] > 1:
        axes = ("pipeline", *axes)
    return axes


def localise(params: Params, layout: Layout) -> Params:
    """Parameters whose gradients stay local sums until `reduce_gradients`."""
    return collectives.vary(params, summed_axes(layout))


def scatter_gradients(
    grads: Params, from_specs: Any, to_specs: Any, axes: tuple[str, ...]
) -> Params:
    """Reduce-scatter over `axes` the local gradients that `to_specs` shards and `from_specs` not.

    The others stay local sums: nothing is moved for them.
    """

    def leaf(source: P, target: P, grad: Array) -> Array:
        for axis in axes:
            dim = dim_of(target, axis)
            if dim is not None and dim_of(source, axis) is None:
                grad = collectives.reduce_scatter(grad, axis, dim=dim)
        return grad

    return jax.tree.map(leaf, from_specs, to_specs, grads, is_leaf=lambda x: isinstance(x, P))


def reduce_gradients(
    grads: Params, from_specs: Any, to_specs: Any, layout: Layout, axes: tuple[str, ...]
) -> Params:
    """Sum local gradients over `axes`, each leaf ending as `to_specs` says.

    Args:
        grads: local gradients, laid out as `from_specs`.
        from_specs: specs of the leaves as they are.
        to_specs: the same, plus the axes over which the result shall be sharded.
        layout: for the sizes of the axes; those of size 1 are left out.
        axes: axes to sum over; those a leaf is already sharded on are left out.
    """
    axes = tuple(axis for axis in axes if layout.sizes[axis] > 1)

    def leaf(target: P, grad: Array) -> Array:
        rest = tuple(axis for axis in axes if dim_of(target, axis) is None)
        return collectives.all_reduce(grad, rest) if rest else grad

    grads = scatter_gradients(grads, from_specs, to_specs, axes)
    return jax.tree.map(leaf, to_specs, grads, is_leaf=lambda x: isinstance(x, P))


def squared_norm(grads: Params, specs: Any, layout: Layout) -> Array:
    """Sum of squares of reduced gradients over the whole model, equal on every device. float32."""
    by_axes: dict[tuple[str, ...], Array] = {}
    for spec, grad in zip(
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        jax.tree.leaves(grads),
        strict=True,
    ):
        axes = tuple(sorted(axis for axis in axes_of(spec) if axis in layout.manual_axes))
        square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
        by_axes[axes] = by_axes.get(axes, jnp.zeros((), jnp.float32)) + square
    return sum(
        (collectives.all_reduce(part, axes) if axes else part for axes, part in by_axes.items()),
        start=jnp.zeros((), jnp.float32),
    )


def has_replica_norms(layout: Layout) -> bool:
    """Whether gradients are whole on each data replica before they are reduced."""
    return layout.sizes["data"] > 1 and layout.zero < 2


def replica_norms(grads: Params, specs: Any, weight: Array, layout: Layout) -> Array:
    """Norm of each data replica's own mean gradient, [data]; for debugging: it moves gradients.

    Args:
        grads: local sums before `reduce_gradients`.
        specs: of their leaves, none sharded over `data`.
        weight: of this device's rows.
        layout: for the axes.
    """
    others = tuple(axis for axis in summed_axes(layout) if axis != "data")
    own = reduce_gradients(grads, specs, specs, layout, others)
    groups = tuple(axis for axis in ("pipeline", "fsdp") if layout.sizes[axis] > 1)
    weight = collectives.all_reduce(weight, groups) if groups else weight
    norm = jnp.sqrt(squared_norm(own, specs, layout)) / jnp.where(weight > 0, weight, 1)
    places = jnp.arange(layout.sizes["data"])
    mine = jnp.where(places == collectives.group_index("data"), norm, 0)
    return collectives.all_reduce(mine, "data")


def number_rows(batch: Batch, layout: Layout) -> Batch:
    """Add `rows`, each local row's index in the global batch."""
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    first = collectives.group_index(layout.batch_axes) * num_rows if layout.batch_axes else 0
    return {**batch, "rows": first + jnp.arange(num_rows, dtype=jnp.int32)}


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """[rows, ...] -> [num_microbatches, rows / num_microbatches, ...] of this device's rows.

    Raises:
        ValueError: the rows cannot be cut into equal microbatches.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % num_microbatches:
        raise ValueError(
            f"train.num_microbatches={num_microbatches} does not divide the {rows} rows that each "
            "device has of a batch. Use a divisor, or another train.global_batch_size."
        )
    return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
