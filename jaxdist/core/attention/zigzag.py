"""One step of a zig-zag ring by cuDNN's kernel: a group's queries and the keys that are at hand.

Group i of n holds parts i and 2n−1−i of a row: an early and a late half, in the row's order. Under
a causal mask it is then known what each step multiplies, without a mask of its own:

    own keys                      queries and keys as they are, causal
    keys of an earlier group      all queries see the early half, and none the late half
    keys of a later group         the late queries see all of them, and the early queries none

So of packed rows, too, all queries of a step stand behind all its keys (`parts.across`): the early
and the late half follow one another in the row, and a document that reaches past one of them covers
what lies between.

A call's results are of the query's dtype. What it leaves out is zero, with the log-sum-exp of a
query that saw no key; parts are joined, and gradients summed, in float32.

Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.
Deviation: backward gives the kernel the output and the log-sum-exp over all keys, so that each step
leaves these keys' part of the gradients.

Shapes: query [batch, length, heads, head_dim]; key and value [batch, length, kv_heads, head_dim];
documents int32 [batch, length] or None, under a causal mask only.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core.attention.blockwise import UNSEEN, Partial, Rule
from jaxdist.core.attention.parts import (
    Grads,
    Keys,
    OverAll,
    Queries,
    across,
    across_backward,
    within,
    within_backward,
)
from jaxdist.core.types import Array

Tree = TypeVar("Tree")


def forward(queries: Queries, keys: Keys, is_causal: bool, is_earlier: Array | None) -> Partial:
    """Attention [batch, length, ...] of these queries to these keys alone, float32.

    `is_earlier`, bool [], says whether the keys are an earlier group's; None = the group's own. Not
    differentiable.
    """

    def to_early_keys() -> tuple[Array, Array]:
        return across(queries, early(keys))

    def of_late_queries() -> tuple[Array, Array]:
        out, lse = across(late(queries), keys)
        return after_early(out), after_early(lse, UNSEEN)

    if is_earlier is None:
        out, lse = within(queries, keys, Rule(is_causal))
    elif is_causal:
        out, lse = lax.cond(is_earlier, to_early_keys, of_late_queries)
    else:
        out, lse = across(queries, keys)
    return Partial(out.astype(lse.dtype), lse)


def backward(
    queries: Queries,
    keys: Keys,
    found: OverAll,
    is_causal: bool,
    is_earlier: Array | None,
    half: int,
) -> Grads:
    """Half of the work that gives these keys' part of the gradients of query, key and value.

    In their dtypes, and of the positions that the call was about: `spread` puts them in place, and
    then the sum of the first and the second half, 0 and 1, is the part. Both take one call of the
    same size, so that there is one for keys to travel beside, and one for gradients. `found` is
    over all keys, [batch, length, ...]; `is_earlier` as in `forward`.
    """
    if not is_causal:
        return across_backward(queries, HALVES[half][0](keys), found)
    if half == 0:  # late queries see the early keys of any group
        return across_backward(late(queries), early(keys), late(found))
    if is_earlier is None:
        # Each half of a group's own as rows: [batch, length, ...] -> [2 · batch, length / 2, ...].
        rows = lambda x: x.reshape(2 * x.shape[0], -1, *x.shape[2:])
        queries, keys, found = jax.tree.map(rows, (queries, keys, found))
        return within_backward(queries, keys, found, Rule(is_causal))
    # Early queries see the early keys of an earlier group, late ones the late keys of a later one.
    start = jnp.where(is_earlier, 0, queries.query.shape[1] // 2)
    same = lambda x: lax.dynamic_slice_in_dim(x, start, x.shape[1] // 2, axis=1)
    return across_backward(*jax.tree.map(same, (queries, keys, found)))


def spread(grads: Grads, is_causal: bool, is_earlier: Array | None, half: int) -> Grads:
    """What `backward` found at the places that it is of: float32 [batch, length, ...] each."""
    dq, dk, dv = (x.astype(jnp.float32) for x in grads)
    if not is_causal:
        widen = HALVES[half][1]
        return dq, widen(dk), widen(dv)
    if half == 0:
        return after_early(dq), before_late(dk), before_late(dv)
    if is_earlier is None:
        rows = lambda x: x.reshape(-1, 2 * x.shape[1], *x.shape[2:])
        return rows(dq), rows(dk), rows(dv)
    place = lambda x: jnp.where(is_earlier, before_late(x), after_early(x))
    return place(dq), place(dk), place(dv)


# --- halves ---------------------------------------------------------------------------------------


def early(tree: Tree) -> Tree:
    """Leaves [batch, length, ...] -> the first half of their positions."""
    return jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)


def late(tree: Tree) -> Tree:
    """Leaves [batch, length, ...] -> the second half of their positions."""
    return jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)


def before_late(x: Array) -> Array:
    """[batch, length / 2, ...] -> [batch, length, ...] with zeros in the second half."""
    return jnp.pad(x, [(0, 0), (0, x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def after_early(x: Array, fill: float = 0.0) -> Array:
    """[batch, length / 2, ...] -> [batch, length, ...] with `fill` in the first half."""
    widths = [(0, 0), (x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill)


HALVES = ((early, before_late), (late, after_early))
"""How to cut each half of the positions out of [batch, length, ...], and how to put it back."""
