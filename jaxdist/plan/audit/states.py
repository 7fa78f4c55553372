"""States of a value over one mesh axis, rules to combine them, and elementwise operations.

A state is an int for each mesh axis in use:

    ZERO       zeros; combines with every other state
    CONSTANT   derived only from constants of the program
    EQUAL      equal on all devices
    PARTIAL    a partial sum on each device: the value is the sum over the devices
    INDEX      derived from the device index and equal values, e.g. a mask of the device's rows
    LOOKUP     result of an INDEX lookup in a table whose rows are split; must be masked before use
    VARYING    anything else: never counts as a wrong sum
    mask > 0   split: each device holds its part of the dims whose bits are set

If a mask has several dims, the axis splits their product; after a reshape it is unknown which one.
A sum over only some of these dims is VARYING. If each device holds a single row, a reshape that
drops this dim is ambiguous: the rows may be concatenated along the next dim, or be terms of a sum
over rows. `ROW` marks such a split, for which both are allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist.core.collectives import OWN_VALUE

ZERO, CONSTANT, EQUAL, PARTIAL, INDEX, LOOKUP, VARYING = range(-1, -8, -1)

ROW = 1 << 62
"""Bit of a split state: the value on each device may also be a partial sum."""

FIXED = (ZERO, CONSTANT, EQUAL)
"""States of values that are equal on all devices."""


def split(*dims: int) -> int:
    """Return the state of a value split along `dims`; VARYING without dims."""
    return sum(1 << dim for dim in set(map(int, dims))) or VARYING


def is_split(state: int) -> bool:
    """Return True if the state is a mask of split dims."""
    return state > 0


def dims_of(state: int) -> list[int]:
    """Return the dims in a mask of split dims."""
    dims = state & ~ROW
    return [dim for dim in range(dims.bit_length()) if dims >> dim & 1] if state > 0 else []


def like(state: int, *sources: int) -> int:
    """Return `state`; if it is split, copy the `ROW` mark from split sources."""
    marked = any(is_split(source) and source & ROW for source in sources)
    return state | ROW if marked and is_split(state) else state


def name_of(state: int) -> str:
    """Return the state as text, e.g. "equal" or "split along dim 0"."""
    if is_split(state):
        return f"split along dim {' and '.join(map(str, dims_of(state)))}"
    names = ("zeros", "a constant", "equal", "partial", "varying", "varying", "varying")
    return names[-1 - state]


def join(left: int, right: int) -> int:
    """Return the state of a value that is selected from two values, or computed from both."""
    if left == right:
        return left
    low, high = sorted((left, right), key=_rank)
    if low == ZERO:
        return high
    if VARYING in (low, high) or LOOKUP in (low, high) or PARTIAL in (low, high):
        return VARYING
    if is_split(low):
        return like(low & high & ~ROW or VARYING, low, high)
    return high


def join_all(states: Iterable[int]) -> int:
    """Return the `join` of all states; ZERO if there are none."""
    return functools.reduce(join, states, ZERO)


def moved(state: int, targets: Sequence[int | None] | dict[int, int]) -> int:
    """Return a state after dim i becomes dim `targets[i]`; None or missing: dim i is removed."""
    if not is_split(state):
        return state
    new_dims = targets if isinstance(targets, dict) else dict(enumerate(targets))
    new = [new_dims.get(dim) for dim in dims_of(state)]
    return like(split(*[dim for dim in new if dim is not None]), state)


def operations(names: str) -> frozenset[str]:
    """Return the space-separated names as a set."""
    return frozenset(names.split())


def _rank(state: int) -> int:
    order = {ZERO: 0, CONSTANT: 1, EQUAL: 2, INDEX: 3, PARTIAL: 5, LOOKUP: 6, VARYING: 7}
    return order.get(state, 4)


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


def add(_: Any, states: Sequence[int]) -> int:
    """Return the state of a sum or difference; raise `OmittedSum` for PARTIAL + complete value."""
    left, right = states
    if PARTIAL not in states:
        return join(left, right)
    other = right if left == PARTIAL else left
    if other in (PARTIAL, ZERO, CONSTANT):
        return PARTIAL
    if other == EQUAL or is_split(other):
        raise omitted(states, "is added to a complete value")
    return VARYING


def multiply(_: Any, states: Sequence[int]) -> int:
    """Return the state of a product; PARTIAL remains if the other factor is EQUAL or constant."""
    left, right = states
    if ZERO in states:
        return ZERO
    if PARTIAL not in states:
        return join(left, right)
    if left == right:
        raise omitted(states, "is multiplied by a partial value")
    return PARTIAL if left in FIXED or right in FIXED else VARYING


def divide(_: Any, states: Sequence[int]) -> int:
    """Return the state of a quotient; only the numerator may be PARTIAL."""
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


def other(_: Any, states: Sequence[int]) -> int:
    """Return the state of any other elementwise result: splits remain, PARTIAL becomes VARYING."""
    total = join_all(VARYING if state == PARTIAL else state for state in states)
    return CONSTANT if total == ZERO else total


def select(_: Any, states: Sequence[int]) -> int:
    """Return the state of `jnp.where`; PARTIAL if the device index chooses values or zeros."""
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
    "after copy device_put neg optimization_barrier pcast pvary real imag reduce_precision "
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

ELEMENTWISE: dict[str, Rule] = {
    **dict.fromkeys(_SAME, lambda _, states: states[0]),
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
