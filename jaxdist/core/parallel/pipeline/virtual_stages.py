"""Move parameters of virtual stages between the stages that store them and that run them.

Parameters are stored as `[num_layers, ...]` with contiguous layers on each stage, so checkpoints do
not depend on the schedule. With several virtual stages on each stage they are sent to the stage
that runs them, and their gradients are sent back, once per step.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.types import Array, Params


def to_virtual_stages(layers: Params, schedule: Schedule) -> Params:
    """Move parameters to the stages that run them.

    [layers stored here, ...] -> [virtual, layers, ...].
    """
    cut = lambda x: x.reshape(schedule.num_virtual_stages, -1, *x.shape[1:])
    return jax.tree.map(lambda x: _move(cut(x), schedule, home=False), layers)


def from_virtual_stages(grads: Params, schedule: Schedule) -> Params:
    """Move gradients to the stages that store them.

    [virtual, layers, ...] -> [layers here, ...].
    """
    join = lambda x: x.reshape(-1, *x.shape[2:])
    return jax.tree.map(lambda x: join(_move(x, schedule, home=True)), grads)


def _move(x: Array, schedule: Schedule, *, home: bool) -> Array:
    """Move x [virtual_stages, ...] from the stages that store it to those that run it, or back.

    Stage s stores virtual stages s·v .. s·v + v - 1, and runs s, s + p, s + 2p, ... In each of v
    rounds, one permutation sends one virtual stage from every stage and delivers one to every
    stage, so each is sent once.
    """
    p, v = schedule.num_stages, schedule.num_virtual_stages
    if v == 1:
        return x
    stage = collectives.group_index(PIPELINE.name)
    out = jnp.zeros_like(x)
    for moved_now in exchange_rounds(p, v):
        stored_on, runs_on = moved_now // v, moved_now % p
        stored_at = _of_stage(stage, stored_on, moved_now % v)
        runs_at = _of_stage(stage, runs_on, moved_now // p)
        source, target = (runs_at, stored_at) if home else (stored_at, runs_at)
        senders, receivers = (runs_on, stored_on) if home else (stored_on, runs_on)
        pairs = list(zip(senders.tolist(), receivers.tolist(), strict=True))
        sent = lax.dynamic_index_in_dim(x, source, 0, keepdims=False)
        received = lax.ppermute(sent, PIPELINE.name, pairs)
        out = lax.dynamic_update_index_in_dim(out, received, target, 0)
    return out


def _of_stage(stage: Array, stages: np.ndarray, values: np.ndarray) -> Array:
    """Return the value of this stage; `values[i]` belongs to `stages[i]`."""
    by_stage = np.zeros_like(values)
    by_stage[stages] = values
    return lax.dynamic_index_in_dim(jnp.asarray(by_stage), stage, 0, keepdims=False)


def exchange_rounds(p: int, v: int) -> list[np.ndarray]:
    """Cut the p·v virtual stages into v rounds, each naming every storing and running stage once.

    Each round is int32 [p], the virtual stage that storing stage s sends: with g = gcd(p, v) it is
    s·v + (round + s // (p/g)) mod v. Why it names every running stage once: s·v mod p takes each
    multiple of g once in each of g blocks of p/g stages, and the blocks' second terms differ mod g.
    Over the rounds the second term takes all v values.
    """
    block = p // math.gcd(p, v)
    stage = np.arange(p, dtype=np.int32)
    return [stage * v + (number + stage // block) % v for number in range(v)]
