"""Muon's update: which matrices a device makes orthogonal, as `optim/muon.py` divides them."""

from __future__ import annotations

import dataclasses
import math

from jaxdist.core.matrices import sides_of
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.optim import hidden_matrices, is_frozen
from jaxdist.plan.estimate.job import WIDE, Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """What one device makes orthogonal of a stack of matrices, in Muon's update.

    Attributes:
        matrices: number of whole matrices, padding included.
        rows: of each.
        columns: of each.
        axes: mesh axes that shard the matrices, over which they are exchanged; () = none.
        is_padded: whether the matrices of the stack are no multiple of these devices.
    """

    matrices: int
    rows: int
    columns: int
    axes: tuple[str, ...]
    is_padded: bool

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
        found.append(
            MatrixShare(
                matrices=-(-stacked // devices),
                rows=rows,
                columns=columns,
                axes=group,
                is_padded=stacked % devices > 0,
            )
        )
    return found


def matrix_bytes(job: Job) -> float:
    """Bytes of whole matrices alive at once, as in the buffer assignments.

    The largest stack as it is sent, as it came and was turned, and as it was made; of the others
    the padded copies, which are made ahead.
    """
    shares = sorted(orthogonalised(job), key=lambda share: share.size)
    if not shares:
        return 0.0
    largest = shares.pop()
    return float(WIDE * (3 * largest.size + sum(one.size for one in shares if one.is_padded)))
