"""Rows of the user's own, named as `module:function`: any random-access pipeline, grain's included.

    def make_rows(*, seq_len, seed):
        rows = grain.MapDataset.source(my_records).map(tokenise(seq_len))
        return rows[1000:], rows[:1000]          # to train on, to evaluate on (or None)

Rows are dicts of arrays as in `jaxdist.core.types.Batch`, without the batch dim. Floating-point
fields are stacked in float32, integers in int32 and booleans in bool; `weights` and `images` are
always float32. Values that do not fit are rejected. Rows are shuffled here: leave order, repetition
and batching out of the pipeline.
With `data.num_workers` the pipeline runs in worker processes, and must be something that can be
pickled. A `grain.IterDataset` of such rows trains too, in its own order (`jaxdist.data.stream`);
what to evaluate on is always rows by number.
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
_SHARD = ("shard_index", "num_shards")

GIVEN_ROWS = "python:rows"
"""The source of a run whose rows a Python program gave as an object."""


def is_custom(source: str) -> bool:
    """Whether a source names a function and not a file."""
    return bool(_NAMED.fullmatch(source)) and not Path(source).exists()


class CustomRows:
    """A part made of a user's rows (see `jaxdist.data.packing.Part`).

    Attributes:
        vocab_size: one more than the largest token, target or label in a few of the rows.
    """

    def __init__(self, source: Any, name: str):
        """Look at a few rows to learn the fields.

        `source` has len() and [index]; a `grain.MapDataset` has.

        Raises:
            ConfigError: no rows, no end, or fields that a batch cannot have.
        """
        self._source, self._name = source, name
        self.num_rows = len(source)
        if not self.num_rows:
            raise ConfigError(f"data source {name!r} has no rows. Return at least one.")
        if self.num_rows == sys.maxsize:
            raise ConfigError(
                f"data source {name!r} repeats without end: training repeats rows by itself, "
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
        """As `Part.rows`, of indices int64 [n]; the user's function makes whole rows, then cut.

        Raises:
            ConfigError: a row is missing, has another shape than the first one, or values that its
                dtype does not hold.
        """
        numbers = np.asarray(indices).tolist()
        found = [self._source[number] for number in numbers]
        return cut(stack_rows(found, self.fields, self._name, indices), spans)


def open_custom(
    source: str, *, seq_len: int, seed: int, given: Any = None
) -> tuple[CustomRows | Callable[[int, int], Any], CustomRows | None, bool]:
    """Call the user's function; the current directory is importable, as for a script.

    `given` is what a Python program gives in the function's place: another function, or the rows.

    Returns:
        What to train on, rows or how to open a stream: (shard_index, num_shards) -> IterDataset;
        rows to evaluate on; whether the function divides its stream into shards.

    Raises:
        ConfigError: the function is not there, takes other arguments, or returns something else.
    """
    import grain

    if given is None:
        factory = _function(source)
    else:
        factory = given if callable(given) else lambda *, seq_len, seed: given
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
                "access and cannot be resumed. Return something with len() and [index], such "
                "as grain.MapDataset; to train on, a grain.IterDataset will do too."
            )
    by_number = lambda rows: CustomRows(rows, source)
    opened: Any = (lambda index, count: call(index, count)[0]) if is_stream else by_number(train)
    return opened, None if held is None else by_number(held), divides


def _function(source: str) -> Callable[..., Any]:
    if source == GIVEN_ROWS:
        raise ConfigError(
            "data.sources: the rows of this run were given as a Python object, which no file "
            "holds. Give them again: jaxdist.open(RUN, data=ROWS)."
        )
    try:
        return named_function(source)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"data source {source!r} cannot be loaded: {error}. Name a file, or an importable "
            "module:function (the current directory is on the path)."
        ) from error


def check_row(row: Any, name: str) -> Literal["text", "images"]:
    """Which kind of row it is.

    Raises:
        ConfigError: not a dict, or fields are missing.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"data source {name!r} gives rows of type {type(row).__name__}, not dicts of "
            "arrays. Return the fields of jaxdist.core.types.Batch."
        )
    kind: Literal["text", "images"] = "images" if "images" in row else "text"
    if missing := [field for field in _NEEDED[kind] if field not in row]:
        raise ConfigError(
            f"data source {name!r} gives rows without {', '.join(missing)} (they have: "
            f"{', '.join(map(str, row))}). Return the fields of jaxdist.core.types.Batch."
        )
    return kind


def fields_of(row: Mapping[str, Any], name: str) -> Fields:
    """Return name -> (shape, dtype in a batch) of a row of the source `name`.

    Raises:
        ConfigError: fields that are not numbers, and token fields that are not integers.
    """
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
    """Digest of a text and of rows [n, ...] by field."""
    digest = hashlib.sha256(text.encode())
    for field, values in sorted(rows.items()):
        digest.update(json.dumps([field, values.shape, values.dtype.str]).encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:32]


def vocabulary_of(rows: Rows) -> int:
    """One more than the largest token, target or label: the least vocabulary that holds them."""
    named = [rows[name] for name in ("tokens", "targets", "labels") if name in rows]
    numbers = [values for values in named if values.dtype == np.int32]  # others are no classes
    if not numbers:
        return 0
    return 1 + max(int(values.max(initial=0)) for values in numbers)


def stack_rows(
    rows: Sequence[Any], fields: Fields, name: str, numbers: Sequence[int] | np.ndarray = ()
) -> Rows:
    """Rows as one array per field, [len(rows), ...] in the field's dtype.

    `numbers` of the rows, if they have any, and the `name` of the source are for the error.

    Raises:
        ConfigError: a row or a field is missing, has another shape or kind than in the first row,
            or holds values that its dtype does not.
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
    """Return a field as an array [...]; lists of several lengths give an object scalar []."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)


def _batch_dtype(field: str, dtype: np.dtype) -> np.dtype | None:
    """Return the dtype that a user's field has in a batch; None if it has none."""
    is_float = dtype.name.startswith(("float", "bfloat"))  # of ml_dtypes too
    if dtype.kind not in "iub" and not is_float:
        return None
    if is_float or field in ("weights", "images"):
        return np.dtype(np.float32)
    return np.dtype(np.bool_ if dtype.kind == "b" else np.int32)


def _misfit(value: np.ndarray, dtype: np.dtype) -> str:
    """Return why a batch of `dtype` cannot hold an array [...] without a change; "" if it can."""
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
    """Return the problem of a missing row, or of a field [...] unlike `shape` of the first row."""
    if row is None:
        return (
            f"data source {name!r}: {which} is missing, as behind a filter. Filter the records "
            "first, or return an IterDataset (.to_iter_dataset()), which skips what is missing."
        )
    has = "is missing" if value is None else f"has shape {value.shape}"
    return (
        f"data source {name!r}: {field} of {which} {has}, the first "
        f"row has {shape}. Make all rows alike."
    )
