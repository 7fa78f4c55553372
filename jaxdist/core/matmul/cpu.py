"""Float32 products on CPUs with faster weight gradients (`scripts/bench/results/cpu.md`).

XLA:CPU contracts the rows of two large inputs at two thirds of the rate of a plain product. So one
input is transposed first, behind a barrier that keeps the compiler from removing the transpose.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from jaxdist.core import collectives, types
from jaxdist.core.types import Array


def dot(dims: str, x: Array, w: Array, *, out_dtype: Any = None) -> Array:
    """Multiply as `types.dot` does: [*dims named after the arrow]; faster only for float32."""
    if _num_inner(dims) == 0 or x.dtype != jnp.float32 or (out_dtype or x.dtype) != x.dtype:
        return types.dot(dims, x, w, out_dtype=out_dtype)
    w = w.astype(x.dtype)
    both = tuple(collectives.varying_axes(x) | collectives.varying_axes(w))
    return _dot(dims, *collectives.vary((x, w), both))


def weight_gradient(
    x: Float[Array, "rows inner"], g: Float[Array, "rows outer"]
) -> Float[Array, "inner outer"]:
    """Return the weight gradient xᵀ · g, float32 or wider, by the faster of two products."""
    wide = jnp.promote_types(g.dtype, jnp.float32)
    x, g = x.astype(wide), g.astype(wide)
    if x.shape[1] <= g.shape[1]:
        return lax.optimization_barrier(x.T) @ g
    return lax.optimization_barrier(lax.dot_general(g, x, (((0,), (0,)), ((), ())))).T


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(dims: str, x: Array, w: Array) -> Array:
    """Return the product [*dims named after the arrow]."""
    return types.dot(dims, x, w)


def _backward(dims: str, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Return gradients of x [*first dims named] and w [*second dims named]."""
    x, w = saved
    inner = w.shape[: _num_inner(dims)]
    outer = w.shape[len(inner) :]
    flat = lambda a, last: a.reshape(-1, math.prod(last))
    # XLA would copy the transpose of a weight with several outer dims, but not of a flat one.
    dx = lax.dot_general(flat(g, outer), flat(w, outer), (((1,), (1,)), ((), ())))
    dw = weight_gradient(flat(x, inner), flat(g, outer))
    return dx.reshape(x.shape), dw.reshape(w.shape)


_dot.defvjp(lambda dims, x, w: (types.dot(dims, x, w), (x, w)), _backward)


def _num_inner(dims: str) -> int:
    """Return the number of contracted dims; 0 unless they end x and begin w in the same order."""
    inputs, _, out = dims.partition("->")
    left, right = (part.split() for part in inputs.split(","))
    inner = [name for name in left if name in right]
    rows, outer = left[: -len(inner) or None], right[len(inner) :]
    ordered = left[len(rows) :] == inner == right[: len(inner)] and out.split() == rows + outer
    return len(inner) if ordered else 0
