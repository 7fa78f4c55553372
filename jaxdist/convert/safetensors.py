"""The safetensors file format, written tensor by tensor.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
offsets into what follows), and the tensors in row-major order, without gaps.

References:
    Hugging Face, "Safetensors: a simple and safe way to store and distribute tensors", Format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

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
