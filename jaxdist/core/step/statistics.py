"""Running averages of batch statistics: leaves of the parameters that no gradient moves.

A model marks them in its axes with `RunningDims`. Its forward pass returns what the batch showed of
each, as `Sums[BATCH_STATISTICS]`, and where the gradient of a trained leaf stands, the step carries
that value for such a leaf. The optimizer never sees it.

Source: Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 2; the momentum is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.core import collectives
from jaxdist.core.types import BATCH_STATISTICS, Array, Params, RunningDims, Sums

MOMENTUM = 0.1
"""Share of the newest batch in a running average."""


def take(sums: Sums, num_microbatches: int) -> tuple[Sums, Params]:
    """Sums without what the batch showed, and that: the mean over microbatches, {} if nothing.

    Sums are float32 []; what the batch showed is a tree of float32 [...] like the averages.
    """
    rest = {name: value for name, value in sums.items() if name != BATCH_STATISTICS}
    shown: Any = sums.get(BATCH_STATISTICS, {})
    return rest, jax.tree.map(lambda x: x / num_microbatches, shown)


def put(axes: Params, grads: Params, shown: Params) -> Params:
    """Gradients with what the batch showed in the places of the running averages.

    Both are float32, [...] like the parameters.

    Raises:
        TypeError: the model's head did not return it.
    """
    found = dict(jax.tree_util.tree_leaves_with_path(shown))

    def leaf(path: Any, dims: Any, grad: Array) -> Array:
        """The gradient [*dims], or what the batch showed of a running average of that shape."""
        if not isinstance(dims, RunningDims):
            return grad
        if path not in found:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"{name} is a running average, and Model.head returned nothing for it. Add "
                "`jaxdist.models.layers.batch_statistics(module, context)` to its sums."
            )
        return found[path]

    return jax.tree_util.tree_map_with_path(leaf, axes, grads)


def hide(axes: Params, grads: Params) -> Params:
    """Gradients [...] with zeros in the places of the running averages, for the optimizer."""
    zero = lambda dims, g: collectives.zeros_like(g) if isinstance(dims, RunningDims) else g
    return jax.tree.map(zero, axes, grads)


def move(
    axes: Params, updated: Params, old: Params, grads: Params, frozen: Params | None = None
) -> Params:
    """Updated parameters [...] with running averages moved from `old` values towards the batch.

    `frozen` marks the leaves that stay; None = none does.
    """

    def leaf(dims: Any, new: Array, before: Array, shown: Array, stays: bool) -> Array:
        if not isinstance(dims, RunningDims):
            return new
        return before if stays else before + MOMENTUM * (shown - before)

    frozen = frozen or jax.tree.map(lambda _: False, axes)
    return jax.tree.map(leaf, axes, updated, old, grads, frozen)


def has_averages(axes: Params) -> bool:
    """Whether a model keeps any."""
    return any(isinstance(dims, RunningDims) for dims in jax.tree.leaves(axes))
