"""Pack tokens into rows of one length: windows of a stream, or complete documents.

A row has `seq_len` inputs and the next token of each as target. Targets across document boundaries
have weight 0 if the packing separates documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxdist.data.best_fit import BestFitPlan
from jaxdist.data.corpus import Corpus

Fields = dict[str, tuple[tuple[int, ...], np.dtype]]
Rows = dict[str, np.ndarray]
Spans = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of positions in a row, in the order of the result."""


class Part(Protocol):
    """Rows of one source, by random access."""

    @property
    def num_rows(self) -> int:
        """Number of rows of one epoch; of a streamed part an upper bound of row numbers."""
        ...

    @property
    def fields(self) -> Fields:
        """Name -> (shape of one row, dtype)."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the data and rules that determine the rows; of a function's rows, of a few."""
        ...

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices`, int64 [n], in that order: name -> [n, ...] as in `fields`.

        With `spans`, only these positions of each row: [n, positions, ...].
        """
        ...


def cut(rows: Rows, spans: Spans | None) -> Rows:
    """Select the positions in `spans` (None = all) from arrays [n, seq, ...]; keep arrays [n]."""
    if spans is None:
        return rows
    part = lambda x: np.concatenate([x[:, start:stop] for start, stop in spans], axis=1)
    return {name: part(x) if x.ndim > 1 else x for name, x in rows.items()}


def divide_rows(rows: Rows, pieces: int) -> Rows:
    """Cut windows [n, seq] into equal parts [n * pieces, seq / pieces], as windows of that length.

    Segments, and positions of a document that begins earlier, count from the start of a part.
    """
    rows = {name: x.reshape(len(x) * pieces, -1) for name, x in rows.items()}
    if "segments" in rows:
        first = rows["segments"][:, :1]
        before = np.where(rows["segments"] == first, rows["positions"][:, :1], 0)
        rows |= {"positions": rows["positions"] - before, "segments": rows["segments"] - first + 1}
    return rows


def gather_rows(numbers: np.ndarray, read: Callable[[int, np.ndarray], Rows]) -> Rows:
    """Return rows of several parts in the requested order: name -> [n, ...].

    `numbers` int64 [n] is the part of each row. `read(part, mask)` returns the rows of a part that
    `mask` bool [n] selects.
    """
    out: Rows = {}
    for number in np.unique(numbers):
        chosen = numbers == number
        for name, values in read(int(number), chosen).items():
            shape = (len(numbers), *values.shape[1:])
            out.setdefault(name, np.empty(shape, values.dtype))[chosen] = values
    return out


def text_fields(seq_len: int, packed: bool) -> Fields:
    """Return the fields of text rows (see `Batch`); `packed` adds segments and positions."""
    per_token = ((seq_len,), np.dtype(np.int32))
    fields: Fields = {
        "tokens": per_token,
        "targets": per_token,
        "weights": ((seq_len,), np.dtype(np.float32)),
    }
    return fields | ({"segments": per_token, "positions": per_token} if packed else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Row i is tokens [start + i·seq_len, start + (i+1)·seq_len] of the corpus, below `stop`.

    With `documents`, rows mark document boundaries; positions count from them or the row's start.
    """

    corpus: Corpus
    start: int
    stop: int
    seq_len: int
    documents: bool

    @property
    def num_rows(self) -> int:
        """Number of complete rows; the target of a row's last input needs one more token."""
        return max(0, self.stop - self.start - 1) // self.seq_len

    @property
    def fields(self) -> Fields:
        """Name -> (shape of one row, dtype) of the fields of text rows."""
        return text_fields(self.seq_len, self.documents)

    @property
    def fingerprint(self) -> str:
        """Digest of corpus, range, length and packing."""
        kind = "documents" if self.documents else "stream"
        return f"{kind}-{self.corpus.fingerprint}-{self.start}-{self.stop}-{self.seq_len}"

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices` int64 [n], name -> [n, ...]; reads only tokens of `spans`."""
        starts = self.start + np.asarray(indices, np.int64) * self.seq_len
        spans = spans or ((0, self.seq_len),)
        batch, at = _empty(self.fields, len(starts), spans), 0
        batch["weights"].fill(1)
        for first, last in spans if len(starts) else ():
            columns = slice(at, at + last - first)
            bounds = [(start + first, start + last + 1) for start in starts.tolist()]
            # Copy all rows at once: copying row by row takes a sixth longer per batch.
            tokens = np.stack(list(self.corpus.ranges(bounds)))
            batch["tokens"][:, columns] = tokens[:, :-1]
            batch["targets"][:, columns] = tokens[:, 1:]
            has_more = self.documents or self.corpus.weighted
            for row, start in enumerate(starts.tolist() if has_more else ()):
                part = {name: values[row, columns] for name, values in batch.items()}
                if self.corpus.weighted:
                    part["weights"][:] = self.corpus.weights(start + first + 1, start + last + 1)
                if self.documents:
                    self._mark(part, start, first)
            at = columns.stop
        return batch

    def _mark(self, part: Rows, start: int, first: int) -> None:
        """Set segments and positions, and weights at document ends, of a part of a window.

        `start` is the first token of the window; `part` has its inputs from `first` on, [length].
        """
        length, ends = len(part["tokens"]), self.corpus.document_ends
        before, here, after = self.corpus.ended_before(
            [start + 1, start + first + 1, start + first + length + 1]
        )
        inside = ends[here:after].astype(np.int64) - start  # ends in this part, after its start
        part["weights"][inside - first - 1] = 0
        counts = np.diff(inside, prepend=first, append=first + length)
        own = max(0, int(ends[here - 1]) - start) if here > before else 0
        begins = np.append(own, inside)
        number = int(here - before)
        part["segments"][:] = np.repeat(np.arange(1 + number, 1 + number + len(counts)), counts)
        offsets = np.arange(first, first + length)
        part["positions"][:] = offsets - np.repeat(begins, counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rows of complete documents; documents longer than a row are cut or left out.

    `label` identifies the plan in the fingerprint.
    """

    corpus: Corpus
    seq_len: int
    label: str
    plan: PiecePlan | BestFitPlan

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.plan.num_rows

    @property
    def fields(self) -> Fields:
        """Name -> (shape of one row, dtype) of the fields of text rows."""
        return text_fields(self.seq_len, True)

    @property
    def fingerprint(self) -> str:
        """Digest of corpus, range of tokens, packing and row length."""
        rule = "best_fit" if isinstance(self.plan, PiecePlan) else "best_fit2"
        return f"{rule}-{self.corpus.fingerprint}-{self.label}-{self.seq_len}"

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices` int64 [n], name -> [n, ...]; padding is 0 in every field."""
        spans = spans or ((0, self.seq_len),)
        batch = _empty(self.fields, len(indices), spans)
        for row, index in enumerate(np.asarray(indices, np.int64).tolist()):
            pieces, at = self.plan.pieces(index), 0
            for first, last in spans:
                part = {name: values[row, at : at + last - first] for name, values in batch.items()}
                self._fill(part, pieces, first)
                at += last - first
        return batch

    def _fill(self, part: Rows, pieces: Iterable[tuple[int, int]], first: int) -> None:
        """Write a row of `pieces` (first token, length) from position `first` on to fields [n]."""
        last, end = first + len(part["tokens"]), 0
        for segment, (start, length) in enumerate(pieces, start=1):
            begin, end = end, end + length
            low, high = max(first, begin), min(last, end)
            if low >= high:
                continue
            tokens = self.corpus.tokens(start + low - begin, start + high - begin + 1)
            columns = slice(low - first, high - first)
            part["tokens"][columns] = tokens[:-1]
            part["targets"][columns] = tokens[1:]
            weights = self.corpus.weights(start + low - begin + 1, start + high - begin + 1)
            part["weights"][columns] = weights
            part["segments"][columns] = segment
            part["positions"][columns] = np.arange(low - begin, high - begin)


class PiecePlan(NamedTuple):
    """Pieces of each row, placed by the rules of `data.text_format` below 3.

    Attributes:
        row_starts: int64 [num_rows + 1], first piece of each row.
        piece_starts, piece_lengths: int64 [pieces], first token and number of inputs, row by row.
    """

    row_starts: np.ndarray
    piece_starts: np.ndarray
    piece_lengths: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_starts) - 1

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return (first token in the corpus, number of inputs) for each piece of a row."""
        pieces = slice(self.row_starts[row], self.row_starts[row + 1])
        starts, lengths = self.piece_starts[pieces], self.piece_lengths[pieces]
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))


def _empty(fields: Fields, num_rows: int, spans: Spans) -> Rows:
    """Return zeros for the positions of the spans: name -> [num_rows, positions]."""
    length = sum(stop - start for start, stop in spans)
    return {name: np.zeros((num_rows, length), dtype) for name, (_, dtype) in fields.items()}


def fit_documents(
    corpus: Corpus, start: int, stop: int, seq_len: int, drop_long: bool = False
) -> PiecePlan:
    """Place the documents of tokens [start, stop) one by one, for `data.text_format` below 3.

    The rule is that of `BestFitPlan`, but rows and pieces of equal length are in another order, and
    uncut documents without a token in the loss are dropped, too. Takes about 2 µs and 80 bytes per
    document.
    """
    first, last = corpus.ended_before([start + 1, stop + 1])
    inside = np.asarray(corpus.document_ends[first:last], np.int64)
    ends = np.unique(np.append(inside, stop))
    starts = np.concatenate([[start], ends[:-1]])
    if drop_long:
        fits = ends - starts - 1 <= seq_len
        starts, ends = starts[fits], ends[fits]
    inputs = ends - starts - 1
    cuts = np.maximum(-(-inputs // seq_len), 0)  # pieces of each document
    document = np.repeat(np.arange(len(inputs)), cuts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    piece_starts = starts[document] + number * seq_len
    lengths = np.minimum(inputs[document] - number * seq_len, seq_len)
    if corpus.weighted:
        teaches = _teaching(corpus, piece_starts, lengths)
        piece_starts, lengths = piece_starts[teaches], lengths[teaches]
    row_of, num_rows = _best_fit(lengths, seq_len)
    by_row = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=num_rows)
    return PiecePlan(
        row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        piece_starts=piece_starts[by_row],
        piece_lengths=lengths[by_row],
    )


def _teaching(corpus: Corpus, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return which pieces contain a token of the loss; starts and lengths int64 [n] -> bool [n]."""
    pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
    learned = (corpus.weights(start + 1, start + length + 1).any() for start, length in pieces)
    return np.fromiter(learned, bool, len(starts))


def _best_fit(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Return the row of each piece, int64 [n] from lengths int64 [n], and the number of rows."""
    row_of = np.empty(len(lengths), np.int64)
    free: list[list[int]] = [[] for _ in range(seq_len + 1)]  # rows by their free space
    spaces = 0  # bit r is set if some row has r free: the best fit is the next set bit
    num_rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = free[space].pop()
            if not free[space]:
                spaces ^= 1 << space
        else:
            space, row = seq_len, num_rows
            num_rows += 1
        row_of[piece] = row
        if space > length:
            free[space - length].append(row)
            spaces |= 1 << (space - length)
    return row_of, num_rows


def split_text(
    corpus: Corpus,
    packing: Literal["stream", "documents", "best_fit"],
    seq_len: int,
    held: float,
    *,
    drop_long: bool = False,
    one_by_one: bool = False,
) -> tuple[Part, Part | None]:
    """Return training rows, and held-out rows (the last fraction `held`) or None, of a corpus.

    `one_by_one` selects `fit_documents`. Packings that separate documents split between two
    documents if possible; "stream" holds out at least a row if the text has two.
    """
    cut = round(corpus.num_tokens * (1 - held))
    if held and corpus.num_tokens >= 2 * (seq_len + 1):
        cut = min(cut, corpus.num_tokens - (seq_len + 1))
    if packing != "stream" and held and corpus.num_documents > 1:
        document = int(corpus.ended_before([cut])[0])
        cut = int(corpus.document_ends[min(document, corpus.num_documents - 2)])

    def part(start: int, stop: int) -> Part:
        if packing == "best_fit":
            make: Any = fit_documents if one_by_one else BestFitPlan
            plan = make(corpus=corpus, start=start, stop=stop, seq_len=seq_len, drop_long=drop_long)
            label = f"{start}-{stop}{'-drop' * drop_long}"
            return Fitted(corpus=corpus, seq_len=seq_len, label=label, plan=plan)
        return Windows(
            corpus=corpus, start=start, stop=stop, seq_len=seq_len, documents=packing == "documents"
        )

    return part(0, cut), part(cut, corpus.num_tokens) if held else None
