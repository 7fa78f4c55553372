"""Losses as sums over rows or tokens: cross-entropy of tokens (sharded vocabulary) and labels.

The token loss fuses the head's product and its softmax. Forward computes gradients, by chunks.

Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", section 4, as
XLA products; Szegedy et al. 2016 (label smoothing); Chowdhery et al. 2022, "PaLM" (z-loss).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.softcap import slope_at, soft_cap
from jaxdist.core.types import Array, Sums, TokenHead


def sum_over_tokens(x: Array, dlogits: Array) -> Array:
    """Return xᵀ · dlogits, float32 [d_model, vocab], of x [tokens, d_model] and dlogits."""
    return jnp.einsum("td,tv->dv", x, dlogits, preferred_element_type=jnp.float32)


class Regularizers(NamedTuple):
    """Terms that training adds to the cross-entropy; they are reported as `aux_loss`.

    Attributes:
        z_loss: factor of the squared log-partition function, log² Σ exp(logits).
        label_smoothing: share of the target probability that is spread over all classes.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0


class Vocabulary(NamedTuple):
    """Layout of a head's vocabulary, and the function for its kernel's gradient.

    Attributes:
        size: number of real entries; later columns are padding with probability 0.
        axis: mesh axis that splits the columns, or None.
        chunk: maximum number of tokens whose logits are in memory at a time; 0 = all.
        softcap: bound of the soft cap on logits; 0 = none.
        weight_gradient: (x [tokens, d_model], dlogits [tokens, vocab]) -> float32 [d_model, vocab].
        regularizers: None = plain cross-entropy.
        by_token: also return the weighted loss of each token.
    """

    size: int
    axis: str | None = None
    chunk: int = 0
    softcap: float = 0.0
    weight_gradient: Callable[[Array, Array], Array] = sum_over_tokens
    regularizers: Regularizers | None = None
    by_token: bool = False


def token_cross_entropy(
    x: Array, kernel: Array, targets: Array, weights: Array, vocabulary: Vocabulary
) -> Sums:
    """Compute the summed cross-entropy of next tokens.

    x is [batch, seq, d_model] and kernel [d_model, vocab_shard], both in the compute dtype; targets
    are int32 [batch, seq] in the complete vocabulary, weights float32 [batch, seq].

    Returns `loss` (nats), `weight` and `correct` (arg-max hits), each summed with `weights`, and
    with regularizers their `aux_loss`, whose gradient is part of that of `loss`. With
    `vocabulary.by_token` also `row_loss`, without a gradient, and `row_weight`: [batch].
    Communicates three scalars per token over `vocabulary.axis`, with label smoothing four.
    """
    tokens = x.reshape(-1, x.shape[-1])
    flat_targets, flat_weights = targets.reshape(-1), weights.reshape(-1).astype(jnp.float32)
    loss, correct, *extra = _linear_cross_entropy(
        tokens, kernel, flat_targets, flat_weights, vocabulary
    )
    aux = {}
    if vocabulary.by_token:
        own = lax.stop_gradient(extra.pop()).reshape(weights.shape)
        aux = {"row_loss": jnp.sum(own, 1), "row_weight": jnp.sum(weights, 1)}
    if extra:
        aux["aux_loss"] = lax.stop_gradient(extra[0])
    return {"loss": loss, "weight": jnp.sum(flat_weights), "correct": correct, **aux}


def make_token_loss(
    axis: str | None = None,
    chunk: int = 0,
    weight_gradient: Callable[[Array, Array], Array] = sum_over_tokens,
) -> Callable[..., Sums]:
    """Build `Context.token_loss`; for the arguments see `Vocabulary` [d_model, vocab]."""

    def token_loss(
        head: TokenHead,
        targets: Array,
        weights: Array,
        regularizers: Regularizers | None = None,
        *,
        by_row: bool = False,
    ) -> Sums:
        """Return the `Sums` of `token_cross_entropy`; targets and weights are [batch, seq]."""
        vocabulary = Vocabulary(
            head.vocab_size, axis, chunk, head.softcap, weight_gradient, regularizers, by_row
        )
        return token_cross_entropy(head.x, head.kernel, targets, weights, vocabulary)

    return token_loss


def label_cross_entropy(
    logits: Array, labels: Array, weights: Array, regularizers: Regularizers | None = None
) -> Sums:
    """Return the cross-entropy sums of `token_cross_entropy` for class labels, in float32.

    logits are [batch, classes] of any float dtype, labels int32 [batch], weights float32 [batch].
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
    hits = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    aux = {}
    if regularizers is not None:
        z_loss = regularizers.z_loss * jax.nn.logsumexp(logits.astype(jnp.float32), -1) ** 2
        smoothing = regularizers.label_smoothing * (picked - jnp.mean(log_probs, -1))
        aux["aux_loss"] = jnp.sum((z_loss + smoothing) * weights)
    return {
        "loss": -jnp.sum(picked * weights),
        "weight": jnp.sum(weights),
        "correct": jnp.sum(hits * weights),
        **aux,
    }


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_cross_entropy(
    x: Array, kernel: Array, targets: Array, weights: Array, vocabulary: Vocabulary
) -> tuple[Array, ...]:
    """Return float32 [] loss, correct; extra if regularized; losses [tokens] if `by_token`."""

    def chunk(carry: tuple[Array, ...], part: tuple[Array, ...]) -> tuple[tuple[Array, ...], Any]:
        x, targets, weights = part
        sums, losses, _ = _chunk_loss(x, targets, weights, kernel, vocabulary)
        return tuple(map(jnp.add, carry, sums)), losses if vocabulary.by_token else None

    start, arrays = _zero_sums(weights, vocabulary), (x, targets, weights)
    sums, losses = scan_tokens(chunk, start, arrays, vocabulary.chunk)
    return (*sums, losses) if vocabulary.by_token else sums


def _zero_sums(weights: Array, vocabulary: Vocabulary) -> tuple[Array, ...]:
    """Return a zero, float32 [], for each sum of `_linear_cross_entropy`; weights is [tokens]."""
    return (collectives.zeros_like(weights[0]),) * (2 if vocabulary.regularizers is None else 3)


def _forward(
    x: Array, kernel: Array, targets: Array, weights: Array, vocabulary: Vocabulary
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the sums, and the gradients of loss + extra of x [tokens, d_model] and the kernel."""
    # float16 cannot represent unscaled gradients of x: keep them in float32 until backward
    # multiplies by the scaled cotangent.
    grad_dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype

    def chunk(
        carry: tuple[tuple[Array, ...], Array], part: tuple[Array, ...]
    ) -> tuple[tuple[tuple[Array, ...], Array], Any]:
        """Return the carry plus sums and dkernel of a chunk; its dx [chunk, d_model] and losses."""
        part_x, part_targets, part_weights = part
        sums, losses, (difference, slope) = _chunk_loss(
            part_x, part_targets, part_weights, kernel, vocabulary
        )
        dlogits = difference * part_weights[:, None] * slope
        dx, dkernel = head_gradients(part_x, kernel, dlogits, vocabulary)
        total = tuple(map(jnp.add, carry[0], sums)), carry[1] + dkernel
        return total, (dx.astype(grad_dtype), losses if vocabulary.by_token else None)

    start, arrays = (
        (_zero_sums(weights, vocabulary), zero_gradient(x, kernel)),
        (x, targets, weights),
    )
    (sums, dkernel), (dx, losses) = scan_tokens(chunk, start, arrays, vocabulary.chunk)
    if vocabulary.by_token:
        sums = (*sums, losses)
    return sums, (dx, dkernel, jnp.zeros((), x.dtype), jnp.zeros((), kernel.dtype))


def _backward(vocabulary: Vocabulary, saved: tuple[Array, ...], grads: tuple[Array, ...]) -> Any:
    """Return gradients of x [tokens, d_model] and kernel [d_model, vocab_shard] in their dtypes."""
    dx, dkernel, like_x, like_kernel = saved
    scale = grads[0]
    return (
        (dx.astype(jnp.float32) * scale).astype(like_x.dtype),
        (dkernel * scale).astype(like_kernel.dtype),
        None,
        None,
    )


_linear_cross_entropy.defvjp(_forward, _backward)


def _chunk_loss(
    x: Array, targets: Array, weights: Array, kernel: Array, vocabulary: Vocabulary
) -> tuple[tuple[Array, ...], Array, tuple[Array, Array | float]]:
    """Compute the softmax of one chunk of tokens; `vocabulary.axis` may split the vocabulary.

    x [tokens, d_model], kernel [d_model, vocab_shard] -> (sums of `_linear_cross_entropy`, float32
    [], equal over the axis; weighted losses, float32 [tokens]; (unweighted gradient of the capped
    logits, soft cap's slope, float32 [tokens, vocab_shard])).
    """
    axis, regularizers = vocabulary.axis, vocabulary.regularizers
    logits, columns = logits_of(x, kernel, vocabulary)
    slope, real = slope_at(logits, vocabulary.softcap), columns < vocabulary.size
    logits = jnp.where(real, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, -1))
    if axis:
        top = collectives.all_reduce(top, axis, "max")
    exps = jnp.exp(logits - top[:, None])
    hit = targets[:, None] == columns
    # `where` instead of a product, because padding columns contain -inf and -inf · 0 is NaN.
    parts = [jnp.sum(exps, -1), jnp.sum(jnp.where(hit, logits, 0.0), -1)]
    if regularizers is not None and regularizers.label_smoothing:
        parts.append(jnp.sum(jnp.where(real, logits, 0.0), -1) / vocabulary.size)
    sums = jnp.stack(parts)
    if axis:
        sums = collectives.all_reduce(sums, axis)
    lse = jnp.log(sums[0]) + top
    losses = (lse - sums[1]) * weights
    loss = jnp.sum(losses)
    correct = jnp.sum((sums[1] >= top).astype(jnp.float32) * weights)
    probs, hits = exps / sums[0][:, None], hit.astype(jnp.float32)
    if regularizers is None:
        return (loss, correct), losses, (probs - hits, slope)
    factor, share = regularizers
    extra = factor * lse**2 + (share * (sums[1] - sums[2]) if share else 0.0)
    spread = jnp.where(real, share / vocabulary.size, 0.0)
    gradient = probs * (1.0 + 2.0 * factor * lse[:, None]) - (1.0 - share) * hits - spread
    return (loss, correct, jnp.sum(extra * weights)), losses, (gradient, slope)


def logits_of(x: Array, kernel: Array, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """Return capped float32 logits [tokens, vocab_shard], and their columns in the vocabulary."""
    width = kernel.shape[1]
    logits = jnp.einsum("td,dv->tv", x, kernel, preferred_element_type=jnp.float32)
    first = collectives.group_index(vocabulary.axis) * width if vocabulary.axis else 0
    return soft_cap(logits, vocabulary.softcap), first + jnp.arange(width)


_TILE = 128
"""Multiple of tokens for which products of a chunk are efficient."""


def head_gradients(
    x: Array, kernel: Array, dlogits: Array, vocabulary: Vocabulary
) -> tuple[Array, Array]:
    """Return float32 gradients of x [tokens, d_model] and the kernel from dlogits."""
    low = dlogits.astype(kernel.dtype) if kernel.dtype != jnp.float16 else dlogits
    dx = jnp.einsum("tv,dv->td", low, kernel, preferred_element_type=jnp.float32)
    return dx, vocabulary.weight_gradient(x, low)


def zero_gradient(x: Array, kernel: Array) -> Array:
    """Return float32 zeros [d_model, vocab_shard], to which chunks of x add gradients."""
    varying = tuple(collectives.varying_axes(kernel) | collectives.varying_axes(x))
    return collectives.vary(jnp.zeros(kernel.shape, jnp.float32), varying)


def scan_tokens(body: Any, carry: Any, arrays: tuple[Array, ...], chunk: int) -> tuple[Any, Any]:
    """Scan like `lax.scan` over chunks of arrays [tokens, ...]; outputs are [tokens, ...], too.

    The last chunk is padded with zeros (weight 0). Chunks are smaller than `chunk` if that needs
    less padding: the fewest chunks, of equal size. A single chunk needs no loop.
    """
    tokens = arrays[0].shape[0]
    size = min(chunk, tokens) if chunk else tokens
    if tokens % size:
        even = -(-tokens // -(-tokens // size))
        size = min(size, -(-even // _TILE) * _TILE)
    padding = -tokens % size

    def cut(x: Array) -> Array:
        if padding:
            x = jnp.concatenate([x, jnp.zeros_like(x[:padding])])
        return x.reshape(-1, size, *x.shape[1:])

    if size == tokens:
        return body(carry, arrays)
    carry, outputs = lax.scan(body, carry, tuple(map(cut, arrays)))
    return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:tokens], outputs)
