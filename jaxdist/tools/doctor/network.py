"""Can every process reach every other, and do their clocks agree?

Each process listens on a port that the system chooses, as gloo and NCCL do, and connects to all
others. Who answers says what time it is: half the round trip later is now (Cristian's algorithm).
"""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.runtime.formatting.tables import few
from jaxdist.tools.doctor.findings import Finding, error, ok, warning

_TRIES = 3
_CONNECT_S = 5.0
_SKEW_S = 0.5
"""Clocks that far apart make logs of two hosts unreadable side by side."""
_LONG_SKEW_S = 30.0
"""Tokens and certificates of storage are refused, and files of others lie in the future."""


class Listener:
    """Answers whoever connects with this process's clock, until closed.

    Peers are told the address that leads `towards` a host that they share the network with (the
    coordinator's); "" = only this host.
    """

    def __init__(self, towards: str = ""):
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.address = (own_address(towards), self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="jaxdist-doctor", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            try:
                with peer:
                    peer.sendall(json.dumps({"time": time.time()}).encode())
            except OSError:
                continue

    def close(self) -> None:
        """Stop answering."""
        self._socket.close()


def own_address(towards: str) -> str:
    """The address of this host on the way to another; no packet is sent."""
    if not towards:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def visit(addresses: Sequence[tuple[str, int]], own: int) -> dict[str, Any]:
    """Connect to all others.

    Returns:
        `failed`: process -> why; `offset_s`: process -> its clock minus ours, `rtt_s` next to it.
    """
    others = [i for i in range(len(addresses)) if i != own]
    failed, offsets, trips = {}, {}, {}
    with concurrent.futures.ThreadPoolExecutor(min(16, max(1, len(others)))) as pool:
        for i, answer in zip(others, pool.map(lambda i: _ask(addresses[i]), others), strict=True):
            if isinstance(answer, str):
                failed[i] = answer
            else:
                trips[i], offsets[i] = answer
    return {"failed": failed, "offset_s": offsets, "rtt_s": trips}


def _ask(address: tuple[str, int]) -> tuple[float, float] | str:
    """(shortest round trip, clock offset measured by it), or why there is no answer."""
    trips: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        try:
            with socket.create_connection(address, timeout=_CONNECT_S) as peer:
                # The peer reads its clock once it has our connection; its answer ends the trip.
                sent = time.time()
                theirs = json.loads(peer.recv(256))["time"]
                back = time.time()
        except (OSError, ValueError) as failure:
            if not trips:
                return f"{address[0]}:{address[1]}: {failure}"
        else:
            trips.append((back - sent, theirs - (sent + back) / 2))
    return min(trips)


def check_visits(visits: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    """What all visits come to; both lists are by process id."""
    return [_check_pairs(visits, hosts), _check_clocks(visits, hosts)]


def _check_pairs(visits: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Finding:
    failed = [
        (i, int(j), why)
        for i, visit in enumerate(visits)
        for j, why in sorted(visit["failed"].items(), key=lambda item: int(item[0]))
    ]
    pairs = len(visits) * (len(visits) - 1)
    trips = [trip for visit in visits for trip in visit["rtt_s"].values()]
    if not failed:
        return ok(
            "network",
            f"all {pairs} ways between processes are open, {1e3 * max(trips):.1f} ms at most",
            longest_s=max(trips),
        )
    ways = [
        f"process {i} on {hosts[i]} cannot reach process {j} on {hosts[j]} ({why})"
        for i, j, why in failed
    ]
    return error(
        "network",
        f"{len(failed)} of {pairs} ways between processes are closed: {few(ways, 4, '; ')}",
        "open all TCP ports between the hosts of the job; if an address is wrong, set "
        "NCCL_SOCKET_IFNAME and a coordinator that the others resolve",
        failed=[[i, j] for i, j, _ in failed],
    )


def _check_clocks(visits: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Finding:
    """By process 0's clock; a difference below half the round trip may be none."""
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
        return error("clocks", text + ": storage and certificates may refuse", fix, skew_s=skew)
    if sure > _SKEW_S:
        return warning("clocks", text + ": their logs do not line up", fix, skew_s=skew)
    return ok("clocks", text, skew_s=skew)
