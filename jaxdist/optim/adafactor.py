"""Adafactor: second moments of matrices, factored into row and column means."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float32

from jaxdist.core.matrices import Sides, sides_of
from jaxdist.core.types import Array, Params
from jaxdist.optim.config import OptimConfig

DECAY_EXPONENT = 0.8
"""c of the second-moment decay 1 - step^-c (Shazeer and Stern 2018, section 7.2)."""

UPDATE_CLIP = 1.0
"""Maximum RMS of a matrix's or vector's update (Shazeer and Stern 2018, section 6)."""


class FactoredState(NamedTuple):
    """Adafactor's second moments after int32 [] steps; unused moments of a leaf are a scalar 0.

    Attributes:
        rows: for matrices, the mean over columns: the leaf's dims without its columns.
        columns: for matrices, the mean over rows.
        full: for vectors, the unfactored second moment.
    """

    step: Array
    rows: Params
    columns: Params
    full: Params


def adafactor(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Make the rule of Adafactor with update clipping, separately for each layer's matrices.

    Shazeer and Stern, "Adafactor", 2018, algorithms 4 and 5, without momentum and without a
    learning rate relative to the parameter's scale. We do not use optax's, because it factors the
    two longest dims of a leaf, which are not always the rows and columns.
    """
    sides = dict(jax.tree_util.tree_leaves_with_path(sides_of(axes)))

    def init(params: Any) -> FactoredState:
        def moment(part: str) -> Any:
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
            _factored_update(grad, moment, sides[path], decay)
            for (path, grad), moment in zip(leaves, moments, strict=True)
        ]
        trees = [treedef.unflatten(column) for column in zip(*results, strict=True)]
        return trees[0], FactoredState(step, *trees[1:])

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # our state


def _empty_moment(param: Any, sides: Sides, part: str) -> Float32[Array, "*kept"]:
    """Return a zero moment with the dims of `param` that it keeps, or `absent`."""
    if (part == "full") == sides.is_matrix:
        return absent()
    kept = range(param.ndim) if part == "full" else _kept(sides, part)
    return jnp.zeros([param.shape[i] for i in kept], jnp.float32)


def absent() -> Float32[Array, ""]:
    """Return the placeholder of an unused moment."""
    return jnp.zeros((), jnp.float32)


def _kept(sides: Sides, part: str) -> list[int]:
    return sorted(sides.stacked + getattr(sides, part))


def _factored_update(
    grad: Float32[Array, "*leaf"],
    moment: tuple[Any, Any, Any],
    sides: Sides,
    decay: Float32[Array, ""],
) -> tuple[Float32[Array, "*leaf"], Any, Any, Any]:
    """Return one leaf's update, clipped by the RMS of each matrix or vector, and its moments."""
    rows, columns, full = moment
    square = jnp.square(grad) + 1e-30  # epsilon 1 of the paper: avoids division by zero
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
    return update / jnp.maximum(1.0, rms / UPDATE_CLIP), rows, columns, full
