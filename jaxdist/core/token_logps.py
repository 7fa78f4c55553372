"""Log-probabilities of tokens, from a head with a possibly sharded vocabulary.

Of one token at each position, with the entropy; or of several, and of all others together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.losses import (
    Vocabulary,
    head_gradients,
    logits_of,
    scan_tokens,
    sum_over_tokens,
    zero_gradient,
)
from jaxdist.core.softcap import slope_at
from jaxdist.core.types import Array, TokenHead, TokenLogps
from jaxdist.settings.declare import ConfigError

_SIGN = np.uint32(1 << 31)


class LogitFilter(NamedTuple):
    """Filter for sampling: temperature, then top-k, then top-p; ties at the threshold are kept."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def make_token_logps(
    axis: str | None = None,
    chunk: int = 0,
    weight_gradient: Callable[[Array, Array], Array] = sum_over_tokens,
) -> Callable[..., TokenLogps]:
    """Build `Context.token_logps`; for the arguments see `losses.Vocabulary` [d_model, vocab]."""

    def token_logps(head: TokenHead, targets: Array, **sampling: Any) -> TokenLogps:
        """Return `TokenLogps` of targets, int32 [batch, seq] or [batch, seq, outcomes]."""
        drawn = LogitFilter(**sampling)
        if not (drawn.temperature > 0 and drawn.top_k >= 0 and 0 < drawn.top_p <= 1):
            raise ConfigError(
                f"token_logps got {drawn}. Use a temperature above 0, a top_k of 0 or more, and a "
                "top_p above 0 and at most 1."
            )
        vocabulary = Vocabulary(head.vocab_size, axis, chunk, head.softcap, weight_gradient)
        x = head.x.reshape(-1, head.x.shape[-1])
        if targets.ndim == head.x.ndim:
            if drawn != LogitFilter(drawn.temperature):
                raise ConfigError(
                    f"token_logps got {drawn} and several targets at each position. Omit top_k and "
                    "top_p."
                )
            flat = targets.reshape(-1, targets.shape[-1])
            logps = _outcome_logps(x, head.kernel, flat, vocabulary, drawn.temperature)
            logps = collectives.per_token(logps.reshape(*targets.shape[:-1], -1))
            return TokenLogps(logps, -jnp.sum(jnp.exp(logps) * logps, -1))
        outputs = _logps(x, head.kernel, targets.reshape(-1), vocabulary, drawn)
        return TokenLogps(*(collectives.per_token(y.reshape(targets.shape)) for y in outputs))

    return token_logps


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _logps(
    x: Array, kernel: Array, targets: Array, vocabulary: Vocabulary, sampling: LogitFilter
) -> tuple[Array, Array]:
    """Return log-probabilities and entropies, float32 [tokens], from x [tokens, d_model]."""

    def chunk(_: None, part: tuple[Array, ...]) -> tuple[None, Any]:
        return None, _chunk_logps(part[0], part[1], kernel, vocabulary, sampling)[:2]

    return scan_tokens(chunk, None, (x, targets), vocabulary.chunk)[1]


def _backward(vocabulary: Vocabulary, sampling: LogitFilter, saved: Any, grads: Any) -> Any:
    x, kernel, targets = saved

    def chunk(dkernel: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return dkernel [d_model, vocab_shard] plus a chunk's, and its dx [chunk, d_model]."""
        x, targets, dlogps, dentropy = part
        _, entropy, logps, probs, hit, slope = _chunk_logps(
            x, targets, kernel, vocabulary, sampling
        )
        # The entropy is minus the sum of p log p; filtered tokens do not contribute.
        surprise = jnp.where(probs > 0, logps, 0.0) + entropy[:, None]
        dlogits = (hit - probs) * dlogps[:, None] - probs * surprise * dentropy[:, None]
        dlogits = dlogits * slope / sampling.temperature
        dx, dw = head_gradients(x, kernel, dlogits, vocabulary)
        return dkernel + dw, dx.astype(x.dtype)

    zero = zero_gradient(x, kernel)
    dkernel, dx = scan_tokens(chunk, zero, (x, targets, *grads), vocabulary.chunk)
    return dx, dkernel.astype(kernel.dtype), None


_logps.defvjp(lambda *inputs: (_logps(*inputs), inputs[:3]), _backward)


def _chunk_logps(
    x: Array, targets: Array, kernel: Array, vocabulary: Vocabulary, sampling: LogitFilter
) -> tuple[Any, ...]:
    """Return log-probabilities of one chunk and the residuals for their gradients, in float32.

    x is [tokens, d_model]. Log-probability and entropy are [tokens], equal on all devices of the
    axis. The residuals are [tokens, vocab_shard]: log-probabilities, probabilities, the one-hot
    target (0 if it is filtered), and the slope of the soft cap.
    """
    total = lambda y: collectives.all_reduce(y, vocabulary.axis) if vocabulary.axis else y
    logits, columns = logits_of(x, kernel, vocabulary)
    slope = slope_at(logits, vocabulary.softcap)
    logits = jnp.where(columns < vocabulary.size, logits / sampling.temperature, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, -1))
    if vocabulary.axis:
        top = collectives.all_reduce(top, vocabulary.axis, "max")
    if sampling.top_k and sampling.top_k < vocabulary.size:
        count = lambda keep: total(jnp.sum(keep.astype(jnp.float32), -1))
        logits = _keep_top(logits, count, float(sampling.top_k))
    if sampling.top_p < 1:
        exps = jnp.exp(logits - top[:, None])
        needed = sampling.top_p * total(jnp.sum(exps, -1))
        logits = _keep_top(
            logits, lambda keep: total(jnp.sum(jnp.where(keep, exps, 0.0), -1)), needed
        )
    shifted = logits - top[:, None]
    exps = jnp.exp(shifted)
    is_target = targets[:, None] == columns
    # `where` instead of a product, because filtered columns contain -inf, and -inf * 0 is NaN.
    finite = jnp.where(exps > 0, shifted, 0.0)
    picked = jnp.where(is_target, finite, 0.0)
    hit = (is_target & (logits > -jnp.inf)).astype(jnp.float32)
    parts = [jnp.sum(y, -1) for y in (exps, picked, exps * finite, hit)]
    mass, picked, weighted, kept = total(jnp.stack(parts))
    log_mass = jnp.log(mass)
    logps = jnp.where(kept > 0, picked - log_mass, -jnp.inf)
    entropy = log_mass - weighted / mass
    return logps, entropy, shifted - log_mass[:, None], exps / mass[:, None], hit, slope


def _keep_top(logits: Array, measure: Callable[[Array], Array], needed: Array | float) -> Array:
    """Return the logits [tokens, vocab_shard], with -inf for all but the largest of each token.

    It keeps the fewest for which `measure`, a map from kept columns to global float32 [tokens],
    reaches `needed`. The threshold is computed bit by bit, so no device needs logits of another.
    """
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    order = jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)

    def step(i: Array, threshold: Array) -> Array:
        higher = threshold | (_SIGN >> i.astype(jnp.uint32))
        return jnp.where(measure(order >= higher[:, None]) >= needed, higher, threshold)

    start = collectives.zeros_like(jax.eval_shape(lambda: measure(order >= 0))).astype(jnp.uint32)
    threshold = lax.fori_loop(0, 32, step, start)
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


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
def _outcome_logps(
    x: Array, kernel: Array, targets: Array, vocabulary: Vocabulary, temperature: float
) -> Array:
    """Return the log-probabilities of each token's targets, float32 [tokens, outcomes + 1].

    The last outcome is any token not in `targets`. x is [tokens, d_model], kernel [d_model,
    vocab_shard]; targets are int32 [tokens, outcomes], all different in a row.
    """

    def chunk(_: None, part: tuple[Array, ...]) -> tuple[None, Array]:
        return None, _chunk_outcomes(part[0], part[1], kernel, vocabulary, temperature)[0]

    return scan_tokens(chunk, None, (x, targets), vocabulary.chunk)[1]


def _outcomes_backward(vocabulary: Vocabulary, temperature: float, saved: Any, grads: Array) -> Any:
    """Return the gradients of x [tokens, d_model] and of kernel [d_model, vocab_shard]."""
    x, kernel, targets = saved

    def chunk(dkernel: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return dkernel [d_model, vocab_shard] plus a chunk's, and its dx [chunk, d_model]."""
        x, targets, dlogps = part
        _, probs, others, at, slope = _chunk_outcomes(x, targets, kernel, vocabulary, temperature)
        dlogits = others * dlogps[:, -1:] - probs * jnp.sum(dlogps, 1, keepdims=True)
        dlogits = dlogits.at[at].add(dlogps[:, :-1], mode="drop") * slope / temperature
        dx, dw = head_gradients(x, kernel, dlogits, vocabulary)
        return dkernel + dw, dx.astype(x.dtype)

    zero = zero_gradient(x, kernel)
    dkernel, dx = scan_tokens(chunk, zero, (x, targets, grads), vocabulary.chunk)
    return dx, dkernel.astype(kernel.dtype), None


_outcome_logps.defvjp(lambda *inputs: (_outcome_logps(*inputs), inputs[:3]), _outcomes_backward)


def _chunk_outcomes(
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
