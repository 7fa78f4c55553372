"""States of a value over one mesh axis, and rules to combine them.

A state is an int for each mesh axis in use:

    ZERO       zeros; combines with every other state
    CONSTANT   derived only from constants of the program
    EQUAL      equal on all devices
    PARTIAL    a partial sum on each device: the value is the sum over the devices
    INDEX      derived from the device index and equal values, e.g. a mask of the device's rows
    LOOKUP     result of an INDEX lookup in a table whose rows are split; must be masked before use
    VARYING    anything else: never causes an alarm
    mask > 0   split: each device holds its part of the dims whose bits are set

If a mask has several dims, the axis splits their product; after a reshape it is unknown which one.
A sum over only some of these dims is VARYING. If each device holds a single row, a reshape that
drops this dim is ambiguous: the rows may be concatenated along the next dim, or be terms of a sum
over rows. `ROW` marks such a split, for which both are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Return the state as text."""
    if is_split(state):
        return f"split along dim {' and '.join(map(str, dims_of(state)))}"
    names = ("zeros", "a constant", "equal", "partial", "varying", "varying", "varying")
    return names[-1 - state]


def join(left: int, right: int) -> int:
    """Return the combined state: of a value that is one of two, or a function of both."""
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
    total = ZERO
    for state in states:
        total = join(total, state)
    return total


def moved(state: int, targets: Sequence[int | None] | dict[int, int]) -> int:
    """Return a state after dim i moves to `targets[i]`; None or missing = removed."""
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
