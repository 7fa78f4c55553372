"""Encode conversations as tokens and weights: which tokens a model learns to produce.

By default, a conversation is formatted with the tokenizer's chat template (Jinja, stored next to
`tokenizer.json`), so that training and inference match. Without one, the format is `plain`:

    <|system|>
    Be brief.
    <|user|>
    What is a mesh?
    <|assistant|>
    Devices with names.END

END is the end token of the tokenizer. Weights are 1 on the assistant's messages and the tokens
that end them, else 0; or 1 on the last of these messages only, or on every token (`Learned`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxdist.data.template_sandbox import Template, TemplateFailed
from jaxdist.data.tokenizer import (
    OLD_TEXT_FORMAT,
    FileTokenizer,
    Tokenizer,
    begin_text,
    encode_pieces,
    token_texts,
)
from jaxdist.runtime.storage import Location, locate
from jaxdist.settings import ConfigError

RecordKind: TypeAlias = Literal[
    "text", "chat", "chat_last", "chat_all", "completion", "preference", "labeled", "text_label"
]

SINGLE = ("preference", "labeled", "text_label")
"""Kinds of records whose documents have rows of their own."""

Learned: TypeAlias = Literal["answers", "last", "all"]
"""The part of a conversation with weight 1: every answer, the last one, or every token."""

LEARNED: dict[str, Learned] = {"chat": "answers", "chat_last": "last", "chat_all": "all"}
"""Kinds of records that are conversations, and the learned part of each."""

ROLES = ("system", "user", "assistant")
"""Accepted roles. Models have no common format for tools and functions."""

_STAND_IN = "\ue000what the assistant says\ue001"  # private use characters, absent from texts

_MASKS = ("weight", "train", "training", "loss_mask", "trainable")
"""Fields that exclude a message in other trainers; only 1, true and null are accepted."""

_METADATA = {
    "id", "uuid", "index", "idx", "hash", "prompt_id", "conversation_id", "source", "dataset",
    "subset", "split", "url", "license", "lang", "language", "category", "tags", "topic", "task",
    "metadata", "meta", "model", "date", "timestamp", "created_at", "finish_reason", "num_turns",
    "num_tokens", "cached", "index_level_0",
}  # fmt: skip
"""Fields that are ignored; docs/fine-tuning.md lists them."""

Message = dict[str, str]


class Weighted(NamedTuple):
    """A document: `tokens` (unsigned) and `weights` (uint8, 0 = not in the loss), both [length]."""

    tokens: np.ndarray
    weights: np.ndarray


class BadRecord(ValueError):
    """Raised for a wrong record; the caller adds its source to the message."""


def checked_messages(record: dict[str, Any], *, answered: bool = True) -> list[Message]:
    """Return the messages of a record, also of ShareGPT and Alpaca, as {"role", "content"}.

    One must be the assistant's or, with `answered=False`, the last one the user's. Raises
    `BadRecord` for another record.
    """
    if "messages" not in record:
        record = _translated(record)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        have = ", ".join(record)
        raise BadRecord(f"has no list 'messages' (keys: {have}). Use data.records=text for text.")
    more = ("tools", "system", "functions", "documents")  # `generate` accepts other fields
    check_fields(record if answered else {key: record.get(key) for key in more}, ("messages",))
    checked = check_messages(messages)
    if not answered and messages[-1]["role"] != "user":
        raise BadRecord("does not end with a user message: there is nothing to answer.")
    if answered and not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("has no assistant message: there is nothing to learn.")
    return checked


_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "system": "system",
}  # fmt: skip
"""`from` of ShareGPT -> role."""


def _translated(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of ShareGPT or Alpaca with `messages`; others are returned unchanged.

    ShareGPT has turns {"from", "value"} in `conversations`, and optionally `system`. Alpaca has
    `instruction`, an optional `input` that follows it after an empty line, and `output`; its
    `text` repeats them.
    """
    if isinstance(turns := record.get("conversations"), list):
        rest = {name: x for name, x in record.items() if name not in ("conversations", "system")}
        system = record.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        return {**rest, "messages": messages + [_message_of(turn) for turn in turns]}
    if {"instruction", "output"} <= record.keys():
        used = ("instruction", "input", "output", "text")
        rest = {name: x for name, x in record.items() if name not in used}
        parts = [part for part in (record["instruction"], record.get("input")) if part]
        if all(isinstance(part, str) for part in parts):
            user = {"role": "user", "content": "\n\n".join(parts)}
            answer = {"role": "assistant", "content": record["output"]}
            return {**rest, "messages": [user, answer]}
    return record


def _message_of(turn: Any) -> Any:
    """Return a turn of ShareGPT as a message; anything else unchanged, for the error."""
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        return turn
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    speaker = turn["from"]
    role = _SPEAKERS.get(speaker.lower(), speaker) if isinstance(speaker, str) else speaker
    return {"role": role, "content": turn["value"], **rest}


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """Return role and content of each message; raise `BadRecord` if they are wrong."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRecord(f"message {number} is not an object with role and content.")
        check_fields(message, ("role", "content"), f"message {number} ")
        if message["role"] not in ROLES:
            raise BadRecord(
                f"message {number} has role {message['role']!r}: roles are {', '.join(ROLES)}."
            )
        if not isinstance(message["content"], str):
            kind = type(message["content"]).__name__
            raise BadRecord(f"message {number} has content of type {kind}: it must be text.")
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadRecord(f"message {number} is an empty answer. Repair or remove the record.")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def is_metadata(name: str) -> bool:
    """Return whether a field or column of this name only describes a record."""
    return name.lower().strip("_") in _METADATA


def check_fields(record: dict[str, Any], used: Sequence[str], which: str = "") -> None:
    """Raise `BadRecord` unless each field is in `used`, metadata, empty, or a mask of 1."""
    lost = [
        key
        for key, value in record.items()
        if key not in used
        and not is_metadata(key)
        and (value not in (None, "", [], {}) if key not in _MASKS else value not in (None, 1))
    ]
    if lost:
        system = "Write system as the first message. " * ("system" in lost)
        masks = "Masks are not supported: remove what must not be learned. "
        masks *= any(key in _MASKS for key in lost)
        raise BadRecord(
            f"{which}has {', '.join(lost)}, which would be lost: only {' and '.join(used)} are "
            f"read. {system}{masks}Remove unneeded fields, or move them into 'metadata'."
        )


def encode_completion(record: dict[str, Any], tokenizer: Tokenizer) -> Weighted:
    """Return `prompt`, `completion` and the end token as tokens and weights [length].

    Only completion and end token have weight 1. The prompt is encoded separately, as in generation.
    Raises `BadRecord` if a text is missing, the completion is empty, or there are other fields.
    """
    for field in ("prompt", "completion"):
        if not isinstance(record.get(field), str):
            have = ", ".join(record)
            raise BadRecord(f"has no text {field!r} (it has: {have}).")
    check_fields(record, ("prompt", "completion"))
    if not record["completion"].strip():
        raise BadRecord("has an empty completion. Repair or remove the record.")
    prompt, completion = encode_pieces(tokenizer, [record["prompt"], record["completion"]])
    prompt = begin_text(tokenizer, prompt)
    return _joined([(prompt, 0), (completion, 1), (_end(tokenizer), 1)])


class PlainTemplate:
    """Format roles in angle brackets on their own lines, as the module docstring shows."""

    fingerprint = "plain-1"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._end = _end(tokenizer)
        self.stop_ids = tokenizer.stop_ids

    def encode(self, messages: Sequence[Message], learned: Learned = "answers") -> Weighted:
        """Encode a conversation, [length]; answers are encoded separately, as in generation."""
        texts, answers = [""], []
        for number, message in enumerate(messages):
            texts[-1] += f"{chr(10) * (number > 0)}<|{message['role']}|>\n"
            if message["role"] == "assistant":
                texts += [message["content"], ""]
                answers.append(len(texts) - 2)
            else:
                texts[-1] += message["content"]
        parts: list[tuple[np.ndarray, int]] = []
        for number, tokens in enumerate(encode_pieces(self._tokenizer, texts)):
            tokens = tokens if number else begin_text(self._tokenizer, tokens)
            weight = int(learned == "all" or number in answers[_first(learned) :])
            parts.append((tokens, weight))
            if number in answers:
                parts.append((self._end, weight))
        return _joined(parts)

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Return tokens uint32 [length] of a conversation and the header of its answer."""
        return self.encode([*messages, {"role": "assistant", "content": ""}]).tokens[:-1]


class JinjaTemplate:
    """Format with a tokenizer's template, as Hugging Face's `apply_chat_template` does.

    A learned answer begins after its generation prompt, including any `<think>` block that the
    template adds (with `data.text_format` 1: its content), and includes a special token after it.
    The end of its content is detected by rendering a different answer and comparing. Deviation: the
    template has no current date (`strftime_now`), because data must not depend on the day.
    """

    def __init__(self, source: str, name: str, tokenizer: FileTokenizer, variables: dict[str, str]):
        self.name = name
        rule = "v2" if tokenizer.text_format == OLD_TEXT_FORMAT else "v3"
        settings = json.dumps([source, variables, rule], sort_keys=True)
        self.source = source
        self.fingerprint = f"jinja-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"
        self._tokenizer, self._variables = tokenizer, variables
        try:
            self._template = Template(source)
        except TemplateFailed as error:
            raise ConfigError(
                f"chat template {name} is broken (line {error.line}: {error}). Repair it, or use "
                "data.chat_template=plain."
            ) from None
        self.stop_ids = tokenizer.stop_ids | self._answer_ends()

    def encode(self, messages: Sequence[Message], learned: Learned = "answers") -> Weighted:
        """Return tokens and weights [length] of a conversation; raises `BadRecord`."""
        text = self._rendered(messages)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, stop = self._span(text, messages, number)
                if self._tokenizer.text_format != OLD_TEXT_FORMAT:
                    after = spans[-1][1] if spans else 0
                    start = self._prompt_end(text, messages[:number], after, start, stop)
                spans.append((start, stop))
        tokens, offsets, special = self._tokenizer.encode_spans(text)
        weights = np.zeros(len(tokens), np.uint8)
        ended = True
        for start, stop in spans[_first(learned) :]:
            inside = (offsets[:, 0] < stop) & (np.maximum(offsets[:, 1], offsets[:, 0] + 1) > start)
            ended = self._mark_end(text, stop, offsets, special, weights)
            weights[inside] = 1
        if learned == "all":
            weights[:] = 1
        if not ended and spans[-1][1] == len(text.rstrip()):
            return _joined([(tokens, weights), (_end(self._tokenizer), 1)])
        return Weighted(tokens, weights)

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Return tokens uint32 [length] of messages and generation prompt; raises `BadRecord`."""
        return self._tokenizer.encode(self._rendered(messages, for_answer=True))

    def _answer_ends(self) -> frozenset[int]:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text = self._rendered(messages)
            _, stop = self._span(text, messages, 1)
        except BadRecord:  # the records will report the error
            return frozenset()
        tokens, offsets, special = self._tokenizer.encode_spans(text)
        after = np.flatnonzero((offsets[:, 0] >= stop) & special)[:1]
        return frozenset(int(token) for token in tokens[after])

    def _mark_end(
        self, text: str, stop: int, offsets: np.ndarray, special: np.ndarray, weights: np.ndarray
    ) -> bool:
        """Give weight 1 to the special token after an answer and the white space before it.

        The answer ends at character `stop`. Tokens have character ranges `offsets`, int64 [n, 2],
        and flags `special`, bool [n]. Changes `weights`, uint8 [n], in place; returns whether such
        a special token follows.
        """
        after = np.flatnonzero((offsets[:, 0] >= stop) & special)
        if not len(after) or text[stop : offsets[after[0], 0]].strip():
            return False
        weights[(offsets[:, 0] >= stop) & (np.arange(len(weights)) <= after[0])] = 1
        return True

    def _span(self, text: str, messages: Sequence[Message], number: int) -> tuple[int, int]:
        changed = [dict(message) for message in messages]
        changed[number]["content"] = _STAND_IN
        other = self._rendered(changed)
        start = common_length(text, other)
        stop = len(text) - common_length(text[start:][::-1], other[start:][::-1])
        if start >= stop:
            raise BadRecord(
                f"message {number + 1} does not appear in the output of the chat template "
                f"{self.name}. Use data.chat_template=plain."
            )
        return start, stop

    def _prompt_end(
        self, text: str, messages: Sequence[Message], after: int, start: int, stop: int
    ) -> int:
        """Return the first character of an answer whose content is `text[start:stop]`.

        The answer starts after the generation prompt of the `messages` before it. If `text` does
        not start with this prompt, the answer starts after the prompt's header, such as
        `<|im_start|>assistant`, or else after the common prefix of both. `after` is the end of the
        previous answer.
        """
        try:
            prompt = self._rendered(messages, for_answer=True)
            header = prompt[common_length(prompt, self._rendered(messages)) :]
        except BadRecord:  # the template fails without the answer
            return start
        if text.startswith(prompt):
            return len(prompt) if len(prompt) < stop else start
        if (at := text.rfind(header, after, start)) >= 0:
            return at + len(header)
        common = common_length(text, prompt)
        return min(common, start) if common > len(prompt) - len(header) else start

    def _rendered(self, messages: Sequence[Message], *, for_answer: bool = False) -> str:
        try:
            return self._template.render(
                {
                    "messages": list(messages),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": for_answer,
                    **self._variables,
                }
            )
        except TemplateFailed as error:
            raise BadRecord(
                f"does not fit the chat template {self.name} ({error}). Repair one, or use "
                "data.chat_template=plain."
            ) from None


ChatTemplate: TypeAlias = PlainTemplate | JinjaTemplate


def load_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template named by `data.chat_template`: auto, plain, or a file's path or URL."""
    if name == "plain" or (name == "auto" and not isinstance(tokenizer, FileTokenizer)):
        return PlainTemplate(tokenizer)
    if not isinstance(tokenizer, FileTokenizer):
        raise ConfigError(
            f"data.chat_template={name!r} with tokenizer {tokenizer.name!r}: a template "
            "needs the special tokens of a tokenizer.json. Set data.tokenizer, or use plain."
        )
    folder = locate(tokenizer.name).parent
    variables = token_texts(tokenizer.settings)
    path = folder / "chat_template.jinja" if name == "auto" else locate(name)
    content = tokenizer.files.get(path.name) if name == "auto" else _content(path)
    if content is not None:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{str(path)!r} is not a text template ({error}).") from None
        return JinjaTemplate(text, str(path), tokenizer, variables)
    source = tokenizer.settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        entries = [entry for entry in source if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        source = named.get("default")
    if not isinstance(source, str):
        return PlainTemplate(tokenizer)
    return JinjaTemplate(source, f"of {folder / 'tokenizer_config.json'}", tokenizer, variables)


def _content(path: Location) -> bytes:
    try:
        return path.read()
    except OSError as error:
        raise ConfigError(
            f"data.chat_template={str(path)!r} cannot be read ({error.strerror}): it is auto, "
            "plain, or the path or URL of a Jinja template. Check the path."
        ) from None


def _first(learned: Learned) -> int:
    return -1 if learned == "last" else 0


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of equal items at the start of two sequences."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if same is None else same


def _end(tokenizer: Tokenizer) -> np.ndarray:
    """Return the end token, uint32 [1]; raises `ConfigError` if the tokenizer has none."""
    if tokenizer.end_id is None:
        raise ConfigError(
            f"tokenizer {tokenizer.name!r} has no end token: a model could not learn "
            "where an answer ends. Set data.eos_token to one of its tokens."
        )
    return np.array([tokenizer.end_id], np.uint32)


def _joined(parts: Sequence[tuple[np.ndarray, int | np.ndarray]]) -> Weighted:
    """Concatenate parts of tokens [n] and their weight, a scalar or [n]."""
    tokens = [tokens.astype(np.uint32) for tokens, _ in parts]
    weights = [np.broadcast_to(np.asarray(weight, np.uint8), len(t)) for t, weight in parts]
    return Weighted(np.concatenate(tokens), np.concatenate(weights))
