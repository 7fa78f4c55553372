"""Layers of virtual stages: how many each has, in which order they are stored, and exchanges.

Checkpoints store layers in the order of the model: `[num_layers, ...]`. With pipeline stages, the
state of a run stores layers on the stage that runs them, in *execution order*: of stage 0 all its
virtual stages, of stage 1 all of its, and so on. No step then moves weights between stages. Virtual
stages with fewer layers than the deepest one are padded with zeros, which no step runs or changes.
`to_execution_order` follows a start or a restore, `to_model_order` precedes a save.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import axes_of, divisors_of, spec_over
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.types import Array

LAYERS = "layers"
"""Key of the stacked layers in the parameters, and in moments with the same structure."""


@dataclasses.dataclass(frozen=True)
class LayerSplit:
    """Number of layers of each virtual stage, in the order of the model."""

    depths: tuple[int, ...]
    num_stages: int

    @classmethod
    def of(cls, num_layers: int, num_stages: int, virtual: int, depths: Any = ()) -> LayerSplit:
        """Return the split into virtual stages of `depths` layers; () = into equal ones."""
        total = num_stages * virtual
        return cls(tuple(depths) or (num_layers // total,) * total, num_stages)

    @property
    def slots(self) -> int:
        """Return the number of layers that each virtual stage stores: that of the deepest one."""
        return max(self.depths)

    @property
    def num_layers(self) -> int:
        """Return the number of layers of the model."""
        return sum(self.depths)

    @functools.cached_property
    def num_stored(self) -> int:
        """Return the number of layers of all stages, including padding."""
        return len(self.depths) * self.slots

    @property
    def is_padded(self) -> bool:
        """Return whether some virtual stages have fewer layers than others."""
        return self.num_stored > self.num_layers

    @property
    def starts(self) -> np.ndarray:
        """Return the model index of each virtual stage's first layer, int32 [virtual stages]."""
        return np.cumsum([0, *self.depths[:-1]], dtype=np.int32)

    @property
    def order(self) -> np.ndarray:
        """Return the model index of each stored layer, int [num_stored]; num_layers = padding."""
        slot = np.arange(self.slots)
        depths = np.array(self.depths)[:, None]
        indices = np.where(slot < depths, self.starts[:, None] + slot, self.num_layers)
        rounds = len(self.depths) // self.num_stages
        return indices.reshape(rounds, self.num_stages, self.slots).swapaxes(0, 1).reshape(-1)

    @property
    def positions(self) -> np.ndarray:
        """Return the index of each layer among the stored ones, int [num_layers]."""
        return np.argsort(self.order, kind="stable")[: self.num_layers]

    def of_stage(self, stage: int) -> int:
        """Return the number of layers of a stage."""
        return sum(self.depths[stage :: self.num_stages])


@functools.cache
def balanced(
    num_layers: int, num_stages: int, num_virtual_stages: int, head: float
) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage: equal, or else with the shortest ticks.

    `head` is the time of the head, forward and backward, relative to that of a layer. A backward
    takes two forwards. All stages wait for the longest, and the head runs in the backward of the
    last virtual stage. Of the others, the last ones are deeper.
    """
    total = num_stages * num_virtual_stages

    def depths(last: int) -> tuple[int, ...]:
        each, more = divmod(num_layers - last, max(1, total - 1))
        return (*(each + (i >= total - 1 - more) for i in range(total - 1)), last)

    def seconds(depths: Sequence[int]) -> float:
        deepest = max(depths)
        at_end = max(0.0, 2 * depths[-1] + 3 * head - 2 * deepest)
        return 3 * deepest * num_virtual_stages + at_end

    if num_layers % total == 0:
        return (num_layers // total,) * total
    choices = [depths(last) for last in range(-(-num_layers // total), -1, -1)]
    return min(choices, key=seconds)


MOST = 10
"""Maximum number of virtual stages per stage; more hardly reduce the bubble."""

_LOOP = 0.1
"""Time of an iteration of the loop over layers without its layers, relative to a layer.

Fitted to the step times of 13B and 70B in `scripts/bench/results/pipeline_gpu_compile.md`."""

_UNROLLED = 2  # layers of a virtual stage that the compiler sees as one sequence


@functools.cache
def cheapest(
    num_layers: int, num_stages: int, num_microbatches: int, head: float
) -> tuple[int, ...]:
    """Return the layers per virtual stage of the fastest split; `head` as in `balanced`."""
    p, m = num_stages, num_microbatches
    groups, last = divmod(m - 1, p)  # microbatches pass in groups of p

    def seconds(depths: Sequence[int]) -> float:
        virtual, deepest = len(depths) // p, max(depths)
        # An incomplete last group leaves idle ticks.
        ticks = groups * p * virtual + (virtual - 1) * p + last + p
        loops = 1 if deepest <= _UNROLLED else deepest
        at_end = max(0.0, 2 * depths[-1] + 3 * head - 2 * deepest)
        return 3 * ticks * (deepest + _LOOP * loops) + m * at_end

    counts = [v for v in divisors_of(-(-num_layers // p)) if v <= MOST]
    return min((balanced(num_layers, p, v, head) for v in counts), key=seconds)


def stored_shape(path: Any, x: Any, split: LayerSplit) -> tuple[int, ...]:
    """Return the shape in execution order of a leaf in the order of the model."""
    return (split.num_stored, *x.shape[1:]) if _is_stacked(path, x, split) else x.shape


def model_rows(path: Any, x: Any, split: LayerSplit) -> np.ndarray | None:
    """Return the model's layer of each row of a leaf in execution order, int [num_stored].

    It is -1 for padding. None = the leaf has no layers, or those in the order of the model.
    """
    if _is_in_order(split) or not _is_stacked(path, x, split):
        return None
    return np.where(split.order < split.num_layers, split.order, -1)


def model_order_sharding(path: Any, x: Any, stored: NamedSharding, split: LayerSplit) -> Any:
    """Return the sharding of a leaf in model order [num_layers, ...], maybe of another dim."""
    if not (split.is_padded and _is_stacked(path, x, split) and _is_split(stored.spec)):
        return stored
    return stored.update(spec=_Exchange.of(stored.spec, x.shape, stored.mesh).between)


def to_execution_order(tree: Any, split: LayerSplit) -> Any:
    """Return a tree of arrays or structs with layers in execution order, [num_stored, ...]."""
    return _reorder(tree, split, to_model=False)


def to_model_order(tree: Any, split: LayerSplit) -> Any:
    """Return a tree in execution order with its layers in model order, [num_layers, ...]."""
    return _reorder(tree, split, to_model=True)


class _Exchange(NamedTuple):
    """Exchange of an array's layers between stages, via a layout with all layers on each stage.

    Attributes:
        stored: spec in execution order; dim 0 is not split if each stage has all layers.
        between: spec with dim `dim` split over the stages, instead of the layers.
        dim: -1 = no dim can be split, and each stage has all layers in between.
    """

    stored: P
    between: P
    dim: int

    @classmethod
    def of(cls, stored: P, shape: tuple[int, ...], mesh: Any) -> _Exchange:
        if not _is_split(stored):
            return cls(stored, stored, -1)
        entries = [*stored, *[None] * (len(shape) - len(stored))]
        p = mesh.shape[PIPELINE.name]
        sizes = [math.prod(mesh.shape[axis] for axis in axes_of(P(entry))) for entry in entries]
        fits = [d for d in range(1, len(shape)) if shape[d] % (sizes[d] * p) == 0]
        dim = fits[0] if fits else -1
        between = [None, *entries[1:]]
        if dim > 0:
            between[dim] = (*axes_of(P(entries[dim])), PIPELINE.name)
        return cls(stored, P(*between), dim)

    @classmethod
    def to_execution(cls, spec: P, shape: tuple[int, ...], mesh: Any) -> _Exchange:
        """Return the exchange from model order, where an array has `spec`, to execution order."""
        rest = [
            spec_over(P(entry), tuple(a for a in axes_of(P(entry)) if a != PIPELINE.name))
            for entry in spec[1:]
        ]
        stored = P(PIPELINE.name, *(part[0] if part else None for part in rest))
        made = cls.of(stored, shape, mesh)
        # Without the axis although a dim could be split, each stage stores all layers.
        return made if made.dim < 0 or PIPELINE.name in axes_of(spec) else cls(P(*spec), spec, -1)


def _reorder(tree: Any, split: LayerSplit, *, to_model: bool) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    stacked = [i for i, (path, x) in enumerate(leaves) if _is_stacked(path, x, split)]
    if _is_in_order(split) or not stacked:
        return tree
    arrays = [leaves[i][1] for i in stacked]
    make = _Exchange.of if to_model or not split.is_padded else _Exchange.to_execution
    exchanges = tuple(make(x.sharding.spec, x.shape, x.sharding.mesh) for x in arrays)
    rows = split.num_layers if to_model else split.num_stored
    specs = [e.between if to_model and split.is_padded else e.stored for e in exchanges]
    targets = [x.sharding.update(spec=spec) for x, spec in zip(arrays, specs, strict=True)]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        pairs = zip(arrays, targets, strict=True)
        moved: list[Any] = [x.update(shape=(rows, *x.shape[1:]), sharding=to) for x, to in pairs]
    else:
        mover = _mover(arrays[0].sharding.mesh, exchanges, split, to_model)
        moved = jax.device_put(list(mover(*arrays)), targets)
    new = dict(zip(stacked, moved, strict=True))
    return jax.tree.unflatten(structure, [new.get(i, x) for i, (_, x) in enumerate(leaves)])


def _is_in_order(split: LayerSplit) -> bool:
    """Return whether execution order is that of the model."""
    return len(split.depths) == split.num_stages and not split.is_padded


def _is_split(spec: P) -> bool:
    """Return whether the stages have different layers of an array."""
    return PIPELINE.name in axes_of(P(*spec[:1]))


def _is_stacked(path: Any, x: Any, split: LayerSplit) -> bool:
    """Return whether a leaf is [layers, ...], in one of the two orders."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    shape = getattr(x, "shape", ())
    return LAYERS in names and shape[:1] in ((split.num_layers,), (split.num_stored,))


@functools.lru_cache(maxsize=16)
def _mover(
    mesh: Any, exchanges: tuple[_Exchange, ...], split: LayerSplit, to_model: bool
) -> Callable[..., Any]:
    padded = split.is_padded

    def leaf(x: Array, exchange: _Exchange) -> Array:
        """Reorder x [layers stored here, ...], or [layers, ...] if each stage has all."""
        dim, moves = exchange.dim, _is_split(exchange.stored)
        if moves and (to_model or not padded):  # -> [all layers, ..., n / stages, ...]
            if dim < 0:
                x = collectives.all_gather(x, PIPELINE.name, dim=0)
            else:
                x = collectives.all_to_all(x, PIPELINE.name, split_dim=dim, concat_dim=0)
        rows = split.positions if to_model else split.order
        x = jnp.take(x, rows, axis=0, mode="fill", fill_value=0)  # zeros in padding
        if not moves or (to_model and padded):
            return x
        if dim < 0:
            mine = x.shape[0] // split.num_stages
            start = collectives.group_index(PIPELINE.name) * mine
            return lax.dynamic_slice_in_dim(x, start, mine)
        return collectives.all_to_all(x, PIPELINE.name, split_dim=0, concat_dim=dim)

    def move(*arrays: Array) -> tuple[Array, ...]:
        return tuple(map(leaf, arrays, exchanges))

    ends = (
        tuple(e.stored for e in exchanges),
        tuple(e.between if padded else e.stored for e in exchanges),
    )
    inputs, outputs = ends if to_model else ends[::-1]
    return jax.jit(
        jax.shard_map(move, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    )
