"""Encode records that are not packed: preferences, labeled completions, labeled texts.

Records have these formats, the first four those of TRL:

    {"prompt": "...", "chosen": "...", "rejected": "..."}      texts
    {"prompt": [...], "chosen": [...], "rejected": [...]}      messages, e.g. [{"role", "content"}]
    {"chosen": ..., "rejected": ...}                           the prompt is their common start
    {"prompt": ..., "completion": ..., "label": true}          labeled: desirable or not
    {"text": "...", "label": 2}                                text_label: a class
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist.data.chat import (
    BadRecord,
    ChatTemplate,
    Message,
    Weighted,
    check_fields,
    check_messages,
    common_length,
    encode_completion,
)
from jaxdist.data.tokenizer import Tokenizer, begin_text

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
