"""Files in a shared directory through which the launchers of an elastic job see each other.

    host-<rank>.json   the state of one host, written only by its launcher, every second
    round.json         the hosts of the current round, written by the leader

Files are used instead of a server (torchrun's c10d store, etcd), because a server runs on one host
and that host may be lost. The run directory is available as long as the job can save.

* A file is replaced atomically.
* A host is alive while the counter in its file grows, timed by the reader's own clock. Clocks of
  different hosts are never compared.
* A file whose counter has not changed since the first read may be left from an earlier launch. It
  is ignored until it changes.
* Every launcher has a uuid: a restarted launcher is a new member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jaxdist.runtime.storage import Location, locate, remove_empty
from jaxdist.tools.launch import log
from jaxdist.tools.launch.resources import Capacity

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats, and between two reads of the other hosts' files."""

State = Literal[
    "starting", "waiting", "running", "done", "saved", "failed", "leaving", "left", "ended"
]
"""State of a host.

| state | meaning |
|---|---|
| starting | its launcher has not yet counted its processes and devices |
| waiting | ready to take part in a round |
| running | its processes run in round `round` |
| done, saved, failed | its processes ended that round with 0, 75, another code |
| leaving | its launcher received a stop request, its processes are saving |
| left | its launcher has ended and the job continues without it |
| ended | its launcher has ended with `code`, which ends the job on all hosts |
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """State of one host, written by its launcher.

    `uuid` identifies the launcher; `heartbeat` grows while it lives. `port` is a free port for
    the job's coordinator. `devices` counts the devices of all processes; with `gpus` they can be
    divided among processes. `round` is the last round in which it took part. `code` is the exit
    code of a launcher whose end ends the job.
    """

    rank: int
    uuid: str
    address: str
    heartbeat: int = 0
    port: int = 0
    max_processes: int = 0
    devices: int = 1
    gpus: bool = False
    state: State = "starting"
    round: str = ""
    code: int = 0

    def __str__(self) -> str:
        return f"host {self.rank} ({self.address})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """Hosts of a round, with equal numbers of processes; the first runs the coordinator."""

    members: tuple[Host, ...]
    nproc_per_node: int
    devices: int

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all members."""
        return len(self.members) * self.nproc_per_node * self.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Membership):
    """One membership of the job, until a host is lost or a larger job becomes possible.

    `stop` is the reason to save and end the round; empty while it should run.
    """

    id: str
    number: int
    stop: str = ""

    def index_of(self, launcher: str) -> int | None:
        """Return the position of a launcher (uuid) among the members, or None."""
        return next((i for i, host in enumerate(self.members) if host.uuid == launcher), None)


class Rendezvous:
    """Publishes the state of one host and reads the states of the others, in a shared `folder`."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        address: str,
        *,
        heartbeat_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder = locate(folder)
        self.heartbeat_timeout_s, self.clock = heartbeat_timeout_s, clock
        self.own = Host(rank=rank, uuid=uuid.uuid4().hex, address=address)
        self.duplicate: Host | None = None
        # Rank -> host, and time of its last heartbeat; None = no heartbeat since the first read.
        self._observed: dict[int, tuple[Host, float | None]] = {}
        self._has_read = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, name="launch-heartbeat", daemon=True
        )
        self._warned = False
        self._made: list[Location] = []
        # Content of each file before this launch (None = no file), and its last written content.
        self._contents: dict[Location, tuple[bytes | None, bytes]] = {}

    def claim_rank(self) -> Host | None:
        """Start the heartbeats, or return another live launcher with this rank."""
        self._made = self.folder.missing()
        self.folder.make_directory()
        own = self.folder / f"host-{self.own.rank}.json"
        old = _read_host(own)
        until = time.monotonic() + 2.5 * HEARTBEAT_S
        while old is not None and time.monotonic() < until:
            now = _read_host(own)
            if now is not None and (now.uuid, now.heartbeat) != (old.uuid, old.heartbeat):
                return now
            time.sleep(HEARTBEAT_S / 10)
        self.read_hosts()
        self.publish()
        self._heartbeats.start()
        return None

    def publish(self, capacity: Capacity | None = None, **changes: Any) -> None:
        """Write this host's state with changes; each write is a heartbeat."""
        if capacity is not None:
            changes |= dataclasses.asdict(capacity)
        with self._lock:
            self.own = dataclasses.replace(self.own, heartbeat=self.own.heartbeat + 1, **changes)
            self._write(f"host-{self.own.rank}", dataclasses.asdict(self.own))

    def close(self, **changes: Any) -> None:
        """Publish a final state and stop the heartbeats."""
        self.stop_heartbeat()
        self.publish(**changes)

    def stop_heartbeat(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()

    def discard(self) -> None:
        """Restore the files to their state before this launch.

        Other hosts have `heartbeat_timeout_s` to read the final state of this one. The host that
        created the directory finishes last, so that it can remove the directory.
        """
        if self._heartbeats.ident:
            self._heartbeats.join()
        until = self.clock() + self.heartbeat_timeout_s
        while self.clock() < until and any(map(self._is_reading, self.read_hosts().values())):
            time.sleep(HEARTBEAT_S / 10)
        for file, (earlier, written) in self._contents.items():
            with contextlib.suppress(OSError):
                if file.read() == written and earlier is not None:
                    file.write(earlier)
                elif file.read() == written:
                    file.delete()
        remove_empty(self._made)

    def _is_reading(self, host: Host) -> bool:
        is_other = host.rank != self.own.rank and self.is_alive(host)
        has_ended = host.state in ("left", "ended") and not self._made
        return is_other and not has_ended and (self.folder / f"host-{host.rank}.json").exists()

    def read_hosts(self) -> dict[int, Host]:
        """Return rank -> host for this host and all with a heartbeat since the first read."""
        now = self.clock()
        names = [name for name in self.folder.entries() if name.startswith("host-")]
        for name in names:
            host = _read_host(self.folder / name)
            if host is None:
                continue
            if host.rank == self.own.rank:
                if host.uuid != self.own.uuid and self.own.heartbeat:
                    self.duplicate = host
                continue
            before = self._observed.get(host.rank)
            if before is None:
                self._observed[host.rank] = host, now if self._has_read else None
            elif (before[0].uuid, before[0].heartbeat) != (host.uuid, host.heartbeat):
                self._observed[host.rank] = host, now
        self._has_read = True
        moved = {rank: host for rank, (host, at) in self._observed.items() if at is not None}
        return {**moved, self.own.rank: self.own}

    def is_alive(self, host: Host) -> bool:
        """Return whether a host had a heartbeat within `heartbeat_timeout_s`, by this clock."""
        if host.uuid == self.own.uuid:
            return True
        _, moved_at = self._observed[host.rank]
        return moved_at is not None and self.clock() - moved_at <= self.heartbeat_timeout_s

    def read_round(self) -> Round | None:
        """Return the last round, possibly of an earlier launch."""
        record = _read_json(self.folder / "round.json")
        try:
            members = tuple(Host(**host) for host in record.pop("members"))
            return Round(**record, members=members)
        except (AttributeError, KeyError, TypeError):
            return None

    def write_round(self, new: Round) -> None:
        """Replace the round; only the leader may."""
        self._write("round", dataclasses.asdict(new))

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self.publish()

    def _write(self, name: str, record: dict[str, Any]) -> None:
        file, content = self.folder / f"{name}.json", json.dumps(record).encode()
        try:
            if file not in self._contents:
                self._contents[file] = file.read() if file.exists() else None, b""
            file.write(content, durable=False)
            self._contents[file] = self._contents[file][0], content
        except OSError as failure:
            if not self._warned:
                log(
                    f"cannot write {file} ({failure.strerror}): other hosts will treat this one as "
                    f"lost after {self.heartbeat_timeout_s:.0f} s"
                )
            self._warned = True


def _read_host(path: Location) -> Host | None:
    try:
        return Host(**_read_json(path))
    except TypeError:  # missing, or of another version
        return None


def _read_json(path: Location) -> Any:
    try:
        return path.json()
    except (OSError, ValueError):  # missing, or truncated by a full disk
        return None
