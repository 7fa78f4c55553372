"""State rules of matrix products, convolutions, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxdist.plan.audit.elementwise import Rule, omitted
from jaxdist.plan.audit.states import (
    CONSTANT,
    EQUAL,
    FIXED,
    INDEX,
    LOOKUP,
    PARTIAL,
    VARYING,
    ZERO,
    dims_of,
    is_split,
    join,
    like,
    moved,
    split,
)

SUMMED = -1
"""Target of a dim that a product contracts, instead of a dim of the result; or any lower value."""

_GONE = 1000
"""Target of a dim that is not known."""


class MissingGather(Exception):
    """The factors are split along different dims; an error if one of them is a weight."""


def dot_general(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a matrix product; PARTIAL if a split dim is contracted."""
    (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
    shapes = [v.aval.shape for v in equation.invars]
    free_l = [d for d in range(len(shapes[0])) if d not in (*contract_l, *batch_l)]
    free_r = [d for d in range(len(shapes[1])) if d not in (*contract_r, *batch_r)]
    left = dict(zip((*batch_l, *free_l), range(len(batch_l) + len(free_l)), strict=True))
    right = dict(zip(batch_r, range(len(batch_r)), strict=True))
    right |= {dim: len(batch_l) + len(free_l) + i for i, dim in enumerate(free_r)}
    left |= {dim: SUMMED - i for i, dim in enumerate(contract_l)}
    right |= {dim: SUMMED - i for i, dim in enumerate(contract_r)}
    return _product(states, (left, right))


def convolution(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a convolution with unsplit spatial dims: a product."""
    params = equation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return _unsplit(states)
    lhs, rhs, out = params["dimension_numbers"]
    left = {lhs[0]: out[0], lhs[1]: SUMMED}
    right = {rhs[0]: out[1], rhs[1]: SUMMED}
    return _product(states, (left, right))


def _product(
    states: Sequence[int],
    targets: tuple[dict[int, int], dict[int, int]],
) -> int:
    """Return the state of a product; `targets[i][dim]` is the dim of the result, or <= SUMMED."""
    if ZERO in states:
        return ZERO
    if PARTIAL in states:
        if states[0] == states[1]:
            raise omitted(states, "is multiplied by a partial value")
        other = states[0] if states[1] == PARTIAL else states[1]
        return PARTIAL if other in FIXED else VARYING
    if not any(map(is_split, states)):
        equal = join(*states)
        return VARYING if equal in (INDEX, LOOKUP) else equal
    if VARYING in states or LOOKUP in states:
        return VARYING
    dims: list[set[int]] = []
    for state, target in zip(states, targets, strict=True):
        if is_split(state):
            dims.append({target.get(dim, _GONE) for dim in dims_of(state)})
    if any(_GONE in each for each in dims):
        return VARYING
    summed = [all(dim <= SUMMED for dim in each) for each in dims]
    kept = [all(dim > SUMMED for dim in each) for each in dims]
    common = dims[0] & dims[1] if len(dims) == 2 else dims[0]
    if all(summed):
        return PARTIAL if common else VARYING
    if all(kept) and common:
        return like(split(*common), *states)
    if len(dims) == 2 and (all(kept) or (True in summed and True in kept)):
        raise MissingGather("is split along another dim than the other factor")
    return VARYING


def _unsplit(states: Sequence[int]) -> int:
    if ZERO in states:
        return ZERO
    return join(*states) if all(state in FIXED for state in states) else VARYING


def gather(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a gather, whose indices or table rows may be split."""
    table, index = states[:2]
    if table == ZERO:
        return ZERO
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, ndim = equation.invars[0].aval.shape, len(equation.outvars[0].aval.shape)
    looked_up = [dim for dim in range(ndim) if dim not in numbers.offset_dims]
    of_index = dict(enumerate(looked_up))
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    of_table = _window_indices(len(shape), (*numbers.collapsed_slice_dims, *batching))
    of_table = {dim: numbers.offset_dims[index] for dim, index in of_table.items()}
    of_table = {dim: index for dim, index in of_table.items() if sizes[dim] == shape[dim]}
    for dim, in_index in zip(
        batching, getattr(numbers, "start_indices_batching_dims", ()), strict=True
    ):
        of_table[dim] = of_index[in_index]
    if is_split(table):
        if index == INDEX and set(dims_of(table)) <= set(numbers.start_index_map):
            return LOOKUP
        table = moved(table, of_table) if set(dims_of(table)) <= set(of_table) else VARYING
        if index in FIXED or not is_split(table):
            return table
        index = moved(index, of_index)
        if is_split(index) and not set(dims_of(index)) & set(dims_of(table)):
            raise MissingGather("is split along another dim than the indices that look it up")
        return join(table, index) if is_split(index) else VARYING
    if table == PARTIAL:
        return PARTIAL if index in FIXED else VARYING
    return join(table, moved(index, of_index))


def _window_indices(ndim: int, left_out: Sequence[int]) -> dict[int, int]:
    kept = [dim for dim in range(ndim) if dim not in left_out]
    return {dim: index for index, dim in enumerate(kept)}


def scatter_add(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a scatter-add; split updates to all rows give PARTIAL."""
    into, index, update = states[:3]
    state = _scattered(equation, index, update)
    if into == ZERO:
        return state
    return join(into, state)


def _scattered(equation: Any, index: int, update: int) -> int:
    if update == ZERO:
        return ZERO
    numbers = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    of_update = equation.invars[2].aval.shape
    window = numbers.update_window_dims
    scattered = [dim for dim in range(len(of_update)) if dim not in window]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    targets = _window_indices(len(shape), (*numbers.inserted_window_dims, *batching))
    kept = {window[index]: dim for dim, index in targets.items()}
    in_index = getattr(numbers, "scatter_indices_batching_dims", ())
    aligned = {scattered[i]: dim for i, dim in zip(in_index, batching, strict=True)}
    index = moved(index, scattered) if is_split(index) else index
    if update == PARTIAL:
        return PARTIAL if index in FIXED else VARYING
    if not is_split(index) and index not in FIXED:
        return VARYING
    if index in FIXED and not is_split(update):
        return update
    dims = set(dims_of(update)) if is_split(update) else set(dims_of(index))
    if is_split(update) and is_split(index):
        if not dims & set(dims_of(index)):
            return VARYING
        dims = dims & set(dims_of(index)) or dims
    elif not is_split(update) and update not in (EQUAL, CONSTANT):
        return VARYING
    if dims <= set(aligned):
        return like(split(*[aligned[dim] for dim in dims]), update, index)
    if dims <= set(scattered) - set(aligned):
        return PARTIAL
    if dims <= set(kept) and all(of_update[dim] == shape[kept[dim]] for dim in dims):
        return like(split(*[kept[dim] for dim in dims]), update, index)
    return VARYING


RULES: dict[str, Rule] = {
    "conv_general_dilated": convolution,
    "dot_general": dot_general,
    "gather": gather,
    "scatter-add": scatter_add,
    "scatter_add": scatter_add,
}
