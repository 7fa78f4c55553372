"""The largest attention logit of each row, which fused kernels do not return."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from jaxdist.core import collectives
from jaxdist.core.attention.blockwise import KV, Q, Span
from jaxdist.core.attention.context_parallel import gather_keys, gathered_spans
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.types import Array, AttentionMask

_MOST_SCORES = 2**26  # in memory at once, float32


def largest_logits(query: Q, key: KV, mask: AttentionMask) -> Float[Array, " batch"]:
    """Return the maximum of query · key / √head_dim over heads and visible pairs, before a cap.

    It is equal on the devices that split heads (`tensor`) or positions (`context`).
    """
    if CONTEXT.name in collectives.varying_axes(query):
        queries, keys = gathered_spans(query, mask.segments)
        key = gather_keys(key)
    else:
        queries = keys = Span(jnp.arange(query.shape[1])[None], mask.segments)
    batch, length, heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    scores = batch * heads * length * key.shape[1]
    fitting = (n for n in range(1, length) if not length % n and scores <= n * _MOST_SCORES)
    parts = next(fitting, length)

    def part(index: Array) -> Float[Array, " batch"]:
        """Return the largest logits of one part of the queries; index is int32 []."""
        cut = lambda x: lax.dynamic_slice_in_dim(x, index * (length // parts), length // parts, 1)
        logits = jnp.einsum(
            "bqhgd,bkhd->bhgqk", cut(grouped), key, preferred_element_type=jnp.float32
        )
        behind = cut(queries.positions)[:, :, None] - keys.positions[:, None, :]
        seen = behind >= 0 if mask.causal else behind == behind
        if mask.sliding_window:
            near = behind < mask.sliding_window
            seen &= near | mask.has_no_window if mask.full_every else near
        if queries.segments is not None and keys.segments is not None:
            seen &= cut(queries.segments)[:, :, None] == keys.segments[:, None, :]
        return jnp.max(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=(1, 2, 3, 4))

    largest = jnp.max(lax.map(part, jnp.arange(parts)), axis=0) / math.sqrt(head_dim)
    axes = {TENSOR.name, CONTEXT.name} & collectives.varying_axes(largest)
    return collectives.all_reduce(largest, tuple(sorted(axes)), "max") if axes else largest
