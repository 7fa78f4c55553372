"""Attention over rows whose positions are split over devices (the `context` axis).

    ring         keys and values are sent around the devices, overlapped with attention
    all_gather   every device all-gathers keys and values
    all_to_all   heads are exchanged for positions: each device attends to complete rows
    hybrid       all_to_all inside groups of neighbors, a ring over the groups

All except `all_gather` are an all-to-all inside groups of `inner` devices, and a ring over the
groups (`ring.py`): for `ring`, `inner` is 1; for `all_to_all`, there is one group. In this file,
`seq_shard` positions of a row are on a device.

Sources: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3; Grattafiori et al. 2024, "Llama 3",
section 3.3.2 (all-gather); Fang & Zhao 2024, "USP".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Int, Shaped

from jaxdist.core import collectives
from jaxdist.core.attention import blockwise
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
from jaxdist.core.attention.ring import Ring, attend_ring
from jaxdist.core.parallel import context
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.types import Array, AttentionDropout, AttentionMask
from jaxdist.settings import ConfigError
from jaxdist.settings.schema import join_choices

Exchange: TypeAlias = Literal["ring", "all_gather", "all_to_all", "hybrid"]


class ExchangePlan(NamedTuple):
    """The chosen exchange of keys and values between devices of the context axis, with the reason.

    Attributes:
        inner: number of neighbors that split heads during attention (all-to-all); 1 = none.
        paired: permutes are exchanges between pairs, for pipelines (`permute_in_pairs`).
    """

    exchange: Exchange
    inner: int
    paired: bool
    reason: str


def plan_exchange(
    setting: str,
    *,
    size: int,
    heads: int,
    kv_heads: int,
    per_node: int,
    has_stages: bool,
    packed: bool = False,
) -> ExchangePlan:
    """Choose the exchange between `size` devices of the context axis; `setting` may be "auto".

    `heads` and `kv_heads` are those of one device before the exchange. `per_node` neighbors along
    the axis share a node. `has_stages`: the layers run in a pipeline. Raises `ConfigError` if the
    exchange that `setting` names is impossible.
    """
    both = [n for n in range(1, size + 1) if size % n == 0 and heads % n == 0]
    fits = [n for n in both if kv_heads % n == 0 or n % kv_heads == 0]
    # Exchanges between pairs need a ring of even length.
    rings = [n for n in fits if not has_stages or size // n == 1 or size // n % 2 == 0]
    inside = max((n for n in rings if n <= per_node and n < size), default=0)
    exchange: str
    if setting == "auto":
        exchange, reason = _choose(size, heads, kv_heads, rings, inside, packed)
    else:
        exchange, reason = setting, "from the settings"
    inner = {"all_to_all": size, "hybrid": inside}.get(exchange, 1)
    possible = {
        "ring": 1 in rings,
        "all_gather": True,
        "all_to_all": size in rings,
        "hybrid": inside > 1,
    }
    if not possible[exchange]:
        others = " or ".join(repr(name) for name, is_legal in possible.items() if is_legal)
        smaller = f", or cp={join_choices(fits[1:])} for 'all_to_all'" if len(fits) > 1 else ""
        raise ConfigError(
            [
                f"mesh.context_attention={exchange!r} with cp={size}: {_NEEDS[exchange]}. A device "
                f"has {heads} query heads and {kv_heads} key/value heads. Use {others}{smaller}."
            ]
        )
    return ExchangePlan(exchange, inner, has_stages, reason)  # type: ignore[arg-type]


_NEEDS = {
    "ring": "with pp > 1 a ring needs an even number of devices, which exchange in pairs",
    "all_to_all": "it needs query heads that cp divides, and key/value heads that divide or are "
    "divided by cp",
    "hybrid": "it needs a group of neighbors on one node, more than one and fewer than cp, that "
    "divides the heads, and with pp > 1 an even number of groups",
}


def _choose(
    size: int, heads: int, kv_heads: int, rings: list[int], inside: int, packed: bool
) -> tuple[Exchange, str]:
    """Return the fastest exchange and the reason; `rings` are the legal values of `inner`."""
    # Even if it moves more than others: attention takes most of the time of long rows.
    if size in rings:
        return "all_to_all", "the heads divide, and whole rows take the kernel of a single device"
    if packed and inside > 1:
        # With documents, some single devices have half as much work again as others.
        return "hybrid", f"documents make work uneven, which {inside} neighbors share"
    if 2 * size * kv_heads <= heads:
        return "all_gather", "all keys and values are no larger than a device's own queries"
    if inside > 1 and size // inside > 1 and inside > heads // kv_heads + 1:
        return "hybrid", f"{inside} neighbors exchange heads, which shortens the ring"
    if 1 in rings:
        return "ring", "keys and values are sent while earlier ones are multiplied"
    return "all_gather", _NEEDS["ring"]


def make_attend_to_shared(
    plan: ExchangePlan, attend_rows: Callable[..., Array], choose_kernel: Callable[..., str]
) -> Callable[..., Array]:
    """Make the `attend` of a `Context` for rows that are split over devices.

    `attend_rows` is the `attend` for complete rows; `choose_kernel` returns the kernel for a query
    and keys. The result takes this device's queries and keys, [batch, seq_shard, heads, head_dim],
    in the order of `parallel.context.local_position_ids`. It raises `ConfigError` for dropout.
    """

    def attend(
        query: Q,
        key: KV,
        value: KV,
        mask: AttentionMask,
        *,
        kernel: str = "auto",
        dropout: AttentionDropout | None = None,
        softcap: float = 0.0,
        sink: Sink | None = None,
    ) -> Q:
        if dropout is not None:  # for built-in models the mesh was already rejected
            size = collectives.group_size(CONTEXT.name)
            raise ConfigError(context.dropout_problem(size, dropout.rate))
        if mask.full_every:
            near = dataclasses.replace(mask, full_every=0)
            far = dataclasses.replace(near, sliding_window=0)
            # Devices that share a row run the same layer, so they take the same branch.
            run = partial(attend, kernel=kernel, softcap=softcap)
            each = [lambda q, k, v, sink, m=m: run(q, k, v, m, sink=sink) for m in (far, near)]
            return jax.lax.cond(mask.has_no_window, *each, query, key, value, sink)
        rule = Rule(mask.causal, mask.sliding_window, softcap=softcap)
        chosen = choose_kernel(
            query,
            kernel=kernel,
            num_keys=key.shape[1] * collectives.group_size(CONTEXT.name),
            packed=mask.segments is not None,
            softcap=softcap,
            sinks=sink is not None,
            window=mask.sliding_window,
            causal=mask.causal,
        )
        query, key, value, sink = blockwise.declare_alike(query, key, value, sink)
        if plan.exchange == "all_gather":
            return _attend_gathered(query, key, value, mask.segments, sink, rule)
        group = _Group(plan.inner)
        shared = group.share_heads(query, key, value)
        sink = None if sink is None else group.own_heads(sink)
        segments = None if mask.segments is None else group.join(mask.segments)
        if plan.inner == collectives.group_size(CONTEXT.name):
            order = context.chunk_order(plan.inner)
            in_row = partial(_reordered, order=np.argsort(order))
            segments = None if segments is None else in_row(segments)
            row_mask = AttentionMask(
                causal=mask.causal, sliding_window=mask.sliding_window, segments=segments
            )
            rows = (in_row(x) for x in shared)
            mixed = attend_rows(*rows, row_mask, kernel=kernel, softcap=softcap, sink=sink)
            mixed = _reordered(mixed, order)
        else:
            ring = Ring(plan.inner, plan.paired, chosen == "cudnn")
            mixed = _attend_over_groups(*shared, segments, sink, rule, ring)
        if plan.inner == 1:
            return mixed
        # Named again, so that remat policies save it and do not repeat the exchange.
        return checkpoint_name(group.return_heads(mixed), "attention")

    return attend


def _attend_over_groups(
    query: Q,
    key: KV,
    value: KV,
    segments: Segments | None,
    sink: Sink | None,
    rule: Rule,
    ring: Ring,
) -> Q:
    if rule.window >= query.shape[1] * ring.size:
        rule = rule._replace(window=0)
    # Branches that depend on documents must vary over the same axes as the queries.
    segments = collectives.vary(segments, tuple(collectives.varying_axes(query)))
    inputs = (query, key, value, segments)
    if not ring.fused:
        return attend_ring(*inputs, sink, rule, ring)
    inputs = jax.tree.map(ring.in_row_order, inputs)
    return ring.in_device_order(attend_ring(*inputs, sink, rule, ring))


class _Group(NamedTuple):
    """Neighbors on the context axis that split heads, not positions, during attention."""

    size: int

    def share_heads(self, query: Q, key: KV, value: KV) -> tuple[Array, Array, Array]:
        """Exchange heads for positions: [batch, size · seq_shard, heads / size, ...]."""
        if self.size == 1:
            return query, key, value
        times = max(1, self.size // key.shape[2])
        key, value = (jnp.repeat(x, times, axis=2) for x in (key, value))
        exchange = lambda x: self._all_to_all(x, 2, 1)
        return exchange(query), exchange(key), exchange(value)

    def own_heads(self, sink: Sink) -> Array:
        """Return the sinks [heads / size] of the heads that a device has after `share_heads`."""
        index = collectives.group_index(CONTEXT.name) % self.size
        return sink.reshape(self.size, -1)[index]

    def return_heads(self, mixed: Q) -> Array:
        """Undo `share_heads`: -> [batch, seq_shard, heads, head_dim]."""
        return mixed if self.size == 1 else self._all_to_all(mixed, 1, 2)

    def join(self, x: Shaped[Array, "batch seq_shard"]) -> Shaped[Array, "batch seq"]:
        """Concatenate positions of the group's devices: seq = size · seq_shard."""
        if self.size == 1:
            return x
        return self._all_to_all(jnp.repeat(x[:, None], self.size, 1), 1, 2)[:, 0]

    def _all_to_all(self, x: Array, split_dim: int, concat_dim: int) -> Array:
        """Exchange x [*dims]: `split_dim` shrinks and `concat_dim` grows by the group size."""
        return collectives.all_to_all(x, CONTEXT.name, split_dim, concat_dim, group=self.size)


def _reordered(
    x: Shaped[Array, "batch seq *rest"], order: Int[np.ndarray, " chunks"]
) -> Shaped[Array, "batch seq *rest"]:
    chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])
    return chunks[:, order].reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend_gathered(
    query: Q, key: KV, value: KV, segments: Segments | None, sink: Sink | None, rule: Rule
) -> Q:
    return _gathered_forward(query, key, value, segments, sink, rule)[0]


def _gathered(query: Q, key: KV, value: KV, segments: Segments | None, rule: Rule) -> Partial:
    key, value = gather_keys((key, value))
    queries, keys = gathered_spans(query, segments)
    return blockwise.forward(query, key, value, queries, keys, rule)


def _gathered_forward(
    query: Q, key: KV, value: KV, segments: Segments | None, sink: Sink | None, rule: Rule
) -> tuple[Q, Any]:
    total = blockwise.with_sink(_gathered(query, key, value, segments, rule), sink)
    out, lse = blockwise.name_residuals(total, query.dtype)
    return out, (query, key, value, out, lse, segments, sink)


def _gathered_backward(rule: Rule, saved: Any, cotangent: Q) -> Any:
    query, key, value, out, lse, segments, sink = saved
    stats = BackwardStats.of(out, lse, cotangent)
    all_keys, all_values = gather_keys((key, value))
    queries, keys = gathered_spans(query, segments)
    dq, *grads = blockwise.backward(query, all_keys, all_values, queries, keys, stats, rule)
    # Each device has gradients of all keys: reduce-scatter them.
    dk, dv = (collectives.reduce_scatter(g, CONTEXT.name, dim=1) for g in grads)
    of_sink = blockwise.sink_gradient(sink, stats.lse, stats.delta)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None, of_sink


_attend_gathered.defvjp(_gathered_forward, _gathered_backward)


def gather_keys(tree: Any) -> Any:
    """All-gather leaves [batch, seq_shard, ...] to [batch, seq, ...], in device order."""
    return jax.tree.map(lambda x: collectives.all_gather(x, CONTEXT.name, dim=1), tree)


def gathered_spans(query: Q, segments: Segments | None) -> tuple[Span, Span]:
    """Return the spans of local queries, and of all keys in device order."""
    length, size = query.shape[1], collectives.group_size(CONTEXT.name)
    everyone = jnp.concatenate([context.position_ids_of(i, length, size) for i in range(size)])
    return (
        Span(context.local_position_ids(length)[None], segments),
        Span(everyone[None], None if segments is None else gather_keys(segments)),
    )
