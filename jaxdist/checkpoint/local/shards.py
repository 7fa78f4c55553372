"""Convert this process's shards of a state to pieces of bytes and back.

A piece is a part of an array on a device of this process; replicas share one piece. Pieces are
ordered by leaf, then by index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.blocks import Bounds, HostCopies, bounds_of
from jaxdist.core.types import Array


def name_of(leaf: int, piece: int) -> str:
    """Return the file name of a piece."""
    return f"{leaf:05d}.{piece}"


def digest_of(leaves: Sequence[pytree.Leaf]) -> str:
    """Return a digest that identifies this process's set of shards: names, shapes, indices."""
    described = []
    for leaf in leaves:
        shape, dtype = _stored(leaf)
        described.append([leaf.name, dtype.name, shape, _pieces(leaf.value.sharding, shape)])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def to_host(
    leaves: Sequence[pytree.Leaf], arrays: Sequence[Array], copies: HostCopies
) -> list[tuple[str, np.ndarray]]:
    """Return name and copy, uint8 [bytes], of each piece of the `pytree.plain` arrays [...]."""
    for array in arrays:
        for shard in array.addressable_shards:
            shard.data.copy_to_host_async()
    pieces = []
    for number, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        shards = {bounds_of(s.index, array.shape): s for s in reversed(array.addressable_shards)}
        for piece, bounds in enumerate(_pieces(leaf.value.sharding, array.shape)):
            name = name_of(number, piece)
            host = copies.take(name, shards[bounds].data)  # a step overwrites the shard
            pieces.append((name, host.reshape(-1).view(np.uint8)))
    return pieces


def from_host(leaves: Sequence[pytree.Leaf], read: Callable[[str], bytes]) -> list[Array]:
    """Return the arrays [...] of `leaves`, PRNG keys as data; `read` returns a piece by name."""
    arrays = []
    for number, leaf in enumerate(leaves):
        shape, dtype = _stored(leaf)
        held = {
            bounds: np.frombuffer(read(name_of(number, piece)), dtype).reshape(
                [stop - start for start, stop in bounds]
            )
            for piece, bounds in enumerate(_pieces(leaf.value.sharding, shape))
        }
        of = lambda index, held=held, shape=shape: held[bounds_of(index, shape)]
        array: Array = jax.make_array_from_callback(shape, leaf.value.sharding, of)
        arrays.append(array)
    return arrays


def _stored(leaf: pytree.Leaf) -> tuple[tuple[int, ...], np.dtype]:
    value = jax.eval_shape(jax.random.key_data, leaf.value) if leaf.is_key else leaf.value
    return tuple(value.shape), np.dtype(value.dtype)


def _pieces(sharding: Any, shape: Sequence[int]) -> list[Bounds]:
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return sorted({bounds_of(index, shape) for index in indices})
