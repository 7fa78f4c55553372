"""The list of a checkpoint's files with size and CRC-32: written last, checked before loading.

A directory `<step>/` is a checkpoint because it holds `manifest.json`, and for no other reason.
Saving writes that file last and deleting removes it first, so a kill at any moment leaves a whole
checkpoint or none. What a killed save or deletion leaves behind has no manifest: readers pass it
over, and the next run that holds the lock removes it.

Nothing is ever renamed. A checkpoint that must not be loaded keeps its files and gets a marker,
a file with the one-line reason, until its step is saved again:

    CORRUPT      it holds other bytes than were saved, or could not be read
    SUPERSEDED   a run started again from an older step, and this one is newer

No JAX here: a checkpoint can be verified on any machine that sees its files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxdist.checkpoint import crc32
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import REQUESTS, Location, locate
from jaxdist.settings import ConfigError

FILE_NAME = "manifest.json"
DOCUMENT = "meta/metadata"
"""The JSON next to the arrays."""

CORRUPT = "CORRUPT"
SUPERSEDED = "SUPERSEDED"

_PASSING = {  # file server away or slow, too little memory, too many open files
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
}
"""Errors that say nothing of a file: the next attempt may read it."""

_FORMAT = 1
_KEYS = {"format", "step", "metrics", "files"}


def steps_in(directory: Location) -> list[int]:
    """Steps of the checkpoints in a directory, corrupt ones included, in increasing order."""
    return [
        step
        for step in _directories(directory)
        if (directory / step / FILE_NAME).exists() and not (directory / step / SUPERSEDED).exists()
    ]


def named_step(path: str) -> tuple[Location, int | None]:
    """Return the directory of a run's checkpoints, for any path inside or above it, and the step named.

    The step is None unless the path is one of a checkpoint in that directory: a run may have a
    number for its name too.

    Raises:
        ConfigError: there are none.
    """
    given = locate(path).absolute()
    for candidate in (given / "checkpoints", given, given.parent):
        if steps_in(candidate) and (candidate != given.parent or given.name.isdecimal()):
            return candidate, int(given.name) if candidate == given.parent else None
    if not given.exists():
        raise ConfigError(f"{path} does not exist. Name a run directory or one checkpoint.")
    raise ConfigError(
        f"{path} holds no checkpoint. Name a run directory (with checkpoints/ in it), its "
        "checkpoints directory, or one checkpoint in there."
    )


def stored_config(directory: Location, step: int | None = None) -> str:
    """Return the settings (TOML) stored with the newest whole checkpoint, or that of `step`.

    A `step` without a whole checkpoint stands for the newest one before it. "" = none is stored.
    """
    for candidate in reversed(steps_in(directory)):
        checkpoint = directory / candidate
        with contextlib.suppress(ValueError, KeyError):
            if step is not None and candidate > step:
                continue
            files = read(checkpoint)["files"]
            damaged = size_problems(checkpoint, files)
            if not (damaged or content_problems(checkpoint, files, [DOCUMENT])):
                return str((checkpoint / DOCUMENT).json()["meta"].get("config", ""))
    return ""


def files_of(checkpoint: Location) -> list[str]:
    """Return every file that a manifest covers, by path inside the checkpoint, sorted."""
    return [name for name in checkpoint.files() if name not in (FILE_NAME, CORRUPT, SUPERSEDED)]


def write(
    checkpoint: Location,
    step: int,
    files: dict[str, list[int]],
    metrics: dict[str, float],
    *,
    halfway: bool = False,
) -> None:
    """Commit the checkpoint of a step whose files are all there: from now on it counts.

    `files` are size and CRC-32 of each, by path inside the checkpoint; `metrics` are of an
    evaluation at this step. One `halfway` is kept only until the next one is committed.
    """
    body = {"format": _FORMAT, "step": step, "halfway": halfway, "metrics": metrics, "files": files}
    (checkpoint / FILE_NAME).write(json.dumps({**body, "crc32": _crc_of(body)}, indent=1))


def read(checkpoint: Location) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: with the one-line reason why the checkpoint must not be loaded.
        OSError: nothing is known of it, because the storage cannot be reached just now.
    """
    for marker in (CORRUPT, SUPERSEDED):
        if (checkpoint / marker).exists():
            raise ValueError(f"it is marked {marker}: {(checkpoint / marker).text().strip()}")
    try:
        body = dict((checkpoint / FILE_NAME).json())
        crc = body.pop("crc32")
        if not body.keys() >= _KEYS:
            raise KeyError("files")
    except FileNotFoundError:
        raise ValueError(f"no {FILE_NAME}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _raise_passing(checkpoint, error)
        raise ValueError(f"{FILE_NAME} is unreadable ({type(error).__name__})") from None
    if crc != _crc_of(body):
        raise ValueError(f"{FILE_NAME} does not match its own CRC-32")
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']} is unknown here, {_FORMAT} is supported")
    if str(body["step"]) != checkpoint.name:
        raise ValueError(f"its manifest is of step {body['step']}: the directory was renamed")
    return {"halfway": False, **body}  # older manifests do not have this key


def size_problems(checkpoint: Location, files: dict[str, list[int]]) -> list[str]:
    """One reason for each listed file that is missing or has another size.

    Raises:
        OSError: nothing is known, because the storage cannot be reached just now.
    """
    found = []
    listed = None if checkpoint.is_local else checkpoint.sizes()  # one request for 1,000 objects
    for name, (size, _) in files.items():
        try:
            if listed is not None and name not in listed:
                raise FileNotFoundError
            if (actual := listed[name] if listed else (checkpoint / name).size()) != size:
                found.append(f"{name} has {actual} of {size} bytes")
        except OSError as error:
            _raise_passing(checkpoint, error)
            found.append(f"{name} is missing")
    return found


def content_problems(
    checkpoint: Location, files: dict[str, list[int]], names: Iterable[str]
) -> list[str]:
    """One reason for each named file whose content is not what was written.

    Raises:
        OSError: nothing is known, because the storage cannot be reached just now.
    """

    def problem(name: str) -> str:
        try:
            if crc32.fingerprint(checkpoint / name) != files[name]:
                return f"{name} has other content than was written (CRC-32)"
        except OSError as error:
            _raise_passing(checkpoint, error)
            return f"{name} cannot be read ({error.strerror})"
        return ""

    if checkpoint.is_local:
        return [text for text in map(problem, names) if text]
    with ThreadPoolExecutor(REQUESTS, "checkpoint-verify") as pool:  # each waits for a network
        return [text for text in pool.map(problem, names) if text]


def damage(checkpoint: Location) -> str:
    """Return why a checkpoint must not be loaded, or "": every file against the manifest.

    Raises:
        OSError: nothing is known, because the storage cannot be reached just now.
    """
    try:
        files = read(checkpoint)["files"]
    except ValueError as reason:
        return str(reason)
    return few(size_problems(checkpoint, files) or content_problems(checkpoint, files, files), 1)


def mark(checkpoint: Location, marker: str, reason: str) -> None:
    """Mark a checkpoint as `CORRUPT` or `SUPERSEDED`, for a reason of one line."""
    crash_point("during_mark")
    (checkpoint / marker).write(reason)


def delete(checkpoint: Location) -> None:
    """Delete a checkpoint, the manifest first: killed half way, it is none any more."""
    (checkpoint / FILE_NAME).delete()
    crash_point("during_retention")
    checkpoint.delete_tree()


def delete_partial(directory: Location) -> list[int]:
    """Delete what killed saves left behind, while no save is running; returns their steps."""
    partial = [s for s in _directories(directory) if not (directory / s / FILE_NAME).exists()]
    for step in partial:
        (directory / step).delete_tree()
    return partial


def _directories(directory: Location) -> list[int]:
    steps = sorted(int(name) for name in directory.entries() if name.isdecimal())
    return [step for step in steps if (directory / step).is_directory()]


def _raise_passing(checkpoint: Location, error: Exception) -> None:
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return
    if error.errno in _PASSING or not checkpoint.is_local:  # an object store knows no bad disk
        raise error


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
