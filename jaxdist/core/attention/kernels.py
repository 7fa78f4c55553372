"""The choice of the attention kernel, attention to complete rows with it, and dropout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from jaxdist.core.attention import blockwise, cudnn, tiled
from jaxdist.core.attention.blockwise import KV, Q, Sink, Span
from jaxdist.core.attention.context_parallel import ExchangePlan, make_attend_to_shared
from jaxdist.core.softcap import soft_cap
from jaxdist.core.types import Array, AttentionDropout, AttentionMask
from jaxdist.settings import ConfigError

Kernel: TypeAlias = Literal["xla", "tiled", "blockwise", "cudnn"]

BLOCKWISE_FROM = 2048
"""Keys per row from which block-wise attention replaces tiles, which are faster, but hold scores of
a complete row (`scripts/bench/results/context.md`)."""

DENSE_BELOW = 1024
"""Keys per row from which, if tiles are not supported, block-wise attention replaces the dense one.
It then is faster, because it skips the half that the causal mask hides."""


class AttentionPlan(NamedTuple):
    """The devices that attend, as input of `choose_kernel`.

    Attributes:
        compute_capability: of NVIDIA GPUs, e.g. "9.0"; "" if unknown.
        exchange: context-parallel exchange of keys and values; None without a context axis.
        packed_rejection: why cuDNN must not run packed documents; "" = it may.
        ring_rejection: why cuDNN must not run ring hops on unpacked rows; "" = it may.
        plain_rejection: why cuDNN must not run complete unpacked rows; "" = it may.
    """

    platform: str
    compute_capability: str = ""
    exchange: ExchangePlan | None = None
    packed_rejection: str = ""
    ring_rejection: str = ""
    plain_rejection: str = ""


class AttentionRequest(NamedTuple):
    """One call of attention; `cached`: has query positions; `too_large`: of `cudnn.too_large`."""

    dtype: Any
    head_dim: int
    num_keys: int
    kernel: str = "auto"
    packed: bool = False
    cached: bool = False
    dropout: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    window: int = 0
    causal: bool = True
    too_large: str = ""


def make_attend(
    plan: AttentionPlan, *, tensor_index: Callable[[], Any] = lambda: 0
) -> Callable[..., Array]:
    """Make the `attend` of a `Context`: softmax(query · key / √head_dim, masked) · value.

    `tensor_index` returns this device's index on the tensor axis, which splits the heads.

    Returns (query, key, value, mask, kernel="auto", dropout=None, softcap=0.0, sink=None) ->
    [batch, queries, heads, head_dim] in the query's dtype. `kernel` is "auto", "xla" or "cudnn";
    the result raises `ConfigError` if "cudnn" is impossible for a call.
    """

    def choose(query: Q, **call: Any) -> Kernel:
        too_large = cudnn.too_large(query.shape)
        request = AttentionRequest(query.dtype, query.shape[-1], too_large=too_large, **call)
        return choose_kernel(request, plan)[0]

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
        chosen = choose(
            query,
            kernel=kernel,
            num_keys=key.shape[1],
            packed=mask.segments is not None,
            cached=mask.query_positions is not None,
            dropout=0.0 if dropout is None else dropout.rate,
            softcap=softcap,
            sinks=sink is not None,
        )
        if dropout is not None:
            first_head = tensor_index() * query.shape[2]
            dropped = partial(_dropped, dropout=dropout, first_head=first_head)
            return _attend_dense(query, key, value, mask, softcap, sink, dropped)
        if chosen == "xla" and (softcap or mask.full_every or sink is not None):
            return _attend_dense(query, key, value, mask, softcap, sink)
        if not mask.full_every:
            return _attend(query, key, value, sink, mask, chosen, softcap)
        near = dataclasses.replace(mask, full_every=0)
        far = dataclasses.replace(near, sliding_window=0)
        # Kernels skip keys outside a window, so each kind of layer needs a separate program.
        branches = [partial(_attend, mask=m, kernel=chosen, softcap=softcap) for m in (far, near)]
        return jax.lax.cond(mask.has_no_window, *branches, query, key, value, sink)

    shared = plan.exchange
    over_devices = attend if shared is None else make_attend_to_shared(shared, attend, choose)
    return _without_float16(over_devices) if plan.platform == "cpu" else over_devices


def _without_float16(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Return `attend` with float16 [batch, ..., heads, head_dim] computed in float32, for CPUs."""

    def in_float32(query: Q, key: KV, value: KV, *args: Any, **options: Any) -> Q:
        if query.dtype != jnp.float16:
            return attend(query, key, value, *args, **options)
        wide = (x.astype(jnp.float32) for x in (query, key, value))
        return attend(*wide, *args, **options).astype(jnp.float16)

    return in_float32


def choose_kernel(request: AttentionRequest, plan: AttentionPlan) -> tuple[Kernel, str]:
    """Return kernel and reason; raise `ConfigError` if a requested cuDNN is impossible here."""
    platform, capability, exchange = plan.platform, plan.compute_capability, plan.exchange
    dtype, head_dim, packed = request.dtype, request.head_dim, request.packed
    softcap, num_keys, dropout = request.softcap, request.num_keys, request.dropout
    # After the exchange of heads for positions, each device has complete rows.
    in_parts = exchange is not None and exchange.exchange != "all_to_all"
    reasons = []
    if platform != "gpu":
        reasons.append(f"cuDNN needs an NVIDIA GPU, this is {platform}")
    elif capability and float(capability) < 8.0:
        reasons.append(f"cuDNN's kernel needs compute capability 8.0, this is {capability}")
    if dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"cuDNN needs bfloat16 or float16, compute is {jnp.dtype(dtype)}")
    if platform == "gpu":
        hidden = _ring_rejections(request, plan) if in_parts else []
        if packed and not hidden:
            hidden = _packed_rejections(request, plan)
        if plan.plain_rejection and not packed and not in_parts:
            hidden = [plan.plain_rejection]
        reasons += hidden
    if request.cached:
        reasons.append("cuDNN's kernel does not support explicit query positions (KV cache)")
    # Wider heads are allowed only if they are checked first, as for complete packed rows.
    widest = 256 if packed and not in_parts else 128
    if head_dim % 8 or head_dim > widest:
        reasons.append(f"cuDNN needs head_dim ≤ {widest} and a multiple of 8, this is {head_dim}")
    if dropout:
        reasons.append("attention dropout must give the same bits on every mesh")
    if softcap:
        reasons.append(f"cuDNN's kernel has no soft cap, and scores are capped at {softcap:g}")
    if request.sinks:
        reasons.append("cuDNN's kernel has no attention sinks")
    by_xla: Kernel = "xla"
    how = ""
    if in_parts:
        by_xla, how = "blockwise", "; rows that devices share go block by block"
    elif not dropout:
        in_tiles = platform == "cpu" and not request.cached
        first = BLOCKWISE_FROM if in_tiles else DENSE_BELOW
        if num_keys >= first:
            by_xla, how = "blockwise", f"; rows of {first} keys and more go block by block"
        elif in_tiles and num_keys > tiled.TILE:
            by_xla, how = "tiled", f"; on CPU rows of more than {tiled.TILE} keys go tile by tile"
    if request.kernel == "xla":
        return by_xla, f"from the settings{how}"
    if not reasons:
        if in_parts:
            reached = "a document reaches" if packed else "arrives"
            return "cudnn", f"fused, one call for each part of a row that {reached}"
        return "cudnn", "fused, and it honors the causal mask and the window" + (
            f", {cudnn.DOCUMENTS} documents of a row at a time" if packed else ""
        )
    if request.kernel == "cudnn":
        raise ConfigError(
            f"model.attention='cudnn' is impossible here: {'; '.join(reasons)}. "
            "Use attention='xla' or 'auto'."
        )
    return by_xla, "; ".join(reasons) + how


def _packed_rejections(request: AttentionRequest, plan: AttentionPlan) -> list[str]:
    if float(plan.compute_capability or 0) < 9.0:
        capability = plan.compute_capability or "unknown"
        return [f"cuDNN's packed kernel needs compute capability 9.0, this is {capability}"]
    reasons = (cudnn.missing(), plan.packed_rejection or request.too_large)
    return [reason for reason in reasons if reason]


def _ring_rejections(request: AttentionRequest, plan: AttentionPlan) -> list[str]:
    assert plan.exchange is not None
    if plan.exchange.exchange == "all_gather":
        return ["cuDNN's causal mask has no positions of all gathered keys"]
    if 0 < request.window < request.num_keys:
        return ["cuDNN's kernel does not support a sliding window over a ring"]
    if not request.causal:
        return ["cuDNN's kernel runs hops of a ring with a causal mask only"]
    if request.packed:
        return []
    return [reason for reason in (cudnn.missing(), plan.ring_rejection) if reason]


def visible(
    mask: AttentionMask, queries: int, keys: int
) -> Bool[Array, "batch_or_1 1 {queries} {keys}"]:
    """Return the mask of a dense kernel, equal for all heads; True = attend."""
    position = jnp.arange(queries)[None] if mask.query_positions is None else mask.query_positions
    spans = Span(position, mask.segments), Span(jnp.arange(keys)[None], mask.segments)
    return blockwise.visible_in_layer(mask, *spans)[:, None]


def _attend(
    query: Q,
    key: KV,
    value: KV,
    sink: Sink | None,
    mask: AttentionMask,
    kernel: Kernel,
    softcap: float,
) -> Q:
    """Return attention by `kernel`, which must support the mask, the soft cap and the sinks."""
    rule = blockwise.Rule(mask.causal, mask.sliding_window, softcap=softcap)
    if kernel == "cudnn" and mask.segments is not None:
        return cudnn.attend_packed(query, key, value, mask.segments, rule)
    if kernel == "tiled":
        return tiled.attend(query, key, value, mask.segments, rule, sink)
    if kernel == "blockwise":
        keys = queries = Span(jnp.arange(key.shape[1])[None], mask.segments)
        if mask.query_positions is not None:
            queries = Span(mask.query_positions)
        return blockwise.attend(query, key, value, queries, keys, rule, sink)
    if mask.query_positions is not None:
        allowed = visible(mask, query.shape[1], key.shape[1])
        return jax.nn.dot_product_attention(query, key, value, mask=allowed, implementation="xla")
    documents = None
    if mask.segments is not None:
        documents = (mask.segments[:, :, None] == mask.segments[:, None, :])[:, None]
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=documents,
        is_causal=mask.causal,
        local_window_size=(mask.sliding_window - 1, 0) if mask.sliding_window else None,
        implementation=kernel,
    )
    return mixed if kernel == "cudnn" else checkpoint_name(mixed, "attention")


def _attend_dense(
    query: Q,
    key: KV,
    value: KV,
    mask: AttentionMask,
    softcap: float,
    sink: Sink | None = None,
    drop: Callable[[Array], Array] = lambda probs: probs,
) -> Q:
    """Return attention from scores [batch, heads, queries, keys]; `drop` maps probabilities."""
    _, queries, heads, head_dim = query.shape
    keys, groups = key.shape[1], heads // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    allowed = visible(mask, queries, keys)
    scores = soft_cap(scores / math.sqrt(head_dim), softcap)
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    if sink is not None:
        column = jnp.broadcast_to(sink.astype(jnp.float32)[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], -1)
    probs = drop(jax.nn.softmax(scores, axis=-1)[..., :keys])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(value.dtype), value)
    return checkpoint_name(mixed, "attention")


def _dropped(
    probs: Float[Array, "batch heads queries keys"], dropout: AttentionDropout, first_head: Any
) -> Float[Array, "batch heads queries keys"]:
    """Drop probabilities by random bits that depend on row and head, `first_head` + local index."""
    heads, *shape = probs.shape[1:]

    def draw(row: Array, head: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(dropout.key, row), head)
        return jax.random.bernoulli(own, 1 - dropout.rate, shape)

    local_heads = first_head + jnp.arange(heads)
    kept = jax.vmap(lambda row: jax.vmap(lambda head: draw(row, head))(local_heads))(dropout.rows)
    return jnp.where(kept, probs / (1 - dropout.rate), 0.0)
