"""State rules of operations on dims: permute, slice, reduce, multiply matrices, gather."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxdist.plan.audit.states import (
    CONSTANT,
    EQUAL,
    FIXED,
    INDEX,
    LOOKUP,
    PARTIAL,
    ROW,
    VARYING,
    ZERO,
    Rule,
    dims_of,
    is_split,
    join,
    join_all,
    like,
    moved,
    omitted,
    operations,
    other,
    split,
)


def _after_reduction(state: int, gone: Sequence[int], ndim: int) -> int:
    return moved(state, _indices_without(gone, ndim))


def _indices_without(gone: Sequence[int], ndim: int) -> dict[int, int]:
    kept = [dim for dim in range(ndim) if dim not in gone]
    return {dim: index for index, dim in enumerate(kept)}


def reduce_sum(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a sum: PARTIAL if all split dims are summed, VARYING if only some."""
    [state] = states
    axes, shape = equation.params["axes"], equation.invars[0].aval.shape
    dims = dims_of(state)
    if not set(dims) & set(axes):
        return _after_reduction(state, axes, len(shape))
    # jax also removes a dim of size 1 by a sum, which adds nothing.
    adds_up = math.prod(shape[dim] for dim in dims) > 1
    return PARTIAL if set(dims) <= set(axes) and adds_up else VARYING


def reduce_other(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a max, product or similar; VARYING if a split dim is reduced."""
    state, axes = states[0], equation.params["axes"]
    if state == PARTIAL and equation.primitive.name in ("reduce_max", "reduce_min", "reduce_prod"):
        raise omitted(states, f"goes through {equation.primitive.name}")
    if state == PARTIAL or set(dims_of(state)) & set(axes):
        return VARYING
    result = _after_reduction(state, axes, len(equation.invars[0].aval.shape))
    return CONSTANT if result == ZERO else result


def along(equation: Any, states: Sequence[int]) -> int | list[int]:
    """Return the results' states of a cumulative sum or sort along a dim; other dims stay split."""
    params = equation.params
    dim = params.get("axis", params.get("dimension", len(equation.invars[0].aval.shape) - 1))
    linear = equation.primitive.name in ("cumsum", "rev")
    kept = []
    for state in states:
        lost = dim in dims_of(state) or (state == PARTIAL and not linear)
        kept.append(VARYING if lost else state)
    total = join_all(kept)
    return [total] * len(equation.outvars)


def broadcast_in_dim(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a broadcast; VARYING if it expands a split dim of size 1."""
    targets, source = equation.params["broadcast_dimensions"], equation.invars[0].aval.shape
    target = equation.outvars[0].aval.shape
    grown = {dim for dim, index in enumerate(targets) if source[dim] != target[index]}
    if grown & set(dims_of(states[0])):
        return VARYING
    return moved(states[0], list(targets))


def transpose(equation: Any, states: Sequence[int]) -> int:
    """Return the state of an array with permuted dims."""
    order = equation.params["permutation"]
    return moved(states[0], {dim: index for index, dim in enumerate(order)})


def squeeze(equation: Any, states: Sequence[int]) -> int:
    """Return the state without dims of size 1; VARYING if only these were split."""
    gone = equation.params["dimensions"]
    return _after_reduction(states[0], gone, len(equation.invars[0].aval.shape))


def reshape(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a reshape; all dims made from a split dim are split."""
    state = states[0]
    if not is_split(state):
        return state
    if equation.params.get("dimensions") is not None:
        return VARYING
    source, target = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    parts, new_dims = dims_of(state), list[int]()
    for before, after in _groups(source, target):
        if set(before) & set(parts):
            new_dims += after
    # One row per device became a larger dim: concatenated rows, or terms of a sum over rows.
    gone = math.prod(source[d] for d in parts) == 1 < math.prod(target[d] for d in new_dims)
    return split(*new_dims) | ROW if gone and new_dims else like(split(*new_dims), state)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return pairs of consecutive dims of `before` and of `after` with as many elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        while (a := math.prod(before[d] for d in left)) != (
            b := math.prod(after[d] for d in right)
        ):
            if a < b:
                left.append(left[-1] + 1)
            else:
                right.append(right[-1] + 1)
        i, j = left[-1] + 1, right[-1] + 1
        groups.append((left, right))
    return groups


def cut(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a static slice; a sliced dim is no longer split."""
    source, target = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    state = states[0]
    if not is_split(state):
        return state
    return like(split(*[dim for dim in dims_of(state) if source[dim] == target[dim]]), state)


def dynamic_slice(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a dynamic slice; slicing EQUAL by the device index splits the dim."""
    state, where = cut(equation, states[:1]), join_all(states[1:])
    if where in FIXED or state in (ZERO, PARTIAL):
        return state
    source, target = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    taken = [dim for dim in range(len(source)) if source[dim] != target[dim]]
    if where == INDEX and state == EQUAL and len(taken) == 1:
        return split(taken[0]) if source[taken[0]] % target[taken[0]] == 0 else INDEX
    return INDEX if where == INDEX and state in (EQUAL, CONSTANT, INDEX) else VARYING


def dynamic_update_slice(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a buffer after writing a slice."""
    into, update, *index = states
    if join_all(index) not in FIXED:
        return VARYING if (into, update) != (ZERO, ZERO) else ZERO
    full, part = (v.aval.shape for v in equation.invars[:2])
    if is_split(update):
        update = like(split(*[d for d in dims_of(update) if full[d] == part[d]]), update)
    return join(into, update)


def stack(equation: Any, states: Sequence[int]) -> int:
    """Return the state (`audit.states`) of stacked arrays."""
    axis, ndim = equation.params.get("axis", 0), len(equation.outvars[0].aval.shape)
    kept = [dim for dim in range(ndim) if dim != axis % ndim]
    return join_all(moved(state, kept) for state in states)


def split_array(equation: Any, states: Sequence[int]) -> list[int]:
    """Return the states of the results of the operation `split`."""
    axis, state = equation.params["axis"], states[0]
    if axis in dims_of(state):
        state = like(split(*[dim for dim in dims_of(state) if dim != axis]), state)
    return [state] * len(equation.outvars)


def unstack(equation: Any, states: Sequence[int]) -> list[int]:
    """Return the states of the slices along a dim that `unstack` removes."""
    axis, ndim = equation.params.get("axis", 0), len(equation.invars[0].aval.shape)
    return [_after_reduction(states[0], [axis % ndim], ndim)] * len(equation.outvars)


def pad(_: Any, states: Sequence[int]) -> int:
    """Return the state of a padded array; PARTIAL remains if the padding is zero."""
    return join(states[0], ZERO if states[1] == CONSTANT and states[0] != PARTIAL else states[1])


def window(equation: Any, states: Sequence[int]) -> int:
    """Return the state of pooling; dims without pooling windows stay split."""
    total = join_all(states)
    sizes = equation.params.get("window_dimensions", ())
    if total == PARTIAL:
        return PARTIAL if equation.primitive.name == "reduce_window_sum" else VARYING
    if any(dim >= len(sizes) or sizes[dim] != 1 for dim in dims_of(total)):
        return VARYING
    return total


_REDUCTIONS = operations("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor")
_ALONG = operations("cumlogsumexp cummax cummin cumprod cumsum rev sort top_k")
_WINDOWS = operations(
    "reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add "
    "select_and_scatter_add"
)


SUMMED = -1
"""Target of a dim that a product contracts, instead of a dim of the result; or any lower value."""

_GONE = 1000
"""Target of a dim that is not known."""


class MissingGather(Exception):
    """Raised if a product's factors are split along different dims: an error if one is a weight."""


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
    """Return a convolution's state, as of a product; VARYING if spatial dims are split."""
    params = equation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        if ZERO in states:
            return ZERO
        return join(*states) if all(state in FIXED for state in states) else VARYING
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


def gather(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a gather, whose indices or table rows may be split."""
    table, index = states[:2]
    if table == ZERO:
        return ZERO
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, ndim = equation.invars[0].aval.shape, len(equation.outvars[0].aval.shape)
    looked_up = [dim for dim in range(ndim) if dim not in numbers.offset_dims]
    of_index = dict(enumerate(looked_up))
    batching = numbers.operand_batching_dims
    of_table = _indices_without((*numbers.collapsed_slice_dims, *batching), len(shape))
    of_table = {dim: numbers.offset_dims[index] for dim, index in of_table.items()}
    of_table = {dim: index for dim, index in of_table.items() if sizes[dim] == shape[dim]}
    for dim, in_index in zip(batching, numbers.start_indices_batching_dims, strict=True):
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


def scatter_add(equation: Any, states: Sequence[int]) -> int:
    """Return the state of a scatter-add; PARTIAL if devices add own updates to the same rows."""
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
    batching = numbers.operand_batching_dims
    targets = _indices_without((*numbers.inserted_window_dims, *batching), len(shape))
    kept = {window[index]: dim for dim, index in targets.items()}
    in_index = numbers.scatter_indices_batching_dims
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
    "argmax": reduce_other,
    "argmin": reduce_other,
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": lambda _, states: join_all(states),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "iota": lambda *_: CONSTANT,
    "made": other,
    "pad": pad,
    "reduce_sum": reduce_sum,
    "reshape": reshape,
    "slice": cut,
    "split": split_array,
    "squeeze": squeeze,
    "stack": stack,
    "transpose": transpose,
    "unstack": unstack,
    **dict.fromkeys(_REDUCTIONS, reduce_other),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys(_WINDOWS, window),
}
