"""Placement of arrays on the mesh: logical dims -> mesh axes.

Models name their dims and never see a mesh. The kinds of data parallelism are choices made here:

    DDP      parameters and moments replicated over `data`
    ZeRO-1   moments (and the update) sharded over `data`           mesh.zero=1
    ZeRO-2   gradients of each microbatch sharded as well           mesh.zero=2
    ZeRO-3   parameters sharded as well, gathered layer by layer    mesh.zero=3, or the `fsdp` axis
    hybrid   `data` × `fsdp`: sharded inside a group, replicated across groups
    context  its devices shard what `fsdp` shards
    expert   its devices shard what `fsdp` shards, except experts, which it splits

Source: Rajbhandari et al. 2020, "ZeRO", section 5. Deviation: vectors (norm scales, biases) are not
sharded in these ways, because gathering a few kilobytes costs a latency.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.core.axis import Axis, axes_of, spec_of, spec_over
from jaxdist.core.mesh import MeshSpec, notation
from jaxdist.core.parallel import axes
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.types import Dims
from jaxdist.settings import ConfigError, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Settings of the mesh and of sharding."""

    shape: str = setting(
        "auto",
        f"devices along each mesh axis, e.g. dp=2,tp=4; -1 = the devices left over ({notation()}); "
        "auto = dp if a replica fits one device, else fsdp, or the nearest legal mesh",
    )
    zero: Literal[0, 1, 2, 3] = setting(
        0, "ZeRO stage over dp: 0 = off, 1 = shard moments, 2 = also gradients, 3 = also weights"
    )
    context_attention: Literal["auto", "ring", "all_gather", "all_to_all", "hybrid"] = setting(
        "auto",
        "exchange for attention between the devices that share a row (cp > 1): ring = keys and "
        "values move around a ring, all_gather = every device gathers all keys and values, "
        "all_to_all = each device gets all positions of some heads, hybrid = all_to_all in groups "
        "on one node and a ring between groups; auto = by heads, cp and packing; the log has the "
        "reason",
    )
    elastic: bool = setting(
        False,
        "continue with fewer devices than the mesh has: smaller "
        f"{', '.join(axis.short for axis in axes.AXES if axis.shrinks)}, more microbatches, the "
        "same rows in every step; needs a size for each axis",
    )

    def problems(self) -> list[str]:
        """Return an error message for each violated rule of this section."""
        problems = []
        if self.elastic and (self.shape == "auto" or "-1" in self.shape):
            problems.append(
                f"mesh.elastic with mesh.shape={self.shape!r}: a mesh without sizes cannot "
                "shrink. Give each axis its size with all devices, e.g. "
                "--mesh dp=8."
            )
        try:
            _ = self.spec
        except ConfigError as error:
            problems += error.problems
        return problems

    @functools.cached_property
    def spec(self) -> MeshSpec | None:
        """Return the axis sizes that `shape` names; None for "auto"."""
        return None if self.shape == "auto" else MeshSpec.parse(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Placement of all arrays of a run on the mesh; specs never contain axes of size 1.

    Attributes:
        rules: logical dim -> mesh axis, for dims specific to the model; `Axis.dims` has the others.
        zero: ZeRO stage over `data`.
        sequence_parallel: activations between blocks are split by sequence over `tensor`.
        auto_tensor: XLA shards the tensor axis automatically (for a model without hooks).
        stage_depths: number of layers of each virtual stage, in model order; () = equal numbers.
        host_of: process -> its host; processes that are not listed are each on a separate host.
    """

    mesh: Mesh
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    zero: int = 0
    sequence_parallel: bool = False
    auto_tensor: bool = False
    context_attention: str = "auto"
    stage_depths: tuple[int, ...] = ()
    host_of: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def mesh_spec(self) -> MeshSpec:
        """Return the sizes of the mesh."""
        return MeshSpec.of(self.mesh)

    def size(self, axis: Axis) -> int:
        """Return the number of devices along an axis."""
        return self.mesh_spec[axis]

    @property
    def used(self) -> tuple[Axis, ...]:
        """Return the manual axes with more than one device, in mesh order."""
        return tuple(axis for axis in self.mesh_spec.used if axis.name in self.manual_axes)

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """Return the names of the axes over which the step is manual (explicit collectives)."""
        names = tuple(self.mesh.axis_names)
        return tuple(a for a in names if not (a == TENSOR.name and self.auto_tensor))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Return the names of the axes in use that split the rows of a batch."""
        return tuple(axis.name for axis in self.mesh_spec.used if axis.splits_rows)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Return the names of axes over which a replicated parameter's local gradients differ."""
        when = ("always", "sequence_parallel") if self.sequence_parallel else ("always",)
        return tuple(axis.name for axis in self.mesh_spec.used if axis.sums_gradients in when)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Return the names of the axes in use over which the loss of a step is summed."""
        return tuple(axis.name for axis in self.mesh_spec.used if axis.sums_loss)

    @property
    def num_replicas(self) -> int:
        """Return the number of parts into which the rows of a batch are split."""
        return self.mesh_spec.num_replicas

    def param_specs(self, dims: Any) -> Any:
        """Return `PartitionSpec`s of parameters, for one `Dims` or each leaf of such a tree."""
        return jax.tree.map(lambda one: self._spec(one, self.zero == 3), dims)

    def gather_specs(self, dims: Any) -> Any:
        """Return `param_specs` with only the axes over which a parameter is gathered before use."""
        return jax.tree.map(self.gather_spec, dims)

    def gather_spec(self, dims: Dims) -> P:
        """Return `gather_specs` of one array."""
        own = {self._rules.get(name) for name in dims if name}
        gathered = (
            axis.name
            for axis in axes.AXES
            if axis.weights != "split" or (axis.joins_fsdp and axis.name not in own)
        )
        return spec_over(self._spec(dims, self.zero == 3), tuple(gathered))

    def moment_specs(self, dims: Any) -> Any:
        """Return specs of optimizer moments and of the update, for `dims` as in `param_specs`."""
        return jax.tree.map(lambda one: self._spec(one, self.zero > 0), dims)

    def gradient_specs(self, dims: Any) -> Any:
        """Return specs of a microbatch's gradients in accumulation; `dims` as in `param_specs`."""
        return self.moment_specs(dims) if self.zero >= 2 else self.param_specs(dims)

    def divisible(self, spec: P, shape: tuple[int, ...]) -> P:
        """Return `spec` without the axes of dims that the devices cannot divide evenly."""
        groups = [axes_of(P(entry)) for entry in spec]
        return spec_of(
            () if size % math.prod(self.mesh.shape[axis] for axis in group) else group
            for group, size in zip(groups, shape, strict=False)
        )

    def batch_spec(self) -> P:
        """Return the spec of a batch: rows and positions over the axes that split them."""
        positions = tuple(axis.name for axis in self.used if axis.splits_positions)
        return P(self.batch_axes or None, *([positions] if positions else []))

    def batch_specs(self, batch: Mapping[str, Any]) -> dict[str, P]:
        """Return `batch_spec` for each leaf of a batch [rows, ...], cut to its number of dims."""
        return {name: P(*self.batch_spec()[: x.ndim]) for name, x in batch.items()}

    def sharding(self, spec: P) -> NamedSharding:
        """Return the `NamedSharding` of a spec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """Return the `NamedSharding`s of a tree of specs on this mesh."""
        return jax.tree.map(self.sharding, specs)

    def constrain(self, tree: Any, specs: Any) -> Any:
        """Return arrays of any shapes laid out by `specs`, in a jitted function; XLA moves them."""
        return jax.tree.map(
            lambda spec, x: jax.lax.with_sharding_constraint(x, self.sharding(spec)), specs, tree
        )

    @functools.cached_property
    def _rules(self) -> dict[str, str | None]:
        return {**axes.rules(), **self.rules}

    def _spec(self, dims: Dims, with_zero: bool) -> P:
        rules, sizes = self._rules, self.mesh_spec
        _check_collisions(dims, rules)
        is_vector = sum(name != "layers" for name in dims) < 2
        own = {rules.get(name) for name in dims if name}
        joining = tuple(a for a in axes.joining_fsdp(int(with_zero)) if a not in own)
        groups: list[list[str]] = []
        for name in dims:
            axis = rules.get(name) if name else None
            group: tuple[str, ...] = () if axis is None else (axis,)
            if axis is not None and axes.by_name()[axis].weights == "gathered":
                group = () if is_vector else group + joining
            groups.append([a for a in group if sizes[a] > 1])
        return spec_of(groups)


def _check_collisions(dims: Dims, rules: Mapping[str, str | None]) -> None:
    taken: dict[str, str] = {}
    for name in dims:
        axis = rules.get(name) if name else None
        if name is None or axis is None:
            continue
        if axis in taken:
            raise ConfigError(
                f"dims {tuple(dims)}: {taken[axis]!r} and {name!r} would both be split by the "
                f"mesh axis {axis!r}, which can split one dim of an array. Name one of them "
                "None in the model's axes, or give it another axis in Model.rules."
            )
        taken[axis] = name
