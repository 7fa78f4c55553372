"""The arrays of a checkpoint piece by piece, on a machine without devices or much memory.

For inspecting, comparing and rewriting checkpoints; `restore` is what loads one onto a mesh. An
array that is read to its end is verified by its checksum.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxdist.checkpoint import manifest, orbax_io
from jaxdist.checkpoint.checksum import part_checksum
from jaxdist.checkpoint.errors import CorruptCheckpoint
from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import Location, locate

BLOCK_BYTES = 64 << 20
"""Bytes of an array held at a time."""

Index = tuple[slice, ...]


class StoredArrays:
    """Reads the arrays of one checkpoint whose files were verified.

    Attributes:
        checkpoint: the directory of the step.
        document: the JSON next to the arrays: `step`, `meta`, `arrays`.
        entries: name -> shape, dtype, checksum, as stored (a key as its uint32 data).
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.checkpoint = locate(checkpoint)
        self.document = orbax_io.read_document(self.checkpoint)
        self.entries: dict[str, dict[str, Any]] = self.document["arrays"]
        self._open: tuple[str, Any] | None = None

    def num_bytes(self, name: str) -> int:
        """Size of an array as stored."""
        entry = self.entries[name]
        return math.prod(entry["shape"]) * dtype_of(entry["dtype"]).itemsize

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """A part of an array, or all of it, as stored; not verified.

        Args:
            name: e.g. `params/layers/w`.
            index: one slice for each leading dim; () = all.

        Returns:
            The values in the stored dtype, in the shape of the part.
        """
        return self._handle(name)[index].read().result()

    def gather(self, name: str, index: Index) -> np.ndarray:
        """As `read`, one chunk on disk after the other, so that chunks never pile up in memory.

        Args:
            name: e.g. `params/layers/w`.
            index: one slice with start and stop for each dim.
        """
        handle = self._handle(name)
        steps = handle.chunk_layout.read_chunk.shape
        out = np.empty([s.stop - s.start for s in index], dtype_of(self.entries[name]["dtype"]))
        starts = (
            range(s.start // step * step, s.stop, step)
            for s, step in zip(index, steps, strict=True)
        )
        for corner in itertools.product(*starts):
            part = tuple(
                slice(max(at, s.start), min(at + step, s.stop))
                for at, step, s in zip(corner, steps, index, strict=True)
            )
            place = (
                slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, index, strict=True)
            )
            out[tuple(place)] = handle[part].read().result()
        return out

    def blocks(
        self, name: str, block: tuple[int, ...] | None = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """All of an array in blocks, in row-major order.

        Args:
            name: e.g. `params/layers/w`.
            block: shape of a block; default: whole rows up to `BLOCK_BYTES`.

        Raises:
            CorruptCheckpoint: after the last block, if their checksum is not the one saved.
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
            raise CorruptCheckpoint(f"{name} in {self.checkpoint} has other bits than were saved")

    def _handle(self, name: str) -> Any:
        if self._open is None or self._open[0] != name:
            item, path = name.partition("/")[0], self.entries[name]["path"]
            self._open = (name, orbax_io.open_array(self.checkpoint, item, path))
        return self._open[1]


class CheckpointWriter:
    """Writes one checkpoint array by array, part by part; it counts when `finish` returns.

    Args:
        destination: directory of the step, e.g. `checkpoints/100`; what is there is deleted.
        total_bytes: of all arrays, as progress is told.
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
        """Write one array.

        Args:
            name: e.g. `params/layers/w`.
            entry: `shape`, `dtype`, `path` (its keys) and, for a key, `key`.
            chunk: what is one piece on disk; parts should be whole pieces.
            parts: where each part belongs, and its values; together the whole array.
        """
        shape, dtype = tuple(entry["shape"]), dtype_of(entry["dtype"])
        create = {"shape": shape, "chunks": chunk, "dtype": dtype}
        item = name.partition("/")[0]
        target = orbax_io.open_array(self._destination, item, entry["path"], create)
        checksum = 0
        for index, part in parts:
            cast = part.astype(dtype)
            checksum += part_checksum(cast, [s.start for s in index], shape)
            target[index].write(cast).result()
            self._progress.advance(cast.nbytes)
        self.entries[name] = {**entry, "checksum": checksum % 2**32}
        self.num_bytes += math.prod(shape) * dtype.itemsize

    def finish(self, meta: dict[str, Any]) -> None:
        """Write what belongs next to the arrays, then the manifest."""
        self._progress.close()
        step = int(self._destination.name)
        document = {"step": step, "meta": meta, "arrays": self.entries}
        orbax_io.write_frame(self._destination, document)
        names = manifest.files_of(self._destination)
        files = {name: manifest.fingerprint(self._destination / name) for name in names}
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
    """Rewrite a checkpoint in other chunks or dtypes, one chunk in memory at a time.

    Args:
        source: what to copy; each array is verified while it is read.
        destination: directory of the new step.
        items: which of `params`, `opt_state`, `rest` to copy.
        chunk_of: name -> shape of a chunk.
        dtype_for: name -> dtype to store.
        meta: the caller's JSON for the new checkpoint.
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


def block_shape(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> tuple[int, ...]:
    """Whole rows of the trailing dims, as many as fit; one dim is cut unevenly at most."""
    block = list(shape)
    for dim in range(len(shape)):
        rest = math.prod(block[dim + 1 :]) * itemsize
        block[dim] = max(1, min(shape[dim], max_bytes // max(rest, 1)))
        if block[dim] > 1 or rest <= max_bytes:
            break
    return tuple(block)


def even_chunk(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> tuple[int, ...]:
    """A chunk that divides `shape` evenly and is no larger than `max_bytes`, leading dims first."""
    chunk = list(shape)
    for dim in range(len(chunk)):
        while chunk[dim] > 1 and math.prod(chunk) * itemsize > max_bytes:
            chunk[dim] //= next(n for n in itertools.count(2) if chunk[dim] % n == 0)
    return tuple(chunk)


def grid(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Index]:
    """The index of every block of an array, in row-major order."""
    starts = [range(0, size, step) for size, step in zip(shape, block, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(at, min(at + step, size))
            for at, step, size in zip(corner, block, shape, strict=True)
        )


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of a stored dtype's name, bfloat16 and float8 included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
