"""Move the parameters of virtual stages between the stages that store and that run them.

Parameters are stored as `[num_layers, ...]` with contiguous layers on each stage, so checkpoints do
not depend on the schedule. With several virtual stages per stage, each step sends parameters to the
stages that run them and sends their gradients back.
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
    """Move x [virtual_stages, ...] from storing to running stages, or with `home` back.

    Stage s stores virtual stages s·v .. s·v + v - 1, and runs s, s + p, s + 2p, ... There are v
    rounds of one permutation each. In a round every stage sends one virtual stage and receives one,
    so each is sent exactly once.
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
    """Return the entry of `values` for this stage; `values[i]` belongs to `stages[i]`."""
    by_stage = np.zeros_like(values)
    by_stage[stages] = values
    return lax.dynamic_index_in_dim(jnp.asarray(by_stage), stage, 0, keepdims=False)


def exchange_rounds(p: int, v: int) -> list[np.ndarray]:
    """Assign the p·v virtual stages to v rounds in which each stage sends one and receives one.

    Each round is int32 [p]: the virtual stage that stage s sends. With g = gcd(p, v) it is s·v +
    (round + s // (p/g)) mod v. Each stage receives only one: s·v mod p takes each multiple of g
    once in each of g blocks of p/g stages, and the second terms of the blocks differ mod g. Over
    all rounds the second term takes all v values.
    """
    block = p // math.gcd(p, v)
    stage = np.arange(p, dtype=np.int32)
    return [stage * v + (number + stage // block) % v for number in range(v)]
