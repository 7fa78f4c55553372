"""The update of a step, group by group, with moments that a store keeps outside of the devices.

A group is a range of layers of all stacked parameters, a range of rows of one large parameter, or
several small parameters. After the program of gradients, the host runs one program per group:

    reader thread   moments of group i+1, from the store
    devices         update of group i
    writer thread   new moments of group i-1, to the store

Every program updates its slice of the donated parameters in place, so that device memory has the
moments of about three groups. The numbers are those of the same programs with moments in memory; a
step in one program rounds differently by at most one unit in the last place (XLA fuses it
differently). `Unit` is the smallest part of a model that the update rule treats on its own: no
group cuts one. Stacked parameters whose layers are divided over devices are not cut either.

Each process keeps the shards of its own devices, one copy of those that several devices have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit, to_execution_order
from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState, abstract_state, moment_params
from jaxdist.core.types import Array, Batch, Model, Params
from jaxdist.core.weights import merged, trained

Unit: TypeAlias = Literal["element", "layer", "model"]
"""The smallest part of a model whose update depends on no other part."""

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of a shard in each dim of its array."""

GROUP_BYTES = 512 << 20
"""Moments of one group, if its parameters can be cut: large reads and writes, little memory."""

IN_FLIGHT = 3
"""Groups whose moments are on the devices at once: one arrives, one is updated, one leaves."""


class ParamGroup(NamedTuple):
    """Parameters that are updated together: indices of trained leaves, and a range of rows.

    `rows` 0 = the complete arrays, else `rows` entries of the first dim from `start` on.
    """

    params: tuple[int, ...]
    start: int = 0
    rows: int = 0

    def cut(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of the group's part of an array."""
        return leaf.update(shape=(self.rows, *leaf.shape[1:])) if self.rows else leaf


def shards_of(leaf: Any) -> dict[Bounds, list[Any]]:
    """Return the bounds of each shard [rows, ...] of an array in this process -> its devices."""
    devices: dict[Bounds, list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        pairs = zip(index, leaf.shape, strict=True)
        devices.setdefault(tuple(s.indices(size)[:2] for s, size in pairs), []).append(device)
    return devices


@dataclass(frozen=True)
class Groups:
    """Groups of parameters that are updated together, and their optimizer moments.

    Attributes:
        state: shapes and shardings of the train state with its moments on the devices, in the
            execution order of `layers`.
        layers: number of layers of each virtual stage.
        params, gradients: leaves of its trained parameters, and their gradients.
        moments: leaves of its optimizer state.
        of: index of the parameter of each leaf in `moments`; -1 for those that stay on devices.
    """

    state: TrainState
    layers: LayerSplit
    params: tuple[jax.ShapeDtypeStruct, ...]
    gradients: tuple[jax.ShapeDtypeStruct, ...]
    moments: tuple[jax.ShapeDtypeStruct, ...]
    of: tuple[int, ...]
    groups: tuple[ParamGroup, ...]

    def leaves(self, group: ParamGroup) -> list[int]:
        """Return the indices in `moments` of a group's moments."""
        return [leaf for leaf, param in enumerate(self.of) if param in group.params]

    def parts(self, group: ParamGroup) -> list[jax.ShapeDtypeStruct]:
        """Return shape, dtype and sharding of each moment of a group."""
        return [group.cut(self.moments[leaf]) for leaf in self.leaves(group)]

    @property
    def kept(self) -> list[jax.ShapeDtypeStruct]:
        """Return the leaves of the optimizer state that stay on the devices, most of them []."""
        return [m for m, param in zip(self.moments, self.of, strict=True) if param < 0]


class Store(Protocol):
    """Storage of each group's optimizer moments between two steps, as arrays on the host.

    The shards of a group are those of this process: of each of its `parts`, the `shards_of`.
    """

    groups: Groups

    def read(self, group: int, step: int) -> list[np.ndarray]:
        """Return a group's shards [rows, ...]; raises unless they are those after `step` steps."""

    def write(self, group: int, step: int, shards: Sequence[np.ndarray]) -> None:
        """Replace the shards [rows, ...] of a group by those after `step` steps."""


class Decision(NamedTuple):
    """Gradient norm and learning rate, float32 []; whether to update, bool []."""

    norm: Array
    learning_rate: Array
    applied: Array


def plan_groups(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    layers: LayerSplit,
    unit: Unit,
    **kept: Any,
) -> Groups:
    """Return the trained parameters in groups of about `GROUP_BYTES` of moments.

    `unit` is that of the optimizer's rule. `kept` are the options of `abstract_state`.
    """
    state = to_execution_order(abstract_state(model, optimizer, layout, **kept), layers)
    params = trained(state.params, model.axes)
    moments = tuple(jax.tree.leaves(state.opt_state))
    of = tuple(jax.tree.leaves(moment_params(optimizer, state.opt_state, params)))
    dims = jax.tree.leaves(trained(model.axes, model.axes))
    leaves = tuple(jax.tree.leaves(params))
    sizes = [0] * len(leaves)
    for moment, param in zip(moments, of, strict=True):
        if param >= 0:
            sizes[param] += _bytes(moment)
    specs = layout.shardings(layout.moment_specs(trained(model.axes, model.axes)))
    pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
    grads = tuple(leaf.update(sharding=sharding) for leaf, sharding in pairs)
    has_rows = [
        unit != "model"
        and _has_rows([grad, *(m for m, p in zip(moments, of, strict=True) if p == i)])
        for i, grad in enumerate(grads)
    ]
    stacked = tuple(i for i, names in enumerate(dims) if names[:1] == ("layers",) and has_rows[i])
    others = [i for i in range(len(leaves)) if i not in stacked]
    large = [i for i in others if unit == "element" and sizes[i] > GROUP_BYTES and has_rows[i]]
    groups: list[ParamGroup] = []
    for members in (*((i,) for i in large), stacked):
        total = sum(sizes[i] for i in members)
        groups += _ranges(members, leaves[members[0]].shape[0], total) if members else ()
    small: list[int] = []
    for i in (i for i in others if i not in large):
        if small and unit != "model" and sum(sizes[j] for j in (*small, i)) > GROUP_BYTES:
            groups.append(ParamGroup(tuple(small)))
            small = []
        small.append(i)
    groups += [ParamGroup(tuple(small))] if small else []
    return Groups(state, layers, leaves, grads, moments, of, tuple(groups))


def _ranges(members: tuple[int, ...], rows: int, num_bytes: int) -> Iterator[ParamGroup]:
    each = max(1, -(-rows // max(1, -(-num_bytes // GROUP_BYTES))))
    for start in range(0, rows, each):
        yield ParamGroup(members, start, min(each, rows - start))


def _has_rows(arrays: Sequence[Any]) -> bool:
    """Return whether no device axis splits the first dim of gradient and moments."""
    return all(x.sharding.spec[:1] in ((), (None,)) for x in arrays)


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


class GroupedTrain:
    """A train step whose optimizer moments are in a store; called like `Step.train`.

    `begin` maps (state, batch, limit) to gradients, `Decision`, the new `step` and `loss_scale`,
    and metrics. `update` is that of `make_update`. `average` maps (copies, parameters) to the new
    copies. `lower` and `trace` are those of `begin`, which has the collectives and the peak of
    device memory; compiling the result of `lower` without options compiles the groups' too.
    """

    def __init__(
        self,
        store: Store,
        begin: Any,
        update: Callable[..., tuple[Params, Any]],
        average: Callable[[Params, Params], Params],
        axes: Params,
        *,
        one_at_a_time: bool,
    ):
        """`axes` are the model's. `one_at_a_time`: no two programs may run concurrently."""
        self._groups = groups = store.groups
        self._store, self._axes = store, axes
        self._begin, self._update, self._one_at_a_time = begin, update, one_at_a_time
        self.trace, self._cache_size = begin.trace, begin._cache_size
        keep = lambda applied, new, old: jax.tree.map(
            lambda n, o: jnp.where(applied, n, o), new, old
        )
        shardings = jax.tree.map(lambda x: x.sharding, groups.state.copies)
        self._average = jax.jit(
            lambda old, params, applied: keep(applied, average(old, params), old),
            donate_argnums=0,
            out_shardings=shardings,
        )
        self._programs = {(g.params, g.rows): self._program(g) for g in groups.groups}
        everywhere = groups.state.step.sharding
        self._starts = functools.cache(
            lambda start: jax.make_array_from_callback((), everywhere, lambda _: np.int32(start))
        )

    def lower(self, state: Any, batch: Any, limit: Any) -> _Lowered:
        """Return the lowered program of gradients; see `_Lowered.compile`."""
        return _Lowered(self._begin.lower(state, batch, limit), self._lower_groups)

    def __call__(self, state: TrainState, batch: Batch, limit: Any) -> tuple[TrainState, Any]:
        """Return (new state, metrics); returns when the store has all new moments."""
        groups, store = self._groups.groups, self._store
        step = int(jax.device_get(state.step))
        moving, treedef = jax.tree.flatten(trained(state.params, self._axes))
        scalars = jax.tree.leaves(state.opt_state)
        new_scalars: list[Array] = []
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            read = reader.submit(store.read, 0, step)
            grads, decision, small, metrics = self._begin(state, batch, limit)
            grads = jax.tree.leaves(grads)
            written: Future[None] | None = None
            for number, group in enumerate(groups):
                host = read.result()
                if number + 1 < len(groups):
                    read = reader.submit(store.read, number + 1, step)
                own = [[leaves[i] for i in group.params] for leaves in (moving, grads)]
                updated, moments, new_scalars = self._programs[group.params, group.rows](
                    *own, self._to_devices(group, host), scalars,
                    self._starts(group.start), decision,
                )  # fmt: skip
                for i, leaf in zip(group.params, updated, strict=True):
                    moving[i] = leaf
                if self._one_at_a_time:
                    jax.block_until_ready(moments)
                if written is not None:  # bounds host memory
                    written.result()
                shards = [x for moment in moments for x in _own_shards(moment)]
                written = writer.submit(self._write, number, step + 1, shards)
            assert written is not None
            written.result()
        params = merged(jax.tree.unflatten(treedef, moving), state.params)
        copies = state.copies
        if copies:
            copies = self._average(copies, params, decision.applied)
        new = replace(
            state,
            params=params,
            opt_state=jax.tree.unflatten(jax.tree.structure(state.opt_state), new_scalars),
            copies=copies,
            **small,
        )
        return new, metrics

    def _to_devices(self, group: ParamGroup, host: Sequence[np.ndarray]) -> list[Array]:
        """Return the moments [rows, ...] of a group from this process's shards [rows, ...]."""
        parts = self._groups.parts(group)
        devices = [owners for part in parts for owners in shards_of(part).values()]
        pairs = list(zip(host, devices, strict=True))
        moved = iter(
            jax.device_put(
                [x for x, own in pairs for _ in own], [d for own in devices for d in own]
            )
        )
        take = lambda part: [next(moved) for own in shards_of(part).values() for _ in own]
        make = jax.make_array_from_single_device_arrays
        return [make(part.shape, part.sharding, take(part)) for part in parts]

    def _write(self, group: int, step: int, shards: list[Array]) -> None:
        """Copy the shards [rows, ...] of a group to the host, then to the store."""
        for shard in shards:
            shard.copy_to_host_async()
        self._store.write(group, step, jax.device_get(shards))

    def _lower_groups(self) -> list[Any]:
        """Return the lowered updates of the groups, one for groups that differ only in `start`."""
        groups = self._groups
        scalars = groups.kept
        everywhere = groups.state.step.sharding
        number = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=everywhere)
        decision: Any = tuple(map(number, (jnp.float32, jnp.float32, jnp.bool_)))
        lowered = []
        for group in {(g.params, g.rows): g for g in groups.groups}.values():
            own = [
                [of_all[i] for i in group.params] for of_all in (groups.params, groups.gradients)
            ]
            rest = (groups.parts(group), scalars, number(jnp.int32), Decision(*decision))
            lowered.append(self._programs[group.params, group.rows].lower(*own, *rest))
        return lowered

    def _program(self, group: ParamGroup) -> Any:
        """Make the update of groups that differ only in their first row, which is an argument.

        It runs the update rule on trees of the structure of the model in which parameters outside
        of the group have no elements.
        """
        groups, rows = self._groups, group.rows
        leaves = groups.leaves(group)
        treedef = jax.tree.structure(groups.state.opt_state)
        everything, structure = jax.tree.flatten(groups.state.params)
        moves = [dims.update != "none" for dims in jax.tree.leaves(self._axes)]
        indices = np.where(moves, np.cumsum(moves) - 1, -1).tolist()

        def spread(parts: Sequence[Array]) -> Params:
            own = dict(zip(group.params, parts, strict=True))
            pairs = zip(indices, everything, strict=True)
            filled = [own[i] if i in own else _empty(leaf) for i, leaf in pairs]
            return jax.tree.unflatten(structure, filled)

        def run(
            params: list[Array],
            grads: list[Array],
            moments: list[Array],
            scalars: list[Array],
            start: Array,
            decision: Decision,
        ) -> tuple[list[Array], list[Array], list[Array]]:
            """Return parameters [...] with the group updated, its moments, and the scalars []."""
            cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, rows) if rows else x
            old = list(map(cut, params))
            own, rest = iter(moments), iter(scalars)
            filled = [
                next(own) if i in leaves
                else next(rest) if groups.of[i] < 0
                else _empty(leaf)
                for i, leaf in enumerate(groups.moments)
            ]  # fmt: skip
            state = replace(
                groups.state, params=spread(old), opt_state=jax.tree.unflatten(treedef, filled)
            )
            gradients = trained(spread(list(map(cut, grads))), self._axes)
            updated, opt_state = self._update(
                state, gradients, decision.norm, decision.learning_rate
            )
            keep = lambda new, old: jnp.where(decision.applied, new, old)
            new = jax.tree.leaves(trained(updated, self._axes))
            kept = [keep(new[i], before) for i, before in zip(group.params, old, strict=True)]
            if rows:
                put = jax.lax.dynamic_update_slice_in_dim
                kept = [put(x, part, start, 0) for x, part in zip(params, kept, strict=True)]
            after = list(map(keep, jax.tree.leaves(opt_state), filled))
            others = [x for x, param in zip(after, groups.of, strict=True) if param < 0]
            return kept, [after[i] for i in leaves], others

        shardings = (
            [groups.params[i].sharding for i in group.params],
            [part.sharding for part in groups.parts(group)],
            [leaf.sharding for leaf in groups.kept],
        )
        return jax.jit(run, donate_argnums=(0, 2), out_shardings=shardings)


def _own_shards(x: Array) -> list[Array]:
    """Return one copy of each shard [rows, ...] of an array in this process."""
    data = {shard.device: shard.data for shard in x.addressable_shards}
    return [data[own[0]] for own in shards_of(x).values()]


def _empty(leaf: Any) -> Array:
    """Return an empty array [0, 0, ...] with the number of dims and the dtype of `leaf`."""
    return jnp.zeros((0,) * leaf.ndim, leaf.dtype)


class _Lowered(NamedTuple):
    """The lowered programs of a step; `compile` returns the compiled program of gradients."""

    begin: Any
    groups: Callable[[], list[Any]]

    def compile(self, **options: Any) -> Any:
        """Compile all programs, or with options only that of gradients; return the latter."""
        for program in () if options else self.groups():
            program.compile()
        return self.begin.compile(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.begin, name)
