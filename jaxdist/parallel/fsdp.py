"""Sharded parameters: gathered where they are used, their gradients reduce-scattered back.

Forward all-gathers a weight in the compute dtype; backward reduce-scatters its gradient in
`reduce_dtype` (float32 by default, so that no bits are lost in the sum). Each gathered weight
carries the name `GATHERED`, which every remat policy refuses to save: a layer's whole weights live
only while that layer computes.

Source: Rajbhandari et al. 2020 (ZeRO stage 3); Zhao et al. 2023, "PyTorch FSDP", section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist import collectives
from jaxdist.sharding import dim_of
from jaxdist.types import Array, Params

GATHERED = "gathered_weight"
SHARD_AXES = ("fsdp", "data")


def gather(params: Params, specs: Any, *, dtype: Any, reduce_dtype: Any) -> Params:
    """Whole weights in the compute dtype from local shards.

    Args:
        params: local shards, any subtree of the parameters.
        specs: the `PartitionSpec` of each leaf (for one layer: without the stacked dim).
        dtype: dtype of the result.
        reduce_dtype: dtype in which gradients are summed over the shards' axes.
    """
    return jax.tree.map(
        lambda spec, w: _gather_leaf(w, spec, dtype, reduce_dtype),
        specs,
        params,
        is_leaf=lambda x: isinstance(x, P),
    )


def scatter(grads: Params, specs: Any, *, reduce_dtype: Any) -> Params:
    """Gradients of whole weights, summed over the shards' axes; each device keeps its shard.

    What differentiating `gather` does, for gradients that were added up before. Leaves that no axis
    shards stay as they are.
    """

    def leaf(spec: P, grad: Array) -> Array:
        axes = tuple(axis for axis in SHARD_AXES if dim_of(spec, axis) is not None)
        if not axes:
            return grad
        dim = dim_of(spec, axes[0])
        assert dim is not None
        total = collectives.reduce_scatter(grad.astype(reduce_dtype), axes, dim=dim)
        return total.astype(grad.dtype)

    return jax.tree.map(leaf, specs, grads, is_leaf=lambda x: isinstance(x, P))


def layer_specs(specs: Any) -> Any:
    """Specs of one layer from those of the stacked leaves."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, P))


def _gather_leaf(w: Array, spec: P, dtype: Any, reduce_dtype: Any) -> Array:
    axes = tuple(axis for axis in SHARD_AXES if dim_of(spec, axis) is not None)
    if not axes:
        return w if w.dtype == dtype else checkpoint_name(w.astype(dtype), GATHERED)
    dim = dim_of(spec, axes[0])
    assert dim is not None and dim_of(spec, axes[-1]) == dim
    return checkpoint_name(_gather(w, axes, dim, dtype, reduce_dtype), GATHERED)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any) -> Array:
    return collectives.all_gather(w.astype(dtype), axes, dim=dim)


def _gather_forward(
    w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any
) -> tuple[Array, None]:
    return _gather(w, axes, dim, dtype, reduce_dtype), None


def _gather_backward(
    axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any, _: None, grad: Array
) -> tuple[Array]:
    total = collectives.reduce_scatter(grad.astype(reduce_dtype), axes, dim=dim)
    return (total.astype("float32"),)


_gather.defvjp(_gather_forward, _gather_backward)
