"""Files in a shared directory through which the launchers of an elastic job find each other.

    host-<rank>.json   the state of one host, written only by its launcher, every second
    round.json         the current round, written by the leader
    members.json       the hosts of that round, read once

Files are used instead of a server (torchrun's c10d store, etcd), because a server runs on one host
and that host may be lost. The run directory is available as long as the job can save.

* A file is replaced atomically.
* A host is alive while the counter in its file grows, timed by the reader's own clock. Clocks of
  different hosts are never compared.
* A file whose counter has not changed since the first read may be left from an earlier launch. It
  is ignored until it changes.
* Every launcher has a uuid: a restarted launcher is a new member.
* The leader reads all files at a time. Another host reads the leader's file and `READS` others
  in turn, so that the reads of a large job grow with its hosts, not with their square. The leader
  writes the loss of a member into the round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
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
"""Seconds between two heartbeats, and between two reads of the files while processes run."""

READS = 32
"""Files of other hosts that a host reads at a time, besides the leader's; the leader reads all."""

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
    """Hosts of a round, with `nproc_per_node` processes each, and `devices` per process.

    The first host runs the coordinator.
    """

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

    `stop` is the reason to save and end the round, `lost` the loss of a member, which ends it
    immediately; both are empty while it should run.
    """

    id: str
    number: int
    stop: str = ""
    lost: str = ""

    def index_of(self, launcher: str) -> int | None:
        """Return the position of a launcher (uuid) among the members, or None."""
        return next((i for i, host in enumerate(self.members) if host.uuid == launcher), None)


@dataclasses.dataclass
class _Observed:
    """A host, when its heartbeat last grew (None = not since the first read), and the last read."""

    host: Host
    moved_at: float | None
    read_at: float


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
        self._observed: dict[int, _Observed] = {}  # by rank
        self._has_read = False
        self._unread: list[int] = []  # ranks of files to read next
        self._round: Round | None = None
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
        """Return the live launcher that has this rank, or start the heartbeats and return None."""
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
        """Write this host's state with `changes` of its fields; each write is a heartbeat."""
        changes |= dataclasses.asdict(capacity) if capacity else {}
        with self._lock:
            self.own = dataclasses.replace(self.own, heartbeat=self.own.heartbeat + 1, **changes)
            self._write(f"host-{self.own.rank}", dataclasses.asdict(self.own))

    def close(self, **changes: Any) -> None:
        """Publish this host's state with changes for the last time; stop the heartbeats."""
        self.stop_heartbeat()
        self.publish(**changes)

    def stop_heartbeat(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()

    def discard(self) -> None:
        """Restore the files to their state before this launch.

        First wait, at most `heartbeat_timeout_s`, until every other live host has ended its launch,
        because it may still read the state of this one. The host that created the directory waits
        until the others have removed their files too, and then removes the directory.
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
        """Read files; return rank -> host: this host, and all, even lost, whose heartbeat grew.

        The leader and every first call read all files; else a state may be `len(hosts) / READS`
        calls old.
        """
        read: set[int] = set()
        leader = self.leader()
        while leader is not None and leader not in (self.own.rank, *read):
            self._read(leader)
            read.add(leader)
            leader = self.leader()
        if leader == self.own.rank or not self._has_read:
            self._unread = self._listed()
            count = len(self._unread)
        else:
            self._unread = self._unread or self._listed()
            count = READS
        for rank in self._unread[:count]:
            if rank not in read:
                self._read(rank)
        del self._unread[:count]
        self._has_read = True
        return self._hosts()

    def leader(self) -> int | None:
        """Return the lowest rank of a live host in the job or waiting for it; None without one."""
        ready = [h for h in self._hosts().values() if h.state in ("waiting", "running")]
        return min((h.rank for h in ready if self.is_alive(h)), default=None)

    def _hosts(self) -> dict[int, Host]:
        moved = {r: seen.host for r, seen in self._observed.items() if seen.moved_at is not None}
        return {**moved, self.own.rank: self.own}

    def _listed(self) -> list[int]:
        """Return the ranks of all files; hosts whose file is missing count as read.

        They begin with the next rank, so that hosts do not read the same files at the same time.
        """
        try:
            names = self.folder.entries()
        except OSError:  # the folder is away for this host: nobody in it moves
            return sorted(self._observed)
        matches = (re.fullmatch(r"host-(\d+)\.json", name) for name in names)
        ranks = [int(match[1]) for match in matches if match]
        for rank in self._observed.keys() - ranks:
            self._observed[rank].read_at = self.clock()
        return sorted(ranks, key=lambda rank: (rank <= self.own.rank, rank))

    def _read(self, rank: int) -> None:
        host, now = _read_host(self.folder / f"host-{rank}.json"), self.clock()
        if rank == self.own.rank:
            if host is not None and host.uuid != self.own.uuid and self.own.heartbeat:
                self.duplicate = host
            return
        seen = self._observed.get(rank)
        if seen is not None:
            seen.read_at = now
        if host is None or host.rank != rank:
            return
        if seen is None:
            self._observed[rank] = _Observed(host, now if self._has_read else None, now)
        elif (seen.host.uuid, seen.host.heartbeat) != (host.uuid, host.heartbeat):
            seen.host, seen.moved_at = host, now

    def is_alive(self, host: Host) -> bool:
        """Return whether a host's heartbeat grew within `heartbeat_timeout_s` of its last read."""
        if host.uuid == self.own.uuid:
            return True
        one = self._observed[host.rank]
        return one.moved_at is not None and one.read_at - one.moved_at <= self.heartbeat_timeout_s

    def read_at(self, host: Host) -> float:
        """Return when a host's file was last read, by this clock."""
        return self.clock() if host.uuid == self.own.uuid else self._observed[host.rank].read_at

    def read_round(self) -> Round | None:
        """Return the last round, possibly of an earlier launch; None if none can be read."""
        record = _read_json(self.folder / "round.json")
        try:
            if self._round is None or self._round.id != record["id"]:
                members = _read_json(self.folder / "members.json")
                if members["id"] != record["id"]:  # the leader is writing a round
                    return None
                hosts = tuple(Host(**host) for host in members["members"])
                self._round = Round(**record, members=hosts)
            self._round = Round(**record, members=self._round.members)
            return self._round
        except (AttributeError, KeyError, TypeError):
            return None

    def write_round(self, new: Round) -> None:
        """Replace the round that all hosts read; only the leader may call it."""
        record = dataclasses.asdict(new)
        members = {"id": new.id, "members": record.pop("members")}
        if self._round is None or self._round.id != new.id:
            self._write("members", members)
        self._write("round", record)

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
                    f"cannot write {file} ({failure.strerror}): after "
                    f"{self.heartbeat_timeout_s:.0f} s of this, the host counts as lost"
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
