"""Gradient norms of each data replica, before gradients are reduced; for debugging."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxdist.core import collectives
from jaxdist.core.parallel import reduction
from jaxdist.core.sharding import Layout
from jaxdist.core.types import Array, Params


def has_replica_norms(layout: Layout) -> bool:
    """Whether gradients are whole on each data replica before they are reduced."""
    return bool(layout.replica_axes) and layout.zero < 2


def replica_norms(grads: Params, specs: Any, weight: Array, layout: Layout) -> Array:
    """Norm of each data replica's own mean gradient, float32 [replicas]; it moves gradients.

    Args:
        grads: local sums before `reduce_gradients`, float32.
        specs: of their leaves, none sharded over the replicas.
        weight: float32 [], of this device's rows.
        layout: for the axes.
    """
    replicas = layout.replica_axes
    others = tuple(axis for axis in layout.summed_axes if axis not in replicas)
    own = reduction.reduce_gradients(grads, specs, specs, others)
    groups = tuple(axis for axis in layout.loss_axes if axis not in replicas)
    weight = collectives.all_reduce(weight, groups) if groups else weight
    squared = reduction.squared_norm(own, specs, layout.manual_axes)
    norm = jnp.sqrt(squared) / jnp.where(weight > 0, weight, 1)
    places = jnp.arange(collectives.group_size(replicas))
    mine = jnp.where(places == collectives.group_index(replicas), norm, 0)
    return collectives.all_reduce(mine, replicas)
