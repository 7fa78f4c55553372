"""Place documents into rows by best fit, from the number of documents of each length alone.

Rows of equal composition form a run, so that a plan has some thousand entries for any number of
documents. Only the order of documents by length takes memory for each document: usually 4 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxdist.data.corpus import Corpus

Entries: TypeAlias = tuple[tuple[int, int, int], ...]
"""(length, count, first): row i of a run has `count` pieces of the length, from first + i·count."""

_BLOCK = 1 << 16
"""Number of documents whose ends are read together."""

_GROUP = 1 << 12
"""Documents between two entries of the index of full rows; divides `_BLOCK`."""


class Runs(NamedTuple):
    """Runs of rows of the same piece lengths; `starts`, int64 [runs + 1], ends with num_rows."""

    starts: np.ndarray
    entries: list[Entries]

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return (length, index of the first piece of that length, number of pieces) for a row."""
        run = int(np.searchsorted(self.starts, row, side="right")) - 1
        index = row - int(self.starts[run])
        return [(length, first + index * n, n) for length, n, first in self.entries[run]]


def best_fit_runs(counts: np.ndarray, seq_len: int) -> Runs:
    """Place pieces into rows of `seq_len`, longest first, each into the fullest row that fits.

    `counts`, int64 [seq_len], is the number of pieces of each length. Many pieces of one length
    are placed together: a row takes as many of them as fit.

    References:
        Ding et al., "Fewer Truncations Improve Language Modeling", 2024, section 3 (best-fit
        decreasing over the lengths).
    """
    free: list[list[tuple[int, Entries]]] = [[] for _ in range(seq_len)]  # by free space
    spaces = 0  # bit r is set if some run has r free: the best fit is the next set bit
    for length in np.flatnonzero(counts)[::-1].tolist():
        left, taken = int(counts[length]), 0
        while left:
            fitting = spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                rows, entries = free[space].pop()
                spaces ^= 0 if free[space] else 1 << space
            else:
                space, rows, entries = seq_len, -(-left // (seq_len // length)), ()
            each = space // length
            full = min(rows, left // each)
            rest = min(left - full * each, each - 1) if full < rows else 0
            parts = [(0, full, each), (full, min(rest, 1), rest), (full + min(rest, 1), rows, 0)]
            for first, num_rows, count in parts:
                num_rows = min(num_rows, rows - first)
                if num_rows:
                    run = _from_row(entries, first)
                    run += ((length, count, taken),) if count else ()
                    taken, left = taken + num_rows * count, left - num_rows * count
                    free[space - count * length].append((num_rows, run))
                    spaces |= 1 << (space - count * length)
    runs = [run for of_space in free for run in of_space]
    starts = np.cumsum([0, *(rows for rows, _ in runs)])
    return Runs(starts.astype(np.int64), [entries for _, entries in runs])


def count_long(corpus: Corpus, seq_len: int) -> tuple[int, int]:
    """Return how many documents do not fit a row, and the tokens of the longest document."""
    count = longest = end = 0
    for at in range(0, corpus.num_documents, _BLOCK):
        lengths = np.diff(corpus.ends(at, at + _BLOCK).astype(np.int64), prepend=end)
        end += int(lengths.sum())
        count += int((lengths > seq_len + 1).sum())
        longest = max(longest, int(lengths.max()))
    return count, longest


def _from_row(entries: Entries, row: int) -> Entries:
    """Return the entries of a run without its first `row` rows."""
    return tuple((length, count, first + row * count) for length, count, first in entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestFitPlan:
    """Pieces of each row for the documents of tokens [start, stop) of a corpus.

    Documents longer than a row are cut into full rows and a remainder, or left out with
    `drop_long`. If a piece of a cut document has no token in the loss, it is dropped. The first
    access reads the ends of all these documents.
    """

    corpus: Corpus
    start: int
    stop: int
    seq_len: int
    drop_long: bool

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self._runs.starts[-1] + self._full_rows[-1]) - len(self._dropped[0])

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return (first token in the corpus, number of inputs) for each piece of a row."""
        full = row - int(self._runs.starts[-1])
        if full >= 0:
            return [(self._full_start(full), self.seq_len)]
        pieces = []
        for length, first, count in self._runs.pieces(row):
            at = int(self._buckets[length]) + first
            for document in self._by_length[at : at + count].tolist():
                end = min(int(self.corpus.document_ends[document]), self.stop)
                pieces.append((end - 1 - length, length))  # a remainder is the end of its document
        return pieces

    def _full_start(self, number: int) -> int:
        """Return the first token in the corpus of full row `number`, a piece of a cut document."""
        dropped = self._dropped[0]
        number += int(np.searchsorted(dropped - np.arange(len(dropped)), number, side="right"))
        group = int(np.searchsorted(self._full_rows, number, side="right")) - 1
        first, _ = self._documents
        starts, full, _ = next(self._cuts(first + group * _GROUP, first + (group + 1) * _GROUP))
        ends = np.cumsum(full)
        number -= int(self._full_rows[group])
        document = int(np.searchsorted(ends, number, side="right"))
        return (
            int(starts[document]) + (number - int(ends[document] - full[document])) * self.seq_len
        )

    @functools.cached_property
    def _documents(self) -> tuple[int, int]:
        """Index of the first document of the plan, and of the one after its last."""
        first, last = self.corpus.ended_before([self.start + 1, self.stop])
        return int(first), int(last) + (self.stop > self.start)

    def _cuts(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield first tokens, counts of full rows, remainder lengths [n] of blocks of documents."""
        begin, end = self._documents
        for at in range(first, min(last, end), _BLOCK):
            ends = self.corpus.ends(max(at - 1, begin), min(at + _BLOCK, last, end)).astype(
                np.int64
            )
            ends = np.minimum(ends, self.stop)
            ends = ends if at > begin else np.append(self.start, ends)
            inputs = np.maximum(np.diff(ends) - 1, 0)
            full, rest = np.divmod(inputs, self.seq_len)
            if self.drop_long:
                fits = inputs <= self.seq_len
                full, rest = full * fits, rest * fits
            yield ends[:-1], full, rest

    @functools.cached_property
    def _dropped(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of dropped full rows and of documents with dropped remainders, int64 [n] each."""
        full_rows: list[int] = []
        rests: list[int] = []
        document, number = self._documents[0], 0
        for starts, full, rest in self._cuts(*self._documents) if self.corpus.weighted else ():
            before = number + np.cumsum(full) - full
            for index in np.flatnonzero(full + (rest > 0) > 1).tolist():
                cuts = range(int(full[index]) + bool(rest[index]))
                for cut in cuts:
                    start = int(starts[index]) + cut * self.seq_len
                    length = self.seq_len if cut < full[index] else int(rest[index])
                    if self.corpus.weights(start + 1, start + length + 1).any():
                        continue
                    if cut < full[index]:
                        full_rows.append(int(before[index]) + cut)
                    else:
                        rests.append(document + index)
            document, number = document + len(full), number + int(full.sum())
        return np.array(full_rows, np.int64), np.array(rests, np.int64)

    def _rests(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield first index, counts of full rows, lengths of kept remainders [n] of n documents."""
        document = self._documents[0]
        for _, full, rest in self._cuts(*self._documents):
            dropped = self._dropped[1] - document
            rest[dropped[(dropped >= 0) & (dropped < len(rest))]] = 0
            yield document, full, rest
            document += len(full)

    @functools.cached_property
    def _counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of remainders of each length, int64 [seq_len], and the result of `_full_rows`."""
        counts, groups = np.zeros(self.seq_len, np.int64), [np.zeros(1, np.int64)]
        for _, full, rest in self._rests():
            counts += np.bincount(rest, minlength=self.seq_len)
            groups.append(np.add.reduceat(full, np.arange(0, len(full), _GROUP)))
        counts[0] = 0
        return counts, np.cumsum(np.concatenate(groups))

    @property
    def _full_rows(self) -> np.ndarray:
        """Number of full rows before each `_GROUP` documents, then of all: int64 [groups + 1]."""
        return self._counted[1]

    @functools.cached_property
    def _runs(self) -> Runs:
        return best_fit_runs(self._counted[0], self.seq_len)

    @functools.cached_property
    def _buckets(self) -> np.ndarray:
        """Index in `_by_length` of the first remainder of each length, int64 [seq_len]."""
        counts = self._counted[0]
        return np.cumsum(counts) - counts

    @functools.cached_property
    def _by_length(self) -> np.ndarray:
        """Indices of documents with a remainder, sorted by its length, then by index: [n]."""
        counts = self._counted[0]
        documents = np.empty(int(counts.sum()), np.min_scalar_type(max(self._documents)))
        following = self._buckets.copy()
        for document, _, rest in self._rests():
            narrow = rest.astype(np.uint16) if self.seq_len <= 1 << 16 else rest  # radix sort
            order = np.argsort(narrow, kind="stable")
            here = np.bincount(rest, minlength=self.seq_len)
            order, here[0] = order[int(here[0]) :], 0
            ranks = np.arange(len(order)) - np.repeat(np.cumsum(here) - here, here)
            documents[np.repeat(following, here) + ranks] = document + order
            following += here
        return documents
