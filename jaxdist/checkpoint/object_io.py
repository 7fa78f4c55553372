"""Arrays on an object store and back: one zarr array for each leaf, one object for each chunk.

Every process writes the chunks that its devices hold, straight from memory and many at a time. No
process waits for another, nothing is merged, and a restore on another mesh reads the ranges of the
chunks that it needs. The format is zarr version 2 without compression, a chunk being its elements
in row-major order, so TensorStore and zarr read these arrays too.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.blocks import Index, blocks_in, dtype_of, even_chunk
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.host_copies import HostCopies
from jaxdist.runtime.storage import REQUESTS, Location

CHUNK_BYTES = 16 << 20
"""Largest chunk of an array: one object, uploaded in one request, which must not take 30 s."""

_ZARRAY = ".zarray"


class ObjectWriter:
    """Writes one checkpoint at a time in the background.

    Attributes:
        fingerprints: size and CRC-32 of each file that this process wrote, by path inside the
            checkpoint; complete after `wait`.
    """

    def __init__(self) -> None:
        self.fingerprints: dict[str, list[int]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._copies = HostCopies()
        self._uploads: list[Future[None]] = []

    def start(self, checkpoint: Location, items: dict[str, dict[str, Any]]) -> None:
        """Copy arrays to the host and begin to write; as `OrbaxWriter.start`."""
        self.fingerprints, self._uploads = {}, []
        self._pool = self._pool or ThreadPoolExecutor(REQUESTS, "checkpoint-upload")
        leaves = list(_leaves(items))
        for _, array in leaves:
            for shard in _own_shards(array):
                shard.data.copy_to_host_async()
        files: list[tuple[str, bytes | np.ndarray]] = []
        for name, array in leaves:
            local = array.sharding.shard_shape(array.shape)
            chunk = even_chunk(local, array.dtype.itemsize, CHUNK_BYTES)
            if jax.process_index() == 0:
                metadata = zarr_metadata(array.shape, chunk, array.dtype)
                files.append((f"{name}/{_ZARRAY}", json.dumps(metadata).encode()))
            for shard in _own_shards(array):
                bounds = _bounds(shard.index, array.shape)
                host = self._copies.take((name, str(bounds)), shard.data)  # a step overwrites it
                files += _chunks_of(name, chunk, bounds, host)
        # Only now: beside uploads the copies, which training waits for, take many times as long.
        upload = lambda file: self._upload(checkpoint / file[0], *file)
        self._uploads = [self._pool.submit(upload, file) for file in files]

    def wait(self) -> None:
        """Wait until what `start` began is stored, by this process; raise if it failed."""
        try:
            for upload in self._uploads:
                upload.result()
        except BaseException:
            self._copies.clear()  # uploads that still run read the ones they have
            raise
        finally:
            for upload in self._uploads:
                upload.cancel()
            self._uploads = []

    def give_up(self) -> None:
        """Nothing: no other process waits for this one."""

    def close(self) -> None:
        """Stop the background threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _upload(self, file: Location, name: str, content: bytes | np.ndarray) -> None:
        """Store bytes, or an array [...] of any dtype, and note its entry of the manifest."""
        data = content if isinstance(content, bytes) else _bytes_of(content)
        file.write(data)
        crash_point("during_upload")
        self.fingerprints[name] = [len(data), zlib.crc32(data)]


def read(checkpoint: Location, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Read items onto shardings; as `orbax_io.read`."""
    with ThreadPoolExecutor(REQUESTS, "checkpoint-download") as pool:
        opened = {
            name: pool.submit(ObjectArray.open, checkpoint / name) for name, _ in _leaves(targets)
        }
        found = {
            name: _restore(opened[name].result(), target, pool) for name, target in _leaves(targets)
        }
    return {item: _filled(tree, item, (), found) for item, tree in targets.items()}


def open_array(
    checkpoint: Location, item: str, keys: Sequence[str], create: Mapping[str, Any] | None = None
) -> ObjectArray:
    """As `orbax_io.open_array`."""
    location = checkpoint / _name(item, keys)
    if create is not None:
        metadata = zarr_metadata(create["shape"], create["chunks"], create["dtype"])
        (location / _ZARRAY).write(json.dumps(metadata))
    return ObjectArray.open(location)


def zarr_metadata(shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype) -> dict[str, Any]:
    """What `.zarray` holds for an uncompressed array."""
    return {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": [max(size, 1) for size in chunk],
        "dtype": dtype.name if dtype.kind == "V" else dtype.str,  # bfloat16 has no code of its own
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
    }


class ObjectArray:
    """One stored array; `chunk` is the shape of its pieces."""

    def __init__(self, location: Location, metadata: Mapping[str, Any]) -> None:
        self._location = location
        self.shape, self.chunk = tuple(metadata["shape"]), tuple(metadata["chunks"])
        name = metadata["dtype"]
        self.dtype = np.dtype(name) if name[0] in "<>|" else dtype_of(name)

    @classmethod
    def open(cls, location: Location) -> ObjectArray:
        """Return the array at a location; raises `OSError` or `ValueError` where there is none."""
        return cls(location, (location / _ZARRAY).json())

    def read(self, index: Index = ()) -> np.ndarray:
        """Return a part [...] in the stored dtype: one slice for each leading dim, () = all of it."""
        index = _bounds(index, self.shape)
        out = np.empty([s.stop - s.start for s in index], self.dtype)
        for part in self.parts(index):
            self.read_into(out, index, part)
        return out

    def write(self, index: Index, part: np.ndarray) -> None:
        """Write `part` [shape of `index`] in whole chunks, filled up at the end of the array."""
        index = _bounds(index, self.shape)
        if part.size == 0:
            return
        for piece in blocks_in(index, self.chunk):
            chunk = np.zeros(self.chunk, self.dtype)
            local = tuple(
                slice(p.start - s.start, p.stop - s.start)
                for p, s in zip(piece, index, strict=True)
            )
            if any(p.start % n for p, n in zip(piece, self.chunk, strict=True)):
                raise ValueError(f"{self._location}: {piece} does not begin where a chunk does")
            chunk[tuple(slice(0, p.stop - p.start) for p in piece)] = part[local]
            name = _chunk_name(piece, self.chunk)
            (self._location / name).write(_bytes_of(chunk))

    def parts(self, index: Index) -> list[Index]:
        """What lies of each chunk in a part of the array."""
        return [] if any(s.start == s.stop for s in index) else list(blocks_in(index, self.chunk))

    def read_into(self, out: np.ndarray, index: Index, part: Index) -> None:
        """Read what lies of one chunk in `index` into its place in `out` [shape of `index`].

        Raises:
            OSError: the object holds less.
        """
        corner = [p.start // n * n for p, n in zip(part, self.chunk, strict=True)]
        inside = [slice(p.start - c, p.stop - c) for p, c in zip(part, corner, strict=True)]
        row = math.prod(self.chunk[1:]) * self.dtype.itemsize
        first, rows = (inside[0].start, inside[0].stop - inside[0].start) if part else (0, 1)
        file, length = self._location / _chunk_name(part, self.chunk), rows * row
        data = file.part(first * row, length)
        if len(data) != length:
            raise OSError(f"{file} has {len(data)} of {length} bytes")
        values = np.frombuffer(data, self.dtype).reshape(rows, *self.chunk[1:])
        place = tuple(
            slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, index, strict=True)
        )
        out[place] = values[(slice(None), *inside[1:])] if part else values[0]


def _restore(stored: ObjectArray, target: jax.ShapeDtypeStruct, pool: ThreadPoolExecutor) -> Any:
    """Return a global array of the shape, dtype and sharding of `target`."""
    places = target.sharding.addressable_devices_indices_map(target.shape).values()
    held: dict[Any, np.ndarray] = {}
    reads: list[Future[None]] = []
    for index in places:
        bounds = _bounds(index or (), stored.shape)
        if _key(bounds) in held:
            continue
        out = held[_key(bounds)] = np.empty([s.stop - s.start for s in bounds], stored.dtype)
        for part in stored.parts(bounds):
            reads.append(pool.submit(stored.read_into, out, bounds, part))
    for one in reads:
        one.result()
    return jax.make_array_from_callback(
        target.shape, target.sharding, lambda index: held[_key(_bounds(index, stored.shape))]
    )


def _chunks_of(
    name: str, chunk: tuple[int, ...], index: Index, host: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """File and content of the chunks of a shard `host` [...], at `index` of its array."""
    found = []
    for part in blocks_in(index, chunk) if host.size else ():
        local = tuple(
            slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, index, strict=True)
        )
        found.append((f"{name}/{_chunk_name(part, chunk)}", host[local]))
    return found


def _bytes_of(part: np.ndarray) -> memoryview:
    """Return the bytes of an array [...] of any dtype in row-major order, where they lie if they can."""
    flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return flat.data


def _key(bounds: Index) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in bounds)


def _bounds(index: Any, shape: Sequence[int]) -> Index:
    whole = [slice(0, size) for size in shape]
    given = [slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=False)]
    return tuple([*given, *whole[len(given) :]])


def _own_shards(array: Any) -> list[Any]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _chunk_name(part: Index, chunk: Sequence[int]) -> str:
    return ".".join(str(p.start // n) for p, n in zip(part, chunk, strict=True)) or "0"


def _name(item: str, keys: Sequence[str]) -> str:
    return f"{item}/{'.'.join(keys)}"


def _leaves(items: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Path in the checkpoint and value of every leaf of nested dicts."""

    def below(tree: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[tuple, Any]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from below(value, (*keys, key))
            else:
                yield (*keys, key), value

    for item, tree in items.items():
        for keys, value in below(tree, ()):
            yield _name(item, keys), value


def _filled(
    tree: Mapping[str, Any], item: str, keys: tuple[str, ...], found: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        key: _filled(value, item, (*keys, key), found)
        if isinstance(value, Mapping)
        else found[_name(item, (*keys, key))]
        for key, value in tree.items()
    }
