"""Attention to the keys of other devices, which travel while those at hand are multiplied.

`attend_ring`: round the ring, past every device; for rows of which a query may see all before it.
`attend_line`: along the row, as far as a sliding window or the longest document reaches.

Partial results are joined by their log-sum-exp. Backward keeps this device's keys and values only;
they travel again, and their gradients come home in float32. The parts are multiplied block by block
in plain JAX, and round the ring by cuDNN's kernel where rows are one document.

Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.

Shapes: query [batch, length, heads, head_dim]; key and value [batch, length, kv_heads, head_dim];
segments int32 [batch, length] or None; `length` positions of a group's devices, in their order.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.attention import blockwise, zigzag
from jaxdist.core.attention.blockwise import Partial, Pull, Rule, Span
from jaxdist.core.parallel import context
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.types import Array


class Ring(NamedTuple):
    """The groups of the context axis as places on a ring.

    Attributes:
        inner: devices of a group.
        paired: see `ExchangePlan`.
        fused: whether parts are multiplied by cuDNN's kernel. Positions are then those of
            `in_row_order`, rows are one document, and a query sees all keys before it, or all.
    """

    inner: int
    paired: bool
    fused: bool = False

    @property
    def size(self) -> int:
        """Groups."""
        return collectives.group_size(CONTEXT.name) // self.inner

    @property
    def group(self) -> Array:
        """Index of this device's group, int32 []."""
        return collectives.group_index(CONTEXT.name) // self.inner

    def send(self, tree: Any, groups: int = 1) -> Any:
        """Every leaf [...] to the same device of the next group; of the one before with -1."""
        move = collectives.permute_in_pairs if self.paired else collectives.permute
        return jax.tree.map(lambda x: move(x, CONTEXT.name, groups * self.inner), tree)

    def places(self, steps_back: Any, length: int) -> Array:
        """Places [1, length] of the group that many places before this one, as it joins them."""
        first = (self.group - steps_back) % self.size * self.inner
        each, total = length // self.inner, collectives.group_size(CONTEXT.name)
        parts = [context.places_of(first + i, each, total) for i in range(self.inner)]
        return jnp.concatenate(parts)[None]

    def is_earlier(self, steps_back: Any) -> Array | None:
        """Whether the group that many places before this one is before it in the row, too.

        bool []; None for the number 0, which is this group itself.
        """
        if isinstance(steps_back, int) and not steps_back:
            return None
        return self.group >= steps_back

    def halves(self, x: Array) -> tuple[Array, Array]:
        """[batch, length, ...] -> early and late positions [batch, length / 2, ...], in order."""
        each = x.reshape(x.shape[0], self.inner, 2, -1, *x.shape[2:])
        whole = lambda half: half.reshape(x.shape[0], -1, *x.shape[2:])
        # In a group's late half, the first device's positions are the last.
        return whole(each[:, :, 0]), whole(each[:, ::-1, 1])

    def join(self, early: Array, late: Array) -> Array:
        """The way back of `halves`: [batch, length / 2, ...] each -> [batch, length, ...]."""
        each = lambda half: half.reshape(half.shape[0], self.inner, -1, *half.shape[2:])
        parts = jnp.stack([each(early), each(late)[:, ::-1]], axis=2)
        return parts.reshape(early.shape[0], -1, *early.shape[2:])

    def in_row_order(self, x: Array) -> Array:
        """[batch, length, ...] as the group's devices hold it -> in the order of the row."""
        return x if self.inner == 1 else jnp.concatenate(self.halves(x), axis=1)

    def in_device_order(self, x: Array) -> Array:
        """The way back of `in_row_order`, [batch, length, ...]."""
        return x if self.inner == 1 else self.join(*jnp.split(x, 2, axis=1))


class _Held(NamedTuple):
    """A part of the row's keys, on its way round the ring.

    Attributes:
        keys_values: [2, batch, length, kv_heads, head_dim], one array so that one permute does.
        segments: int32 [batch, length] or None.
    """

    keys_values: Array
    segments: Array | None


def attend_over_groups(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    rule: Rule,
    ring: Ring,
    reach: int,
) -> Array:
    """Attention [batch, length, heads, head_dim] to the keys of all groups, in the query's dtype.

    A query sees none but the `reach` newest keys, 0 = all. By the line where a window or short
    documents make that the shorter way, else by the ring.
    """
    hops = 0
    if rule.causal:
        hops = context.hops_of_window(reach, query.shape[1] * ring.size, ring.size)
    if ring.fused:
        shared = (ring.in_row_order(x) for x in (query, key, value))
        return ring.in_device_order(attend_ring(*shared, None, rule, ring))
    if not hops:
        return attend_ring(query, key, value, segments, rule, ring)
    line = _Line(ring, hops)
    inputs = jax.tree.map(line.cut, (query, key, value, segments))
    return line.join(attend_line(*inputs, rule, line))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend_ring(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule, ring: Ring
) -> Array:
    """Attention [batch, length, heads, head_dim] to all parts, each sent past every group."""
    return _ring(query, key, value, segments, rule, ring).out.astype(query.dtype)


def _ring(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule, ring: Ring
) -> Partial:
    """Attention of query [batch, length, heads, head_dim] to all keys, which go round the ring."""
    length = query.shape[1]
    queries = Span(ring.places(0, length), segments)

    def look(held: _Held, step: Any) -> Partial:
        """Attention [batch, length, heads, head_dim] to the held keys."""
        key, value = held.keys_values
        if ring.fused:
            return zigzag.forward(query, key, value, rule.causal, ring.is_earlier(step))
        keys = Span(ring.places(step, length), held.segments)
        return blockwise.forward(query, key, value, queries, keys, rule)

    def turn(carry: tuple[Partial, _Held], step: Array) -> tuple[tuple[Partial, _Held], None]:
        """Send the keys on and add what is at hand, [batch, length, heads, head_dim]."""
        found, held = carry
        arriving = ring.send(held)  # needs nothing of what follows, so both run at once
        return (blockwise.merge(found, look(held, step)), arriving), None

    held = _Held(jnp.stack([key, value]), segments)
    first, last = ring.send(held), ring.size - 1
    (found, held), _ = lax.scan(turn, (look(held, 0), first), jnp.arange(1, last))
    return blockwise.merge(found, look(held, last))


def _ring_forward(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule, ring: Ring
) -> tuple[Array, Any]:
    """`attend_ring` [batch, length, heads, head_dim], and what its backward reads."""
    found = _ring(query, key, value, segments, rule, ring)
    out, lse = blockwise.keep(found, query.dtype)
    return out, (query, key, value, out, lse, segments)


def _ring_backward(rule: Rule, ring: Ring, saved: Any, cotangent: Array) -> Any:
    """Gradients of query, key and value in their shapes and dtypes; segments have none.

    `cotangent` [batch, length, heads, head_dim] is that of the output.
    """
    query, key, value, out, lse, segments = saved
    length, pull = query.shape[1], Pull.of(out, lse, cotangent)
    queries = Span(ring.places(0, length), segments)

    def look(held: _Held, step: Any) -> tuple[Array, Array]:
        """Gradients: of the query, and [2, batch, length, kv_heads, head_dim] of held keys."""
        key, value = held.keys_values
        if ring.fused:
            over_all, earlier = (out, cotangent, lse), ring.is_earlier(step)
            dq, *grads = zigzag.backward(query, key, value, over_all, rule.causal, earlier)
        else:
            keys = Span(ring.places(step, length), held.segments)
            dq, *grads = blockwise.backward(query, key, value, queries, keys, pull, rule)
        return dq, jnp.stack(grads)

    def turn(carry: tuple[Array, Array, _Held], step: Any) -> tuple[Any, None]:
        """Add to dq [batch, length, heads, head_dim]; send on keys and gradients [2, ...]."""
        dq, grads, held = carry
        # The gradients of these keys come from the devices that the keys came from.
        arriving, grads = ring.send(held), ring.send(grads)
        part, more = look(held, step)
        return (dq + part, grads + more, arriving), None

    held = _Held(jnp.stack([key, value]), segments)
    last = ring.size - 1
    first = ring.send(held)
    dq, grads = look(held, 0)
    (dq, grads, held), _ = lax.scan(turn, (dq, grads, first), jnp.arange(1, last))
    grads = ring.send(grads)
    part, more = look(held, last)
    dk, dv = ring.send(grads + more)  # home
    return (dq + part).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None


attend_ring.defvjp(_ring_forward, _ring_backward)


# --- the line: no further than a window reaches ---------------------------------------------------


class _Line(NamedTuple):
    """The row cut into 2n equal parts in their own order, of which each of n groups holds two.

    Group i holds parts i and 2n−1−i. A part's queries look at the keys of that part and of the few
    before it, which come from the neighbours on both sides: early parts from the group before,
    late parts from the group behind.

    Attributes:
        ring: the groups.
        hops: parts that a window reaches back.
    """

    ring: Ring
    hops: int

    def cut(self, x: Array) -> Array:
        """[batch, length, ...] -> [2 · batch, length / 2, ...]: the early part, then the late."""
        return jnp.concatenate(self.ring.halves(x))

    def join(self, x: Array) -> Array:
        """The way back of `cut`: [2 · batch, length / 2, ...] -> [batch, length, ...]."""
        return self.ring.join(*jnp.split(x, 2))

    def places(self, hops: Any, shape: tuple[int, ...]) -> Array:
        """Places of the keys that are here after some hops: [2 · batch, length / 2] of `shape`.

        Those of the row's end come round to its start, where the causal mask hides them.
        """
        rows, length = shape[:2]
        parts = jnp.stack([self.ring.group, 2 * self.ring.size - 1 - self.ring.group])
        first = (parts - hops) % (2 * self.ring.size) * length
        return jnp.repeat(first, rows // 2)[:, None] + jnp.arange(length, dtype=jnp.int32)

    def send(self, tree: Any) -> Any:
        """Every leaf [2 · batch, ...] to the holders of the next parts."""
        return jax.tree.map(lambda x: self._move(x, 1), tree)

    def send_home(self, x: Array) -> Array:
        """[2 · batch, ...] of the parts that arrived after all hops, to their own holders."""
        for _ in range(self.hops):
            x = self._move(x, -1)
        return x

    def _move(self, x: Array, by: int) -> Array:
        """Parts [2 · batch, ...] to the holders of the next ones, or with −1 of those before."""
        early, late = x.reshape(2, -1, *x.shape[1:])
        to_early, to_late = self.ring.send(early, by), self.ring.send(late, -by)
        # The line turns round at the last group, and is closed at the first.
        first, last = self.ring.group == 0, self.ring.group == self.ring.size - 1
        at_early, at_late = (first, last) if by > 0 else (last, first)
        parts = jnp.where(at_early, late, to_early), jnp.where(at_late, early, to_late)
        return jnp.stack(parts).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend_line(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule, line: _Line
) -> Array:
    """Attention [2 · batch, length / 2, ...] of the parts that `_Line.cut` makes of every input."""
    return _line(query, key, value, segments, rule, line).out.astype(query.dtype)


def _line(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule, line: _Line
) -> Partial:
    """Attention of query [2 · batch, length / 2, heads, head_dim] to the parts within reach."""
    queries = Span(line.places(0, query.shape), segments)

    def look(held: _Parts, hops: Any) -> Partial:
        keys = Span(line.places(hops, query.shape), held.segments)
        return blockwise.forward(query, held.key, held.value, queries, keys, rule)

    def turn(carry: tuple[Partial, _Parts], hops: Array) -> tuple[tuple[Partial, _Parts], None]:
        found, held = carry
        arriving = line.send(held)
        return (blockwise.merge(found, look(held, hops)), arriving), None

    held = _Parts(key, value, segments)
    first = line.send(held)
    (found, held), _ = lax.scan(turn, (look(held, 0), first), jnp.arange(1, line.hops))
    return blockwise.merge(found, look(held, line.hops))


class _Parts(NamedTuple):
    """Keys and values [2 · batch, length / 2, ...] on their way, with their documents."""

    key: Array
    value: Array
    segments: Array | None


def _line_forward(
    query: Array, key: Array, value: Array, segments: Array | None, rule: Rule, line: _Line
) -> tuple[Array, Any]:
    """`attend_line` [2 · batch, length / 2, heads, head_dim], and what its backward reads."""
    found = _line(query, key, value, segments, rule, line)
    out, lse = blockwise.keep(found, query.dtype)
    return out, (query, key, value, out, lse, segments)


def _line_backward(rule: Rule, line: _Line, saved: Any, cotangent: Array) -> Any:
    """Gradients of query, key and value in their shapes and dtypes; segments have none.

    `cotangent` [2 · batch, length / 2, heads, head_dim] is that of the output.
    """
    query, key, value, out, lse, segments = saved
    pull = Pull.of(out, lse, cotangent)
    queries = Span(line.places(0, query.shape), segments)

    def look(held: _Parts, hops: Any) -> tuple[Array, Array]:
        keys = Span(line.places(hops, query.shape), held.segments)
        dq, *grads = blockwise.backward(query, held.key, held.value, queries, keys, pull, rule)
        return dq, jnp.stack(grads, axis=1)

    def turn(carry: tuple[Array, Array, _Parts], hops: Any) -> tuple[Any, None]:
        """Add to dq [2 · batch, length / 2, heads, head_dim]; send on the rest."""
        dq, grads, held = carry
        arriving = line.send(held)
        part, more = look(held, hops)
        # They go on with the keys that they belong to.
        return (dq + part, line.send(grads + more), arriving), None

    held = _Parts(key, value, segments)
    first = line.send(held)
    dq, own = look(held, 0)
    carry = (dq, jnp.zeros_like(own), first)
    (dq, grads, held), _ = lax.scan(turn, carry, jnp.arange(1, line.hops))
    part, more = look(held, line.hops)
    dk, dv = jnp.moveaxis(own + line.send_home(grads + more), 1, 0)
    return (dq + part).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None


attend_line.defvjp(_line_forward, _line_backward)
