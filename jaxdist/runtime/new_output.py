"""Write outputs atomically: under a temporary name in the same directory, renamed at the end."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_output(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` for a new file or folder; rename it to `path` on success.

    Delete the new output after an error, and earlier ones of killed processes of this host.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    partial = _partial(path)
    try:
        yield partial
        if path.is_file():
            raise FileExistsError(f"{path} was written by another process meanwhile")
        partial.rename(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # `write` names no file
        raise
    finally:
        _remove(partial)


def delete_output(path: Path) -> None:
    """Delete a file or folder, if it exists, so that a kill leaves it complete or absent."""
    with contextlib.suppress(FileNotFoundError):
        partial = path.rename(_partial(path.absolute()))
        _remove(partial)


def _partial(path: Path) -> Path:
    owner = f"{socket.gethostname()}-{os.getpid()}"
    return path.with_name(f".{path.name}.partial-{owner}-{uuid.uuid4().hex[:8]}")


def _remove_abandoned(path: Path) -> None:
    for partial in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        host, _, pid = partial.name.partition(".partial-")[2].rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _remove(partial)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
