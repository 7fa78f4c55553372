"""Which checkpoint a path on the command line means."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.lock import FILE_NAME as LOCK_NAME
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, file_system_problem, locate
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

_MARKER = "unfinished.txt"
_CUT_OFF = "jaxdist.convert was cut off here: its next start deletes what it had begun\n"


def checkpoint_of(path: str, step: int) -> Location:
    """One checkpoint, its files verified by size and CRC-32.

    A negative `step` is the one that `path` names (see `manifest.named_step`), or the newest.

    Raises:
        ConfigError: there is no such checkpoint, or it is corrupt.
    """
    directory, named = manifest.named_step(path)
    there = manifest.steps_in(directory)
    if step < 0 and named is not None:
        step = named
    if step >= 0 and step not in there:
        raise ConfigError(
            f"{directory} has no checkpoint {step}; it has {', '.join(map(str, there))}. "
            "Name one of these, or leave --step out for the newest."
        )
    reasons = []
    for candidate in [step] if step >= 0 else reversed(there):
        reason = manifest.damage(directory / candidate)
        if not reason:
            return directory / candidate
        reasons.append(f"checkpoint {candidate} in {directory} is not whole: {reason}")
    raise ConfigError([*reasons, "Name another with --step, or restore its files."])


def nothing_under(prefix: str, names: Iterable[str]) -> str:
    """What to say when no array's name begins with the prefix of `--under`."""
    return (
        f"--under {prefix}: no array has a name that begins with it. There are "
        f"{few(list(dict.fromkeys(names)), 3)}."
    )


def new_directory(path: str) -> Location:
    """A directory to write into, which must not hold anything yet."""
    given = locate(path).absolute()
    if given.exists() and (not given.is_directory() or given.entries()):
        raise ConfigError(f"{path} exists and is not empty. Name a directory that does not exist.")
    return given


def new_run_directory(path: str) -> Location:
    """As `new_directory`, or with nothing but what a command that was cut off began there."""
    given = locate(path).absolute()
    return given if _is_unfinished(given) else new_directory(path)


@contextlib.contextmanager
def making_run(directory: Location) -> Iterator[None]:
    """Hold a directory of `new_run_directory` while a run is written into it.

    It does not count as one before the end. What was begun there and cut off is deleted.

    Raises:
        ConfigError: another process writes there, or has just done so.
    """
    (directory / "checkpoints").make_directory()
    marker = directory / _MARKER
    marker.write(_CUT_OFF)
    lock = DirectoryLock(directory / "checkpoints", log.info)
    lock.acquire()
    try:
        if (directory / "config.toml").exists():
            marker.delete()
            raise ConfigError(f"another process has just made {directory}. Name another directory.")
        for name in (directory / "checkpoints").entries():
            if name != LOCK_NAME:
                (directory / "checkpoints" / name).delete_tree()
        yield
        marker.delete()
    finally:
        lock.release()


def _is_unfinished(directory: Location) -> bool:
    """Whether all that is there was begun by `making_run` and not ended."""
    marker = directory / _MARKER
    only_ours = {_MARKER} <= {*directory.entries()} <= {_MARKER, "checkpoints", "tokenizer"}
    return only_ours and marker.text() == _CUT_OFF


def new_local_directory(path: str) -> Location:
    """As `new_directory`, on a file system."""
    if problem := file_system_problem(path, "safetensors are written"):
        raise ConfigError(problem)
    return new_directory(path)
