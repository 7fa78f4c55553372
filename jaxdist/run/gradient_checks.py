"""Checks that training reaches every parameter, by the moments of the optimizer.

A parameter whose moments are zero has received no gradient. The loss alone does not show that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jaxdist.checkpoint.moment_store import MomentStore
from jaxdist.core.parallel.pipeline.virtual_stages import LAYERS
from jaxdist.core.state import TrainState
from jaxdist.core.types import Array

FIRST_STEPS = 5
"""Steps after which every parameter has a gradient: adapters first need a nonzero B."""

INPUT_ROWS, HEAD_ROWS = "embed/table/rows", "head/kernel/rows"
"""Trained rows of tokens, [tokens, d_model]. Every step changes the logits of every token, so the
head's rows always have a gradient. A row of a separate table has none if its token is never an
input before a learned token, e.g. the end of chats with one answer."""


def moments_of(parameter: str, names: Iterable[str]) -> list[str]:
    """Return the names of a parameter's moments among those of the optimizer state's arrays.

    Parameters: e.g. "layers/mlp/up". Moments: e.g. "0/mu/layers/mlp/up".
    """
    return [name for name in names if name.endswith(f"/{parameter}")]


def is_measured(shape: tuple[int, ...], dtype: Any, parameter_shape: tuple[int, ...]) -> bool:
    """Return whether zeros in a moment show that there was no gradient.

    Codes of 8-bit moments do not: their scales do. Optimizers store a single value for moments
    that a parameter does not have.
    """
    size, full_size = np.prod(shape, dtype=int), np.prod(parameter_shape, dtype=int)
    return dtype != np.uint8 and (size > 1 or full_size == 1)


def part_names(parameter: str, flags: np.ndarray, tokens: Sequence[int] = ()) -> list[str]:
    """Return [the parameter] if all `flags` are set, else e.g. "NAME of layer N" for each set flag.

    Flags are bool [num_layers], [tokens] for rows of `tokens`, or [] for a parameter without parts.
    """
    if not flags.ndim or flags.all():
        return [parameter] if flags.all() else []
    if parameter in (INPUT_ROWS, HEAD_ROWS):
        lost = (token for token, flag in zip(tokens, flags, strict=True) if flag)
        return [f"{parameter} of token {token}" for token in lost]
    return [f"{parameter} of layer {layer}" for layer in np.flatnonzero(flags)]


def unused_inputs(flags: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which input rows are flagged, unlike the token's head row, bool [tokens] or [].

    `flags` maps names of parameters to bool [...].
    """
    no = np.zeros((), bool)
    return flags.get(INPUT_ROWS, no) & ~flags.get(HEAD_ROWS, ~no)


def has_parts(parameter: str, shape: tuple[int, ...], tokens: int) -> bool:
    """Return whether dim 0 of an array of a parameter is that of layers or of `tokens` rows."""
    if parameter in (INPUT_ROWS, HEAD_ROWS):
        return shape[:1] == (tokens,)
    return parameter.partition("/")[0] == LAYERS


@functools.lru_cache(maxsize=4)
def _zeros_program(stacked: tuple[bool, ...], sharding: NamedSharding) -> Any:
    def zeros(moments: list[Array]) -> list[Array]:
        """Return bool [num_layers], [tokens] or [] per moment [...]: all its values are zero."""
        return [
            jnp.all(x == 0, axis=tuple(range(int(split), x.ndim)))
            for x, split in zip(moments, stacked, strict=True)
        ]

    return jax.jit(zeros, out_shardings=sharding)


def without_gradient(
    state: TrainState,
    positions: np.ndarray,
    tokens: Sequence[int] = (),
    store: MomentStore | None = None,
) -> list[str]:
    """Return the names of parameters, or their parts, that have a moment of zeros; collective.

    `positions` is the index of each layer among the stored ones, int [num_layers], and `tokens`
    have trained rows. Input rows of unused tokens are left out (`unused_inputs`). Optimizers
    without moments give []. `store` has the moments that are not in the state.
    """
    stored = {} if store is None else {leaf.name: leaf.value for leaf in store.leaves}
    arrays = named(state.opt_state) | stored
    pairs = [
        (name, moment)
        for name, x in named(state.params).items()
        for moment in moments_of(name, arrays)
        if is_measured(arrays[moment].shape, arrays[moment].dtype, x.shape)
    ]
    if not pairs:
        return []
    split = {moment: has_parts(name, arrays[moment].shape, len(tokens)) for name, moment in pairs}
    if store is None:
        sharding: Any = arrays[pairs[0][1]].sharding
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        program = _zeros_program(tuple(split.values()), replicated)
        measured = jax.device_get(program([arrays[moment] for moment in split]))
        flags = dict(zip(split, measured, strict=True))
    else:
        flags = store.zeros(int(jax.device_get(state.step)), split)
    zeros: dict[str, np.ndarray] = {}
    for name, moment in pairs:
        own = flags[moment]
        if store is None and name.partition("/")[0] == LAYERS:
            own = own[positions]
        zeros[name] = zeros.get(name, False) | own
    return names_of(zeros, tokens)


def names_of(zeros: Mapping[str, np.ndarray], tokens: Sequence[int]) -> list[str]:
    """Return the parameters or parts with flags [...] set, without input rows of unused tokens."""
    kept = {**zeros, INPUT_ROWS: zeros.get(INPUT_ROWS, np.zeros((), bool)) & ~unused_inputs(zeros)}
    return [text for name, own in kept.items() for text in part_names(name, own, tokens)]


def zero_moments(
    arrays: Mapping[str, np.ndarray], parameter: str, shape: tuple[int, ...], tokens: int
) -> Any:
    """Return whether a moment is all zeros: bool [num_layers], [tokens], or a scalar.

    `arrays` has the moments [...] of that parameter by name; `shape` is the parameter's.
    """
    axes = lambda x: tuple(range(int(has_parts(parameter, x.shape, tokens)), x.ndim))
    flags = [
        np.all(x == 0, axis=axes(x))
        for x in arrays.values()
        if is_measured(x.shape, x.dtype, shape)
    ]
    return functools.reduce(np.logical_or, flags, np.zeros((), bool))


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their names, e.g. "layers/mlp/up"."""
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/"): x for path, x in leaves}
