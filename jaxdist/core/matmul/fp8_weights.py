"""Weights of fp8 products: shards are rounded, then gathered as bytes."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Float32

from jaxdist.core import collectives
from jaxdist.core.axis import axes_of, dim_of
from jaxdist.core.matmul.fp8 import E4M3, RoundedWeight, largest_of, narrow, scale_of, widen
from jaxdist.core.parallel import fsdp
from jaxdist.core.types import Array


def round_weights(layers: Any, specs: Any, is_product: Any, dtype: Any) -> Any:
    """Round the float32 shards [layers, ...] of weights used in products, before their gather.

    `specs` of one layer have all mesh axes that shard a leaf. `is_product` marks the weights that
    `Context.dot` multiplies. Like `fsdp.gather`, weights are first rounded to the compute `dtype`.
    Returns (E4M3 [layers, ...], float32 scales [layers], equal on all devices) or (). Not
    differentiable.
    """

    def leaf(spec: P, product: bool, w: Float[Array, "layers ..."]) -> Any:
        if not product:
            return ()
        w = lax.stop_gradient(w).astype(dtype)
        scale = scale_of(largest_of(w, axes_of(spec), tuple(range(1, w.ndim))), E4M3)
        return narrow(w, scale.reshape(-1, *[1] * (w.ndim - 1)), E4M3), scale

    return jax.tree.map(leaf, specs, is_product, layers, is_leaf=lambda x: isinstance(x, P))


def gather(shards: Any, rounded: Any, specs: Any, dtypes: Any, *, reduce_dtype: Any) -> Any:
    """Gather the weights of one layer like `fsdp.gather`; rounded ones become `RoundedWeight`s.

    `rounded` is one layer of the result of `round_weights` for these `shards`. Gradients are
    computed for `shards` and ignore the rounding.

    Wire, per rounded leaf of n elements over k shards: n·(k−1)/k bytes forward, n·(k−1)/k
    elements of `reduce_dtype` backward.
    """

    def leaf(spec: P, w: Any, near: Any, dtype: Any) -> Any:
        if not near:
            return fsdp.gather(w, spec, dtype, reduce_dtype=reduce_dtype)
        axes = axes_of(spec)
        dim = dim_of(spec, axes[0]) if axes else 0
        assert dim is not None
        both = gather_rounded((axes, dim, dtype, reduce_dtype), w, *near)
        weight, weight8 = (checkpoint_name(x, fsdp.GATHERED) for x in both)
        return RoundedWeight(weight, (weight8, near[1]))

    return jax.tree.map(leaf, specs, shards, rounded, dtypes, is_leaf=lambda x: isinstance(x, P))


_How: TypeAlias = tuple[tuple[str, ...], int, Any, Any]
"""Axes to gather over, the dim that they split, compute dtype, dtype of reductions."""
_Shard: TypeAlias = Float[Array, "*shard"]
_Weight: TypeAlias = Float[Array, "*weight"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_rounded(
    how: _How, w: _Shard, near: _Shard, scale: Float32[Array, ""]
) -> tuple[_Weight, _Weight]:
    """Return the gathered weight in the compute dtype and in 8 bits; listed in `weights.GATHERS`.

    Gradients flow from the first result to `w`.
    """
    axes, dim, dtype, _ = how
    weight8 = collectives.all_gather(near, axes, dim) if axes else near
    return widen(weight8, scale, dtype), weight8


def _gather_forward(
    how: _How, w: _Shard, near: _Shard, scale: Float32[Array, ""]
) -> tuple[tuple[_Weight, _Weight], None]:
    return gather_rounded(how, w, near, scale), None


def _gather_backward(
    how: _How, _: None, gradients: tuple[_Weight, Any]
) -> tuple[Float32[Array, "*shard"], None, None]:
    axes, dim, _, reduce_dtype = how
    gradient = gradients[0]
    if axes:
        gradient = collectives.reduce_scatter(gradient.astype(reduce_dtype), axes, dim)
    return gradient.astype(jnp.float32), None, None


gather_rounded.defvjp(_gather_forward, _gather_backward)
