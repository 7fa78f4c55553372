"""Order of the layers of virtual stages, and the exchange that changes it.

Checkpoints store layers in the order of the model: `[num_layers, ...]`, stage after stage. With v
virtual stages per stage, a stage runs v separate groups of layers. The state of a run stores them
on the stage that runs them, in *execution order*: of stage 0 all its virtual stages, of stage 1 all
of its, and so on. A step then moves no weights. `to_execution_order` follows a start or a restore,
`to_model_order` precedes a save.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.types import Array

LAYERS = "layers"
"""Key of the stacked layers in the parameters, and in moments with the same structure."""


def to_execution_order(tree: Any, num_virtual_stages: int) -> Any:
    """Return a copy of a tree with layers on the stages that run them.

    `tree` is a train state or parameters on a mesh, in the order of the model. Stacked arrays are
    [num_layers, ...].
    """
    return _reorder(tree, num_virtual_stages, to_model=False)


def to_model_order(tree: Any, num_virtual_stages: int) -> Any:
    """Return a copy of a tree in execution order, with layers [num_layers, ...] in model order."""
    return _reorder(tree, num_virtual_stages, to_model=True)


def execution_order(num_layers: int, num_stages: int, num_virtual_stages: int) -> np.ndarray:
    """Return the model index of each layer in execution order, int [num_layers]."""
    indices = np.arange(num_layers).reshape(num_virtual_stages, num_stages, -1)
    return indices.swapaxes(0, 1).reshape(-1)


def _reorder(tree: Any, v: int, *, to_model: bool) -> Any:
    if v == 1:
        return tree
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    stacked = [i for i, (path, x) in enumerate(leaves) if _is_stacked(path, x)]
    arrays = [leaves[i][1] for i in stacked]
    # Offloaded moments are exchanged on the devices.
    on_device = [x.sharding.with_memory_kind("device") for x in arrays]
    mesh, specs = on_device[0].mesh, tuple(s.spec for s in on_device)
    moved = list(_mover(mesh, specs, v, to_model)(*jax.device_put(arrays, on_device)))
    new = dict(zip(stacked, jax.device_put(moved, [x.sharding for x in arrays]), strict=True))
    return jax.tree.unflatten(structure, [new.get(i, x) for i, (_, x) in enumerate(leaves)])


def _is_stacked(path: Any, x: Any) -> bool:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return LAYERS in names and isinstance(x, jax.Array) and x.ndim > 0


@functools.lru_cache(maxsize=16)
def _mover(mesh: Any, specs: tuple[P, ...], v: int, to_model: bool) -> Callable[..., Any]:
    """Make the compiled exchange of arrays [num_layers, ...] with these specs."""
    p = mesh.shape[PIPELINE.name]

    def move(*arrays: Array) -> tuple[Array, ...]:
        return tuple(leaf(x, spec) for x, spec in zip(arrays, specs, strict=True))

    def leaf(x: Array, spec: P) -> Array:
        """Reorder x [layers stored here, ...], or [num_layers, ...] if each stage has all."""
        if spec and spec[0] is not None:
            return _move(x.reshape(v, -1, *x.shape[1:]), p, home=to_model).reshape(x.shape)
        order = execution_order(x.shape[0], p, v)
        return x[np.argsort(order) if to_model else order]

    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    run = jax.shard_map(move, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(run, out_shardings=shardings)


def _move(x: Array, p: int, *, home: bool) -> Array:
    """Move x [virtual_stages, ...] from model to execution order, or with `home` back.

    In model order, stage s stores virtual stages s·v .. s·v + v - 1; it runs s, s + p, s + 2p, ...
    There are v rounds of one permutation each. In a round every stage sends one virtual stage and
    receives one, so each is sent exactly once.
    """
    v = x.shape[0]
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
