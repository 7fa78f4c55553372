"""Rows of one document each, padded: a prompt and its completion, or a text that gets scores."""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal, TypeAlias

import numpy as np

from jaxdist.core.types import MISMATCHED, REFERENCE
from jaxdist.data.chat import RecordKind
from jaxdist.data.corpus import Corpus
from jaxdist.data.encoding import UNDESIRABLE
from jaxdist.data.packing import Fields, Rows, Spans, cut, text_fields
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

RowKind: TypeAlias = Literal["pairs", "labeled", "scored", "classes"]
"""Kind of a row: a chosen or rejected completion; one that is desirable or not; a complete record
that gets a score (of a pair); a text with a class. The last two have weight 1 at their last token,
and their targets are 0."""


def row_kind(records: RecordKind, num_labels: int) -> RowKind:
    """Return the kind of the rows of single records, for a model with `num_labels` scores."""
    if records == "preference":
        return "scored" if num_labels else "pairs"
    return "labeled" if records == "labeled" else "classes"


def record_fields(seq_len: int, kind: RowKind, *, has_reference: bool = False) -> Fields:
    """Return the fields of `RecordRows`: name -> (shape, dtype).

    "labeled" and "classes" rows have a scalar `labels`. "labeled" rows also have the fields of a
    mismatched completion. `has_reference` adds the log-probability by a reference model, a scalar.
    """
    fields = text_fields(seq_len, packed=False)
    if has_reference:
        fields[REFERENCE] = ((), np.dtype(np.float32))
    others: Fields = {}
    if kind == "labeled":
        others = {f"{MISMATCHED}{name}": field for name, field in fields.items()}
    if kind in ("labeled", "classes"):
        others["labels"] = ((), np.dtype(np.int32))
    return {**fields, **others}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordRows:
    """Row i is document `documents[i]`, cut or padded to the length of a row.

    Attributes:
        documents: int64 [num_rows], indices of documents in the corpus.
        kind: "pairs" and "scored" documents are alternately chosen and rejected; the last token
            of "classes" is the label.
        label: text that identifies the selection of documents in the fingerprint.
    """

    corpus: Corpus
    seq_len: int
    documents: np.ndarray
    kind: RowKind
    label: str

    @property
    def num_rows(self) -> int:
        """Number of documents, one in each row."""
        return len(self.documents)

    @property
    def fields(self) -> Fields:
        """Name -> (shape of one row, dtype) of the fields of these rows."""
        return record_fields(self.seq_len, self.kind)

    @property
    def fingerprint(self) -> str:
        """Digest of corpus, selected documents and row length."""
        return f"records-{self.corpus.fingerprint}-{self.label}-{self.seq_len}"

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices` int64 [n], name -> [n, ...]; padding is 0 in every field."""
        batch = {
            name: np.zeros((len(indices), *shape), dtype)
            for name, (shape, dtype) in self.fields.items()
        }
        for row, index in enumerate(np.asarray(indices, np.int64).tolist()):
            tokens, weights = _document(self.corpus, self.documents[index])
            if self.kind in ("scored", "classes"):
                self._fill_scored(batch, row, tokens)
                continue
            self._fill(batch, row, tokens, weights > 0)
            if self.kind != "labeled":
                continue
            batch["labels"][row] = weights.max() != UNDESIRABLE
            start = int(np.argmax(weights > 0))
            other, learned = _document(self.corpus, self.documents[index - 1])
            begin = int(np.argmax(learned > 0))
            tokens = np.concatenate([tokens[:start], other[begin:]])
            weights = np.concatenate([np.zeros(start, bool), learned[begin:] > 0])
            self._fill(batch, row, tokens, weights, MISMATCHED)
        return cut(batch, spans)

    def _fill(
        self, batch: Rows, row: int, tokens: np.ndarray, learned: np.ndarray, prefix: str = ""
    ) -> None:
        """Write a document, tokens and bool `learned` [length], into one row of a batch."""
        length = min(self.seq_len, len(tokens) - 1)
        batch[f"{prefix}tokens"][row, :length] = tokens[:length]
        batch[f"{prefix}targets"][row, :length] = tokens[1 : length + 1]
        batch[f"{prefix}weights"][row, :length] = learned[1 : length + 1]

    def _fill_scored(self, batch: Rows, row: int, tokens: np.ndarray) -> None:
        """Write the tokens [length] of a record, and its label if any, into one row of a batch."""
        if self.kind == "classes":
            batch["labels"][row], tokens = tokens[-1], tokens[:-1]
        length = min(self.seq_len, len(tokens))
        batch["tokens"][row, :length] = tokens[:length]
        batch["weights"][row, length - 1] = 1


def _document(corpus: Corpus, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and weights [length] of a document."""
    ends = corpus.document_ends
    bounds = int(ends[number - 1]) if number else 0, int(ends[number])
    return corpus.tokens(*bounds), corpus.weights(*bounds)


def split_records(
    corpus: Corpus,
    *,
    seq_len: int,
    held: float,
    kind: RowKind,
    num_labels: int,
    long_records: Literal["cut", "drop", "reject"],
) -> tuple[RecordRows, RecordRows | None]:
    """Return training rows, and held-out rows (the last fraction `held`) or None, of a corpus.

    Records longer than a row are cut, dropped or rejected; cut records without a learned token are
    dropped. Chosen and rejected completions stay together.
    """
    size = 2 if kind in ("pairs", "scored") else 1
    if kind == "classes":
        _check_labels(corpus, num_labels)
    lengths = np.diff(corpus.document_ends.astype(np.int64), prepend=0)
    longest = seq_len + (kind != "scored")
    is_long = lengths > longest
    dropped = is_long & (long_records != "cut")
    if long_records == "cut" and kind != "classes":
        for number in np.flatnonzero(is_long).tolist():
            dropped[number] = not _document(corpus, number)[1][1:longest].any()
    examples: np.ndarray = np.any(dropped.reshape(-1, size), axis=1)
    count = int(is_long.reshape(-1, size).any(1).sum())
    if count and long_records == "reject":
        raise ConfigError(
            f"{count} of {len(examples)} records of {str(corpus.folder)!r} are longer than "
            f"train.seq_len={seq_len} (the longest has {lengths.max()} tokens). Raise it, or set "
            "data.long_records to cut or drop."
        )
    if count:
        log.info(
            "%d of %d records are longer than train.seq_len=%d: %d are cut, %d are dropped",
            count, len(examples), seq_len, count - examples.sum(), examples.sum(),
        )  # fmt: skip
    kept = np.flatnonzero(~examples)
    if not len(kept):
        raise ConfigError(
            f"all {len(examples)} records of {str(corpus.folder)!r} are dropped: their prompts or "
            f"completions do not fit train.seq_len={seq_len} (the longest has {lengths.max()} "
            "tokens). Raise it."
        )
    first = min(round(len(kept) * (1 - held)), len(kept) - bool(held and len(kept) > 1))

    # Earlier versions kept pairs that are cut in their prompts; their rows have another label.
    drops = long_records == "cut" and examples.any()
    score = "" if kind != "scored" else "-scored-dropped" if drops else "-scored"

    def part(name: str, numbers: np.ndarray) -> RecordRows:
        """Return the rows of the examples with `numbers` int64 [n]; `name` goes into the label."""
        return RecordRows(
            corpus=corpus,
            seq_len=seq_len,
            documents=(numbers[:, None] * size + np.arange(size)).reshape(-1),
            kind=kind,
            label=f"{name}-{held}-{long_records}{score}",
        )

    return part("train", kept[:first]), part("held", kept[first:]) if held else None


def _check_labels(corpus: Corpus, num_labels: int) -> None:
    """Raise `ConfigError` if a label, the last token of its document, is `num_labels` or more."""
    ends = map(int, corpus.document_ends)
    largest = max((int(corpus.tokens(end - 1, end)[0]) for end in ends), default=0)
    if largest >= num_labels:
        raise ConfigError(
            f"{str(corpus.folder)!r} has the label {largest}, and model.num_labels={num_labels}: "
            f"labels begin at 0. Set model.num_labels={largest + 1}."
        )
