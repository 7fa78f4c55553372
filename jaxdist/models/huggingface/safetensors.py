"""The safetensors file format, written and read tensor by tensor.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
offsets into what follows), and the tensors in row-major order, without gaps.

References:
    Hugging Face, "Safetensors: a simple and safe way to store and distribute tensors", Format.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16 and float8 by name
import numpy as np

from jaxdist.core.types import ConfigError

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
"""NumPy's name of a dtype -> the format's."""

_ALIGNMENT = 8  # the header is padded with spaces, so that tensors start aligned


class Tensor:
    """A tensor to be written: its facts now, its values when its turn comes."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, parts: Iterable[np.ndarray]) -> None:
        self.shape = list(shape)
        self.dtype = dtype
        self.parts = parts

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file; it appears under its name only when complete.

    Args:
        file: to be made.
        tensors: name -> tensor whose `parts` are its rows in row-major order.
        metadata: text facts for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for part in tensor.parts:
                # Bytes, because NumPy's file writing knows no bfloat16.
                stream.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    partial.replace(file)


def write_shards(
    directory: Path, tensors: Mapping[str, Tensor], shard_gb: float, metadata: Mapping[str, str]
) -> list[str]:
    """Write `model.safetensors`, or shards and their index where it would be larger.

    Args:
        directory: where to write.
        tensors: name -> tensor, in order.
        shard_gb: GB in one file at most, 0 = no limit; a larger tensor has a file of its own.
        metadata: text facts for each header.

    Returns:
        The names of the files.
    """
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
        files = ["model.safetensors"]
    for file, group in zip(files, groups, strict=True):
        write(directory / file, {name: tensors[name] for name in group}, metadata)
    if count > 1:
        places = {name: f for f, group in zip(files, groups, strict=True) for name in group}
        total = sum(tensor.num_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return files


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def reshape(self, shape: tuple[int, ...]) -> StoredTensor:
        """The same values under another shape; nothing moves, as rows lie one after the other."""
        return dataclasses.replace(self, shape=shape)

    def read(self, index: Sequence[slice] | None = None) -> np.ndarray:
        """Its values, or those of a block, into memory of their own.

        Reads the block run by run; a run shorter than what a disk moves anyway is read with the
        rest of its row.

        Args:
            index: the block, with start and stop in every dim; None = everything.

        Returns:
            [*lengths of `index`], in the stored dtype.
        """
        whole = tuple(slice(0, size) for size in self.shape)
        wanted = whole if index is None else tuple(index)
        out = np.empty([s.stop - s.start for s in wanted], self.dtype)
        if not out.size:
            return out
        # What follows the last dim that is cut lies together: a run.
        last = max((d for d, s in enumerate(wanted) if s != whole[d]), default=0)
        runs = out.reshape(-1, *(out.shape[last:] or (1,)))  # a scalar has a run of one
        read = list(wanted)
        trim: tuple[slice, ...] = ()
        if last and _size(wanted[last:]) * self.dtype.itemsize < _PAGE_BYTES:
            read[last], trim = whole[last], (wanted[last],)
        row = np.empty([s.stop - s.start for s in read[last:]], self.dtype) if trim else out
        with self.file.open("rb", buffering=0) as stream:
            for run, place in zip(runs, self._places(read, last), strict=True):
                stream.seek(self.offset + place * self.dtype.itemsize)
                _fill(stream, row if trim else run)
                if trim:
                    run[...] = row[trim]
        return out

    def _places(self, read: Sequence[slice], last: int) -> Iterator[int]:
        """Where each run begins, in elements."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        outer = itertools.product(*(range(s.start, s.stop) for s in read[:last]))
        first = read[last].start * strides[last] if read else 0
        for corner in outer:
            yield first + sum(at * stride for at, stride in zip(corner, strides, strict=False))


_PAGE_BYTES = 4096  # what a file system moves at least


def _size(index: Sequence[slice]) -> int:
    return math.prod(s.stop - s.start for s in index)


def _fill(stream: FileIO, run: np.ndarray) -> None:
    """Read exactly as many bytes as fit; one system call gives at most 2 GiB."""
    rest: memoryview = run.reshape(-1).view(np.uint8).data
    while rest:
        count = stream.readinto(rest)
        if not count:
            raise OSError(f"{stream.name} ended early: it changed while it was read")
        rest = rest[count:]


def open_all(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory's safetensors files.

    Raises:
        ConfigError: there is no such file, or one is cut short.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{directory} holds no *.safetensors. Save the model with save_pretrained(..., "
            "safe_serialization=True) or name its directory."
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= _open(file)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        missing = set(json.loads(index.read_text())["weight_map"]) - set(tensors)
        if missing:
            raise ConfigError(
                f"{directory} lacks {len(missing)} tensors of its index, e.g. {min(missing)}."
            )
    return tensors


def _open(file: Path) -> dict[str, StoredTensor]:
    names = {text: name for name, text in DTYPES.items()}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        start, size = 8 + length, file.stat().st_size
        ends = [start + entry["data_offsets"][1] for entry in header.values()]
        if ends and max(ends) > size:
            raise ValueError(f"{size} of {max(ends)} bytes")
        return {
            name: StoredTensor(
                file,
                start + entry["data_offsets"][0],
                tuple(entry["shape"]),
                np.dtype(names[entry["dtype"]]),
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{file} is no whole safetensors file ({error}). Fetch it again."
        ) from error
