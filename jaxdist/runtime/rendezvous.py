"""Wait until all processes of a job have started, before jax connects them; report missing ones.

If a process is missing, jax's coordinator aborts all others in C++ without reporting which. So the
port first serves a check-in over plain TCP. Each other process sends one line: a proof of the job's
token, its process id, the number of processes, its host. When all have checked in, process 0 closes
the port and answers with its own proof; jax then uses the port. Its time-out's answer is an error.

A process that starts early, or reaches another job or attempt, retries until its time-out. The
token separates jobs on one port. Nothing is encrypted and jax's service accepts any client, so only
the cluster's network should reach the port.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import re
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from jaxdist.runtime.cluster_environment import JoinPlan, is_loopback
from jaxdist.runtime.coordination.transfer import listen
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.host_memory import check_open_files
from jaxdist.runtime.progress import waiting

log = logging.getLogger("jaxdist")

_RETRY_S = 0.1
_LINE_S = 5.0  # to receive one short line after connecting
_SERVICE_S = 30.0  # minimum time for jax's service to start after the check-in
_LINE_BYTES = 4096
_QUIET_S = 10.0  # processes of one job usually start within this time
_NAMED = 8  # missing or joined processes listed in a message
_SILENT = 64  # most unidentified connections; the oldest are closed
_LINE = re.compile(rb"jaxdist ([0-9a-f]{64}) (\d{1,7}) (\d{1,7}) ([!-~]{1,255})\n")
_ANSWER = re.compile(rb"jaxdist ([0-9a-f]{64}) ([^\n]*)\n")


class RendezvousError(RuntimeError):
    """Raised if processes did not connect or the port is taken; the next attempt may succeed."""

    has_traceback = False
    advice = (
        "see the logs of the named processes: they may have failed or been stopped before. Other "
        "causes are a firewall, a broken link, a wrong address, or for a taken port an earlier "
        "attempt that is still exiting"
    )


def wait_for_all(plan: JoinPlan, timeout_s: float) -> str:
    """Wait until all processes have checked in; return host:port for jax's coordination service.

    Process 0 can then start it at the freed port; the others return once it listens.
    Raises `RendezvousError` if the port is taken or processes are missing, and `ConfigError` if
    process 0's limit of open files is too low for their connections.
    """
    host, port = plan.coordinator_address.rsplit(":", 1)
    host, until = host.strip("[]"), time.monotonic() + timeout_s
    what = "all" if plan.process_id == 0 else "process 0"
    with waiting(
        f"process {plan.process_id}: waiting for {what} of {plan.num_processes} at "
        f"{plan.coordinator_address}, at most {timeout_s:.0f} s",
        _QUIET_S,
    ):
        if plan.process_id == 0:
            check_open_files(plan.num_processes)
            return _accept_all(_listen(host, int(port)), plan, until, timeout_s)
        _check_in(host, int(port), plan, until, timeout_s)
    return plan.coordinator_address


def _proof(plan: JoinPlan, sender: str) -> bytes:
    return hmac.new(plan.token.encode(), sender.encode(), hashlib.sha256).hexdigest().encode()


def _listen(host: str, port: int) -> socket.socket:
    """Open the port; raise if it is taken, because gRPC would share it between two jobs."""
    try:
        return listen(host, port)
    except OSError as failure:
        raise RendezvousError(
            f"coordinator port {port} on {socket.gethostname()} cannot be used: "
            f"{failure.strerror or failure}; another job may use it, or the previous attempt "
            "is still exiting. If that persists, choose another port for the coordinator."
        ) from None


def _accept_all(server: socket.socket, plan: JoinPlan, until: float, timeout_s: float) -> str:
    check_in = _CheckInServer(server, plan)
    try:
        while not check_in.is_complete() and (rest := until - time.monotonic()) > 0:
            check_in.serve(min(1.0, rest))
        # Close the port before answering: after the answer the others connect to jax's service.
        server.close()
        words = "" if check_in.is_complete() else check_in.missing_text(timeout_s)
        for connection in check_in.joined.values():
            connection.settimeout(_LINE_S)
            with contextlib.suppress(OSError):
                connection.sendall(b"jaxdist %b %b\n" % (_proof(plan, "0"), words.encode()))
        if words:
            raise RendezvousError(words)
        return _service_address(plan, check_in.joined.values())
    finally:
        check_in.close()


class _CheckInServer:
    """Server on process 0's port; `joined` maps a process id to its connection."""

    def __init__(self, server: socket.socket, plan: JoinPlan) -> None:
        self.joined: dict[int, socket.socket] = {}
        self._plan, self._server = plan, server
        self._hosts = {0: socket.gethostname()}
        self._rejected: Counter[str] = Counter()
        self._refusal = ""  # reason for the last failed accept
        # Unidentified connections, oldest first -> (deadline, bytes received).
        self._silent: dict[socket.socket, tuple[float, bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        server.setblocking(False)

    def is_complete(self) -> bool:
        """Return whether all processes are connected."""
        return len(self.joined) == self._plan.num_processes - 1

    def serve(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds; serve the connections that are ready, reject silent ones."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._server:
                self._accept()
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]  # only sockets are registered
        overdue = [c for c, (until, _) in self._silent.items() if time.monotonic() > until]
        too_many = list(self._silent)[: max(0, len(self._silent) - _SILENT)]
        for connection in dict.fromkeys(overdue + too_many):
            self._reject(connection, "did not identify itself")

    def missing_text(self, timeout_s: float) -> str:
        """Return a message with the missing, joined and rejected processes."""
        plan = self._plan
        missing = [i for i in range(1, plan.num_processes) if i not in self.joined]
        names = few([str(i) for i in missing], _NAMED)
        there = few([f"{i} on {self._hosts[i]}" for i in [0, *sorted(self.joined)]], _NAMED)
        others = "; ".join(f"{why} ({count} times)" for why, count in self._rejected.most_common(3))
        return (
            f"process {names} of {plan.num_processes} has not joined at {plan.coordinator_address} "
            f"within {timeout_s:.0f} s (runtime.join_timeout_s); joined: {there}"
            + (f"; rejected: {others}" if others else "")
            + (f"; connections could not be accepted: {self._refusal}" if self._refusal else "")
        )

    def close(self) -> None:
        """Close all connections; a sent answer can still be read."""
        for connection in (*self.joined.values(), *self._silent, self._server):
            connection.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as failure:  # the connection is closed, or too many files are open
            if failure.errno in (errno.EMFILE, errno.ENFILE):
                self._refusal = f"{failure.strerror}; raise ulimit -n or fs.file-max"
            time.sleep(0.01)
            return
        connection.setblocking(False)
        self._silent[connection] = time.monotonic() + _LINE_S, b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:
            return  # closed while earlier connections were read
        part = b""
        with contextlib.suppress(OSError):
            part = connection.recv(_LINE_BYTES)
        index = next((i for i, other in self.joined.items() if other is connection), None)
        if index is not None:  # the process exited or will reconnect
            self._forget(self.joined.pop(index))
            return
        until, line = self._silent[connection]
        line += part
        if part and b"\n" not in line and len(line) < _LINE_BYTES:
            self._silent[connection] = until, line
            return
        fields = _LINE.fullmatch(line)
        if fields is None:
            self._reject(connection, "another program")
            return
        proof, index, count = fields[1], int(fields[2]), int(fields[3])
        if not hmac.compare_digest(proof, _proof(self._plan, fields[2].decode())):
            self._reject(connection, "a process of another job (its token differs)")
        elif count != self._plan.num_processes or not 0 < index < count:
            self._reject(connection, f"process {index} of {count}")
        else:
            del self._silent[connection]
            if index in self.joined:  # the process restarted
                self._forget(self.joined[index])
            self.joined[index] = connection
            self._hosts[index] = fields[4].decode()

    def _reject(self, connection: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError):
            self._rejected[f"{connection.getpeername()[0]}: {why}"] += 1
        del self._silent[connection]
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _service_address(plan: JoinPlan, connections: Iterable[socket.socket]) -> str:
    """Return this host's address:port to which all others connected; [::]:port without such one."""
    host, port = plan.coordinator_address.rsplit(":", 1)
    if is_loopback(host):
        return plan.coordinator_address
    used = {connection.getsockname()[0].removeprefix("::ffff:") for connection in connections}
    own: set[str] = set()
    with contextlib.suppress(OSError):
        own = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    if len(used) == 1 and used <= own:
        address = used.pop()
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    log.warning(
        "jax's coordinator listens on all addresses of this host: the others reached it at %s, "
        "not all at one that %s has here (%s)",
        ", ".join(sorted(used)),
        host,
        ", ".join(sorted(own)) or "none",
    )
    return f"[::]:{port}"


def _check_in(host: str, port: int, plan: JoinPlan, until: float, timeout_s: float) -> None:
    number = str(plan.process_id)
    name = re.sub(r"[^!-~]", "?", socket.gethostname())[:255].encode()
    line = b"jaxdist %b %b %d %b\n" % (
        _proof(plan, number), number.encode(), plan.num_processes, name or b"?",
    )  # fmt: skip
    why = stranger = ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=_LINE_S) as connection:
                connection.sendall(line)
                # Wait longer than process 0, whose time-out message lists the missing processes.
                answer = _ANSWER.fullmatch(
                    _read_line(connection, until - time.monotonic() + _LINE_S)
                )
        except OSError as failure:
            why = str(failure)
        else:
            if answer and hmac.compare_digest(answer[1], _proof(plan, "0")):
                if answer[2]:
                    raise RendezvousError(answer[2].decode(errors="replace"))
                _wait_for_service(host, port, plan, max(until, time.monotonic() + _SERVICE_S))
                return
            stranger = "the server there did not answer as process 0 of this job (same token, size)"
        time.sleep(_RETRY_S)
    _unreachable(plan, timeout_s, stranger or why)


def _wait_for_service(host: str, port: int, plan: JoinPlan, until: float) -> None:
    """Wait until jax's coordination service listens: before, jax aborts without a Python error."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=_LINE_S).close()
            return
        except OSError as failure:
            if time.monotonic() > until:
                _unreachable(plan, time.monotonic() - begin, str(failure))
            time.sleep(_RETRY_S)


def _unreachable(plan: JoinPlan, seconds: float, why: str) -> NoReturn:
    raise RendezvousError(
        f"process {plan.process_id} on {socket.gethostname()} cannot reach the coordinator "
        f"{plan.coordinator_address} (process 0) after {seconds:.0f} s: {why}"
    ) from None


def _read_line(connection: socket.socket, timeout_s: float) -> bytes:
    """Return a line of at most `_LINE_BYTES`, cut at the time-out or if the peer closes."""
    until = time.monotonic() + timeout_s
    data = b""
    with contextlib.suppress(OSError):
        while b"\n" not in data and len(data) < _LINE_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))
            part = connection.recv(_LINE_BYTES - len(data))
            if not part:
                break
            data += part
    return data
