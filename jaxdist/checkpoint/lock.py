"""Lock a checkpoint directory against a second run; let a restarted run take over a stale lock.

If the storage has locks (POSIX, NFS) that cover both runs, they decide; the lock ends with its
process. Otherwise (other hosts, object stores) the holder's heartbeat in the lock file decides. A
heartbeat is a change of the file. Its time is not compared with our clock, because clocks differ.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from jaxdist.runtime.progress import in_time, waiting
from jaxdist.runtime.storage import Location, Locked, LockFile, locate
from jaxdist.settings import ConfigError

FILE_NAME = ".lock"
HEARTBEAT_S = 10.0
"""Seconds between heartbeats in the lock file; a holder that misses three counts as dead."""

RELEASE_S = 30.0
"""Time-out of the release; an unreleased lock can delay the next run by three heartbeats."""

_held: set[str] = set()  # excludes within this process, which POSIX locks do not


class DirectoryLock:
    """Exclusive right of one run to write into a directory (an absolute path)."""

    def __init__(self, directory: Location, log: Callable[[str], None]) -> None:
        self._directory = directory
        self._log = log
        self._file: LockFile | None = None
        self._before: bytes | None = None  # content of the lock file; None: none
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._lost = ""
        self._beating: threading.Thread | None = None
        self._record: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "owner": uuid.uuid4().hex,  # a restarted container has the same host, boot and pid
            "state": "held",
            "beat": 0,
        }

    def acquire(self) -> None:
        """Acquire the lock, perhaps after waiting for heartbeats of the holder, which may be dead.

        Raises `ConfigError` if a live run holds it, or if the directory cannot be written.
        """
        path = self._directory / FILE_NAME
        if path.path in _held:
            raise self._refusal(self._record)
        try:
            with waiting(f"waiting for the lock of {self._directory}"):
                file = self._locked(path)
        except OSError as error:
            raise ConfigError(
                f"checkpoint directory {self._directory} cannot be written "
                f"({error.strerror}). Choose another --run-dir or make it writable."
            ) from error
        try:
            content = file.read()
            self._before = content or None
            self._reject_living_holder(file)
            if not file.is_exclusive:  # a conditional write: only one of two runs succeeds
                file.write(self._content())
        except Locked as refused:
            file.close()
            raise self._refusal(_parsed(refused.holder)) from None
        except BaseException:
            file.close()
            raise
        self._file = file
        _held.add(path.path)
        if file.is_exclusive:
            self._write()
        self._beating = threading.Thread(target=self._beat, name="checkpoint-lock", daemon=True)
        self._beating.start()

    def lost(self) -> str:
        """Return why this process must stop writing; "" while it holds the lock.

        Without storage locks, also writes a heartbeat: after three missing ones another run may
        take over.
        """
        if self._file is not None and not self._file.is_exclusive:
            self._write()
        return self._lost

    def release(self, *, undo: bool = False) -> None:
        """Release the lock; `undo` restores the old lock file, or deletes the new one."""
        if self._file is None or self._beating is None:
            return
        self._stop.set()
        what = f"releasing the lock of {self._directory}"
        is_released = in_time(what, lambda: self._end(undo), RELEASE_S)
        _held.discard((self._directory / FILE_NAME).path)
        if is_released:  # otherwise a pending write could use a reused descriptor
            self._file.close()
        self._file = None

    def _end(self, undo: bool) -> None:
        assert self._beating is not None and self._file is not None
        self._beating.join()
        if not undo:
            self._record["state"] = "released"
            self._write()
        elif not self._lost and self._before is None:
            (self._directory / FILE_NAME).delete()
        elif not self._lost and self._before is not None:
            self._file.write(self._before)

    def _locked(self, path: Location) -> LockFile:
        """Return the locked file; a file server may keep the lock of a lost host for 90 s (NFS)."""
        first: dict[str, Any] = {}
        until = time.monotonic() + 12 * HEARTBEAT_S
        while True:
            try:
                return path.lock()
            except Locked as refused:
                holder = _parsed(refused.holder)
            first = first or holder
            is_elsewhere = holder.get("boot", self._record["boot"]) != self._record["boot"]
            if not is_elsewhere or holder != first or time.monotonic() > until:
                raise self._refusal(holder)
            time.sleep(HEARTBEAT_S / 10)

    def _reject_living_holder(self, file: LockFile) -> None:
        """Raise `ConfigError` if the holder that the lock file names is alive; may wait 30 s."""
        holder = _parsed(file.read())
        if not holder or holder.get("state") == "released":
            return
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        # Containers on one machine share the boot id but not the process ids.
        here = all(holder.get(key) == self._record[key] for key in ("boot", "host"))
        pid = holder.get("pid", 0)
        may_live = not here or (not file.is_exclusive and os.path.exists(f"/proc/{pid}"))
        # The process id may be reused, and a stopped holder may not notice that it lost the lock.
        if here and may_live and self._directory.is_local and pid != os.getpid():
            raise self._refusal(holder)
        if may_live:
            self._log(
                f"locked by {who}: waiting {3 * HEARTBEAT_S:.0f} s for a heartbeat of a live run"
            )
            if _beats(file, holder):
                raise self._refusal(holder)
        self._log(f"took over the lock of {who}, which has ended or hangs")

    def _refusal(self, holder: dict[str, Any]) -> ConfigError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        return ConfigError(
            f"checkpoint directory {self._directory} is in use by {who}: two runs would "
            "overwrite each other's checkpoints. Wait for that run, stop it, or choose another "
            "--run-dir."
        )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S) and not self._lost:
            self._write()

    def _content(self) -> bytes:
        self._record["beat"] += 1
        return json.dumps(self._record).encode()

    def _write(self) -> None:
        with self._writing:
            if self._file is None or self._lost:
                return
            try:
                self._file.write(self._content())
            except Locked as taken:
                self._lost = str(self._refusal(_parsed(taken.holder)))
            except OSError:  # the next save reports a lost mount
                pass


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _beats(file: LockFile, before: dict[str, Any]) -> bool:
    deadline = time.monotonic() + 3 * HEARTBEAT_S
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 10)
        if _parsed(file.read()) != before:
            return True
    return False


def _boot_id() -> str:
    try:
        return locate("/proc/sys/kernel/random/boot_id").text().strip()
    except OSError:
        return socket.gethostname()
