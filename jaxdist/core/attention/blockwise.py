"""Block-wise attention in plain JAX: the [queries, keys] matrix of a row is never materialized.

Scores of one block of queries and one block of keys at a time update a running softmax. Backward
recomputes them from the log-sum-exp. Pairs of blocks are skipped if positions or documents exclude
visible keys. Queries and keys have positions (`Span`), so any part of a row can attend to any
other; `merge` joins results.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2, as loops of XLA products.

Internal layout: query blocks are [num_blocks, batch, kv_heads, group, block, head_dim] with group =
heads / kv_heads; key blocks are [num_blocks, batch, kv_heads, block, head_dim].
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from jaxdist.core import collectives
from jaxdist.core.softcap import slope_at, soft_cap
from jaxdist.core.types import Array, AttentionMask

Q: TypeAlias = Float[Array, "batch queries heads head_dim"]
"""Queries, outputs of attention and their gradients; only this device's heads."""

KV: TypeAlias = Float[Array, "batch keys kv_heads head_dim"]
"""Keys, values and their gradients. Each key/value head serves heads / kv_heads query heads."""

Lse: TypeAlias = Float[Array, "batch queries heads"]
"""Log-sum-exp of the scores of each query, float32 or wider."""

Segments: TypeAlias = Int[Array, "batch length"]
"""Document ids of packed rows: the number changes where the next document (or padding) starts."""

Sink: TypeAlias = Float[Array, " heads"]
"""Attention sinks: a score of each head in the softmax of every query, without a value."""

UNSEEN = -1e30
"""Log-sum-exp of a query that saw no key; finite, so that differences are not NaN."""

BLOCK = 256
"""Maximum positions per block: on CPUs twice as fast as 1024, whose scores exceed the cache."""


class Span(NamedTuple):
    """Positions of queries or keys in their row (-1 = padding), and document ids if packed."""

    positions: Int[Array, "batch_or_1 length"]
    segments: Segments | None = None


class Rule(NamedTuple):
    """The keys that a query sees within its document.

    Attributes:
        window: number of newest keys that a query sees, including its own; 0 = all.
        softcap: bound of the scores; 0 = none.
    """

    causal: bool = True
    window: int = 0
    block: int = BLOCK
    softcap: float = 0.0


class Partial(NamedTuple):
    """Attention over a part of the keys, and its log-sum-exp; float32 or wider."""

    out: Q
    lse: Lse


class BackwardStats(NamedTuple):
    """Per-query statistics over all keys, for the backward pass."""

    cotangent: Q
    lse: Lse
    delta: Lse

    @classmethod
    def of(cls, out: Q, lse: Lse, cotangent: Q) -> BackwardStats:
        """Return the statistics, with delta = output · cotangent of each query."""
        wide = lse.dtype
        return cls(cotangent, lse, jnp.sum(out.astype(wide) * cotangent.astype(wide), -1))


def attend(
    query: Q, key: KV, value: KV, queries: Span, keys: Span, rule: Rule, sink: Sink | None = None
) -> Q:
    """Compute softmax(query · key / √head_dim, capped, masked) · value; 0 if no key is seen."""
    query, key, value, sink = declare_alike(query, key, value, sink)
    return _attend(query, key, value, sink, queries, keys, rule)


def declare_alike(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays [*dims] or None, marked as varying over all axes that any varies over."""
    axes = (collectives.varying_axes(x) for x in arrays if x is not None)
    return collectives.vary(arrays, tuple(frozenset().union(*axes)))


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    query: Q, key: KV, value: KV, sink: Sink | None, queries: Span, keys: Span, rule: Rule
) -> Q:
    return _forward(query, key, value, sink, queries, keys, rule)[0]


def _forward(
    query: Q, key: KV, value: KV, sink: Sink | None, queries: Span, keys: Span, rule: Rule
) -> tuple[Q, Any]:
    total = with_sink(forward(query, key, value, queries, keys, rule), sink)
    out, lse = name_residuals(total, query.dtype)
    return out, (query, key, value, sink, out, lse, queries, keys)


def _backward(rule: Rule, saved: Any, cotangent: Q) -> Any:
    query, key, value, sink, out, lse, queries, keys = saved
    stats = BackwardStats.of(out, lse, cotangent)
    grads = backward(query, key, value, queries, keys, stats, rule)
    of_sink = sink_gradient(sink, stats.lse, stats.delta)
    return *(g.astype(x.dtype) for g, x in zip(grads, saved[:3], strict=True)), of_sink, None, None


_attend.defvjp(_forward, _backward)


def name_residuals(total: Partial, dtype: Any) -> tuple[Q, Lse]:
    """Return the output in `dtype` and the log-sum-exp, named for remat policies that save them."""
    named = lambda x: checkpoint_name(x, "attention")
    return named(total.out.astype(dtype)), named(total.lse)


def merge(left: Partial, right: Partial) -> Partial:
    """Return attention to all keys from attention to two disjoint parts of them."""
    lse = jnp.logaddexp(left.lse, right.lse)
    scaled = lambda part: part.out * jnp.exp(part.lse - lse)[..., None]
    return Partial(scaled(left) + scaled(right), lse)


def with_sink(total: Partial, sink: Sink | None) -> Partial:
    """Return attention with sinks from attention to all keys: the output × sigmoid(lse - sink).

    The log-sum-exp then includes the sink. With it and the new output, the backward pass of
    attention without sinks computes the gradients of query, key and value.
    """
    if sink is None:
        return total
    lse = jnp.logaddexp(total.lse, sink.astype(total.lse.dtype))
    return Partial(total.out * jnp.exp(total.lse - lse)[..., None], lse)


def sink_gradient(sink: Sink | None, lse: Lse, delta: Lse) -> Sink | None:
    """Return the gradient of sinks; `lse` and `delta` are those of the output with sinks."""
    if sink is None:
        return None
    share = jnp.exp(sink.astype(lse.dtype) - lse)
    return -jnp.sum(share * delta, (0, 1)).astype(sink.dtype)


def forward(query: Q, key: KV, value: KV, queries: Span, keys: Span, rule: Rule) -> Partial:
    """Return attention of these queries to only these keys; has no custom backward pass."""
    query, key, value, queries, keys = _together(query, key, value, queries, keys)
    cut = _Cut.of(query, key, queries, keys, rule)
    wide = wide_dtype(query)
    q, k, v = cut.of_queries(query), cut.of_keys(key), cut.of_keys(value)
    product = partial(jnp.einsum, preferred_element_type=wide)
    scale = 1 / math.sqrt(query.shape[-1])

    def of_query_block(_: None, mine: Any) -> tuple[None, tuple[Array, Array]]:
        """Return output and log-sum-exp of a query block [batch, kv_heads, group, block, ...]."""
        q, q_span, seen = mine

        def add(total: _Running, other: Any) -> tuple[_Running, None]:
            k, v, k_span, is_seen = other

            def update() -> _Running:
                scores = soft_cap(product("bgrqd,bgkd->bgrqk", q, k) * scale, rule.softcap)
                scores = jnp.where(cut.allowed(q_span, k_span), scores, -jnp.inf)
                top = jnp.maximum(total.top, jnp.max(scores, -1))
                probs = jnp.exp(scores - top[..., None])
                old = jnp.exp(total.top - top)
                mixed = product("bgrqk,bgkd->bgrqd", probs.astype(v.dtype), v)
                weight = total.weight * old + jnp.sum(probs, -1)
                return _Running(total.out * old[..., None] + mixed, top, weight)

            return lax.cond(is_seen, update, lambda: total), None

        zero = jnp.zeros_like(q, wide)
        start = _Running(zero, jnp.full_like(zero[..., 0], UNSEEN), zero[..., 0])
        total, _ = lax.scan(add, start, (k, v, cut.keys, seen))
        saw = total.weight > 0
        weight = jnp.where(saw, total.weight, 1)
        lse = jnp.where(saw, total.top + jnp.log(weight), UNSEEN)
        return None, (total.out / weight[..., None], lse)

    _, (out, lse) = lax.scan(of_query_block, None, (q, cut.queries, cut.seen))
    return Partial(cut.to_queries(out), cut.to_queries(lse))


def wide_dtype(query: Float[Array, "*dims"]) -> Any:
    """Return the dtype for sums: float64 for float64 queries, else float32."""
    return jnp.float64 if query.dtype == jnp.float64 else jnp.float32


def backward(
    query: Q, key: KV, value: KV, queries: Span, keys: Span, stats: BackwardStats, rule: Rule
) -> tuple[Q, KV, KV]:
    """Return gradients of query, key and value through these keys, float32 or wider."""
    query, key, value, queries, keys = _together(query, key, value, queries, keys)
    cut = _Cut.of(query, key, queries, keys, rule)
    wide = stats.lse.dtype
    product = partial(jnp.einsum, preferred_element_type=wide)
    q, do = cut.of_queries(query), cut.of_queries(stats.cotangent)
    lse, delta = cut.of_queries(stats.lse), cut.of_queries(stats.delta)
    k, v = cut.of_keys(key), cut.of_keys(value)
    scale = 1 / math.sqrt(query.shape[-1])
    numbers = jnp.arange(q.shape[0])

    def of_key_block(dq: Array, other: Any) -> tuple[Array, tuple[Array, Array]]:
        """Add a key block to dq [blocks, batch, kv_heads, group, block, ...]; return dq, dk, dv."""
        k, v, k_span, seen = other

        def add(total: _Grads, mine: Any) -> tuple[_Grads, None]:
            dq, dk, dv = total
            number, q, do, lse, delta, q_span, is_seen = mine

            def add_block() -> tuple[Array, Array, Array]:
                """Return dq [batch, kv_heads, group, block, ...] of this block; dk, dv with it."""
                scores = soft_cap(product("bgrqd,bgkd->bgrqk", q, k) * scale, rule.softcap)
                # Mask before any product, because masked values may be infinite.
                probs = jnp.where(
                    cut.allowed(q_span, k_span), jnp.exp(scores - lse[..., None]), 0.0
                )
                dprobs = product("bgrqd,bgkd->bgrqk", do, v)
                dscores = probs * (dprobs - delta[..., None]) * slope_at(scores, rule.softcap)
                dscores = (dscores * scale).astype(q.dtype)
                return (
                    product("bgrqk,bgkd->bgrqd", dscores, k),
                    dk + product("bgrqk,bgrqd->bgkd", dscores, q),
                    dv + product("bgrqk,bgrqd->bgkd", probs.astype(do.dtype), do),
                )

            # Return only blocks from the branch: a branch that returned dq would copy all of it.
            part, dk, dv = lax.cond(is_seen, add_block, lambda: (jnp.zeros_like(q, wide), dk, dv))
            dq = lax.dynamic_update_index_in_dim(dq, dq[number] + part, number, 0)
            return (dq, dk, dv), None

        zeros = jnp.zeros_like(k, wide), jnp.zeros_like(v, wide)
        mine = (numbers, q, do, lse, delta, cut.queries, seen)
        (dq, dk, dv), _ = lax.scan(add, (dq, *zeros), mine)
        return dq, (dk, dv)

    dq, (dk, dv) = lax.scan(of_key_block, jnp.zeros_like(q, wide), (k, v, cut.keys, cut.seen.T))
    return cut.to_queries(dq), cut.to_keys(dk), cut.to_keys(dv)


def _together(*inputs: Any) -> Any:
    """Return trees of arrays unchanged, but none of them before all are computed (a barrier).

    Positions and documents are equal in all layers. Without the barrier, differentiating a loop
    over layers would compute the masks before it and store them: together [queries, keys].
    """
    return lax.optimization_barrier(inputs)


_Grads: TypeAlias = tuple[Array, Array, Array]
"""Accumulated gradients (`wide_dtype`): of all queries, and of keys and values of one block."""


class _Running(NamedTuple):
    """Running softmax of one block of queries.

    Attributes:
        out: [batch, kv_heads, group, block, head_dim], not yet divided by `weight`.
        top: [batch, kv_heads, group, block], largest score so far.
        weight: [batch, kv_heads, group, block], sum of exp(score - top).
    """

    out: Array
    top: Array
    weight: Array


class _Cut(NamedTuple):
    """Rows split into blocks.

    Attributes:
        queries: spans of the query blocks, leaves [num_blocks, batch or 1, block].
        keys: spans of the key blocks.
        seen: True for pairs of blocks in which a query may see a key.
    """

    queries: Span
    keys: Span
    seen: Bool[Array, "query_blocks key_blocks"]
    heads: int
    lengths: tuple[int, int]
    rule: Rule

    @classmethod
    def of(cls, query: Q, key: KV, queries: Span, keys: Span, rule: Rule) -> _Cut:
        # Loop carries vary over the axes of the queries, so the loop inputs must too.
        axes = tuple(collectives.varying_axes(query))
        cut = lambda x: jnp.moveaxis(_blocks(x, rule.block, fill=-1), 1, 0)
        queries, keys = jax.tree.map(cut, collectives.vary((queries, keys), axes))
        lengths = query.shape[1], key.shape[1]
        return cls(queries, keys, _any_seen(queries, keys, rule), key.shape[2], lengths, rule)

    def allowed(self, queries: Span, keys: Span) -> Array:
        """Return the mask of a pair of blocks, bool [batch or 1, 1, 1, block, block]."""
        return visible_pairs(queries, keys, self.rule)[:, None, None]

    def of_queries(self, x: Array) -> Array:
        """[batch, queries, heads, ...] -> [blocks, batch, kv_heads, group, block, ...]."""
        x = _blocks(x, self.rule.block)
        x = x.reshape(*x.shape[:3], self.heads, -1, *x.shape[4:])
        return jnp.moveaxis(x, (1, 3, 4, 2), (0, 2, 3, 4))

    def to_queries(self, x: Array) -> Array:
        """[blocks, batch, kv_heads, group, block, ...] -> [batch, queries, heads, ...]."""
        x = jnp.moveaxis(x, (0, 2, 3, 4), (1, 3, 4, 2))
        rows = x.reshape(x.shape[0], -1, x.shape[3] * x.shape[4], *x.shape[5:])
        return rows[:, : self.lengths[0]]

    def of_keys(self, x: Array) -> Array:
        """[batch, keys, kv_heads, head_dim] -> [blocks, batch, kv_heads, block, head_dim]."""
        return jnp.moveaxis(_blocks(x, self.rule.block), (1, 3, 2), (0, 2, 3))

    def to_keys(self, x: Array) -> Array:
        """[blocks, batch, kv_heads, block, ...] -> [batch, keys, kv_heads, ...]."""
        x = jnp.moveaxis(x, (0, 2, 3), (1, 3, 2))
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.lengths[1]]


def visible_pairs(queries: Span, keys: Span, rule: Rule) -> Bool[Array, "batch_or_1 queries keys"]:
    """Return True for pairs of a query and a key that it sees."""
    mine, others = queries.positions[:, :, None], keys.positions[:, None, :]
    allowed = jnp.broadcast_to(others >= 0, jnp.broadcast_shapes(mine.shape, others.shape))
    if rule.causal:
        allowed &= mine >= others
    if rule.window:
        allowed &= mine - others < rule.window
    if queries.segments is not None and keys.segments is not None:
        allowed &= queries.segments[:, :, None] == keys.segments[:, None, :]
    return allowed


def visible_in_layer(
    mask: AttentionMask, queries: Span, keys: Span
) -> Bool[Array, "batch_or_1 queries keys"]:
    """Return `visible_pairs` for a mask whose window may depend on the layer."""
    allowed = visible_pairs(queries, keys, Rule(mask.causal, mask.sliding_window))
    if mask.full_every:
        allowed |= mask.has_no_window & visible_pairs(queries, keys, Rule(mask.causal))
    return allowed


def _blocks(x: Array, longest: int, fill: int = 0) -> Array:
    """Reshape [batch, length, ...] to [batch, blocks, block, ...], padded with `fill` if needed."""
    length = x.shape[1]
    divisors = [n for n in range(1, min(length, longest) + 1) if length % n == 0]
    block = divisors[-1]
    if block < min(length, longest) // 8:
        block = longest
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, -length % block)
        x = jnp.pad(x, padding, constant_values=fill)
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _any_seen(queries: Span, keys: Span, rule: Rule) -> Bool[Array, "query_blocks key_blocks"]:
    """Return False for pairs of blocks only if no query of the first sees a key of the other."""
    low = lambda x: jnp.min(x, -1)[:, None]
    high = lambda x: jnp.max(x, -1)[:, None]
    first, last = (lambda x: jnp.min(x, -1)[None]), (lambda x: jnp.max(x, -1)[None])
    seen = last(keys.positions) >= 0
    if rule.causal:
        seen &= high(queries.positions) >= first(keys.positions)
    if rule.window:
        seen &= low(queries.positions) - last(keys.positions) < rule.window
    if queries.segments is not None and keys.segments is not None:
        seen &= high(queries.segments) >= first(keys.segments)
        seen &= low(queries.segments) <= last(keys.segments)
    seen = jnp.any(seen, -1)
    return jnp.broadcast_to(seen, (queries.positions.shape[0], keys.positions.shape[0]))
