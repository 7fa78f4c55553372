"""Scan over stacked layers: gathers weights layer by layer, saves residuals for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives, matmul
from jaxdist.core.attention import keeps_attention
from jaxdist.core.axis import spec_over
from jaxdist.core.forward import ForwardPass, scan_layers
from jaxdist.core.matmul import block_scaled, fp8
from jaxdist.core.matrices import sides_of
from jaxdist.core.parallel import fsdp, reduction, tensor
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.step.omitted_sums import check_equal, definition, varying_axes
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import (
    LAYER_INPUT,
    LAYER_SUM,
    Array,
    Context,
    Model,
    Params,
    Sums,
    offloaded_names,
)
from jaxdist.core.weights import ADAPTED, gathered_dtypes, with_weights


def make_run_layers(
    model: Model, layout: Layout, plan: StepPlan
) -> Callable[..., tuple[Array, Sums]]:
    """Make `ForwardPass.run_layers`: a scan over stacked layers that gathers each layer's weights.

    Returns (block, layers [layers, ...], x [batch, seq_shard, d_model], aux, context) -> x, Sums.
    """
    if not model.num_layers:
        return scan_layers
    layer = make_layer(model, layout, plan)
    recomputes = plan.remat != "none" or plan.gathers_layers
    unroll = plan.layers_per_body
    quantized = _make_quantized_layer(model, layout, plan)

    def run_layers(
        block: Any, layers: Params, x: Array, aux: Any, context: Context
    ) -> tuple[Array, Sums]:
        """Return (x [batch, seq_shard, d_model], Sums) after the layers."""

        def run(layer: Any, layers: Any, x: Array, first: int) -> tuple[Array, Sums]:
            """Run layers `first`, ...; return x [batch, seq_shard, d_model], sums [layers, ...]."""

            def body(x: Array, index_and_shards: tuple[Array, Any]) -> tuple[Array, Sums]:
                index, shards = index_and_shards
                if LAYER_INPUT in offloaded_names(plan.remat):
                    x = jax.tree.map(lambda rows: checkpoint_name(rows, LAYER_INPUT), x)
                return layer(block, shards, x, index, aux, context)

            count = jax.tree.leaves(layers)[0].shape[0]
            # If unrolled, forward and backward are one sequence, and CSE would merge the
            # recomputation with the forward.
            if recomputes or context.dtype != jnp.float32:  # remat also drops casts of weights
                # In other cases it would only add a reduce-precision to every saved value.
                body = jax.checkpoint(
                    body,
                    policy=remat_policy(plan.remat),
                    prevent_cse=recomputes and unroll >= count,
                )
            xs = (first + jnp.arange(count), layers)
            return lax.scan(body, x, xs, unroll=min(unroll, count))

        if quantized is None:
            x, sums = run(layer, layers, x, 0)
            return x, tensor.add_layers(sums)
        # First and last layer are separate loops: a branch would save the residuals of both sides.
        last = model.num_layers - 1
        ends = [jax.tree.map(lambda w, i=i: w[i : i + 1], layers) for i in (0, last)]
        middle = jax.tree.map(lambda w: w[1:last], layers)
        x, sums_first = run(layer, ends[0], x, 0)
        x, sums_middle = run(quantized.layer, (middle, quantized.round_weights(middle)), x, 1)
        x, sums_last = run(layer, ends[1], x, last)
        parts = (sums_first, sums_middle, sums_last)
        return x, tensor.add_layers(jax.tree.map(lambda *part: jnp.concatenate(part), *parts))

    return run_layers


def make_layer(model: Model, layout: Layout, plan: StepPlan) -> Callable[..., tuple[Array, Sums]]:
    """Make the function of one layer, including the all-gather of its weights.

    If the stage has already gathered all its weights, they are only cast. With `plan.matmul_dtype`
    and pipeline stages, layers except the first and the last use that dtype. Returns (block, one
    layer's shards, x [batch, seq_shard, d_model], layer index, aux, context) -> (x, Sums).
    """
    specs = fsdp.layer_specs(layout.gather_specs(model.axes)["layers"])
    has_stages = layout.size(PIPELINE) > 1
    if has_stages and plan.pipeline.gather == "step":
        specs = jax.tree.map(lambda _: P(), specs)
    dtypes = gathered_dtypes(model.axes["layers"], plan.compute_dtype)
    chooses = bool(plan.matmul_dtype) and has_stages

    def layer(
        block: Any, shards: Params, x: Array, index: Array, aux: Any, context: Context
    ) -> tuple[Array, Sums]:
        """Run one layer; return (x [batch, seq_shard, d_model], Sums); index is int32 []."""
        weights = fsdp.gather(shards, specs, dtypes, reduce_dtype=plan.reduce_dtype)
        if chooses:
            is_end = (index == 0) | (index == model.num_layers - 1)
            dot = _make_dot(layout, plan, is_wide=is_end)
            context = dataclasses.replace(context, dot=dot)
        return _run(block, weights, x, index, aux, context)

    return layer


class _QuantizedLayer(NamedTuple):
    """A low-precision layer; takes (shards, rounded weights) where `make_layer` takes shards."""

    round_weights: Callable[[Params], Any]
    layer: Callable[..., tuple[Array, Sums]]


def _make_quantized_layer(model: Model, layout: Layout, plan: StepPlan) -> _QuantizedLayer | None:
    """Make the low-precision layer between first and last; None if `make_layer` makes all."""
    if not plan.matmul_dtype or layout.size(PIPELINE) > 1:
        return None
    axes = model.axes["layers"]
    specs = fsdp.layer_specs(layout.gather_specs(model.axes)["layers"])
    split = jax.tree.map(
        lambda spec: spec_over(spec, layout.manual_axes),
        fsdp.layer_specs(layout.param_specs(model.axes)["layers"]),
    )
    # Other formats round weights after their all-gather.
    is_fp8 = plan.matmul_dtype == "fp8"
    multiplies = jax.tree.map(
        lambda dims, sides: is_fp8 and sides.is_matrix and not dims.keeps_dtype,
        axes,
        sides_of(axes),
    )
    dtypes = gathered_dtypes(axes, plan.compute_dtype)
    dot = _make_dot(layout, plan)

    def layer(
        block: Any, both: tuple[Params, Any], x: Array, index: Array, aux: Any, context: Context
    ) -> tuple[Array, Sums]:
        weights = fp8.gather(*both, specs, dtypes, reduce_dtype=plan.reduce_dtype)
        return _run(block, weights, x, index, aux, dataclasses.replace(context, dot=dot))

    return _QuantizedLayer(
        lambda layers: fp8.round_weights(layers, split, multiplies, plan.compute_dtype),
        layer,
    )


def _make_dot(layout: Layout, plan: StepPlan, **options: Any) -> Callable[..., Array]:
    """Make the product [*named dims] of x and w in `plan.matmul_dtype`; see `matmul.make_dot`."""
    # Devices on these axes may hold parts of one activation; devices of different stages do not.
    axes = tuple(axis.name for axis in layout.used if axis is not PIPELINE)
    dot = matmul.make_dot(plan.matmul_dtype, axes, plan.platform, **options)
    return with_weights(dot, reduction.make_sum(layout), plan.gradient_barrier)


def _run(
    block: Any, weights: Params, x: Array, index: Array, aux: Any, context: Context
) -> tuple[Array, Sums]:
    """Run the block of layer `index`, int32 []; return (x [batch, seq_shard, d_model], Sums)."""
    key = context.dropout_key
    layer_key = None if key is None else jax.random.fold_in(key, index)
    layer_context = dataclasses.replace(context, dropout_key=layer_key, layer=index)
    out = block(weights, x, aux, layer_context)
    y, sums = _checked(out, x)
    owner = getattr(block, "__self__", None)
    block = owner.model.block if isinstance(owner, ForwardPass) else block
    check_equal(y, varying_axes(x), f"x leaves Model.block{definition(block)}")
    return y, sums


def _checked(out: Any, x: Array) -> tuple[Array, Sums]:
    """Return a block's x [batch, seq_shard, d_model] and sums.

    Rejects sums that are not float32 [], except those by layer (`LAYER_SUM`).
    """
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
        raise TypeError(
            f"Model.block returned {type(out).__name__}, not (x, Sums). Return `x, {{}}` if the "
            "block has nothing to sum."
        )
    y, sums = out
    for name, value in sums.items():
        if name.startswith(LAYER_SUM):
            continue
        if jnp.shape(value) != () or jnp.result_type(value) != jnp.float32:
            raise TypeError(
                f"Model.block returned {name!r} in its Sums as {jnp.result_type(value)} of shape "
                f"{jnp.shape(value)}. Sum it over rows and tokens to a float32 scalar."
            )
    # A scan and a switch need the same type for each sum, even if it is a constant.
    first = jax.tree.leaves(x)[0]  # all row chunks vary over the same axes
    rows = tuple(axis for axis in collectives.varying_axes(first) if axis != TENSOR.name)
    return y, collectives.vary(sums, rows)


def remat_policy(remat: str) -> Callable[..., bool]:
    """Return the remat policy of `jax.checkpoint`; it never saves gathered weights."""
    if remat == "none":
        return fsdp.keep_all_but_weights
    policies = jax.checkpoint_policies
    if names := offloaded_names(remat):
        return _offload_policy(names)
    # Recomputing the scale would read the array again and repeat a collective.
    scales = policies.save_only_these_names(fp8.SCALE)
    return policies.save_from_both_policies(_named_policy(remat), scales)


def _offload_policy(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a policy that moves values of these names to pinned host memory.

    Of all others it saves only the scales of fp8 products, on the device.
    """
    to_host = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    # The decision of that policy for any product is the value that means "to the host".
    moved = to_host(lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        name = params["name"] if primitive.name == "name" else ""
        is_attention = "attention" in names and keeps_attention(primitive, *avals, **params)
        return moved if is_attention or name in names else name == fp8.SCALE

    return policy


def _named_policy(remat: str) -> Callable[..., bool]:
    policies = jax.checkpoint_policies
    if remat == "dots":
        return policies.save_from_both_policies(
            policies.checkpoint_dots_with_no_batch_dims,
            policies.save_from_both_policies(
                # Outputs after the all-reduce over `tensor`, instead of the partial sums.
                policies.save_only_these_names(
                    block_scaled.PRODUCT, ADAPTED, "attention_out", "mlp_out"
                ),
                keeps_attention,
            ),
        )
    if remat == "full":
        return policies.nothing_saveable
    if remat.startswith("names:"):
        names = remat.removeprefix("names:").split(",")
        by_name = policies.save_only_these_names(*names)
        if "attention" not in names:
            return by_name
        return policies.save_from_both_policies(by_name, keeps_attention)
    raise ValueError(f"remat={remat!r} is unknown. Use none, dots, full, names:A,B or offload:A,B.")
