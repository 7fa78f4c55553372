"""Data dependences that no compiler pass removes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir


def ready_token(marks: Iterable[jax.Array]) -> jax.Array:
    """Return True, bool [], after all marks, non-empty arrays [*dims], are computed."""
    truth = jnp.asarray(True)
    for mark in marks:
        truth &= _element(mark)
    return truth


def wait_for(ready: jax.Array, x: jax.Array) -> jax.Array:
    """Return x [*dims] unchanged, but only after `ready`, a result of `ready_token`, is computed.

    The other branch of the `where` differs from x, so XLA cannot remove it, even for a constant x.
    """
    return jnp.where(ready, x, ~x if x.dtype == bool else x + jnp.ones_like(x))


def ordered_after(values: Sequence[jax.Array], marks: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the values [*dims], for a compiler that reads them only after computing the marks.

    Unlike the results of `lax.optimization_barrier`, they vary over the same mesh axes as before.
    """
    return _ordered_after.bind(*values, *marks, count=len(values)) if values else []


def _element(x: jax.Array) -> jax.Array:
    """Return True, bool [], computed from the first element of x, which must not be empty."""
    first = lax.index_in_dim(x.reshape(-1), 0, keepdims=False).astype(jnp.float32)
    # XLA does not simplify these three float comparisons; it would simplify integer operations.
    return (first < 0) | (first >= 0) | (first != first)


_ordered_after: Any = core.Primitive("ordered_after")
_ordered_after.multiple_results = True
_ordered_after.def_abstract_eval(lambda *kinds, count: list(kinds[:count]))
mlir.register_lowering(
    _ordered_after,
    mlir.lower_fun(
        lambda *arrays, count: lax.optimization_barrier(arrays)[:count], multiple_results=True
    ),
)
