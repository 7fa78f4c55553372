"""The order of training: sample number -> row, a pure function of (sizes, stages, seed).

It does not use the shuffling and mixing of grain. Row by row, grain 0.2.18 takes 14 to 38 times the
CPU time (see `grain by row` in `scripts/bench/results/data.md`), the order may change between
releases, and `mix` rounds shares.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_ROUNDS = 8  # 4 suffice for large sets; halves of 1 or 2 bits mix slower
_PERIOD = 1 << 16  # shares of a mixture are exact in every window of this many samples
_STRIDE = 40503  # odd, near _PERIOD / golden ratio: spreads each source evenly over the window


class MixtureStage(NamedTuple):
    """The mixture from a sample on: indices and weights of parts; () = in proportion to size."""

    first_sample: int
    parts: tuple[int, ...]
    weights: tuple[float, ...] = ()


class Order:
    """Map training samples to rows.

    Without weights an epoch is one pass over the rows of all parts in one shuffled order. With
    weights each part has its own shuffled epochs, and samples are drawn from the parts in fixed
    proportion: exact over 65,536 samples, and off by a few samples at any other time. With
    stages, each part continues its epoch in the next stage with weights, and so does the joint
    order of the same parts in the next stage without.
    """

    samples_at_once = 8192  # of a call, if all are needed: 1,000 take about as long as 1

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        rows_per_example: int = 1,
        stages: Sequence[MixtureStage] = (),
    ):
        """Order parts of `sizes` rows (each ≥ 1); keep groups of `rows_per_example` together.

        `stages` replace the weights; the first one begins at sample 0.
        """
        self.seed, self._size = seed, rows_per_example
        self._sizes = np.asarray(sizes, np.int64) // rows_per_example
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._stages: list[_StageOrder] = []
        for stage in stages or [MixtureStage(0, tuple(range(len(sizes))), tuple(weights))]:
            self._stages.append(self._follow(stage))
        self._firsts = np.array([stage.first for stage in self._stages], np.int64)

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the row of each sample number; int64 [n] -> int64 [n]."""
        examples, offset = np.divmod(np.asarray(samples, np.int64), self._size)
        rows = np.empty_like(examples)  # of examples, which are groups of adjacent rows
        stages = np.searchsorted(self._firsts, examples, side="right") - 1
        for number in np.unique(stages):
            of_stage, stage = stages == number, self._stages[number]
            groups, within = stage.draw(examples[of_stage])
            drawn = np.empty_like(within)
            for group in np.unique(groups):
                chosen = groups == group
                drawn[chosen] = self._group_rows(stage.groups[group], within[chosen])
            rows[of_stage] = drawn
        return rows * self._size + offset

    def passes(self, num_samples: int) -> list[float]:
        """Return how often the first `num_samples` read each part; 1.5 = one and a half passes."""
        examples = num_samples // self._size
        last = self._stages[int(np.searchsorted(self._firsts, examples, side="right")) - 1]
        counts = last.drawn_after(examples - last.first)
        passes = np.zeros(len(self._sizes))
        for parts, count in {**last.drawn, **dict(zip(last.groups, counts, strict=True))}.items():
            passes[list(parts)] += count / self._sizes[list(parts)].sum()
        return passes.tolist()

    def _follow(self, stage: MixtureStage) -> _StageOrder:
        """Return a stage that continues the epochs of the stages before it."""
        first = stage.first_sample // self._size
        is_mixed = bool(stage.weights) and len(stage.parts) > 1
        groups = [(part,) for part in stage.parts] if is_mixed else [stage.parts]
        drawn: dict[tuple[int, ...], int] = {}
        if self._stages:
            last = self._stages[-1]
            counts = last.drawn_after(first - last.first)
            drawn = {**last.drawn, **dict(zip(last.groups, counts, strict=True))}
        mixture = _mixture(stage.weights) if is_mixed else None
        return _StageOrder(first, tuple(groups), mixture, drawn)

    def _group_rows(self, parts: tuple[int, ...], samples: np.ndarray) -> np.ndarray:
        """Return the example of each sample of jointly shuffled `parts`: int64 [n] -> [n]."""
        ends = np.cumsum(self._sizes[list(parts)])
        size, part = int(ends[-1]), parts[0] if len(parts) == 1 else 0
        epochs, offsets = np.divmod(samples, size)
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            keys = keys_of(self.seed, part, int(epoch))
            rows[chosen] = permute(offsets[chosen], size, keys)
        of_part = np.searchsorted(ends, rows, side="right")
        return rows + (self._starts[list(parts)] + self._sizes[list(parts)] - ends)[of_part]


class _StageOrder(NamedTuple):
    """The order of one stage of a mixture, which starts at example `first`.

    Each group of parts has an order of its own; `drawn` counts the examples of each group that
    earlier stages used.
    """

    first: int
    groups: tuple[tuple[int, ...], ...]
    mixture: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    drawn: dict[tuple[int, ...], int]

    def draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for examples int64 [n], their group and their number in it, int64 [n] each."""
        samples = samples - self.first
        before = np.array([self.drawn.get(group, 0) for group in self.groups], np.int64)
        if self.mixture is None:
            return np.zeros_like(samples), samples + before[0]
        part_of, rank, quota = self.mixture
        block, offset = np.divmod(samples, _PERIOD)
        groups = part_of[offset]
        return groups, block * quota[groups] + rank[offset] + before[groups]

    def drawn_after(self, num_samples: int) -> list[int]:
        """Return how many examples of each group are drawn after `num_samples` of this stage."""
        before = [self.drawn.get(group, 0) for group in self.groups]
        if self.mixture is None:
            return [before[0] + num_samples]
        part_of, _, quota = self.mixture
        block, offset = divmod(num_samples, _PERIOD)
        rest = np.bincount(part_of[:offset], minlength=len(quota))
        return (block * quota + rest + before).tolist()


@functools.lru_cache(maxsize=64)
def keys_of(seed: int, part: int, epoch: int) -> tuple[int, ...]:
    """Return the keys for `permute` in one epoch (or buffer) of a part."""
    digest = hashlib.blake2b(f"{seed} {part} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def permute(index: np.ndarray, size: int, keys: Sequence[int]) -> np.ndarray:
    """Return a permutation of range(size) at `index`, int64 [n] -> int64 [n], in constant memory.

    A balanced Feistel network permutes range(P), where P ≥ size is a power of 4, and is applied
    again to results outside range(size).

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


NUM_LINKS = 16
"""Largest number of steps that a resumed run verifies; a checkpoint stores one link more."""


class Link(NamedTuple):
    """One step of the chain: first sample and number of samples of its batch, and a digest.

    `digest` has 32 hexadecimal digits; "" before the first step and for a stream. `pieces` is the
    number of shorter rows into which each sample is cut.
    """

    first_sample: int = 0
    num_samples: int = 0
    digest: str = ""
    pieces: int = 1

    @property
    def samples(self) -> np.ndarray:
        """Sample numbers of its batch, int64 [num_samples]."""
        return np.arange(self.first_sample, self.first_sample + self.num_samples, dtype=np.int64)


def digest_of(before: str, fingerprint: str, rows: np.ndarray, pieces: int = 1) -> str:
    """Return the digest of a step with rows int64 [batch] after the digest `before` ("" = none)."""
    cut = f"{pieces} pieces " if pieces > 1 else ""
    digest = hashlib.blake2b(f"{before} {fingerprint} {cut}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(rows, "<i8").tobytes())
    return digest.hexdigest()


class Ledger:
    """The data ledger: a hash chain of the rows in each step; `links`: the newest, oldest first.

    The digest of a step covers the previous digest, the fingerprint of the data up to the step, and
    the row numbers of the batch, in order. Every mesh, process count and restart of a run computes
    the same one. Digests of a user's stream, without row numbers, are empty.
    """

    def __init__(
        self, links: Sequence[Link], fingerprint_at: Callable[[int], str], order: Order | None
    ):
        """Continue after these links; `fingerprint_at`: see `Dataset`; a stream has no order."""
        self.links = tuple(links)
        self._fingerprint_at, self._order = fingerprint_at, order
        self._cached_rows = np.empty(0, np.int64)
        self._cached_from = 0

    def append(self, first_sample: int, num_samples: int, pieces: int = 1) -> None:
        """Add the batch of the next step, whose samples are cut into `pieces`."""
        link = Link(first_sample, num_samples, pieces=pieces)
        if self._order is not None:
            rows = self._rows(link)
            fingerprint = self._fingerprint_at(first_sample + num_samples - 1)
            digest = digest_of(self.links[-1].digest, fingerprint, rows, pieces)
            link = link._replace(digest=digest)
        self.links = (*self.links[-NUM_LINKS:], link)

    def _rows(self, link: Link) -> np.ndarray:
        """Return the rows of a batch, int64 [batch]; computes `Order.samples_at_once` together."""
        assert self._order is not None
        at = link.first_sample - self._cached_from
        if at < 0 or at + link.num_samples > len(self._cached_rows):
            end = link.first_sample + max(link.num_samples, self._order.samples_at_once)
            self._cached_rows = self._order.rows(np.arange(link.first_sample, end, dtype=np.int64))
            self._cached_from, at = link.first_sample, 0
        return self._cached_rows[at : at + link.num_samples]


def first_mismatch(
    links: Sequence[Link],
    fingerprint_at: Callable[[int], str],
    rows_of: Callable[[np.ndarray], np.ndarray],
) -> int | None:
    """Return the index of the first link of another digest, or None (`rows_of`: int64 [n], [n])."""
    for index, (before, link) in enumerate(itertools.pairwise(links), start=1):
        fingerprint = fingerprint_at(link.first_sample + link.num_samples - 1)
        rows = rows_of(link.samples)
        if link.digest != digest_of(before.digest, fingerprint, rows, link.pieces):
            return index
    return None
