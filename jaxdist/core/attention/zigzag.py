"""One hop of a zig-zag ring on cuDNN's kernel: a group's queries attend to one group's keys.

Group i of n has chunks i and 2n−1−i of a row: an early and a late half. The mask is causal. Only
the first of three kinds of hops needs it:

    own keys                      one causal call
    keys of an earlier group      all queries see the early half of the keys, none the late half
    keys of a later group         late queries see all of the keys, early queries none

Two different chunks of packed rows share at most one document, because documents are contiguous:
keys at the end of the earlier chunk, queries at the start of the later one. It needs no mask.

Queries that see no key get zeros and the log-sum-exp `UNSEEN`. Nothing here is differentiable.

Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Shaped

from jaxdist.core.attention import cudnn
from jaxdist.core.attention.blockwise import KV, UNSEEN, Lse, Partial, Q, Rule, Segments
from jaxdist.core.attention.cudnn import Sequences
from jaxdist.core.types import Array

Tree = TypeVar("Tree")
Grads: TypeAlias = tuple[Q, KV, KV]
"""Contribution of these keys to the gradients of query, key and value."""
PartGrads: TypeAlias = tuple[
    Float[Array, "rows part_queries heads head_dim"],
    Float[Array, "rows part_keys kv_heads head_dim"],
    Float[Array, "rows part_keys kv_heads head_dim"],
]
"""The gradients at the positions of one call."""


class Queries(NamedTuple):
    """Queries and their document ids; None = rows are not packed."""

    query: Q
    segments: Segments | None


class Keys(NamedTuple):
    """Keys, values and their document ids; None = rows are not packed."""

    key: KV
    value: KV
    segments: Segments | None


class GlobalAttention(NamedTuple):
    """Attention over all keys of the row: its output, the output's cotangent, its log-sum-exp."""

    out: Q
    cotangent: Q
    lse: Lse


def forward(queries: Queries, keys: Keys, is_earlier: Bool[Array, ""] | None) -> Partial:
    """Return causal attention to only these keys, converted to float32.

    `is_earlier`: the keys are of an earlier group than the queries; None = of the same group.
    """

    def to_early_keys() -> tuple[Array, Array]:
        return across(queries, early(keys))

    def from_late_queries() -> tuple[Array, Array]:
        out, lse = across(late(queries), keys)
        return after_early(out), after_early(lse, UNSEEN)

    if is_earlier is None:
        out, lse = within(queries, keys, Rule())
    else:
        out, lse = lax.cond(is_earlier, to_early_keys, from_late_queries)
    return Partial(out.astype(lse.dtype), lse)


def backward(
    queries: Queries,
    keys: Keys,
    total: GlobalAttention,
    is_earlier: Bool[Array, ""] | None,
    half: int,
) -> PartGrads:
    """Compute half of the gradients through these keys; see `scatter_to_positions`."""
    if half == 0:  # late queries see the early keys of any group
        return across_backward(late(queries), early(keys), late(total))
    if is_earlier is None:
        # Both halves of the group as rows: [batch, length, ...] -> [2 · batch, length / 2, ...].
        rows = lambda x: x.reshape(2 * x.shape[0], -1, *x.shape[2:])
        queries, keys, total = jax.tree.map(rows, (queries, keys, total))
        return within_backward(queries, keys, total, Rule())
    # Early queries see the early keys of an earlier group, late ones the late keys of a later one.
    start = jnp.where(is_earlier, 0, queries.query.shape[1] // 2)
    same = lambda x: lax.dynamic_slice_in_dim(x, start, x.shape[1] // 2, axis=1)
    return across_backward(*jax.tree.map(same, (queries, keys, total)))


def scatter_to_positions(grads: PartGrads, is_earlier: Bool[Array, ""] | None, half: int) -> Grads:
    """Expand a result of `backward` to all positions, float32."""
    dq, dk, dv = (x.astype(jnp.float32) for x in grads)
    if half == 0:
        return after_early(dq), before_late(dk), before_late(dv)
    if is_earlier is None:
        rows = lambda x: x.reshape(-1, 2 * x.shape[1], *x.shape[2:])
        return rows(dq), rows(dk), rows(dv)
    scatter = lambda x: jnp.where(is_earlier, before_late(x), after_early(x))
    return scatter(dq), scatter(dk), scatter(dv)


def within(queries: Queries, keys: Keys, rule: Rule) -> tuple[Q, Lse]:
    """Return output and log-sum-exp of attention to the keys of the same chunks as the queries."""
    if keys.segments is not None:
        return cudnn.forward_packed(queries.query, keys.key, keys.value, keys.segments, rule)
    out, stats = cudnn.forward(queries.query, keys.key, keys.value, rule)
    return out, jnp.moveaxis(stats, 1, 2)


def within_backward(queries: Queries, keys: Keys, total: GlobalAttention, rule: Rule) -> Grads:
    """Return the gradients of `within`; `total` is over all keys of the row."""
    inputs = (queries.query, keys.key, keys.value)
    if keys.segments is not None:
        stats = total.out, total.lse, total.cotangent
        return cudnn.backward_packed(*inputs, *stats, segments=keys.segments, rule=rule)
    lse = jnp.moveaxis(total.lse, 2, 1)
    return cudnn.backward(*inputs, total.out, lse, total.cotangent, rule)


def across(queries: Queries, keys: Keys) -> tuple[Q, Lse]:
    """Return output and log-sum-exp of attention without causal mask, e.g. to earlier chunks."""
    inputs = (queries.query, keys.key, keys.value)
    if queries.segments is None or keys.segments is None:
        out, stats = cudnn.forward(*inputs, _ALL)
        return out, jnp.moveaxis(stats, 1, 2)
    shared = SharedDocument.of(queries.segments, keys.segments)

    def attend() -> tuple[Array, Array]:
        out, stats = cudnn.forward(*inputs, _ALL, sequences=shared.sequences)
        lse = jnp.moveaxis(stats[::SEQUENCES], 1, 2)
        return _select(shared.queries, out, 0.0), _select(shared.queries, lse, UNSEEN)

    def skip() -> tuple[Array, Array]:
        zeros = jnp.zeros_like(queries.query)
        return zeros, jnp.full_like(zeros[..., 0], UNSEEN, jnp.float32)

    return lax.cond(jnp.any(shared.queries), attend, skip)


def across_backward(queries: Queries, keys: Keys, total: GlobalAttention) -> Grads:
    """Return the gradients of `across`; `total` is over all keys of the row."""
    inputs, stats = (queries.query, keys.key, keys.value), jnp.moveaxis(total.lse, 2, 1)
    if queries.segments is None or keys.segments is None:
        return cudnn.backward(*inputs, total.out, stats, total.cotangent, _ALL)
    shared = SharedDocument.of(queries.segments, keys.segments)

    def pull_back() -> Grads:
        of_each = total.out, jnp.repeat(stats, SEQUENCES, axis=0), total.cotangent
        dq, *grads = cudnn.backward(*inputs, *of_each, _ALL, sequences=shared.sequences)
        dk, dv = (_select(shared.keys, g, 0.0) for g in grads)
        return _select(shared.queries, dq, 0.0), dk, dv

    def skip() -> Grads:
        dq, dk, dv = (jnp.zeros_like(x) for x in inputs)
        return dq, dk, dv

    return lax.cond(jnp.any(shared.queries), pull_back, skip)


_ALL = Rule(causal=False)

SEQUENCES = 2
"""Sequences per row: one and an empty one, because cuDNN treats a single one as complete rows."""


class SharedDocument(NamedTuple):
    """Each row's document, if any, that spans the end of the keys and the start of the queries.

    `queries` and `keys` are masks of its positions. The queries follow the keys in the row.
    """

    queries: Bool[Array, "batch queries"]
    keys: Bool[Array, "batch keys"]

    @classmethod
    def of(
        cls, queries: Int[Array, "batch queries"], keys: Int[Array, "batch keys"]
    ) -> SharedDocument:
        """Return the document that queries and keys share, from the ids of their positions."""
        last = keys[:, -1:]
        is_last = queries == last
        return cls(is_last, (keys == last) & jnp.any(is_last, axis=1, keepdims=True))

    @property
    def sequences(self) -> tuple[Sequences, Sequences]:
        """The sequences of the queries and of the keys, int32 [batch, 2] each."""
        mine, others = (jnp.sum(x, 1, dtype=jnp.int32) for x in self)
        none = jnp.zeros_like(mine)
        end, last = (jnp.full_like(none, x.shape[1]) for x in self)
        pair = lambda first, second: jnp.stack([first, second], axis=1)
        return (
            Sequences(pair(none, end), pair(mine, none)),
            Sequences(pair(last - others, last), pair(others, none)),
        )


def _select(
    mask: Bool[Array, "batch length"], x: Float[Array, "batch length ..."], other: float
) -> Float[Array, "batch length ..."]:
    mask = jnp.expand_dims(mask, tuple(range(mask.ndim, x.ndim)))
    return jnp.where(mask, x, jnp.asarray(other, x.dtype))


def early(tree: Tree) -> Tree:
    """Take the first half of the positions of leaves [batch, length, ...]."""
    return jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)


def late(tree: Tree) -> Tree:
    """Take the second half of the positions of leaves [batch, length, ...]."""
    return jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)


def before_late(x: Shaped[Array, "batch half ..."]) -> Shaped[Array, "batch 2*half ..."]:
    """Append zeros for the second half of the positions."""
    return jnp.pad(x, [(0, 0), (0, x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def after_early(
    x: Shaped[Array, "batch half ..."], fill: float = 0.0
) -> Shaped[Array, "batch 2*half ..."]:
    """Prepend `fill` for the first half of the positions."""
    widths = [(0, 0), (x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill)


HALVES = ((early, before_late), (late, after_early))
"""Functions that take each half of the positions of [batch, length, ...], and expand it."""
