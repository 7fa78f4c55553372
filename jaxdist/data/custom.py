"""Rows of the user's own, named as `module:function`: any random-access pipeline, grain's included.

    def make_rows(*, seq_len, seed):
        rows = grain.MapDataset.source(my_records).map(tokenise(seq_len))
        return rows[1000:], rows[:1000]          # to train on, to evaluate on (or None)

Rows are dicts of arrays as in `jaxdist.core.types.Batch`, without the batch dim. They are stacked
in float32 and int32, and shuffled here: leave order, repetition and batching out of the pipeline.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxdist.core.types import ConfigError
from jaxdist.data.packing import Fields, Rows

_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NEEDED = {"tokens": ("tokens", "targets", "weights"), "images": ("images", "labels", "weights")}


class RowSource(Protocol):
    """Random access to rows; a `grain.MapDataset` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def is_custom(source: str) -> bool:
    """Whether a source names a function and not a file."""
    return bool(_NAMED.fullmatch(source)) and not Path(source).exists()


class CustomRows:
    """A part made of a user's rows (see `jaxdist.data.packing.Part`)."""

    def __init__(self, source: RowSource, name: str):
        """Look at the first row to learn the fields.

        Raises:
            ConfigError: no rows, or fields that a batch cannot have.
        """
        self._source, self._name = source, name
        self.num_rows = len(source)
        if not self.num_rows:
            raise ConfigError([f"data source {name!r} has no rows. Return at least one."])
        first = source[0]
        if not isinstance(first, dict):
            raise ConfigError(
                [
                    f"data source {name!r} gives rows of type {type(first).__name__}, not dicts of "
                    "arrays. Return the fields of jaxdist.core.types.Batch."
                ]
            )
        self.kind = "images" if "images" in first else "tokens"
        missing = [field for field in _NEEDED[self.kind] if field not in first]
        if missing:
            raise ConfigError(
                [
                    f"data source {name!r} gives rows without {', '.join(missing)} (they have: "
                    f"{', '.join(map(str, first))}). Return the fields of jaxdist.core.types.Batch."
                ]
            )
        self.fields: Fields = {
            field: (np.shape(value), _stored_as(field)) for field, value in first.items()
        }
        self.fingerprint = self._fingerprint()

    def rows(self, indices: np.ndarray) -> Rows:
        """See `Part.rows`.

        Raises:
            ConfigError: a row has another shape than the first one.
        """
        found = [self._source[int(index)] for index in indices]
        out = {}
        for field, (shape, dtype) in self.fields.items():
            out[field] = np.empty((len(found), *shape), dtype)
            for at, row in enumerate(found):
                if np.shape(row[field]) != shape:
                    raise ConfigError(
                        [
                            f"data source {self._name!r}: {field} of row {int(indices[at])} has "
                            f"shape {np.shape(row[field])}, the first row has {shape}. Make all "
                            "rows alike."
                        ]
                    )
                out[field][at] = row[field]
        return out

    def _fingerprint(self) -> str:
        """Of the number of rows and a few of them: reading all could take hours."""
        digest = hashlib.sha256(f"{self.num_rows}".encode())
        places = np.unique(np.linspace(0, self.num_rows - 1, 16).astype(np.int64))
        for field, values in sorted(self.rows(places).items()):
            digest.update(json.dumps([field, values.shape, values.dtype.str]).encode())
            digest.update(values.tobytes())
        return f"custom-{digest.hexdigest()[:32]}"


def open_custom(source: str, *, seq_len: int, seed: int) -> tuple[CustomRows, CustomRows | None]:
    """Call the user's function; the current directory is importable, as for a script.

    Raises:
        ConfigError: the function is not there, takes other arguments, or returns something else.
    """
    module, _, function = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            [
                f"data source {source!r} cannot be loaded: {error}. Name a file, or an importable "
                "module:function (the current directory is on the path)."
            ]
        ) from error
    made = factory(seq_len=seq_len, seed=seed)
    train, held = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for rows in (train, held):
        if rows is not None and not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise ConfigError(
                [
                    f"data source {source!r} returned {type(rows).__name__}, which has no random "
                    "access. Return something with len() and [index], such as grain.MapDataset."
                ]
            )
    return CustomRows(train, source), None if held is None else CustomRows(held, source)


def _stored_as(field: str) -> np.dtype:
    return np.dtype(np.float32 if field in ("weights", "images") else np.int32)
