"""metrics.jsonl: one JSON object per line, floats in full precision, lines complete after a kill.

JSON cannot represent NaN or infinity, but every parser must be able to read a diverged run. These
values are written as the strings "NaN", "Infinity" and "-Infinity", which `float()` and
JavaScript's `Number()` parse. `read_records` returns them as floats.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxdist.runtime.storage import Appender, Location, locate
from jaxdist.settings import ConfigError

logger = logging.getLogger("jaxdist")

Record = dict[str, Any]

_MAX_PENDING_BYTES = 64 << 20
"""Maximum size of the records buffered while writes fail: about 100,000 steps."""

_TRAIN_LINE, _STEP = b'{"kind": "train"', re.compile(rb'"step":\s*(\d+)')
_LOSS = re.compile(rb'"loss":\s*([-+.\deE]+)')
_RESUME = re.compile(rb'(?!{"kind": "train").*"event":\s*"(?:start|rollback)"')

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class ExitReason(enum.StrEnum):
    """Exit reason in summary.json and in the `end` event, with the exit code of the process.

    A process that is killed or ended by the watchdog (86, see `logs/abort.json`) writes neither.
    """

    FINISHED = "finished"  # 0: all steps are done, and the last state is saved
    PREEMPTED = "preempted"  # 75: a signal, Ctrl-C or spot notice requested the end, after a save
    STOPPED_BY_CALLBACK = "stopped_by_callback"  # 0: a callback requested the end, after a save
    STOPPED_EARLY = "stopped_early"  # 0: the evaluation loss no longer falls, see eval.patience
    INTERRUPTED = "interrupted"  # 130: Ctrl-C, without a save
    NONFINITE_LOSS = "nonfinite_loss"  # 87: NaN or Inf in loss, gradients or parameters
    LOSS_SPIKE = "loss_spike"  # 87: under resilience.spike_policy
    SDC = "sdc"  # 85: silent data corruption, under resilience.sdc_policy
    CHECKPOINT_FAILURE = "checkpoint_failure"  # 1: the last save was not committed
    ERROR = "error"  # 1, or 2 for a rejected setting: any other exception


def plain(value: Any) -> Any:
    """Return a value with JSON types: Python scalars for numpy's and jax's, "NaN" for NaN, ..."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0:
        return plain(value.item())
    raise TypeError(f"a record may have scalars, strings, lists and dicts of them, not {value!r}")


def encode(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return the record as JSON; every finite float is restored bit for bit."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False, indent=indent)


def decode(text: str) -> Any:
    """Return the value of a JSON text; "NaN" and the infinities become floats again."""
    value = json.loads(text)
    return _with_floats(value) if 'NaN"' in text or 'Infinity"' in text else value


def _with_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


class RecordWriter:
    """Appends records, one line each, so that a kill leaves complete lines.

    Opening the file removes a last line truncated by a crash of the machine; `torn` is the number
    of bytes removed. If a write fails (full disk, lost file server), records stay in memory and are
    written before the next one. With `is_held`, nothing is written before `commit`.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_held: bool = False):
        self._path = locate(path)
        self._held: list[Mapping[str, Any]] = []
        self._file: Appender | None = None
        self.torn = 0
        if not is_held:
            self.commit()
        self._is_failing = False

    def commit(self) -> None:
        """Open the file and write the held records."""
        self._file = self._path.appender()
        self.torn = self._file.cut_torn_tail()
        for record in self._held:
            self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, or keep it in memory if it cannot; raise OSError if too much is kept."""
        if self._file is None:
            self._held.append(record)
            return
        try:
            self._file.append((encode(record) + "\n").encode())
        except OSError as failure:
            if len(self._file.pending) > _MAX_PENDING_BYTES:
                raise
            if not self._is_failing:
                logger.warning(
                    "%s cannot be written (%s): records stay in memory until it can",
                    self._path,
                    failure.strerror,
                )
            self._is_failing = True
        else:
            if self._is_failing:
                logger.info("%s is writable again; no record was lost", self._path)
            self._is_failing = False

    def close(self) -> None:
        """Close the file; save records that cannot be written in a temporary file, and warn."""
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as failure:
            logger.warning(
                "%s cannot be written (%s): its last %d records are %s",
                self._path,
                failure.strerror,
                self._file.pending.count(b"\n"),
                _save_elsewhere(self._file.pending),
            )


def _save_elsewhere(records: bytes) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            prefix="jaxdist-metrics-", suffix=".jsonl", delete=False
        ) as file:
            file.write(records)
    except OSError as failure:
        return f"lost ({failure.strerror} in the temporary folder too)"
    return f"in {file.name}: append it to metrics.jsonl"


def skip_reason(values: Mapping[str, Any]) -> str:
    """Return why an update was not applied, e.g. "no_labels" or "loss_spike"; "" if it was."""
    if values.get("applied", True):
        return ""
    if values.get("weight") == 0:
        return "no_labels"
    if not math.isfinite(values.get("loss", 0.0)):
        return "nonfinite_loss"
    if not math.isfinite(values.get("grad_norm", 0.0)):
        return "loss_scale_search" if values.get("loss_scale", 1.0) > 1 else "nonfinite_loss"
    return "loss_spike"


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Return every record of a metrics.jsonl, oldest first; see `stream_records`."""
    return [record for record, _ in stream_records(path)]


def stream_records(
    path: str | os.PathLike[str], *, max_train: int = 0
) -> Iterator[tuple[Record, bool]]:
    """Yield each record, oldest first, and whether it is in the history that `current` returns.

    The file is read twice, in blocks. A last line without its newline is ignored. If there are more
    train records than `max_train` (0 = no limit), each group of neighbors yields only its first and
    last records, and those with its lowest and highest (or no finite) loss; the others are not
    decoded. Raise ConfigError if the file is missing or a decoded line is not a record.
    """
    file = locate(path)
    resumes: list[float] = []
    num_train = 0
    try:
        for line in _lines(file):
            if line.startswith(_TRAIN_LINE):
                num_train += 1
            elif _RESUME.match(line):
                match = _STEP.search(line)
                resumes.append(int(match[1]) if match else 0)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). Name a run directory with metrics.jsonl."
        ) from error
    # limits[n]: the lowest step of the last n starts and rollbacks.
    limits = list(itertools.accumulate([math.inf, *reversed(resumes)], min))
    numbered: Iterable[tuple[int, bytes]] = enumerate(_lines(file), start=1)
    if 0 < max_train < num_train:
        numbered = _thinned(numbered, 4 * num_train // max_train)
    for number, raw in numbered:
        if not raw.strip():
            continue
        text = raw.decode(errors="replace")
        try:
            record = decode(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path}, line {number} is not JSON ({error.msg}): {text[:60]!r}. Remove the line."
            ) from error
        kind, step = (record.get("kind"), record.get("step")) if type(record) is dict else ("", 0)
        if kind != "event" and not (kind in ("train", "eval") and isinstance(step, int)):
            raise ConfigError(
                f"{path}, line {number} is not a record (kind, step, ...): {text[:60]!r}. Remove "
                "it."
            )
        if _RESUME.match(raw) and len(limits) > 1:
            limits.pop()
        yield record, _is_lasting(record) or record.get("step", 0) <= limits[-1]


def _thinned(lines: Iterable[tuple[int, bytes]], size: int) -> Iterator[tuple[int, bytes]]:
    """Yield at most four of `size` neighboring train lines, and all other lines."""
    group: list[tuple[int, bytes]] = []

    def loss(line: tuple[int, bytes]) -> float:
        match = _LOSS.search(line[1])
        return float(match[1]) if match else math.inf

    for line in itertools.chain(lines, [(0, b"")]):
        if line[1].startswith(_TRAIN_LINE) and len(group) < size:
            group.append(line)
            continue
        if group:
            yield from sorted({group[0], min(group, key=loss), max(group, key=loss), group[-1]})
        group = [line] if line[1].startswith(_TRAIN_LINE) else []
        if not group:
            yield line


def _is_lasting(record: Record) -> bool:
    return bool(record["kind"] == "event" and record.get("event") != "skipped_step")


def _lines(file: Location) -> Iterator[bytes]:
    tail = b""
    for block in file.stream():
        *lines, tail = (tail + block).split(b"\n")
        yield from lines


def read_outline(path: str | os.PathLike[str], step: int) -> list[Record]:
    """Return the records that a run resumed at `step` needs from a metrics.jsonl, oldest first.

    The file is read backward to the newest `totals` event that this and later resumes leave valid,
    or to its beginning. The result contains that event with its last train record, and all later
    evaluations and events but `totals`. Of the train records between two of these, it contains the
    last one, and the last one that is not after `step`.
    """
    outline: list[Record] = []
    limit, has_newest, has_fitting = step, False, False
    lines = _lines_backward(locate(path))
    next(lines)  # skip the text after the last newline
    try:
        for line in filter(bytes.strip, lines):
            if line.startswith(_TRAIN_LINE):
                match = None if has_fitting else _STEP.search(line)
                is_fitting = match is not None and int(match[1]) <= step
                if is_fitting or not has_newest:
                    outline.append(decode(line.decode()))
                has_newest, has_fitting = True, has_fitting or is_fitting
                continue
            record = decode(line.decode())
            if record.get("event") != "totals":
                outline.append(record)
                has_newest = has_fitting = False
            elif record["step"] <= limit:
                return [record["last"], record, *reversed(outline)]
            if record.get("event") in ("start", "rollback"):
                limit = min(limit, record.get("step", 0))
    except ValueError as error:
        raise ConfigError(f"{path} has a line that is not JSON ({error}). Remove it.") from error
    return outline[::-1]


def _lines_backward(file: Location) -> Iterator[bytes]:
    head = b""
    for block in file.blocks_backward():
        head, *lines = (block + head).split(b"\n")
        yield from reversed(lines)
    yield head


def current(records: list[Record]) -> list[Record]:
    """Return the records without steps that a resume discarded: repeated steps count once.

    After a `start` or `rollback` event at step s the run continued from checkpoint s. Earlier train
    and eval records and skipped steps beyond s are lost work and are dropped. Other events stay.
    """
    kept: list[Record] = []
    for record in records:
        if record.get("event") in ("start", "rollback"):
            resumed_at = record.get("step", 0)
            kept = [r for r in kept if _is_lasting(r) or r["step"] <= resumed_at]
        kept.append(record)
    return kept


def device_seconds(records: Iterable[Record]) -> float:
    """Return devices × seconds from each start to its last record, summed over all starts."""
    total = begin = last = 0.0
    devices = 0
    for record in records:
        if record.get("event") == "start":
            total += devices * (last - begin)
            begin, devices = record["time"], record.get("num_devices", 0)
        elif record.get("event") == "totals":
            total, begin = record["device_seconds"], record["time"]
            devices = record["num_devices"]
        last = record.get("time", last)
    return total + devices * (last - begin)
