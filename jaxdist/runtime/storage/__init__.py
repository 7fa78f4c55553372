"""Read, write and list files, such as those of a run directory, on file systems and object stores.

A `Location` (from `locate(path)`) has only operations that object stores support too:

| operation | guarantee |
|---|---|
| `write` | atomic: a reader sees the old content or the new one. Durable unless `durable=False` |
| `create` | exactly one of several concurrent writers succeeds; durable |
| `appender` | appended data survive a kill of the process, in order; on an object store only data \
older than a few seconds, or before `flush_appended` |
| `entries`, `files` | sorted names; files that are still being written are not listed |
| `delete_tree` | not atomic: the file that makes a directory valid must be deleted first |
| `lock` | excludes other processes if the storage has locks; the file's content names the holder |

There is no rename. To make several files valid together, write a file that lists them last
(`checkpoint.manifest`).
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxdist.runtime.storage.location import (
    BLOCK_BYTES,
    Appender,
    Location,
    Locked,
    LockFile,
    open_regular,
    remove_empty,
)
from jaxdist.runtime.storage.objects import REQUESTS, ObjectLocation, canonical, is_url, url_problem
from jaxdist.runtime.storage.parts import Mirror, flush_appended
from jaxdist.settings.declare import ConfigError


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the location of a path (`~` is the home) or URL; return a `Location` unchanged."""
    if isinstance(path, Location):
        return path
    if not is_url(path):
        return Location(str(Path(os.path.expanduser(path))))
    if problem := url_problem(path):
        raise ConfigError(problem)
    return ObjectLocation(canonical(path))


def read_url(url: str) -> bytes:
    """Return the content of an object; raises `OSError`, or `ConfigError` for a wrong URL."""
    return locate(url).read()


def file_system_problem(path: str | os.PathLike[str], what: str) -> str:
    """Return why a URL cannot be used for `what` ("data are read"); "" for a path."""
    if not is_url(path):
        return ""
    return (
        f"{os.fspath(path)!r} is a URL: {what} on file systems only. Use a shared disk, or mount "
        "the bucket (gcsfuse, mountpoint-s3) and name the directory."
    )
