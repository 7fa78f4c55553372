"""Checks between processes: connections, and the shared run directory.

Each process listens on a port chosen by the system, as gloo and NCCL do, and connects to its
`peers`. For the directory, each process writes a token and reads the tokens of its peers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, locate
from jaxdist.tools.doctor.findings import Finding, error, ok

_ALL_PAIRS = 32
"""Number of processes up to which each is a peer of all others."""
_CONNECT_S = 5.0
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
    """Accepts the connections of other processes on `port`, until closed."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="jaxdist-doctor", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:  # closed
                return

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def visit(addresses: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Connect to the processes at these addresses; return process id -> reason of each failure."""
    with concurrent.futures.ThreadPoolExecutor(min(16, max(1, len(addresses)))) as pool:
        reasons = dict(zip(addresses, pool.map(_failure, addresses.values()), strict=True))
    return {process: reason for process, reason in reasons.items() if reason}


def _failure(address: tuple[str, int]) -> str:
    """Return the reason why an address cannot be connected to, or ""."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError as failure:
        return f"{address[0]}:{address[1]}: {failure}"
    return ""


def check_visits(visits: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[Finding]:
    """Return a finding on the connections; `visits` has the failures of each process."""
    pairs = sum(len(peers(i, len(visits))) for i in range(len(visits)))
    broken = [
        f"process {i} on {hosts[i]} cannot reach process {j} on {hosts[int(j)]} ({why})"
        for i, failed in enumerate(visits)
        for j, why in failed.items()
    ]
    if not broken:
        return [ok("network", f"all {pairs} connections tested between processes work")]
    return [
        error(
            "network",
            f"{len(broken)} of {pairs} connections tested fail: {few(broken, 4, '; ')}",
            "open all TCP ports between the hosts of the job; if an address is wrong, set "
            "NCCL_SOCKET_IFNAME and a coordinator that the others resolve",
        )
    ]


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
    views: Sequence[Sequence[int]],
    hosts: Sequence[str],
    directory: Path,
    failed: Mapping[int, str],
) -> list[Finding]:
    """Return findings: which process cannot write, and do all see the same files.

    `views` has, for each process, those of its peers, and itself, whose tokens it read. `failed`
    maps a process to the reason why its write failed.
    """
    results = [
        error(
            "shared directory",
            f"process {i} on {hosts[i]} cannot write into {directory}: {why}",
            "grant it write access, or use another --run-dir that all hosts mount",
        )
        for i, why in failed.items()
    ]
    split = []
    for i, seen in enumerate(views):
        expected = [j for j in watched(i, len(views)) if j not in failed]
        if missing := [str(j) for j in expected if j not in seen]:
            split.append(f"process {i} on {hosts[i]} sees no files of {few(missing, 4)}")
    if split:
        results.append(
            error(
                "shared directory",
                f"{directory} is not one directory for all {len(views)} processes: "
                f"{few(split, 4, '; ')}",
                "use a --run-dir on a file system that every host mounts; all processes of a job "
                "write checkpoints into one directory",
            )
        )
    text = f"{directory} is one directory for {len(views)} processes"
    return results or [ok("shared directory", text)]


def watched(process: int, num_processes: int) -> list[int]:
    """Return the processes whose tokens a process reads: itself and its peers."""
    return sorted([process, *peers(process, num_processes)])
