"""The arrays of a checkpoint piece by piece: streamed on a machine without devices or much memory.

Restoring onto a mesh is `restoring`'s work; this is for looking at, comparing and rewriting
checkpoints. Every array read to its end is proven by its digest.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint import manifest, store
from jaxdist.checkpoint.digest import part_digest
from jaxdist.checkpoint.errors import Damaged

BLOCK_BYTES = 64 << 20
"""Bytes of an array held at a time."""

Index = tuple[slice, ...]


class StoredArrays:
    """Reads the arrays of one checkpoint whose files were verified.

    Attributes:
        checkpoint: the directory of the step.
        document: the JSON beside the arrays: `step`, `meta`, `arrays`.
        entries: name -> shape, dtype, digest, as stored (a key as its uint32 data).
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.document = store.read_document(checkpoint)
        self.entries: dict[str, dict[str, Any]] = self.document["arrays"]
        self._open: tuple[str, Any] | None = None

    def num_bytes(self, name: str) -> int:
        """Size of an array as stored."""
        entry = self.entries[name]
        return math.prod(entry["shape"]) * dtype_of(entry["dtype"]).itemsize

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """A part of an array, or all of it; nothing is proven."""
        if self._open is None or self._open[0] != name:
            self._open = (name, _open_array(self.checkpoint, self._place(name)))
        return self._open[1][index].read().result()

    def blocks(
        self, name: str, block: tuple[int, ...] | None = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """All of an array in blocks, in row-major order.

        Args:
            name: e.g. `params/layers/w`.
            block: shape of a block; default: whole rows up to `BLOCK_BYTES`.

        Raises:
            Damaged: after the last block, if their digest is not the one that was saved.
        """
        entry = self.entries[name]
        shape = tuple(entry["shape"])
        block = block or block_shape(shape, dtype_of(entry["dtype"]).itemsize, BLOCK_BYTES)
        total = 0
        for index in grid(shape, block):
            part = self.read(name, index)
            total += part_digest(part, [s.start for s in index], shape)
            yield index, part
        if total % 2**32 != entry["digest"]:
            raise Damaged(f"{name} in {self.checkpoint} has other bits than were saved")

    def _place(self, name: str) -> tuple[str, str]:
        return name.partition("/")[0], self.entries[name]["stored"]


def rewrite(
    source: StoredArrays,
    destination: Path,
    *,
    items: Collection[str],
    chunk_of: Callable[[str], tuple[int, ...]],
    dtype_for: Callable[[str], str],
    meta: dict[str, Any],
    on_array: Callable[[str, int], None] = lambda name, num_bytes: None,
) -> None:
    """Write a checkpoint anew, in other chunks or dtypes, one chunk in memory at a time.

    Args:
        source: what to copy; each array is proven while it is read.
        destination: directory of the new step; it appears only when complete, with its manifest.
        items: which of `params`, `opt_state`, `rest` to copy.
        chunk_of: name -> shape of a chunk.
        dtype_for: name -> dtype to store.
        meta: the caller's JSON for the new checkpoint.
        on_array: told each array's name and stored bytes when it is written.
    """
    partial = destination.with_name(destination.name + ".orbax-checkpoint-tmp")
    if partial.exists():
        shutil.rmtree(partial)
    names = [name for name in source.entries if name.partition("/")[0] in items]
    entries = {}
    for name in names:
        entry = {**source.entries[name], "dtype": dtype_for(name)}
        entry["digest"] = _copy_array(source, name, partial, entry, chunk_of(name))
        entries[name] = entry
        on_array(name, math.prod(entry["shape"]) * dtype_of(entry["dtype"]).itemsize)
    document = {"step": source.document["step"], "meta": meta, "arrays": entries}
    store.write_frame(
        source.checkpoint, partial, [i for i in items if (partial / i).is_dir()], document
    )
    manifest.sync_directory(partial)
    partial.rename(destination)
    files = {
        name: manifest.fingerprint(destination / name) for name in manifest.files_of(destination)
    }
    manifest.write(destination, int(destination.name), files, {})


def _copy_array(
    source: StoredArrays,
    name: str,
    partial: Path,
    entry: dict[str, Any],
    chunk: tuple[int, ...],
) -> int:
    """Copy one array chunk by chunk; the digest of what was written."""
    shape, dtype = tuple(entry["shape"]), dtype_of(entry["dtype"])
    place = (name.partition("/")[0], entry["stored"])
    target = _open_array(partial, place, create={"shape": shape, "chunks": chunk, "dtype": dtype})
    digest = 0
    for index, part in source.blocks(name, chunk or None):
        cast = part.astype(dtype)
        digest += part_digest(cast, [s.start for s in index], shape)
        target[index].write(cast).result()
    return digest % 2**32


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


def _open_array(
    checkpoint: Path, place: tuple[str, str], create: Mapping[str, Any] | None = None
) -> Any:
    """TensorStore's handle on one array, opened or made."""
    import tensorstore

    item, path = place
    spec: dict[str, Any] = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": (checkpoint / item).absolute().as_uri() + "/",
            "path": path + "/",
        },
    }
    if create is None:
        return tensorstore.open(spec, open=True, read=True).result()
    spec["kvstore"]["config"] = {"max_inline_value_bytes": 1024}
    zarr_dtype = create["dtype"].name if create["dtype"].kind == "V" else create["dtype"].str
    spec["metadata"] = {
        "shape": list(create["shape"]),
        "chunks": [max(size, 1) for size in create["chunks"]],
        "dtype": zarr_dtype,
        "compressor": None,
    }
    return tensorstore.open(spec, create=True).result()
