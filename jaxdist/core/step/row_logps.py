"""Values of complete rows or tokens, computed without gradients, e.g. for `Objective.prepare`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxdist.core import collectives
from jaxdist.core.collective_order import PASS, after
from jaxdist.core.sharding import Layout
from jaxdist.core.step.gradients import make_evaluate
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import (
    ROW_SHARE,
    Array,
    Batch,
    Context,
    Model,
    Objective,
    Params,
    Sums,
    TokenHead,
    rows_per_example,
)
from jaxdist.core.weights import base_of

ROW_SUMS = ("row_loss", "row_weight")
"""Sums that have one element for each row of the global batch."""


def row_logps(output: TokenHead, batch: Batch, context: Context) -> Array:
    """Return the log-probability of each row's learned targets, float32 [batch]."""
    logps = context.token_logps(output, batch["targets"]).logps
    return context.sum(jnp.sum(jnp.where(batch["weights"] > 0, logps, 0.0), axis=1), "seq")


def make_row_values(
    model: Model,
    layout: Layout,
    plan: StepPlan,
    context: Context,
    values_of: Callable[..., dict[str, Array]],
) -> Callable[..., dict[str, Array]]:
    """Make (params, batch, adapters=True) -> name -> values of each row, float32 [rows, ...].

    `values_of` maps (output of the head, this device's rows, context) to name -> float32
    [batch, ...], the same on devices that split the positions of rows. Rows are those of the global
    batch. With `adapters=False`, the model without adapters computes them. There is no dropout.
    """

    def compute(params: Params, batch: Batch, *, adapters: bool = True) -> dict[str, Array]:
        """Return the values of a global batch, float32 [rows, ...] each."""
        num_rows = batch["weights"].shape[0]

        def objective(output: TokenHead, rows: Batch, context: Context) -> Sums:
            values = values_of(output, rows, context)
            return {name: _at_rows(own, rows["rows"], num_rows) for name, own in values.items()}

        used = dataclasses.replace(_without_sums(model), objective=objective)
        if not adapters:
            params, used = base_of(params), dataclasses.replace(used, axes=base_of(model.axes))
        return make_evaluate(used, layout, plan, context, plan.accumulation)(params, batch)

    return compute


def _without_sums(model: Model) -> Model:
    """Return a model whose blocks sum nothing: sums over devices would run beside the next pass."""
    block = model.block
    if block is None:
        return model

    @functools.wraps(block)
    def run(*arguments: Any) -> tuple[Any, Sums]:
        return block(*arguments)[0], {}

    return dataclasses.replace(model, block=run)


def with_row_losses(objective: Objective, num_rows: int) -> Objective:
    """Return an objective whose sums also have `ROW_SUMS` [num_rows], if it calls `token_loss`."""

    def with_rows(output: TokenHead, batch: Batch, context: Context) -> Sums:
        own: dict[str, Array] = {}

        def token_loss(*arguments: Any) -> Sums:
            sums = context.token_loss(*arguments, by_row=True)
            own.update({name: sums.pop(name) for name in ROW_SUMS})
            return sums

        sums = dict(objective(output, batch, dataclasses.replace(context, token_loss=token_loss)))
        for name, value in own.items():
            sums[name] = _at_rows(context.sum(value, "seq"), batch["rows"], num_rows)
        return sums

    return with_rows


def _at_rows(own: Array, rows: Array, num_rows: int) -> Array:
    """Return values [batch, ...] at these `rows` among zeros, [num_rows, ...]."""
    zeros = jnp.zeros((num_rows, *own.shape[1:]), own.dtype)
    return collectives.vary(zeros, tuple(collectives.varying_axes(own))).at[rows].set(own)


def make_token_values(
    model: Model,
    layout: Layout,
    plan: StepPlan,
    context: Context,
    values_of: Callable[..., dict[str, Array]],
) -> Callable[[Params, Batch], dict[str, Array]]:
    """Make (params, batch) -> name -> values of each token [rows, seq, ...], sharded as the batch.

    `values_of` is as in `make_row_values`, but returns [batch, seq, ...], equal over `tensor`.
    """

    def compute(params: Params, batch: Batch) -> dict[str, Array]:
        """Return the values of a global batch, [rows, seq, ...] each."""
        num_rows = batch["tokens"].shape[0] // layout.num_replicas

        def objective(output: TokenHead, rows: Batch, context: Context) -> Sums:
            axes = layout.batch_axes
            index = rows["rows"] - (collectives.group_index(axes) * num_rows if axes else 0)
            values = values_of(output, rows, context)
            return {name: _at_rows(own, index, num_rows) for name, own in values.items()}

        used = dataclasses.replace(model, objective=objective)
        count = math.gcd(num_rows, plan.accumulation)
        run = make_evaluate(used, layout, plan, context, count, is_sharded=True)
        return run(params, batch)

    return compute


def make_row_logps(
    model: Model, layout: Layout, plan: StepPlan, context: Context
) -> Callable[..., Array]:
    """Make (params, batch, adapters=True) -> `row_logps` of the global batch, float32 [rows]."""
    values_of = lambda *arguments: {"row_logps": row_logps(*arguments)}
    compute = make_row_values(model, layout, plan, context, values_of)
    return lambda params, batch, **options: compute(params, batch, **options)["row_logps"]


def make_prepare(
    model: Model, layout: Layout, plan: StepPlan, context: Context
) -> Callable[[Params, Batch], Batch]:
    """Make (params, batch) -> the batch with fields of its objective (`ROW_SHARE`, `prepare`)."""
    prepare = getattr(model.objective, "prepare", None)
    size = rows_per_example(model.objective)
    counts_rows = size > 1 or getattr(model.objective, "unit", "") == "examples"

    def with_share(batch: Batch) -> Batch:
        if not counts_rows:
            return batch
        return {**batch, ROW_SHARE: jnp.full(batch["weights"].shape[0], 1.0 / size)}

    if prepare is None:
        return lambda params, batch: with_share(batch)
    logps = make_row_logps(model, layout, plan, context)

    def with_fields(params: Params, batch: Batch) -> Batch:
        earlier: dict[str, Array] = {}

        def run(rows: Batch, *, adapters: bool = True) -> Array:
            values = logps(params, {**rows, **earlier}, adapters=adapters)
            if plan.orders_collectives:
                earlier[PASS] = values
            return values

        prepared = prepare(batch, run)
        for name in earlier:
            # Minus 1: XLA knows that a maximum with 0 is not negative, and would not wait for it.
            added = [x - 1 for field, x in prepared.items() if field not in batch]
            prepared = {**prepared, name: after(earlier[name], added)}
        return with_share(prepared)

    return with_fields
