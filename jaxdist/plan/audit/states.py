"""What the devices of one mesh axis hold of one value, and how states combine.

A state is an int, one for each mesh axis in use:

    ZERO       zeros; fits every other state
    CONSTANT   made from constants of the program alone
    EQUAL      the same on all devices
    PARTIAL    a term each: the value that is meant is the sum over the devices
    INDEX      made from the device's index and what is equal, e.g. a mask of its own rows
    LOOKUP     rows of a table that the axis splits, looked up by an INDEX; right only where masked
    VARYING    anything else; no claim, and never an alarm
    mask > 0   split: each device holds its part of the dims whose bits are set

A mask of several dims means that the axis splits them as one: which of them, a reshape has left
open. A sum over some of them, and not all, loses the claim. Where each device holds one row only, a
reshape that drops that dim may mean the next dim with the rows laid after each other, or this row's
term of a sum over rows: `ROW` marks such a split, of which both are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ZERO, CONSTANT, EQUAL, PARTIAL, INDEX, LOOKUP, VARYING = range(-1, -8, -1)

ROW = 1 << 62
"""Bit of a split state: each device may as well hold a term of a sum."""

FIXED = (ZERO, CONSTANT, EQUAL)
"""States of values that all devices hold alike."""


def split(*dims: int) -> int:
    """The state of a value whose `dims` an axis splits; VARYING without one."""
    return sum(1 << dim for dim in set(map(int, dims))) or VARYING


def is_split(state: int) -> bool:
    """Whether the state names the dims that the axis splits."""
    return state > 0


def dims_of(state: int) -> list[int]:
    """The dims that a split state names."""
    dims = state & ~ROW
    return [dim for dim in range(dims.bit_length()) if dims >> dim & 1] if state > 0 else []


def like(state: int, *sources: int) -> int:
    """A split state, marked with `ROW` where one of those that it comes from is."""
    marked = any(is_split(source) and source & ROW for source in sources)
    return state | ROW if marked and is_split(state) else state


def name_of(state: int) -> str:
    """The state as a person reads it."""
    if is_split(state):
        return f"split along dim {' and '.join(map(str, dims_of(state)))}"
    names = ("zeros", "a constant", "equal", "partial", "varying", "varying", "varying")
    return names[-1 - state]


def join(left: int, right: int) -> int:
    """The state of a value that is one or the other, or a function of both."""
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
    """`join` of all; ZERO of none."""
    total = ZERO
    for state in states:
        total = join(total, state)
    return total


def moved(state: int, places: Sequence[int | None] | dict[int, int]) -> int:
    """A state after its dims moved: `places[dim]` is the new dim.

    It is missing, or None, where the dim is gone.
    """
    if not is_split(state):
        return state
    found = places if isinstance(places, dict) else dict(enumerate(places))
    new = [found.get(dim) for dim in dims_of(state)]
    return like(split(*[dim for dim in new if dim is not None]), state)


def operations(names: str) -> frozenset[str]:
    """Operations by name, from one text."""
    return frozenset(names.split())


def _rank(state: int) -> int:
    order = {ZERO: 0, CONSTANT: 1, EQUAL: 2, INDEX: 3, PARTIAL: 5, LOOKUP: 6, VARYING: 7}
    return order.get(state, 4)
