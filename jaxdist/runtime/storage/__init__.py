"""Where a run keeps its files. Every read, write and listing of a run directory goes through here.

`locate(path)` gives a `Location`; its methods are the only file operations that the package makes
on a run directory or a checkpoint. They are what an object store can offer too:

| operation | guarantee |
|---|---|
| `write` | atomic: a reader sees the old content or the new one. Durable unless `durable=False` |
| `create` | of several writers exactly one succeeds; durable |
| `appender` | what was appended survives a kill of the process, in order; on an object store what \
was appended before the last few seconds, or before `flush_appended` |
| `entries`, `files` | names in order; files that are still being written are not listed |
| `delete_tree` | not atomic: what makes a directory count must be deleted first |
| `lock` | excludes other processes where the storage can, and tells who holds it |

There is no rename. Several files become valid together when the file that names them is written
last (`checkpoint.manifest`).

`location` has the operations of a POSIX file system, `objects` those of S3, `parts` what lets a
file grow there.
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
from jaxdist.runtime.storage.objects import REQUESTS, ObjectLocation, canonical, is_url, problem_of
from jaxdist.runtime.storage.parts import Mirror, flush_appended, mirror
from jaxdist.settings.declare import ConfigError


def locate(path: str | os.PathLike[str]) -> Location:
    """The location of a path (`~` is the home) or a URL; a `Location` comes back as it is.

    Raises:
        ConfigError: it is the URL of an object store that cannot be used.
        OSError: the object store cannot be reached.
    """
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


def url_problem(path: str | os.PathLike[str]) -> str:
    """Why a URL cannot be used; "" when it can, or when the path is one of a file system.

    Asks the object store once for each bucket.
    """
    return problem_of(path) if is_url(path) else ""


def file_system_problem(path: str | os.PathLike[str], what: str) -> str:
    """Why a URL cannot be used for `what` ("data are read"); "" for a path of a file system."""
    if not is_url(path):
        return ""
    return (
        f"{os.fspath(path)!r} is a URL: {what} on file systems only. Use a shared disk, or mount "
        "the bucket (gcsfuse, mountpoint-s3) and name the directory."
    )
