"""Log-probabilities of several tokens at each position, and of all other tokens together."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.losses import (
    Vocabulary,
    head_gradients,
    logits_of,
    scan_tokens,
    zero_gradient,
)
from jaxdist.core.softcap import slope_at
from jaxdist.core.types import Array, TokenHead


def top_tokens(head: TokenHead, count: int, axis: str | None = None, chunk: int = 0) -> Array:
    """Return the `count` most probable tokens at each position, int32 [batch, seq, count].

    `axis` may split the vocabulary. For `chunk` see `losses.Vocabulary`. Not differentiable.
    """
    vocabulary = Vocabulary(head.vocab_size, axis, chunk, head.softcap)
    x = head.x.reshape(-1, head.x.shape[-1])

    def search(_: None, part: tuple[Array, ...]) -> tuple[None, Array]:
        """Return the tokens of a chunk, int32 [chunk, count]."""
        logits, columns = logits_of(part[0], head.kernel, vocabulary)
        logits = jnp.where(columns < vocabulary.size, logits, -jnp.inf)
        best, index = lax.top_k(logits, min(count, logits.shape[1]))
        tokens = columns[index]
        if axis is None:
            return None, tokens
        # Sums of parts instead of a gather, because their type is equal on all devices.
        slots = lambda y: jnp.zeros((collectives.group_size(axis), *y.shape), y.dtype)
        own = lambda y: collectives.vary(slots(y), axis).at[collectives.group_index(axis)].set(y)
        joined = lambda y: jnp.concatenate([*collectives.all_reduce(own(y), axis)], 1)
        index = lax.top_k(joined(best), count)[1]
        return None, jnp.take_along_axis(joined(tokens), index, 1)

    _, tokens = scan_tokens(search, None, (x,), chunk)
    return tokens.reshape(*head.x.shape[:-1], count).astype(jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def outcome_logps(
    x: Array, kernel: Array, targets: Array, vocabulary: Vocabulary, temperature: float
) -> Array:
    """Return the log-probabilities of each token's targets, float32 [tokens, outcomes + 1].

    The last outcome is any token not in `targets`. x is [tokens, d_model], kernel [d_model,
    vocab_shard]; targets are int32 [tokens, outcomes], all different in a row.
    """

    def chunk(_: None, part: tuple[Array, ...]) -> tuple[None, Array]:
        return None, _chunk_logps(part[0], part[1], kernel, vocabulary, temperature)[0]

    return scan_tokens(chunk, None, (x, targets), vocabulary.chunk)[1]


def _backward(vocabulary: Vocabulary, temperature: float, saved: Any, grads: Array) -> Any:
    """Return the gradients of x [tokens, d_model] and of kernel [d_model, vocab_shard]."""
    x, kernel, targets = saved

    def chunk(dkernel: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return dkernel [d_model, vocab_shard] plus a chunk's, and its dx [chunk, d_model]."""
        x, targets, dlogps = part
        _, probs, others, at, slope = _chunk_logps(x, targets, kernel, vocabulary, temperature)
        dlogits = others * dlogps[:, -1:] - probs * jnp.sum(dlogps, 1, keepdims=True)
        dlogits = dlogits.at[at].add(dlogps[:, :-1], mode="drop") * slope / temperature
        dx, dw = head_gradients(x, kernel, dlogits, vocabulary)
        return dkernel + dw, dx.astype(x.dtype)

    zero = zero_gradient(x, kernel)
    dkernel, dx = scan_tokens(chunk, zero, (x, targets, grads), vocabulary.chunk)
    return dx, dkernel.astype(kernel.dtype), None


outcome_logps.defvjp(lambda *inputs: (outcome_logps(*inputs), inputs[:3]), _backward)


def _chunk_logps(
    x: Array, targets: Array, kernel: Array, vocabulary: Vocabulary, temperature: float
) -> tuple[Any, ...]:
    """Return log-probabilities of one chunk and the residuals for their gradients, in float32.

    x is [tokens, d_model]. Log-probabilities are [tokens, outcomes + 1], equal on all devices of
    the axis. The residuals: probabilities, and those given that no target is drawn, both [tokens,
    vocab_shard]; the index of this device's targets in them; the slope of the soft cap.
    """
    total = lambda y: collectives.all_reduce(y, vocabulary.axis) if vocabulary.axis else y
    logits, columns = logits_of(x, kernel, vocabulary)
    slope, width = slope_at(logits, vocabulary.softcap), kernel.shape[1]
    logits = jnp.where(columns < vocabulary.size, logits / temperature, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    if vocabulary.axis:
        top = collectives.all_reduce(top, vocabulary.axis, "max")
    shifted = logits - top
    exps, local = jnp.exp(shifted), targets - columns[0]
    is_own = (local >= 0) & (local < width)
    at = jnp.arange(x.shape[0])[:, None], jnp.where(is_own, local, width)
    picked = jnp.take_along_axis(shifted, jnp.clip(local, 0, width - 1), 1)
    others = exps.at[at].set(0.0, mode="drop")
    parts = [jnp.sum(y, -1, keepdims=True) for y in (exps, others)]
    sums = total(jnp.concatenate([jnp.where(is_own, picked, 0.0), *parts], 1))
    mass, rest = sums[:, -2:-1], jnp.maximum(sums[:, -1:], jnp.finfo(jnp.float32).tiny)
    logps = jnp.concatenate([sums[:, :-2], jnp.log(rest)], 1) - jnp.log(mass)
    return logps, exps / mass, others / rest, at, slope
