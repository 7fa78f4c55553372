"""Pipeline evaluation: forward actions only; each stage sends its output to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.forward import ForwardPass
from jaxdist.core.parallel import tensor
from jaxdist.core.parallel.pipeline.buffers import Instruction, to_arrays
from jaxdist.core.parallel.pipeline.executor import (
    State,
    if_active,
    instructions_of,
    run,
    take,
)
from jaxdist.core.parallel.pipeline.layerwise_backward import over_layers
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.stage import Stage, make_stage, zeros
from jaxdist.core.sharding import Layout
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import Array, Batch, Context, Params, Sums, add_sums
from jaxdist.core.weights import merged


def make_pipeline_evaluate(
    forward: ForwardPass,
    layout: Layout,
    plan: StepPlan,
    make_schedule: Callable[[int], Schedule],
    layer: Callable[..., tuple[Array, Sums]],
) -> Callable[[Params, Batch, Context], Sums]:
    """Make the pipelined evaluation, for use inside the manual step.

    `make_schedule` maps the number of rows of a replica to a forward-only schedule. `layer` is that
    of training. The returned function computes the `Sums` of the replica's batch [rows, ...], on
    the stages that run the layers and the head.
    """

    def evaluate(params: Params, batch: Batch, context: Context) -> Sums:
        schedule = make_schedule(jax.tree.leaves(batch)[0].shape[0])
        return _run(make_stage(forward, layout, plan, schedule, params, batch, context), layer)

    return evaluate


def _run(stage: Stage, layer: Callable[..., tuple[Array, Sums]]) -> Sums:
    """Run a forward schedule on one stage; return this stage's `Sums` [*dims]."""
    schedule = stage.schedule
    example = jax.tree.map(lambda column: column[0], instructions_of(schedule))
    x_kind = jax.eval_shape(stage.embed, stage.outer, example)
    zero_x = collectives.zeros_like(x_kind)

    def run_layers(x: Array, now: Instruction) -> tuple[Array, Sums]:
        """Run the virtual stage on x [rows, seq_shard, d_model]; return (x, sums)."""
        layers, block = stage.layers_of(now), stage.forward.block

        def one(x: Array, _: Any, weights: Params, others: Any) -> tuple[Array, None, Sums]:
            (index, fixed), aux = others
            x, sums = layer(block, merged(weights, fixed), x, index, aux, stage.context)
            return x, None, sums

        x, _, sums = over_layers(layers, one, lambda *_: None, x, None)
        return x, tensor.add_layers(sums)

    def forward(now: Instruction, state: State) -> tuple[Array, State]:
        """Return a virtual stage's output [microbatch, seq_shard, d_model], and the new state."""
        x = stage.input(now, take(state.activations, now.activation))
        y, sums = run_layers(x, now)
        total = add_sums(state.sums, if_active(now, sums))
        total = lax.cond(
            stage.is_last(now),
            lambda: add_sums(total, stage.head(stage.outer, y, now)),
            lambda: total,
        )
        return y, state._replace(sums=total)

    _, sum_kinds = jax.eval_shape(lambda: run_layers(zero_x, example))
    sum_kinds |= jax.eval_shape(lambda: stage.head(stage.outer, zero_x, example))
    state = State(activations=zeros(x_kind, to_arrays(schedule)[1][0] + 1), sums=zeros(sum_kinds))
    return run(schedule, {"forward": forward}, state).sums
