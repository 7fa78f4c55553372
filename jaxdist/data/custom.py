"""Rows of a user's function, named as `module:function`: any random-access pipeline, e.g. grain's.

    def make_rows(*, seq_len, seed):
        rows = grain.MapDataset.source(my_records).map(tokenize(seq_len))
        return rows[1000:], rows[:1000]          # to train on, to evaluate on (or None)

Rows are dicts of arrays as in `jaxdist.core.types.Batch`, without the batch dim. Floating-point
fields are stacked in float32, integers in int32 and booleans in bool; `weights` and `images` are
always float32. Rows of Hugging Face `datasets` with `input_ids` are converted (`HuggingFaceRows`).
Rows are shuffled here, so the pipeline must not shuffle, repeat or batch them. With
`data.num_workers` it must be picklable. A `grain.IterDataset` of rows trains too, in its own order
(`jaxdist.data.stream`); evaluation needs random access.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxdist.data.packing import Fields, Rows, Spans, cut
from jaxdist.runtime.named_function import named_function
from jaxdist.settings import ConfigError

_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NEEDED = {"text": ("tokens", "targets", "weights"), "images": ("images", "labels", "weights")}
_INTEGERS = ("tokens", "segments", "positions")
_NOT_LEARNED = -100
"""Label of a position without a loss, as in PyTorch's cross-entropy."""

_SHARD = ("shard_index", "num_shards")

PYTHON_ROWS = "python:rows"
"""Source of a run whose rows were passed as a Python object."""


def is_custom(source: str) -> bool:
    """Return whether a source is the name of a function and not a file."""
    return bool(_NAMED.fullmatch(source)) and not Path(source).exists()


class CustomRows:
    """Rows of a user as a `Part`; `vocab_size` is the largest id in a few rows + 1."""

    def __init__(self, source: Any, name: str):
        """Read a few rows of `source`, which has len() and [index], for fields and fingerprint."""
        self._source, self._name = source, name
        self.num_rows = len(source)
        if not self.num_rows:
            raise ConfigError(f"data source {name!r} has no rows. Return at least one.")
        if self.num_rows == sys.maxsize:
            raise ConfigError(
                f"data source {name!r} repeats forever: training repeats rows itself, "
                "each epoch in another order. Leave .repeat() out."
            )
        first = source[0]
        self.kind = check_row(first, name)
        self.fields = fields_of(first, name)
        # A few rows: reading all of them could take hours.
        few = self.rows(np.unique(np.linspace(0, self.num_rows - 1, 16).astype(np.int64)))
        self.fingerprint = f"custom-{digest_of(few, str(self.num_rows))}"
        self.vocab_size = vocabulary_of(few)

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices` int64 [n], name -> [n, ...]; `spans` as in `Part.rows`."""
        numbers = np.asarray(indices).tolist()
        rows = [self._source[number] for number in numbers]
        return cut(stack_rows(rows, self.fields, self._name, indices), spans)


class HuggingFaceRows:
    """Convert rows with `input_ids` and, optionally, `labels` and `attention_mask`.

    As in transformers, a label is that of the token at its own position, -100 = not learned. Rows
    are padded at the end to `seq_len` inputs. Other columns are ignored.
    """

    def __init__(self, source: Any, seq_len: int):
        self._source, self._seq_len = source, seq_len

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return tokens, targets int32 [seq_len] and weights float32 [seq_len]."""
        row = self._source[index]
        ids = np.asarray(row["input_ids"])
        length = max(0, len(ids) - 1)  # an empty text has no inputs, too
        if length > self._seq_len:
            raise ConfigError(
                f"row {index} has {length + 1} input_ids: train.seq_len={self._seq_len} takes "
                f"{self._seq_len + 1}. Raise it, or tokenize with truncation."
            )
        labels, mask = np.asarray(row.get("labels", ids)), np.asarray(row.get("attention_mask", 1))
        learned = (labels != _NOT_LEARNED) & (mask > 0)
        tokens, targets = np.zeros((2, self._seq_len), np.int32)
        weights = np.zeros(self._seq_len, np.float32)
        tokens[:length] = ids[:-1]
        targets[:length] = np.where(learned, labels, 0)[1:]
        weights[:length] = learned[1:]
        return {"tokens": tokens, "targets": targets, "weights": weights}


def open_custom(
    source: str, *, seq_len: int, seed: int, python_source: Any = None
) -> tuple[CustomRows | Callable[[int, int], Any], CustomRows | None, bool]:
    """Call the user's function; the current directory is importable, as for a script.

    `python_source` replaces the function: another function, or the rows.

    Returns:
        Training rows or a function that opens a stream: (shard_index, num_shards) -> IterDataset;
        evaluation rows or None; whether the function divides its stream into shards.
    """
    import grain

    if python_source is None:
        factory = _function(source)
    else:
        factory = (
            python_source if callable(python_source) else lambda *, seq_len, seed: python_source
        )
    try:
        signature = inspect.signature(factory)
        divides = set(_SHARD) <= signature.parameters.keys()
        signature.bind(seq_len=seq_len, seed=seed, **(dict.fromkeys(_SHARD, 0) if divides else {}))
    except (TypeError, ValueError) as error:
        fix = "Give a function of the keywords seq_len and seed."
        raise ConfigError(f"data source {source!r} cannot be called: {error}. {fix}") from None

    def call(shard_index: int, num_shards: int) -> tuple[Any, Any]:
        shard = dict(zip(_SHARD, (shard_index, num_shards), strict=True)) if divides else {}
        made = factory(seq_len=seq_len, seed=seed, **shard)
        return made if isinstance(made, tuple) and len(made) == 2 else (made, None)

    train, held = call(0, 1)
    is_stream = isinstance(train, grain.IterDataset)
    for rows in (None if is_stream else train, held):
        if rows is not None and not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise ConfigError(
                f"data source {source!r} returned {type(rows).__name__}, which has no random "
                "access and cannot be resumed. Return an object with len() and [index], such "
                "as grain.MapDataset; for training also a grain.IterDataset."
            )

    def by_number(rows: Any) -> CustomRows:
        first = rows[0] if len(rows) else {}
        is_converted = isinstance(first, Mapping) and "input_ids" in first and "tokens" not in first
        return CustomRows(HuggingFaceRows(rows, seq_len) if is_converted else rows, source)

    opened: Any = (lambda index, count: call(index, count)[0]) if is_stream else by_number(train)
    return opened, None if held is None else by_number(held), divides


def _function(source: str) -> Callable[..., Any]:
    if source == PYTHON_ROWS:
        raise ConfigError(
            "data.sources: the rows of this run were passed as a Python object and are not "
            "stored. Pass them again: jaxdist.open(RUN, data=ROWS)."
        )
    try:
        return named_function(source)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"data source {source!r} cannot be loaded: {error}. Use a file, or an importable "
            "module:function (the current directory is on the path)."
        ) from error


def check_row(row: Any, name: str) -> Literal["text", "images"]:
    """Return the kind of a row; raises `ConfigError` if it is no dict or lacks fields."""
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"data source {name!r} gives rows of type {type(row).__name__}, not dicts of "
            "arrays. Return the fields of jaxdist.core.types.Batch."
        )
    kind: Literal["text", "images"] = "images" if "images" in row else "text"
    if missing := [field for field in _NEEDED[kind] if field not in row]:
        raise ConfigError(
            f"data source {name!r} gives rows without {', '.join(missing)} (they have: "
            f"{', '.join(map(str, row))}). Return the fields of jaxdist.core.types.Batch, or "
            "tokenized rows with input_ids; text can be a source as a file (to_parquet)."
        )
    return kind


def fields_of(row: Mapping[str, Any], name: str) -> Fields:
    """Return field -> (shape, dtype in a batch) of a row; `name` is its source, for errors."""
    fields: Fields = {}
    problems = []
    for field, value in row.items():
        array = _array_of(value)
        dtype = _batch_dtype(field, array.dtype)
        if dtype is None or (field in _INTEGERS and dtype != np.int32):
            allowed = "integers" if field in _INTEGERS else "integers, floats or booleans"
            problems.append(
                f"data source {name!r}: {field} has dtype {array.dtype}, not {allowed}. Convert it "
                "in the function, e.g. with numpy's astype."
            )
        else:
            fields[field] = (array.shape, dtype)
    if problems:
        raise ConfigError(problems)
    return fields


def digest_of(rows: Rows, text: str = "") -> str:
    """Return a digest of `text` and of the names and values of all fields [n, ...]."""
    digest = hashlib.sha256(text.encode())
    for field, values in sorted(rows.items()):
        digest.update(json.dumps([field, values.shape, values.dtype.str]).encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:32]


def vocabulary_of(rows: Rows) -> int:
    """Return one more than the largest token, target or label; 0 if rows have none."""
    named = [rows[name] for name in ("tokens", "targets", "labels") if name in rows]
    numbers = [values for values in named if values.dtype == np.int32]  # the rest are not ids
    if not numbers:
        return 0
    return 1 + max(int(values.max(initial=0)) for values in numbers)


def stack_rows(
    rows: Sequence[Any], fields: Fields, name: str, numbers: Sequence[int] | np.ndarray = ()
) -> Rows:
    """Stack rows to one array per field, [len(rows), ...] in the field's dtype.

    `numbers` and `name` identify rows and source in errors. Raises `ConfigError` if a value does
    not fit shape or dtype of the field.
    """
    out = {field: np.empty((len(rows), *shape), dtype) for field, (shape, dtype) in fields.items()}
    for at, row in enumerate(rows):
        for field, (shape, dtype) in fields.items():
            value = None if row is None or field not in row else _array_of(row[field])
            if value is None or value.shape != shape or (problem := _misfit(value, dtype)):
                which = f"row {int(numbers[at])}" if len(numbers) else "a row"
                if row is None or value is None or value.shape != shape:
                    raise ConfigError(_unlike(name, which, row, field, value, shape))
                raise ConfigError(f"data source {name!r}: {field} of {which} {problem}")
            out[field][at] = value
    return out


def _array_of(value: Any) -> np.ndarray:
    """Return a field as an array [...]; for a ragged list an array [] of None."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)


def _batch_dtype(field: str, dtype: np.dtype) -> np.dtype | None:
    is_float = dtype.name.startswith(("float", "bfloat"))  # also in ml_dtypes
    if dtype.kind not in "iub" and not is_float:
        return None
    if is_float or field in ("weights", "images"):
        return np.dtype(np.float32)
    return np.dtype(np.bool_ if dtype.kind == "b" else np.int32)


def _misfit(value: np.ndarray, dtype: np.dtype) -> str:
    """Return why an array [...] does not fit a field of `dtype` in a batch; "" if it does."""
    own = _batch_dtype("", value.dtype)
    if own is None or (
        own != dtype and dtype != np.float32 and (own, dtype) != (np.bool_, np.int32)
    ):
        return (
            f"has dtype {value.dtype}, the field is {dtype} in the first row. Give all rows the "
            "same dtype."
        )
    if not value.size or own == np.bool_:
        return ""
    if dtype == np.int32 and not -(2**31) <= value.min() <= value.max() < 2**31:
        return (
            f"holds {value.min()} to {value.max()}: int32 holds -2147483648 to 2147483647. Scale "
            "the values, or convert them to floats."
        )
    limit = np.finfo(np.float32).max
    if value.dtype.itemsize >= 8 and (np.abs(value[np.isfinite(value)]) > limit).any():
        return f"holds values beyond {limit:.4g}, the largest of float32. Scale the values."
    return ""


def _unlike(
    name: str, which: str, row: Any, field: str, value: np.ndarray | None, shape: tuple[int, ...]
) -> str:
    """Return the message for a missing `row` (None), or one without a good `field`.

    `value` [...] is the field's value, None if it is missing; `shape` is that of the first row.
    """
    if row is None:
        return (
            f"data source {name!r}: {which} is missing, as after a filter. Filter the records "
            "first, or return an IterDataset (.to_iter_dataset()), which skips missing rows."
        )
    has = "is missing" if value is None else f"has shape {value.shape}"
    return (
        f"data source {name!r}: {field} of {which} {has}, the first "
        f"row has {shape}. All rows must be equal in shape."
    )
