"""Silent data corruption (SDC): copies of one value must have the same bits on all devices.

Every `resilience.sdc_check_interval_steps` (0 = off) and before every save, each device hashes its
shard of every state array in its memory that is replicated over axes that split the batch. An
all-reduce compares the hashes, 4 bytes each. A single wrong bit always changes a hash. Only if
hashes differ are those of all devices gathered, so that a check costs the same in jobs of any size.
With three or more copies the majority identifies the wrong device. With two, both are named. Arrays
that are sharded over all these axes have no second copy: only the checksums of checkpoints cover
them. Copies over other axes are not compared, because healthy devices may round differently there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist import runtime
from jaxdist.checkpoint.checksum import checksum
from jaxdist.config.resilience import MAX_ROLLBACKS, ResilienceConfig
from jaxdist.core import collectives
from jaxdist.core.axis import axes_of
from jaxdist.core.sharding import Layout
from jaxdist.core.types import Array
from jaxdist.runtime.formatting.tables import few


class CorruptState(RuntimeError):
    """Raised if replicas of one value have different bits."""

    exit_code = runtime.EXIT_SDC
    advice = (
        "check that all processes use the same data and, for a custom model or dataset, the same "
        "code (settings and jaxdist's code were compared at the start). If they do, take the "
        "device out of use or test it, then start the same command again: checkpoints up to the "
        "last good check are good (resilience.sdc_policy=rollback resumes automatically)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Replicas that differ.

    `devices`: flat index in the mesh -> names of the arrays in which that device differs from the
    majority of its replicas. If there is none for some array, all its replicas, and not `certain`.
    """

    step: int
    devices: dict[int, list[str]]
    certain: bool
    text: str

    def __str__(self) -> str:
        return self.text


class SdcCheck:
    """Compares the replicas of a train state; `hosts` names the host of each process."""

    def __init__(self, config: ResilienceConfig, layout: Layout, hosts: Mapping[int, str]):
        self.config, self.layout, self._hosts = config, layout, hosts
        self._names: list[str] = []
        self._axes: list[tuple[str, ...]] = []
        self._leaf_indices: list[int] = []
        self._hash: Any = None
        self._gather: Any = None
        self._pending: tuple[int, Array, Array] | None = None
        self._good = 0
        self._rollbacks = 0

    def start(self, step: int, state: Any, *, force: bool = False) -> None:
        """Start a check if due or forced, unless checks are off; the state may then be donated."""
        every = self.config.sdc_check_interval_steps
        if not every or not (force or step % every == 0) or not self.layout.batch_axes:
            return
        if self._pending is not None and self._pending[0] == step:
            return  # started already
        if self._hash is None:
            self._make(state)
        if self._names:
            leaves = jax.tree.leaves(state)
            self._pending = step, *self._hash([leaves[index] for index in self._leaf_indices])

    def result(self) -> Mismatch | None:
        """Wait for a started check, if any; return replicas that differ, else None."""
        if self._pending is None:
            return None
        step, hashes, differ = self._pending
        self._pending = None
        if not jax.device_get(differ):
            self._good = step
            return None
        return self._compare(step, np.asarray(jax.device_get(self._gather(hashes))))

    def may_roll_back(self) -> bool:
        """Count a mismatch; return whether to roll back after it; if not, the run ends."""
        self._rollbacks += 1
        return self.config.sdc_policy == "rollback" and self._rollbacks <= MAX_ROLLBACKS

    def discard(self) -> None:
        """Drop a started check, because an earlier state was restored."""
        self._pending = None

    def _make(self, state: Any) -> None:
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        specs = []
        for index, (path, leaf) in enumerate(leaves):
            axes = self._replica_axes(leaf)
            if axes:
                self._leaf_indices.append(index)
                self._names.append(jax.tree_util.keystr(path, simple=True, separator="/"))
                self._axes.append(axes)
                specs.append(leaf.sharding.spec)
        mesh, own = self.layout.mesh, P(tuple(self.layout.mesh.axis_names))

        def local(*parts: Array) -> tuple[Array, Array]:
            """Return hashes [1, num_arrays] of parts [...], and whether any copies differ []."""
            sums = jnp.stack([checksum(part) for part in parts])
            differ = jnp.zeros((), bool)
            for axes in sorted(set(self._axes)):
                some = sums[np.flatnonzero([one == axes for one in self._axes])]
                # Both extremes in one all-reduce: the minimum of x is ~maximum(~x).
                most, least = jax.lax.pmax(jnp.stack([some, ~some]), axes)
                differ |= (most != ~least).any()
            return sums[None], jax.lax.pmax(differ.astype(jnp.int32), own[0])

        # These values are equal on all devices, which jax cannot infer.
        make = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        compared = make(local, in_specs=tuple(specs), out_specs=(own, P()))
        self._hash = jax.jit(lambda chosen: compared(*map(_data, chosen)))
        gather = lambda sums: collectives.all_gather(sums, own[0])
        self._gather = jax.jit(make(gather, in_specs=own, out_specs=P()))

    def _replica_axes(self, leaf: Any) -> tuple[str, ...]:
        """Return the batch axes over which a leaf is replicated; () if it is empty."""
        if not leaf.size:
            return ()
        taken = axes_of(leaf.sharding.spec)
        return tuple(axis for axis in self.layout.batch_axes if axis not in taken)

    def _compare(self, step: int, hashes: np.ndarray) -> Mismatch | None:
        """Return replicas that differ in `hashes`, uint32 [num_devices, num_arrays], or None."""
        devices: dict[int, list[str]] = {}
        certain = True
        for column, (name, axes) in enumerate(zip(self._names, self._axes, strict=True)):
            groups = self._groups(axes)
            values = hashes[groups, column]
            for row in np.flatnonzero((values != values[:, :1]).any(axis=1)):
                differing, has_majority = minority(values[row].tolist())
                certain &= has_majority
                for member in differing:
                    devices.setdefault(int(groups[row, member]), []).append(name)
        if not devices:
            return None
        text = self._text(step, devices, certain)
        return Mismatch(step=step, devices=devices, certain=certain, text=text)

    def _groups(self, axes: tuple[str, ...]) -> np.ndarray:
        """Return flat mesh indices of devices that hold the same shard: int64 [groups, size]."""
        mesh = self.layout.mesh
        indices = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
        dims = [mesh.axis_names.index(axis) for axis in axes]
        last = np.moveaxis(indices, dims, range(indices.ndim - len(dims), indices.ndim))
        count = int(np.prod([indices.shape[dim] for dim in dims]))
        return last.reshape(-1, count)

    def _text(self, step: int, devices: dict[int, list[str]], certain: bool) -> str:
        flat = self.layout.mesh.devices.flat
        lines = []
        for index, names in devices.items():
            device = flat[index]
            host = self._hosts.get(device.process_index, "?")
            lines.append(
                f"device {device.id} of process {device.process_index} on {host} in {few(names, 3)}"
            )
        doubt = "" if certain else " (there is no majority, so all copies are named)"
        good = f"after step {self._good}" if self._good else "none in this start"
        text = f"replicas differ after step {step}: {few(lines, 4, '; ')}{doubt}"
        return f"{text}. Last good check: {good}."


def minority(values: Sequence[int]) -> tuple[list[int], bool]:
    """Return the indices of values unlike the majority's, and True; without it all, and False."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return [], True
    value, count = counts[0]
    if 2 * count > len(values):
        return [index for index, other in enumerate(values) if other != value], True
    return list(range(len(values))), False


def _data(x: Array) -> Array:
    """Return the array itself, or the uint32 data [..., words] of PRNG keys [...]."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
