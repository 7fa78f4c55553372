"""The manual part of the step: local sums and gradients, and their sums over the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import spec_over
from jaxdist.core.collective_order import in_order
from jaxdist.core.forward import ForwardPass
from jaxdist.core.parallel import data, reduction
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline import evaluate as pipeline_evaluate
from jaxdist.core.parallel.pipeline import value_and_grad as pipeline_train
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.schedules import forward_only
from jaxdist.core.sharding import Layout
from jaxdist.core.step import statistics
from jaxdist.core.step.layer_scan import make_layer, remat_policy
from jaxdist.core.step.model_context import make_forward
from jaxdist.core.step.omitted_sums import check_equal, definition_of, explain_types
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import (
    BATCH_STATISTICS,
    TRAINED,
    Array,
    Batch,
    Context,
    Model,
    Params,
    Sums,
    rows_per_example,
    trained_loss,
)
from jaxdist.core.weights import merged, trained


def make_value_and_grad(
    model: Model,
    layout: Layout,
    plan: StepPlan,
    context: Context,
) -> Callable[..., tuple[Sums, Params, Array]]:
    """Make the differentiated part of a step, as a function of global arrays.

    Frozen parameters have gradient None. Running averages and parameters with update="increment"
    have the batch's statistic and the increment in its place (`step/statistics.py`).

    Returns (params, batch [rows, ...], key, loss scale float32 []) -> (global sums, gradients,
    global norm). Gradients are of `trained_loss` / weight, float32, sharded like the moments.
    """
    param_specs, trained_axes = layout.param_specs(model.axes), trained(model.axes, model.axes)
    micro_specs = layout.gradient_specs(trained_axes)
    grad_specs = layout.moment_specs(trained_axes)
    axes = layout.summed_axes
    if layout.size(PIPELINE) > 1:
        value_and_grad = _make_pipeline(model, layout, plan)
    else:
        forward = make_forward(model, layout, plan)
        value_and_grad = _make_accumulation(forward, layout, plan.accumulation)
    step_sums = _make_step_sums(model, layout, plan, context)

    def local(params: Params, batch: Batch, key: Array, scale: Array, totals: Sums) -> Any:
        """Return (global sums, this device's gradients, global norm) of its batch [rows, ...]."""
        batch = data.number_rows(batch, layout.batch_axes)
        num_rows = batch["rows"].shape[0]
        batch |= {name: jnp.broadcast_to(x, (num_rows, *x.shape)) for name, x in totals.items()}
        local_params = collectives.vary(params, axes)
        step_context = dataclasses.replace(context, dropout_key=key)
        sums, grads = value_and_grad(local_params, batch, step_context, scale)
        batch_stats = jax.tree.map(lambda x: x / plan.accumulation, sums.pop(BATCH_STATISTICS, {}))
        sums = _sum_over_devices(sums, model, layout)
        grads = reduction.reduce_gradients(grads, micro_specs, grad_specs, axes)
        inverse = 1.0 / (divisor(sums["weight"]) * scale)
        grads = jax.tree.map(lambda g: g * inverse, grads)
        norm = jnp.sqrt(reduction.squared_norm(grads, grad_specs, layout.manual_axes))
        return sums, statistics.insert(trained_axes, grads, batch_stats, "statistic"), norm

    specs = (param_specs, layout.batch_specs, P(), P(), P()), (P(), grad_specs, P())
    compute = _manual(local, model, layout, plan, *specs)

    def value_and_grad_of(params: Params, batch: Batch, key: Array, scale: Array) -> Any:
        totals = step_sums(params, batch, key)
        sums, grads, norm = compute(params, batch, key, scale, totals)
        return sums, statistics.insert_increments(model, grads, sums, plan.layers.order), norm

    return value_and_grad_of


def needs_step_sums(model: Model, layout: Layout, plan: StepPlan) -> bool:
    """Return True if a step starts with a forward pass that computes `Model.step_sums`."""
    return bool(model.step_sums) and (plan.accumulation > 1 or layout.size(PIPELINE) > 1)


def _make_step_sums(
    model: Model, layout: Layout, plan: StepPlan, context: Context
) -> Callable[[Params, Batch, Array], Sums]:
    """Make (params, batch [rows, ...], key) -> `Model.step_sums`, [num_layers, ...], if needed."""
    block = model.block
    if block is None or not needs_step_sums(model, layout, plan):
        return lambda params, batch, key: {}

    @functools.wraps(block)
    def summing(*arguments: Any) -> tuple[Array, Sums]:
        y, sums = block(*arguments)
        return y, {name: sums[name] for name in model.step_sums}

    summed = dataclasses.replace(
        model,
        block=summing,
        head=lambda params, x, batch, context: (None, {}),
        objective=lambda output, batch, context: {},
    )
    return make_evaluate(summed, layout, plan, context, plan.accumulation, trains=True)


def _make_pipeline(
    model: Model, layout: Layout, plan: StepPlan
) -> Callable[[Params, Batch, Context, Array], tuple[Sums, Params]]:
    """Make the pipelined version of `_make_accumulation`, for this replica's batch [rows, ...]."""
    return pipeline_train.make_pipeline_value_and_grad(
        make_forward(model, layout, plan),
        layout,
        plan,
        lambda rows: plan.pipeline.make_schedule(
            num_stages=layout.size(PIPELINE),
            rows=rows,
            num_microbatches=plan.num_microbatches,
            rows_per_example=rows_per_example(model.objective),
        ),
        make_layer(model, layout, plan),
        None if plan.remat == "none" else remat_policy(plan.remat),
    )


def _make_accumulation(
    forward: ForwardPass, layout: Layout, num_microbatches: int
) -> Callable[[Params, Batch, Context, Array], tuple[Sums, Params]]:
    """Make the sums and local gradients, one microbatch [rows / num_microbatches, ...] at a time.

    Returns (local params, rows, context, loss scale) -> (this device's sums, local gradients).
    Gradients are float32, of the scaled objective, laid out as `Layout.gradient_specs`.
    """
    trained_axes = trained(forward.model.axes, forward.model.axes)
    param_specs = layout.param_specs(trained_axes)
    micro_specs = layout.gradient_specs(trained_axes)
    axes = layout.summed_axes

    def value_and_grad(
        params: Params, batch: Batch, context: Context, scale: Array
    ) -> tuple[Sums, Params]:
        """Return (sums, local gradients) of a device's batch [rows, ...]; scale is float32 []."""

        def scaled_loss(moving: Params, micro: Batch) -> tuple[Array, Sums]:
            whole = merged(moving, params)
            sums = forward.loss(whole, micro, context)
            return trained_loss(_each_once(sums)) * scale, sums

        def microbatch(micro: Batch) -> tuple[Sums, Params]:
            moving = trained(params, forward.model.axes)
            grads, sums = jax.grad(scaled_loss, has_aux=True)(moving, micro)
            # ZeRO-2 reduce-scatters after each microbatch; others are reduced once per step.
            return sums, reduction.scatter_gradients(grads, param_specs, micro_specs, axes)

        return _accumulate(microbatch, batch, num_microbatches)

    return value_and_grad


def _each_once(sums: Sums) -> Sums:
    """Return the terms of the trained loss, float32 [], which devices that share rows may add up.

    Next to a term that differs on these devices, each of them contributes its part of an equal one.
    """
    terms = {name: sums[name] for name in TRAINED if name in sums}
    differs = {name: CONTEXT.name in collectives.varying_axes(x) for name, x in terms.items()}
    if not any(differs.values()):
        return terms
    part = lambda x: collectives.vary(x, CONTEXT.name) / collectives.group_size(CONTEXT.name)
    return {name: x if differs[name] else part(x) for name, x in terms.items()}


def _sum_over_devices(sums: Sums, model: Model, layout: Layout) -> Sums:
    axes = layout.loss_axes
    for name, value in sums.items():
        source = f"the sum {name!r} leaves {definition_of(model)}"
        check_equal(value, {*axes}, source)
    if not axes:
        return sums

    def total(value: Array) -> Array:
        # Values equal over the context axis come from sums of complete rows; count them once.
        equal = {CONTEXT.name} - collectives.varying_axes(value)
        over = tuple(axis for axis in axes if axis not in equal)
        return collectives.all_reduce(collectives.vary(value, over), over) if over else value

    return {name: total(value) for name, value in sums.items()}


def make_evaluate(
    model: Model,
    layout: Layout,
    plan: StepPlan,
    context: Context,
    num_microbatches: int = 1,
    is_sharded: bool = False,
    *,
    trains: bool = False,
) -> Callable[..., Sums]:
    """Make (params, batch [rows, ...]) -> sums over the global batch; no dropout.

    Without pipeline stages, `num_microbatches` pass one after the other. With `is_sharded`, only
    sums [rows, seq, ...] of this device's rows are returned, added over microbatches and stages and
    sharded like the batch. With `trains`, the third argument is the key for dropout.
    """
    num_stages, stages = layout.size(PIPELINE), plan.pipeline
    forward = make_forward(model, layout, plan)
    if num_stages > 1:
        evaluate = pipeline_evaluate.make_pipeline_evaluate(
            forward,
            layout,
            plan,
            lambda rows: forward_only(
                num_stages,
                stages.choose_microbatches(num_stages, rows, rows_per_example(model.objective)),
                stages.num_virtual_stages,
            ),
            make_layer(model, layout, plan),
        )
    else:

        def evaluate(params: Params, batch: Batch, context: Context) -> Sums:
            microbatch = lambda micro: forward.loss(params, micro, context)
            return _accumulate(microbatch, batch, num_microbatches)

    def local(params: Params, batch: Batch, key: Array | None = None) -> Sums:
        """Return the sums of `make_evaluate` from this device's batch [rows, ...]."""
        batch = data.number_rows(batch, layout.batch_axes)
        used = dataclasses.replace(context, dropout_key=key)
        sums = evaluate(params, batch, used)
        if not is_sharded:
            return _sum_over_devices(sums, model, layout)
        sums = {name: x for name, x in sums.items() if x.ndim > 1}  # without those of the layers
        if num_stages == 1:
            return sums
        total = lambda x: collectives.all_reduce(collectives.vary(x, PIPELINE.name), PIPELINE.name)
        return {name: total(value) for name, value in sums.items()}

    specs = layout.param_specs(model.axes), layout.batch_specs, *[P()] * trains
    return _manual(local, model, layout, plan, specs, layout.batch_spec() if is_sharded else P())


def _accumulate(microbatch: Callable[[Batch], Any], batch: Batch, num_microbatches: int) -> Any:
    if num_microbatches == 1:
        return microbatch(batch)
    parts = data.split_microbatches(batch, num_microbatches)

    def add(total: Any, micro: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, microbatch(micro)), None

    kinds = jax.eval_shape(microbatch, jax.tree.map(lambda x: x[0], parts))
    total, _ = lax.scan(add, jax.tree.map(collectives.zeros_like, kinds), parts)
    return total


def _manual(
    function: Any, model: Model, layout: Layout, plan: StepPlan, in_specs: Any, out_specs: Any
) -> Any:
    """Wrap `function` in `shard_map`; an argument's spec may be a function of the argument."""
    if plan.orders_collectives:
        function = in_order(function, hidden=layout.auto_tensor)

    def over_devices(*arguments: Any) -> Any:
        pairs = zip(in_specs, arguments, strict=True)
        specs = tuple(specs(x) if callable(specs) else specs for specs, x in pairs), out_specs
        if layout.auto_tensor:
            manual = lambda spec: spec_over(spec, layout.manual_axes)
            specs = jax.tree.map(manual, specs)
        with explain_types(model, layout.manual_axes):
            return jax.shard_map(
                function,
                mesh=layout.mesh,
                axis_names=set(layout.manual_axes),
                in_specs=specs[0],
                out_specs=specs[1],
            )(*arguments)

    return over_devices


def divisor(weight: Array) -> Array:
    """Return the global weight, float32 [], to divide by; 1 for 0, against NaN gradients."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))
