"""The data ledger: a hash chain of the rows in each step.

The digest of a step covers the previous digest, the fingerprint of the data up to the step, and the
row numbers of the batch, in order. Every mesh, process count and restart of a run computes the same
one. Digests of a user's stream, without row numbers, are empty.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdist.data.order import Order

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
    """The chain of a run; `links` are the newest ones, oldest first."""

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
