"""Read CIFAR-10 in both published forms, without running code stored in the files.

    cifar-10-batches-py    data_batch_1 … data_batch_5, test_batch: Python pickles
    cifar-10-batches-bin   the same names with .bin: records of 1 label byte and 3072 pixel bytes

References:
    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; both layouts are
    described on the data set's page, https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxdist.data.files import read_errors
from jaxdist.data.hub_sets import is_hub_set
from jaxdist.runtime.storage import Location, is_url, locate, url_problem
from jaxdist.settings import ConfigError

TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"
NUM_CLASSES = 10

_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS

# Of the 50,000 training images, RGB, in units of 255.
_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
_STD = np.array([0.2470, 0.2435, 0.2616], np.float32)

Scaling = Literal["half", "unit", "channel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
    """Labeled images in memory: `pixels` uint8 [num_rows, 32, 32, 3], `labels` int32 [num_rows]."""

    pixels: np.ndarray
    labels: np.ndarray
    scaling: Scaling

    @property
    def num_rows(self) -> int:
        """Number of images."""
        return len(self.labels)

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Name -> (shape of one row, dtype) of the fields of image rows (see `Batch`)."""
        return {
            "images": ((32, 32, 3), np.dtype(np.float32)),
            "labels": ((), np.dtype(np.int32)),
            "weights": ((), np.dtype(np.float32)),
        }

    @property
    def fingerprint(self) -> str:
        """Digest of pixels, labels and scaling; equal for both forms on disk."""
        digest = hashlib.sha256(self.pixels.tobytes() + self.labels.tobytes()).hexdigest()
        return f"images-{digest[:32]}-{self.scaling}"

    def rows(self, indices: np.ndarray, spans: object = None) -> dict[str, np.ndarray]:
        """Return rows: images float32 [n, 32, 32, 3], labels int32 [n], weights float32 [n] = 1."""
        images = self.pixels[indices].astype(np.float32)
        images = images / 127.5 - 1 if self.scaling == "half" else images / 255
        if self.scaling == "channel":
            images = (images - _MEAN) / _STD
        return {
            "images": images,
            "labels": self.labels[indices],
            "weights": np.ones(len(indices), np.float32),
        }


def is_cifar(source: str) -> bool:
    """Return whether a source is a folder with a file of CIFAR-10 (of URLs, two are checked)."""
    if not is_url(source):
        return _holds(source, (*TRAIN_FILES, TEST_FILE))
    if is_hub_set(source) or glob.has_magic(source) or url_problem(source):
        return False
    return _is_stored_cifar(source)


@functools.lru_cache  # settings are read often, and each check is a request
def _is_stored_cifar(url: str) -> bool:
    return _holds(url, (TRAIN_FILES[0], TEST_FILE))


def _holds(source: str, names: tuple[str, ...]) -> bool:
    folder = locate(source)
    return any((folder / f"{name}{ending}").exists() for name in names for ending in ("", ".bin"))


def open_cifar(source: str | Path, scaling: Scaling) -> tuple[Images, Images]:
    """Return training and test images of a CIFAR-10 folder or URL."""
    folder, names = locate(source), (*TRAIN_FILES, TEST_FILE)
    with read_errors(str(folder)):
        entries = set(folder.entries())
    suffix = ".bin" if any(f"{name}.bin" in entries for name in names) else ""
    read = _read_binary if suffix else _read_pickle
    if missing := [name + suffix for name in names if name + suffix not in entries]:
        raise ConfigError(
            f"CIFAR-10 folder {str(folder)!r} lacks {', '.join(missing)}. Unpack the archive again."
        )

    def images(names: tuple[str, ...]) -> Images:
        parts = [_read_batch(folder / (name + suffix), read) for name in names]
        pixels = np.concatenate([p for p, _ in parts]).reshape(-1, 3, 32, 32)
        return Images(
            pixels=np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)),
            labels=np.concatenate([labels for _, labels in parts]),
            scaling=scaling,
        )

    return images(TRAIN_FILES), images((TEST_FILE,))


def _read_batch(
    path: Location, read: Callable[[bytes], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels uint8 [n, 3072], color by color, and labels int32 [n] of one file."""
    with read_errors(str(path)):
        content = path.read()
    try:
        pixels, labels = read(content)
        if pixels.shape != (len(labels), _PIXELS):
            raise ValueError(
                f"pixels of shape {pixels.shape} for {len(labels)} labels, expected "
                f"({len(labels)}, {_PIXELS})"
            )
        if labels.ndim != 1 or not len(labels) or labels.min() < 0 or labels.max() >= NUM_CLASSES:
            raise ValueError(f"labels outside 0..{NUM_CLASSES - 1}; CIFAR-100 has another layout")
    except _Refused as error:
        raise ConfigError(
            f"{str(path)!r} tries to load {error}: a CIFAR-10 batch has only a dict of "
            "bytes, lists and one uint8 array. No code was run; download the archive from a "
            "trusted source."
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise ConfigError(
            f"{str(path)!r} is not a CIFAR-10 batch ({type(error).__name__}: {error}). Copy or "
            "unpack it again."
        ) from None
    return pixels, labels


def _read_binary(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels uint8 [n, 3072] and labels int32 [n] of records, the label first."""
    data = np.frombuffer(content, np.uint8)
    if not len(data) or len(data) % _RECORD:
        raise ValueError(
            f"{len(data)} bytes, not a multiple of {_RECORD} (one label and 3·32·32 pixels)"
        )
    records = data.reshape(-1, _RECORD)
    return records[:, 1:], records[:, 0].astype(np.int32)


def _read_pickle(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels uint8 [n, 3072] and labels int32 [n] of a pickled dict."""
    batch = _Reader(io.BytesIO(content), encoding="bytes").load()
    pixels, labels = _entry(batch, b"data"), _entry(batch, b"labels")
    if not isinstance(pixels, _StoredArray):
        raise ValueError("data is not an array")
    return pixels.array(), np.array(labels, np.int32)


def _entry(batch: Any, name: bytes) -> Any:
    if not isinstance(batch, dict):
        raise ValueError("not a dict")
    for key in (name, name.decode()):
        if key in batch:
            return batch[key]
    raise ValueError(f"no entry {name.decode()!r}")


class _Refused(Exception):
    """Raised if a pickle names an object that batches of CIFAR-10 do not need."""


class _StoredType:
    """Replacement of numpy.dtype during unpickling; accepts only uint8."""

    def __init__(self, code: Any = None, *_: Any):
        if code not in (b"u1", "u1", b"|u1", "|u1"):
            raise ValueError(f"an array of type {code!r}, not uint8")

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment do not matter for single bytes


class _StoredArray:
    """Replacement of numpy.ndarray during unpickling; only keeps bytes and shape."""

    def __setstate__(self, state: Any) -> None:
        _, self._shape, kind, self._by_column, self._data = state
        if not isinstance(kind, _StoredType) or not isinstance(self._data, bytes):
            raise ValueError("an array that is not stored as uint8 bytes")

    def array(self) -> np.ndarray:
        """Return the stored array, uint8 [...], in its stored shape."""
        flat = np.frombuffer(self._data, np.uint8)
        return flat.reshape(self._shape, order="F" if self._by_column else "C")


def _reconstruct(*_: Any) -> _StoredArray:
    return _StoredArray()


def _encode(text: str, encoding: str) -> bytes:
    # Python 3 stores bytes of old pickle protocols as latin-1 text.
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"bytes stored as {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _StoredArray,
    ("numpy", "dtype"): _StoredType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,
}
"""Objects that a pickled batch may name. Each is replaced by an object of this module, so that not
even numpy's constructors run on untrusted content."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _Refused(f"{module}.{name}")
        return _ALLOWED[module, name]
