"""One step of a zig-zag ring by cuDNN's kernel: a group's queries and the keys that are at hand.

Group i of n holds parts i and 2n−1−i of a row: an early and a late half, in the row's order. Under
a causal mask it is then known what each step multiplies, by one call without a mask of its own:

    own keys                      queries and keys as they are, causal
    keys of an earlier group      all queries see the early half, and none the late half
    keys of a later group         the late queries see all of them, and the early queries none

A call's results are of the query's dtype. What it leaves out is zero, with the log-sum-exp of a
query that saw no key; parts are joined, and gradients summed, in float32.

Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.
Deviation: backward gives the kernel the output and the log-sum-exp over all keys, so that each step
leaves these keys' part of the gradients.

Shapes: query [batch, length, heads, head_dim]; key and value [batch, length, kv_heads, head_dim].
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdist.core.attention import cudnn
from jaxdist.core.attention.blockwise import UNSEEN, Partial, Rule
from jaxdist.core.types import Array


def forward(
    query: Array, key: Array, value: Array, is_causal: bool, is_earlier: Array | None
) -> Partial:
    """Attention of these queries to these keys alone, float32; not differentiable.

    `is_earlier`, bool [], says whether the keys are an earlier group's; None = the group's own.
    """

    def call(query: Array, key: Array, value: Array, rule: Rule) -> tuple[Array, Array]:
        out, stats = cudnn.forward(query, key, value, rule)
        return out, jnp.moveaxis(stats, 1, 2)

    def to_early_keys() -> tuple[Array, Array]:
        return call(query, _early(key), _early(value), _ALL)

    def of_late_queries() -> tuple[Array, Array]:
        out, lse = call(_late(query), key, value, _ALL)
        return _after_early(out), _after_early(lse, UNSEEN)

    if is_causal and is_earlier is not None:
        out, lse = lax.cond(is_earlier, to_early_keys, of_late_queries)
    else:
        out, lse = call(query, key, value, Rule(causal=is_causal))
    return Partial(out.astype(lse.dtype), lse)


def backward(
    query: Array,
    key: Array,
    value: Array,
    found: tuple[Array, Array, Array],
    is_causal: bool,
    is_earlier: Array | None,
) -> tuple[Array, Array, Array]:
    """These keys' part of the gradients of query, key and value: float32, shapes as those.

    `found` is the output over all keys and its cotangent, [batch, length, heads, head_dim] each,
    then the log-sum-exp over all keys, float32 [batch, length, heads]; `is_earlier` as in
    `forward`.
    """

    def call(query: Array, key: Array, value: Array, found: Any, rule: Rule) -> Any:
        out, cotangent, lse = found
        stats = jnp.moveaxis(lse, 2, 1)
        return cudnn.backward(query, key, value, out, stats, cotangent, rule)

    def to_early_keys() -> tuple[Array, Array, Array]:
        dq, dk, dv = call(query, _early(key), _early(value), found, _ALL)
        return dq, _before_late(dk), _before_late(dv)

    def of_late_queries() -> tuple[Array, Array, Array]:
        late = tuple(_late(x) for x in found)
        dq, dk, dv = call(_late(query), key, value, late, _ALL)
        return _after_early(dq), dk, dv

    if is_causal and is_earlier is not None:
        grads = lax.cond(is_earlier, to_early_keys, of_late_queries)
    else:
        grads = call(query, key, value, found, Rule(causal=is_causal))
    dq, dk, dv = (x.astype(jnp.float32) for x in grads)
    return dq, dk, dv


_ALL = Rule(causal=False)


def _early(x: Array) -> Array:
    """[batch, length, ...] -> the first half of its positions."""
    return x[:, : x.shape[1] // 2]


def _late(x: Array) -> Array:
    """[batch, length, ...] -> the second half of its positions."""
    return x[:, x.shape[1] // 2 :]


def _before_late(x: Array) -> Array:
    """[batch, length / 2, ...] -> [batch, length, ...] with zeros in the second half."""
    return jnp.pad(x, [(0, 0), (0, x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _after_early(x: Array, fill: float = 0.0) -> Array:
    """[batch, length / 2, ...] -> [batch, length, ...] with `fill` in the first half."""
    widths = [(0, 0), (x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill)
