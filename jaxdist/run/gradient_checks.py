"""Checks that training reaches every parameter, by the moments of the optimizer.

A parameter whose moments are zero has received no gradient. The loss alone does not show that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jaxdist.core.parallel.pipeline.virtual_stages import LAYERS
from jaxdist.core.state import TrainState
from jaxdist.core.types import Array

FIRST_STEPS = 5
"""Steps after which every parameter has a gradient: adapters first need a nonzero B."""


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


def layer_names(parameter: str, flags: np.ndarray) -> list[str]:
    """Return [the parameter] if all `flags` are set, else "NAME of layer N" for each set flag.

    Flags are bool [num_layers], or [] for a parameter without layers.
    """
    if not flags.ndim or flags.all():
        return [parameter] if flags.all() else []
    return [f"{parameter} of layer {layer}" for layer in np.flatnonzero(flags)]


@functools.lru_cache(maxsize=4)
def _zeros_program(stacked: tuple[bool, ...], sharding: NamedSharding) -> Any:
    def zeros(moments: list[Array]) -> list[Array]:
        """Return bool [num_layers] or [] for each moment [...]: all its values are zero."""
        return [
            jnp.all(x == 0, axis=tuple(range(int(split), x.ndim)))
            for x, split in zip(moments, stacked, strict=True)
        ]

    return jax.jit(zeros, out_shardings=sharding)


def without_gradient(state: TrainState, positions: np.ndarray) -> list[str]:
    """Return the names of parameters, or their layers, that have a moment of zeros; collective.

    `positions` is the index of each layer among the stored ones, int [num_layers].
    Optimizers without moments, and moments outside of device memory, give [].
    """
    arrays = _named(state.opt_state)
    pairs = [
        (name, arrays[moment])
        for name, x in _named(state.params).items()
        for moment in moments_of(name, arrays)
        if is_measured(arrays[moment].shape, arrays[moment].dtype, x.shape)
        and arrays[moment].sharding.memory_kind != "pinned_host"
    ]
    if not pairs:
        return []
    sharding: Any = pairs[0][1].sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    stacked = tuple(_is_stacked(name) for name, _ in pairs)
    program = _zeros_program(stacked, replicated)
    zeros: dict[str, np.ndarray] = {}
    flags = jax.device_get(program([x for _, x in pairs]))
    for (name, _), split, own in zip(pairs, stacked, flags, strict=True):
        if split:
            own = own[positions]
        zeros[name] = zeros.get(name, False) | own
    return [text for name, own in zeros.items() for text in layer_names(name, own)]


def zero_moments(arrays: Mapping[str, np.ndarray], parameter: str, shape: tuple[int, ...]) -> Any:
    """Return whether a moment is all zeros: bool [num_layers] for stacked layers, else a scalar.

    `arrays` has the moments [...] of that parameter by name; `shape` is the parameter's.
    """
    axes = lambda x: tuple(range(int(_is_stacked(parameter)), x.ndim))
    flags = [
        np.all(x == 0, axis=axes(x))
        for x in arrays.values()
        if is_measured(x.shape, x.dtype, shape)
    ]
    return functools.reduce(np.logical_or, flags, np.zeros((), bool))


def _named(tree: Any) -> dict[str, Array]:
    """Return the arrays [*dims] of a tree by name, e.g. "layers/mlp/up"."""
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/"): x for path, x in leaves}


def _is_stacked(parameter: str) -> bool:
    return parameter.partition("/")[0] == LAYERS
