"""Split arrays into blocks that are read and written one at a time; copy them to the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

Index = tuple[slice, ...]

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a part in each dim of its array."""


def block_shape(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> tuple[int, ...]:
    """Return the shape of the largest block within `max_bytes` that is contiguous in memory.

    Arrays are row-major, so only leading dims are cut. A block has at least one element.
    """
    block = list(shape)
    for dim in range(len(shape)):
        rest = math.prod(block[dim + 1 :]) * itemsize
        block[dim] = max(1, min(shape[dim], max_bytes // max(rest, 1)))
        if block[dim] > 1 or rest <= max_bytes:
            break
    return tuple(block)


def even_chunk(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> tuple[int, ...]:
    """Return a chunk shape that divides `shape` evenly and is no larger than `max_bytes`.

    It splits the dim with the smallest prime factor first, so that a prime number of rows is not
    split into single rows.
    """
    chunk = list(shape)
    while math.prod(chunk) * itemsize > max_bytes and max(chunk, default=1) > 1:
        factor, dim = min((_smallest_factor(n), dim) for dim, n in enumerate(chunk) if n > 1)
        chunk[dim] //= factor
    return tuple(chunk)


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)


def grid(shape: Sequence[int], block: Sequence[int]) -> Iterator[Index]:
    """Yield the index (a slice per dim) of each block of an array, in row-major order."""
    return blocks_in([slice(0, size) for size in shape], block)


def blocks_in(index: Sequence[slice], block: Sequence[int]) -> Iterator[Index]:
    """Yield, in row-major order, the index of each block's overlap with the part at `index`."""
    starts = (range(s.start // n * n, s.stop, n) for s, n in zip(index, block, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(
            slice(max(at, s.start), min(at + n, s.stop))
            for at, n, s in zip(corner, block, index, strict=True)
        )


def relative(part: Index, index: Sequence[slice]) -> Index:
    """Return the index of `part` relative to the start of the block at `index`."""
    return tuple(
        slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, index, strict=True)
    )


def bounds_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Bounds:
    """Return (start, stop) of each dim; dims without a slice in `index` (or None) are complete."""
    bounds = [s.indices(size)[:2] for s, size in zip(index or (), shape, strict=False)]
    return (*bounds, *((0, size) for size in shape[len(bounds) :]))


def slices_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Index:
    """Return a slice per dim; dims without a slice in `index` (or None) are complete."""
    return tuple(slice(*part) for part in bounds_of(index, shape))


def dtype_of(name: str) -> np.dtype:
    """Return the NumPy dtype of a stored name, including bfloat16 and float8."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


class HostCopies:
    """Host memory for one copy of data per key; the next copy with that key overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, np.ndarray] = {}

    def take(self, key: Hashable, data: Any) -> np.ndarray:
        """Return a row-major copy [...], in the memory of `key`, of one device's data."""
        values = np.asarray(data)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = self._buffers[key] = np.empty(values.shape, values.dtype)
        np.copyto(buffer, values)
        return buffer

    def clear(self) -> None:
        """Free the memory of all copies."""
        self._buffers.clear()
