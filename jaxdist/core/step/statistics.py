"""Running averages of batch statistics: parameters that are updated without gradients.

A model marks them with `Parameter(dims, update="statistic")`. Its forward pass returns the batch's
statistics as `Sums[BATCH_STATISTICS]`. The step passes these on in place of gradients, hidden from
the optimizer.

Source: Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 2; the momentum is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.core import collectives
from jaxdist.core.types import BATCH_STATISTICS, Array, Params, Sums

MOMENTUM = 0.1
"""Weight of the newest batch in a running average."""


def pop_batch_stats(sums: Sums, num_microbatches: int) -> tuple[Sums, Params]:
    """Split batch statistics [...] from `sums`; return their mean over microbatches, or {}."""
    rest = {name: value for name, value in sums.items() if name != BATCH_STATISTICS}
    batch_stats: Any = sums.get(BATCH_STATISTICS, {})
    return rest, jax.tree.map(lambda x: x / num_microbatches, batch_stats)


def insert(axes: Params, grads: Params, batch_stats: Params) -> Params:
    """Return gradients [...] in which running averages have the batch statistic instead."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(batch_stats))

    def leaf(path: Any, dims: Any, grad: Array) -> Array:
        """Return the gradient [*dims]; for a running average, the batch statistic."""
        if dims.update != "statistic":
            return grad
        if path not in by_path:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"{name} is a running average, and Model.head returned nothing for it. Add "
                "`jaxdist.models.layers.batch_statistics(module, context)` to its sums."
            )
        return by_path[path]

    return jax.tree_util.tree_map_with_path(leaf, axes, grads)


def mask(axes: Params, grads: Params) -> Params:
    """Return gradients [...] with zeros for running averages, as input of the optimizer."""
    zero = lambda dims, g: collectives.zeros_like(g) if dims.update == "statistic" else g
    return jax.tree.map(zero, axes, grads)


def update_running_stats(axes: Params, updated: Params, old: Params, grads: Params) -> Params:
    """Return updated parameters [...]; running averages move toward the batch statistics."""

    def leaf(dims: Any, new: Array, before: Array, batch_stats: Array) -> Array:
        return before + MOMENTUM * (batch_stats - before) if dims.update == "statistic" else new

    return jax.tree.map(leaf, axes, updated, old, grads)


def has_averages(axes: Params) -> bool:
    """Return True if a model has running averages."""
    return any(dims.update == "statistic" for dims in jax.tree.leaves(axes))
