"""Keeps a second run out of a checkpoint directory, and lets a crashed run's successor in.

The storage's own lock decides wherever it reaches both runs (on POSIX the kernel's, or the NFS
server's): it ends with its process, so there is nothing to clean up. Where another host holds the
directory on a storage without such locks, the holder's heartbeat in the lock file decides, and on
an object store wherever the holder may be alive. The file is watched for changes; its time is not
compared with our clock, because clocks differ.
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

from jaxdist.runtime.progress import in_time
from jaxdist.runtime.storage import Location, Locked, LockFile, locate
from jaxdist.settings import ConfigError

FILE_NAME = ".lock"
HEARTBEAT_S = 10.0
"""Seconds between heartbeats in the lock file; after three missed ones the holder is gone."""

RELEASE_S = 30.0
"""Seconds in which the lock is given up; without it the next run waits for missed heartbeats."""

_held: set[str] = set()  # POSIX locks do not exclude within one process; this does


class DirectoryLock:
    """The right to write into a directory (an absolute path), for one process at a time.

    `log` receives what is found out about an earlier holder.
    """

    def __init__(self, directory: Location, log: Callable[[str], None]) -> None:
        self._directory = directory
        self._log = log
        self._file: LockFile | None = None
        self._before: bytes | None = None  # content of the lock file; None: there was no file
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
        """Take the lock, perhaps over from a run that died.

        Raises:
            ConfigError: another run holds it, or the directory cannot be written.
        """
        path = self._directory / FILE_NAME
        if path.path in _held:
            raise self._refusal(self._record)
        try:
            has_file = path.exists()
            file = path.lock()
        except Locked as refused:
            raise self._refusal(_parsed(refused.holder)) from None
        except OSError as error:
            raise ConfigError(
                f"checkpoint directory {self._directory} cannot be written "
                f"({error.strerror}). Choose another --run-dir or make it writable."
            ) from error
        try:
            content = file.read()
            self._before = content if content or has_file else None
            self._refuse_living_holder(file)
            if not file.is_exclusive:  # of two that got here, one alone may write it first
                file.write(self._content())
        except Locked as refused:
            file.close()
            raise self._refusal(_parsed(refused.holder)) from None
        except BaseException:
            file.close()
            raise
        self._file = file
        _held.add(path.path)
        if file.is_exclusive:  # else it is written
            self._write()
        self._beating = threading.Thread(target=self._beat, name="checkpoint-lock", daemon=True)
        self._beating.start()

    def lost(self) -> str:
        """Return why this process may not write any more; "" while it holds the lock.

        Where the storage has no locks of its own, another run takes over from one that was stopped
        for longer than three heartbeats and may go on later.
        """
        if self._file is not None and not self._file.is_exclusive:
            self._write()
        return self._lost

    def release(self, *, undo: bool = False) -> None:
        """Give the lock up; the next run starts without waiting.

        `undo` restores the lock file as it was before `acquire`.
        """
        if self._file is None or self._beating is None:
            return
        self._stop.set()
        give_up = self._undo if undo else self._give_up
        is_given_up = in_time(f"giving up the lock of {self._directory}", give_up, RELEASE_S)
        _held.discard((self._directory / FILE_NAME).path)
        if is_given_up:  # else a write that is still waited for would go to the next file opened
            self._file.close()
        self._file = None

    def _give_up(self) -> None:
        assert self._beating is not None
        self._beating.join()
        self._record["state"] = "released"
        self._write()

    def _undo(self) -> None:
        assert self._beating is not None and self._file is not None
        self._beating.join()
        if self._lost:
            return
        if self._before is None:
            (self._directory / FILE_NAME).delete()
        else:
            self._file.write(self._before)

    def _refuse_living_holder(self, file: LockFile) -> None:
        """Raise if the process that the file names is alive though the storage let us in."""
        holder = _parsed(file.read())
        if not holder or holder.get("state") == "released":
            return
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        # Containers of one machine share its boot, and not their process ids.
        here = all(holder.get(key) == self._record[key] for key in ("boot", "host"))
        pid = holder.get("pid", 0)
        may_live = not here or (not file.is_exclusive and _is_alive(pid))
        # A process of that number may be another one, as in a container that was started again.
        # Without conditional writes a holder that is only stopped would not learn that it lost.
        if here and may_live and self._directory.is_local and pid != os.getpid():
            raise self._refusal(holder)
        if may_live:
            self._log(f"watching whether {who} still uses it, {3 * HEARTBEAT_S:.0f} s")
            if _beats(file, holder):
                raise self._refusal(holder)
        self._log(f"took over from {who}, which is gone")

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
            except OSError:  # a vanished mount is reported by the save that needs it
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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _boot_id() -> str:
    try:
        return locate("/proc/sys/kernel/random/boot_id").text().strip()
    except OSError:
        return socket.gethostname()
