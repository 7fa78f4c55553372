"""Load weights of a Hugging Face directory onto a mesh.

Each process reads the shards of its devices in blocks of at most `BLOCK_BYTES`, and assembles
larger shards on the device. Host memory holds only a few blocks; a process reads a byte about once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jaxdist.checkpoint.blocks import Bounds, Index, block_shape, blocks_in, bounds_of, relative
from jaxdist.checkpoint.pytree import under
from jaxdist.core.types import Array, Params
from jaxdist.models.huggingface.directory import Weights, open_weights
from jaxdist.models.huggingface.tensors import Piece
from jaxdist.runtime import coordination
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.progress import Progress
from jaxdist.settings import ConfigError

BLOCK_BYTES = 64 << 20
"""Most bytes of an array in host memory at a time, in the device dtype."""


def load_params(
    folder: str | os.PathLike[str],
    target: Params,
    *,
    reinit: Collection[str] = (),
    store: Callable[[str, Array], Any] = lambda name, x: x,
) -> Params:
    """Return a model's parameters from a directory's weights: a tree like `target`.

    Args:
        folder: a directory that every process can read.
        target: tree of `jax.ShapeDtypeStruct` with sharding; values are cast to its dtypes. Leaves
            under `reinit` are arrays and are returned unchanged.
        reinit: names or prefixes of parameters or stored weights that are not read.
        store: (name without params/, array [*dims]) -> stored value, before the next is read.
    """
    weights = open_weights(folder)
    _check_same_everywhere(folder, weights)
    leaves, structure = jax.tree_util.tree_flatten_with_path(target)
    named = {f"params/{keystr(path, simple=True, separator='/')}": leaf for path, leaf in leaves}
    read = {name: leaf for name, leaf in named.items() if not under(name, reinit)}
    problems = [
        f"{folder} has no {name} {list(leaf.shape)}: it has another model. Remove [model] to use "
        "the settings of its config.json."
        for name, leaf in read.items()
        if name not in weights.pieces or _shape(weights.pieces[name]) != leaf.shape
    ]
    problems += [
        f"{folder} has {name}, but the model does not. Add it to reinit_params to leave it unread."
        for name in sorted(weights.pieces.keys() - named.keys())
        if not under(name, reinit)
    ]
    problems += [
        f"reinit_params names {part}, which neither the model nor {folder} has. Use one of "
        f"{', '.join(named)}."
        for part in reinit
        if not any(under(name, [part]) for name in {*named, *weights.pieces})
    ]
    if problems:
        raise ConfigError(problems)
    values = []
    with Progress("reading weights", sum(leaf.size for leaf in read.values()), "weights") as done:
        for name, leaf in named.items():
            if name in read:
                leaf = store(name.removeprefix("params/"), _leaf(weights, name, leaf))
                done.advance(read[name].size)
            values.append(leaf)
    return jax.tree.unflatten(structure, values)


def _shape(parts: list[Piece]) -> tuple[int, ...]:
    return parts[0].shape if parts[0].layer is None else (len(parts), *parts[0].shape)


def _leaf(weights: Weights, name: str, leaf: jax.ShapeDtypeStruct) -> Array:
    """Return one array, with the shape [*dims] and dtype of `leaf`, loaded shard by shard."""
    assert leaf.sharding is not None  # a target has one, see `load_params`
    holders: dict[Bounds, list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        holders.setdefault(bounds_of(index, leaf.shape), []).append(device)
    parts = weights.pieces[name]
    shards: list[Array] = []
    for bounds, devices in holders.items():
        shape = tuple(stop - start for start, stop in bounds)
        if math.prod(shape) * leaf.dtype.itemsize <= BLOCK_BYTES:
            host = np.empty(shape, leaf.dtype)
            for block, values in _blocks(weights, parts, bounds, leaf.dtype):
                host[block] = values
            shards += [jax.device_put(host, device) for device in devices]
        else:
            shards += _assembled(weights, parts, bounds, leaf.dtype, devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _assembled(
    weights: Weights, parts: list[Piece], bounds: Bounds, dtype: np.dtype, devices: list[Any]
) -> list[Array]:
    """Return a large shard [lengths of `bounds`] on each of `devices`, written block by block."""
    shape = tuple(stop - start for start, stop in bounds)
    shards = [_zeros(shape, dtype, device) for device in devices]
    for block, values in _blocks(weights, parts, bounds, dtype):
        corner = tuple(np.int32(s.start) for s in block)
        shards = [
            _written(shard, jax.device_put(values, device), corner)
            for shard, device in zip(shards, devices, strict=True)
        ]
        jax.block_until_ready(shards)  # limits the blocks in host memory
    return shards


def _blocks(
    weights: Weights, parts: list[Piece], bounds: Bounds, dtype: np.dtype
) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield the blocks of a shard: index in the shard, values [its lengths] in `dtype`."""
    stacked = parts[0].layer is not None
    layers = range(*bounds[0]) if stacked else (0,)
    inner = [slice(*part) for part in (bounds[1:] if stacked else bounds)]
    for number, layer in enumerate(layers):
        piece = parts[layer]
        for index in _slabs(piece, inner, dtype.itemsize):
            values = piece.read(index, weights.fetch, dtype)
            block = relative(index, inner)
            if stacked:
                yield (slice(number, number + 1), *block), values[None]
            else:
                yield block, values


def _slabs(piece: Piece, index: Sequence[slice], itemsize: int) -> Iterator[Index]:
    """Yield the blocks (at most `BLOCK_BYTES`) of a part, split along its slowest stored dims."""
    order = piece.stored_order
    sizes = tuple(index[dim].stop - index[dim].start for dim in order)
    block = dict(zip(order, block_shape(sizes, itemsize, BLOCK_BYTES), strict=True))
    return blocks_in(index, [block[dim] for dim in range(len(order))])


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Array:
    """Return zeros [*shape] in `dtype`, created on the device."""
    where = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=where)()


@functools.partial(jax.jit, donate_argnums=0)
def _written(shard: Array, values: Array, corner: tuple[Any, ...]) -> Array:
    """Return the shard [*dims] (donated) with values [*part] written at index `corner`."""
    return jax.lax.dynamic_update_slice(shard, values, corner)


def _check_same_everywhere(folder: str | os.PathLike[str], weights: Weights) -> None:
    facts = sorted(
        (name, tensor.file.name, tensor.offset, tensor.shape, tensor.dtype.name)
        for name, tensor in weights.tensors.items()
    )
    digest = hashlib.sha256(json.dumps([repr(weights.model), facts]).encode()).hexdigest()

    def compare(digests: list[str]) -> None:
        if other := [str(i) for i, value in enumerate(digests) if value != digests[0]]:
            raise ConfigError(
                f"processes {few(other, 8)} see other files in {folder} than process 0. Use the "
                "same directory on every host, or a shared path."
            )

    coordination.decide_from("init_from", digest, compare)
