"""Text generation from the weights of a run: prompts, token-by-token decoding, samples."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.collective_order import in_order
from jaxdist.core.experts import make_experts
from jaxdist.core.matmul.grouped import make_grouped_dot
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.sharding import Layout
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import Array, Context, Dims, Model, Params, dot
from jaxdist.core.weights import with_weights
from jaxdist.data import DataConfig, Dataset, TrainData, load_tokenizer
from jaxdist.data.chat import BadRecord, ChatTemplate, load_template
from jaxdist.data.packing import Rows
from jaxdist.data.tokenizer import Tokenizer, begin_text
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.setup import Parts
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

        A request is {"prompt": text}, or {"messages": [...]} of a chat. Raise `ConfigError` if one
        is empty or too long for the model.
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
        """Return (continuation, why it ended: "stop" or "length") for each prompt.

        Prompts are token ids, int [length]. `stream` also prints the text of the first one token
        by token.
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
    """Return a decoder with these parameters, in model order and sharded over the mesh."""
    return Decoder(parts.model, params, parts.layout, parts.plan, settings)


def prompt_problems(prompt: np.ndarray, max_len: int, max_new_tokens: int) -> list[str]:
    """Return why a prompt, ids [length], cannot be continued (empty, too long); [] if it can."""
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
    """Return a short prompt like the training text, e.g. its first words; "" if unavailable."""
    if data.sources == ["stdlib"]:
        return "def __init__(self"
    if not isinstance(rows, Dataset) or rows.tokenizer is None or rows.identity["kind"] != "text":
        return ""
    text = rows.tokenizer.decode(rows.sample_row()["tokens"][:_OPENING_TOKENS])
    words = next((line.split() for line in text.splitlines() if line.strip()), [])
    return " ".join(words[:4])


def first_request(data: DataConfig, rows: TrainData) -> str:
    """Return flags of `generate` for a prompt like the training text; "" without a prompt."""
    if data.is_chat:
        return "--chat"
    prompt = first_prompt(data, rows)
    return f"--prompt {shlex.quote(prompt)}" if prompt else ""


def first_question(row: Rows) -> np.ndarray:
    """Return a row's token ids [length] before its first answer; length 0 without one."""
    answered = np.flatnonzero(row["weights"])
    # The weight at a position applies to the next token.
    return row["tokens"][: int(answered[0]) + 1] if len(answered) else row["tokens"][:0]


def write_sample(parts: Parts, params: Params, rows: TrainData) -> tuple[str, str]:
    """Continue the training text, or answer its first conversation, within `train.seq_len` tokens.

    Return the prompt and the generated text. Both are "" if the model is no decoder, rows are a
    stream or have no tokenizer, or there is no prompt that leaves room for a token.
    """
    config = parts.config
    is_chat = config.data.is_chat
    if parts.model.decoding is None or not isinstance(rows, Dataset) or rows.tokenizer is None:
        return "", ""
    if is_chat or config.data.has_single_rows:
        prompt = first_question(rows.sample_row())
    else:
        text = first_prompt(config.data, rows)
        prompt = begin_text(rows.tokenizer, rows.tokenizer.encode(text)) if text else np.zeros(0)
    room = min(config.train.seq_len, parts.model.decoding.max_len) - len(prompt)
    if not len(prompt) or room < 1:
        return "", ""
    settings = TextSettings(max_new_tokens=min(_SAMPLE_TOKENS, room))
    writer = open_writer(parts, settings, chat=is_chat)
    writer.decoder = make_decoder(parts, params, settings)
    ((added, _),) = writer.write([prompt], stream=False)
    return rows.tokenizer.decode(prompt, show_special=is_chat), added


_BUCKET = 64
"""Prompt and cache lengths are rounded up to a multiple of this, to limit recompilations."""


class Decoder:
    """A model with its weights that continues prompts; compiles for each shape of padded prompts.

    The model has `decoding`. `params` are in model order, sharded over the mesh. Products use the
    compute dtype of the plan.
    """

    def __init__(
        self, model: Model, params: Params, layout: Layout, plan: StepPlan, settings: TextSettings
    ):
        assert model.decoding is not None
        self._decoding, self._params = model.decoding, params
        self._layout, self._dtype = layout, plan.compute_dtype
        # Queries have explicit positions, which fused kernels do not support.
        alone = AttentionPlan(plan.platform)
        context = Context(
            dtype=plan.compute_dtype,
            platform=plan.platform,
            attend=make_attend(alone),
            # XLA shards the arrays.
            dot=with_weights(dot, Context().sum),
            experts=make_experts(make_grouped_dot(plan.platform)),
        )

        def decode(
            params: Params, cache: Any, tokens: Array, positions: Array
        ) -> tuple[Array, Any]:
            # Products cast their weights to the compute dtype; `params` keep theirs.
            return self._decoding.step(params, cache, tokens, positions, context)

        if plan.orders_collectives:
            decode = in_order(decode, hidden=True)
        self._decode = jax.jit(decode, donate_argnums=1)
        self._num_draws = 0  # of all calls, so that equal prompts differ in the next batch
        sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
        self._sample = jax.jit(functools.partial(sample_tokens, **sampling))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits, float32 [batch, length, vocab], of tokens, int32 [batch, length]."""
        length, width = tokens.shape[1], self._round_up(tokens.shape[1])
        tokens = np.pad(tokens, ((0, 0), (0, width - length)))
        positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
        cache = self._new_cache(len(tokens), width)
        inputs = jax.device_put((tokens, positions), self._sharding(Dims(("batch", "cache"))))
        return np.asarray(self._decode(self._params, cache, *inputs)[0])[:, :length]

    def tokens(
        self,
        prompts: Sequence[np.ndarray],
        *,
        max_new_tokens: int,
        stop: Collection[int] = (),
        seed: int = 0,
    ) -> Iterator[list[int | None]]:
        """Continue prompts together; yield the next token id of each text, None for ended texts.

        Prompts are token ids, int [length] each; lengths ≥ 1 may differ. A token in `stop` ends its
        text and is also yielded.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        width = self._round_up(int(lengths.max()))
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        index = np.arange(width)
        positions = np.where(index < lengths[:, None], index, -1).astype(np.int32)
        cache = self._new_cache(len(prompts), width + max_new_tokens)
        # Devices along cp split the positions of the prompt.
        inputs = jax.device_put((tokens, positions), self._sharding(Dims(("batch", "cache"))))
        logits, cache = self._decode(self._params, cache, *inputs)
        last = logits[np.arange(len(prompts)), lengths - 1]
        key = jax.random.key(seed)
        done = np.zeros(len(prompts), bool)
        for count in range(max_new_tokens):
            chosen = np.asarray(self._sample(last, jax.random.fold_in(key, self._num_draws)))
            self._num_draws += 1
            yield [None if done[row] else int(chosen[row]) for row in range(len(prompts))]
            done |= np.isin(chosen, list(stop))
            if done.all() or count + 1 == max_new_tokens:
                return
            position = (lengths + count)[:, None].astype(np.int32)
            logits, cache = self._decode(
                self._params, cache, chosen[:, None].astype(np.int32), position
            )
            last = logits[:, 0]

    def _new_cache(self, batch: int, max_len: int) -> Any:
        make = lambda: self._decoding.init_cache(batch, self._round_up(max_len), self._dtype)
        return jax.jit(make, out_shardings=self._sharding(self._decoding.cache_dims))()

    def _sharding(self, dims: Any) -> Any:
        return self._layout.shardings(self._layout.param_specs(dims))

    def _round_up(self, length: int) -> int:
        bucket = math.lcm(_BUCKET, self._layout.size(CONTEXT))
        return -(-length // bucket) * bucket


def sample_tokens(
    logits: Array, key: Array, *, temperature: float, top_k: int, top_p: float
) -> Array:
    """Return one random token per row, int32 [batch], by logits, float32 [batch, vocab].

    `key` is consumed. `temperature` divides the logits; 0 = the most likely token. `top_k` is the
    number of most likely tokens to keep; 0 = all. `top_p` keeps the most likely tokens until their
    total probability reaches it (Holtzman et al. 2020, "The Curious Case of Neural Text
    Degeneration", section 3.1).
    """
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p < 1:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, -1))
        before = jnp.cumsum(probs, -1) - probs
        keep = jnp.zeros(logits.shape, bool)
        keep = keep.at[jnp.arange(len(logits))[:, None], order].set(before < top_p)
        logits = jnp.where(keep, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)
