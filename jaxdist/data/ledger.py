"""The data ledger: a hash chain of the rows that entered each step.

The digest of a step covers the digest of the step before, the fingerprint of the data, and the row
number of each sample of the batch, in order. It follows from (data, seed, step) alone, so that
every mesh, process count and restart finds the same one. No row is read for it.

A stream has no row numbers, and so no ledger: its digests are empty.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdist.data.order import Order

NUM_LINKS = 16
"""Steps that a checkpoint keeps, and a resumed run computes again."""

_SAMPLES_AT_ONCE = 8192
"""numpy takes about as long for one row as for a thousand."""


class Link(NamedTuple):
    """One step of the chain.

    Attributes:
        first_sample: first sample of its batch.
        num_samples: samples of its batch.
        digest: of this step and all before it, 32 hexadecimal digits; "" before the first step,
            and for a stream.
    """

    first_sample: int = 0
    num_samples: int = 0
    digest: str = ""

    @property
    def samples(self) -> np.ndarray:
        """Sample numbers of its batch, int64 [num_samples]."""
        return np.arange(self.first_sample, self.first_sample + self.num_samples, dtype=np.int64)


def digest_of(before: str, fingerprint: str, rows: np.ndarray) -> str:
    """Digest of a step.

    Args:
        before: digest of the step before; "" for the first one.
        fingerprint: of the data.
        rows: int64 [batch], row numbers of the step's batch.
    """
    digest = hashlib.blake2b(f"{before} {fingerprint} ".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(rows, "<i8").tobytes())
    return digest.hexdigest()


class Ledger:
    """The chain of a run, as far as it has come.

    Attributes:
        links: the newest ones, oldest first; the last one is of the newest step.
    """

    def __init__(self, links: Sequence[Link], fingerprint: str, order: Order | None):
        """Go on behind these links; `order` is None for a stream."""
        self.links = tuple(links)
        self._fingerprint, self._order = fingerprint, order
        self._known = np.empty(0, np.int64)
        self._known_from = 0

    def append(self, first_sample: int, num_samples: int) -> None:
        """Enter the batch of the next step."""
        link = Link(first_sample, num_samples)
        if self._order is not None:
            rows = self._rows(link)
            digest = digest_of(self.links[-1].digest, self._fingerprint, rows)
            link = link._replace(digest=digest)
        self.links = (*self.links[-NUM_LINKS:], link)

    def _rows(self, link: Link) -> np.ndarray:
        """Rows of a batch, int64 [batch]; computed for many batches at once, which costs less."""
        assert self._order is not None
        at = link.first_sample - self._known_from
        if at < 0 or at + link.num_samples > len(self._known):
            end = link.first_sample + max(link.num_samples, _SAMPLES_AT_ONCE)
            self._known = self._order.rows(np.arange(link.first_sample, end, dtype=np.int64))
            self._known_from, at = link.first_sample, 0
        return self._known[at : at + link.num_samples]


def first_mismatch(
    links: Sequence[Link], fingerprint: str, rows_of: Callable[[np.ndarray], np.ndarray]
) -> int | None:
    """Place of the first link that does not follow from the one before it; None if all do.

    `rows_of` gives the rows of samples, int64 [n] -> int64 [n].
    """
    for place, (before, link) in enumerate(itertools.pairwise(links), start=1):
        if link.digest != digest_of(before.digest, fingerprint, rows_of(link.samples)):
            return place
    return None
