"""Attention in tiles of queries, in plain JAX, for rows of up to 2,047 keys on CPUs.

Each tile multiplies the range of keys that its queries may see. There are no loops or branches, so
the program grows with the row. Backward recomputes probabilities, which is faster than reading.

Internal layout: queries are [batch, kv_heads, group, length, head_dim] with group = heads /
kv_heads; keys and values are [batch, kv_heads, length, head_dim].
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
from jaxtyping import Bool, Float

from jaxdist.core.attention.blockwise import (
    KV,
    Partial,
    Q,
    Rule,
    Segments,
    Sink,
    declare_alike,
    sink_gradient,
    wide_dtype,
    with_sink,
)
from jaxdist.core.softcap import slope_at, soft_cap
from jaxdist.core.types import Array

TILE = 128
"""Queries per tile. On CPUs 64 is as fast but doubles the program; 256 skips too few keys."""


class _Tile(NamedTuple):
    """Queries of one tile, and a range with all keys that they may see."""

    queries: slice
    keys: slice


def attend(
    query: Q, key: KV, value: KV, segments: Segments | None, rule: Rule, sink: Sink | None = None
) -> Q:
    """Compute what `blockwise.attend` does, without `rule.block`; a custom backward pass."""
    query, key, value, sink = declare_alike(query, key, value, sink)
    return _attend(query, key, value, sink, segments, rule)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: Q, key: KV, value: KV, sink: Sink | None, segments: Segments | None, rule: Rule
) -> Q:
    return _forward(query, key, value, sink, segments, rule)[0]


def _forward(
    query: Q, key: KV, value: KV, sink: Sink | None, segments: Segments | None, rule: Rule
) -> tuple[Q, Any]:
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
    out, lse = _by_position(jnp.concatenate(outs, 3)), jnp.concatenate(lses, 3)
    if sink is not None:
        total = with_sink(Partial(out, _by_position(lse[..., None])[..., 0]), sink)
        out, lse = total.out, _by_head(total.lse[..., None], key.shape[2])[..., 0]
    out = named(out.astype(query.dtype))
    return out, (query, key, value, sink, segments, out, named(lse))


def _backward(rule: Rule, saved: Any, cotangent: Q) -> Any:
    """Return gradients of query, key, value and sinks."""
    query, key, value, sink, segments, out, lse = saved
    kv_heads, length = key.shape[2], query.shape[1]
    by_head = lambda x: _by_head(x, kv_heads)
    wide = lse.dtype
    delta = jnp.sum(out.astype(wide) * cotangent.astype(wide), -1, keepdims=True)
    of_sink = sink_gradient(sink, _by_position(lse[..., None])[..., 0], delta[..., 0])
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
        # Mask before any product, because masked values may be infinite.
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
    return *(_by_position(grad).astype(x.dtype) for grad, x in pairs), of_sink, None


_attend.defvjp(_forward, _backward)


def _tiles(length: int, rule: Rule) -> list[_Tile]:
    tiles = []
    for start in range(0, length, TILE):
        stop = min(start + TILE, length)
        first = max(0, start + 1 - rule.window) // TILE * TILE if rule.window else 0
        tiles.append(_Tile(slice(start, stop), slice(first, stop if rule.causal else length)))
    return tiles


def _scale(query: Float[Array, "*dims head_dim"]) -> float:
    return 1 / math.sqrt(query.shape[-1])


def _scores(q: Array, k: Array, tile: _Tile, rule: Rule) -> Array:
    """Return unmasked scores of a tile, [batch, kv_heads, group, queries, keys]; wide dtype."""
    mine, seen = q[:, :, :, tile.queries], k[:, :, tile.keys]
    dims = "bgrqd,bgkd->bgrqk"
    scores = jnp.einsum(dims, mine, seen, preferred_element_type=wide_dtype(q)) * _scale(q)
    return soft_cap(scores, rule.softcap)


def _allowed(
    tile: _Tile, segments: Segments | None, rule: Rule
) -> Bool[Array, "batch_or_1 1 1 queries keys"]:
    """Return a tile's mask. Positions are compared at trace time; XLA:CPU would for each score."""
    position = lambda part: np.arange(part.start, part.stop)
    behind = position(tile.queries)[:, None] - position(tile.keys)
    visible = behind >= 0 if rule.causal else np.ones_like(behind, bool)
    if rule.window:
        visible &= behind < rule.window
    allowed = jnp.asarray(visible[None])
    if segments is not None:
        allowed &= segments[:, tile.queries, None] == segments[:, None, tile.keys]
    return allowed[:, None, None]


def _sum_over_tiles(parts: list[Array], tiles: list[_Tile], length: int) -> Array:
    """Sum the gradients of keys [batch, kv_heads, keys, head_dim] over tiles."""
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
    """Return x as [batch, kv_heads, group, length, head_dim]; without group if `kv_heads` is 0."""
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]) if kv_heads else x


def _by_position(x: Array) -> Array:
    """Undo `_by_head`, with a group or without: [batch, length, heads, head_dim]."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, *x.shape[-2:]), 1, 2)
