"""Find the matrices in parameter arrays: their row and column dims, and the stacked dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.core.types import Dims, Params

_STACKED = ("layers", "experts")


@dataclass(frozen=True)
class Sides:
    """Indices of stacked, row and column dims; a vector has only rows."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Return True if there are row and column dims."""
        return bool(self.columns)


def sides_of(axes: Params) -> Params:
    """Return a tree like `axes` with a `Sides` per leaf; `...bias` and `...scale` are vectors."""
    return jax.tree_util.tree_map_with_path(_sides, axes)


def _sides(path: Any, dims: Dims) -> Sides:
    """Split the dims of an array into stacked dims, rows and columns.

    If the first unstacked dim is `d_model`, it is the rows. Otherwise the rows are all but the last
    (`head_dim` belongs to the dim before it). An unnamed column dim stacks fused projections
    (query, key, value; gate, up), each of which is a separate matrix.
    """
    is_vector = jax.tree_util.keystr(path[-1:], simple=True).endswith(("bias", "scale"))
    stacked = [i for i, name in enumerate(dims) if name in _STACKED]
    rest = [i for i, name in enumerate(dims) if name not in _STACKED]
    if is_vector or len(rest) < 2:
        return Sides(tuple(stacked), tuple(rest), ())
    split = 1 if dims[rest[0]] == "d_model" else len(rest) - 1
    while dims[rest[split]] == "head_dim" and split > 1:
        split -= 1
    columns = [i for i in rest[split:] if dims[i] is not None] or rest[split:]
    stacked += [i for i in rest[split:] if i not in columns]
    return Sides(tuple(stacked), tuple(rest[:split]), tuple(columns))
