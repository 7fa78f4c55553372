"""A short generated text at the end of a run, and a prompt for `generate`."""

from __future__ import annotations

import shlex

import numpy as np

from jaxdist.core.types import Params
from jaxdist.data import DataConfig, Dataset, TrainData
from jaxdist.data.tokenizer import begin_text
from jaxdist.run.setup import Parts
from jaxdist.run.text_generation import make_decoder, open_writer
from jaxdist.run.text_settings import TextSettings

MIN_STEPS = 100
"""Minimum steps of a run for a sample at its end: after fewer steps the text is noise."""

_SAMPLE_TOKENS = 200
_OPENING_TOKENS = 32
"""Tokens of the first row that may become a prompt."""


def first_prompt(data: DataConfig, rows: TrainData) -> str:
    """Return the first words of the training text; "" if they are not available."""
    if data.sources == ["stdlib"]:
        return "def __init__(self"
    if not isinstance(rows, Dataset) or rows.tokenizer is None or rows.identity["kind"] != "text":
        return ""
    text = rows.tokenizer.decode(rows[0]["tokens"][:_OPENING_TOKENS])
    words = next((line.split() for line in text.splitlines() if line.strip()), [])
    return " ".join(words[:4])


def first_request(data: DataConfig, rows: TrainData) -> str:
    """Return flags of `generate` for a prompt like the training text."""
    if data.records == "chat":
        return "--chat"
    prompt = first_prompt(data, rows)
    return f"--prompt {shlex.quote(prompt)}" if prompt else ""


def first_question(rows: Dataset) -> np.ndarray:
    """Return the tokens of the first conversation up to its first answer, int [length]."""
    row = rows[0]
    answered = np.flatnonzero(row["weights"])
    # The weight at a position applies to the next token.
    return row["tokens"][: int(answered[0]) + 1] if len(answered) else row["tokens"][:0]


def write_sample(parts: Parts, params: Params, rows: TrainData) -> tuple[str, str]:
    """Continue the training text, or answer its first conversation, within `train.seq_len` tokens.

    Return the prompt and the generated text, both empty without a tokenizer or if rows are
    streamed.
    """
    config = parts.config
    is_chat = config.data.records == "chat"
    if parts.model.decoding is None or not isinstance(rows, Dataset) or rows.tokenizer is None:
        return "", ""
    if is_chat:
        prompt = first_question(rows)
    else:
        text = first_prompt(config.data, rows)
        prompt = rows.tokenizer.encode(text) if text else np.zeros(0, np.int32)
        prompt = begin_text(rows.tokenizer, prompt) if text else prompt
    room = min(config.train.seq_len, parts.model.decoding.max_len) - len(prompt)
    if not len(prompt) or room < 1:
        return "", ""
    settings = TextSettings(max_new_tokens=min(_SAMPLE_TOKENS, room))
    writer = open_writer(parts, settings, chat=is_chat)
    writer.decoder = make_decoder(parts, params, settings)
    ((added, _),) = writer.write([prompt], stream=False)
    return rows.tokenizer.decode(prompt, show_special=is_chat), added
