"""The layer runner: stacked layers one by one, weights gathered as it goes, what backward keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.core.parallel import fsdp
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.types import Array, Context, Model, Params

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
) -> Callable[..., Array]:
    """The layer runner: a scan over stacked layers that gathers each layer's weights as it goes.

    The runner takes `first`, the index in the model of the first layer it is given; random bits
    depend on it.
    """
    if not model.num_layers:
        return Context().run_layers
    layer = make_layer(model, layout, precision, platform, gather=gather)
    specs = fsdp.layer_specs(layout.param_specs(model.axes)["layers"])
    remat = resolve_remat(config, platform)
    recomputes = remat != "none" or (gather and fsdp.is_sharded(specs))
    # A pipeline holds its layers in several loop bodies: unrolled, they would take long to compile.
    few = 1 if layout.sizes["pipeline"] > 1 else model.num_layers
    unroll = _num_unrolled(few, platform, recomputes)

    def run_layers(
        block: Any, layers: Params, x: Array, aux: Any, context: Context, first: Any = 0
    ) -> Array:
        def body(x: Array, index_and_shards: tuple[Array, Params]) -> tuple[Array, None]:
            index, shards = index_and_shards
            return layer(block, shards, x, index, aux, context), None

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
        x, _ = lax.scan(body, x, (first + jnp.arange(count), layers), unroll=min(unroll, count))
        return x

    return run_layers


def resolve_remat(config: TrainConfig, platform: str) -> str:
    """The remat policy's name, `auto` resolved."""
    if config.remat == "auto":
        return "dots" if platform == "gpu" else "none"
    return config.remat


def make_layer(
    model: Model, layout: Layout, precision: PrecisionConfig, platform: str, *, gather: bool = True
) -> Callable[..., Array]:
    """(block, shards, x, index in the model, aux, context) -> x: one layer, its weights gathered.

    Without `gather` the weights are whole already and only cast.
    """
    specs = fsdp.layer_specs(layout.param_specs(model.axes)["layers"])
    if not gather:
        specs = jax.tree.map(lambda _: P(), specs, is_leaf=lambda x: isinstance(x, P))
    dtype = precision.resolve(platform)
    reduce_dtype = jnp.dtype(precision.reduce_dtype)

    def layer(
        block: Any, shards: Params, x: Array, index: Array, aux: Any, context: Context
    ) -> Array:
        weights = fsdp.gather(shards, specs, dtype=dtype, reduce_dtype=reduce_dtype)
        key = context.dropout_key
        layer_key = None if key is None else jax.random.fold_in(key, index)
        return block(weights, x, aux, dataclasses.replace(context, dropout_key=layer_key))

    return layer


def remat_policy(remat: str, layers: Params) -> Callable[..., bool]:
    """What `jax.checkpoint` may keep for the backward pass; gathered weights never.

    Args:
        remat: none, dots, full or names:A,B.
        layers: local shards of the stacked layers.

    Raises:
        ValueError: an unknown policy (`TrainConfig.problems` reports it first).
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return fsdp.keep_all_but_weights(layers)
    if remat == "dots":
        return policies.save_from_both_policies(
            policies.checkpoint_dots_with_no_batch_dims,
            policies.save_only_these_names("attention"),
        )
    if remat == "full":
        return policies.nothing_saveable
    if remat.startswith("names:"):
        return policies.save_only_these_names(*remat.removeprefix("names:").split(","))
    raise ValueError(f"remat={remat!r} is unknown. Use none, dots, full or names:A,B.")


def _num_unrolled(num_layers: int, platform: str, recomputes: bool) -> int:
    # XLA:CPU merges what unrolled layers compute twice, with or without a barrier.
    fits = platform == "cpu" and not recomputes and num_layers <= UNROLL_UP_TO
    return num_layers if fits else 1
