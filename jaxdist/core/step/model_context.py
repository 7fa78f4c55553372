"""Build the `Context` and the `ForwardPass` of a model inside the step."""

from __future__ import annotations

from typing import Any

from jaxdist.core import attention, experts, losses, token_logps, types
from jaxdist.core.forward import ForwardPass
from jaxdist.core.matmul import cpu, grouped
from jaxdist.core.parallel import fsdp, reduction, tensor
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.step.layer_scan import make_run_layers
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import Context, Model, Params
from jaxdist.core.weights import gathered_dtypes, with_weights


def make_context(model: Model, layout: Layout, plan: StepPlan) -> Context:
    """Build the execution context of a model on this layout."""
    vocabulary_axis = TENSOR.name if TENSOR in layout.used else None
    hooks = {
        name: hook
        for axis in layout.used
        for name, hook in axis.hooks(layout.sequence_parallel).items()
    }
    grouped_dot = grouped.make_grouped_dot(plan.platform, plan.grouped)
    make_experts = hooks.pop("experts", experts.make_experts)
    tensor_index = hooks.get("tensor_index", int)
    own: dict[str, Any] = {"weight_gradient": cpu.weight_gradient} if plan.platform == "cpu" else {}
    return Context(
        dtype=plan.compute_dtype,
        attend=attention.make_attend(plan.attention, tensor_index=tensor_index),
        experts=make_experts(grouped_dot),
        dot=with_weights(_DOTS[plan.dot], reduction.make_sum(layout), plan.gradient_barrier),
        token_loss=losses.make_token_loss(vocabulary_axis, plan.loss_chunk, **own),
        token_logps=token_logps.make_token_logps(vocabulary_axis, plan.loss_chunk, **own),
        platform=plan.platform,
        sum=reduction.make_sum(layout),
        **hooks,
    )


_DOTS = {"plain": types.dot, "cpu": cpu.dot, "by_position": tensor.dot_by_position}
"""`StepPlan.dot` -> `Context.dot`."""


def describe_exchange(layout: Layout, plan: StepPlan, seq_len: int) -> list[str]:
    """Return a log line that describes how devices share rows; [] if they do not."""
    used, size = plan.exchange, layout.size(CONTEXT)
    if used is None:
        return []
    groups = f" in groups of {used.inner}" if 1 < used.inner < size else ""
    return [
        f"context attention: {used.exchange} over {size} devices{groups} ({used.reason}); "
        f"{seq_len // size} positions of a row on each"
    ]


def make_forward(model: Model, layout: Layout, plan: StepPlan) -> ForwardPass:
    """Build the forward pass of a model on this layout."""
    return ForwardPass(
        model,
        gather=_make_gather(layout, model, plan),
        run_layers=make_run_layers(model, layout, plan),
        max_row_chunks=plan.max_row_chunks,
    )


def _make_gather(layout: Layout, model: Model, plan: StepPlan) -> Any:
    outer_axes = {name: tree for name, tree in model.axes.items() if name != "layers"}
    specs = layout.gather_specs(outer_axes)
    dtypes = gathered_dtypes(outer_axes, plan.compute_dtype)

    def gather(params: Params) -> Params:
        outer = {name: params[name] for name in outer_axes}
        return {**params, **fsdp.gather(outer, specs, dtypes, reduce_dtype=plan.reduce_dtype)}

    return gather
