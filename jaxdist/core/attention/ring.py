"""Attention to the keys of all other devices, which go round while those at hand are multiplied.

Partial results are joined by their log-sum-exp. Backward keeps this device's keys and values only;
they travel again, and their gradients come home in float32. Round the ring a device multiplies half
of a part while keys travel and half while gradients do; of its own the second half is kept for the
last gradients. The parts are multiplied block by block in plain JAX, or by cuDNN's kernel
(`zigzag.py`).

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
from jaxdist.core.attention.parts import Grads, Keys, OverAll, Queries
from jaxdist.core.parallel import context
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.types import Array


class Ring(NamedTuple):
    """The groups of the context axis as places on a ring.

    Attributes:
        inner: devices of a group.
        paired: see `ExchangePlan`.
        fused: whether parts are multiplied by cuDNN's kernel. Round the ring, positions are then
            those of `in_row_order`, and a query sees all its document's keys before it; where rows
            are one document, it may see all.
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
        parts = [context.position_ids_of(first + i, each, total) for i in range(self.inner)]
        return jnp.concatenate(parts)[None]

    def is_earlier(self, steps_back: Any) -> Array | None:
        """Whether the group that many places before this one is before it in the row, too.

        bool []; None for the number 0, which is this group itself.
        """
        if _is_number(steps_back, 0):
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


def _is_number(steps: Any, number: int) -> bool:
    """Whether it is that number, known while the program is made."""
    return isinstance(steps, int) and steps == number


class _Held(NamedTuple):
    """A part of the row's keys, on its way round the ring.

    Attributes:
        keys_values: [2, batch, length, kv_heads, head_dim], one array so that one permute does.
        segments: int32 [batch, length] or None.
    """

    keys_values: Array
    segments: Array | None


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
            mine, others = Queries(query, segments), Keys(key, value, held.segments)
            return zigzag.forward(mine, others, rule.causal, ring.is_earlier(step))
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
    mine, found = Queries(query, segments), OverAll(out, cotangent, lse)

    def look(held: _Held, step: Any, half: int | None) -> Grads:
        """Gradients [batch, positions, ...] of query and held keys and values, before `spread`.

        Those of the first or the second half of the work, 0 or 1; None for all of it.
        """
        key, value = held.keys_values
        if ring.fused:
            assert half is not None
            others, earlier = Keys(key, value, held.segments), ring.is_earlier(step)
            return zigzag.backward(mine, others, found, rule.causal, earlier, half)
        cut = _same if half is None else zigzag.HALVES[half][0]
        keys = cut(Span(ring.places(step, length), held.segments))
        return blockwise.backward(query, cut(key), cut(value), queries, keys, pull, rule)

    def spread(grads: Grads, step: Any, half: int | None) -> tuple[Array, Array]:
        """Those of the query [batch, length, ...], and of held keys [2, batch, length, ...]."""
        dq, dk, dv = grads
        if ring.fused:
            assert half is not None
            dq, dk, dv = zigzag.spread(grads, rule.causal, ring.is_earlier(step), half)
        elif half is not None:
            widen = zigzag.HALVES[half][1]
            dk, dv = widen(dk), widen(dv)
        return dq, jnp.stack([dk, dv])

    def turn(carry: tuple[Array, Array | None, _Held], step: Any) -> tuple[Any, None]:
        """Add to dq [batch, length, heads, head_dim] and grads [2, ...]; send both on, and keys."""
        dq, grads, held = carry
        arriving = None if _is_number(step, last) else ring.send(held)
        parts: list[tuple[Array, Array]] = []
        if ring.fused:  # until here keys travel beside the first half, and then gradients
            found_first = look(held, step, 0)
            together = (arriving, held, grads, found_first)
            arriving, held, grads, found_first = lax.optimization_barrier(together)
            parts.append(spread(found_first, step, 0))
        # The gradients of these keys come from the devices that the keys came from; the first of
        # them starts with its own.
        grads = ring.send(grads)
        half = 1 if ring.fused else None
        parts.append(spread(look(held, step, half), step, half))
        for part, more in parts:
            dq, grads = dq + part, more if grads is None else grads + more
        return (dq, grads, arriving), None

    own, last = _Held(jnp.stack([key, value]), segments), ring.size - 1
    # Barriers keep a product for every hop: the compiler would put several beside the longest.
    arriving = ring.send(own)
    arriving, first = lax.optimization_barrier((arriving, look(own, 0, 0)))
    carry: Any = (jnp.zeros_like(query, lse.dtype), None, arriving)
    if last > 1:
        carry, _ = turn(carry, 1)
        carry, _ = lax.scan(turn, carry, jnp.arange(2, last))
    (dq, grads, _), _ = turn(carry, last)
    own, grads = lax.optimization_barrier((own, grads))
    home = ring.send(grads)
    for half, part in enumerate((first, look(own, 0, 1))):
        more, kept = spread(part, 0, half)
        dq, home = dq + more, home + kept
    dk, dv = home
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None


def _same(tree: Any) -> Any:
    return tree


attend_ring.defvjp(_ring_forward, _ring_backward)
