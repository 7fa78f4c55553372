"""Adafactor: second moments of matrices as their rows' and columns' means."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.core.matrices import Sides, sides_of
from jaxdist.core.types import Array, Params
from jaxdist.optim.config import OptimConfig

DECAY_EXPONENT = 0.8
"""c of the second-moment decay 1 - step^-c (Shazeer and Stern 2018, section 7.2)."""

UPDATE_CLIP = 1.0
"""Largest RMS of a matrix's update (Shazeer and Stern 2018, section 6)."""


class FactoredState(NamedTuple):
    """Adafactor's second moments.

    Attributes:
        step: int32 scalar, steps taken.
        rows: for matrices, the mean over the column side: dims [*stacked, *row side].
        columns: for matrices, the mean over the row side: dims [*stacked, *column side].
        full: for vectors, the second moment itself.

    What a leaf does not have is a scalar 0.
    """

    step: Array
    rows: Params
    columns: Params
    full: Params


def adafactor(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Factored second moments with update clipping, one matrix per layer.

    Shazeer and Stern, "Adafactor", 2018, algorithms 4 and 5, without momentum and without the
    learning rate relative to the parameter's scale: lr(step) alone sets the size of an update.
    Written here because optax's factors the two longest dims of a leaf, which for stacked layers
    and for [d_model, heads, head_dim] are not the sides of its matrices.
    """
    sides = dict(jax.tree_util.tree_leaves_with_path(sides_of(axes)))

    def init(params: Params) -> FactoredState:
        def moment(part: str) -> Params:
            return jax.tree_util.tree_map_with_path(
                lambda path, p: _empty_moment(p, sides[path], part), params
            )

        return FactoredState(
            jnp.zeros((), jnp.int32), moment("rows"), moment("columns"), moment("full")
        )

    def update(
        grads: Params, state: FactoredState, params: Params | None = None
    ) -> tuple[Params, FactoredState]:
        step = state.step + 1
        decay = 1.0 - step.astype(jnp.float32) ** -DECAY_EXPONENT
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten_with_path(grads)
        moments = zip(*(treedef.flatten_up_to(tree) for tree in state[1:]), strict=True)
        results = [
            _factored_update(grad, moment, sides[path], decay, UPDATE_CLIP)
            for (path, grad), moment in zip(leaves, moments, strict=True)
        ]
        trees = [treedef.unflatten(column) for column in zip(*results, strict=True)]
        return trees[0], FactoredState(step, *trees[1:])

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # our own state


def _empty_moment(param: Array, sides: Sides, part: str) -> Any:
    """Zeros, float32 [dims of `param` that the moment keeps]; `absent` where there is none."""
    if (part == "full") == sides.is_matrix:
        return absent()
    kept = range(param.ndim) if part == "full" else _kept(sides, part)
    return jnp.zeros([param.shape[i] for i in kept], jnp.float32)


def absent() -> Array:
    """What fills the place of a moment that a leaf does not have: float32 []."""
    return jnp.zeros((), jnp.float32)


def _kept(sides: Sides, part: str) -> list[int]:
    """The dims of the parameter that its `rows` or `columns` moment keeps."""
    return sorted(sides.stacked + getattr(sides, part))


def _factored_update(
    grad: Array, moment: tuple[Any, Any, Any], sides: Sides, decay: Array, clip: float
) -> tuple[Array, Any, Any, Any]:
    """One leaf: (clipped update, rows, columns, full), moments as in `FactoredState`.

    `grad`, float32 [...], is clipped by the RMS of each matrix; `decay` is float32 [].
    """
    rows, columns, full = moment
    square = jnp.square(grad) + 1e-30  # epsilon 1 of the paper: keeps the square roots finite
    if not sides.is_matrix:
        full = decay * full + (1 - decay) * square
        update = grad * jax.lax.rsqrt(full)
    else:
        rows = decay * rows + (1 - decay) * square.mean(sides.columns)
        columns = decay * columns + (1 - decay) * square.mean(sides.rows)
        wide_rows = jnp.expand_dims(rows, sides.columns)
        wide_columns = jnp.expand_dims(columns, sides.rows)
        mean = wide_rows.mean(sides.rows, keepdims=True)
        update = grad * jax.lax.rsqrt(wide_rows / mean) * jax.lax.rsqrt(wide_columns)
    rms = jnp.sqrt(jnp.square(update).mean(sides.rows + sides.columns, keepdims=True))
    return update / jnp.maximum(1.0, rms / clip), rows, columns, full
