"""Encode files as tokens: plain text, or records with weights that mark the learned tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jaxdist.data.chat import (
    BadRecord,
    ChatTemplate,
    Weighted,
    checked_messages,
    encode_completion,
    is_metadata,
    load_template,
)
from jaxdist.data.documents import TextPiece, read_pieces, read_records
from jaxdist.data.files import DataFile, size_of
from jaxdist.data.preferences import encode_labeled, encode_preference, encode_text_label
from jaxdist.data.record_kinds import LEARNED, RecordKind
from jaxdist.data.tokenizer import Tokenizer, begin_text, encode_after
from jaxdist.settings import ConfigError

BATCH_CHARACTERS = 4 << 20
"""Number of characters at which a batch goes to the tokenizer, enough to use all cores."""

_BATCH_TOKENS = 1 << 20

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of the files.

    Attributes:
        tokens: unsigned [length].
        weights: uint8 [length], 0 if a token is not learned; None = all are.
        ends: uint64, for each document that ends in `tokens` the index after its last token.
        position: bytes read so far of all files, as stored.
    """

    tokens: np.ndarray
    weights: np.ndarray | None
    ends: np.ndarray
    position: int


class TextEncoder:
    """Encode each text as a document, closed by the tokenizer's end token if it has one.

    `identity` is JSON of the tokenizer and the rules that determine the tokens of a file.
    """

    weighted = False
    records: RecordKind = "text"
    template: ChatTemplate | None = None

    def __init__(self, tokenizer: Tokenizer, text_field: str):
        self.tokenizer, self._text_field = tokenizer, text_field
        self.identity = [tokenizer.fingerprint, text_field, *_rules(tokenizer)]

    def chunks(self, files: Sequence[DataFile]) -> Iterator[Chunk]:
        """Yield the tokens of files in chunks; raises `ConfigError` for bad text."""

        def pieces(path: DataFile) -> Iterator[tuple[TextPiece, int, int]]:
            for piece in read_pieces(path, self._text_field):
                yield piece, len(piece.text), piece.position

        self._is_start = True
        for held, position in _batches(files, pieces, BATCH_CHARACTERS):
            yield self._encoded(held, position)

    def _encoded(self, pieces: list[TextPiece], position: int) -> Chunk:
        end_id = self.tokenizer.end_id
        end = [] if end_id is None else [np.array([end_id], np.min_scalar_type(end_id))]
        parts: list[np.ndarray] = []
        ends, total = [], 0
        encoded = self.tokenizer.encode_batch([piece.text for piece in pieces])
        for piece, piece_tokens in zip(pieces, encoded, strict=True):
            tokens = piece_tokens
            if self._is_start:
                tokens = begin_text(self.tokenizer, tokens)
            elif self.tokenizer.marks_start:
                tokens = encode_after(self.tokenizer, "\n.", piece.text)
            self._is_start = piece.last
            parts.append(tokens)
            total += len(tokens)
            if piece.last:
                parts += end
                total += len(end)
                ends.append(total)
        return Chunk(np.concatenate(parts), None, np.array(ends, np.uint64), position)


class RecordEncoder:
    """Encode each record as a document, or a preference as two; weights mark learned tokens."""

    weighted = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        records: RecordKind,
        template: ChatTemplate | None,
        text_field: str = "text",
    ):
        self.tokenizer, self.template, self.records = tokenizer, template, records
        self._text_field = text_field
        fingerprint = text_field if template is None else template.fingerprint
        kind = {"completion": "completion-1", "chat": fingerprint}.get(
            records, f"{records}-1-{fingerprint}"
        )
        self.identity = [tokenizer.fingerprint, kind, *_rules(tokenizer), "fields-1"]

    def chunks(self, files: Sequence[DataFile]) -> Iterator[Chunk]:
        """Yield tokens and weights of files in chunks; raises `ConfigError` for a bad record."""
        for records, position in _batches(files, self._documents, _BATCH_TOKENS):
            held = [document for documents in records for document in documents]
            yield Chunk(
                np.concatenate([document.tokens for document in held]),
                np.concatenate([document.weights for document in held]),
                np.cumsum([len(document.tokens) for document in held], dtype=np.uint64),
                position,
            )

    def _documents(self, path: DataFile) -> Iterator[tuple[list[Weighted], int, int]]:
        columns = _COLUMNS.get(self.records, [self._text_field, "label"])
        for record in read_records(path, columns, is_metadata):
            try:
                documents = self._encode(record.value)
            except BadRecord as error:
                raise ConfigError(f"{record.source} {error}") from None
            size = sum(len(document.tokens) for document in documents)
            yield documents, size, record.position

    def _encode(self, record: dict[str, Any]) -> list[Weighted]:
        if self.records == "text_label":
            return encode_text_label(record, self.tokenizer, self._text_field)
        if self.template is None:
            return [encode_completion(record, self.tokenizer)]
        if self.records in LEARNED:
            return [self.template.encode(checked_messages(record), LEARNED[self.records])]
        encode = encode_preference if self.records == "preference" else encode_labeled
        return encode(record, self.tokenizer, self.template)


_COLUMNS: dict[RecordKind, list[str]] = {
    # `messages`, or those of ShareGPT or Alpaca
    "chat": [],
    "chat_last": [],
    "chat_all": [],
    "completion": ["prompt", "completion"],
    "preference": ["chosen", "rejected"],
    "labeled": ["prompt", "completion", "label"],
}
"""Required columns of Parquet files by kind of records; `text_label` needs text field and label."""

Encoder: TypeAlias = TextEncoder | RecordEncoder


def make_encoder(
    tokenizer: Tokenizer,
    *,
    records: RecordKind = "text",
    text_field: str = "text",
    chat_template: str = "auto",
) -> Encoder:
    """Return the encoder for `data.records`."""
    if records == "text":
        return TextEncoder(tokenizer, text_field)
    has_template = records not in ("completion", "text_label")
    template = load_template(chat_template, tokenizer) if has_template else None
    return RecordEncoder(tokenizer, records, template, text_field)


def _rules(tokenizer: Tokenizer) -> list[str]:
    # Include the rules for starts of texts and pieces only if they affect this tokenizer's tokens.
    return [*map(str, tokenizer.begin_ids), *["pieces-1"] * tokenizer.marks_start]


def _batches(
    files: Sequence[DataFile], read: Callable[[DataFile], Iterator[tuple[T, int, int]]], limit: int
) -> Iterator[tuple[list[T], int]]:
    """Yield (items of total size ~`limit`, bytes read); `read` yields (item, size, bytes read)."""
    held: list[T] = []
    total, before = 0, 0
    for path in files:
        for item, size, position in read(path):
            held.append(item)
            total += size
            if total >= limit:
                yield held, before + position
                held, total = [], 0
        before += size_of(path)
    if held:
        yield held, before
