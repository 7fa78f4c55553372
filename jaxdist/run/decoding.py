"""Token-by-token decoding with the key-value cache of a model, on any mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.collective_order import in_order
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.sharding import Layout
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import Array, Context, Dims, Model, Params, dot
from jaxdist.core.weights import with_weights

_BUCKET = 64
"""Prompt and cache lengths are rounded up to a multiple of this, to limit recompilations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of the next token; see `sample_tokens`."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


class Decoder:
    """A model with its weights that continues prompts; compiles once per bucket of lengths.

    The model has `decoding`. `params`, float32, are sharded over the mesh as in training. Products
    use the compute dtype of the plan.
    """

    def __init__(
        self, model: Model, params: Params, layout: Layout, plan: StepPlan, sampling: Sampling
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
            dot=with_weights(dot),
        )

        def decode(
            params: Params, cache: Any, tokens: Array, positions: Array
        ) -> tuple[Array, Any]:
            # Products cast their weights to the compute dtype; `params` stay float32.
            return self._decoding.step(params, cache, tokens, positions, context)

        if plan.orders_collectives:
            decode = in_order(decode, hidden=True)
        self._decode = jax.jit(decode, donate_argnums=1)
        self._sample = jax.jit(functools.partial(sample_tokens, **dataclasses.asdict(sampling)))

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
            chosen = np.asarray(self._sample(last, jax.random.fold_in(key, count)))
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
    """Draw one token per row, int32 [batch], from logits, float32 [batch, vocab].

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
