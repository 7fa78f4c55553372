"""The order of training: sample number -> row, a pure function of (sizes, weights, seed).

It does not use the shuffling and mixing of grain. With grain 0.2.18 each row costs 13-20 µs of
Python, 130 µs with mixing (see `grain by row` in `scripts/bench/results/data.md`), the order may
change between releases, and `mix` rounds shares.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

_ROUNDS = 8  # 4 suffice for large sets; halves of 1 or 2 bits mix slower
_PERIOD = 1 << 16  # shares of a mixture are exact in every window of this many samples
_STRIDE = 40503  # odd, near _PERIOD / golden ratio: spreads each source evenly over the window


class Order:
    """Map training samples to rows.

    Without weights an epoch is one pass over the rows of all parts in one shuffled order. With
    weights each part has its own shuffled epochs, and samples are drawn from the parts in fixed
    proportion: exact over 65,536 samples, and off by about one sample at any other time.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        rows_per_example: int = 1,
    ):
        """Order parts of `sizes` rows (each ≥ 1); keep groups of `rows_per_example` together."""
        self.seed, self._size = seed, rows_per_example
        sizes = [size // rows_per_example for size in sizes]
        if not weights or len(sizes) == 1:
            sizes, weights = [sum(sizes)], [1.0]
        self._sizes = np.asarray(sizes, np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._mixture = _mixture(tuple(weights)) if len(weights) > 1 else None

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the row of each sample number; int64 [n] -> int64 [n]."""
        examples, offset = np.divmod(np.asarray(samples, np.int64), self._size)
        return self._examples(examples) * self._size + offset

    def _examples(self, samples: np.ndarray) -> np.ndarray:
        """Return the example of each sample number, a group of rows; int64 [n] -> int64 [n]."""
        if self._mixture is None:
            return self._part_rows(0, samples)
        part_of, rank, quota = self._mixture
        block, offset = np.divmod(samples, _PERIOD)
        parts = part_of[offset]
        within = block * quota[parts] + rank[offset]
        rows = np.empty_like(samples)
        for part in np.unique(parts):
            chosen = parts == part
            rows[chosen] = self._part_rows(int(part), within[chosen])
        return rows

    def _part_rows(self, part: int, samples: np.ndarray) -> np.ndarray:
        """Return rows of one part by its own sample numbers; int64 [n] -> int64 [n]."""
        size = int(self._sizes[part])
        epochs, offsets = np.divmod(samples, size)
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            keys = _keys(self.seed, part, int(epoch))
            rows[chosen] = _permute(offsets[chosen], size, keys)
        return rows + self._starts[part]


@functools.lru_cache(maxsize=64)
def _keys(seed: int, part: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed} {part} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _permute(index: np.ndarray, size: int, keys: Sequence[int]) -> np.ndarray:
    """Return a permutation of range(size) at `index`, int64 [n] -> int64 [n], in constant memory.

    A balanced Feistel network permutes the next larger power of 4, and is applied again to results
    outside the range.

    References:
        Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 4
        (cycle walking); the round function is the finalizer of splitmix64.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    out = index.astype(np.uint64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        x = out[outside]
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right + np.uint64(key)) & mask)
        x = (left << half) | right
        out[outside] = x
        outside[outside] = x >= np.uint64(size)
    return out.astype(np.int64)


def _scramble(x: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 [n] bijectively."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def _mixture(weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign the samples of one period of _PERIOD samples to parts.

    Returns part of each offset, int64 [_PERIOD]; its rank among the offsets of that part, int64
    [_PERIOD]; number of offsets of each part, int64 [parts].
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights) * _PERIOD
    quota = np.floor(shares).astype(np.int64)
    largest = np.argsort(quota - shares, kind="stable")  # largest remainder first
    quota[largest[: _PERIOD - int(quota.sum())]] += 1
    spread = np.arange(_PERIOD, dtype=np.int64) * _STRIDE % _PERIOD
    part_of = np.searchsorted(np.cumsum(quota), spread, side="right")
    rank = np.empty(_PERIOD, np.int64)
    for part in range(len(weights)):
        offsets = np.flatnonzero(part_of == part)
        rank[offsets] = np.arange(len(offsets))
    return part_of, rank, quota
