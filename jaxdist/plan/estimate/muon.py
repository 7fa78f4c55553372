"""Muon's update: which matrices a device makes orthogonal, as `optim/muon.py` divides them."""

from __future__ import annotations

import dataclasses
import math

from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.optim import hidden_matrices, is_frozen
from jaxdist.optim.matrices import sides_of
from jaxdist.plan.estimate.job import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """What one device makes orthogonal of a stack of matrices, in Muon's update.

    Attributes:
        matrices: number of whole matrices, padding included.
        rows: of each.
        columns: of each.
        axes: mesh axes that shard the matrices, over which they are exchanged; () = none.
    """

    matrices: int
    rows: int
    columns: int
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return self.matrices * self.rows * self.columns


def orthogonalised(job: Job) -> list[MatrixShare]:
    """A device's share of each stack that Muon updates; [] with another optimizer."""
    if job.config.optim.optimizer != "muon":
        return []
    moving = [w for w in job.weights if not is_frozen(job.config.optim, w.name.replace(".", "/"))]
    axes = {w.name: w.dims for w in moving}
    hidden, sides = hidden_matrices(axes), sides_of(axes)
    found = []
    for weight in moving:
        if not hidden[weight.name]:
            continue
        size = lambda dims, weight=weight: math.prod(weight.shape[i] for i in dims)
        parts = sides[weight.name]
        group = tuple(a for a in job.axes(weight, "moment") if a != PIPELINE.name)
        stacked = size(parts.stacked) // (job.spec[PIPELINE] if weight.is_stacked else 1)
        devices = math.prod(job.spec[axis] for axis in group)
        rows, columns = size(parts.rows), size(parts.columns)
        share = -(-stacked // devices)
        found.append(MatrixShare(matrices=share, rows=rows, columns=columns, axes=group))
    return found
