"""Locations on a local or shared POSIX file system (ext4, XFS, NFS, Lustre)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxdist.core.settings.declare import ConfigError
from jaxdist.runtime.storage.location import BLOCK_BYTES, Location, Locked

_MODE = 0o644
_UNFINISHED = ".writing"  # ending of a file that `write` has not put in its place yet
_OWN = uuid.uuid4().hex[:8]  # several processes and threads may replace one file at the same time


def locate(path: str | os.PathLike[str]) -> Location:
    """The location that a path names.

    Args:
        path: of a file or directory; a `Location` comes back as it is.

    Raises:
        ConfigError: it is the URL of an object store.
    """
    if isinstance(path, Location):
        return path
    if problem := url_problem(path):
        raise ConfigError([problem])
    return PosixLocation(str(Path(path)))


def url_problem(path: str | os.PathLike[str]) -> str:
    """Why a path cannot be used; "" when it is one of a file system."""
    if not re.match("[a-z][a-z0-9+]*:/", os.fspath(path)):  # Path makes s3:/ of s3://
        return ""
    return (
        f"{os.fspath(path)!r} is a URL: files are read and written on file systems only. Use a "
        "shared disk, or mount the bucket (gcsfuse, mountpoint-s3) and name the directory."
    )


class PosixLocation(Location):
    """A file or directory; see `Location` for what each method does."""

    def absolute(self) -> PosixLocation:
        """The path from the root."""
        return PosixLocation(os.path.abspath(self.path))

    def uri(self) -> str:
        """`file://` and the path from the root."""
        return Path(self.path).absolute().as_uri()

    def entries(self) -> list[str]:
        """Names directly below a directory."""
        try:
            return sorted(name for name in os.listdir(self.path) if not name.endswith(_UNFINISHED))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self) -> list[str]:
        """Every file below a directory."""
        found = (
            os.path.relpath(os.path.join(folder, name), self.path)
            for folder, _, names in os.walk(self.path)
            for name in names
        )
        return sorted(name for name in found if not name.endswith(_UNFINISHED))

    def exists(self) -> bool:
        """Whether anything has this name. A file server that is away raises, it does not say no."""
        try:
            os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_directory(self) -> bool:
        """Whether a directory has this name."""
        return os.path.isdir(self.path)

    def size(self) -> int:
        """Bytes of a file."""
        return os.stat(self.path).st_size

    def version(self) -> int:
        """The time of the last write, in nanoseconds; 0 where there is no file or it is away."""
        try:
            return os.stat(self.path).st_mtime_ns
        except OSError:
            return 0

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        return shutil.disk_usage(self.path).free

    def read(self) -> bytes:
        """All of a file."""
        return Path(self.path).read_bytes()

    def stream(self) -> Iterator[bytes]:
        """A file in blocks."""
        with open(self.path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def write(self, data: str | bytes, *, durable: bool = True) -> None:
        """Write next to the file, then take its place: rename is the atomic step of POSIX."""
        folder, name = os.path.split(self.path)
        temporary = os.path.join(folder, f".{name}.{_OWN}-{threading.get_ident()}{_UNFINISHED}")
        try:
            with open(temporary, "wb") as file:
                file.write(_encoded(data))
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            _sync_directory(folder)
            _sync_directory(os.path.dirname(folder))  # the directory itself may be new

    def create(self, data: str | bytes = b"") -> bool:
        """Open exclusively: of several writers one succeeds; a reader may see an empty file."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encoded(data))
            file.flush()
            os.fsync(descriptor)
        return True

    def appender(self) -> PosixAppender:
        """A file to append to."""
        return PosixAppender(self.path)

    def append_descriptor(self) -> int:
        """A file descriptor in append mode."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)

    def lock(self) -> PosixLock:
        """Open a file and lock all of it."""
        return PosixLock(self.path)

    def make_directory(self) -> None:
        """Make a directory and its parents."""
        os.makedirs(self.path, exist_ok=True)

    def delete(self) -> None:
        """Delete a file; durable with the next durable write next to it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path)

    def delete_tree(self) -> None:
        """Delete a directory, or a file that has its name."""
        if os.path.isdir(self.path) and not os.path.islink(self.path):
            shutil.rmtree(self.path)
        else:
            self.delete()


class PosixAppender:
    """Appends by one `write` call, so that a kill of the process leaves whole lines."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = self._open(os.O_CREAT)
        self._pending = b""

    @property
    def pending(self) -> bytes:
        """Bytes that are not written yet."""
        return self._pending

    def append(self, data: bytes) -> None:
        """Append, after what was refused before."""
        was_refused = bool(self._pending)
        self._pending += data
        if was_refused:  # a file server that was away does not know the old descriptor any more
            reopened = self._open()  # not created: a new file would lie below a lost mount
            os.close(self._descriptor)
            self._descriptor = reopened
        self._drain()

    def cut_torn_tail(self) -> int:
        """Remove what follows the last newline; bytes removed."""
        size = os.fstat(self._descriptor).st_size
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._descriptor, end)
        return size - end

    def close(self) -> None:
        """Write what is pending and close."""
        if self._descriptor < 0:
            return
        try:
            self._drain()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _drain(self) -> None:
        while self._pending:
            self._pending = self._pending[os.write(self._descriptor, self._pending) :]

    def _open(self, flags: int = 0) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | flags, _MODE)


class PosixLock:
    """A POSIX record lock: the kernel (or the NFS server) releases it when its process ends."""

    def __init__(self, path: str) -> None:
        self.is_exclusive = True
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _MODE)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = self.read()
                os.close(self._descriptor)
                raise Locked(holder) from None
            self.is_exclusive = False  # this file system has no locks

    def read(self) -> bytes:
        """The content."""
        try:
            return os.pread(self._descriptor, 4096, 0)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        """Replace the content in place: another file would not be locked."""
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._descriptor)


def _encoded(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


def _sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
