"""Attention in tiles of queries, in plain JAX: for rows of up to some thousand keys on CPU.

Each tile multiplies the keys that one of its queries may see, and no others: those behind the tile
(causal mask) and those before the window never enter a product. Where a tile stands is known when
the program is traced, so that nothing loops or branches. Backward computes the probabilities again
from the log-sum-exp of their scores, which is faster on CPU than reading them back.

Rows of more keys go block by block (`blockwise.py`), whose program does not grow with the row.

Shapes: query [batch, length, heads, head_dim]; key and value [batch, length, kv_heads, head_dim].
Inside, queries are [batch, kv_heads, group, length, head_dim] with group = heads / kv_heads, and
keys and values [batch, kv_heads, length, head_dim], so that batch and heads are one batch of
products.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core.attention.blockwise import Rule, declare_alike, wide_dtype
from jaxdist.core.softcap import slope_at, soft_cap
from jaxdist.core.types import Array

TILE = 128
"""Queries of a tile. On CPU 64 are as fast and make twice the program; 256 skip too little."""


class _Tile(NamedTuple):
    """Queries that share their products, and the keys that one of them may see."""

    queries: slice
    keys: slice


def attend(query: Array, key: Array, value: Array, segments: Array | None, rule: Rule) -> Array:
    """softmax(query · key / √head_dim, masked) · value, with a backward pass of its own.

    `segments`, int32 [batch, length], are documents of packed rows. `rule.block` is not read.

    Returns:
        [batch, length, heads, head_dim] in the query's dtype; sums in float32 or wider. What
        backward reads is named "attention" for remat policies.
    """
    query, key, value = declare_alike(query, key, value)
    return _attend(query, key, value, segments, rule)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, segments: Array | None, rule: Rule) -> Array:
    """`attend` of inputs that vary alike: [batch, length, heads, head_dim]."""
    return _forward(query, key, value, segments, rule)[0]


def _forward(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule
) -> tuple[Array, Any]:
    """`_attend` [batch, length, heads, head_dim], and what its backward reads."""
    wide = wide_dtype(query)
    q, k, v = _by_head(query, key.shape[2]), _by_head(key), _by_head(value)
    product = partial(jnp.einsum, preferred_element_type=wide)
    outs, lses = [], []
    for tile in _tiles(query.shape[1], rule):
        scores = jnp.where(_allowed(tile, segments, rule), _scores(q, k, tile, rule), -jnp.inf)
        top = jnp.max(scores, -1, keepdims=True)
        probs = jnp.exp(scores - top)
        weight = jnp.sum(probs, -1, keepdims=True)
        mixed = product("bgrqk,bgkd->bgrqd", probs.astype(v.dtype), v[:, :, tile.keys])
        outs.append(mixed / weight)
        lses.append((top + jnp.log(weight))[..., 0])
    named = lambda x: checkpoint_name(x, "attention")
    out = named(_by_place(jnp.concatenate(outs, 3)).astype(query.dtype))
    return out, (query, key, value, segments, out, named(jnp.concatenate(lses, 3)))


def _backward(rule: Rule, saved: Any, cotangent: Array) -> Any:
    """Gradients of the inputs, from that of the output [batch, length, heads, head_dim].

    Scores are [batch, kv_heads, keys, group, queries] here, and the gradient of queries comes out
    with head_dim before them: then no product reads scores turned around, only heads.
    """
    query, key, value, segments, out, lse = saved
    kv_heads, length = key.shape[2], query.shape[1]
    by_head = lambda x: _by_head(x, kv_heads)
    wide = lse.dtype
    delta = jnp.sum(out.astype(wide) * cotangent.astype(wide), -1, keepdims=True)
    delta = by_head(delta)[..., 0]
    q, do = by_head(query), by_head(cotangent)
    k, v = _by_head(key), _by_head(value)
    product = partial(jnp.einsum, preferred_element_type=wide)
    tiles = _tiles(length, rule)
    dq, dk, dv = [], [], []
    for tile in tiles:
        mine = lambda x, tile=tile: x[:, :, :, tile.queries]
        seen = lambda x, tile=tile: x[:, :, tile.keys]
        scores = product("bgkd,bgrqd->bgkrq", seen(k), mine(q)) * _scale(query)
        scores = soft_cap(scores, rule.softcap)
        # Where, before any product: what is hidden may be infinite.
        allowed = jnp.moveaxis(_allowed(tile, segments, rule), -1, 2)
        probs = jnp.exp(jnp.where(allowed, scores - mine(lse)[:, :, None], -jnp.inf))
        dprobs = product("bgkd,bgrqd->bgkrq", seen(v), mine(do))
        dscores = probs * (dprobs - mine(delta)[:, :, None]) * slope_at(scores, rule.softcap)
        dscores = (dscores * _scale(query)).astype(query.dtype)
        dq.append(product("bgkd,bgkrq->bgdrq", seen(k), dscores))
        dk.append(product("bgkrq,bgrqd->bgkd", dscores, mine(q)))
        dv.append(product("bgkrq,bgrqd->bgkd", probs.astype(do.dtype), mine(do)))
    of_queries = jnp.concatenate([jnp.moveaxis(x, 2, 4) for x in dq], 3)
    of_keys, of_values = (_sum_over_tiles(parts, tiles, length) for parts in (dk, dv))
    pairs = zip((of_queries, of_keys, of_values), (query, key, value), strict=True)
    return *(_by_place(grad).astype(x.dtype) for grad, x in pairs), None


_attend.defvjp(_forward, _backward)


def _tiles(length: int, rule: Rule) -> list[_Tile]:
    """The tiles of a row, in order; their keys begin and end where tiles do."""
    tiles = []
    for start in range(0, length, TILE):
        stop = min(start + TILE, length)
        first = max(0, start + 1 - rule.window) // TILE * TILE if rule.window else 0
        tiles.append(_Tile(slice(start, stop), slice(first, stop if rule.causal else length)))
    return tiles


def _scale(query: Array) -> float:
    """What scores of a query [..., head_dim] are multiplied by."""
    return 1 / math.sqrt(query.shape[-1])


def _scores(q: Array, k: Array, tile: _Tile, rule: Rule) -> Array:
    """Scores of a tile, nothing masked: [batch, kv_heads, group, queries, keys]; wide dtype."""
    mine, seen = q[:, :, :, tile.queries], k[:, :, tile.keys]
    dims = "bgrqd,bgkd->bgrqk"
    scores = jnp.einsum(dims, mine, seen, preferred_element_type=wide_dtype(q)) * _scale(q)
    return soft_cap(scores, rule.softcap)


def _allowed(tile: _Tile, segments: Array | None, rule: Rule) -> Array:
    """Which keys of a tile which of its queries see: bool [batch or 1, 1, 1, queries, keys].

    Places are compared here, not by the program: XLA:CPU would compare them again for each score,
    without vector instructions, three times as long as the exponential takes.
    """
    place = lambda part: np.arange(part.start, part.stop)
    behind = place(tile.queries)[:, None] - place(tile.keys)
    found = behind >= 0 if rule.causal else np.ones_like(behind, bool)
    if rule.window:
        found &= behind < rule.window
    allowed = jnp.asarray(found[None])
    if segments is not None:
        allowed &= segments[:, tile.queries, None] == segments[:, None, tile.keys]
    return allowed[:, None, None]


def _sum_over_tiles(parts: list[Array], tiles: list[_Tile], length: int) -> Array:
    """Gradients of all keys from those of each tile's keys [batch, kv_heads, keys, head_dim]."""
    columns = []
    for start in range(0, length, TILE):
        column = slice(start, min(start + TILE, length))
        columns.append(
            functools.reduce(
                jnp.add,
                [
                    part[:, :, column.start - tile.keys.start : column.stop - tile.keys.start]
                    for part, tile in zip(parts, tiles, strict=True)
                    if tile.keys.start <= column.start < tile.keys.stop
                ],
            )
        )
    return jnp.concatenate(columns, 2)


def _by_head(x: Array, kv_heads: int = 0) -> Array:
    """[batch, length, heads, head_dim] -> [batch, kv_heads, group, length, head_dim].

    Without `kv_heads` the result has no group: [batch, heads, length, head_dim].
    """
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]) if kv_heads else x


def _by_place(x: Array) -> Array:
    """The way back of `_by_head`, with a group or without: [batch, length, heads, head_dim]."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, *x.shape[-2:]), 1, 2)
