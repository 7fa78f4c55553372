"""Checks between processes: connections, clocks, and the shared run directory.

Each process listens on a port chosen by the system, as gloo and NCCL do, and connects to its
`peers`. A peer answers with its time, whose age is assumed to be half the round trip (Cristian's
algorithm). For the directory, each process writes a token and reads the tokens of its peers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, locate
from jaxdist.tools.doctor.findings import Finding, error, ok, warning

_ALL_PAIRS = 32
"""Number of processes up to which each is a peer of all others."""
_TRIES = 3
_CONNECT_S = 5.0
_SKEW_S = 0.5
"""Clock difference above which the logs of two hosts are hard to compare."""
_LONG_SKEW_S = 30.0
"""Clock difference above which storage rejects tokens and certificates."""
_NFS_CACHE_S = 5.0
"""NFS shows a new file to other hosts after its cache of the directory expires (default 3 s)."""


def peers(process: int, num_processes: int) -> list[int]:
    """Return the processes that `process` examines: all of a small job, and process 0 always all.

    In larger jobs, the others examine process 0, the next one, and those half, a quarter and an
    eighth of the job further.
    """
    if process == 0 or num_processes <= _ALL_PAIRS:
        return [i for i in range(num_processes) if i != process]
    distances = 1, num_processes // 8, num_processes // 4, num_processes // 2
    return sorted({0, *((process + by) % num_processes for by in distances)})


class Listener:
    """Answers each connection to `port` with this process's clock, until closed."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="jaxdist-doctor", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), peer:
                peer.sendall(json.dumps({"time": time.time()}).encode())

    def close(self) -> None:
        """Stop answering connections."""
        self._socket.close()


def visit(addresses: Mapping[int, tuple[str, int]]) -> dict[str, Any]:
    """Connect to the processes at these addresses; return results by process id.

    `failed` has reasons, `offset_s` the peer's clock minus this clock, `rtt_s` round-trip times.
    """
    failed, offsets, trips = {}, {}, {}
    with concurrent.futures.ThreadPoolExecutor(min(16, max(1, len(addresses)))) as pool:
        answers = pool.map(_measure, addresses.values())
        for i, answer in zip(addresses, answers, strict=True):
            if isinstance(answer, str):
                failed[i] = answer
            else:
                trips[i], offsets[i] = answer
    return {"failed": failed, "offset_s": offsets, "rtt_s": trips}


def _measure(address: tuple[str, int]) -> tuple[float, float] | str:
    """Return (shortest round trip, clock offset), or the reason for a failure."""
    trips: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        try:
            with socket.create_connection(address, timeout=_CONNECT_S) as peer:
                # The peer reads its clock once it has our connection; its answer ends the trip.
                sent = time.time()
                peer_time = json.loads(peer.recv(256))["time"]
                back = time.time()
        except (OSError, ValueError) as failure:
            if not trips:
                return f"{address[0]}:{address[1]}: {failure}"
        else:
            trips.append((back - sent, peer_time - (sent + back) / 2))
    return min(trips)


def check_visits(visits: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    """Return a finding on the connections and one on the clocks; both lists are by process id."""
    return [_check_pairs(visits, hosts), _check_clocks(visits, hosts)]


def _check_pairs(visits: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Finding:
    failed = [
        (i, int(j), why)
        for i, visit in enumerate(visits)
        for j, why in sorted(visit["failed"].items(), key=lambda item: int(item[0]))
    ]
    pairs = sum(len(visit["failed"]) + len(visit["rtt_s"]) for visit in visits)
    trips = [trip for visit in visits for trip in visit["rtt_s"].values()]
    if not failed:
        longest = f"{1e3 * max(trips):.1f} ms at most"
        text = f"all {pairs} connections tested between processes work, {longest}"
        return ok("network", text, longest_s=max(trips))
    broken = [
        f"process {i} on {hosts[i]} cannot reach process {j} on {hosts[j]} ({why})"
        for i, j, why in failed
    ]
    return error(
        "network",
        f"{len(failed)} of {pairs} connections tested fail: {few(broken, 4, '; ')}",
        "open all TCP ports between the hosts of the job; if an address is wrong, set "
        "NCCL_SOCKET_IFNAME and a coordinator that the others resolve",
        failed=[[i, j] for i, j, _ in failed],
    )


def _check_clocks(visits: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Finding:
    """Return a finding on the largest difference to process 0's clock, ± half the round trip."""
    offsets = {int(i): offset for i, offset in visits[0]["offset_s"].items()}
    trips = {int(i): trip for i, trip in visits[0]["rtt_s"].items()}
    if not offsets:
        return ok("clocks", "not compared: no other process was reached")
    far = max(offsets, key=lambda i: abs(offsets[i]))
    skew = abs(offsets[far])
    text = (
        f"{skew:.3f} s between processes 0 and {far} (±{trips[far] / 2:.3f} s), "
        f"on {hosts[0]} and {hosts[far]}"
    )
    fix = "run a time service (chrony, systemd-timesyncd) on every host"
    sure = skew - trips[far] / 2
    if sure > _LONG_SKEW_S:
        return error("clocks", text + ": storage may reject requests", fix, skew_s=skew)
    if sure > _SKEW_S:
        return warning("clocks", text + ": times in logs are not comparable", fix, skew_s=skew)
    return ok("clocks", text, skew_s=skew)


@dataclasses.dataclass(frozen=True)
class Token:
    """The file of one process in the run directory; `nonce` identifies this check."""

    directory: Path
    nonce: str
    process: int

    @property
    def _path(self) -> Location:
        return locate(self.directory) / f".doctor-{self.nonce}-{self.process}"

    @property
    def _text(self) -> str:
        return f"{self.nonce} {self.process}\n"

    def write(self) -> str:
        """Write the token's file; return the reason for a failure, or ""."""
        try:
            self._path.write(self._text)
        except OSError as failure:
            return failure.strerror or str(failure)
        return ""

    def is_complete(self) -> bool:
        """Return whether the file can be read with its full content."""
        try:
            return self._path.text() == self._text
        except OSError:
            return False

    def delete(self) -> None:
        """Delete the token's file."""
        with contextlib.suppress(OSError):
            self._path.delete()


def read_tokens(
    directory: Path, nonce: str, writers: Sequence[int], patience_s: float = _NFS_CACHE_S
) -> list[int]:
    """Return the processes whose token is visible here; wait up to `patience_s` for all."""
    until = time.monotonic() + patience_s
    while True:
        seen = [i for i in writers if Token(directory, nonce, i).is_complete()]
        if len(seen) == len(writers) or time.monotonic() > until:
            return seen
        time.sleep(0.1)


def check_views(
    views: Mapping[int, Sequence[int]],
    hosts: Sequence[str],
    directory: Path,
    failed: Mapping[int, str],
) -> list[Finding]:
    """Return findings: which process cannot write, and do all see the same files.

    `views` maps each process to those of its peers, and itself, whose tokens it read. `failed` maps
    a process to the reason why its write failed.
    """
    results = [
        error(
            "shared directory",
            f"process {i} on {hosts[i]} cannot write into {directory}: {why}",
            "grant it write access, or use another --run-dir that all hosts mount",
        )
        for i, why in failed.items()
    ]
    expected = {i: [j for j in watched(i, len(views)) if j not in failed] for i in views}
    if all(sorted(seen) == expected[i] for i, seen in views.items()):
        text = f"{directory} is one directory for {len(views)} processes"
        return results or [ok("shared directory", text)]
    groups = _groups(views)
    parts = "; ".join(
        f"process {i} on {hosts[i]} sees files of {_count(views[i], expected[i])}"
        for i, *_ in groups[:4]
    )
    split = error(
        "shared directory",
        f"{directory} is not one directory for all {len(views)} processes: {parts}",
        "use a --run-dir on a file system that every host mounts; all processes of a job write "
        "checkpoints into one directory",
        groups=groups,
    )
    return [*results, split]


def watched(process: int, num_processes: int) -> list[int]:
    """Return the processes whose tokens a process reads: itself and its peers."""
    return sorted([process, *peers(process, num_processes)])


def _groups(views: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the sets of processes that see one another's files, directly or through others."""
    first = {i: i for i in views}

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = i = first[first[i]]
        return i

    for i, seen in views.items():
        for j in seen:
            low, high = sorted((root(i), root(j)))
            first[high] = low
    groups: dict[int, list[int]] = {}
    for i in views:
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def _count(seen: Sequence[int], writers: Sequence[int]) -> str:
    names = few(list(map(str, seen)), 4)
    return f"{len(seen)} of {len(writers)} ({names})" if seen else "nobody"
