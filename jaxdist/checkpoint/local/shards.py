"""The shards of a state that this process holds: arrays to pieces of bytes and back.

A piece is a part of an array that one of this process's devices holds; of equal ones it counts
once. The pieces of a process go by the order of the state's leaves, and by their place in the
array.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.host_copies import HostCopies
from jaxdist.core.types import Array

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of a piece in each dim of its array."""


def name_of(leaf: int, piece: int) -> str:
    """Return the file of a piece."""
    return f"{leaf:05d}.{piece}"


def digest_of(leaves: Sequence[pytree.Leaf]) -> str:
    """Names what this process holds of a state: processes with equal digests hold the same.

    Leaves are arrays or `jax.ShapeDtypeStruct`s with sharding.
    """
    described = []
    for leaf in leaves:
        shape, dtype = _stored(leaf)
        described.append([leaf.name, dtype.name, shape, _pieces(leaf.value.sharding, shape)])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def to_host(
    leaves: Sequence[pytree.Leaf], arrays: Sequence[Array], copies: HostCopies
) -> list[tuple[str, np.ndarray]]:
    """Copies of all pieces, uint8 [bytes] each, with their files' names.

    `arrays` [...] of any dtype are what `pytree.plain` gives for the leaves.
    """
    for array in arrays:
        for shard in array.addressable_shards:
            shard.data.copy_to_host_async()
    found = []
    for number, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        shards = {_bounds(s.index, array.shape): s for s in reversed(array.addressable_shards)}
        for piece, bounds in enumerate(_pieces(leaf.value.sharding, array.shape)):
            name = name_of(number, piece)
            host = copies.take(name, shards[bounds].data)  # the next step overwrites the shard
            found.append((name, host.reshape(-1).view(np.uint8)))
    return found


def from_host(leaves: Sequence[pytree.Leaf], read: Callable[[str], bytes]) -> list[Array]:
    """Return the arrays [...] of `leaves` as they were stored, of pieces that `read` gives by file name.

    A leaf is what a restore asks for: shape, dtype, sharding; a PRNG key comes back as its data.
    """
    arrays = []
    for number, leaf in enumerate(leaves):
        shape, dtype = _stored(leaf)
        held = {
            bounds: np.frombuffer(read(name_of(number, piece)), dtype).reshape(
                [stop - start for start, stop in bounds]
            )
            for piece, bounds in enumerate(_pieces(leaf.value.sharding, shape))
        }
        arrays.append(_assembled(shape, leaf.value.sharding, held))
    return arrays


def _assembled(shape: Sequence[int], sharding: Any, held: dict[Bounds, np.ndarray]) -> Array:
    """Return the array of `shape`, made of pieces [...]."""
    return jax.make_array_from_callback(
        tuple(shape), sharding, lambda index: held[_bounds(index, shape)]
    )


def _stored(leaf: pytree.Leaf) -> tuple[tuple[int, ...], np.dtype]:
    value = jax.eval_shape(jax.random.key_data, leaf.value) if leaf.is_key else leaf.value
    return tuple(value.shape), np.dtype(value.dtype)


def _pieces(sharding: Any, shape: Sequence[int]) -> list[Bounds]:
    places = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return sorted({_bounds(index, shape) for index in places})


def _bounds(index: Any, shape: Sequence[int]) -> Bounds:
    whole = [(0, size) for size in shape]
    given = [s.indices(size)[:2] for s, size in zip(index or (), shape, strict=False)]
    return tuple([*given, *whole[len(given) :]])
