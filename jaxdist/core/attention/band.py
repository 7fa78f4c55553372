"""One hop of a line by cuDNN's kernel: a part's queries, and the keys of a part before it.

Parts are of P positions. Keys that made h hops stand h parts before the queries, so query a sees
key b where a − b is less than `window` − h · P:

    no hop                    causal, and cuDNN's own window where it ends inside the part
    P or more                 all queries see all keys
    between 1 and P           the first queries see all keys, the others all but a triangle
    1 or less                 a triangle: the first queries see the last keys

In a triangle query a sees the keys from the a-th on. With queries and keys in the opposite order
that is the causal mask. A document that reaches into the queries covers the last keys, which are
then the first: no more than these are told to the kernel.

Outputs and gradients of calls are of the query's dtype; what they leave out is zero, with the
log-sum-exp of a query that saw no key. Nothing here is differentiable by jax.

Shapes: query [batch, length, heads, head_dim]; key and value [batch, length, kv_heads, head_dim];
documents int32 [batch, length] or None.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core.attention import blockwise, cudnn
from jaxdist.core.attention.blockwise import UNSEEN, Partial, Rule
from jaxdist.core.attention.cudnn import Sequences
from jaxdist.core.attention.parts import (
    SEQUENCES,
    Grads,
    Keys,
    OverAll,
    Queries,
    Reaching,
    across,
    across_backward,
    where_of,
    within,
    within_backward,
)
from jaxdist.core.types import Array

Tree = TypeVar("Tree")


class Hop(NamedTuple):
    """How the keys at hand stand to the queries.

    Attributes:
        number: parts that they stand before the queries; traced where no window hides any of them.
        window: newest keys that a query sees, itself included; 0 = all.
        is_before: bool [batch], false where they came round from the row's end; None = nowhere,
            or their documents tell.
    """

    number: Any
    window: int = 0
    is_before: Array | None = None


def forward(queries: Queries, keys: Keys, hop: Hop) -> Partial:
    """Attention [batch, length, heads, head_dim] of these queries to these keys alone, float32."""
    length = queries.query.shape[1]
    found = []
    for block in _blocks(length, hop):
        out, lse = block.forward(_cut(queries, block.queries), _cut(keys, block.keys))
        spread = functools.partial(_spread, where=block.queries, length=length)
        found.append(Partial(spread(out.astype(lse.dtype)), spread(lse, fill=UNSEEN)))
    if not found:
        none = jnp.zeros_like(queries.query, jnp.float32)
        return Partial(none, jnp.full_like(none[..., 0], UNSEEN))
    out, lse = functools.reduce(blockwise.merge, found)
    if hop.is_before is None:
        return Partial(out, lse)
    return Partial(where_of(hop.is_before, out, 0), where_of(hop.is_before, lse, UNSEEN))


def backward(queries: Queries, keys: Keys, found: OverAll, hop: Hop) -> Grads:
    """These keys' part of the gradients of query, key and value, in their shapes, float32.

    `found` is over all keys, [batch, length, ...].
    """
    length, wide = queries.query.shape[1], found.lse.dtype
    inputs = (queries.query, keys.key, keys.value)
    parts = []
    for block in _blocks(length, hop):
        mine, over_all = _cut((queries, found), block.queries)
        part = block.backward(mine, _cut(keys, block.keys), over_all)
        places = (block.queries, block.keys, block.keys)
        pairs = zip(part, places, strict=True)
        parts.append(tuple(_spread(x.astype(wide), where, length) for x, where in pairs))
    nothing = [] if parts else [tuple(jnp.zeros_like(x, wide) for x in inputs)]
    grads = functools.reduce(functools.partial(jax.tree.map, jnp.add), parts + nothing)
    dq, dk, dv = (x if hop.is_before is None else where_of(hop.is_before, x, 0) for x in grads)
    return dq, dk, dv


# --- what a window leaves of a part ---------------------------------------------------------------


class _Block(NamedTuple):
    """Some queries and some keys, by their places in their parts, and what is between them."""

    queries: slice
    keys: slice
    forward: Any
    backward: Any


def _blocks(length: int, hop: Hop) -> list[_Block]:
    """What queries see of keys that made a hop, both of parts of `length`; disjoint."""
    whole = slice(0, length)
    if isinstance(hop.number, int) and hop.number == 0:
        rule = Rule(window=hop.window if hop.window < length else 0)
        return [
            _Block(
                whole,
                whole,
                functools.partial(within, rule=rule),
                functools.partial(within_backward, rule=rule),
            )
        ]
    everything = across, across_backward
    triangle = _triangle, _triangle_backward
    if not hop.window or not isinstance(hop.number, int):
        return [_Block(whole, whole, *everything)]
    shift = hop.window - hop.number * length
    if shift >= length:
        return [_Block(whole, whole, *everything)]
    if shift > 1:
        early, late = slice(0, shift - 1), slice(shift - 1, length)
        last = length - (shift - 1)
        return [
            _Block(early, whole, *everything),
            _Block(late, slice(last, length), *everything),
            _Block(late, slice(0, last), *triangle),
        ]
    size = length + shift - 1
    return [_Block(slice(0, size), slice(length - size, length), *triangle)] if size > 0 else []


def _cut(tree: Tree, where: slice) -> Tree:
    """Leaves [batch, length, ...] -> those positions of them."""
    return jax.tree.map(lambda x: x[:, where], tree)


def _spread(x: Array, where: slice, length: int, fill: float = 0.0) -> Array:
    """[batch, positions, ...] -> [batch, length, ...] with `fill` around them."""
    widths = [(0, 0), (where.start, length - where.stop), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill)


# --- triangles ------------------------------------------------------------------------------------

_CAUSAL = Rule()


def _triangle(queries: Queries, keys: Keys) -> tuple[Array, Array]:
    """Output [batch, positions, heads, head_dim] and log-sum-exp; query a sees keys a, a + 1, ...

    There are as many keys as queries.
    """
    inputs = _turned((queries.query, keys.key, keys.value))
    if queries.segments is None or keys.segments is None:
        out, stats = cudnn.forward(*inputs, _CAUSAL)
        return _turned((out, jnp.moveaxis(stats, 1, 2)))
    reaching = Reaching.of(queries.segments, keys.segments)

    def look() -> tuple[Array, Array]:
        out, stats = cudnn.forward(*inputs, _CAUSAL, sequences=_sequences(reaching))
        lse = jnp.moveaxis(stats[::SEQUENCES], 1, 2)
        out, lse = _turned((out, lse))
        return reaching.of_queries(out, 0), reaching.of_queries(lse, UNSEEN)

    def nothing() -> tuple[Array, Array]:
        none = jnp.zeros_like(queries.query)
        return none, jnp.full_like(none[..., 0], UNSEEN, jnp.float32)

    return lax.cond(reaching.any, look, nothing)


def _triangle_backward(queries: Queries, keys: Keys, found: OverAll) -> Grads:
    """Gradients [batch, positions, heads or kv_heads, head_dim] through what `_triangle` saw."""
    inputs = (queries.query, keys.key, keys.value)
    if queries.segments is None or keys.segments is None:
        return _turned(_pulled(*_turned((*inputs, found)), None))
    reaching = Reaching.of(queries.segments, keys.segments)
    # The kernel sees the other queries, too: with no cotangent, and no weight on any key.
    only = OverAll(
        reaching.of_queries(found.out, 0),
        reaching.of_queries(found.cotangent, 0),
        reaching.of_queries(found.lse, -UNSEEN),
    )

    def look() -> Grads:
        dq, dk, dv = _turned(_pulled(*_turned((*inputs, only)), _sequences(reaching)))
        return reaching.of_queries(dq, 0), reaching.of_keys(dk), reaching.of_keys(dv)

    def nothing() -> Grads:
        dq, dk, dv = (jnp.zeros_like(x) for x in inputs)
        return dq, dk, dv

    return lax.cond(reaching.any, look, nothing)


def _pulled(
    query: Array,
    key: Array,
    value: Array,
    found: OverAll,
    sequences: tuple[Sequences, Sequences] | None,
) -> Grads:
    """One call under the causal mask, [batch, positions, ...]: gradients of the three."""
    stats = jnp.moveaxis(found.lse, 2, 1)
    if sequences is not None:
        stats = jnp.repeat(stats, SEQUENCES, axis=0)
    over_all = found.out, stats, found.cotangent
    return cudnn.backward(query, key, value, *over_all, _CAUSAL, sequences=sequences)


def _turned(tree: Tree) -> Tree:
    """Leaves [batch, positions, ...] with their positions in the opposite order."""
    return jax.tree.map(lambda x: x[:, ::-1], tree)


def _sequences(reaching: Reaching) -> tuple[Sequences, Sequences]:
    """All queries of a row that a document reaches, and its keys, both in the opposite order.

    int32 [batch, 2] each.
    """
    num_keys = jnp.sum(reaching.keys, 1, dtype=jnp.int32)
    none = jnp.zeros_like(num_keys)
    end = jnp.full_like(none, reaching.queries.shape[1])
    num_queries = jnp.where(num_keys > 0, end, 0)
    pair = lambda first, second: jnp.stack([first, second], axis=1)
    starts = pair(none, end)
    return Sequences(starts, pair(num_queries, none)), Sequences(starts, pair(num_keys, none))
