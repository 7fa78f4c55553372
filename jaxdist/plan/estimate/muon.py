"""Matrices that one device orthogonalizes in Muon's update, divided as in `optim/muon.py`."""

from __future__ import annotations

import dataclasses
import math

from jaxdist.core.matrices import sides_of
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.optim import hidden_matrices
from jaxdist.plan.estimate.job import WIDE, Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """Matrices of a stack that a device orthogonalizes, with padding; `axes` shard them."""

    matrices: int
    rows: int
    columns: int
    axes: tuple[str, ...]
    is_padded: bool

    @property
    def size(self) -> int:
        """Number of elements of all matrices of the share."""
        return self.matrices * self.rows * self.columns


def orthogonalized(job: Job) -> list[MatrixShare]:
    """Return a device's share of each stack that Muon updates; [] with another optimizer."""
    if job.config.optim.optimizer != "muon":
        return []
    moving = job.trained
    axes = {w.name: w.dims for w in moving}
    hidden, sides = hidden_matrices(axes), sides_of(axes)
    shares = []
    for weight in moving:
        if not hidden[weight.name]:
            continue
        size = lambda dims, weight=weight: math.prod(weight.shape[i] for i in dims)
        parts = sides[weight.name]
        group = tuple(a for a in job.axes(weight, "moment") if a != PIPELINE.name)
        stacked = size(parts.stacked) // (job.spec[PIPELINE] if weight.is_stacked else 1)
        devices = math.prod(job.spec[axis] for axis in group)
        rows, columns = size(parts.rows), size(parts.columns)
        shares.append(
            MatrixShare(
                matrices=-(-stacked // devices),
                rows=rows,
                columns=columns,
                axes=group,
                is_padded=stacked % devices > 0,
            )
        )
    return shares


def matrix_bytes(job: Job) -> float:
    """Return the peak bytes on a device of the matrices gathered for Muon; 0 without it.

    The largest stack counts three times (sent, received and transposed, result). Other stacks add
    their padded copies, which XLA makes in advance. From XLA's buffer assignments.
    """
    shares = sorted(orthogonalized(job), key=lambda share: share.size)
    if not shares:
        return 0.0
    largest = shares.pop()
    return float(WIDE * (3 * largest.size + sum(one.size for one in shares if one.is_padded)))
