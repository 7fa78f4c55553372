"""State rules of elementwise operations: sums, products, `where`, nonlinear functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist.core.collectives import OWN_VALUE
from jaxdist.plan.audit.states import (
    CONSTANT,
    EQUAL,
    FIXED,
    INDEX,
    LOOKUP,
    PARTIAL,
    VARYING,
    ZERO,
    is_split,
    join,
    join_all,
    operations,
)

Rule = Callable[[Any, Sequence[int]], "int | list[int]"]
"""(equation, operand states over one axis) -> state of the result, or of each result."""


class OmittedSum(Exception):
    """Operand number `operand` is a partial sum, but is used as if it were the complete sum."""

    def __init__(self, operand: int, text: str) -> None:
        super().__init__(text)
        self.operand = operand


def omitted(states: Sequence[int], text: str) -> OmittedSum:
    """Return the error for the first partial operand."""
    return OmittedSum(list(states).index(PARTIAL), text)


def same(equation: Any, states: Sequence[int]) -> int:
    """Return the operand's state, for operations that do not change it."""
    del equation
    return states[0]


def name(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a `name` equation; VARYING if `mark_device_local` created it."""
    is_own = equation.params["name"] == OWN_VALUE and states[0] not in FIXED
    return VARYING if is_own else states[0]


def convert(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a cast; PARTIAL remains only in float dtypes."""
    floats = all(
        jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (equation.invars[0], equation.outvars[0])
    )
    return VARYING if states[0] == PARTIAL and not floats else states[0]


def add(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a sum or difference; PARTIAL may only be added to PARTIAL."""
    del equation
    left, right = states
    if PARTIAL not in states:
        return join(left, right)
    other = right if left == PARTIAL else left
    if other in (PARTIAL, ZERO, CONSTANT):
        return PARTIAL
    if other == EQUAL or is_split(other):
        raise omitted(states, "is added to a complete value")
    return VARYING


def multiply(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a product; PARTIAL remains if the other factor is EQUAL or constant."""
    del equation
    left, right = states
    if ZERO in states:
        return ZERO
    if PARTIAL not in states:
        return join(left, right)
    if left == right:
        raise omitted(states, "is multiplied by a partial value")
    return PARTIAL if left in FIXED or right in FIXED else VARYING


def divide(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a quotient; only the numerator may be PARTIAL."""
    del equation
    above, below = states
    if below == PARTIAL:
        raise omitted(states, "is divided by")
    if above == ZERO:
        return ZERO
    if above == PARTIAL:
        return PARTIAL if below in FIXED else VARYING
    return join(above, below)


def power(equation: Any, states: Sequence[int]) -> int:
    """Return the state of `integer_pow`, which is nonlinear unless the exponent is 1."""
    return states[0] if equation.params["y"] == 1 else nonlinear(equation, states)


def nonlinear(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a nonlinear function; its input must not be PARTIAL."""
    if PARTIAL in states:
        raise omitted(states, f"goes through {equation.primitive.name}")
    return other(equation, states)


def other(equation: Any, states: Sequence[int]) -> int:
    """Return the state of another elementwise function; splits remain, PARTIAL becomes VARYING."""
    del equation
    total = join_all(VARYING if state == PARTIAL else state for state in states)
    return CONSTANT if total == ZERO else total


def select(equation: Any, states: Sequence[int]) -> int:
    """Return the state of `where`; PARTIAL if the device index selects between values and zeros."""
    del equation
    which, *cases = states
    state = join_all(cases)
    if which in FIXED:
        return state
    if is_split(state):
        return join(state, which) if is_split(which) else state
    if which == INDEX and ZERO in cases and state in (EQUAL, PARTIAL, LOOKUP):
        return PARTIAL
    if state == ZERO:
        return ZERO
    return join(which, state)


def random_bits(equation: Any, states: Sequence[int]) -> int:
    """Return the state of random bits; VARYING if the seed depends on the device index."""
    state = other(equation, states)
    return VARYING if state == INDEX else state


_SAME = operations(
    "after copy copy_p device_put neg optimization_barrier pcast pvary real imag reduce_precision "
    "reshard sharding_constraint stop_gradient"
)
_NONLINEAR = operations(
    "abs acos acosh asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma erf erf_inv erfc "
    "exp exp2 expm1 floor lgamma log log1p logistic max min pow rem round rsqrt sign sin sinh sqrt "
    "square tan tanh"
)
_OTHER = operations(
    "and eq ge gt is_finite le lt ne nextafter not or population_count clz shift_left "
    "shift_right_arithmetic shift_right_logical xor"
)
_RANDOM = operations(
    "random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, same),
    **dict.fromkeys(_NONLINEAR, nonlinear),
    **dict.fromkeys(_OTHER, other),
    **dict.fromkeys(_RANDOM, random_bits),
    **dict.fromkeys(("add", "add_any", "sub"), add),
    "convert_element_type": convert,
    "div": divide,
    "integer_pow": power,
    "mul": multiply,
    "name": name,
    "select_n": select,
}
