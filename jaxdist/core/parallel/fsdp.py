"""The fsdp axis: parameters sharded, gathered where they are used, gradients scattered back.

Forward all-gathers a weight in the compute dtype; backward reduce-scatters its gradient in
`reduce_dtype` (by default bfloat16 where layers compute in it, in which it leaves its product;
`scripts/bench/results/reduce_dtype.md`). A layer's whole weights live only while that layer
computes: no remat policy keeps them (`keep_all_but_weights`).

Source: Rajbhandari et al. 2020 (ZeRO stage 3); Zhao et al. 2023, "PyTorch FSDP", section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import Axis, axes_of, dim_of
from jaxdist.core.types import Array, Params

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
"""Name of a whole weight in a traced program."""


def gather(params: Params, specs: Any, *, dtype: Any, reduce_dtype: Any) -> Params:
    """Whole weights in `dtype`, from local float32 shards of any subtree of the parameters.

    `specs` name the axes to gather over and no others (`Layout.gather_specs`; for one layer:
    without the stacked dim). Gradients are summed over the shards' axes in `reduce_dtype`.

    Wire, per leaf of B bytes whole in `dtype` over n shards: B·(n−1)/n forward, the same in
    `reduce_dtype` backward.

    A leaf is [..., d, ...] on this device, and [..., n · d, ...] whole.
    """
    return jax.tree.map(
        lambda spec, w: _gather_leaf(w, spec, dtype, reduce_dtype),
        specs,
        params,
        is_leaf=lambda x: isinstance(x, P),
    )


def keep_all_but_weights(layers: Params) -> Callable[..., bool]:
    """A remat policy that keeps every value but gathered weights and casts of weights.

    A name alone does not do it: what is named also exists without its name, as the result of the
    gather, and would be kept as that. `layers` are local shards, [num_layers, ...].
    """
    shards = {(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(layers)}

    def keep(primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive.name == "name":
            return params["name"] != GATHERED
        if primitive.name in ("pvary", "pcast") and avals[0].dtype.itemsize == 1:
            return False  # a gathered weight in 8 bits, or one about to be
        if primitive.name == "convert_element_type" or _gathers(primitive, avals):
            return (avals[0].shape, avals[0].dtype) not in shards
        return True

    return keep


def _gathers(primitive: Any, avals: Any) -> bool:
    """Whether an operation may be the gather of a shard, alone or with what it was rounded to."""
    if primitive.name != "custom_vjp_call":
        return False
    return len(avals) == 1 or (len(avals) == 3 and avals[1].dtype.itemsize == 1)


def scatter(grads: Params, specs: Any, *, reduce_dtype: Any) -> Params:
    """Float32 gradients of whole weights, summed over the shards' axes; a device keeps its shard.

    What differentiating `gather` does, with the same `specs`, for gradients that were added up
    before. They are summed in `reduce_dtype`. Leaves that no axis shards stay as they are.

    A leaf is [..., n · d, ...] before, and [..., d, ...] on each of n devices after.
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
    """Specs of one layer from those of the stacked leaves."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, P))


def _gather_leaf(w: Array, spec: P, dtype: Any, reduce_dtype: Any) -> Array:
    """The weight [..., n · d, ...] in `dtype`, of which each of n devices holds w [..., d, ...].

    W is float32. It is only cast where no axis shards it.
    """
    axes = axes_of(spec)
    if not axes:
        return w if w.dtype == dtype else checkpoint_name(w.astype(dtype), GATHERED)
    dim = dim_of(spec, axes[0])
    assert dim is not None and dim_of(spec, axes[-1]) == dim
    return checkpoint_name(_gather(w, axes, dim, dtype, reduce_dtype), GATHERED)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any) -> Array:
    """The weight [..., n · d, ...] in `dtype`, of shards w [..., d, ...] over `axes`."""
    return collectives.all_gather(w.astype(dtype), axes, dim=dim)


def _gather_forward(
    w: Array, axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any
) -> tuple[Array, None]:
    """`_gather` [..., n · d, ...]; its backward needs nothing of the forward."""
    return _gather(w, axes, dim, dtype, reduce_dtype), None


def _gather_backward(
    axes: tuple[str, ...], dim: int, dtype: Any, reduce_dtype: Any, _: None, grad: Array
) -> tuple[Array]:
    """The shard's gradient, float32 [..., d, ...], from the weight's, [..., n · d, ...].

    Summed over `axes` in `reduce_dtype`.
    """
    total = collectives.reduce_scatter(grad.astype(reduce_dtype), axes, dim=dim)
    return (total.astype("float32"),)


_gather.defvjp(_gather_forward, _gather_backward)
