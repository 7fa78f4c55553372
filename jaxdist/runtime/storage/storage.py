"""The operations that a storage offers, and `Location`: one file or directory in a storage."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol

BLOCK_BYTES = 8 << 20
"""Bytes of a file held in memory while it is streamed."""


class Locked(Exception):
    """Another process holds the lock.

    Attributes:
        holder: what it wrote into the lock file.
    """

    def __init__(self, holder: bytes) -> None:
        super().__init__("locked by another process")
        self.holder = holder


class LockFile(Protocol):
    """A lock file that this process has open.

    Attributes:
        is_exclusive: the storage keeps other processes out until this one ends. False: it cannot,
            and only the content of the file tells whether another process is alive.
    """

    is_exclusive: bool

    def read(self) -> bytes:
        """The content; b"" where it cannot be read."""

    def write(self, data: bytes) -> None:
        """Replace the content."""

    def close(self) -> None:
        """Let go of the lock."""


class Appender(Protocol):
    """A file open for appending. What the storage refuses is kept in memory and retried."""

    @property
    def pending(self) -> bytes:
        """Bytes that are not written yet; they may begin inside a line."""

    def append(self, data: bytes) -> None:
        """Append; with the operating system when this returns.

        Raises:
            OSError: not all is written. The rest is `pending` and goes first the next time.
        """

    def cut_torn_tail(self) -> int:
        """Remove what follows the last newline: a line that a crash cut short; bytes removed."""

    def close(self) -> None:
        """Write what is pending and close; a second call does nothing.

        Raises:
            OSError: what is `pending` is lost.
        """


class Storage(Protocol):
    """One kind of storage. Paths are its own; `/` separates their parts.

    Every method raises `OSError` where the storage cannot be reached or refuses.
    """

    def absolute(self, path: str) -> str:
        """The path that names the same place whatever the working directory."""

    def uri(self, path: str) -> str:
        """The address that TensorStore reads and writes."""

    def entries(self, path: str) -> list[str]:
        """Names directly below a directory, sorted; [] where there is no directory."""

    def files(self, path: str) -> list[str]:
        """Every file below a directory, by its path relative to it, sorted."""

    def exists(self, path: str) -> bool:
        """Whether a file or a directory is there."""

    def is_directory(self, path: str) -> bool:
        """Whether a directory is there (on an object store: whether anything lies below)."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def version(self, path: str) -> int:
        """A number that grows whenever a file is written; 0 where there is none."""

    def free_bytes(self, path: str) -> int:
        """Room left for new files."""

    def read(self, path: str) -> bytes:
        """All of a file."""

    def stream(self, path: str) -> Iterator[bytes]:
        """A file in blocks of `BLOCK_BYTES`."""

    def write(self, path: str, data: bytes, *, durable: bool) -> None:
        """Make or replace a file, atomically; `durable`: it survives a crash of the machine."""

    def create(self, path: str, data: bytes) -> bool:
        """Make a file, durably; False where there is one already."""

    def appender(self, path: str) -> Appender:
        """A file to append to, made if absent."""

    def append_descriptor(self, path: str) -> int:
        """A file descriptor that appends, for C code and child processes."""

    def lock(self, path: str) -> LockFile:
        """Open and lock a file.

        Raises:
            Locked: another process holds the lock.
        """

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents where the storage needs them."""

    def delete(self, path: str) -> None:
        """Delete a file; nothing where there is none."""

    def delete_tree(self, path: str) -> None:
        """Delete a directory and all below it, or a file; nothing where there is none."""


@dataclasses.dataclass(frozen=True)
class Location:
    """One file or directory in a storage; `os.fspath` and `str` give its path (or URL).

    Libraries that read and write by themselves (Orbax, TensorStore, TensorBoard) are given that
    path. See `Storage` for what each operation guarantees.
    """

    storage: Storage
    path: str

    def __truediv__(self, name: str | int) -> Location:
        """What lies below this directory under `name`."""
        return Location(self.storage, f"{self.path.rstrip('/')}/{name}")

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def parent(self) -> Location:
        """The directory that this lies in."""
        return Location(self.storage, os.path.dirname(self.path) or ".")

    def absolute(self) -> Location:
        """The same place by a path that holds in any working directory."""
        return Location(self.storage, self.storage.absolute(self.path))

    def uri(self) -> str:
        """The address that TensorStore reads and writes."""
        return self.storage.uri(self.path)

    def entries(self) -> list[str]:
        """Names directly below, sorted; [] where there is no directory."""
        return self.storage.entries(self.path)

    def files(self) -> list[str]:
        """Every file below, by its path relative to this directory, sorted."""
        return self.storage.files(self.path)

    def exists(self) -> bool:
        """Whether a file or a directory is there."""
        return self.storage.exists(self.path)

    def is_directory(self) -> bool:
        """Whether a directory is there."""
        return self.storage.is_directory(self.path)

    def size(self) -> int:
        """Bytes of the file."""
        return self.storage.size(self.path)

    def version(self) -> int:
        """A number that grows whenever the file is written; 0 where there is none."""
        return self.storage.version(self.path)

    def free_bytes(self) -> int:
        """Room left for new files."""
        return self.storage.free_bytes(self.path)

    def read(self) -> bytes:
        """All of the file."""
        return self.storage.read(self.path)

    def text(self) -> str:
        """All of the file, as UTF-8; other bytes are replaced, not refused."""
        return self.read().decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The JSON value in the file.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.read())

    def stream(self) -> Iterator[bytes]:
        """The file in blocks of `BLOCK_BYTES`."""
        return self.storage.stream(self.path)

    def write(self, data: str | bytes, *, durable: bool = True) -> None:
        """Make or replace the file, atomically."""
        self.storage.write(self.path, _encoded(data), durable=durable)

    def create(self, data: str | bytes = b"") -> bool:
        """Make the file; False where there is one already."""
        return self.storage.create(self.path, _encoded(data))

    def appender(self) -> Appender:
        """The file, open for appending; made if absent."""
        return self.storage.appender(self.path)

    def append_descriptor(self) -> int:
        """A file descriptor that appends, for C code and child processes."""
        return self.storage.append_descriptor(self.path)

    def lock(self) -> LockFile:
        """Open and lock the file.

        Raises:
            Locked: another process holds the lock.
        """
        return self.storage.lock(self.path)

    def make_directory(self) -> None:
        """Make this directory and its parents."""
        self.storage.make_directory(self.path)

    def delete(self) -> None:
        """Delete the file; nothing where there is none."""
        self.storage.delete(self.path)

    def delete_tree(self) -> None:
        """Delete this directory and all below it; nothing where there is none."""
        self.storage.delete_tree(self.path)


def _encoded(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data
