"""Ring attention: keys and values are sent around a ring of devices; each hop attends to them.

Partial results are merged by their log-sum-exp. Only the local keys and values are saved for
backward, which sends them around again and returns their gradients in float32. Hops are block-wise
in plain JAX, or on cuDNN's kernel (`zigzag.py`): then half of a hop's backward overlaps with
sending keys, half with sending gradients. Arrays have the positions of a group of devices.

Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Shaped

from jaxdist.core import collectives
from jaxdist.core.attention import blockwise, zigzag
from jaxdist.core.attention.blockwise import (
    KV,
    BackwardStats,
    Partial,
    Q,
    Rule,
    Segments,
    Sink,
    Span,
)
from jaxdist.core.attention.zigzag import GlobalAttention, Keys, PartGrads, Queries
from jaxdist.core.parallel import context
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.types import Array


class Ring(NamedTuple):
    """A ring of groups of `inner` devices on the context axis; `paired` as in `ExchangePlan`.

    `fused`: hops run on cuDNN's kernel, with a causal mask and without a window, on positions
    ordered by `in_row_order`.
    """

    inner: int
    paired: bool
    fused: bool = False

    @property
    def size(self) -> int:
        """Number of groups on the ring."""
        return collectives.group_size(CONTEXT.name) // self.inner

    @property
    def group(self) -> Int[Array, ""]:
        """Index of this device's group."""
        return collectives.group_index(CONTEXT.name) // self.inner

    def send(self, tree: Any) -> Any:
        """Send every leaf one group along the ring; return the leaves that arrive here."""
        move = collectives.permute_in_pairs if self.paired else collectives.permute
        return jax.tree.map(lambda x: move(x, CONTEXT.name, self.inner), tree)

    def positions(self, steps_back: Any, length: int) -> Int[Array, "1 {length}"]:
        """Return the row positions of the keys that are here after `steps_back` hops."""
        first = (self.group - steps_back) % self.size * self.inner
        each, total = length // self.inner, collectives.group_size(CONTEXT.name)
        parts = [context.position_ids_of(first + i, each, total) for i in range(self.inner)]
        return jnp.concatenate(parts)[None]

    def is_earlier(self, steps_back: Any) -> Bool[Array, ""] | None:
        """Return whether keys here after `steps_back` hops are of an earlier group; None for 0."""
        if _is_number(steps_back, 0):
            return None
        return self.group >= steps_back

    def in_row_order(self, x: Shaped[Array, "batch length ..."]) -> Array:
        """Reorder positions from device order to row order: [batch, length, ...]."""
        if self.inner == 1:
            return x
        each = x.reshape(x.shape[0], self.inner, 2, -1, *x.shape[2:])
        # In the late half of a group, the positions of the first device are the last.
        return jnp.stack([each[:, :, 0], each[:, ::-1, 1]], axis=1).reshape(x.shape)

    def in_device_order(self, x: Shaped[Array, "batch length ..."]) -> Array:
        """Undo `in_row_order`: [batch, length, ...]."""
        if self.inner == 1:
            return x
        each = lambda half: half.reshape(half.shape[0], self.inner, -1, *half.shape[2:])
        early, late = jnp.split(x, 2, axis=1)
        return jnp.stack([each(early), each(late)[:, ::-1]], axis=2).reshape(x.shape)


def _is_number(steps: Any, number: int) -> bool:
    return isinstance(steps, int) and steps == number


class _Chunk(NamedTuple):
    """Keys and values on the ring, in one array so that one permute sends both."""

    keys_values: Float[Array, "2 batch keys kv_heads head_dim"]
    segments: Segments | None


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend_ring(
    query: Q,
    key: KV,
    value: KV,
    segments: Segments | None,
    sink: Sink | None,
    rule: Rule,
    ring: Ring,
) -> Q:
    """Return attention to the keys of all groups, which are sent around the ring."""
    return _ring_forward(query, key, value, segments, sink, rule, ring)[0]


def _ring(
    query: Q, key: KV, value: KV, segments: Segments | None, rule: Rule, ring: Ring
) -> Partial:
    length = query.shape[1]
    queries = Span(ring.positions(0, length), segments)

    def attend(chunk: _Chunk, hop: Any) -> Partial:
        key, value = chunk.keys_values
        if ring.fused:
            mine, others = Queries(query, segments), Keys(key, value, chunk.segments)
            return zigzag.forward(mine, others, ring.is_earlier(hop))
        keys = Span(ring.positions(hop, length), chunk.segments)
        return blockwise.forward(query, key, value, queries, keys, rule)

    def step(
        carry: tuple[Partial, _Chunk], hop: Int[Array, ""]
    ) -> tuple[tuple[Partial, _Chunk], None]:
        total, chunk = carry
        arriving = ring.send(chunk)  # independent of the lines below, so both overlap
        return (blockwise.merge(total, attend(chunk, hop)), arriving), None

    chunk = _Chunk(jnp.stack([key, value]), segments)
    first, last = ring.send(chunk), ring.size - 1
    (total, chunk), _ = lax.scan(step, (attend(chunk, 0), first), jnp.arange(1, last))
    return blockwise.merge(total, attend(chunk, last))


def _ring_forward(
    query: Q,
    key: KV,
    value: KV,
    segments: Segments | None,
    sink: Sink | None,
    rule: Rule,
    ring: Ring,
) -> tuple[Q, Any]:
    total = blockwise.with_sink(_ring(query, key, value, segments, rule, ring), sink)
    out, lse = blockwise.name_residuals(total, query.dtype)
    return out, (query, key, value, out, lse, segments, sink)


def _ring_backward(rule: Rule, ring: Ring, saved: Any, cotangent: Q) -> Any:
    query, key, value, out, lse, segments, sink = saved
    length, stats = query.shape[1], BackwardStats.of(out, lse, cotangent)
    queries = Span(ring.positions(0, length), segments)
    mine, total = Queries(query, segments), GlobalAttention(out, cotangent, lse)

    def pull_back(chunk: _Chunk, hop: Any, half: int | None) -> PartGrads:
        """Return half of the gradients of a hop, or all of them (None), for `scatter`."""
        key, value = chunk.keys_values
        if ring.fused:
            assert half is not None
            others, earlier = Keys(key, value, chunk.segments), ring.is_earlier(hop)
            return zigzag.backward(mine, others, total, earlier, half)
        cut = (lambda tree: tree) if half is None else zigzag.HALVES[half][0]
        keys = cut(Span(ring.positions(hop, length), chunk.segments))
        return blockwise.backward(query, cut(key), cut(value), queries, keys, stats, rule)

    def scatter(grads: PartGrads, hop: Any, half: int | None) -> tuple[Q, Array]:
        """Return the query's gradient, and the gradients of the chunk [2, batch, keys, ...]."""
        dq, dk, dv = grads
        if ring.fused:
            assert half is not None
            earlier = ring.is_earlier(hop)
            dq, dk, dv = zigzag.scatter_to_positions(grads, earlier, half)
        elif half is not None:
            widen = zigzag.HALVES[half][1]
            dk, dv = widen(dk), widen(dv)
        return dq, jnp.stack([dk, dv])

    def step(carry: tuple[Array, Array | None, _Chunk], hop: Any) -> tuple[Any, None]:
        """Return the carry after a hop: dq and grads [2, batch, keys, ...] increased, keys sent."""
        dq, grads, chunk = carry
        arriving = None if _is_number(hop, last) else ring.send(chunk)
        parts: list[tuple[Array, Array]] = []
        if ring.fused:  # the first half overlaps with sending keys, the second with gradients
            first_half = pull_back(chunk, hop, 0)
            together = (arriving, chunk, grads, first_half)
            arriving, chunk, grads, first_half = lax.optimization_barrier(together)
            parts.append(scatter(first_half, hop, 0))
        # Gradients of keys follow the keys around the ring; the first device of a chunk starts with
        # its own contribution.
        grads = ring.send(grads)
        half = 1 if ring.fused else None
        parts.append(scatter(pull_back(chunk, hop, half), hop, half))
        for part, more in parts:
            dq, grads = dq + part, more if grads is None else grads + more
        return (dq, grads, arriving), None

    own, last = _Chunk(jnp.stack([key, value]), segments), ring.size - 1
    # Barriers keep one product per hop; the compiler would combine several next to the longest.
    arriving = ring.send(own)
    arriving, first = lax.optimization_barrier((arriving, pull_back(own, 0, 0)))
    carry: Any = (jnp.zeros_like(query, lse.dtype), None, arriving)
    if last > 1:
        carry, _ = step(carry, 1)
        carry, _ = lax.scan(step, carry, jnp.arange(2, last))
    (dq, grads, _), _ = step(carry, last)
    own, grads = lax.optimization_barrier((own, grads))
    returned = ring.send(grads)
    for half, part in enumerate((first, pull_back(own, 0, 1))):
        more, kept = scatter(part, 0, half)
        dq, returned = dq + more, returned + kept
    dk, dv = returned
    of_sink = blockwise.sink_gradient(sink, stats.lse, stats.delta)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None, of_sink


attend_ring.defvjp(_ring_forward, _ring_backward)
