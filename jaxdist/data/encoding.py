"""Files to tokens: text as it stands, or records of which only the answers count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxdist.core.types import ConfigError
from jaxdist.data.chat import (
    BadRecord,
    ChatTemplate,
    Weighted,
    checked_messages,
    encode_completion,
    load_template,
)
from jaxdist.data.documents import Piece, read_pieces, read_records
from jaxdist.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 4 << 20
"""Text given to the tokenizer at once, so that it can use all cores."""

_BATCH_TOKENS = 1 << 20

RecordKind = Literal["text", "chat", "completion"]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some tokens, in the order of the files.

    Attributes:
        tokens: unsigned [length].
        weights: uint8 [length], 1 where a token is learned; None = everywhere.
        ends: uint64, where documents end inside `tokens`, exclusive.
        position: bytes of all files (as stored) read so far.
    """

    tokens: np.ndarray
    weights: np.ndarray | None
    ends: np.ndarray
    position: int


class Encoder(Protocol):
    """How files become tokens.

    Attributes:
        tokenizer: what it uses.
        weighted: whether chunks have weights.
        identity: JSON that changes whenever the same files could become other tokens.
        records: what is read.
        template: how conversations are written down; None for anything else.
    """

    tokenizer: Tokenizer
    weighted: bool
    records: RecordKind
    template: ChatTemplate | None
    identity: list[str]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        """The tokens of files; raises `ConfigError` with file and line where one is bad."""
        ...


def make_encoder(
    tokenizer: Tokenizer,
    *,
    records: RecordKind = "text",
    text_field: str = "text",
    chat_template: str = "auto",
) -> Encoder:
    """The encoder that `data.records` asks for.

    Raises:
        ConfigError: the chat template cannot be used, or the tokenizer has no end token.
    """
    if records == "text":
        return TextEncoder(tokenizer, text_field)
    template = load_template(chat_template, tokenizer) if records == "chat" else None
    return RecordEncoder(tokenizer, template)


class TextEncoder:
    """Each text is a document; the tokenizer's end token, if it has one, closes it."""

    weighted = False
    records: RecordKind = "text"
    template: ChatTemplate | None = None

    def __init__(self, tokenizer: Tokenizer, text_field: str):
        self.tokenizer, self._text_field = tokenizer, text_field
        self.identity = [tokenizer.fingerprint, text_field]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        """See `Encoder`."""
        for pieces, position in self._batches(files):
            yield self._encoded(pieces, position)

    def _batches(self, files: Sequence[Path]) -> Iterator[tuple[list[Piece], int]]:
        held: list[Piece] = []
        characters, before = 0, 0
        for path in files:
            position = before
            for piece in read_pieces(path, self._text_field):
                held.append(piece)
                characters += len(piece.text)
                position = before + piece.position
                if characters >= BATCH_CHARACTERS:
                    yield held, position
                    held, characters = [], 0
            before += path.stat().st_size
        if held:
            yield held, before

    def _encoded(self, pieces: list[Piece], position: int) -> Chunk:
        ends, total = [], 0
        parts: list[np.ndarray] = []
        end_id = self.tokenizer.end_id
        end = [] if end_id is None else [np.array([end_id], np.min_scalar_type(end_id))]
        encoded = self.tokenizer.encode_batch([piece.text for piece in pieces])
        for piece, tokens in zip(pieces, encoded, strict=True):
            parts.append(tokens)
            total += len(tokens)
            if piece.last:
                parts += end
                total += len(end)
                ends.append(total)
        return Chunk(np.concatenate(parts), None, np.array(ends, np.uint64), position)


class RecordEncoder:
    """Each record is a document of which only the answers count: chat, or prompt and completion."""

    weighted = True

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        """Without a template: prompt and completion."""
        self.tokenizer, self.template = tokenizer, template
        self.records: RecordKind = "completion" if template is None else "chat"
        kind = template.fingerprint if template is not None else "completion-1"
        self.identity = [tokenizer.fingerprint, kind]
        self._columns = ["prompt", "completion"] if template is None else ["messages"]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        """See `Encoder`."""
        held: list[Weighted] = []
        length, before = 0, 0
        for path in files:
            position = before
            for record in read_records(path, self._columns):
                try:
                    held.append(self._encoded(record.value))
                except BadRecord as error:
                    raise ConfigError([f"{record.place} {error}"]) from None
                length += len(held[-1].tokens)
                position = before + record.position
                if length >= _BATCH_TOKENS:
                    yield _chunk(held, position)
                    held, length = [], 0
            before += path.stat().st_size
        if held:
            yield _chunk(held, before)

    def _encoded(self, record: dict[str, Any]) -> Weighted:
        if self.template is None:
            return encode_completion(record, self.tokenizer)
        return self.template.encode(checked_messages(record))


def _chunk(documents: Sequence[Weighted], position: int) -> Chunk:
    """Documents, tokens and weights [length] each, one after the other."""
    return Chunk(
        np.concatenate([document.tokens for document in documents]),
        np.concatenate([document.weights for document in documents]),
        np.cumsum([len(document.tokens) for document in documents], dtype=np.uint64),
        position,
    )
