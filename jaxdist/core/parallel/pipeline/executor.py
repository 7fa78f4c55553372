"""Run a schedule on the devices: one program for all stages, with a different action on each.

1. The instructions of all stages are constant arrays; each device reads the column of its stage.
2. All actions of a tick are of one kind (`plan_loops`), so stages differ only in what they act on.
   On GPUs an idle stage waits for the others anyway, so it runs the action, too, and its results
   are dropped. Simulated devices share cores, so there an idle stage skips its layers, each by a
   branch. Embedding, head and layers that not all stages have are optional everywhere. Branches
   may contain collectives over other axes, because those groups are within one stage.
3. Exchanges come after the action, because a permute over the pipeline axis needs every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.collective_order import after
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.buffers import Instruction, to_arrays
from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule
from jaxdist.core.types import Array

AT_MOST_ONCE = "at_most_once"
"""Scope of the loops of `run_if`, which run once or not at all."""


class State(NamedTuple):
    """The values that a stage carries from tick to tick; see `Lifetimes` for the buffers.

    `activations`, `cotangents` and `outputs` are [slots + 1, microbatch, seq_shard, d_model]; their
    last slot is spare. `residuals` is a list of [slots, layers, size]. `gradients` has `layers` and
    `outer`, float32; `sums` are `Sums`. Evaluation has only `activations` and `sums`.
    """

    activations: Array
    cotangents: Any = ()
    residuals: Any = ()
    outputs: Any = ()
    gradients: Any = ()
    sums: Any = ()


class Message(NamedTuple):
    """A value [microbatch, seq_shard, d_model] to send, and the slot for the received one."""

    value: Array
    slot: Array


Handler: TypeAlias = Callable[[Instruction, State], tuple[Array, State]]
"""Runs an action; returns what it sends, [microbatch, seq_shard, d_model], and the new state.

A forward sends to the next stage, a backward to the previous one; idle ones change no used slot."""


def instructions_of(schedule: Schedule) -> Instruction:
    """Return the instructions of this stage, [ticks] each."""
    (arrays, _), stage = to_arrays(schedule), collectives.group_index(PIPELINE.name)
    return Instruction(*(take(jnp.asarray(array.T), stage) for array in arrays))


def run(schedule: Schedule, handlers: Mapping[Kind, Handler], state: State) -> State:
    """Run this stage's part of a schedule tick by tick in a few loops; return the last state."""
    instructions = instructions_of(schedule)

    def act(
        kind: Kind, tick: Array, state: State, marks: Sequence[Array] = ()
    ) -> tuple[State, Message]:
        """Run tick int32 []; write residuals after the marks [*dims]. Return state and message."""
        now = jax.tree.map(lambda column: take(column, tick), instructions)
        now = now._replace(residual=after(now.residual, marks))
        value, state = jax.named_scope(f"pipeline_{kind}")(handlers[kind])(now, state)
        forward = kind == "forward"
        return state, Message(value, now.activation_arrival if forward else now.cotangent_arrival)

    for loop in plan_loops(schedule):
        ticks = jnp.asarray(loop.rounds)
        if len(loop.kinds) == 1:
            (kind,) = loop.kinds

            def single(state: State, tick: Array, kind: Kind = kind) -> tuple[State, None]:
                return _deliver(kind, *act(kind, tick[0], state)), None

            state, _ = loop_over(ticks, single, state)
            continue

        def pair(carry: tuple[State, Message], ticks: Array) -> tuple[tuple[State, Message], None]:
            """Run a backward and a forward, ticks int32 [2]; each overlaps the other's exchange."""
            state, sent = carry
            state, back = act("backward", ticks[0], state)
            state = _deliver("forward", state, sent)
            # All reads of residuals precede the next writes: otherwise XLA copies the residuals.
            # Not `back.value`: on GPUs, the forward would wait for its tensor collectives.
            marks = jax.tree.leaves(state.gradients)
            state = _deliver("backward", state, back)
            return act("forward", ticks[1], state, marks), None

        spare = jnp.full_like(instructions.activation_arrival[0], state.activations.shape[0] - 1)
        nothing = Message(jnp.zeros_like(state.activations[0]), spare)
        (state, _), _ = loop_over(ticks, pair, (state, nothing))  # no later forward reads the last
    return state


def _deliver(kind: Kind, state: State, message: Message) -> State:
    """Send a value [microbatch, seq_shard, d_model]; return the state with the received one."""
    value, slot = message
    if kind == "forward":
        arrived = collectives.permute(value, PIPELINE.name, 1)
        return state._replace(activations=store(state.activations, arrived, slot))
    arrived = collectives.permute(value, PIPELINE.name, -1)
    return state._replace(cotangents=store(state.cotangents, arrived, slot))


def if_active(now: Instruction, tree: Any) -> Any:
    """Return zeros in place of a tree of arrays [...] if the stage is idle."""
    return jax.tree.map(lambda x: jnp.where(now.is_active, x, jnp.zeros_like(x)), tree)


def run_if(needed: Array, compute: Callable[[Any], Any], value: Any, as_loops: bool) -> Any:
    """Return `compute(value)` if `needed`, bool [], else the tree `value` of arrays [...].

    `as_loops` uses a loop, because XLA copies arrays that a branch of a conditional returns
    unchanged. XLA may move collectives out of a loop, which CPUs cannot order.
    """
    if not as_loops:
        return lax.cond(needed, compute, lambda unchanged: unchanged, value)

    def once(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.zeros_like(carry[0]), compute(carry[1])

    with jax.named_scope(AT_MOST_ONCE):
        return lax.while_loop(lambda carry: carry[0], once, (needed, value))[1]


def loop_over(
    xs: Array, body: Callable[[Any, Array], tuple[Any, Any]], carry: Any
) -> tuple[Any, Any]:
    """Scan over xs [steps, ...] like `lax.scan`, but without a loop for a single step."""
    if xs.shape[0] > 1:
        return lax.scan(body, carry, xs)
    carry, out = body(carry, xs[0])
    return carry, jax.tree.map(lambda x: x[None], out)


def store(buffer: Array, x: Array, slot: Array) -> Array:
    """Write x [...] to a slot of a buffer [slots, ...]."""
    return lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)


def take(x: Array, index: Array) -> Array:
    """Return `x[index]` of x [n, ...]; the index is an int32 scalar."""
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
