"""Files and directories of a local or shared POSIX file system (ext4, XFS, NFS, Lustre)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

BLOCK_BYTES = 8 << 20
"""Bytes of a file held in memory while it is streamed."""

_MODE = 0o644
_UNFINISHED = ".writing"  # ending of a file that `write` has not put in its place yet
_OWN = uuid.uuid4().hex[:8]  # several processes and threads may replace one file at the same time


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading, but no pipe and no device: they would block, or never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is not a regular file but a pipe or device", str(path))
    return open(path, "rb")


@dataclasses.dataclass(frozen=True)
class Location(os.PathLike[str]):
    """One file or directory; `str` and `os.fspath` give its path.

    Libraries that read and write by themselves (Orbax, TensorStore, TensorBoard) are given that
    path where it `is_local`. Every method raises `OSError` where the storage cannot be reached or
    refuses.
    """

    path: str
    is_local: ClassVar[bool] = True

    def __truediv__(self, name: str | int) -> Self:
        """What lies below this directory under `name`."""
        return dataclasses.replace(self, path=f"{self.path.rstrip('/')}/{name}")

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def parent(self) -> Self:
        """The directory that this lies in."""
        return dataclasses.replace(self, path=os.path.dirname(self.path) or ".")

    def absolute(self) -> Self:
        """The same place by a path that holds in any working directory."""
        return dataclasses.replace(self, path=os.path.abspath(self.path))

    def uri(self) -> str:
        """The address that TensorStore reads and writes."""
        return Path(self.path).absolute().as_uri()

    def entries(self) -> list[str]:
        """Names directly below, sorted; [] where there is no directory."""
        try:
            return sorted(name for name in os.listdir(self.path) if not name.endswith(_UNFINISHED))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self) -> list[str]:
        """Every file below, by its path relative to this directory, sorted."""
        found = (
            os.path.relpath(os.path.join(folder, name), self.path)
            for folder, _, names in os.walk(self.path, onerror=_raise_unless_absent)
            for name in names
        )
        return sorted(name for name in found if not name.endswith(_UNFINISHED))

    def sizes(self) -> dict[str, int]:
        """Bytes of every file below, by its path relative to this directory."""
        return {name: (self / name).size() for name in self.files()}

    def tags(self) -> dict[str, tuple[int, str]]:
        """Bytes and tag of every file below; the one of this name itself has the path "".

        A tag is another one when the file was written with another content; "" where the storage
        keeps none, as file systems do.
        """
        if self.exists() and not self.is_directory():
            return {"": (self.size(), "")}
        return {name: (size, "") for name, size in self.sizes().items()}

    def exists(self) -> bool:
        """Whether anything has this name. A file server that is away raises, it does not say no."""
        try:
            os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_directory(self) -> bool:
        """Whether a directory is there (on an object store: whether anything lies below)."""
        try:
            return stat.S_ISDIR(os.stat(self.path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self) -> int:
        """Bytes of the file."""
        return os.stat(self.path).st_size

    def version(self) -> int:
        """A number that grows whenever the file is written; 0 where there is none or it is away."""
        try:
            return os.stat(self.path).st_mtime_ns
        except OSError:
            return 0

    def free_bytes(self) -> int:
        """Room left for new files of this user."""
        return shutil.disk_usage(self.path).free

    def read(self) -> bytes:
        """All of the file."""
        with open_regular(self.path) as file:
            return file.read()

    def text(self) -> str:
        """All of the file, as UTF-8; other bytes are replaced, not refused."""
        return self.read().decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The JSON value in the file; `ValueError` where it is no JSON."""
        return json.loads(self.read())

    def stream(self) -> Iterator[bytes]:
        """The file in blocks of `BLOCK_BYTES`."""
        with open_regular(self.path) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def blocks_backward(self) -> Iterator[bytes]:
        """Yield the file in blocks of at most `BLOCK_BYTES`, the last block first."""
        for end in range(self.size(), 0, -BLOCK_BYTES):
            start = max(0, end - BLOCK_BYTES)
            yield self.part(start, end - start)

    def part(self, start: int, length: int) -> bytes:
        """That many bytes of the file from `start` on."""
        with open_regular(self.path) as file:
            file.seek(start)
            return file.read(length)

    def write(self, data: str | bytes | memoryview, *, durable: bool = True) -> None:
        """Make or replace the file, atomically; `durable`: it survives a crash of the machine."""
        folder, name = os.path.split(self.path)
        temporary = os.path.join(folder, f".{name}.{_OWN}-{threading.get_ident()}{_UNFINISHED}")
        try:
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, self.path)  # the atomic step of POSIX
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            _sync_directory(folder)
            _sync_directory(os.path.dirname(folder))  # the directory itself may be new

    def create(self) -> bool:
        """Make the file, empty and durably; False where there is one already."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        except FileExistsError:
            return False
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True

    def appender(self) -> Appender:
        """The file, open for appending; made if absent."""
        return Appender(self.path)

    def append_descriptor(self) -> int:
        """A file descriptor that appends, for C code and child processes."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)

    def lock(self) -> LockFile:
        """Open and lock the file; `Locked` where another process holds the lock."""
        return LockFile(self.path)

    def make_directory(self) -> None:
        """Make this directory and its parents."""
        os.makedirs(self.path, exist_ok=True)

    def missing(self) -> list[Self]:
        """Return this directory and its parents if they do not exist, deepest first."""
        return [] if self.exists() else [self, *self.parent.missing()]

    def delete(self) -> None:
        """Delete the file, durably with the next durable write next to it; nothing without one."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path)

    def delete_tree(self) -> None:
        """Delete this directory and all below it, or a file; nothing where there is none."""
        if os.path.isdir(self.path) and not os.path.islink(self.path):
            shutil.rmtree(self.path)
        else:
            self.delete()


class Appender:
    """A file open for appending, by one `write` call, so that a kill leaves whole lines.

    Attributes:
        pending: bytes that the storage refused. They may begin inside a line, and go first the next
            time.
    """

    def __init__(self, path: str) -> None:
        self.pending = b""
        self._path = path
        self._descriptor = self._open(os.O_CREAT)

    def append(self, data: bytes) -> None:
        """Append; with the operating system when this returns.

        Raises:
            OSError: not all is written. The rest is `pending`.
        """
        was_refused = bool(self.pending)
        self.pending += data
        if was_refused:  # a file server that was away does not know the old descriptor any more
            reopened = self._open()  # not created: a new file would lie below a lost mount
            os.close(self._descriptor)
            self._descriptor = reopened
        self._drain()

    def cut_torn_tail(self) -> int:
        """Remove what follows the last newline: a line that a crash cut short; bytes removed."""
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
        """Write what is pending and close; a second call does nothing.

        Raises:
            OSError: what is `pending` is lost.
        """
        if self._descriptor < 0:
            return
        try:
            self._drain()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _drain(self) -> None:
        while self.pending:
            self.pending = self.pending[os.write(self._descriptor, self.pending) :]

    def _open(self, flags: int = 0) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | flags, _MODE)


class Locked(Exception):
    """Another process holds the lock.

    Attributes:
        holder: what it wrote into the lock file.
    """

    def __init__(self, holder: bytes) -> None:
        super().__init__("locked by another process")
        self.holder = holder


class LockFile:
    """A POSIX record lock: the kernel (or the NFS server) releases it when its process ends.

    Attributes:
        is_exclusive: the storage keeps other processes out until this one ends. False: it has no
            locks, and only the content of the file tells whether another process is alive.
    """

    def __init__(self, path: str) -> None:
        self.is_exclusive = True
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _MODE)
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    holder = self.read()
                    os.close(self._descriptor)
                    raise Locked(holder) from None
                self.is_exclusive = False
            # Its holder may have deleted the file between our two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(path)):
                    return
            os.close(self._descriptor)

    def read(self) -> bytes:
        """The content; b"" where it cannot be read."""
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


def remove_empty(directories: Iterable[Location]) -> None:
    """Remove directories that are empty, in this order; leave the others."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
