"""How arrays lie on the mesh: logical dims -> mesh axes, and the errors when they do not fit.

One table (`RULES`) says which mesh axis splits which logical dim. Models name their dims and never
a mesh axis; the mesh never meets a model. The ways to train are then only choices of this room:

    DDP      parameters and moments replicated over `data`
    ZeRO-1   moments (and the update) sharded over `data`           mesh.zero=1
    ZeRO-2   gradients of each microbatch sharded as well           mesh.zero=2
    ZeRO-3   parameters sharded as well, gathered layer by layer    mesh.zero=3, or the `fsdp` axis
    hybrid   `data` × `fsdp`: sharded inside a group, replicated across groups

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5. Deviation: vectors (norm scales, biases) stay whole on every device, because
gathering a few kilobytes costs a latency and saves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.core.mesh import BATCH_AXES, MeshSpec, factorisations, nearest, spec_of
from jaxdist.core.types import Array, ConfigError, Dims, Params, setting

RULES: Mapping[str, str | None] = {
    "layers": "pipeline",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "d_model": "fsdp",
}
"""Logical dim -> the mesh axis that splits it; dims not named are never split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the model is spread over the devices."""

    shape: str = setting(
        "auto",
        "mesh axes, e.g. dp=2,tp=4 (pp dp fsdp tp; -1 = the rest); auto = data parallel if the "
        "state fits one device, else fsdp",
    )
    reason: str = setting("", "why this mesh; printed at start (empty = the reason found)")
    zero: Literal[0, 1, 2, 3] = setting(
        0, "shard over the data axis: 1 = moments, 2 = and gradients, 3 = and parameters"
    )
    sequence_parallel: bool = setting(
        True, "with tp > 1, split activations between blocks by sequence"
    )
    elastic: bool = setting(
        False,
        "with fewer devices than the mesh names, go on with smaller dp and fsdp and more "
        "microbatches: same rows in every step; needs a size for each axis",
    )

    def problems(self) -> list[str]:
        """Every violated rule of this section."""
        found = []
        if self.elastic and (self.shape == "auto" or "-1" in self.shape):
            found.append(
                f"mesh.elastic with mesh.shape={self.shape!r}: a mesh without sizes does not say "
                "from what it shrinks. Give each axis its size with all devices there, e.g. "
                "--mesh dp=8."
            )
        if self.shape == "auto":
            return found
        try:
            MeshSpec.parse(self.shape, num_devices=_MANY)
        except ValueError as error:
            found += str(error).splitlines()
        return found


# Divisible by every product of axis sizes one is likely to give, so that only the text is judged.
_MANY = math.lcm(*range(1, 41))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where every array of a run lies. Axes of size 1 never appear in a spec.

    Attributes:
        mesh: the device mesh.
        rules: logical dim -> mesh axis.
        zero: what is sharded over `data` (see the module's docstring).
        sequence_parallel: activations between blocks are split by sequence over `tensor`.
        auto_tensor: the tensor axis is left to XLA's partitioner (a model without hooks).
    """

    mesh: Mesh
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=lambda: dict(RULES))
    zero: int = 0
    sequence_parallel: bool = False
    auto_tensor: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size."""
        return spec_of(self.mesh).sizes

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """Axes whose collectives the step writes itself."""
        names = tuple(self.mesh.axis_names)
        return tuple(a for a in names if not (a == "tensor" and self.auto_tensor))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes in use that split the rows of a batch."""
        return tuple(axis for axis in BATCH_AXES if self.sizes[axis] > 1)

    @property
    def num_replicas(self) -> int:
        """Parts into which the rows of a batch are split."""
        return spec_of(self.mesh).num_replicas

    def param_spec(self, dims: Dims) -> P:
        """Where a parameter lies."""
        return self._spec(dims, ("fsdp", "data") if self.zero == 3 else ("fsdp",))

    def moment_spec(self, dims: Dims) -> P:
        """Where a parameter's optimizer moments lie, and its update is computed."""
        return self._spec(dims, ("fsdp", "data") if self.zero else ("fsdp",))

    def gradient_spec(self, dims: Dims) -> P:
        """Where a microbatch's gradient lies while it is accumulated."""
        return self.moment_spec(dims) if self.zero >= 2 else self.param_spec(dims)

    def param_specs(self, axes: Params) -> Any:
        """`param_spec` of each leaf of a tree of `Dims`."""
        return jax.tree.map(self.param_spec, axes)

    def moment_specs(self, axes: Params) -> Any:
        """`moment_spec` of each leaf of a tree of `Dims`."""
        return jax.tree.map(self.moment_spec, axes)

    def gradient_specs(self, axes: Params) -> Any:
        """`gradient_spec` of each leaf of a tree of `Dims`."""
        return jax.tree.map(self.gradient_spec, axes)

    def batch_spec(self) -> P:
        """Rows over data and fsdp, every other dim whole."""
        return P(self.batch_axes or None)

    def sharding(self, spec: P, memory_kind: str | None = None) -> NamedSharding:
        """A spec on this mesh."""
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind)

    def shardings(self, specs: Any, memory_kind: str | None = None) -> Any:
        """A tree of specs on this mesh."""
        return jax.tree.map(
            lambda spec: self.sharding(spec, memory_kind), specs, is_leaf=lambda x: isinstance(x, P)
        )

    def constrain(self, tree: Any, specs: Any) -> Any:
        """Lay a tree of arrays out as `specs` inside a jitted function."""
        return jax.tree.map(
            lambda spec, x: jax.lax.with_sharding_constraint(x, self.sharding(spec)),
            specs,
            tree,
            is_leaf=lambda x: isinstance(x, P),
        )

    def _spec(self, dims: Dims, sharded_by: tuple[str, ...]) -> P:
        _check_collisions(dims, self.rules)
        is_vector = sum(name != "layers" for name in dims) < 2
        entries: list[Any] = []
        for name in dims:
            axis = self.rules.get(name) if name else None
            group = sharded_by if axis == "fsdp" else (axis,)
            if axis == "fsdp" and is_vector:
                group = ()
            used = tuple(a for a in group if a and self.sizes[a] > 1)
            entries.append(used if len(used) > 1 else used[0] if used else None)
        while entries and entries[-1] is None:
            entries.pop()
        return P(*entries)


def _check_collisions(dims: Dims, rules: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` when two dims of one array would be split by the same mesh axis."""
    taken: dict[str, str] = {}
    for name in dims:
        axis = rules.get(name) if name else None
        if name is None or axis is None:
            continue
        if axis in taken:
            raise ConfigError(
                [
                    f"dims {tuple(dims)}: {taken[axis]!r} and {name!r} would both be split by the "
                    f"mesh axis {axis!r}, which can split one dim of an array. Name one of them "
                    "None in the model's axes, or give it another axis in Model.rules."
                ]
            )
        taken[axis] = name


def axes_of(spec: P) -> tuple[str, ...]:
    """Mesh axes that a spec mentions."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return tuple(axis for entry in entries for axis in entry if axis is not None)


def dim_of(spec: P, axis: str) -> int | None:
    """The dim that `axis` splits, or None."""
    for dim, entry in enumerate(spec):
        if axis == entry or (isinstance(entry, tuple) and axis in entry):
            return dim
    return None


def shard_bytes(x: Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    """Bytes of `x` that one device holds."""
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def mesh_problems(
    spec: MeshSpec,
    dims: Mapping[str, int],
    *,
    rules: Mapping[str, str | None] = RULES,
    zero: int = 0,
    global_batch_size: int | None = None,
    num_microbatches: int = 1,
    seq_len: int | None = None,
) -> list[str]:
    """Every rule that a model and batch break on a mesh, before anything is built.

    Args:
        spec: the mesh.
        dims: logical dim -> size (`Model.dims`); `layers` absent when nothing is stacked.
        rules: logical dim -> mesh axis.
        zero: ZeRO stage over the data axis.
        global_batch_size: rows of one step, or None to leave the batch out.
        num_microbatches: microbatches that a device's rows are cut into.
        seq_len: sequence length where sequence parallelism splits it, else None.
    """
    problems = []
    for name, size in dims.items():
        axis = rules.get(name)
        if axis is None:
            continue
        ways = spec.sizes[axis]
        label, fix = f"{_SHORT[axis]}={ways}", f"{_SHORT[axis]}="
        if axis == "fsdp" and zero:
            ways *= spec.data
            label, fix = f"fsdp={spec.fsdp} × dp={spec.data} (zero={zero})", "a product of "
        if size % ways:
            problems.append(
                f"mesh {label} does not divide {name}={size}: {_WHY[axis]}. "
                f"Use {fix}{_allowed(size)}."
            )
    if spec.pipeline > 1 and not dims.get("layers"):
        problems.append(
            f"mesh pp={spec.pipeline}: this model has no stacked layers to cut into stages. "
            "Use pp=1 and give the devices to dp, fsdp or tp."
        )
    if global_batch_size is not None:
        rows = spec.num_replicas * num_microbatches
        if global_batch_size % rows:
            down, up = global_batch_size // rows * rows, -(-global_batch_size // rows) * rows
            allowed = f"{up}" if down == 0 else f"{down} or {up}"
            problems.append(
                f"global_batch_size={global_batch_size} is not a multiple of {rows} (dp={spec.data}"
                f" × fsdp={spec.fsdp} × microbatches={num_microbatches}): every device takes the "
                f"same number of rows. Use {allowed}, or a smaller dp × fsdp."
            )
    if seq_len is not None and seq_len % spec.tensor:
        problems.append(
            f"mesh tp={spec.tensor} does not divide seq_len={seq_len}: sequence parallelism gives "
            f"each device seq_len/tp positions. Use tp={_allowed(seq_len)} or "
            "--mesh.sequence_parallel=false."
        )
    return problems


_SHORT = {"pipeline": "pp", "data": "dp", "fsdp": "fsdp", "tensor": "tp"}
_WHY = {
    "pipeline": "each stage holds layers/pp layers",
    "fsdp": "each device holds an equal slice of every matrix",
    "tensor": "each device computes an equal part of it",
}


def _allowed(size: int) -> str:
    divisors = [d for d in range(1, min(size, 512) + 1) if size % d == 0]
    if len(divisors) > 8:
        return ", ".join(map(str, divisors[:7])) + f" … {divisors[-1]}"
    return (
        ", ".join(map(str, divisors[:-1]))
        + (" or " if len(divisors) > 1 else "")
        + str(divisors[-1])
    )


def legal_meshes(
    asked: MeshSpec, num_devices: int, problems_of: Any, count: int = 3
) -> Sequence[MeshSpec]:
    """Up to `count` meshes of `num_devices` without problems, nearest to the one asked for.

    Args:
        asked: the mesh that was refused.
        num_devices: devices to use.
        problems_of: MeshSpec -> list of problems.
        count: how many to name.
    """
    legal = [spec for spec in factorisations(num_devices) if not problems_of(spec)]
    return nearest(asked, legal, count)


def default_mesh(
    num_devices: int,
    state_bytes: int,
    memory_bytes: int | None,
    needs: Needs | None = None,
) -> tuple[MeshSpec, str]:
    """The mesh used when none is asked for, and why.

    Args:
        num_devices: visible devices.
        state_bytes: parameters, gradients and moments of the whole model.
        memory_bytes: memory of one device, or None when the backend does not say.
        needs: the estimate of a mesh's memory; without it the state alone is looked at.
    """
    if num_devices == 1:
        return MeshSpec(), "one device: nothing to split"
    if needs is not None:
        return _by_estimate(num_devices, needs)
    gib = state_bytes / 2**30
    if memory_bytes is None or state_bytes <= memory_bytes * _STATE_SHARE:
        return (
            MeshSpec(data=num_devices),
            f"the state ({gib:.2f} GiB) fits one device, so data parallelism alone moves least",
        )
    return (
        MeshSpec(fsdp=num_devices),
        f"the state ({gib:.2f} GiB) does not fit one device ({memory_bytes / 2**30:.0f} GiB, of "
        f"which {_STATE_SHARE:.0%} may hold state), so it is sharded over all",
    )


Needs: TypeAlias = Callable[[MeshSpec], tuple[float, float]]
"""Mesh -> (bytes that one device needs, bytes that a run may take of it)."""


def _by_estimate(num_devices: int, needs: Needs) -> tuple[MeshSpec, str]:
    replicas, shards = MeshSpec(data=num_devices), MeshSpec(fsdp=num_devices)
    needed, limit = (size / 2**30 for size in needs(replicas))
    if needed <= limit:
        return replicas, (
            f"a replica takes {needed:.1f} of {limit:.1f} GiB, so data parallelism alone moves "
            "least"
        )
    sharded = needs(shards)[0] / 2**30
    return shards, (
        f"a replica would take {needed:.1f} of {limit:.1f} GiB; sharded over all devices it takes "
        f"{sharded:.1f}"
    )


# The rest is for activations, the loss head and communication buffers.
_STATE_SHARE = 0.5
