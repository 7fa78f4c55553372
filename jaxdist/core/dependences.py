"""Data dependences that no compiler pass removes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def after(x: jax.Array, marks: Sequence[jax.Array]) -> jax.Array:
    """Return x [*dims] after all marks [*dims] are computed; it varies over the same mesh axes."""
    return AFTER.bind(x, *marks) if marks else x


def _element(x: jax.Array) -> jax.Array:
    """Return True, bool [], computed from the first element of x, which must not be empty."""
    first = lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()).astype(jnp.float32)
    # XLA does not simplify these three float comparisons; it would simplify integer operations.
    return (first < 0) | (first >= 0) | (first != first)


def primitive(name: str, kind: Callable[..., Any], compute: Callable[..., Any]) -> core.Primitive:
    """Make a primitive of one result; `kind` maps its operands' types to the result's."""
    made = core.Primitive(name)
    made.def_abstract_eval(kind)
    mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=False))
    return made


AFTER = primitive("after", lambda x, *marks: x, lambda x, *marks: wait_for(ready_token(marks), x))
"""(x, *marks) -> x, computed after the marks."""
