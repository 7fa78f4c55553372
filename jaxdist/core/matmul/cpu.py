"""Products of float32 on CPU, whose gradients of weights are summed the faster way.

XLA:CPU sums over the rows of both inputs more slowly than it multiplies, at two thirds of the speed
where they are many and wide. One of them is turned around first, and a barrier keeps it so: the
compiler would undo it (`scripts/bench/results/cpu.md`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives, types
from jaxdist.core.types import Array


def dot(dims: str, x: Array, w: Array, *, out_dtype: Any = None) -> Array:
    """`types.dot`: the same product [*dims named after the arrow], of x and w as it takes them.

    The gradient of w is summed in another order. Other dtypes than float32, and other orders of
    dims than "rows inner, inner outer -> rows outer", are left to it altogether.
    """
    if _num_inner(dims) == 0 or x.dtype != jnp.float32 or (out_dtype or x.dtype) != x.dtype:
        return types.dot(dims, x, w, out_dtype=out_dtype)
    w = w.astype(x.dtype)
    both = tuple(collectives.varying_axes(x) | collectives.varying_axes(w))
    return _dot(dims, *collectives.vary((x, w), both))


def weight_gradient(x: Array, g: Array) -> Array:
    """[inner, outer] from activations [rows, inner] and the product's gradient [rows, outer].

    Float32 or wider. The narrower of the two is turned around: the copy is small.
    """
    wide = jnp.promote_types(g.dtype, jnp.float32)
    x, g = x.astype(wide), g.astype(wide)
    if x.shape[1] <= g.shape[1]:
        return lax.optimization_barrier(x.T) @ g
    return lax.optimization_barrier(lax.dot_general(g, x, (((0,), (0,)), ((), ())))).T


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(dims: str, x: Array, w: Array) -> Array:
    """The product [*dims named after the arrow]."""
    return types.dot(dims, x, w)


def _forward(dims: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    """The product [*dims named after the arrow], and what backward reads."""
    return types.dot(dims, x, w), (x, w)


def _backward(dims: str, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Gradients of x [*first dims named] and w [*second dims named]."""
    x, w = saved
    inner = w.shape[: _num_inner(dims)]
    outer = w.shape[len(inner) :]
    flat = lambda a, last: a.reshape(-1, math.prod(last))
    # Of a weight with several outer dims XLA would copy the transpose: flat, a product reads it.
    dx = lax.dot_general(flat(g, outer), flat(w, outer), (((1,), (1,)), ((), ())))
    dw = weight_gradient(flat(x, inner), flat(g, outer))
    return dx.reshape(x.shape), dw.reshape(w.shape)


_dot.defvjp(_forward, _backward)


def _num_inner(dims: str) -> int:
    """How many dims are summed over; 0 where they are not x's last and w's first, in this order."""
    inputs, _, out = dims.partition("->")
    left, right = (part.split() for part in inputs.split(","))
    inner = [name for name in left if name in right]
    rows, outer = left[: -len(inner) or None], right[len(inner) :]
    ordered = left[len(rows) :] == inner == right[: len(inner)] and out.split() == rows + outer
    return len(inner) if ordered else 0
