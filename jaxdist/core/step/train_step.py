"""The compiled functions of a run: train and evaluate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdist.core.collective_order import ready_token, wait_for
from jaxdist.core.precision import initial_loss_scale, update_loss_scale
from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState, abstract_state, state_shardings
from jaxdist.core.step import layer_statistics, statistics
from jaxdist.core.step.compiler_options import CompilerOption, choose_options
from jaxdist.core.step.gradients import divisor, make_evaluate, make_value_and_grad
from jaxdist.core.step.grouped_update import Decision, GroupedTrain, Store
from jaxdist.core.step.model_context import make_context
from jaxdist.core.step.row_logps import ROW_SUMS, make_prepare, with_row_losses
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import (
    LAYER_SUM,
    Array,
    Batch,
    Context,
    Model,
    Objective,
    Params,
    Sums,
    trained_loss,
)
from jaxdist.core.weights import merged, trained

Metrics = dict[str, Any]
"""Scalars by name, among them `applied` (bool). With `Reports`, `ROW_SUMS` float32 [rows] and
`layer_statistics`. `layer_sums`, if any, are global sums of layers, float32 [num_layers, ...]."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The compiled functions of a run.

    Attributes:
        train: (state, batch, limit) -> (state, metrics); jitted, or a `GroupedTrain`; `state` is
            donated. The update is skipped (metric `applied` False) if the loss exceeds `limit`
            (float32 [], inf = none), loss or gradients are not finite, or the global weight is 0.
        evaluate: (params, batch) -> Sums over the global batch; jitted.
        context: execution context of the model (kernels, dtypes), for logs.
        options: compiler options of `train`, for logs; none on CPUs.
        batch_sharding: sharding of the leaves of a batch; it splits rows, and with a context
            axis also positions, in the order of `place_batch` (`core/parallel/context.py`).
    """

    train: Any
    evaluate: Any
    context: Context
    options: tuple[CompilerOption, ...]
    batch_sharding: Any


class Optimizer(NamedTuple):
    """The optimizer: `rule` returns the update before multiplication by the learning rate.

    `copies`: name of a parameter group (`core.weights.GROUPS`) -> its decay per step, 1 = frozen.
    `store` has the optimizer moments if they are in host memory or on a disk.
    """

    rule: optax.GradientTransformation
    schedule: Callable[[Array], Array]
    max_grad_norm: float = 0.0
    copies: Mapping[str, float] = {}
    store: Store | None = None


class Reports(NamedTuple):
    """Metrics of a step beyond loss and gradient norm.

    Attributes:
        layer_statistics_steps: interval at which `layer_statistics` are complete; 0 = no metric.
        num_row_losses: rows of a batch if the metrics have `ROW_SUMS`, else 0.
    """

    layer_statistics_steps: int = 0
    num_row_losses: int = 0


def make_step(
    model: Model,
    objective: Objective,
    optimizer: Optimizer,
    layout: Layout,
    plan: StepPlan,
    reports: Reports = Reports(),  # noqa: B008 - immutable
) -> Step:
    """Build the functions of a step; each one is compiled at its first call."""
    model = dataclasses.replace(model, objective=objective)
    context = make_context(model, layout, plan)
    rule = optimizer.rule
    kept: dict[str, Any] = dict(
        loss_scale=initial_loss_scale(plan.compute_dtype),
        offload=optimizer.store is not None,
        copies=tuple(optimizer.copies),
    )
    shardings = state_shardings(model, rule, layout, **kept)
    measure = layer_statistics.make_measure(
        model,
        lambda measured: make_evaluate(measured, layout, plan, context, plan.accumulation),
        plan.layers.positions,
        reports.layer_statistics_steps,
    )
    options = choose_options(plan, layout, lambda: abstract_state(model, rule, layout, **kept))
    prepare = make_prepare(model, layout, plan, context)
    trained_model = model
    if reports.num_row_losses:
        counted = with_row_losses(objective, reports.num_row_losses)
        trained_model = dataclasses.replace(model, objective=counted)
    value_and_grad = make_value_and_grad(trained_model, layout, plan, context)
    sums_of = make_evaluate(model, layout, plan, context)

    def evaluate(params: Params, batch: Batch) -> Sums:
        return sums_of(params, prepare(params, batch))

    begin = _make_begin(
        lambda params, batch, *rest: value_and_grad(params, prepare(params, batch), *rest),
        optimizer.schedule,
    )
    update = make_update(model, rule, layout, optimizer.max_grad_norm)
    average = functools.partial(move_copies, decays=optimizer.copies)
    replicated = layout.sharding(P())
    compile_for: dict[str, Any] = dict(
        in_shardings=(shardings, None, replicated),  # leaves of a batch have different shardings
        compiler_options={option.name: option.value for option in options} or None,
    )
    train: Any
    if optimizer.store is not None:
        grads = layout.shardings(layout.moment_specs(trained(model.axes, model.axes)))
        gradients = jax.jit(begin, out_shardings=(grads, *[replicated] * 3), **compile_for)
        in_order = plan.orders_collectives
        train = GroupedTrain(
            optimizer.store, gradients, update, average, model.axes, one_at_a_time=in_order
        )
    else:
        train = _make_train(
            begin,
            update,
            measure if reports.layer_statistics_steps else None,
            average,
            avoid_donation_copies=plan.avoids_donation_copies,
        )
        outputs = (shardings, replicated)
        train = jax.jit(train, donate_argnums=0, out_shardings=outputs, **compile_for)
    batch_sharding = layout.sharding(layout.batch_spec())
    return Step(
        train=train,
        evaluate=jax.jit(
            evaluate,
            in_shardings=(shardings.params, None),
            out_shardings=replicated,
        ),
        context=context,
        options=options,
        batch_sharding=batch_sharding,
    )


def _make_begin(
    gradients: Callable[..., tuple[Sums, Params, Array]], schedule: Callable[[Array], Array]
) -> Callable[[TrainState, Batch, Array], tuple[Params, Decision, dict[str, Any], Metrics]]:
    """Make the part of a step before the update: gradients and the decision to apply it.

    Returns (state, batch [global_batch_size, ...], limit float32 []) -> (gradients, decision, new
    `step` and `loss_scale`, metrics).
    """

    def begin(state: TrainState, batch: Batch, limit: Array) -> Any:
        """Return these four for a batch [global_batch_size, ...]; `limit` is float32 []."""
        scale = state.loss_scale.get("scale", jnp.ones((), jnp.float32))
        key = jax.random.fold_in(state.key, state.step)
        sums, grads, norm = gradients(state.params, batch, key, scale)
        of_layers = {
            name.removeprefix(LAYER_SUM): sums.pop(name)
            for name in tuple(sums)
            if name.startswith(LAYER_SUM)
        }
        learning_rate = schedule(state.step)
        finite = jnp.isfinite(trained_loss(sums)) & jnp.isfinite(norm)
        means = _means(sums)
        labeled = sums["weight"] != 0
        applied = finite & labeled & (means["loss"] <= limit)
        loss_scale = jax.tree.map(
            lambda n, o: jnp.where(labeled, n, o),
            update_loss_scale(state.loss_scale, finite),
            state.loss_scale,
        )
        metrics = means | {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "applied": applied,
            **{f"loss_{name}": value for name, value in state.loss_scale.items()},
        }
        if of_layers:
            metrics["layer_sums"] = of_layers
        decision = Decision(norm, learning_rate, applied)
        return grads, decision, {"step": state.step + 1, "loss_scale": loss_scale}, metrics

    return begin


def _make_train(
    begin: Callable[..., Any],
    update: Callable[..., tuple[Params, Any]],
    measure: Callable[..., Any] | None,
    average: Callable[[dict[str, Params], Params], dict[str, Params]],
    *,
    avoid_donation_copies: bool = False,
) -> Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]:
    """Make a complete step in one program, from the results of `_make_begin` and `make_update`.

    With `avoid_donation_copies`, averages are written first, then parameters, then the optimizer
    state.
    Returns (state, batch [global_batch_size, ...], limit float32 []) -> (state, metrics).
    """

    def train(state: TrainState, batch: Batch, limit: Array) -> tuple[TrainState, Metrics]:
        """Return (new state, metrics) of a batch [global_batch_size, ...]; `limit` float32 []."""
        grads, decision, small, metrics = begin(state, batch, limit)
        norm, learning_rate, applied = decision
        params, opt_state = update(state, grads, norm, learning_rate)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

        def update_after(written: Params, name: str) -> tuple[Params, Any]:
            ready = ready_token(x for x in jax.tree.leaves(written) if x.size)
            waiting = jax.tree.map(lambda x: wait_for(ready, x), getattr(state, name))
            return update(dataclasses.replace(state, **{name: waiting}), grads, norm, learning_rate)

        copies = keep(average(state.copies, params), state.copies)
        if avoid_donation_copies and copies:
            params, _ = update_after(copies, "params")
        params = keep(params, state.params)
        if avoid_donation_copies:
            _, opt_state = update_after(params, "opt_state")
        new_state = dataclasses.replace(
            state,
            params=params,
            opt_state=keep(opt_state, state.opt_state),
            copies=copies,
            **small,
        )
        if measure is not None:
            metrics["layer_statistics"] = measure(state, batch, grads, params, metrics)
        return new_state, metrics

    return train


def make_update(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    max_grad_norm: float,
) -> Callable[..., tuple[Params, Any]]:
    """Make (state, grads, norm, learning rate) -> (params, opt_state) with unchanged layouts.

    Frozen parameters do not change; the optimizer receives None in their place. Moments, gradients
    and the updated slice have one layout: under ZeRO, XLA communicates only the new parameters.
    """
    axes = trained(model.axes, model.axes)
    param_specs, moment_specs = layout.param_specs(axes), layout.moment_specs(axes)
    averages = any(dims.update != "gradient" for dims in jax.tree.leaves(axes))

    def update(
        state: TrainState, gradients_and_stats: Params, norm: Array, learning_rate: Array
    ) -> Any:
        """Return (params, opt_state) from gradients like the parameters; scalars are float32 []."""
        grads = statistics.mask(axes, gradients_and_stats) if averages else gradients_and_stats
        if max_grad_norm:
            factor = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * factor, grads)
        old = trained(state.params, model.axes)
        params = layout.constrain(old, moment_specs)
        # optax promotes float decays to its int32 count, and mixes moments of two dtypes.
        with jax.numpy_dtype_promotion("standard"):
            directions, opt_state = optimizer.update(grads, state.opt_state, params)
        params = jax.tree.map(
            lambda p, d: p - learning_rate * d.astype(p.dtype), params, directions
        )
        params = layout.constrain(layout.constrain(params, moment_specs), param_specs)
        if averages:
            params = statistics.update_running_stats(axes, params, old, gradients_and_stats)
        return merged(params, state.params), opt_state

    return update


def move_copies(
    copies: Mapping[str, Params], params: Params, decays: Mapping[str, float]
) -> dict[str, Params]:
    """Return each group as `decay` × copy + (1 − `decay`) × params [...]."""

    def moved(copy: Params, decay: float) -> Params:
        move = lambda mean, p: None if mean is None else mean + (1.0 - decay) * (p - mean)
        is_none = lambda mean: mean is None
        return copy if decay == 1 else jax.tree.map(move, copy, params, is_leaf=is_none)

    return {name: moved(copy, decays[name]) for name, copy in copies.items()}


def _means(sums: Sums) -> Metrics:
    """Return the global means of sums, except `weight` and `ROW_SUMS` [rows], which stay sums."""
    weight = divisor(sums["weight"])
    named = {"accuracy" if name == "correct" else name: value for name, value in sums.items()}
    kept = ("weight", *ROW_SUMS)
    return {name: x if name in kept else x / weight for name, x in named.items()}
