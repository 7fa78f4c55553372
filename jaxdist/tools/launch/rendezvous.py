"""Where the launchers of a job meet: small files in a directory that all hosts share.

    host-<rank>.json   what a host says of itself, written by it alone, every second
    round.json         who is in the job now, written by the leader

A file moves by being replaced whole, so nobody reads half of one. Whether a host lives is judged by
the observer's own clock, from its counter's moving: clocks of hosts are never compared. A file that
was there at an observer's first look and has not moved since is of an earlier launch; every
launcher has a uuid, so that a host that was started again is another one.

No host is needed to keep the others together: each may go at any time, the first too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jaxdist.tools.launch.resources import Capacity

BEAT_S = 1.0
"""Between two counts of a host; also between two looks at the others."""

State = Literal[
    "arriving", "waiting", "running", "done", "saved", "failed", "leaving", "left", "over"
]
"""What a host does.

| state | meaning |
|---|---|
| arriving | its launcher has begun and does not know yet what it can run |
| waiting | ready for a round |
| running | its processes run in round `round` |
| done, saved, failed | its processes ended in that round with 0, with 75, with anything else |
| leaving | its launcher was asked to stop, its processes are saving |
| left | its launcher has ended, the job may go on without it |
| over | its launcher has ended with `code`, which ends the job |
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What a host says of itself.

    Attributes:
        rank: its place among the hosts, as given to its launcher.
        uuid: of its launcher.
        address: name by which other hosts reach it.
        beat: counts up while the launcher lives.
        port: free on it, for the job's coordinator.
        nproc_per_node: processes that it can run.
        devices: of the host in all.
        gpus: whether these are GPUs, which can be dealt out, or simulated ones.
        state: see `State`.
        round: id of the round that it has last been in.
        code: exit code with which the job is over.
    """

    rank: int
    uuid: str
    address: str
    beat: int = 0
    port: int = 0
    nproc_per_node: int = 0
    devices: int = 1
    gpus: bool = False
    state: State = "arriving"
    round: str = ""
    code: int = 0

    def __str__(self) -> str:
        return f"host {self.rank} ({self.address})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Who takes part, until someone is lost or more is possible.

    Attributes:
        id: unique.
        number: counts up in the run directory.
        members: hosts that take part, the coordinator's first.
        nproc_per_node: processes on each.
        devices: of each process.
        stop: why this round shall save and end; empty while it shall run.
    """

    id: str
    number: int
    members: tuple[Host, ...]
    nproc_per_node: int
    devices: int
    stop: str = ""

    @property
    def num_devices(self) -> int:
        """Devices of all members."""
        return len(self.members) * self.nproc_per_node * self.devices

    def index_of(self, launcher: str) -> int | None:
        """Place of the launcher with this uuid among the members."""
        return next((i for i, host in enumerate(self.members) if host.uuid == launcher), None)


@dataclasses.dataclass(frozen=True)
class _Sight:
    host: Host
    moved_at: float | None  # None: it has not moved since the first look


class Rendezvous:
    """One launcher's place in the meeting: what it says and what it sees.

    Args:
        folder: shared by all hosts.
        rank: of this host.
        address: name by which other hosts reach it.
        heartbeat_timeout_s: seconds without a beat after which a host counts as lost.
        clock: seconds, of this host alone.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        address: str,
        *,
        heartbeat_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder, self.heartbeat_timeout_s, self.clock = folder, heartbeat_timeout_s, clock
        self.me = Host(rank=rank, uuid=uuid.uuid4().hex, address=address)
        self.rival: Host | None = None
        self._sights: dict[int, _Sight] = {}
        self._looked = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._warned = False

    def claim(self) -> Host | None:
        """Another living launcher with this rank, if one beats on; else this one begins to beat."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / f"host-{self.me.rank}.json"
        old = _read_host(own)
        until = time.monotonic() + 2.5 * BEAT_S
        while old is not None and time.monotonic() < until:
            now = _read_host(own)
            if now is not None and (now.uuid, now.beat) != (old.uuid, old.beat):
                return now
            time.sleep(BEAT_S / 10)
        self.look()
        self.say()
        threading.Thread(target=self._beat_on, name="launch-beat", daemon=True).start()
        return None

    def say(self, capacity: Capacity | None = None, **changes: Any) -> None:
        """Change what this host says of itself, and count on."""
        if capacity is not None:
            changes |= dataclasses.asdict(capacity)
        with self._lock:
            self.me = dataclasses.replace(self.me, beat=self.me.beat + 1, **changes)
            self._write(f"host-{self.me.rank}", dataclasses.asdict(self.me))

    def close(self, **changes: Any) -> None:
        """Say a last word and be silent."""
        self.fall_silent()
        self.say(**changes)

    def fall_silent(self) -> None:
        """Beat no more, without a last word."""
        self._ended.set()

    def look(self) -> dict[int, Host]:
        """The last words of every host that has moved since the first look, this one's included."""
        now = self.clock()
        for path in self.folder.glob("host-*.json"):
            host = _read_host(path)
            if host is None:
                continue
            if host.rank == self.me.rank:
                if host.uuid != self.me.uuid and self.me.beat:
                    self.rival = host
                continue
            before = self._sights.get(host.rank)
            if before is None:
                self._sights[host.rank] = _Sight(host, now if self._looked else None)
            elif (before.host.uuid, before.host.beat) != (host.uuid, host.beat):
                self._sights[host.rank] = _Sight(host, now)
        self._looked = True
        moved = {rank: s.host for rank, s in self._sights.items() if s.moved_at is not None}
        return {**moved, self.me.rank: self.me}

    def is_living(self, host: Host) -> bool:
        """Whether its counter has moved lately, seen from here."""
        if host.uuid == self.me.uuid:
            return True
        moved_at = self._sights[host.rank].moved_at
        return moved_at is not None and self.clock() - moved_at <= self.heartbeat_timeout_s

    def read_round(self) -> Round | None:
        """The round that was written last, of whatever launch."""
        record = _read_json(self.folder / "round.json")
        try:
            members = tuple(Host(**host) for host in record.pop("members"))
            return Round(**record, members=members)
        except (AttributeError, KeyError, TypeError):
            return None

    def write_round(self, new: Round) -> None:
        """For the leader."""
        self._write("round", dataclasses.asdict(new))

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_S):
            self.say()

    def _write(self, name: str, record: dict[str, Any]) -> None:
        fresh = self.folder / f".{name}-{self.me.uuid}"
        try:
            fresh.write_text(json.dumps(record))
            os.replace(fresh, self.folder / f"{name}.json")
        except OSError as failure:
            if not self._warned:
                print(
                    f"launch: cannot write {self.folder / name}.json ({failure.strerror}): other "
                    f"hosts will take this one for lost after {self.heartbeat_timeout_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            self._warned = True


def _read_host(path: Path) -> Host | None:
    try:
        return Host(**_read_json(path))
    except TypeError:  # not there, or of another version
        return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut short by a full disk
        return None
