"""Running averages of batch statistics: parameters that are updated without gradients.

A model marks them with `Parameter(dims, update="statistic")`. Its forward pass returns the batch's
statistics as `Sums[BATCH_STATISTICS]`. The step passes these on in place of gradients, hidden from
the optimizer, and in the same way the increments that a model computes from the step's sums.

Source: Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 2; the momentum is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.core import collectives
from jaxdist.core.types import LAYER_SUM, Array, Model, Params, Sums, Update
from jaxdist.core.weights import trained

MOMENTUM = 0.1
"""Weight of the newest batch in a running average."""


def insert_increments(model: Model, grads: Params, sums: Sums, order: Any) -> Params:
    """Return gradients with `Model.increments` in their place; `order`: see `LayerSplit`."""
    if model.increments is None:
        return grads
    layers = {name: value for name, value in sums.items() if name.startswith(LAYER_SUM)}
    increments = jax.tree.map(
        lambda x: x.at[order].get(mode="fill", fill_value=0), model.increments(layers)
    )
    return insert(trained(model.axes, model.axes), grads, increments, "increment")


def insert(axes: Params, grads: Params, values: Params, update: Update) -> Params:
    """Return gradients [...] with `values` for this update; raise `TypeError` if one is missing."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(values))
    for path, dims in jax.tree_util.tree_leaves_with_path(axes):
        if dims.update == update and path not in by_path:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(_MISSING[update].format(name))
    leaf = lambda path, dims, g: by_path[path] if dims.update == update else g
    return jax.tree_util.tree_map_with_path(leaf, axes, grads)


_MISSING = {
    "statistic": "{} is a running average, and Model.head returned nothing for it. Add "
    "`jaxdist.models.layers.batch_statistics(module, context)` to its sums.",
    "increment": "Model.increments returned nothing for {}. Add it to its tree.",
}


def mask(axes: Params, grads: Params) -> Params:
    """Return gradients [...] with zeros for averages and increments, as optimizer input."""
    zero = lambda dims, g: g if dims.update == "gradient" else collectives.zeros_like(g)
    return jax.tree.map(zero, axes, grads)


def update_running_stats(axes: Params, updated: Params, old: Params, grads: Params) -> Params:
    """Return parameters [...] with running averages moved and increments added."""

    def leaf(dims: Any, new: Array, before: Array, batch_stats: Array) -> Array:
        if dims.update == "increment":
            return before + batch_stats
        return before + MOMENTUM * (batch_stats - before) if dims.update == "statistic" else new

    return jax.tree.map(leaf, axes, updated, old, grads)
