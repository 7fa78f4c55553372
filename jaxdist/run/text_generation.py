"""Text generation from the weights of a run, for the command and for Python programs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist.core.types import Params
from jaxdist.data import DataConfig, Dataset, TrainData, load_tokenizer
from jaxdist.data.chat import BadRecord, ChatTemplate, load_template
from jaxdist.data.tokenizer import Tokenizer, begin_text
from jaxdist.run.decoding import Decoder, Sampling
from jaxdist.run.setup import Parts
from jaxdist.run.text_settings import TextSettings
from jaxdist.settings import ConfigError


class Writer:
    """Continues texts, or answers conversations; see `open_writer`.

    `template` is the chat template of conversations; None for text. `max_len` is the maximum number
    of positions of the model. Set `decoder`, the model with its weights, before `write`.
    """

    decoder: Decoder

    def __init__(
        self,
        settings: TextSettings,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        max_len: int,
    ):
        self._settings, self._max_len = settings, max_len
        self._tokenizer, self._template = tokenizer, template
        self._stop = (template or tokenizer).stop_ids if settings.stop_at_end else frozenset()

    def encode(self, requests: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        """Return the token ids of each request, unsigned [length].

        A request is {"prompt": text}, or {"messages": [...]} of a chat.
        """
        prompts = [self._encode(request) for request in requests]
        problems = [
            f"prompt {number} {problem}"
            for number, prompt in enumerate(prompts, 1)
            for problem in prompt_problems(prompt, self._max_len, self._settings.max_new_tokens)
        ]
        if problems:
            raise ConfigError(problems)
        return prompts

    def write(self, prompts: Sequence[np.ndarray], *, stream: bool) -> list[tuple[str, str]]:
        """Return the continuation of each prompt, int [length], and why it ended: stop or length.

        `stream` also prints the text of the first prompt token by token.
        """
        settings = self._settings
        generated: list[list[int]] = [[] for _ in prompts]
        num_printed = 0
        for tokens in self.decoder.tokens(
            prompts, max_new_tokens=settings.max_new_tokens, stop=self._stop, seed=settings.seed
        ):
            for row, token in enumerate(tokens):
                generated[row] += [] if token is None else [token]
            if stream:
                # The next token may complete the last character.
                text = self._text(generated[0]).rstrip("\ufffd")
                print(text[num_printed:], end="", flush=True)
                num_printed = max(num_printed, len(text))
        if stream:
            print(self._text(generated[0])[num_printed:])
        ended = ["stop" if row and row[-1] in self._stop else "length" for row in generated]
        return [(self._text(row), why) for row, why in zip(generated, ended, strict=True)]

    def _encode(self, request: Mapping[str, Any]) -> np.ndarray:
        """Return the token ids of one request, unsigned [length]."""
        if self._template is None:
            return begin_text(self._tokenizer, self._tokenizer.encode(request["prompt"]))
        try:
            return self._template.prompt(request["messages"])
        except BadRecord as error:
            raise ConfigError([f"a conversation {error}"]) from None

    def _text(self, tokens: list[int]) -> str:
        show = self._settings.show_special
        if tokens and tokens[-1] in self._stop and not show:
            tokens = tokens[:-1]
        # Without a preceding token, sentencepiece would drop the first space.
        is_later = self._template is None and self._tokenizer.marks_start
        before = self._tokenizer.encode(".").tolist() if is_later else []
        text = self._tokenizer.decode([*before, *tokens], show_special=show)
        return text.removeprefix(self._tokenizer.decode(before, show_special=show))


def open_writer(parts: Parts, settings: TextSettings, *, chat: bool = False) -> Writer:
    """Return a writer without weights for the model of a run; with `chat` for conversations."""
    data = parts.config.data
    if parts.model.decoding is None:
        raise ConfigError(
            f"model {parts.model.name!r} does not generate text. Name a decoder's run."
        )
    tokenizer = load_tokenizer(data.tokenizer_name, data.eos_token, data.text_format)
    template = load_template(data.chat_template, tokenizer) if chat else None
    return Writer(settings, tokenizer, template, max_len=parts.model.decoding.max_len)


def make_decoder(parts: Parts, params: Params, settings: TextSettings) -> Decoder:
    """Return a decoder with these parameters, a tree of arrays sharded as in training."""
    sampling = Sampling(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )
    return Decoder(parts.model, params, parts.layout, parts.plan, sampling)


def prompt_problems(prompt: np.ndarray, max_len: int, max_new_tokens: int) -> list[str]:
    """Return the problems of a prompt of token ids, unsigned [length]."""
    if not len(prompt):
        return ["is empty. Give it at least one character."]
    if len(prompt) + max_new_tokens > max_len:
        return [
            f"has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} it exceeds the "
            f"{max_len} positions of the model. Shorten one of them."
        ]
    return []


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
