"""Append to files on an object store, where objects cannot grow.

A file is a folder of objects `part-NUMBER-WRITER`. A thread rewrites the newest part every few
seconds, and at `flush_appended` and exit, and starts another part at `PART_BYTES`.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import errno
import logging
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from jaxdist.runtime.storage.location import Appender, Location

logger = logging.getLogger("jaxdist")

PART_BYTES = 1 << 20
_FLUSH_S = 5.0
_END_S = 60.0  # to upload the remaining data at close or process exit
_LATE_S = 1.0  # instead of `_END_S` if an earlier wait timed out

_OWN = uuid.uuid4().hex[:8]  # id of this process, because several may append to one file
_growing: set[_Uploaded] = set()
_spools: dict[str, _Spool] = {}
_start = threading.Lock()
_thread: threading.Thread | None = None
_turns = threading.Condition()
_requested = _done = 0  # numbers of upload rounds: last requested, last finished
_late = 0  # the newest round whose wait timed out
_failed: list[Exception] = []  # unexpected errors of uploads; the first one is logged


def part_of(path: str) -> tuple[str, bool]:
    """Return the path of the file that an object belongs to, and whether it is only a part."""
    match = re.fullmatch(r"(.+)/part-\d{8}-[0-9a-f]{8}", path)
    return (match[1], True) if match else (path, False)


def flush_appended(timeout_s: float | None = None, *, ending: bool = False) -> bool:
    """Upload what was appended to all files; return whether this ended, even with errors, in time.

    A hanging store blocks the caller for at most `timeout_s` (default: a minute). If several files
    are closed in a row (`ending`), only the first waits that long.
    """
    global _requested, _late
    if not _growing or _thread is None or not _thread.is_alive():  # dead in a forked child
        return True
    timeout_s = _END_S if timeout_s is None else timeout_s
    with _turns:  # wait here: at process exit no helper thread can start
        _requested += 1
        turn = _requested
        _turns.notify_all()
        patience_s = min(timeout_s, _LATE_S) if ending and _done < _late else timeout_s
        is_done = _turns.wait_for(lambda: _done >= turn, patience_s)
        if ending and not is_done:
            _late = turn
        return is_done


def spool(location: Location, next_part: Callable[[], int]) -> int:
    """Return a descriptor of a local file whose content is appended to a location."""
    if location.path not in _spools:
        _spools[location.path] = _Spool(location, next_part())
    return _spools[location.path].descriptor()


class _Uploaded(abc.ABC):
    """A file that a background thread uploads; methods raise `OSError` if an upload failed."""

    _location: Location
    _failure: OSError | None = None  # of the last upload

    def _begin(self) -> None:
        global _thread
        with _start:
            _growing.add(self)
            if _thread is None:
                atexit.register(flush_appended, ending=True)
                _thread = threading.Thread(target=_keep_uploading, name="uploads", daemon=True)
                _thread.start()

    @abc.abstractmethod
    def upload(self) -> None:
        """Upload new content; called on the thread."""

    def close(self) -> None:
        """Upload the remaining data, waiting like `flush_appended`; raises `OSError` if lost."""
        if self not in _growing:
            return
        is_answered = flush_appended(ending=True)
        _growing.discard(self)
        if not is_answered:
            late = errno.ETIMEDOUT
            self._failure = TimeoutError(late, os.strerror(late), str(self._location))
        if (failure := self._failure) is not None:
            raise failure


class PartAppender(_Uploaded, Appender):
    """A file open for appending, in parts from number `first` on.

    If an upload fails, its data stay in memory; `append` raises the error until a retry succeeds.
    """

    def __init__(self, location: Location, first: int) -> None:
        self._location, self._number = location, first
        self._part, self._written = bytearray(), -1  # -1: the part does not exist yet
        self._memory, self._requests = threading.Lock(), threading.Lock()
        self.upload()
        self._begin()

    @property
    def pending(self) -> bytes:  # type: ignore[override]
        """Data not uploaded yet if the last upload failed, else b""."""
        with self._memory:
            return bytes(self._part[max(self._written, 0) :]) if self._failure else b""

    def append(self, data: bytes) -> None:
        """Add data to the next upload; raises `OSError`, but keeps them, if the last one failed."""
        with self._memory:
            self._part += data
        if self._failure is not None:
            raise self._failure

    def cut_torn_tail(self) -> int:
        """Return 0: a part never ends inside the data of one `append`."""
        return 0

    def upload(self) -> None:
        """Write the growing part and start the next one at `PART_BYTES`; raises `OSError`."""
        with self._requests:
            while self._written < len(self._part):
                with self._memory:
                    content = bytes(self._part)
                (self._location / f"part-{self._number:08d}-{_OWN}").write(content)
                with self._memory:
                    self._written = len(content)
                    if len(content) >= PART_BYTES:
                        del self._part[: len(content)]
                        self._number, self._written = self._number + 1, 0


class _Spool(PartAppender):
    """A local file, written by C code and child processes, that is appended to a location."""

    def __init__(self, location: Location, first: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, open until process exit
        self._taken, self._reading = 0, threading.Lock()
        super().__init__(location, first)

    def descriptor(self) -> int:
        """Return a new descriptor; all descriptors share one file position."""
        return os.dup(self._file.fileno())

    def upload(self) -> None:
        with self._reading:
            while data := os.pread(self._file.fileno(), PART_BYTES, self._taken):
                self._taken += len(data)
                with contextlib.suppress(OSError):
                    self.append(data)
        super().upload()


class Mirror(_Uploaded):
    """A local file that a thread copies to a location whenever it has grown."""

    def __init__(self, file: Path, location: Location) -> None:
        self._file, self._location, self._size = file, location, -1
        self._requests = threading.Lock()
        self._begin()

    def upload(self) -> None:
        """Copy the file if it has grown."""
        with self._requests:  # so that older content never replaces newer
            data = self._file.read_bytes()
            if len(data) != self._size:
                self._location.write(data)
                self._size = len(data)


def _upload_all() -> None:
    for one in list(_growing):
        try:
            one.upload()
            one._failure = None
        except OSError as failure:  # the next `append` raises it
            one._failure = failure
        except Exception as failure:  # the thread must survive for other files
            if not _failed:
                logger.exception("%s: the newest content is not uploaded yet", one._location)
            _failed.append(failure)


def _next_turn() -> int:
    with _turns:
        _turns.wait_for(lambda: _requested > _done, _FLUSH_S)
        return _requested


def _keep_uploading() -> None:
    global _done
    while True:
        turn = _next_turn()
        _upload_all()
        with _turns:
            _done = turn
            _turns.notify_all()
