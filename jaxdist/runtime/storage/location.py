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

from jaxdist.settings.declare import ConfigError


@contextlib.contextmanager
def panics_as(problem: str, *also: type[Exception]) -> Iterator[None]:
    """In this block, convert a Rust panic, or an error of the types `also`, to a `ConfigError`.

    `{}` in `problem` is replaced by the error's first line. A panic derives from `BaseException`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and not isinstance(error, also):
            raise
        cause = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(problem.replace("{}", cause)) from None


BLOCK_BYTES = 8 << 20
"""Bytes per block when a file is streamed."""

_MODE = 0o644
_UNFINISHED = ".writing"  # suffix of files that `write` has not renamed yet
_OWN = uuid.uuid4().hex[:8]  # id of this process and its forks: several may replace a file


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading; reject pipes and devices, which could block or never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is not a regular file but a pipe or device", str(path))
    return open(path, "rb")


@dataclasses.dataclass(frozen=True)
class Location(os.PathLike[str]):
    """One file or directory; `str` returns its path. Methods raise `OSError` if storage fails."""

    path: str
    is_local: ClassVar[bool] = True

    def __truediv__(self, name: str | int) -> Self:
        return dataclasses.replace(self, path=f"{self.path.rstrip('/')}/{name}")

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """Last part of the path."""
        return os.path.basename(self.path)

    @property
    def parent(self) -> Self:
        """Directory of this path."""
        return dataclasses.replace(self, path=os.path.dirname(self.path) or ".")

    def absolute(self) -> Self:
        """Return this location with an absolute path."""
        return dataclasses.replace(self, path=os.path.abspath(self.path))

    def entries(self) -> list[str]:
        """Return the sorted names directly below; [] without a directory."""
        try:
            return sorted(name for name in os.listdir(self.path) if not name.endswith(_UNFINISHED))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self) -> list[str]:
        """Return the sorted relative paths of all files below."""
        paths = (
            os.path.relpath(os.path.join(folder, name), self.path)
            for folder, _, names in os.walk(self.path, onerror=_raise_unless_absent)
            for name in names
        )
        return sorted(name for name in paths if not name.endswith(_UNFINISHED))

    def sizes(self) -> dict[str, int]:
        """Return relative path -> size in bytes of every file below."""
        return {name: (self / name).size() for name in self.files()}

    def tags(self) -> dict[str, tuple[int, str]]:
        """Return relative path -> (bytes, tag) of each file below, or for a file "" -> its own.

        A tag changes with the content; file systems have no tags, so it is "".
        """
        if self.exists() and not self.is_directory():
            return {"": (self.size(), "")}
        return {name: (size, "") for name, size in self.sizes().items()}

    def exists(self) -> bool:
        """Return whether the path exists; raises if a file server cannot be reached."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(self.path)
            return True
        return False

    def is_directory(self) -> bool:
        """Return whether a directory (on an object store: any object below) exists."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISDIR(os.stat(self.path).st_mode)
        return False

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.stat(self.path).st_size

    def version(self) -> int:
        """Return the time of the last write in ns; 0 if missing or unreachable."""
        with contextlib.suppress(OSError):
            return os.stat(self.path).st_mtime_ns
        return 0

    def free_bytes(self) -> int:
        """Return the free space for new files of this user, in bytes."""
        return shutil.disk_usage(self.path).free

    def read(self) -> bytes:
        """Return the content of the file."""
        with open_regular(self.path) as file:
            return file.read()

    def text(self) -> str:
        """Return the content as UTF-8; invalid bytes are replaced."""
        return self.read().decode("utf-8", errors="replace")

    def json(self) -> Any:
        """Return the JSON value in the file; raises `ValueError` if it is not JSON."""
        return json.loads(self.read())

    def stream(self) -> Iterator[bytes]:
        """Yield the file in blocks of at most `BLOCK_BYTES`."""
        with open_regular(self.path) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def blocks_backward(self) -> Iterator[bytes]:
        """Yield the file in blocks of at most `BLOCK_BYTES`, the last block first."""
        for end in range(self.size(), 0, -BLOCK_BYTES):
            start = max(0, end - BLOCK_BYTES)
            yield self.part(start, end - start)

    def part(self, start: int, length: int) -> bytes:
        """Return `length` bytes of the file from `start` on, fewer at its end."""
        with open_regular(self.path) as file:
            file.seek(start)
            return file.read(length)

    def write(self, data: str | bytes | memoryview, *, durable: bool = True) -> None:
        """Create or replace the file, atomically; `durable` data survive a machine crash."""
        (folder, name), thread = os.path.split(self.path), threading.get_native_id()
        temporary = os.path.join(folder, f".{name}.{_OWN}-{thread}{_UNFINISHED}")
        try:
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, self.path)  # atomic in POSIX
        except OSError as error:
            error.filename = self.path  # `write` and `fsync` name no file
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            _sync_directory(folder)
            _sync_directory(os.path.dirname(folder))  # the directory may be new

    def create(self) -> bool:
        """Create the file, empty and durable; False if it exists."""
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
        """Open the file for appending, creating it if needed."""
        return Appender(self.path)

    def append_descriptor(self) -> int:
        """Open the file for appending, for C code or a child process; return the descriptor."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)

    def lock(self) -> LockFile:
        """Open and lock the file; raises `Locked` if another process holds the lock."""
        return LockFile(self.path)

    def make_directory(self) -> None:
        """Create this directory and its parents."""
        os.makedirs(self.path, exist_ok=True)

    def missing(self) -> list[Self]:
        """Return those of this directory and its parents that do not exist, deepest first."""
        return [] if self.exists() else [self, *self.parent.missing()]

    def delete(self) -> None:
        """Delete the file if it exists; durable after the next durable write next to it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path)

    def delete_tree(self) -> None:
        """Delete a directory with its content, or a file, if it exists."""
        if os.path.isdir(self.path) and not os.path.islink(self.path):
            shutil.rmtree(self.path)
        else:
            self.delete()


class Appender:
    """A file open for appending. Each append is normally one `write`: a kill leaves complete lines.

    `pending` has the bytes that could not be written; the next call writes them first.
    """

    def __init__(self, path: str) -> None:
        self.pending = b""
        self._path = path
        self._descriptor = self._open(os.O_CREAT)

    def append(self, data: bytes) -> None:
        """Append data; if not all is written, raises `OSError` and keeps the rest in `pending`."""
        was_refused = bool(self.pending)
        self.pending += data
        if was_refused:  # after an outage a file server may not accept the old descriptor
            reopened = self._open()  # without O_CREAT, to create no file below a lost mount
            os.close(self._descriptor)
            self._descriptor = reopened
        self._drain()

    def cut_torn_tail(self) -> int:
        """Remove an incomplete last line, left by a crash; return its size."""
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
        """Write pending data and close; raises `OSError` if they are lost."""
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
    """Raised if another process holds the lock; `holder` is the content of its lock file."""

    def __init__(self, holder: bytes) -> None:
        super().__init__("locked by another process")
        self.holder = holder


class LockFile:
    """A POSIX record lock: the kernel (or the NFS server) releases it when its process ends.

    `is_exclusive` is False if the storage has no locks; then the file's heartbeat decides.
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
            # The previous holder may have deleted the file between open and lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(path)):
                    return
            os.close(self._descriptor)

    def read(self) -> bytes:
        """Return the content; b"" if it cannot be read."""
        with contextlib.suppress(OSError):
            return os.pread(self._descriptor, 4096, 0)
        return b""

    def write(self, data: bytes) -> None:
        """Replace the content in place, because a new file would not be locked."""
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def remove_empty(directories: Iterable[Location]) -> None:
    """Remove those directories that are empty, in the given order."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _sync_directory(path: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
