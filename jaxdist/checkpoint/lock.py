"""Keeps a second run out of a checkpoint directory, and lets a crashed run's successor in.

A POSIX lock decides wherever the kernel (or an NFS server) sees both runs: it dies with its
process, so there is nothing to clean up. Where another host holds the directory on a file system
whose locks are local, the holder's heartbeat in the lock file decides: the file is watched rather
than its time compared with our clock, because clocks differ.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdist.core.types import ConfigError

FILE_NAME = ".lock"
HEARTBEAT_S = 10.0
"""Seconds between signs of life in the lock file; after three missed ones the holder is gone."""

_held: set[Path] = set()  # POSIX locks do not exclude within one process; this does


class DirectoryLock:
    """The right to write into one directory, for one process at a time."""

    def __init__(self, directory: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._say = say
        self._path = directory.resolve() / FILE_NAME
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._record: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "state": "held",
            "beat": 0,
        }

    def acquire(self) -> None:
        """Take the lock, perhaps over from a run that died.

        Raises:
            ConfigError: another run holds it, or the directory cannot be written.
        """
        if self._path in _held:
            raise self._refusal(self._record)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                [
                    f"checkpoint directory {self._path.parent} cannot be written "
                    f"({error.strerror}). Choose another --run-dir or make it writable."
                ]
            ) from error
        try:
            self._exclude(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self._path)
        self._write()
        threading.Thread(target=self._beat, name="checkpoint-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock up; the next run starts without waiting."""
        if self._descriptor is None:
            return
        self._stop.set()
        self._record["state"] = "released"
        self._write()
        _held.discard(self._path)
        os.close(self._descriptor)
        self._descriptor = None

    def _exclude(self, descriptor: int) -> None:
        kernel_decides = True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._refusal(_read(descriptor)) from None
            kernel_decides = False  # this file system has no locks
        holder = _read(descriptor)
        if not holder or holder.get("state") == "released":
            return
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        here = holder.get("boot") == self._record["boot"]
        if here and not kernel_decides and _alive(holder.get("pid", 0)):
            raise self._refusal(holder)
        if not here:
            self._say(f"watching whether {who} still uses it, {3 * HEARTBEAT_S:.0f} s")
            if _beats(descriptor, holder):
                raise self._refusal(holder)
        self._say(f"took over from {who}, which is gone")

    def _refusal(self, holder: dict[str, Any]) -> ConfigError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        return ConfigError(
            [
                f"checkpoint directory {self._path.parent} is in use by {who}: two runs would "
                "overwrite each other's checkpoints. Wait for that run, stop it, or choose another "
                "--run-dir."
            ]
        )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._record["beat"] = self._record["beat"] + 1
            self._write()

    def _write(self) -> None:
        data = json.dumps(self._record).encode()
        with contextlib.suppress(OSError):  # a vanished mount is reported by the save that needs it
            if self._descriptor is not None:
                os.pwrite(self._descriptor, data, 0)
                os.ftruncate(self._descriptor, len(data))


def _read(descriptor: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _beats(descriptor: int, before: dict[str, Any]) -> bool:
    """Whether the record changes within three heartbeats."""
    deadline = time.monotonic() + 3 * HEARTBEAT_S
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 10)
        if _read(descriptor) != before:
            return True
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    """What tells this boot of this machine from every other; host names may repeat."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
