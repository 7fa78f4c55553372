"""Run a schedule on the devices: one program for all stages, with a different action on each.

1. The instructions of all stages are constant arrays; each device reads the column of its stage.
2. A `lax.switch` on the instruction runs the action. Its branches may contain collectives over
   other axes, because those groups are within one stage. Idle stages compute nothing.
3. Exchanges come after the switch, because a permute over the pipeline axis needs every stage. A
   stage without a message sends zeros, and its receiver stores them in the spare slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.buffers import Instruction, to_arrays
from jaxdist.core.parallel.pipeline.loop_plan import Loop, plan_loops
from jaxdist.core.parallel.pipeline.schedule import KINDS, Kind, Schedule
from jaxdist.core.types import Array


class State(NamedTuple):
    """The values that a stage carries from tick to tick; the last slot of each buffer is spare.

    `activations` and `cotangents` are [slots + 1, microbatch, seq_shard, d_model], `pending` a list
    of [slots + 1, ...]. `totals` has `layers`, `outer` (float32 gradients) and `sums`.
    """

    activations: Array
    cotangents: Array
    pending: list[Array]
    totals: dict[str, Any]


class Handler(NamedTuple):
    """The function that runs one kind of action, and the names of its outputs.

    Outputs: `entered` (the stage's input, saved for the backward), `up` (sent to the next stage),
    `down` (sent to the previous stage), `kept` (inputs of a deferred weight gradient) and `totals`
    (accumulated gradients and sums).
    """

    do: Callable[[Instruction, State], dict[str, Any]]
    outputs: tuple[str, ...]


def instructions_of(schedule: Schedule) -> Instruction:
    """Return the instructions of this stage, int32 [ticks + 1] each; the last one is idle."""
    (arrays, _), stage = to_arrays(schedule), collectives.group_index(PIPELINE.name)
    return Instruction(*(take(jnp.asarray(array.T), stage) for array in arrays))


def run(
    schedule: Schedule, handlers: dict[Kind, Handler], idle: dict[str, Any], state: State
) -> State:
    """Run this stage's part of a schedule tick by tick, in a few loops (`plan_loops`).

    `idle` contains zeros for outputs that an action does not compute: `entered`, `up` and `down`
    are [microbatch, seq_shard, d_model] in the compute dtype, `kept` is a list of [...].
    """
    instructions = instructions_of(schedule)
    for loop in plan_loops(schedule):

        def one_round(state: State, ticks: Array, loop: Loop = loop) -> tuple[State, None]:
            """Run one round of a loop; `ticks` are its tick indices, int32 [ticks per round]."""
            for position, kinds in enumerate(loop.kinds):
                now = jax.tree.map(lambda column: take(column, ticks[position]), instructions)  # noqa: B023
                outputs = _act(now, state, {kind: handlers[kind] for kind in kinds}, idle)
                state = _exchange(now, state, outputs)
            return state, None

        rounds = jnp.asarray(loop.rounds)
        if len(loop.rounds) == 1:
            state, _ = one_round(state, rounds[0])
        else:
            state, _ = lax.scan(one_round, state, rounds)
    return state


def _act(
    now: Instruction, state: State, handlers: dict[Kind, Handler], idle: dict[str, Any]
) -> dict[str, Any]:
    """Run the action of this stage, if any; outputs [microbatch, seq_shard, d_model], see `run`."""
    names = {name for handler in handlers.values() for name in handler.outputs}
    nothing = {name: {**idle, "totals": state.totals}[name] for name in names}
    branches = [lambda: nothing]
    # Index of an action kind -> index of its branch in the switch of this tick.
    branch_of = np.zeros(len(KINDS) + 1, np.int32)
    for number, kind in enumerate(KINDS, start=1):
        if kind in handlers:
            branch_of[number] = len(branches)
            do = jax.named_scope(f"pipeline_{kind}")(handlers[kind].do)
            branches.append(partial(_filled, nothing, do, now, state))
    return lax.switch(take(jnp.asarray(branch_of), now.branch), branches)


def _filled(
    nothing: dict[str, Any],
    do: Callable[[Instruction, State], dict[str, Any]],
    now: Instruction,
    state: State,
) -> dict[str, Any]:
    """Return the outputs of an action; outputs that it does not compute are zeros [*dims]."""
    return {**nothing, **do(now, state)}


def _exchange(now: Instruction, state: State, outputs: dict[str, Any]) -> State:
    """Exchange the outputs of a tick between stages; store saved and received values.

    Outputs are [microbatch, seq_shard, d_model]. A received value may overwrite a slot just read.
    """
    activations, cotangents, pending = state.activations, state.cotangents, state.pending
    if "up" in outputs:
        entered = now.branch == _BRANCH["forward"]
        activations = _store(activations, outputs["entered"], now.activation, entered)
        arrived = collectives.permute(outputs["up"], PIPELINE.name, 1)
        activations = _store(activations, arrived, now.activation_arrival)
    if "down" in outputs:
        arrived = collectives.permute(outputs["down"], PIPELINE.name, -1)
        cotangents = _store(cotangents, arrived, now.cotangent_arrival)
    if "kept" in outputs:
        # If written inside the branch, XLA:GPU would allocate each of these large buffers twice.
        kept = now.branch == _BRANCH["backward"]
        pending = [
            _store(buffer, x, now.pending, kept)
            for buffer, x in zip(pending, outputs["kept"], strict=True)
        ]
    return State(activations, cotangents, pending, outputs.get("totals", state.totals))


_BRANCH = {kind: 1 + KINDS.index(kind) for kind in KINDS}


def _store(buffer: Array, x: Array, slot: Array, really: Array | bool = True) -> Array:
    """Write x to a slot of [slots + 1, ...], or to the spare slot: `lax.cond` would copy it all."""
    slot = jnp.where(really, slot, buffer.shape[0] - 1)
    return lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)


def take(x: Array, index: Array) -> Array:
    """Return `x[index]` of x [n, ...]; the index is an int32 scalar."""
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
