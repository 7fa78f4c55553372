"""Pieces of the model, moved between where they are stored and where they run.

Parameters are stored as `[num_layers, ...]` with contiguous layers on each stage, whatever the
schedule, so that checkpoints know nothing of it. With several chunks per stage a stage runs pieces
that are not neighbours; they travel to it once per step and their gradients travel back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.types import Array, Params


def to_pieces(layers: Params, schedule: Schedule) -> Params:
    """[layers of the stage, ...] as stored -> [chunks, layers of a piece, ...] of its pieces."""
    cut = lambda x: x.reshape(schedule.num_virtual_stages, -1, *x.shape[1:])
    return jax.tree.map(lambda x: _travel(cut(x), schedule, home=False), layers)


def from_pieces(grads: Params, schedule: Schedule) -> Params:
    """The way back of `to_pieces`."""
    join = lambda x: x.reshape(-1, *x.shape[2:])
    return jax.tree.map(lambda x: join(_travel(x, schedule, home=True)), grads)


def _travel(x: Array, schedule: Schedule, *, home: bool) -> Array:
    """Move pieces [chunks, ...] from where they are stored to where they run, or back home.

    Stored, stage s holds pieces s·v .. s·v + v - 1; running, pieces s, s + p, s + 2p, ... Each of v
    rounds is one permutation that takes a piece from every stage and gives one to every stage, so
    exactly the pieces cross the wire.
    """
    p, v = schedule.num_stages, schedule.num_virtual_stages
    if v == 1:
        return x
    stage = collectives.group_index(PIPELINE.name)
    out = jnp.zeros_like(x)
    for pieces in matchings(p, v):
        stored_on, runs_on = pieces // v, pieces % p
        stored_at = _of_stage(stage, stored_on, pieces % v)
        runs_at = _of_stage(stage, runs_on, pieces // p)
        source, target = (runs_at, stored_at) if home else (stored_at, runs_at)
        senders, receivers = (runs_on, stored_on) if home else (stored_on, runs_on)
        pairs = list(zip(senders.tolist(), receivers.tolist(), strict=True))
        piece = lax.dynamic_index_in_dim(x, source, 0, keepdims=False)
        moved = lax.ppermute(piece, PIPELINE.name, pairs)
        out = lax.dynamic_update_index_in_dim(out, moved, target, 0)
    return out


def _of_stage(stage: Array, stages: np.ndarray, values: np.ndarray) -> Array:
    """The value that belongs to this stage, `values[i]` being that of `stages[i]`."""
    by_stage = np.zeros_like(values)
    by_stage[stages] = values
    return lax.dynamic_index_in_dim(jnp.asarray(by_stage), stage, 0, keepdims=False)


def matchings(p: int, v: int) -> list[np.ndarray]:
    """Cut the p·v pieces into v rounds that name every storing and every running stage once each.

    Stages that store and stages that run form a bipartite graph in which every vertex has degree v,
    so v perfect matchings exist (Kőnig 1916); each is found by augmenting paths.
    """
    left = set(range(p * v))
    rounds = []
    for _ in range(v):
        piece_of: dict[int, int] = {}
        for storing in range(p):
            _augment(storing, left, piece_of, set(), p, v)
        found = np.asarray([piece_of[running] for running in range(p)], np.int32)
        left -= set(found.tolist())
        rounds.append(found)
    return rounds


def _augment(
    storing: int, left: set[int], piece_of: dict[int, int], seen: set[int], p: int, v: int
) -> bool:
    """Give a storing stage one of its pieces, making others take another of theirs if need be."""
    for piece in sorted(left):
        running = piece % p
        if piece // v != storing or running in seen:
            continue
        seen.add(running)
        if running not in piece_of or _augment(piece_of[running] // v, left, piece_of, seen, p, v):
            piece_of[running] = piece
            return True
    return False
