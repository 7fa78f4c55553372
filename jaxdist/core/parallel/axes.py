"""The list of mesh axes. Code for all axes reads `AXES` when it is called."""

from __future__ import annotations

from jaxdist.core.axis import Axis
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.data import DATA
from jaxdist.core.parallel.expert import EXPERT
from jaxdist.core.parallel.fsdp import FSDP
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR

AXES: tuple[Axis, ...] = (PIPELINE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)
"""Mesh axes, ordered from slow to fast interconnect."""


def names() -> tuple[str, ...]:
    """Return the names of the axes, in mesh order."""
    return tuple(axis.name for axis in AXES)


def row_axes() -> tuple[str, ...]:
    """Return the names of the axes that split the rows of a batch, in mesh order."""
    return tuple(axis.name for axis in AXES if axis.splits_rows)


def by_name() -> dict[str, Axis]:
    """Return axis by name; keys are the long names and the short names of `--mesh`."""
    return {name: axis for axis in AXES for name in (axis.name, axis.short)}


def joining_fsdp(zero: int) -> tuple[str, ...]:
    """Return the axes that shard arrays together with fsdp, in shard order; `zero` 0 = no ZeRO."""
    first = tuple(axis.name for axis in AXES if axis.joins_fsdp)
    others = (axis.name for axis in AXES if axis.weights == "replicated" and zero)
    return (*first, *(name for name in others if name not in first))


def rules() -> dict[str, str | None]:
    """Return logical dim -> the axis that splits it (never None), without `Model.rules`."""
    return {dim: axis.name for axis in AXES for dim in axis.dims}
