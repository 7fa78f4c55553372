"""Build the `Context` and the `ForwardPass` of a model inside the step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdist.core import attention, experts, losses, token_logps, types
from jaxdist.core.forward import ForwardPass
from jaxdist.core.matmul import cpu, grouped
from jaxdist.core.parallel import fsdp, reduction, tensor
from jaxdist.core.parallel.context import CONTEXT, imbalance
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.step.layer_scan import make_run_layers
from jaxdist.core.step_plan import StepPlan, exchange_of
from jaxdist.core.types import Context, Model, Params
from jaxdist.core.weights import gathered_dtypes, with_weights
from jaxdist.runtime.formatting.numbers import percent
from jaxdist.settings import ConfigError

_IMBALANCE = 0.05  # the log suggests another exchange above this load imbalance
_BETTER = 0.8  # suggest only exchanges with less than this share of the imbalance


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


def describe_exchange(
    model: Model,
    layout: Layout,
    plan: StepPlan,
    seq_len: int,
    *,
    windows: tuple[int, ...] = (0,),
    position_ids: np.ndarray | None = None,
    rows: int = 1,
) -> list[str]:
    """Return log lines that describe how devices share rows; [] if they do not.

    `windows` are the attention windows of the layers, 0 = no window. `position_ids`, int
    [num_rows, seq_len], are positions inside documents of a sample; a microbatch has `rows` rows.
    """
    used, size = plan.exchange, layout.size(CONTEXT)
    if used is None:
        return []
    groups = f" in groups of {used.inner}" if 1 < used.inner < size else ""
    # If layers have different windows, use the largest imbalance.
    imbalance_of = lambda inner: max(
        imbalance(size, seq_len, window, position_ids, inner, rows) for window in windows
    )
    load = percent(imbalance_of(used.inner))
    if plan.packed:
        of = "if a row were one document"
        if position_ids is not None:
            of = f"mean of {len(position_ids)} rows"
        load += f" ({of})"
    load += _suggest_balanced_exchange(model, layout, plan, imbalance_of)
    return [
        f"context attention: {used.exchange} over {size} devices{groups} ({used.reason}); "
        f"{seq_len // size} positions of a row on each, load imbalance {load}"
    ]


def _suggest_balanced_exchange(
    model: Model, layout: Layout, plan: StepPlan, imbalance_of: Callable[[int], float]
) -> str:
    """Return a hint to an exchange with better load balance; "" if the load is balanced."""
    assert plan.exchange is not None
    if (now := imbalance_of(plan.exchange.inner)) <= _IMBALANCE:
        return ""
    others = {}
    for name in ("all_to_all", "hybrid"):
        with contextlib.suppress(ConfigError):
            other = dataclasses.replace(layout, context_attention=name)
            exchange = exchange_of(model, other, plan.device.per_node, packed=plan.packed)
            assert exchange is not None
            others[name] = imbalance_of(exchange.inner)
    named = [
        f"{name} ({percent(share)})" for name, share in others.items() if share < _BETTER * now
    ]
    if named:
        return f"; --mesh.context-attention {' or '.join(named)} would balance it better"
    return "; a cp that divides the query and key/value heads allows all_to_all, which is balanced"


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
