"""`Location`: one file or directory of a run, and the operations that every storage offers."""

from __future__ import annotations

import abc
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol, Self

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


@dataclasses.dataclass(frozen=True)
class Location(os.PathLike[str]):
    """One file or directory; `str` and `os.fspath` give its path (or URL).

    Libraries that read and write by themselves (Orbax, TensorStore, TensorBoard) are given that
    path. Every method raises `OSError` where the storage cannot be reached or refuses.
    """

    path: str

    def __truediv__(self, name: str | int) -> Self:
        """What lies below this directory under `name`."""
        return type(self)(f"{self.path.rstrip('/')}/{name}")

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
        return type(self)(os.path.dirname(self.path) or ".")

    def text(self) -> str:
        """All of the file, as UTF-8; other bytes are replaced, not refused."""
        return self.read().decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The JSON value in the file.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.read())

    @abc.abstractmethod
    def absolute(self) -> Self:
        """The same place by a path that holds in any working directory."""

    @abc.abstractmethod
    def uri(self) -> str:
        """The address that TensorStore reads and writes."""

    @abc.abstractmethod
    def entries(self) -> list[str]:
        """Names directly below, sorted; [] where there is no directory."""

    @abc.abstractmethod
    def files(self) -> list[str]:
        """Every file below, by its path relative to this directory, sorted."""

    @abc.abstractmethod
    def exists(self) -> bool:
        """Whether a file or a directory is there."""

    @abc.abstractmethod
    def is_directory(self) -> bool:
        """Whether a directory is there (on an object store: whether anything lies below)."""

    @abc.abstractmethod
    def size(self) -> int:
        """Bytes of the file."""

    @abc.abstractmethod
    def version(self) -> int:
        """A number that grows whenever the file is written; 0 where there is none."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Room left for new files."""

    @abc.abstractmethod
    def read(self) -> bytes:
        """All of the file."""

    @abc.abstractmethod
    def stream(self) -> Iterator[bytes]:
        """The file in blocks of `BLOCK_BYTES`."""

    @abc.abstractmethod
    def write(self, data: str | bytes, *, durable: bool = True) -> None:
        """Make or replace the file, atomically; `durable`: it survives a crash of the machine."""

    @abc.abstractmethod
    def create(self, data: str | bytes = b"") -> bool:
        """Make the file, durably; False where there is one already."""

    @abc.abstractmethod
    def appender(self) -> Appender:
        """The file, open for appending; made if absent."""

    @abc.abstractmethod
    def append_descriptor(self) -> int:
        """A file descriptor that appends, for C code and child processes."""

    @abc.abstractmethod
    def lock(self) -> LockFile:
        """Open and lock the file.

        Raises:
            Locked: another process holds the lock.
        """

    @abc.abstractmethod
    def make_directory(self) -> None:
        """Make this directory and its parents, where the storage needs them."""

    @abc.abstractmethod
    def delete(self) -> None:
        """Delete the file; nothing where there is none."""

    @abc.abstractmethod
    def delete_tree(self) -> None:
        """Delete this directory and all below it, or a file; nothing where there is none."""
