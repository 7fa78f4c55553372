"""Attention block by block, in plain JAX: the [queries, keys] matrix of a row never exists whole.

Scores of one block of queries and one block of keys at a time are turned into a running softmax.
Backward recomputes them from the log-sum-exp. Pairs of blocks in which no query sees a key are
skipped, whether the causal mask, the window or the documents of packed rows hide them.

Queries and keys say where they stand (`Span`), so any part of a row can attend to any other part.
Partial results of several parts of the keys are joined by `merge`, which ring attention is built
on (`attention/ring.py`).

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2. Deviation: blocks are XLA products in
loops, not one fused kernel.

Shapes: query [batch, queries, heads, head_dim]; key and value [batch, keys, kv_heads, head_dim];
log-sum-exp float32 [batch, queries, heads]. Inside, blocks of queries are [num_blocks, batch,
kv_heads, group, block, head_dim] with group = heads / kv_heads, and blocks of keys [num_blocks,
batch, kv_heads, block, head_dim].
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core import collectives
from jaxdist.core.softcap import slope_at, soft_cap
from jaxdist.core.types import Array

UNSEEN = -1e30
"""Log-sum-exp of a query that saw no key. Finite, so that differences of two are no NaN."""

BLOCK = 256
"""Positions of a block: on CPU twice as fast as 1024, whose scores leave the cache."""


class Span(NamedTuple):
    """Where some positions of a batch stand.

    Attributes:
        places: int32 [batch or 1, length], index of each in its row; -1 = padding that no query
            sees.
        segments: int32 [batch, length], documents of packed rows; None = one document.
    """

    places: Array
    segments: Array | None = None


class Rule(NamedTuple):
    """Which keys a query sees, apart from documents.

    Attributes:
        causal: those up to its own place.
        window: the newest of them, itself included; 0 = all.
        block: positions of a block.
        softcap: bound that scores approach; 0 = none.
    """

    causal: bool = True
    window: int = 0
    block: int = BLOCK
    softcap: float = 0.0


class Partial(NamedTuple):
    """Attention to a part of the keys.

    Attributes:
        out: float32 [batch, queries, heads, head_dim], softmax over that part; 0 where none is
            seen.
        lse: float32 [batch, queries, heads], log of the softmax's denominator.
    """

    out: Array
    lse: Array


def attend(query: Array, key: Array, value: Array, queries: Span, keys: Span, rule: Rule) -> Array:
    """softmax(query · key / √head_dim, masked) · value, with a backward pass of its own.

    Returns:
        [batch, queries, heads, head_dim] in the query's dtype; sums in float32 or wider. A query
        that sees no key gets 0. What backward reads is named "attention" for remat policies.
    """
    query, key, value = declare_alike(query, key, value)
    return _attend(query, key, value, queries, keys, rule)


def declare_alike(*arrays: Array) -> tuple[Array, ...]:
    """The same arrays [*dims], declared to vary over the axes over which any of them does."""
    axes = frozenset().union(*(collectives.varying_axes(x) for x in arrays))
    return collectives.vary(arrays, tuple(axes))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(query: Array, key: Array, value: Array, queries: Span, keys: Span, rule: Rule) -> Array:
    """`attend` of inputs that vary alike: [batch, queries, heads, head_dim]."""
    return forward(query, key, value, queries, keys, rule).out.astype(query.dtype)


def _forward(
    query: Array, key: Array, value: Array, queries: Span, keys: Span, rule: Rule
) -> tuple[Array, Any]:
    """`_attend` [batch, queries, heads, head_dim], and what its backward reads."""
    found = forward(query, key, value, queries, keys, rule)
    out, lse = keep(found, query.dtype)
    return out, (query, key, value, out, lse, queries, keys)


def _backward(rule: Rule, saved: Any, cotangent: Array) -> Any:
    """Gradients of query, key and value in their shapes and dtypes; places have none.

    `cotangent` [batch, queries, heads, head_dim] is that of the output.
    """
    query, key, value, out, lse, queries, keys = saved
    grads = backward(query, key, value, queries, keys, Pull.of(out, lse, cotangent), rule)
    return *(g.astype(x.dtype) for g, x in zip(grads, saved[:3], strict=True)), None, None


_attend.defvjp(_forward, _backward)


def keep(found: Partial, dtype: Any) -> tuple[Array, Array]:
    """(out in `dtype`, lse), [batch, queries, heads, head_dim] and without the last.

    Both are named for remat policies that keep them.
    """
    named = lambda x: checkpoint_name(x, "attention")
    return named(found.out.astype(dtype)), named(found.lse)


def merge(left: Partial, right: Partial) -> Partial:
    """Attention to two disjoint parts of the keys, from attention to each.

    Out is [batch, queries, heads, head_dim], as in `Partial`.

    Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.
    """
    lse = jnp.logaddexp(left.lse, right.lse)
    part = lambda found: found.out * jnp.exp(found.lse - lse)[..., None]
    return Partial(part(left) + part(right), lse)


class Pull(NamedTuple):
    """What backward knows of a query besides itself, over all parts of the keys.

    Attributes:
        cotangent: [batch, queries, heads, head_dim], of the output, compute dtype.
        lse: float32 [batch, queries, heads].
        delta: float32 [batch, queries, heads], output · cotangent.
    """

    cotangent: Array
    lse: Array
    delta: Array

    @classmethod
    def of(cls, out: Array, lse: Array, cotangent: Array) -> Pull:
        """From the output and its cotangent, [batch, queries, heads, head_dim] each."""
        wide = lse.dtype
        return cls(cotangent, lse, jnp.sum(out.astype(wide) * cotangent.astype(wide), -1))


def forward(
    query: Array, key: Array, value: Array, queries: Span, keys: Span, rule: Rule
) -> Partial:
    """Attention of these queries to these keys alone; not differentiable.

    Of query [batch, queries, heads, head_dim], key and value [batch, keys, kv_heads, head_dim]; the
    result is float32, or wider where the query is.
    """
    query, key, value, queries, keys = _at_once(query, key, value, queries, keys)
    cut = _Cut.of(query, key, queries, keys, rule)
    wide = wide_dtype(query)
    q, k, v = cut.of_queries(query), cut.of_keys(key), cut.of_keys(value)
    product = partial(jnp.einsum, preferred_element_type=wide)
    scale = 1 / math.sqrt(query.shape[-1])

    def of_query_block(_: None, mine: Any) -> tuple[None, tuple[Array, Array]]:
        """One block of queries [batch, kv_heads, group, block, head_dim] and all keys.

        Gives the output, shaped so, and the log-sum-exp, shaped so but for the last dim.
        """
        q, q_span, seen = mine

        def add(total: _Running, other: Any) -> tuple[_Running, None]:
            k, v, k_span, is_seen = other

            def look() -> _Running:
                scores = soft_cap(product("bgrqd,bgkd->bgrqk", q, k) * scale, rule.softcap)
                scores = jnp.where(cut.allowed(q_span, k_span), scores, -jnp.inf)
                top = jnp.maximum(total.top, jnp.max(scores, -1))
                probs = jnp.exp(scores - top[..., None])
                old = jnp.exp(total.top - top)
                mixed = product("bgrqk,bgkd->bgrqd", probs.astype(v.dtype), v)
                weight = total.weight * old + jnp.sum(probs, -1)
                return _Running(total.out * old[..., None] + mixed, top, weight)

            return lax.cond(is_seen, look, lambda: total), None

        zero = jnp.zeros_like(q, wide)
        start = _Running(zero, jnp.full_like(zero[..., 0], UNSEEN), zero[..., 0])
        total, _ = lax.scan(add, start, (k, v, cut.keys, seen))
        saw = total.weight > 0
        weight = jnp.where(saw, total.weight, 1)
        lse = jnp.where(saw, total.top + jnp.log(weight), UNSEEN)
        return None, (total.out / weight[..., None], lse)

    _, (out, lse) = lax.scan(of_query_block, None, (q, cut.queries, cut.seen))
    return Partial(cut.to_queries(out), cut.to_queries(lse))


def wide_dtype(query: Array) -> Any:
    """What attention of a query [*dims] sums in: float32, or float64 where the query is."""
    return jnp.float64 if query.dtype == jnp.float64 else jnp.float32


def backward(
    query: Array, key: Array, value: Array, queries: Span, keys: Span, pull: Pull, rule: Rule
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value through attention to these keys; shapes as those.

    Of query [batch, queries, heads, head_dim], key and value [batch, keys, kv_heads, head_dim].
    `pull` holds the statistics over all keys that the queries see, of which these may be a part.
    Float32 or wider: sums over parts keep their bits.
    """
    query, key, value, queries, keys = _at_once(query, key, value, queries, keys)
    cut = _Cut.of(query, key, queries, keys, rule)
    wide = pull.lse.dtype
    product = partial(jnp.einsum, preferred_element_type=wide)
    q, do = cut.of_queries(query), cut.of_queries(pull.cotangent)
    lse, delta = cut.of_queries(pull.lse), cut.of_queries(pull.delta)
    k, v = cut.of_keys(key), cut.of_keys(value)
    scale = 1 / math.sqrt(query.shape[-1])
    numbers = jnp.arange(q.shape[0])

    def of_key_block(dq: Array, other: Any) -> tuple[Array, tuple[Array, Array]]:
        """Add a block of keys' part to dq [blocks, batch, kv_heads, group, block, head_dim].

        Gives it, and dk and dv [batch, kv_heads, block, head_dim] of that block.
        """
        k, v, k_span, seen = other

        def add(total: _Grads, mine: Any) -> tuple[_Grads, None]:
            dq, dk, dv = total
            number, q, do, lse, delta, q_span, is_seen = mine

            def look() -> tuple[Array, Array, Array]:
                """(part of dq [batch, kv_heads, group, block, head_dim], dk, dv so far)."""
                scores = soft_cap(product("bgrqd,bgkd->bgrqk", q, k) * scale, rule.softcap)
                # Where, before any product: what is hidden may be infinite.
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

            # Only blocks leave the branch: a branch that returned dq would copy all of it.
            part, dk, dv = lax.cond(is_seen, look, lambda: (jnp.zeros_like(q, wide), dk, dv))
            dq = lax.dynamic_update_index_in_dim(dq, dq[number] + part, number, 0)
            return (dq, dk, dv), None

        zeros = jnp.zeros_like(k, wide), jnp.zeros_like(v, wide)
        mine = (numbers, q, do, lse, delta, cut.queries, seen)
        (dq, dk, dv), _ = lax.scan(add, (dq, *zeros), mine)
        return dq, (dk, dv)

    dq, (dk, dv) = lax.scan(of_key_block, jnp.zeros_like(q, wide), (k, v, cut.keys, cut.seen.T))
    return cut.to_queries(dq), cut.to_keys(dk), cut.to_keys(dv)


def _at_once(*inputs: Any) -> Any:
    """The same inputs, any trees of arrays, none of them known before the others.

    Positions and documents are the same in every layer. Differentiating a loop over layers would
    otherwise compute the masks of all blocks ahead of it, and keep them: [queries, keys] after all.
    """
    return lax.optimization_barrier(inputs)


_Grads: TypeAlias = tuple[Array, Array, Array]
"""Float32 gradients so far: of all queries, and of the keys and values of one block."""


class _Running(NamedTuple):
    """A softmax in progress over one block of queries.

    Attributes:
        out: [batch, kv_heads, group, block, head_dim], not yet divided by `weight`.
        top: [batch, kv_heads, group, block], largest score so far.
        weight: the same shape, sum of exp(score - top).
    """

    out: Array
    top: Array
    weight: Array


class _Cut(NamedTuple):
    """Rows cut into blocks.

    Attributes:
        queries: spans of the blocks of queries, leaves [num_blocks, batch or 1, block].
        keys: spans of the blocks of keys.
        seen: bool [query blocks, key blocks], whether any query may see any key.
        heads: key/value heads.
        lengths: positions of (queries, keys) without padding.
        rule: which keys a query sees.
    """

    queries: Span
    keys: Span
    seen: Array
    heads: int
    lengths: tuple[int, int]
    rule: Rule

    @classmethod
    def of(cls, query: Array, key: Array, queries: Span, keys: Span, rule: Rule) -> _Cut:
        """The cut of query [batch, queries, ...] and key [batch, keys, ...]."""
        # Loops carry what varies as the queries do, so what they read must vary as well.
        axes = tuple(collectives.varying_axes(query))
        cut = lambda x: jnp.moveaxis(_blocks(x, rule.block, fill=-1), 1, 0)
        queries, keys = jax.tree.map(cut, collectives.vary((queries, keys), axes))
        lengths = query.shape[1], key.shape[1]
        return cls(queries, keys, _any_seen(queries, keys, rule), key.shape[2], lengths, rule)

    def allowed(self, queries: Span, keys: Span) -> Array:
        """Which keys of a block which queries see: bool [batch or 1, 1, 1, block, block]."""
        mine, others = queries.places[:, :, None], keys.places[:, None, :]
        found = others >= 0
        if self.rule.causal:
            found &= mine >= others
        if self.rule.window:
            found &= mine - others < self.rule.window
        if queries.segments is not None and keys.segments is not None:
            found &= queries.segments[:, :, None] == keys.segments[:, None, :]
        return found[:, None, None]

    def of_queries(self, x: Array) -> Array:
        """[batch, queries, heads, ...] -> [blocks, batch, kv_heads, group, block, ...]."""
        x = _blocks(x, self.rule.block)
        x = x.reshape(*x.shape[:3], self.heads, -1, *x.shape[4:])
        return jnp.moveaxis(x, (1, 3, 4, 2), (0, 2, 3, 4))

    def to_queries(self, x: Array) -> Array:
        """[blocks, batch, kv_heads, group, block, ...] -> [batch, queries, heads, ...]."""
        x = jnp.moveaxis(x, (0, 2, 3, 4), (1, 3, 4, 2))
        whole = x.reshape(x.shape[0], -1, x.shape[3] * x.shape[4], *x.shape[5:])
        return whole[:, : self.lengths[0]]

    def of_keys(self, x: Array) -> Array:
        """[batch, keys, kv_heads, head_dim] -> [blocks, batch, kv_heads, block, head_dim]."""
        return jnp.moveaxis(_blocks(x, self.rule.block), (1, 3, 2), (0, 2, 3))

    def to_keys(self, x: Array) -> Array:
        """[blocks, batch, kv_heads, block, ...] -> [batch, keys, kv_heads, ...]."""
        x = jnp.moveaxis(x, (0, 2, 3), (1, 3, 2))
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.lengths[1]]


def _blocks(x: Array, longest: int, fill: int = 0) -> Array:
    """[batch, length, ...] -> [batch, blocks, block, ...], padded with `fill` where need be.

    A row without a divisor between an eighth of `longest` and `longest` is padded.
    """
    length = x.shape[1]
    divisors = [n for n in range(1, min(length, longest) + 1) if length % n == 0]
    block = divisors[-1]
    if block < min(length, longest) // 8:
        block = longest
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, -length % block)
        x = jnp.pad(x, padding, constant_values=fill)
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _any_seen(queries: Span, keys: Span, rule: Rule) -> Array:
    """Whether any query of a block may see any key of another; bool [query blocks, key blocks].

    By the smallest and largest of places and documents [blocks, batch or 1, block]: never False
    where one is seen.
    """
    low = lambda x: jnp.min(x, -1)[:, None]
    high = lambda x: jnp.max(x, -1)[:, None]
    first, last = (lambda x: jnp.min(x, -1)[None]), (lambda x: jnp.max(x, -1)[None])
    found = last(keys.places) >= 0
    if rule.causal:
        found &= high(queries.places) >= first(keys.places)
    if rule.window:
        found &= low(queries.places) - last(keys.places) < rule.window
    if queries.segments is not None and keys.segments is not None:
        found &= high(queries.segments) >= first(keys.segments)
        found &= low(queries.segments) <= last(keys.segments)
    found = jnp.any(found, -1)
    return jnp.broadcast_to(found, (queries.places.shape[0], keys.places.shape[0]))
