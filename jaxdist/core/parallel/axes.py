"""The list of mesh axes. Code for all axes reads `AXES` when it is called.

`tensor` is last: its devices are neighbors inside a node.
"""

from __future__ import annotations

from jaxdist.core.axis import Axis
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.data import DATA
from jaxdist.core.parallel.fsdp import FSDP
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR

AXES: tuple[Axis, ...] = (PIPELINE, DATA, FSDP, CONTEXT, TENSOR)
"""Mesh axes, slow to fast interconnect."""


def names() -> tuple[str, ...]:
    """Return the names of the axes, in mesh order."""
    return tuple(axis.name for axis in AXES)


def row_axes() -> tuple[str, ...]:
    """Return the names of the axes over which the rows of a batch are split, in mesh order."""
    return tuple(axis.name for axis in AXES if axis.splits_rows)


def by_name() -> dict[str, Axis]:
    """Return name -> axis, for long names and the short ones of `--mesh`."""
    return {name: axis for axis in AXES for name in (axis.name, axis.short)}


def joining_fsdp(zero: int) -> tuple[str, ...]:
    """Return the axes that shard weights with fsdp at a ZeRO stage, in order of the shards."""
    others = (axis.name for axis in AXES if axis.weights == "replicated" and zero)
    return (CONTEXT.name, *(name for name in others if name != CONTEXT.name))


def rules() -> dict[str, str | None]:
    """Return logical dim -> the mesh axis that splits it; other dims are never split."""
    return {dim: axis.name for axis in AXES for dim in axis.dims}
