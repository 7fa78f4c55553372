"""Write and read arrays on an object store: one zarr array per leaf, one object per chunk.

Every process writes chunks of its devices from copies in host memory. A restore reads only the rows
of a chunk that it needs. The format is zarr version 2 without compression.
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

from jaxdist.checkpoint.blocks import (
    HostCopies,
    Index,
    blocks_in,
    bounds_of,
    dtype_of,
    even_chunk,
    relative,
    slices_of,
)
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.runtime.storage import REQUESTS, Location

CHUNK_BYTES = 16 << 20
"""Largest chunk of an array: one object, uploaded in one request."""

_ZARRAY = ".zarray"


class ObjectWriter:
    """Writer of one checkpoint at a time in the background.

    After `wait`, `fingerprints` has size and CRC-32 of each file that this process wrote.
    """

    def __init__(self) -> None:
        self.fingerprints: dict[str, list[int]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._copies = HostCopies()
        self._uploads: list[Future[None]] = []

    def start(self, checkpoint: Location, items: dict[str, dict[str, Any]]) -> None:
        """Copy this process's shards, in nested dicts by item, to the host and start uploads."""
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
                bounds = slices_of(shard.index, array.shape)
                # Copy, because the next step overwrites the shard.
                host = self._copies.take((name, str(bounds)), shard.data)
                files += _chunks_of(name, chunk, bounds, host)
        # Start uploads after all copies, because they slow down copies, for which training waits.
        upload = lambda file: self._upload(checkpoint / file[0], *file)
        self._uploads = [self._pool.submit(upload, file) for file in files]

    def wait(self) -> None:
        """Wait until this process has stored its chunks; raise if an upload failed."""
        try:
            for upload in self._uploads:
                upload.result()
        except BaseException:
            self._copies.clear()  # running uploads hold references
            raise
        finally:
            for upload in self._uploads:
                upload.cancel()
            self._uploads = []

    def give_up(self) -> None:
        """Do nothing: no barrier makes others wait."""

    def close(self) -> None:
        """Stop the background threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _upload(self, file: Location, name: str, content: bytes | np.ndarray) -> None:
        """Store bytes, or an array [...] of any dtype, and record its fingerprint."""
        data = content if isinstance(content, bytes) else _bytes_of(content)
        file.write(data)
        crash_point("during_upload")
        self.fingerprints[name] = [len(data), zlib.crc32(data)]


def read(checkpoint: Location, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Load items; arguments and result are those of `orbax_io.read`."""
    with ThreadPoolExecutor(REQUESTS, "checkpoint-download") as pool:
        opened = {
            name: pool.submit(ObjectArray.open, checkpoint / name) for name, _ in _leaves(targets)
        }
        arrays = [_restore(opened[name].result(), t, pool) for name, t in _leaves(targets)]
    return jax.tree.unflatten(jax.tree.structure(targets), arrays)


def open_array(
    checkpoint: Location, item: str, keys: Sequence[str], create: Mapping[str, Any] | None = None
) -> ObjectArray:
    """Open an array to read it, or with `create` make it; see `orbax_io.open_array`."""
    location = checkpoint / _name(item, keys)
    if create is not None:
        metadata = zarr_metadata(create["shape"], create["chunks"], create["dtype"])
        (location / _ZARRAY).write(json.dumps(metadata))
    return ObjectArray.open(location)


def zarr_metadata(shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype) -> dict[str, Any]:
    """Return the content of `.zarray` for an uncompressed array."""
    return {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": [max(size, 1) for size in chunk],
        "dtype": dtype.name if dtype.kind == "V" else dtype.str,  # bfloat16 has no type code
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
    }


class ObjectArray:
    """One stored array; `chunk` is the shape of its chunks."""

    def __init__(self, location: Location, metadata: Mapping[str, Any]) -> None:
        self._location = location
        self.shape, self.chunk = tuple(metadata["shape"]), tuple(metadata["chunks"])
        name = metadata["dtype"]
        self.dtype = np.dtype(name) if name[0] in "<>|" else dtype_of(name)

    @classmethod
    def open(cls, location: Location) -> ObjectArray:
        """Open the array at a location; raises `OSError` or `ValueError` if there is none."""
        return cls(location, (location / _ZARRAY).json())

    def read(self, index: Index = ()) -> np.ndarray:
        """Return the part [...] at `index` (slices of leading dims), in the stored dtype."""
        index = slices_of(index, self.shape)
        out = np.empty([s.stop - s.start for s in index], self.dtype)
        for part in self.parts(index):
            self.read_into(out, index, part)
        return out

    def write(self, index: Index, part: np.ndarray) -> None:
        """Write `part` [shape of `index`], from a chunk boundary on, as complete, padded chunks."""
        index = slices_of(index, self.shape)
        if part.size == 0:
            return
        for piece in blocks_in(index, self.chunk):
            chunk = np.zeros(self.chunk, self.dtype)
            if any(p.start % n for p, n in zip(piece, self.chunk, strict=True)):
                raise ValueError(f"{self._location}: {piece} does not begin at a chunk boundary")
            chunk[tuple(slice(0, p.stop - p.start) for p in piece)] = part[relative(piece, index)]
            name = _chunk_name(piece, self.chunk)
            (self._location / name).write(_bytes_of(chunk))

    def parts(self, index: Index) -> list[Index]:
        """Return the index of each chunk's overlap with the part at `index`."""
        return [] if any(s.start == s.stop for s in index) else list(blocks_in(index, self.chunk))

    def read_into(self, out: np.ndarray, index: Index, part: Index) -> None:
        """Read `part`, the overlap of one chunk and `index`, into `out` [shape of `index`]."""
        corner = [slice(p.start // n * n, None) for p, n in zip(part, self.chunk, strict=True)]
        inside = relative(part, corner)
        row = math.prod(self.chunk[1:]) * self.dtype.itemsize
        first, rows = (inside[0].start, inside[0].stop - inside[0].start) if part else (0, 1)
        file, length = self._location / _chunk_name(part, self.chunk), rows * row
        data = file.part(first * row, length)
        if len(data) != length:
            raise OSError(f"{file} has {len(data)} of {length} bytes from {first * row} on")
        values = np.frombuffer(data, self.dtype).reshape(rows, *self.chunk[1:])
        out[relative(part, index)] = values[(slice(None), *inside[1:])] if part else values[0]


def _restore(stored: ObjectArray, target: jax.ShapeDtypeStruct, pool: ThreadPoolExecutor) -> Any:
    """Return the global array with the shape, dtype and sharding of `target`, read by `pool`."""
    held: dict[Any, np.ndarray] = {}
    reads: list[Future[None]] = []
    for index in target.sharding.addressable_devices_indices_map(target.shape).values():
        bounds = slices_of(index, stored.shape)
        if (key := bounds_of(index, stored.shape)) in held:
            continue
        out = held[key] = np.empty([s.stop - s.start for s in bounds], stored.dtype)
        for part in stored.parts(bounds):
            reads.append(pool.submit(stored.read_into, out, bounds, part))
    for one in reads:
        one.result()
    return jax.make_array_from_callback(
        target.shape, target.sharding, lambda index: held[bounds_of(index, stored.shape)]
    )


def _chunks_of(
    name: str, chunk: tuple[int, ...], index: Index, host: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """Return (file name, content) of each chunk of a shard `host` [...] at `index` of its array."""
    return [
        (f"{name}/{_chunk_name(part, chunk)}", host[relative(part, index)])
        for part in (blocks_in(index, chunk) if host.size else ())
    ]


def _bytes_of(part: np.ndarray) -> memoryview:
    """Return the bytes of an array [...] of any dtype in row-major order; a view if possible."""
    flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return flat.data


def _own_shards(array: Any) -> list[Any]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _chunk_name(part: Index, chunk: Sequence[int]) -> str:
    return ".".join(str(p.start // n) for p, n in zip(part, chunk, strict=True)) or "0"


def _name(item: str, keys: Sequence[str]) -> str:
    return f"{item}/{'.'.join(keys)}"


def _leaves(items: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in jax.tree_util.tree_flatten_with_path(items)[0]:
        item, *keys = (key.key for key in path)
        yield _name(item, keys), value
