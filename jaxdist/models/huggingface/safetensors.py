"""Read and write safetensors files tensor by tensor.

Hugging Face's library checks the headers. We write files ourselves, because the library needs all
tensors in memory; `write` streams them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  # registers bfloat16 and float8 with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import BLOCK_BYTES, Location, locate
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

SINGLE = "model.safetensors"
"""Name of the weights file of an unsharded model."""

INDEX = "model.safetensors.index.json"
"""Name of the index file of a sharded model, which maps tensors to files."""

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""NumPy's name of a dtype -> the name in the format."""

_HEADER_BYTES = 100 << 20  # the library rejects longer ones
_REQUESTS = 8  # concurrent requests to an object store
_ALIGNMENT = 8  # the header is padded with spaces, so that tensors start aligned


class Tensor(NamedTuple):
    """A tensor to write: shape, dtype, and its values in parts (consecutive rows)."""

    shape: Sequence[int]
    dtype: np.dtype
    parts: Iterable[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write a file, with `metadata` texts in its header; `advance` gets the size of each part."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for part in tensor.parts:
                # Write bytes, because NumPy cannot write bfloat16.
                stream.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
                advance(part.nbytes)


def write_shards(
    directory: Path, tensors: Mapping[str, Tensor], shard_gb: float, metadata: Mapping[str, str]
) -> list[str]:
    """Write a file, or shards of about `shard_gb` GB (0 = no limit) and an index; return names."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shard_gb and groups[-1] and size + tensor.num_bytes > shard_gb * 1e9:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.num_bytes
    count = len(groups)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = [SINGLE]
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with Progress("writing weights", total, "B") as progress:
        for file, group in zip(files, groups, strict=True):
            own = {name: tensors[name] for name in group}
            write(directory / file, own, metadata, progress.advance)
    if count > 1:
        file_of = {name: f for f, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (directory / INDEX).write_text(json.dumps(index, indent=1))
    return files


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    file: Location
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def reshape(self, shape: tuple[int, ...]) -> StoredTensor:
        """Return the same values with another shape, without moving data."""
        return dataclasses.replace(self, shape=shape)

    def rows(self, first: int, count: int) -> StoredTensor:
        """Return `count` rows, starting at row `first`, as a tensor."""
        each = math.prod(self.shape[1:]) * self.dtype.itemsize
        return dataclasses.replace(
            self, offset=self.offset + first * each, shape=(count, *self.shape[1:])
        )

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read all values, or a block [*lengths of `index`], in the stored dtype."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)[index]
        if not self.file.is_local:
            return self._download(index)
        try:
            stored = np.memmap(self.file.path, self.dtype, "r", self.offset, self.shape)
        except ValueError as error:
            raise OSError(f"{self.file} ended early: it changed while it was read") from error
        return np.array(stored[index])

    def _download(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read [*lengths of `index`] in rows of the first dim, several MiB per request."""
        if not self.shape:
            return self.reshape((1,))._download(()).reshape(())
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        first, end, _ = (index[0] if index else slice(None)).indices(self.shape[0])
        step = max(1, BLOCK_BYTES // row)

        def part(start: int) -> np.ndarray:
            """Return at most `step` rows from `start`: [rows, *lengths of the other dims]."""
            count = min(step, end - start)
            data = self.file.part(self.offset + start * row, count * row) if count else b""
            if len(data) != count * row:
                raise OSError(f"{self.file} ended early: it changed while it was read")
            rows = np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])
            return np.array(rows[(slice(None), *index[1:])])

        with ThreadPoolExecutor(_REQUESTS, "weights") as pool:
            return np.concatenate(list(pool.map(part, range(first, max(end, first + 1), step))))


def open_all(directory: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return name -> tensor of `model.safetensors`, else of the index, else of the only file."""
    directory = locate(directory)
    entries = directory.entries()
    if "adapter_config.json" in entries:
        raise ConfigError(
            f"{directory} has adapter_config.json: transformers would add the adapter to the "
            "weights. Merge the adapter (merge_and_unload), or remove its files."
        )
    present = [name for name in entries if name.endswith(".safetensors")]
    file_of = {} if SINGLE in present else _read_index(directory)
    others = [name for name in entries if name.startswith("pytorch_model")]
    if not file_of and SINGLE not in present and (len(present) != 1 or others):
        raise ConfigError(
            f"{directory} has neither {SINGLE} nor {INDEX}, but {[*present, *others][:5]}. Save "
            "the model with save_pretrained(..., safe_serialization=True), or add the index."
        )
    single = [SINGLE] if SINGLE in present else present
    files = sorted(set(file_of.values())) if file_of else single
    if unread := [name for name in [*present, *others] if name not in files]:
        log.info(
            "weights in %s: read only %s, not the other files with weights: %s",
            *(directory, "the files in its index" if file_of else SINGLE, ", ".join(unread)),
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in open_file(directory / file).items():
            if file_of.get(name, file) != file:
                continue
            if name in tensors:
                raise ConfigError(
                    f"{directory}: {tensors[name].file.name} and {file} both have {name}. Remove "
                    f"one of them, or list it in {INDEX}."
                )
            tensors[name] = tensor
    if missing := file_of.keys() - tensors.keys():
        raise ConfigError(
            f"{directory} lacks {len(missing)} tensors of its index, e.g. {min(missing)}."
        )
    return tensors


def indexed_files(directory: Location) -> list[str]:
    """Return the files in the directory's index; [] without an index."""
    return sorted(set(_read_index(directory).values()))


def _read_index(directory: Location) -> dict[str, str]:
    index = directory / INDEX
    if not index.exists():
        return {}
    try:
        file_of = index.json()["weight_map"]
        if not all(Path(file).name == file for file in file_of.values()):
            raise ValueError("weight_map names files outside the directory")
        return dict(file_of)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index ({error!r}). Download it again.") from error


def open_file(file: Location) -> dict[str, StoredTensor]:
    """Return the tensors of a file, whose header the library checks: no gap, no overlap."""
    dtypes = {text: np.dtype(name) for name, text in DTYPES.items()}
    tensors: dict[str, StoredTensor] = {}
    try:
        offset = 8 + int.from_bytes(file.part(0, 8), "little")  # rejects pipes: the library blocks
        with _header_of(file) as header, safe_open(header, framework="np") as stored:
            for name in stored.offset_keys():
                tensor = stored.get_slice(name)
                shape, dtype = tuple(tensor.get_shape()), dtypes[tensor.get_dtype()]
                tensors[name] = StoredTensor(file, offset, shape, dtype)
                offset += math.prod(shape) * dtype.itemsize
    except KeyError as error:
        raise ConfigError(
            f"{file} has tensors of dtype {error}, which is unsupported. Convert them to bfloat16."
        ) from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{file} cannot be read as safetensors ({error}). Download it again."
        ) from error
    return tensors


@contextlib.contextmanager
def _header_of(file: Location) -> Iterator[str]:
    """Yield a local path with header and size of `file`; a stored object becomes a sparse copy."""
    if file.is_local:
        yield file.path
        return
    size = file.size()
    begin = file.part(0, 8) if size >= 8 else b""
    length = 8 + int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(size, _HEADER_BYTES):
        raise OSError("its header is longer than the file, or than a header may be")
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(begin + file.part(8, length - 8))
        copy.truncate(size)
        copy.flush()
        yield copy.name
