"""Read and write the arrays of a checkpoint block by block, without devices or much memory.

For inspecting, comparing and rewriting checkpoints; `restore` loads a checkpoint onto a mesh.
`StoredArrays.blocks` reads a complete array and verifies its checksum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxdist.checkpoint import manifest, orbax_io
from jaxdist.checkpoint.blocks import Index, block_shape, blocks_in, dtype_of, grid, relative
from jaxdist.checkpoint.checksum import part_checksum
from jaxdist.checkpoint.events import CorruptCheckpoint
from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import Location, locate

BLOCK_BYTES = 64 << 20
"""Largest block that `StoredArrays.blocks` reads by default."""


class StoredArrays:
    """Read the arrays of one checkpoint whose files were verified.

    `document` is the JSON next to the arrays (`step`, `meta`, `arrays`); `entries` maps a name to
    shape, dtype and checksum as stored (a PRNG key as its uint32 data).
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.checkpoint = locate(checkpoint)
        self.document = orbax_io.read_document(self.checkpoint)
        self.entries: dict[str, dict[str, Any]] = self.document["arrays"]
        self._open: tuple[str, Any] | None = None

    def num_bytes(self, name: str) -> int:
        """Return the stored size of an array in bytes."""
        entry = self.entries[name]
        return math.prod(entry["shape"]) * dtype_of(entry["dtype"]).itemsize

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return the part [...] at `index` (slices of leading dims) as stored, unverified."""
        return self._handle(name).read(index)

    def gather(self, name: str, index: Index) -> np.ndarray:
        """Return a part [shape of the index] like `read`, but read one chunk on disk at a time."""
        handle = self._handle(name)
        out = np.empty([s.stop - s.start for s in index], dtype_of(self.entries[name]["dtype"]))
        for part in blocks_in(index, handle.chunk):
            out[relative(part, index)] = handle.read(part)
        return out

    def blocks(
        self, name: str, block: tuple[int, ...] | None = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """Yield index and values of each block [...] of an array, as stored, in row-major order.

        By default a block has up to `BLOCK_BYTES`. Raises `CorruptCheckpoint` after
        the last block if the checksum differs from the saved one.
        """
        entry = self.entries[name]
        shape = tuple(entry["shape"])
        block = block or block_shape(shape, dtype_of(entry["dtype"]).itemsize, BLOCK_BYTES)
        total = 0
        for index in grid(shape, block):
            part = self.read(name, index)
            total += part_checksum(part, [s.start for s in index], shape)
            yield index, part
        if total % 2**32 != entry["checksum"]:
            raise CorruptCheckpoint(f"{name} in {self.checkpoint} has a wrong checksum")

    def _handle(self, name: str) -> Any:
        if self._open is None or self._open[0] != name:
            item, path = name.partition("/")[0], self.entries[name]["path"]
            self._open = (name, orbax_io.open_array(self.checkpoint, item, path))
        return self._open[1]


class CheckpointWriter:
    """Write one checkpoint, array by array and part by part; `finish` commits it.

    An existing destination, e.g. `checkpoints/100`, is deleted. `total_bytes` of all arrays is for
    the progress bar.
    """

    def __init__(self, destination: str | os.PathLike[str], total_bytes: int) -> None:
        self._progress = Progress("writing checkpoint", total_bytes, "B")
        self.num_bytes = 0
        self.entries: dict[str, dict[str, Any]] = {}
        self._destination = locate(destination)
        manifest.delete(self._destination)

    def write(
        self,
        name: str,
        entry: Mapping[str, Any],
        chunk: tuple[int, ...],
        parts: Iterable[tuple[Index, np.ndarray]],
    ) -> None:
        """Write one array, e.g. `params/layers/w`.

        `entry` has its `shape`, `dtype`, `path` (keys) and, for a PRNG key, `key`. `chunk` is the
        shape of a chunk on disk. `parts` [shape of their index] cover the array and are cast to the
        dtype; complete chunks are fastest, and necessary on an object store.
        """
        shape, dtype = tuple(entry["shape"]), dtype_of(entry["dtype"])
        create = {"shape": shape, "chunks": chunk, "dtype": dtype}
        item = name.partition("/")[0]
        target = orbax_io.open_array(self._destination, item, entry["path"], create)
        checksum = 0
        for index, part in parts:
            cast = part.astype(dtype)
            checksum += part_checksum(cast, [s.start for s in index], shape)
            target.write(index, cast)
            self._progress.advance(cast.nbytes)
        self.entries[name] = {**entry, "checksum": checksum % 2**32}
        self.num_bytes += math.prod(shape) * dtype.itemsize

    def finish(self, meta: dict[str, Any]) -> None:
        """Write the metadata next to the arrays, then the manifest."""
        self._progress.close()
        step = int(self._destination.name)
        document = {"step": step, "meta": meta, "arrays": self.entries}
        orbax_io.write_frame(self._destination, document)
        names = manifest.files_of(self._destination)
        files = manifest.fingerprints(self._destination, names)
        manifest.write(self._destination, step, files, {})


def rewrite(
    source: StoredArrays,
    destination: Location,
    *,
    items: Collection[str],
    chunk_of: Callable[[str], tuple[int, ...]],
    dtype_for: Callable[[str], str],
    meta: dict[str, Any],
) -> CheckpointWriter:
    """Write the `items` of a checkpoint with other chunks or dtypes; return the finished writer.

    Each array is verified while it is read, chunk by chunk. `chunk_of` and `dtype_for` map its name
    to the shape of its chunks and the dtype to store.
    """
    entries = {n: e for n, e in source.entries.items() if n.partition("/")[0] in items}
    sizes = [math.prod(e["shape"]) * dtype_of(dtype_for(n)).itemsize for n, e in entries.items()]
    writer = CheckpointWriter(destination, sum(sizes))
    for name, entry in entries.items():
        chunk = chunk_of(name)
        parts = source.blocks(name, chunk or None)
        writer.write(name, {**entry, "dtype": dtype_for(name)}, chunk, parts)
    writer.finish(meta)
    return writer
