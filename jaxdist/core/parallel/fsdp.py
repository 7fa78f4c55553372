"""The fsdp axis: matrices are sharded, all-gathered before use, gradients reduce-scattered.

Forward all-gathers a weight in the compute dtype, or in its stored format if that has fewer bits.
Backward reduce-scatters its gradient in `reduce_dtype`. The default is bfloat16 if layers compute
in bfloat16, because the product that computes the gradient already has this dtype
(`scripts/bench/results/reduce_dtype.md`). No remat policy saves gathered weights.

Source: Rajbhandari et al. 2020 (ZeRO stage 3); Zhao et al. 2023, "PyTorch FSDP", section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import Axis, axes_of
from jaxdist.core.types import Array, Params
from jaxdist.core.weights import is_gather

FSDP = Axis(
    name="fsdp",
    short="fsdp",
    help="replicas that share one copy of the model's state",
    moves="weights, gathered for each layer, and their gradients, scattered back",
    weights="gathered",
    splits_rows=True,
    dims=("d_model",),
    sums_gradients="always",
    sums_loss=True,
    shrinks=True,
    complexity=1,
    divides="each device holds an equal slice of every matrix",
)

GATHERED = "gathered_weight"
"""Name of gathered weights in a traced program (`checkpoint_name`)."""


def gather(params: Params, specs: Any, dtypes: Any, *, reduce_dtype: Any) -> Params:
    """All-gather local shards [..., d, ...] to complete weights [..., n · d, ...] in `dtypes`.

    `specs` contain only the axes to gather over (`Layout.gather_specs`); `dtypes` are computed by
    `weights.gathered_dtypes`. Backward sums gradients over these axes in `reduce_dtype`.

    For a leaf of B bytes (all n shards), each device sends B·(n−1)/n in forward, in the smaller of
    the stored dtype and that of `dtypes`, and again in backward, in `reduce_dtype`.
    """
    return jax.tree.map(
        lambda spec, w, dtype: _gather_leaf(w, spec, dtype, reduce_dtype), specs, params, dtypes
    )


def keep_all_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return False for gathered or cast weights, also unnamed ones, which remat must not keep."""
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name in ("pvary", "pcast") and avals[0].dtype.itemsize == 1:
        return False  # an 8-bit weight, gathered or not yet gathered
    return not is_gather(primitive, params)


def scatter(grads: Params, specs: Any, *, reduce_dtype: Any) -> Params:
    """Reduce-scatter accumulated float32 gradients [..., n · d, ...] to shards [..., d, ...]."""
    leaf = lambda spec, grad: shard_of_sum(grad, axes_of(spec), gathered_dim(spec), reduce_dtype)
    return jax.tree.map(leaf, specs, grads)


def layer_specs(specs: Any) -> Any:
    """Return the specs of a single layer from the specs of stacked leaves."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs)


def _gather_leaf(w: Array, spec: P, dtype: Any, reduce_dtype: Any) -> Array:
    """All-gather [..., d, ...] to [..., n · d, ...] in `dtype`; only cast an unsharded weight."""
    axes = axes_of(spec)
    if not axes and w.dtype == dtype:
        return w
    weight = gather_weight(w, axes, gathered_dim(spec), dtype, reduce_dtype)
    return checkpoint_name(weight, GATHERED)


def gathered_dim(spec: P) -> int:
    """Return the only dim that a spec splits; 0 if it splits none."""
    (dim,) = [i for i, entry in enumerate(spec) if entry is not None] or [0]
    return dim


def shard_of_sum(grad: Array, axes: tuple[str, ...], dim: int, reduce_dtype: Any) -> Array:
    """Reduce-scatter [..., n · d, ...] in `reduce_dtype`, if `axes`, to float32 [..., d, ...]."""
    if axes:
        grad = collectives.reduce_scatter(grad.astype(reduce_dtype), axes, dim=dim)
    return grad.astype("float32")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_weight(
    w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any
) -> Array:
    """All-gather [..., d, ...] to [..., n · d, ...], cast to `dtype`; in `weights.GATHERS`."""
    near = w if w.dtype.itemsize < dtype.itemsize else w.astype(dtype)
    return (collectives.all_gather(near, axes, dim=dim) if axes else near).astype(dtype)


def _gather_backward(
    axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any, _: None, grad: Array
) -> tuple[Array]:
    """Return the gradient of the shard [..., d, ...] from that of the weight [..., n · d, ...]."""
    return (shard_of_sum(grad, axes, dim, reduce_dtype),)


gather_weight.defvjp(lambda *inputs: (gather_weight(*inputs), None), _gather_backward)
