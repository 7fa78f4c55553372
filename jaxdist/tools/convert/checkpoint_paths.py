"""Which checkpoint a path on the command line means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxdist.checkpoint import manifest
from jaxdist.core.settings import ConfigError
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, file_system_problem, locate

_UNFINISHED = "unfinished.txt"

if TYPE_CHECKING:
    from jaxdist.config import RunConfig


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


def settings_of(path: str) -> RunConfig:
    """The settings of the run that a path names or lies in.

    Raises:
        ConfigError: they are not there, so that the model is not known.
    """
    from jaxdist.config import stored_run

    run = manifest.named_step(path)[0].parent
    if not (run / "config.toml").exists():
        raise ConfigError(
            f"{run} holds no config.toml, so its model is not known. Name a whole run."
        )
    return stored_run(run / "config.toml")


def new_directory(path: str) -> Location:
    """A directory to write into, which must not hold anything yet."""
    given = locate(path).absolute()
    if given.exists() and (not given.is_directory() or given.entries()):
        raise ConfigError(f"{path} exists and is not empty. Name a directory that does not exist.")
    return given


def new_run_directory(path: str) -> Location:
    """As `new_directory`; what a command that was cut off began there is deleted."""
    given = locate(path).absolute()
    if (given / _UNFINISHED).exists() and not (given / "config.toml").exists():
        given.delete_tree()
    return new_directory(path)


def begin_run(directory: Location) -> None:
    """Make a run directory that does not count until `finish_run`."""
    (directory / "checkpoints").make_directory()
    (directory / _UNFINISHED).write("jaxdist.convert was cut off here: its next start deletes this")


def finish_run(directory: Location) -> None:
    """Say that everything is there."""
    (directory / _UNFINISHED).delete()


def new_local_directory(path: str) -> Location:
    """As `new_directory`, on a file system."""
    if problem := file_system_problem(path, "safetensors are written"):
        raise ConfigError(problem)
    return new_directory(path)
