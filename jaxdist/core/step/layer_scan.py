"""The layer runner: stacked layers one by one, weights gathered as it goes, what backward keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.attention import keeps_attention
from jaxdist.core.parallel import fsdp, tensor
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.types import Array, Context, Model, Params, Sums

UNROLL_UP_TO = 16
"""Layers that XLA:CPU gets unrolled, which it runs faster than a loop. More compile too slowly."""


def make_run_layers(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    precision: PrecisionConfig,
    platform: str,
    *,
    gather: bool = True,
) -> Callable[..., tuple[Array, Sums]]:
    """The layer runner: a scan over stacked layers that gathers each layer's weights as it goes.

    Without `gather` weights arrive whole and are only cast.

    Returns:
        (block, layers [layers, ...], x [batch, seq_shard, d_model], aux, context, first=0) ->
        (x, Sums of these layers). `first` is the index in the model of the first layer; random bits
        depend on it.
    """
    if not model.num_layers:
        return Context().run_layers
    layer = make_layer(model, layout, precision, platform, gather=gather)
    specs = fsdp.layer_specs(layout.gather_specs(model.axes)["layers"])
    remat = resolve_remat(config, platform)
    recomputes = remat != "none" or (gather and fsdp.is_sharded(specs))
    # A pipeline holds its layers in several loop bodies: unrolled, they would take long to compile.
    few = layout.size(PIPELINE) == 1 and model.num_layers <= UNROLL_UP_TO
    # XLA:CPU merges what unrolled layers compute twice, with or without a barrier.
    unroll = model.num_layers if few and platform == "cpu" and not recomputes else 1

    def run_layers(
        block: Any, layers: Params, x: Array, aux: Any, context: Context, first: Any = 0
    ) -> tuple[Array, Sums]:
        """(x [batch, seq_shard, d_model], Sums) behind the layers."""

        def body(x: Array, index_and_shards: tuple[Array, Params]) -> tuple[Array, Sums]:
            index, shards = index_and_shards
            return layer(block, shards, x, index, aux, context)

        count = jax.tree.leaves(layers)[0].shape[0]
        # Forward and backward are two loops, over which the compiler cannot merge what is computed
        # twice on purpose. Unrolled they are one straight line, in which it would.
        if recomputes or context.dtype != jnp.float32:  # casts of weights are not kept either
            # Elsewhere it would only pin every kept value with a reduce-precision.
            body = jax.checkpoint(
                body,
                policy=remat_policy(remat, layers),
                prevent_cse=recomputes and unroll >= count,
            )
        indices = first + jnp.arange(count)
        x, sums = lax.scan(body, x, (indices, layers), unroll=min(unroll, count))
        return x, tensor.add_layers(sums)

    return run_layers


def resolve_remat(config: TrainConfig, platform: str) -> str:
    """The remat policy's name, `auto` resolved."""
    if config.remat == "auto":
        return "dots" if platform == "gpu" else "none"
    return config.remat


def make_layer(
    model: Model, layout: Layout, precision: PrecisionConfig, platform: str, *, gather: bool = True
) -> Callable[..., tuple[Array, Sums]]:
    """One layer, its weights gathered.

    Returns:
        (block, shards of one layer, x [batch, seq_shard, d_model], index in the model, aux,
        context) -> (x, Sums). Without `gather` the weights are whole already and only cast.
    """
    specs = fsdp.layer_specs(layout.gather_specs(model.axes)["layers"])
    if not gather:
        specs = jax.tree.map(lambda _: P(), specs, is_leaf=lambda x: isinstance(x, P))
    dtype = precision.resolve(platform)
    reduce_dtype = jnp.dtype(precision.reduce_dtype)

    def layer(
        block: Any, shards: Params, x: Array, index: Array, aux: Any, context: Context
    ) -> tuple[Array, Sums]:
        """(x [batch, seq_shard, d_model], Sums) behind one layer; index is int32 []."""
        weights = fsdp.gather(shards, specs, dtype=dtype, reduce_dtype=reduce_dtype)
        key = context.dropout_key
        layer_key = None if key is None else jax.random.fold_in(key, index)
        told = dataclasses.replace(context, dropout_key=layer_key, layer=index)
        return _checked(block(weights, x, aux, told), x)

    return layer


def _checked(out: Any, x: Array) -> tuple[Array, Sums]:
    """What a block returned: x [batch, seq_shard, d_model], and scalars that vary as rows do.

    Raises:
        TypeError: the block returned no such pair, or sums that are no float32 scalars.
    """
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
        raise TypeError(
            f"Model.block returned {type(out).__name__}, not (x, Sums). Return `x, {{}}` where the "
            "block has nothing to sum."
        )
    y, sums = out
    for name, value in sums.items():
        if jnp.shape(value) != () or jnp.result_type(value) != jnp.float32:
            raise TypeError(
                f"Model.block returned {name!r} in its Sums as {jnp.result_type(value)} of shape "
                f"{jnp.shape(value)}. Sum it over rows and tokens to a float32 scalar."
            )
    # A scan and a switch want one type of each sum, also of a constant.
    rows = tuple(axis for axis in collectives.varying_axes(x) if axis != TENSOR.name)
    return y, collectives.vary(sums, rows)


def remat_policy(remat: str, layers: Params) -> Callable[..., bool]:
    """What `jax.checkpoint` may keep for the backward pass; gathered weights never.

    Raises:
        ValueError: an unknown policy (`TrainConfig.problems` reports it first).
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return fsdp.keep_all_but_weights(layers)
    if remat == "dots":
        return policies.save_from_both_policies(
            policies.checkpoint_dots_with_no_batch_dims, keeps_attention
        )
    if remat == "full":
        return policies.nothing_saveable
    if remat.startswith("names:"):
        names = remat.removeprefix("names:").split(",")
        by_name = policies.save_only_these_names(*names)
        if "attention" not in names:
            return by_name
        return policies.save_from_both_policies(by_name, keeps_attention)
    raise ValueError(f"remat={remat!r} is unknown. Use none, dots, full or names:A,B.")
