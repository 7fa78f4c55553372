"""Losses as sums over rows or tokens: cross-entropy of tokens (sharded vocabulary) and labels.

The token loss fuses the head's product with its softmax and computes gradients in forward, chunk by
chunk. The complete logits are never materialized.

Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", section 4.
Deviation: XLA products over chunks of tokens instead of a fused GPU kernel.
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
    """Return the head kernel's gradient, float32 [d_model, vocab], summed over tokens.

    x is [tokens, d_model], dlogits [tokens, vocab].
    """
    return jnp.einsum("td,tv->dv", x, dlogits, preferred_element_type=jnp.float32)


class Vocabulary(NamedTuple):
    """Layout of a head's vocabulary, and the function for its kernel's gradient.

    Attributes:
        size: number of real entries; later columns are padding with probability 0.
        axis: mesh axis that splits the columns, or None.
        chunk: number of tokens whose logits are in memory at once; 0 = all.
        softcap: bound of the soft cap on logits; 0 = none.
        weight_gradient: (x [tokens, d_model], dlogits [tokens, vocab]) -> float32 [d_model, vocab].
    """

    size: int
    axis: str | None = None
    chunk: int = 0
    softcap: float = 0.0
    weight_gradient: Callable[[Array, Array], Array] = sum_over_tokens


def token_cross_entropy(
    x: Array, kernel: Array, targets: Array, weights: Array, vocabulary: Vocabulary
) -> Sums:
    """Compute the summed cross-entropy of next tokens.

    x is [batch, seq, d_model] and kernel [d_model, vocab_shard], both in the compute dtype; targets
    are int32 [batch, seq] in the complete vocabulary, weights float32 [batch, seq].

    Returns `loss` (nats), `weight` and `correct` (arg-max hits), each summed with `weights`.
    Communicates three scalars per token over `vocabulary.axis`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    flat_targets, flat_weights = targets.reshape(-1), weights.reshape(-1).astype(jnp.float32)
    loss, correct = _linear_cross_entropy(tokens, kernel, flat_targets, flat_weights, vocabulary)
    return {"loss": loss, "weight": jnp.sum(flat_weights), "correct": correct}


def make_token_loss(
    axis: str | None = None,
    chunk: int = 0,
    weight_gradient: Callable[[Array, Array], Array] = sum_over_tokens,
) -> Callable[..., Sums]:
    """Build `Context.token_loss`: `token_cross_entropy` with a vocabulary split over `axis`.

    For `chunk` and `weight_gradient`, float32 [d_model, vocab], see `Vocabulary`.
    """

    def token_loss(head: TokenHead, targets: Array, weights: Array) -> Sums:
        """Return the sums of `token_cross_entropy`; targets and weights are [batch, seq]."""
        vocabulary = Vocabulary(head.vocab_size, axis, chunk, head.softcap, weight_gradient)
        return token_cross_entropy(head.x, head.kernel, targets, weights, vocabulary)

    return token_loss


def label_cross_entropy(logits: Array, labels: Array, weights: Array) -> Sums:
    """Return the cross-entropy sums of `token_cross_entropy` for class labels, in float32.

    logits are [batch, classes] of any float dtype, labels int32 [batch], weights float32 [batch].
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
    hits = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return {
        "loss": -jnp.sum(picked * weights),
        "weight": jnp.sum(weights),
        "correct": jnp.sum(hits * weights),
    }


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_cross_entropy(
    x: Array, kernel: Array, targets: Array, weights: Array, vocabulary: Vocabulary
) -> tuple[Array, Array]:
    """Return (loss, correct), float32 [], from x [tokens, d_model], kernel [d_model, ...]."""

    def chunk(
        carry: tuple[Array, Array], part: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], None]:
        """Add the loss and hits, float32 [], of a chunk [chunk, ...] of tokens."""
        x, targets, weights = part
        *_, loss, correct = _chunk_loss(x, targets, weights, kernel, vocabulary)
        return (carry[0] + loss, carry[1] + correct), None

    parts = chunk_tokens((x, targets, weights), vocabulary.chunk)
    zero = collectives.zeros_like(weights[0])
    (loss, correct), _ = scan_chunks(chunk, (zero, zero), parts)
    return loss, correct


def _forward(
    x: Array, kernel: Array, targets: Array, weights: Array, vocabulary: Vocabulary
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Return loss, hits, and the loss gradients of x [tokens, d_model] and of the kernel.

    Backward only scales these gradients, so logits are neither saved nor recomputed.
    """
    # float16 cannot represent unscaled gradients of x: keep them in float32 until backward
    # multiplies by the scaled cotangent.
    grad_dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype

    def chunk(
        carry: tuple[Array, Array, Array], part: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        """Add the loss, hits and dkernel of a chunk of tokens; return its dx [chunk, d_model]."""
        part_x, part_targets, part_weights = part
        probs, hit, slope, loss, correct = _chunk_loss(
            part_x, part_targets, part_weights, kernel, vocabulary
        )
        dlogits = (probs - hit.astype(jnp.float32)) * part_weights[:, None] * slope
        low = dlogits.astype(kernel.dtype) if kernel.dtype != jnp.float16 else dlogits
        dx = jnp.einsum("tv,dv->td", low, kernel, preferred_element_type=jnp.float32)
        dkernel = vocabulary.weight_gradient(part_x, low)
        total = (carry[0] + loss, carry[1] + correct, carry[2] + dkernel)
        return total, dx.astype(grad_dtype)

    parts = chunk_tokens((x, targets, weights), vocabulary.chunk)
    zero = collectives.zeros_like(weights[0])
    varying = tuple(collectives.varying_axes(kernel) | collectives.varying_axes(x))
    dkernel = collectives.vary(jnp.zeros(kernel.shape, jnp.float32), varying)
    (loss, correct, dkernel), dx = scan_chunks(chunk, (zero, zero, dkernel), parts)
    dx = dx.reshape(-1, x.shape[-1])[: x.shape[0]]
    return (loss, correct), (dx, dkernel, jnp.zeros((), x.dtype), jnp.zeros((), kernel.dtype))


def _backward(vocabulary: Vocabulary, saved: tuple[Array, ...], grads: tuple[Array, Array]) -> Any:
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
) -> tuple[Array, Array, Array | float, Array, Array]:
    """Compute the softmax of one chunk of tokens; `vocabulary.axis` may split the vocabulary.

    x [tokens, d_model], kernel [d_model, vocab_shard] -> (probabilities float32, one-hot targets
    bool and the soft cap's slope float32 [tokens, vocab_shard], loss and hits, float32 [], equal
    over the axis).
    """
    axis = vocabulary.axis
    logits, columns = logits_of(x, kernel, vocabulary)
    slope = slope_at(logits, vocabulary.softcap)
    logits = jnp.where(columns < vocabulary.size, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, -1))
    if axis:
        top = collectives.all_reduce(top, axis, "max")
    exps = jnp.exp(logits - top[:, None])
    hit = targets[:, None] == columns
    # `where` instead of a product, because padding columns contain -inf and -inf · 0 is NaN.
    sums = jnp.stack([jnp.sum(exps, -1), jnp.sum(jnp.where(hit, logits, 0.0), -1)])
    if axis:
        sums = collectives.all_reduce(sums, axis)
    loss = jnp.sum((jnp.log(sums[0]) + top - sums[1]) * weights)
    correct = jnp.sum((sums[1] >= top).astype(jnp.float32) * weights)
    return exps / sums[0][:, None], hit, slope, loss, correct


def logits_of(x: Array, kernel: Array, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """Return float32 logits [tokens, vocab_shard] and their column indices in the vocabulary."""
    width = kernel.shape[1]
    logits = jnp.einsum("td,dv->tv", x, kernel, preferred_element_type=jnp.float32)
    first = collectives.group_index(vocabulary.axis) * width if vocabulary.axis else 0
    return soft_cap(logits, vocabulary.softcap), first + jnp.arange(width)


_TILE = 128
"""Multiple of tokens for which products of a chunk are efficient."""


def chunk_tokens(arrays: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    """Split [tokens, ...] into [chunks, chunk, ...], padded with zeros (weight 0).

    Chunks are smaller than `chunk` if that needs less padding: the fewest chunks, of equal size.
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

    return tuple(cut(x) for x in arrays)


def scan_chunks(body: Any, carry: Any, parts: tuple[Array, ...]) -> tuple[Any, Any]:
    """Scan over parts [chunks, ...] like `lax.scan`, but without a loop for a single chunk."""
    if parts[0].shape[0] > 1:
        return lax.scan(body, carry, parts)
    return body(carry, tuple(x[0] for x in parts))
