"""The list of a checkpoint's files with size and CRC-32: written last, checked before loading.

No JAX here: a checkpoint can be proven whole on any machine that sees its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxdist.core.types import ConfigError

FILE_NAME = "manifest.json"
REJECTED_NAME = "rejected.txt"
"""Reason why a process could not load this checkpoint: the next start goes past it."""

SAVING_NAME = ".saving"
"""Where a checkpoint is written until its manifest is complete; then it gets its name at once."""

_FORMAT = 1
_KEYS = {"format", "step", "metrics", "files"}
_BLOCK_BYTES = 8 << 20


def steps_in(directory: Path) -> list[int]:
    """Steps of the checkpoints in a directory, whole or not, in increasing order."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.is_dir() and p.name.isdecimal())


def directory_of(path: str) -> Path:
    """The directory that holds a run's checkpoints, for any path inside or above it.

    Raises:
        ConfigError: there are none.
    """
    given = Path(path).expanduser().absolute()
    for candidate in (given / "checkpoints", given, given.parent):
        if steps_in(candidate) and (candidate != given.parent or given.name.isdecimal()):
            return candidate
    if not given.exists():
        raise ConfigError([f"{path} does not exist. Name a run directory or one checkpoint."])
    raise ConfigError(
        [
            f"{path} holds no checkpoint. Name a run directory (with checkpoints/ in it), its "
            "checkpoints directory, or one checkpoint in there."
        ]
    )


def files_of(checkpoint: Path) -> list[str]:
    """Every file that a manifest covers, by path inside the checkpoint, sorted."""
    files = (p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file())
    return sorted(name for name in files if not name.startswith((FILE_NAME, REJECTED_NAME)))


def fingerprint(file: Path) -> list[int]:
    """Size in bytes and CRC-32 of a file."""
    crc = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return [size, crc]


def write(
    checkpoint: Path,
    step: int,
    files: dict[str, list[int]],
    metrics: dict[str, float],
    *,
    midway: bool = False,
) -> None:
    """Write the manifest of a checkpoint whose files are all there.

    Args:
        checkpoint: its directory.
        step: number of finished steps.
        files: size and CRC-32 of each, by path inside the checkpoint.
        metrics: evaluation metrics at this step.
        midway: it is kept only until the next one is committed.
    """
    body = {"format": _FORMAT, "step": step, "midway": midway, "metrics": metrics, "files": files}
    text = json.dumps({**body, "crc32": _crc_of(body)}, indent=1)
    partial = checkpoint / (FILE_NAME + ".partial")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(checkpoint / FILE_NAME)
    sync_directory(checkpoint)


def publish(saved: Path, checkpoint: Path) -> None:
    """Give a checkpoint with its manifest the name under which it is found; atomic and durable."""
    saved.rename(checkpoint)
    sync_directory(checkpoint.parent)
    with contextlib.suppress(OSError):  # late files of a failed save before: removed by the next
        saved.parent.rmdir()


def read(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: with the one-line reason why there is no valid one.
    """
    if (checkpoint / REJECTED_NAME).exists():
        reason = (checkpoint / REJECTED_NAME).read_text(errors="replace").strip()
        raise ValueError(f"an earlier start could not load it: {reason}")
    try:
        body = dict(json.loads((checkpoint / FILE_NAME).read_text()))
        crc = body.pop("crc32")
        if not body.keys() >= _KEYS:
            raise KeyError("files")
    except FileNotFoundError:
        empty = not any(checkpoint.iterdir()) if checkpoint.is_dir() else False
        raise ValueError("an empty directory" if empty else f"no {FILE_NAME}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{FILE_NAME} is unreadable ({type(error).__name__})") from None
    if crc != _crc_of(body):
        raise ValueError(f"{FILE_NAME} does not match its own CRC-32")
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']} is unknown here, {_FORMAT} is supported")
    if str(body["step"]) != checkpoint.name:
        raise ValueError(f"its manifest is of step {body['step']}: the directory was renamed")
    return {"midway": False, **body}  # not said by manifests older than this word


def size_problems(checkpoint: Path, files: dict[str, list[int]]) -> list[str]:
    """One reason for each listed file that is missing or has another size."""
    found = []
    for name, (size, _) in files.items():
        try:
            actual = (checkpoint / name).stat().st_size
        except OSError:
            found.append(f"{name} is missing")
            continue
        if actual != size:
            found.append(f"{name} has {actual} of {size} bytes")
    return found


def content_problems(
    checkpoint: Path, files: dict[str, list[int]], names: Iterable[str]
) -> list[str]:
    """One reason for each named file whose content is not what was written."""
    found = []
    for name in names:
        try:
            actual = fingerprint(checkpoint / name)
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
            continue
        if actual != files[name]:
            found.append(f"{name} has other content than was written (CRC-32)")
    return found


def summary(problems: Sequence[str]) -> str:
    """The first reason and the number of the others; "" when there is none."""
    if len(problems) < 2:
        return "".join(problems)
    return f"{problems[0]} (and {len(problems) - 1} more)"


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint that must not be loaded to `<step>.<why>[-n]`, keeping its files."""
    number = 1
    while True:
        suffix = f".{why}" if number == 1 else f".{why}-{number}"
        aside = checkpoint.with_name(checkpoint.name + suffix)
        if not aside.exists():
            checkpoint.rename(aside)
            return aside
        number += 1


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint so that a kill half way leaves nothing that looks like one."""
    trash = checkpoint.with_name(f".deleted-{checkpoint.name}")
    if trash.exists():
        shutil.rmtree(trash)
    checkpoint.rename(trash)
    shutil.rmtree(trash)


def remove_leftovers(directory: Path) -> None:
    """Remove half-written saves and half-done deletions; only while no save is running."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.name == SAVING_NAME or path.name.startswith(".deleted-"):
            shutil.rmtree(path, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, where the file system knows how to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
