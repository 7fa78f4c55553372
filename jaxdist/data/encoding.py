"""Encode files as tokens: plain text, or records of which only the answers are learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias, TypeVar

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
from jaxdist.data.tokenizer import Tokenizer, begin_text, encode_after
from jaxdist.settings import ConfigError

BATCH_CHARACTERS = 4 << 20
"""Characters per call of the tokenizer, enough to use all cores."""

_BATCH_TOKENS = 1 << 20

T = TypeVar("T")

RecordKind = Literal["text", "chat", "completion"]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of the files.

    Attributes:
        tokens: unsigned [length].
        weights: uint8 [length], 1 if a token is learned; None = all are.
        ends: uint64, exclusive ends of documents inside `tokens`.
        position: bytes of all stored files read so far.
    """

    tokens: np.ndarray
    weights: np.ndarray | None
    ends: np.ndarray
    position: int


class TextEncoder:
    """Encode each text as a document, closed by the tokenizer's end token if it has one.

    Attributes:
        identity: JSON that changes whenever files could be tokenized differently.
        template: format of conversations; None for other records.
    """

    weighted = False
    records: RecordKind = "text"
    template: ChatTemplate | None = None

    def __init__(self, tokenizer: Tokenizer, text_field: str):
        self.tokenizer, self._text_field = tokenizer, text_field
        self.identity = [tokenizer.fingerprint, text_field, *_rules(tokenizer)]

    def chunks(self, files: Sequence[DataFile]) -> Iterator[Chunk]:
        """Yield the tokens of files; raises `ConfigError` with file and line of a bad one."""

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
    """Encode each chat, or prompt and completion, as a document; only answers are learned."""

    weighted = True

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        """Without a template, records are prompt and completion."""
        self.tokenizer, self.template = tokenizer, template
        self.records: RecordKind = "completion" if template is None else "chat"
        kind = template.fingerprint if template is not None else "completion-1"
        self.identity = [tokenizer.fingerprint, kind, *_rules(tokenizer), "fields-1"]

    def chunks(self, files: Sequence[DataFile]) -> Iterator[Chunk]:
        """Yield the tokens of files."""
        for held, position in _batches(files, self._documents, _BATCH_TOKENS):
            yield Chunk(
                np.concatenate([document.tokens for document in held]),
                np.concatenate([document.weights for document in held]),
                np.cumsum([len(document.tokens) for document in held], dtype=np.uint64),
                position,
            )

    def _documents(self, path: DataFile) -> Iterator[tuple[Weighted, int, int]]:
        columns = ["prompt", "completion"] if self.template is None else ["messages"]
        for record in read_records(path, columns, is_metadata):
            try:
                if self.template is None:
                    document = encode_completion(record.value, self.tokenizer)
                else:
                    document = self.template.encode(checked_messages(record.value))
            except BadRecord as error:
                raise ConfigError(f"{record.source} {error}") from None
            yield document, len(document.tokens), record.position


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
    template = load_template(chat_template, tokenizer) if records == "chat" else None
    return RecordEncoder(tokenizer, template)


def _rules(tokenizer: Tokenizer) -> list[str]:
    # Include the rules for starts of texts and pieces only if they affect this tokenizer's tokens.
    return [*map(str, tokenizer.begin_ids), *["pieces-1"] * tokenizer.marks_start]


def _batches(
    files: Sequence[DataFile], read: Callable[[DataFile], Iterator[tuple[T, int, int]]], limit: int
) -> Iterator[tuple[list[T], int]]:
    """Yield (items of about size `limit`, bytes read); `read` yields (item, size, bytes read)."""
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
