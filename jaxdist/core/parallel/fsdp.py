"""The fsdp axis: parameters sharded, gathered where they are used, gradients scattered back.

Forward all-gathers a weight in the compute dtype; backward reduce-scatters its gradient in
`reduce_dtype` (by default bfloat16 if layers compute in bfloat16, because the gradient's product
already has this dtype; `scripts/bench/results/reduce_dtype.md`). A layer's complete weights exist
only while that layer computes: no remat policy saves them (`keep_all_but_weights`). Frozen weights
that are stored in fewer bits are gathered in their stored form.

Source: Rajbhandari et al. 2020 (ZeRO stage 3); Zhao et al. 2023, "PyTorch FSDP", section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import Axis, axes_of, dim_of
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
"""Name of a gathered weight in a traced program."""


def gather(params: Params, specs: Any, dtypes: Any, *, reduce_dtype: Any) -> Params:
    """Return complete weights [..., n · d, ...] in `dtypes` from local shards [..., d, ...].

    `specs` name the axes to gather over and no others (`Layout.gather_specs`), `dtypes` are those
    of `weights.gathered_dtypes`. Gradients are summed over the shards' axes in `reduce_dtype`.

    Wire, per complete leaf of B bytes over n shards: B·(n−1)/n forward, in its stored dtype or that
    of `dtypes`, the smaller; the same in `reduce_dtype` backward.
    """
    return jax.tree.map(
        lambda spec, w, dtype: _gather_leaf(w, spec, dtype, reduce_dtype),
        specs,
        params,
        dtypes,
        is_leaf=lambda x: isinstance(x, P),
    )


def keep_all_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Save every value except gathered weights and casts of weights: a remat policy.

    Excluding a name is not enough: the unnamed result of the gather, the input of the naming, would
    be saved.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name in ("pvary", "pcast") and avals[0].dtype.itemsize == 1:
        return False  # a gathered weight in 8 bits, or one about to be
    return not is_gather(primitive, params)


def scatter(grads: Params, specs: Any, *, reduce_dtype: Any) -> Params:
    """Sum float32 gradients [..., n · d, ...] over the shards' axes; keep this shard [..., d, ...].

    This is the backward pass of `gather` for accumulated gradients: sums are in `reduce_dtype`, and
    leaves that no axis shards stay as they are.
    """

    def leaf(spec: P, grad: Array) -> Array:
        """Return this device's shard [*dims] of the sum of a gradient."""
        axes = axes_of(spec)
        if not axes:
            return grad
        dim = dim_of(spec, axes[0])
        assert dim is not None
        total = collectives.reduce_scatter(grad.astype(reduce_dtype), axes, dim=dim)
        return total.astype(grad.dtype)

    return jax.tree.map(leaf, specs, grads, is_leaf=lambda x: isinstance(x, P))


def layer_specs(specs: Any) -> Any:
    """Return the specs of one layer from those of the stacked leaves."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, P))


def _gather_leaf(w: Array, spec: P, dtype: Any, reduce_dtype: Any) -> Array:
    """Return the weight [..., n · d, ...] in `dtype` of [..., d, ...]; only cast if unsharded."""
    axes = axes_of(spec)
    if not axes and w.dtype == dtype:
        return w
    dim = dim_of(spec, axes[0]) if axes else 0
    assert dim is not None and (not axes or dim_of(spec, axes[-1]) == dim)
    return checkpoint_name(gather_weight(w, axes, dim, dtype, reduce_dtype), GATHERED)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_weight(
    w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any
) -> Array:
    """Return the weight [..., n · d, ...] of shards [..., d, ...]; named in `weights.GATHERS`."""
    near = w if w.dtype.itemsize < dtype.itemsize else w.astype(dtype)
    return (collectives.all_gather(near, axes, dim=dim) if axes else near).astype(dtype)


def _gather_forward(
    w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any
) -> tuple[Array, None]:
    """Return `gather_weight` [..., n · d, ...] and no residuals."""
    return gather_weight(w, axes, dim, dtype, reduce_dtype), None


def _gather_backward(
    axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any, _: None, grad: Array
) -> tuple[Array]:
    """Sum in `reduce_dtype`: [..., n · d, ...] -> this shard's, float32 [..., d, ...]."""
    if not axes:
        return (grad.astype("float32"),)
    total = collectives.reduce_scatter(grad.astype(reduce_dtype), axes, dim=dim)
    return (total.astype("float32"),)


gather_weight.defvjp(_gather_forward, _gather_backward)
