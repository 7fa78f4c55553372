"""The cache folder of this host for prepared data, and a lock that serializes work on it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


def cache_folder() -> Path:
    """Return the folder `corpora` in $JAXDIST_CACHE, else ~/.cache/jaxdist, else a temporary one.

    Raises `ConfigError` if $JAXDIST_CACHE cannot be written.
    """
    named = os.environ.get("JAXDIST_CACHE")
    base = Path(named).expanduser() if named else _home() / ".cache" / "jaxdist"
    folder = base / "corpora"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if named:
            raise ConfigError(
                f"JAXDIST_CACHE={named!r} cannot be written: {error.strerror}. Name another folder."
            ) from None
        spare = Path(tempfile.gettempdir()) / f"jaxdist-cache-{os.getuid()}"
        spare.mkdir(mode=0o700, exist_ok=True)
        log.info("cache folder %s is not writable (%s): using %s", folder, error.strerror, spare)
        return spare


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a container without a user entry
        return Path("/nonexistent")


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the lock file `path` (see `flock`) in a `with` block; others of this host wait."""
    with path.open("w") as file:
        flock(file, fcntl.LOCK_EX)
        yield


def flock(file: TextIO, kind: int) -> None:
    """Lock a file, or change the kind of its lock, on file systems that have locks."""
    # Without locks every process tokenizes, and the first rename wins.
    with contextlib.suppress(OSError):
        fcntl.flock(file, kind)
