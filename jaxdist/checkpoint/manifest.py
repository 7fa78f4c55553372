"""List the files of a checkpoint with size and CRC-32: written last, checked before loading.

A directory `<step>/` is a checkpoint if and only if it holds `manifest.json`. A save writes that
file last and a deletion removes it first, so a kill leaves a complete checkpoint or none. A
checkpoint that must not be loaded keeps its files and gets a marker file with a one-line reason:

    CORRUPT      the files differ from the saved ones, or could not be read
    SUPERSEDED   a run restarted from an older step
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import REQUESTS, Location, locate
from jaxdist.settings import ConfigError

FILE_NAME = "manifest.json"
DOCUMENT = "meta/metadata"
"""Path of the JSON next to the arrays, relative to the checkpoint."""

CORRUPT = "CORRUPT"
SUPERSEDED = "SUPERSEDED"

_TRANSIENT = {  # the next attempt may succeed
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
}

_FORMAT = 1
_KEYS = {"format", "step", "metrics", "files"}


def steps_in(directory: Location) -> list[int]:
    """Return the steps of all checkpoints, in order: corrupt ones too, superseded ones not."""
    return [
        step
        for step in _directories(directory)
        if (directory / step / FILE_NAME).exists() and not (directory / step / SUPERSEDED).exists()
    ]


def named_step(path: str) -> tuple[Location, int | None]:
    """Return the checkpoint directory at, in or above `path`, and the step it names (or None)."""
    location = locate(path).absolute()
    for candidate in (location / "checkpoints", location, location.parent):
        if steps_in(candidate) and (candidate != location.parent or location.name.isdecimal()):
            return candidate, int(location.name) if candidate == location.parent else None
    if not location.exists():
        raise ConfigError(f"{path} does not exist. Name a run directory or one checkpoint.")
    raise ConfigError(
        f"{path} holds no checkpoint. Name a run directory (with checkpoints/ in it), its "
        "checkpoints directory, or one checkpoint in there."
    )


def stored_config(directory: Location, step: int | None = None) -> str:
    """Return the settings (TOML) of the newest checkpoint up to `step` without visible damage."""
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
    """Return the sorted paths, relative to the checkpoint, of all files that a manifest covers."""
    return [name for name in checkpoint.files() if name not in (FILE_NAME, CORRUPT, SUPERSEDED)]


def write(
    checkpoint: Location,
    step: int,
    files: dict[str, list[int]],
    metrics: dict[str, float],
    *,
    halfway: bool = False,
) -> None:
    """Write the manifest, which commits a checkpoint whose other files are complete.

    `files` maps a path inside the checkpoint to size and CRC-32; `halfway` is as in `save.Saved`.
    """
    body = {"format": _FORMAT, "step": step, "halfway": halfway, "metrics": metrics, "files": files}
    (checkpoint / FILE_NAME).write(json.dumps({**body, "crc32": _crc_of(body)}, indent=1))


def read(checkpoint: Location) -> dict[str, Any]:
    """Return the manifest; raises `ValueError` with the reason not to load it, or `OSError`."""
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
        _raise_transient(checkpoint, error)
        raise ValueError(f"{FILE_NAME} is unreadable ({type(error).__name__})") from None
    if crc != _crc_of(body):
        raise ValueError(f"{FILE_NAME} does not match its own CRC-32")
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']} is not supported, only {_FORMAT}")
    if str(body["step"]) != checkpoint.name:
        raise ValueError(f"its manifest is of step {body['step']}: the directory was renamed")
    return {"halfway": False, **body}  # older manifests do not have this key


def size_problems(checkpoint: Location, files: dict[str, list[int]]) -> list[str]:
    """Return an error for each file that is missing or of another size; may raise `OSError`."""
    problems = []
    listed = None if checkpoint.is_local else checkpoint.sizes()  # one request for 1,000 objects
    for name, (size, _) in files.items():
        try:
            if listed is not None and name not in listed:
                raise FileNotFoundError
            if (actual := listed[name] if listed else (checkpoint / name).size()) != size:
                problems.append(f"{name} has {actual} of {size} bytes")
        except OSError as error:
            _raise_transient(checkpoint, error)
            problems.append(f"{name} is missing or cannot be read")
    return problems


def content_problems(
    checkpoint: Location, files: dict[str, list[int]], names: Iterable[str]
) -> list[str]:
    """Return an error for each differing or unreadable file of `names`; may raise `OSError`."""

    def problem(name: str) -> str:
        try:
            if fingerprint(checkpoint / name) != files[name]:
                return f"{name} has other content than was written (CRC-32)"
        except OSError as error:
            _raise_transient(checkpoint, error)
            return f"{name} cannot be read ({error.strerror})"
        return ""

    with _pool(checkpoint) as pool:
        return [text for text in pool.map(problem, names) if text]


def fingerprint(file: Location) -> list[int]:
    """Return [size in bytes, CRC-32] of a file."""
    crc = size = 0
    for block in file.stream():
        crc = zlib.crc32(block, crc)
        size += len(block)
    return [size, crc]


def fingerprints(checkpoint: Location, names: Sequence[str]) -> dict[str, list[int]]:
    """Return path in the checkpoint -> `fingerprint` of the file."""
    with _pool(checkpoint) as pool:
        entries = pool.map(lambda name: fingerprint(checkpoint / name), names)
        return dict(zip(names, entries, strict=True))


def _pool(checkpoint: Location) -> ThreadPoolExecutor:
    # zlib releases the GIL; more threads do not speed up a disk. Requests wait for the network.
    threads = min(os.cpu_count() or 1, 8) if checkpoint.is_local else REQUESTS
    return ThreadPoolExecutor(threads, "checkpoint-crc")


def damage(checkpoint: Location) -> str:
    """Return why a checkpoint must not be loaded, or ""; checks every file, raises `OSError`."""
    try:
        files = read(checkpoint)["files"]
    except ValueError as reason:
        return str(reason)
    return few(size_problems(checkpoint, files) or content_problems(checkpoint, files, files), 1)


def mark(checkpoint: Location, marker: str, reason: str) -> None:
    """Mark a checkpoint as `CORRUPT` or `SUPERSEDED`, with a one-line reason."""
    crash_point("during_mark")
    (checkpoint / marker).write(reason)


def delete(checkpoint: Location) -> None:
    """Delete a checkpoint, its manifest first: if a kill interrupts this, it no longer counts."""
    (checkpoint / FILE_NAME).delete()
    crash_point("during_retention")
    checkpoint.delete_tree()


def delete_partial(directory: Location) -> list[int]:
    """Delete unfinished saves and return their steps; no save may be running."""
    partial = [s for s in _directories(directory) if not (directory / s / FILE_NAME).exists()]
    for step in partial:
        (directory / step).delete_tree()
    return partial


def _directories(directory: Location) -> list[int]:
    steps = sorted(int(name) for name in directory.entries() if name.isdecimal())
    return [step for step in steps if (directory / step).is_directory()]


def _raise_transient(checkpoint: Location, error: Exception) -> None:
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return
    if error.errno in _TRANSIENT or not checkpoint.is_local:  # store errors are transient
        raise error


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
