"""Encode files as tokens: plain text, or records with weights that mark the learned tokens.

Records that are not packed have these formats, the first four those of TRL:

    {"prompt": "...", "chosen": "...", "rejected": "..."}      texts
    {"prompt": [...], "chosen": [...], "rejected": [...]}      messages, e.g. [{"role", "content"}]
    {"chosen": ..., "rejected": ...}                           the prompt is their common start
    {"prompt": ..., "completion": ..., "label": true}          labeled: desirable or not
    {"text": "...", "label": 2}                                text_label: a class
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jaxdist.data.chat import (
    LEARNED,
    BadRecord,
    ChatTemplate,
    Message,
    RecordKind,
    Weighted,
    check_fields,
    check_messages,
    checked_messages,
    common_length,
    encode_completion,
    is_metadata,
    load_template,
)
from jaxdist.data.documents import TextPiece, read_pieces, read_records
from jaxdist.data.files import DataFile, size_of
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


UNDESIRABLE = 2
"""Weight of the learned tokens of an undesirable completion; others have 1."""

_SCORES = ("messages", "score_chosen", "score_rejected", "margin")
"""Fields of public preference sets that repeat or rate the completions."""


def encode_preference(
    record: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate
) -> list[Weighted]:
    """Return two documents [length]: prompt and chosen completion, prompt and rejected one.

    Only tokens of completions have weight 1. Raises `BadRecord`.
    """
    check_fields(record, ("prompt", "chosen", "rejected", *_SCORES))
    prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, list) and isinstance(rejected, list):
        first = _messages(chosen, "chosen"), _messages(rejected, "rejected")
        start = _messages(prompt, "prompt") if isinstance(prompt, list) else []
        if not start:
            start = first[0][: common_length(*first)]
            if isinstance(prompt, str) and prompt not in [m["content"] for m in start]:
                raise BadRecord("has a text 'prompt' that none of the common first messages has.")
            first = first[0][len(start) :], first[1][len(start) :]
        sides = [_encode_messages(start, answers, template) for answers in first]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt = _common_text(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        sides = [
            encode_completion({"prompt": prompt, "completion": answer}, tokenizer)
            for answer in (chosen, rejected)
        ]
    else:
        raise BadRecord(
            "needs 'chosen' and 'rejected', both texts or both lists of messages "
            f"(it has: {', '.join(record)})."
        )
    if np.array_equal(sides[0].tokens, sides[1].tokens):
        raise BadRecord("has equal 'chosen' and 'rejected' completions. Remove the record.")
    return sides


def encode_labeled(
    record: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate
) -> list[Weighted]:
    """Return one document [length]: prompt and completion; raises `BadRecord`.

    Tokens of the completion have weight 1 if it is desirable, else `UNDESIRABLE`.
    """
    check_fields(record, ("prompt", "completion", "label"))
    prompt, completion, label = (record.get(name) for name in ("prompt", "completion", "label"))
    if not isinstance(label, bool):
        raise BadRecord(f"has label {label!r}: it must be true or false.")
    if isinstance(prompt, list) and isinstance(completion, list):
        start, answers = _messages(prompt, "prompt"), _messages(completion, "completion")
        one = _encode_messages(start, answers, template)
    else:
        one = encode_completion({"prompt": prompt, "completion": completion}, tokenizer)
    return [one if label else Weighted(one.tokens, one.weights * np.uint8(UNDESIRABLE))]


def encode_text_label(
    record: dict[str, Any], tokenizer: Tokenizer, text_field: str
) -> list[Weighted]:
    """Return one document [length + 1]: a text's tokens, then its label, which alone has weight 1.

    There is no end token. Raises `BadRecord`.
    """
    check_fields(record, (text_field, "label"))
    text, label = record.get(text_field), record.get("label")
    if not isinstance(text, str) or not text:
        raise BadRecord(f"has no text {text_field!r} (it has: {', '.join(record)}).")
    if type(label) is not int or not 0 <= label < tokenizer.vocab_size:
        raise BadRecord(
            f"has label {label!r}: it must be an integer from 0 to {tokenizer.vocab_size - 1}, "
            "the largest token."
        )
    tokens = begin_text(tokenizer, tokenizer.encode(text))
    tokens = np.append(tokens, np.asarray(label, tokens.dtype))
    return [Weighted(tokens, (np.arange(len(tokens)) == len(tokens) - 1).astype(np.uint8))]


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"has no list of messages {name!r}.")
    return check_messages(value)


def _encode_messages(
    prompt: Sequence[Message], answers: Sequence[Message], template: ChatTemplate
) -> Weighted:
    """Return a conversation of which only the answers after the prompt have weights, [length]."""
    if not prompt or prompt[-1]["role"] != "user":
        raise BadRecord("has a prompt that does not end with a user message.")
    if not any(message["role"] == "assistant" for message in answers):
        raise BadRecord("has a completion without an assistant message.")
    tokens, weights = template.encode([*prompt, *answers])
    start = template.prompt(prompt)
    common = min(len(start), len(tokens))
    differs = np.flatnonzero(start[:common] != tokens[:common])
    common = int(differs[0]) if len(differs) else common
    return Weighted(tokens, np.where(np.arange(len(tokens)) < common, np.uint8(0), weights))


def _common_text(chosen: str, rejected: str) -> str:
    """Return the common start of two texts, without a space that begins the completions."""
    same = common_length(chosen, rejected)
    return chosen[: same - (chosen[same - 1 : same] == " ")]
