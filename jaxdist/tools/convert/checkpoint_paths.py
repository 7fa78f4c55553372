"""Resolve paths of the command line: checkpoints to read, directories to write."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Literal

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.lock import FILE_NAME as LOCK_NAME
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.runtime.storage import Location, file_system_problem, locate
from jaxdist.settings import ConfigError, setting

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsToConvert:
    """The weights to convert, and the output."""

    src: str = setting("", "run directory, its checkpoints/, or one checkpoint", required=True)
    out: str = setting("", "new directory for the result", required=True)
    step: int = setting(-1, "step of the checkpoint; -1 = as named by SRC, else the newest valid")
    weights: Literal["auto", "ema", "raw"] = setting(
        "auto",
        "ema = moving average of the weights, raw = as trained, auto = the average if the run has "
        "one",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(WeightsToConvert):
    """Weights to convert to a directory that a hub can serve."""

    push: str = setting(
        "",
        "ORG/NAME on the Hugging Face hub to which the new directory is uploaded; a new "
        "repository is private",
    )


_MARKER = "unfinished.txt"
_CUT_OFF = "jaxdist.convert was cut off here: its next start deletes what it had begun\n"


def checkpoint_of(path: str, step: int) -> Location:
    """Return a verified checkpoint; `step` < 0 = the one that `path` names, or the newest valid."""
    directory, named = manifest.named_step(path)
    steps = manifest.steps_in(directory)
    if step < 0 and named is not None:
        step = named
    if step >= 0 and step not in steps:
        raise ConfigError(
            f"{directory} has no checkpoint {step}; it has {', '.join(map(str, steps))}. "
            "Use one of these, or no step for the newest."
        )
    reasons = []
    for candidate in [step] if step >= 0 else reversed(steps):
        reason = manifest.damage(directory / candidate)
        if not reason:
            return directory / candidate
        reasons.append(f"checkpoint {candidate} in {directory} is corrupt: {reason}")
    raise ConfigError([*reasons, "Use another step, or restore its files."])


def new_directory(path: str) -> Location:
    """Return a directory to write into; raise ConfigError unless it is empty or missing."""
    directory = locate(path).absolute()
    if directory.exists() and (not directory.is_directory() or directory.entries()):
        raise ConfigError(f"{path} exists and is not empty. Name a directory that does not exist.")
    return directory


def new_run_directory(path: str) -> Location:
    """Return a directory that is missing, empty or left by `making_run`; else ConfigError."""
    directory = locate(path).absolute()
    marker = directory / _MARKER
    only_ours = {_MARKER} <= {*directory.entries()} <= {_MARKER, "checkpoints", "tokenizer"}
    return directory if only_ours and marker.text() == _CUT_OFF else new_directory(path)


@contextlib.contextmanager
def making_run(directory: Location) -> Iterator[None]:
    """Lock a directory of `new_run_directory` while a run is written into it.

    A marker file flags it as incomplete until the end. An interrupted earlier attempt is deleted.
    """
    (directory / "checkpoints").make_directory()
    marker = directory / _MARKER
    marker.write(_CUT_OFF)
    lock = DirectoryLock(directory / "checkpoints", log.info)
    lock.acquire()
    try:
        if (directory / "config.toml").exists():
            marker.delete()
            raise ConfigError(f"another process has just created {directory}. Name another one.")
        (directory / "tokenizer").delete_tree()
        for name in (directory / "checkpoints").entries():
            if name != LOCK_NAME:
                (directory / "checkpoints" / name).delete_tree()
        yield
        marker.delete()
    finally:
        lock.release()


def new_local_directory(path: str) -> Location:
    """Return an empty or missing directory on a file system; ConfigError for any other path."""
    if problem := file_system_problem(path, "safetensors are written"):
        raise ConfigError(problem)
    return new_directory(path)
