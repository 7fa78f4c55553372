"""Attention of one part of a row to another by cuDNN's kernel, which rings are made of.

    within    queries and their own part's keys, by a rule of cuDNN's
    across    queries and the keys of a part before them, all of them

Packed rows are told by their documents. A document has no gaps, so at most one reaches from a part
to a later one: its keys are the last of theirs, its queries the first of theirs. That is one
sequence of cuDNN's packed layout, without a mask. Queries outside it find nothing.

Outputs and gradients are of the query's dtype, log-sum-exps float32. Nothing here is differentiable
by jax.

Shapes: query [batch, queries, heads, head_dim]; key and value [batch, keys, kv_heads, head_dim];
log-sum-exp [batch, queries, heads].
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax

from jaxdist.core.attention import cudnn
from jaxdist.core.attention.blockwise import UNSEEN, Rule
from jaxdist.core.attention.cudnn import Sequences
from jaxdist.core.types import Array


class Queries(NamedTuple):
    """Queries [batch, queries, heads, head_dim], and their documents, int32 [batch, queries].

    None for the second where a row is one document.
    """

    query: Array
    segments: Array | None


class Keys(NamedTuple):
    """Keys and values [batch, keys, kv_heads, head_dim], and their documents, int32 [batch, keys].

    None for the last where a row is one document.
    """

    key: Array
    value: Array
    segments: Array | None


class OverAll(NamedTuple):
    """What attention to all parts of the row found.

    Attributes:
        out: [batch, queries, heads, head_dim].
        cotangent: of it, in its shape.
        lse: float32 [batch, queries, heads].
    """

    out: Array
    cotangent: Array
    lse: Array


Grads: TypeAlias = tuple[Array, Array, Array]
"""These keys' part of the gradients of query, key and value, in their shapes and dtypes."""


def within(queries: Queries, keys: Keys, rule: Rule) -> tuple[Array, Array]:
    """Output [batch, queries, heads, head_dim] and log-sum-exp over a part's own keys."""
    if keys.segments is not None:
        return cudnn.forward_packed(queries.query, keys.key, keys.value, keys.segments, rule)
    out, stats = cudnn.forward(queries.query, keys.key, keys.value, rule)
    return out, jnp.moveaxis(stats, 1, 2)


def within_backward(queries: Queries, keys: Keys, found: OverAll, rule: Rule) -> Grads:
    """Gradients [batch, positions, heads or kv_heads, head_dim] through a part's own keys."""
    inputs = (queries.query, keys.key, keys.value)
    if keys.segments is not None:
        over_all = found.out, found.lse, found.cotangent
        return cudnn.backward_packed(*inputs, *over_all, segments=keys.segments, rule=rule)
    stats = jnp.moveaxis(found.lse, 2, 1)
    return cudnn.backward(*inputs, found.out, stats, found.cotangent, rule)


def across(queries: Queries, keys: Keys) -> tuple[Array, Array]:
    """Output [batch, queries, heads, head_dim] and log-sum-exp over the keys of a part before.

    Queries of packed rows that see none find zeros, and the log-sum-exp of a query that saw no key.
    """
    inputs = (queries.query, keys.key, keys.value)
    if queries.segments is None or keys.segments is None:
        out, stats = cudnn.forward(*inputs, _ALL)
        return out, jnp.moveaxis(stats, 1, 2)
    reaching = Reaching.of(queries.segments, keys.segments)

    def look() -> tuple[Array, Array]:
        out, stats = cudnn.forward(*inputs, _ALL, sequences=reaching.sequences)
        lse = jnp.moveaxis(stats[::SEQUENCES], 1, 2)
        return reaching.of_queries(out, 0), reaching.of_queries(lse, UNSEEN)

    def nothing() -> tuple[Array, Array]:
        none = jnp.zeros_like(queries.query)
        return none, jnp.full_like(none[..., 0], UNSEEN, jnp.float32)

    return lax.cond(reaching.any, look, nothing)


def across_backward(queries: Queries, keys: Keys, found: OverAll) -> Grads:
    """Gradients [batch, positions, heads or kv_heads, head_dim] through what `across` saw."""
    inputs, stats = (queries.query, keys.key, keys.value), jnp.moveaxis(found.lse, 2, 1)
    if queries.segments is None or keys.segments is None:
        return cudnn.backward(*inputs, found.out, stats, found.cotangent, _ALL)
    reaching = Reaching.of(queries.segments, keys.segments)

    def look() -> Grads:
        of_each = jnp.repeat(stats, SEQUENCES, axis=0)
        over_all = found.out, of_each, found.cotangent
        dq, *grads = cudnn.backward(*inputs, *over_all, _ALL, sequences=reaching.sequences)
        dk, dv = (reaching.of_keys(g) for g in grads)
        return reaching.of_queries(dq, 0), dk, dv

    def nothing() -> Grads:
        dq, dk, dv = (jnp.zeros_like(x) for x in inputs)
        return dq, dk, dv

    return lax.cond(reaching.any, look, nothing)


_ALL = Rule(causal=False)

SEQUENCES = 2
"""Of a row: one that may be empty, and an empty one, as cuDNN takes 1 for whole rows."""


class Reaching(NamedTuple):
    """The document that reaches from the keys of each row to its queries behind them, if one does.

    Attributes:
        queries: bool [batch, queries], those of it; the first ones.
        keys: bool [batch, keys], those of it; the last ones.
    """

    queries: Array
    keys: Array

    @classmethod
    def of(cls, queries: Array, keys: Array) -> Reaching:
        """From the documents of both, int32 [batch, queries] and [batch, keys]."""
        last = keys[:, -1:]
        of_it = queries == last
        return cls(of_it, (keys == last) & jnp.any(of_it, axis=1, keepdims=True))

    @property
    def any(self) -> Array:
        """Whether any row has one, bool []."""
        return jnp.any(self.queries)

    @property
    def sequences(self) -> tuple[Sequences, Sequences]:
        """Those of the queries and those of the keys, int32 [batch, 2] each."""
        mine, others = (jnp.sum(x, 1, dtype=jnp.int32) for x in self)
        none = jnp.zeros_like(mine)
        end, last = (jnp.full_like(none, x.shape[1]) for x in self)
        pair = lambda first, second: jnp.stack([first, second], axis=1)
        return (
            Sequences(pair(none, end), pair(mine, none)),
            Sequences(pair(last - others, last), pair(others, none)),
        )

    def of_queries(self, x: Array, other: float) -> Array:
        """[batch, queries, ...] of the queries of it; `other` for those that saw nothing."""
        return where_of(self.queries, x, other)

    def of_keys(self, x: Array) -> Array:
        """[batch, keys, ...] of the keys of it; 0 for those that were not seen."""
        return where_of(self.keys, x, 0)


def where_of(chosen: Array, x: Array, other: float) -> Array:
    """Of x [batch, ...] what is `chosen`, bool of the first dims, and `other` elsewhere."""
    spread = jnp.expand_dims(chosen, tuple(range(chosen.ndim, x.ndim)))
    return jnp.where(spread, x, jnp.asarray(other, x.dtype))
