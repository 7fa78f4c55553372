"""States of one value over one mesh axis, and how they combine.

A state is an int for each mesh axis in use:

    ZERO       zeros; joins with every other state
    CONSTANT   derived from constants of the program only
    EQUAL      equal on all devices
    PARTIAL    a term on each device: the value is the sum over the devices
    INDEX      derived from the device's index and equal values, e.g. a mask of its own rows
    LOOKUP     rows of a table that the axis splits, looked up by an INDEX; valid only once masked
    VARYING    anything else: no claim, and never an alarm
    mask > 0   split: each device holds its part of the dims whose bits are set

If a mask has several dims, the axis splits their product; a reshape does not show which of them.
A sum over only some of these dims is VARYING. If each device holds a single row, a reshape that
drops this dim is ambiguous: the rows may be concatenated along the next dim, or be terms of a sum
over rows. `ROW` marks such a split, for which both are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ZERO, CONSTANT, EQUAL, PARTIAL, INDEX, LOOKUP, VARYING = range(-1, -8, -1)

ROW = 1 << 62
"""Bit of a split state: each device may also hold a term of a sum."""

FIXED = (ZERO, CONSTANT, EQUAL)
"""States of values that are equal on all devices."""


def split(*dims: int) -> int:
    """Return the state of a value whose `dims` an axis splits; VARYING without dims."""
    return sum(1 << dim for dim in set(map(int, dims))) or VARYING


def is_split(state: int) -> bool:
    """Return True if the state names the dims that the axis splits."""
    return state > 0


def dims_of(state: int) -> list[int]:
    """Return the dims that a split state names."""
    dims = state & ~ROW
    return [dim for dim in range(dims.bit_length()) if dims >> dim & 1] if state > 0 else []


def like(state: int, *sources: int) -> int:
    """Return `state`, with the `ROW` mark if it is split and a split source has the mark."""
    marked = any(is_split(source) and source & ROW for source in sources)
    return state | ROW if marked and is_split(state) else state


def name_of(state: int) -> str:
    """Return the state in words."""
    if is_split(state):
        return f"split along dim {' and '.join(map(str, dims_of(state)))}"
    names = ("zeros", "a constant", "equal", "partial", "varying", "varying", "varying")
    return names[-1 - state]


def join(left: int, right: int) -> int:
    """Return the state of a value that is one or the other, or a function of both."""
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
    """Return the `join` of all; ZERO of none."""
    total = ZERO
    for state in states:
        total = join(total, state)
    return total


def moved(state: int, targets: Sequence[int | None] | dict[int, int]) -> int:
    """Return a state after its dims moved to `places[dim]`; None or missing = removed."""
    if not is_split(state):
        return state
    new_dims = targets if isinstance(targets, dict) else dict(enumerate(targets))
    new = [new_dims.get(dim) for dim in dims_of(state)]
    return like(split(*[dim for dim in new if dim is not None]), state)


def operations(names: str) -> frozenset[str]:
    """Return the names in a text as a set."""
    return frozenset(names.split())


def _rank(state: int) -> int:
    order = {ZERO: 0, CONSTANT: 1, EQUAL: 2, INDEX: 3, PARTIAL: 5, LOOKUP: 6, VARYING: 7}
    return order.get(state, 4)
