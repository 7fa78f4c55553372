"""The engine of a pipeline: a table run tick by tick, each stage doing its own action.

It knows nothing of models: an action is a function of the stage's row of the tables and its
buffers, and yields what is to be sent, kept or added up.
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
from jaxdist.core.parallel.pipeline.buffers import tabulate
from jaxdist.core.parallel.pipeline.loop_plan import Phase, phases
from jaxdist.core.parallel.pipeline.schedule import KINDS, Kind, Schedule
from jaxdist.core.types import Array


class Row(NamedTuple):
    """This stage's entry of the tables in one tick; int32 scalars (see `slots.Tables`)."""

    branch: Array
    microbatch: Array
    chunk: Array
    activation: Array
    cotangent: Array
    pending: Array
    activation_arrival: Array
    cotangent_arrival: Array


class State(NamedTuple):
    """What a stage carries from tick to tick; each buffer has a spare slot at its end.

    Attributes:
        activations: [slots + 1, microbatch, seq_shard, d_model] inputs of pieces.
        cotangents: the same of gradients of their outputs.
        pending: list of [slots + 1, ...], what weight gradients put off need.
        totals: `layers`, `outer` (gradients so far) and `sums`.
    """

    activations: Array
    cotangents: Array
    pending: list[Array]
    totals: dict[str, Any]


class Action(NamedTuple):
    """What a stage does for one kind of action, and the names of what that yields."""

    do: Callable[[Row, State], dict[str, Any]]
    yields: tuple[str, ...]


def rows_of(schedule: Schedule) -> Row:
    """This stage's column of the tables, each [ticks]."""
    tables, stage = tabulate(schedule), collectives.group_index(PIPELINE.name)
    return Row(*(take(jnp.asarray(getattr(tables, name).T), stage) for name in Row._fields))


def run(
    schedule: Schedule, actions: dict[Kind, Action], idle: dict[str, Any], state: State
) -> State:
    """Run this stage's table tick by tick, in the fewest loops (`phases.phases`).

    Args:
        schedule: the table.
        actions: by kind. They may yield `entered` (an embedded input to keep), `up` (sent to the
            next stage), `down` (sent to the one before), `kept` (for a weight gradient put off) and
            `totals`.
        idle: what each of these is where an action does not yield it; `totals` stay as they are.
        state: the first state.
    """
    rows = rows_of(schedule)
    for phase in phases(schedule):

        def one_round(state: State, ticks: Array, phase: Phase = phase) -> tuple[State, None]:
            for place, kinds in enumerate(phase.kinds):
                row = jax.tree.map(lambda column: take(column, ticks[place]), rows)  # noqa: B023
                out = _act(row, state, {kind: actions[kind] for kind in kinds}, idle)
                state = _exchange(row, state, out)
            return state, None

        rounds = jnp.asarray(phase.rounds)
        if len(phase.rounds) == 1:
            state, _ = one_round(state, rounds[0])
        else:
            state, _ = lax.scan(one_round, state, rounds)
    return state


def _act(
    row: Row, state: State, actions: dict[Kind, Action], idle: dict[str, Any]
) -> dict[str, Any]:
    """Do this stage's action of the tick, one of a few that the tick may hold, or none."""
    names = {name for action in actions.values() for name in action.yields}
    nothing = {name: {**idle, "totals": state.totals}[name] for name in names}
    branches = [lambda: nothing]
    place = np.zeros(len(KINDS) + 1, np.int32)
    for number, kind in enumerate(KINDS, start=1):
        if kind in actions:
            place[number] = len(branches)
            do = jax.named_scope(f"pipeline_{kind}")(actions[kind].do)
            branches.append(partial(_with, nothing, do, row, state))
    return lax.switch(take(jnp.asarray(place), row.branch), branches)


def _with(
    nothing: dict[str, Any],
    do: Callable[[Row, State], dict[str, Any]],
    row: Row,
    state: State,
) -> dict[str, Any]:
    return {**nothing, **do(row, state)}


def _exchange(row: Row, state: State, out: dict[str, Any]) -> State:
    """Send what a tick made around the ring and store what it made and what arrives."""
    activations, cotangents, pending = state.activations, state.cotangents, state.pending
    if "up" in out:
        entered = row.branch == _BRANCH["forward"]
        activations = _put(activations, out["entered"], row.activation, entered)
        arrived = collectives.permute(out["up"], PIPELINE.name, 1)
        activations = _put(activations, arrived, row.activation_arrival)
    if "down" in out:
        arrived = collectives.permute(out["down"], PIPELINE.name, -1)
        cotangents = _put(cotangents, arrived, row.cotangent_arrival)
    if "kept" in out:
        # Written inside the branch, XLA:GPU would hold each of these large buffers twice.
        kept = row.branch == _BRANCH["backward"]
        pending = [_put(b, x, row.pending, kept) for b, x in zip(pending, out["kept"], strict=True)]
    return State(activations, cotangents, pending, out.get("totals", state.totals))


_BRANCH = {kind: 1 + KINDS.index(kind) for kind in KINDS}


def _put(buffer: Array, x: Array, slot: Array, really: Array | bool = True) -> Array:
    """Store x in a slot of a buffer, or in the spare slot at its end."""
    slot = jnp.where(really, slot, buffer.shape[0] - 1)
    return lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)


def take(x: Array, index: Array) -> Array:
    """`x[index]` along the first dim."""
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
