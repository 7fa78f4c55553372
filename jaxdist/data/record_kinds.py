"""Kinds of records that data consist of."""

from __future__ import annotations

from typing import Literal, TypeAlias

RecordKind: TypeAlias = Literal[
    "text", "chat", "chat_last", "chat_all", "completion", "preference", "labeled", "text_label"
]

SINGLE = ("preference", "labeled", "text_label")
"""Kinds of records whose documents have rows of their own."""

Learned: TypeAlias = Literal["answers", "last", "all"]
"""The part of a conversation with weight 1: every answer, the last one, or every token."""

LEARNED: dict[str, Learned] = {"chat": "answers", "chat_last": "last", "chat_all": "all"}
"""Kinds of records that are conversations, and the learned part of each."""
