"""Optimizer moments outside of the devices, and their way to checkpoints and back.

A store has the shards of one process, group by group of parameters. `MomentStore` keeps them in the
memory of the process, and `MomentFiles` in files of a local disk. Checkpoints have the moments as
ordinary arrays, so that a run may resume with its moments in another memory or on another mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.checkpoint import orbax_io, pytree
from jaxdist.checkpoint.blocks import Bounds, Index, bounds_of, dtype_of, even_chunk
from jaxdist.checkpoint.checksum import part_checksum
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.events import CorruptCheckpoint, MismatchError, make_group
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.core.parallel.pipeline.virtual_stages import model_rows
from jaxdist.core.step.grouped_update import Groups, ParamGroup, shards_of
from jaxdist.runtime.storage import Location


class Shard(NamedTuple):
    """This process's shard of a group's part of an optimizer moment.

    Attributes:
        leaf: the moment in checkpoints, with layers in the order of the model.
        shape: shape of the shard, with layers in execution order.
        runs: pairs of an index in the shard and the index of the same values in `leaf`; none for
            layers that only pad a virtual stage.
        is_written: whether this process writes the shard to checkpoints.
        chunk: largest chunk in checkpoints, so that no two processes write to one chunk.
    """

    leaf: pytree.Leaf
    shape: tuple[int, ...]
    runs: tuple[tuple[Index, Index], ...]
    is_written: bool
    chunk: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the values."""
        return self.leaf.value.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the shard in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class MomentStore:
    """Optimizer moments in the memory of this process; none before `fill_zeros` or `load`.

    Attributes:
        groups: the groups of a train step.
        leaves: the moments in checkpoints.
        num_bytes: bytes of the moments of all processes, without copies on several devices.
    """

    def __init__(self, groups: Groups):
        self.groups = groups
        self._all = _leaves_of(groups)
        pairs = zip(self._all, groups.of, strict=True)
        self.leaves = [leaf for (leaf, _), param in pairs if param >= 0]
        self.num_bytes = sum(leaf.num_bytes for leaf in self.leaves)
        self._kept: dict[int, tuple[int, list[np.ndarray]]] = {}

    @functools.cached_property
    def shards(self) -> list[list[Shard]]:
        """The shards of each group."""
        groups = self.groups
        return [
            [x for i in groups.leaves(group) for x in _shards(groups, group, i, *self._all[i])]
            for group in groups.groups
        ]

    def check(self) -> None:
        """Raise `ConfigError` if there is no room; of host memory, `Budget.check` does it."""

    def close(self) -> None:
        """Free what outlives the process, at the end of a run."""

    def read(self, group: int, step: int) -> list[np.ndarray]:
        """Return the shards [...] of a group after `step` steps; `RuntimeError` for other steps."""
        stored_step, shards = self._kept[group]
        if stored_step != step:
            raise RuntimeError(
                f"group {group} of the optimizer moments in host memory is of step {stored_step}, "
                f"and the state is of step {step}"
            )
        return shards

    def put(self, group: int, step: int, shards: Sequence[np.ndarray]) -> None:
        """Replace the shards [...] of a group by those after `step` steps."""
        device: Any = next(iter(self.groups.state.step.sharding.device_set))
        copy = np.array if device.platform == "cpu" else np.asarray  # views of the devices' memory
        self._kept[group] = step, [copy(x) for x in shards]

    def write(self, group: int, step: int, shards: Sequence[np.ndarray]) -> None:
        """Put the shards [...] of a group during a step; tests kill the process here."""
        crash_point("during_moments")
        self.put(group, step, shards)

    def take_snapshot(self, step: int) -> list[Callable[[], list[np.ndarray]]]:
        """Return a function per group that returns its shards [...] after `step` steps, once."""
        # Later steps replace the arrays and do not change them.
        kept = [self.read(group, step) for group in range(len(self.shards))]
        return [functools.partial(list, shards) for shards in kept]

    def fill_zeros(self) -> None:
        """Write zeros, the moments of a new run at step 0."""
        for number, group in enumerate(self.shards):
            self.put(number, 0, [np.zeros(shard.shape, shard.dtype) for shard in group])

    def load(self, stored: StoredArrays, step: int) -> None:
        """Copy the moments of a checkpoint, verified; other stored dtypes are cast; collective.

        Raises `MismatchError` for missing moments and other shapes, and `CorruptCheckpoint`.
        """
        entries = {leaf.name: stored.entries.get(leaf.name) for leaf in self.leaves}
        present: Any = {name: entry for name, entry in entries.items() if entry is not None}
        if problems := pytree.mismatches(self.leaves, present):
            raise MismatchError(step, problems, stored.document)
        sums = dict.fromkeys(present, 0)
        for number, group in enumerate(self.shards):
            shards = []
            for shard in group:
                name = shard.leaf.name
                values = np.zeros(shard.shape, shard.dtype)
                for own, index in shard.runs:
                    part = stored.gather(name, index)
                    if shard.is_written:
                        sums[name] += part_checksum(part, _start(index), present[name]["shape"])
                    values[own] = part
                shards.append(values)
            self.put(number, step, shards)

        def compare(replies: list[dict[str, int]]) -> None:
            total = _total(replies)
            wrong = [name for name in total if total[name] != present[name]["checksum"]]
            if wrong:
                raise CorruptCheckpoint(f"wrong checksum of {wrong[0]} in {stored.checkpoint}")

        make_group().decide_from(sums, compare)

    def zeros(self, step: int, rows: Mapping[str, bool]) -> dict[str, np.ndarray]:
        """Return which named moments after `step` steps are zero: bool [], or [rows]; collective.

        `rows` maps the names to whether each row of the first dim has its own flag.
        """
        own: dict[str, np.ndarray] = {
            leaf.name: np.ones(leaf.value.shape[:1] if rows[leaf.name] else (), bool)
            for leaf in self.leaves
            if leaf.name in rows
        }
        for number, group in enumerate(self.shards):
            for shard, values in zip(group, self.read(number, step), strict=True):
                if (flags := own.get(shard.leaf.name)) is None:
                    continue
                for part, index in shard.runs:
                    at = index[: flags.ndim]
                    flags[at] &= (values[part] == 0).all(axis=tuple(range(flags.ndim, values.ndim)))
        merge = lambda replies: {
            name: np.all([reply[name] for reply in replies], axis=0).tolist() for name in own
        }
        merged = make_group().decide_from({k: v.tolist() for k, v in own.items()}, merge)
        return {name: np.array(flags) for name, flags in merged.items()}


class Snapshot:
    """The moments of one step, written to a checkpoint while later steps replace them."""

    def __init__(self, store: MomentStore, step: int):
        self._store, self._take = store, store.take_snapshot(step)

    def write_to(self, checkpoint: Location) -> dict[str, int]:
        """Write this process's share of the moments; return its part of each array's checksum."""
        sums: dict[str, int] = {}
        handles: dict[str, Any] = {}
        for group in self._store.shards:
            for shard, values in zip(group, self._take.pop(0)(), strict=True):
                leaf, shape = shard.leaf, shard.leaf.value.shape
                if leaf.name not in handles:
                    dtype = dtype_of(leaf.value.dtype.name)
                    chunk = even_chunk(shard.chunk, dtype.itemsize, orbax_io.CHUNK_BYTES)
                    create = {"shape": shape, "chunks": chunk, "dtype": dtype}
                    part = f"{orbax_io.PART}{jax.process_index()}"
                    array = orbax_io.open_array(checkpoint, leaf.item, leaf.path, create, part=part)
                    handles[leaf.name] = array
                    sums[leaf.name] = 0
                for own, index in shard.runs if shard.is_written else ():
                    handles[leaf.name].write(index, values[own])
                    sums[leaf.name] += part_checksum(values[own], _start(index), shape)
        return sums

    def finish(
        self, checkpoint: Location, document: dict[str, Any], replies: Sequence[dict[str, int]]
    ) -> None:
        """Add what all processes wrote to a checkpoint and its document; in process 0.

        `replies` are the results of `write_to`.
        """
        total = _total(replies)
        leaves = self._store.leaves
        entries = pytree.describe(leaves, [leaf.value for leaf in leaves])
        sums = [total[leaf.name] for leaf in leaves]
        document["arrays"] |= pytree.with_checksums(entries, sums)
        orbax_io.merge_parts(checkpoint)
        orbax_io.write_frame(checkpoint, document)


def _total(replies: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the checksum of each array from the parts of all processes."""
    return {name: sum(reply[name] for reply in replies) % 2**32 for name in replies[0]}


def _leaves_of(groups: Groups) -> list[tuple[pytree.Leaf, np.ndarray | None]]:
    """Return the optimizer state's leaves, layers in model order, and `model_rows` [layers]."""
    made = []
    for leaf in pytree.leaves_of({"opt_state": groups.state.opt_state}):
        value, path = leaf.value, tuple(map(jax.tree_util.DictKey, leaf.path))
        rows = model_rows(path, value, groups.layers)
        shape = value.shape if rows is None else (groups.layers.num_layers, *value.shape[1:])
        value = value.update(shape=shape, sharding=None)
        made.append((dataclasses.replace(leaf, value=value), rows))
    return made


def _shards(
    groups: Groups, group: ParamGroup, i: int, leaf: pytree.Leaf, rows: np.ndarray | None
) -> list[Shard]:
    """Return this process's shards of a group's moment `i`, with its `model_rows` [layers]."""
    part = group.cut(groups.moments[i])
    writers: dict[Bounds, Any] = {}  # the first device of the mesh with each shard
    indices = part.sharding.devices_indices_map(part.shape)
    for device in part.sharding.mesh.devices.flat:
        writers.setdefault(bounds_of(indices[device], part.shape), device)
    shards = []
    for bounds in shards_of(part):
        shape = tuple(stop - start for start, stop in bounds)
        is_written = writers[bounds].process_index == jax.process_index()
        chunk = shape if rows is None else (1, *shape[1:])
        runs = tuple(_runs(bounds, group.start, rows))
        shards.append(Shard(leaf, shape, runs, is_written, chunk))
    return shards


def _runs(bounds: Bounds, start: int, rows: np.ndarray | None) -> list[tuple[Index, Index]]:
    """Return pairs of indices, in a shard and in its array, of consecutive layers of the model.

    `start` is the group's first row. `rows` [layers] are the model's layers in execution order,
    -1 for padding; None = the order is the same.
    """
    index = tuple(slice(*pair) for pair in bounds)
    if not index:
        return [((), ())]
    if rows is None:
        first = slice(bounds[0][0] + start, bounds[0][1] + start)
        return [((slice(0, bounds[0][1] - bounds[0][0]),), (first, *index[1:]))]
    own = rows[index[0]]
    pieces = np.split(np.arange(len(own)), np.flatnonzero(np.diff(own) != 1) + 1)
    return [
        (
            (slice(int(piece[0]), int(piece[-1]) + 1),),
            (slice(int(own[piece[0]]), int(own[piece[-1]]) + 1), *index[1:]),
        )
        for piece in pieces
        if own[piece[0]] >= 0
    ]


def _start(index: Index) -> list[int]:
    return [s.start for s in index]
