"""A 32-bit checksum of an array's bits: the same on every mesh, changed by any single wrong bit.

Each element's bits are mixed with its position in the global array and the results summed modulo
2³². The mix is a bijection of the element, so one damaged element always changes the sum; more of
them cancel with probability 2⁻³². Position enters before the mix, so misplaced shards show too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdist.core import collectives
from jaxdist.core.types import Array


def checksums(arrays: Sequence[Array]) -> list[int]:
    """Checksum, below 2³², of each array [...]: the same on every process.

    One pass over device memory; only a scalar each leaves the device. Arrays are global, of any
    dtype and sharding; PRNG keys are given as their key data.
    """
    return start_checksums(arrays)()


def start_checksums(arrays: Sequence[Array]) -> Callable[[], list[int]]:
    """Begin what `checksums` computes; the function returned waits for it, on any thread.

    The arrays [...] may be donated right after: what is dispatched later overwrites them later.
    Those on no mesh, or in the host's memory, are waited for here.
    """
    meshes: dict[Mesh | AbstractMesh, dict[int, PartitionSpec]] = {}
    others = []
    for place, x in enumerate(arrays):
        if isinstance(x.sharding, NamedSharding) and x.sharding.memory_kind != "pinned_host":
            meshes.setdefault(x.sharding.mesh, {})[place] = _shortest(x.sharding.spec)
        else:
            others.append(place)
    started = []
    for mesh, specs in meshes.items():
        program = _program_of(mesh, tuple(specs.values()))
        started.append((tuple(specs), program([arrays[place] for place in specs])))
    found = dict(zip(others, _waited_for([arrays[place] for place in others]), strict=True))

    def result() -> list[int]:
        for places, sums in started:
            found.update(zip(places, map(int, jax.device_get(sums)), strict=True))
        return [found[place] for place in sorted(found)]

    return result


@functools.lru_cache(maxsize=16)
def _program_of(
    mesh: Mesh | AbstractMesh, specs: tuple[PartitionSpec, ...]
) -> Callable[[list[Array]], Array]:
    """Return the program for the checksums, uint32 [num_arrays], of global arrays [...] with these specs.

    One program with one collective, whatever the number of arrays: XLA:CPU takes 32 programs for a
    device, and may run the collectives of one program in another order on each device.
    """
    axes = tuple(mesh.axis_names)

    def local(shapes: list[tuple[int, ...]], *parts: Array) -> Array:
        """Checksums, uint32 [num_arrays], of arrays of which a device has these parts [...]."""
        sums = []
        for part, spec, shape in zip(parts, specs, shapes, strict=True):
            split = [_names(entry) for entry in (*spec, *[None] * (part.ndim - len(spec)))]
            start = [
                collectives.group_index(names) * size if names else 0
                for names, size in zip(split, part.shape, strict=True)
            ]
            copies = tuple(axis for axis in axes if axis not in itertools.chain(*split))
            counts = collectives.group_index(copies) == 0 if copies else True
            sums.append(jnp.where(counts, _sum_of(part, start, shape), 0))
        return collectives.all_reduce(collectives.vary(jnp.stack(sums), axes), axes)

    def program(arrays: list[Array]) -> Array:
        """Checksums, uint32 [num_arrays], of global arrays [...]."""
        every = functools.partial(local, [x.shape for x in arrays])
        return jax.shard_map(every, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*arrays)

    return jax.jit(program)


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """Return the same spec without what it says of trailing dims that are whole.

    `P(None)` and `P()` are one sharding, and a train step may turn one into the other: the first
    save would compile its program again while training waits.
    """
    entries = [*spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _waited_for(arrays: Sequence[Array]) -> list[int]:
    """Return the checksum of each array [...], a program each."""
    found: list[int] = []
    for start in range(0, len(arrays), _IN_FLIGHT):
        some = [checksum(_on_device(x)) for x in arrays[start : start + _IN_FLIGHT]]
        found += map(int, jax.device_get(jax.block_until_ready(some)))
    return found


# XLA:CPU takes 32 programs for a device and has one thread for each device. Dispatching more blocks
# some of these threads, which the collectives of programs dispatched before may then lack for ever.
_IN_FLIGHT = 16


def part_checksum(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """What a part adds to an array's checksum: the sum over all parts, modulo 2³², is it.

    The part [...], of any dtype and on the host, is a block of an array of `shape` that begins at
    index `start`, one number for each dim.
    """
    if part.dtype.name in ("int4", "uint4", "int2", "uint2"):
        part = part.astype(np.int32)
    # The words of an element lie next to each other, so they lengthen the last dim; a scalar is a
    # row of one.
    start, shape = [*start] or [0], [*shape] or [1]
    words_each = max(part.dtype.itemsize // 4, 1)
    start[-1], shape[-1] = start[-1] * words_each, shape[-1] * words_each
    words: np.ndarray = (
        np.ascontiguousarray(part).reshape(-1).view(f"u{min(part.dtype.itemsize, 4)}")
    )
    lengths = [*(part.shape or (1,))][:-1]
    words = words.reshape(max(math.prod(lengths), 1) if words.size else 0, -1)
    columns = np.arange(words.shape[-1], dtype=np.uint64) + start[-1]
    rows = _row_positions(start, shape, lengths)
    total = 0
    height = max(1, _SLAB_WORDS // max(words.shape[-1], 1))
    for top in range(0, len(words), height):
        slab = slice(top, top + height)
        position = rows[slab, None] + columns.astype(np.uint32)
        position *= np.uint32(2654435761)
        position ^= words[slab]
        total += int(_mix(position, np.uint32).sum(dtype=np.uint64))
    return total % 2**32


_SLAB_WORDS = 1 << 17  # a slab and its temporaries stay in a core's cache


def _row_positions(start: list[int], shape: list[int], lengths: list[int]) -> np.ndarray:
    """Position, modulo 2³², of the first element of each row of a block: uint32 [rows].

    `lengths` are those of the block's dims but the last, and `rows` is their product.
    """
    rows = np.zeros((), np.uint32)
    stride = shape[-1]
    for dim in reversed(range(len(lengths))):
        steps = np.arange(start[dim], start[dim] + lengths[dim], dtype=np.uint64) * (stride % 2**32)
        rows = steps.astype(np.uint32).reshape(-1, *[1] * rows.ndim) + rows
        stride *= shape[dim]
    return rows.reshape(-1)


def _on_device(x: Array) -> Array:
    """Return an array [...] of any dtype, moved to device memory where it lies in the host's."""
    if x.sharding.memory_kind == "pinned_host":  # offloaded optimizer state, one leaf at a time
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return x


@jax.jit
def checksum(x: Array) -> Array:
    """Return the checksum, uint32 [], of one array [...] of any dtype."""
    return _sum_of(x, [0] * x.ndim, x.shape)


def _sum_of(part: Array, start: Sequence[Array | int], shape: Sequence[int]) -> Array:
    """What a part [...] adds to the checksum, uint32 []; `start` and `shape` as `part_checksum`."""
    if part.size > _SLAB_WORDS and jax.default_backend() == "cpu":
        return _sum_of_slabs(part, start, shape)
    words = _words(part)
    inside = words.shape[part.ndim :]  # of one element
    start, shape = [*start, *[0] * len(inside)], (*shape, *inside)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        steps = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        steps = steps + jnp.asarray(start[dim], jnp.uint32)
        position = position + steps * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    # 2654435761 is 2³² over the golden ratio: consecutive positions land far apart.
    return jnp.sum(_mix(words ^ (position * jnp.uint32(2654435761))), dtype=jnp.uint32)


def _sum_of_slabs(part: Array, start: Sequence[Array | int], shape: Sequence[int]) -> Array:
    """`_sum_of` a part [...] slab by slab, uint32 [].

    XLA:CPU writes the mixed bits of a whole part to new memory before it sums them, which takes
    five times as long as one slab after another in the cache.
    """
    part, start, shape = _merged(part, start, shape)
    dim = next(d for d, size in enumerate(part.shape) if size > 1)
    length = part.shape[dim]
    rows = max(_SLAB_WORDS * length // part.size, 1)
    first = length % rows or rows

    def sum_from(row: Array | int, count: int) -> Array:
        begin = [*start]
        begin[dim] = jnp.asarray(begin[dim], jnp.uint32) + jnp.asarray(row, jnp.uint32)
        return _sum_of(jax.lax.dynamic_slice_in_dim(part, row, count, dim), begin, shape)

    add = lambda i, total: total + sum_from(first + i * rows, rows)
    return jax.lax.fori_loop(0, (length - first) // rows, add, sum_from(0, first))


def _merged(
    part: Array, start: Sequence[Array | int], shape: Sequence[int]
) -> tuple[Array, list[Array | int], list[int]]:
    """Return the same elements [...] at the same positions; a dim that is whole joins the one before."""
    lengths, begins, sizes = [part.shape[0]], [start[0]], [shape[0]]
    for length, begin, size in zip(part.shape[1:], start[1:], shape[1:], strict=True):
        if length == size:
            lengths[-1], sizes[-1] = lengths[-1] * size, sizes[-1] * size
            begins[-1] = jnp.asarray(begins[-1], jnp.uint32) * jnp.uint32(size % 2**32)
        else:
            lengths, begins, sizes = [*lengths, length], [*begins, begin], [*sizes, size]
    return part.reshape(lengths), begins, sizes


def _words(x: Array) -> Array:
    """Return the bits of x [...] as uint32, with a trailing dim of 2 where an element has 64 of them."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = x.dtype.itemsize * 8
    if jax.dtypes.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return x.astype(jnp.int32).astype(jnp.uint32)  # int4 and such have no bit cast of their own
    if bits >= 32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, {8: jnp.uint8, 16: jnp.uint16}[bits]).astype(jnp.uint32)


def _mix(h: Any, uint32: Any = jnp.uint32) -> Any:
    """Bijection of uint32 in which every input bit moves every output bit.

    References:
        The 32-bit finaliser of MurmurHash3 (Appleby, public domain): its shifts and multipliers.
    """
    h = (h ^ (h >> 16)) * uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * uint32(0xC2B2AE35)
    return h ^ (h >> 16)
