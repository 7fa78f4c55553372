"""Before jax connects the processes: process 0 waits for all of them, or says who is missing.

jax's own coordinator aborts every process in C++ when one of them does not come in time: no Python
error, no name. Where another program holds the port, the others wait for it in vain. So the port
first serves a check-in over plain TCP. Each process sends one line: a proof that it knows the job's
token, its process id, the number of processes, its host. When the last one has come, process 0
closes the port, answers all of them with a proof of its own, and jax takes the port.

A process that is early, or that meets process 0 of another job or attempt, tries again until its
time is up. Process 0 hears all connections at once and turns away what is not of its job. The token
keeps jobs apart that meet on one port; the lines are not encrypted, and jax's own service that
follows asks for no token, so the port belongs on a network that only the cluster reaches.
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
from jaxdist.runtime.limits import check_open_files

log = logging.getLogger("jaxdist")

_RETRY_S = 0.1
_LINE_S = 5.0  # for one short line, once the connection stands
_SERVICE_S = 30.0  # at least, for jax's service to listen once all are there
_LINE_BYTES = 4096
_NAMED = 8  # missing processes that a message lists
_SILENT = 64  # connections that may wait to say who they are; beyond it the oldest is closed
_LINE = re.compile(rb"jaxdist ([0-9a-f]{64}) (\d{1,7}) (\d{1,7}) ([!-~]{1,255})\n")
_ANSWER = re.compile(rb"jaxdist ([0-9a-f]{64}) ([^\n]*)\n")


class RendezvousError(RuntimeError):
    """The processes of a job have not met; the next attempt may succeed."""

    advice = (
        "see the logs of the processes named: they may have failed or been stopped before. A "
        "firewall, a cut link or a wrong address keeps hosts apart too; a taken port may be an "
        "earlier attempt that is still ending"
    )


def wait_for_all(plan: JoinPlan, timeout_s: float) -> str:
    """Return in every process once all have checked in at the coordinator's address.

    The port is free again then, for jax's service.

    Returns:
        host:port at which jax's service should listen: the address of this host to which all
        processes came. Only process 0 has a service.

    Raises:
        RendezvousError: the port is taken, process 0 is not there, or others are missing: named.
        ConfigError: process 0 may not open a file for every process.
    """
    host, port = plan.coordinator_address.rsplit(":", 1)
    host, until = host.strip("[]"), time.monotonic() + timeout_s
    if plan.process_id == 0:
        check_open_files(plan.num_processes)
        return _accept_all(_listen(host, int(port)), plan, until, timeout_s)
    _check_in(host, int(port), plan, until, timeout_s)
    return plan.coordinator_address


def _proof(plan: JoinPlan, sender: str) -> bytes:
    """What only a process with the job's token can say."""
    return hmac.new(plan.token.encode(), sender.encode(), hashlib.sha256).hexdigest().encode()


# --- process 0 ------------------------------------------------------------------------------------


def _listen(host: str, port: int) -> socket.socket:
    """The port, or why not: gRPC would share a taken one, and two jobs would end each other."""
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # the kernel may have IPv6 and the host none
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as failure:
        raise RendezvousError(
            f"coordinator port {port} on {socket.gethostname()} cannot be used: "
            f"{failure.strerror or failure}; another job may run there, or the attempt before is "
            "still ending. If that stays, set another port in JAXDIST_COORDINATOR_ADDRESS or "
            "runtime.coordinator_address."
        ) from None


def _accept_all(server: socket.socket, plan: JoinPlan, until: float, timeout_s: float) -> str:
    desk = _CheckIn(server, plan)
    try:
        while not desk.is_complete() and (rest := until - time.monotonic()) > 0:
            desk.serve(min(1.0, rest))
        # Closed before the answer: whoever has read it may find only jax's service there.
        server.close()
        words = "" if desk.is_complete() else desk.missing_text(timeout_s)
        for connection in desk.present.values():
            connection.settimeout(_LINE_S)
            with contextlib.suppress(OSError):
                connection.sendall(b"jaxdist %b %b\n" % (_proof(plan, "0"), words.encode()))
        if words:
            raise RendezvousError(words)
        return _service_address(plan, desk.present.values())
    finally:
        desk.close()


class _CheckIn:
    """Process 0's port, and who has come to it.

    Attributes:
        present: process id -> its connection.
    """

    def __init__(self, server: socket.socket, plan: JoinPlan) -> None:
        self.present: dict[int, socket.socket] = {}
        self._plan, self._server = plan, server
        self._hosts = {0: socket.gethostname()}
        self._turned_away: Counter[str] = Counter()
        self._no_file = ""  # why a connection could not be accepted
        # Those that have not said who they are, oldest first: until when they may, and what came.
        self._silent: dict[socket.socket, tuple[float, bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        server.setblocking(False)

    def is_complete(self) -> bool:
        """Whether all processes are there, and none has left since it came."""
        return len(self.present) == self._plan.num_processes - 1

    def serve(self, wait_s: float) -> None:
        """Hear everyone who has something to say within `wait_s` seconds."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._server:
                self._welcome()
            else:
                self._hear(key.fileobj)  # type: ignore[arg-type]  # only sockets are registered
        overdue = [c for c, (until, _) in self._silent.items() if time.monotonic() > until]
        too_many = list(self._silent)[: max(0, len(self._silent) - _SILENT)]
        for connection in dict.fromkeys(overdue + too_many):
            self._turn_away(connection, "did not say what it is")

    def missing_text(self, timeout_s: float) -> str:
        """Who has not come, who is there, and who came but is not of this job."""
        plan = self._plan
        missing = [i for i in range(1, plan.num_processes) if i not in self.present]
        names = ", ".join(map(str, missing[:_NAMED])) + (" ..." if len(missing) > _NAMED else "")
        there = ", ".join(f"{i} on {self._hosts[i]}" for i in [0, *sorted(self.present)][:_NAMED])
        others = "; ".join(
            f"{why} ({count} times)" for why, count in self._turned_away.most_common(3)
        )
        return (
            f"process {names} of {plan.num_processes} has not joined at {plan.coordinator_address} "
            f"within {timeout_s:.0f} s (runtime.join_timeout_s); there: {there}"
            + (f"; turned away: {others}" if others else "")
            + (f"; connections could not be accepted: {self._no_file}" if self._no_file else "")
        )

    def close(self) -> None:
        """End all connections; those that have their answer may still read it."""
        for connection in (*self.present.values(), *self._silent, self._server):
            connection.close()
        self._selector.close()

    def _welcome(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as failure:  # it has gone again, or there are too many open files for now
            if failure.errno in (errno.EMFILE, errno.ENFILE):
                self._no_file = f"{failure.strerror}; raise ulimit -n or fs.file-max"
            time.sleep(0.01)
            return
        connection.setblocking(False)
        self._silent[connection] = time.monotonic() + _LINE_S, b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:
            return  # closed while what was ready before it was heard
        part = b""
        with contextlib.suppress(OSError):
            part = connection.recv(_LINE_BYTES)
        index = next((i for i, known in self.present.items() if known is connection), None)
        if index is not None:  # it has ended, or will come again
            self._forget(self.present.pop(index))
            return
        until, line = self._silent[connection]
        line += part
        if part and b"\n" not in line and len(line) < _LINE_BYTES:
            self._silent[connection] = until, line
            return
        said = _LINE.fullmatch(line)
        if said is None:
            self._turn_away(connection, "another program")
            return
        proof, index, count = said[1], int(said[2]), int(said[3])
        if not hmac.compare_digest(proof, _proof(self._plan, said[2].decode())):
            self._turn_away(connection, "a process of another job (its token differs)")
        elif count != self._plan.num_processes or not 0 < index < count:
            self._turn_away(connection, f"process {index} of {count}")
        else:
            del self._silent[connection]
            if index in self.present:  # it had given up and was started again
                self._forget(self.present[index])
            self.present[index] = connection
            self._hosts[index] = said[4].decode()

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError):
            self._turned_away[f"{connection.getpeername()[0]}: {why}"] += 1
        del self._silent[connection]
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _service_address(plan: JoinPlan, connections: Iterable[socket.socket]) -> str:
    """The one address of this host that all processes use, this one too; else all addresses."""
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
        "jax's coordinator listens on all addresses of this host: the processes came by %s, and "
        "%s means %s here",
        ", ".join(sorted(used)),
        host,
        ", ".join(sorted(own)) or "nothing",
    )
    return f"[::]:{port}"


# --- the others -----------------------------------------------------------------------------------


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
                # Process 0's own time may end a little after ours: it knows who is missing.
                said = _ANSWER.fullmatch(_read_line(connection, until - time.monotonic() + _LINE_S))
        except OSError as failure:
            why = str(failure)
        else:
            if said and hmac.compare_digest(said[1], _proof(plan, "0")):
                if said[2]:
                    raise RendezvousError(said[2].decode(errors="replace"))
                _wait_for_service(host, port, plan, max(until, time.monotonic() + _SERVICE_S))
                return
            stranger = "what answered there is not process 0 of this job (same token, same size)"
        time.sleep(_RETRY_S)
    _unreachable(plan, timeout_s, stranger or why)


def _wait_for_service(host: str, port: int, plan: JoinPlan, until: float) -> None:
    """Wait until jax's service listens; jax itself would abort without a Python error."""
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
    """One line, at most `_LINE_BYTES`; cut short where the other side ends or time is up."""
    until = time.monotonic() + timeout_s
    data = b""
    with contextlib.suppress(OSError):
        while b"\n" not in data and len(data) < _LINE_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))
            part = connection.recv(_LINE_BYTES)
            if not part:
                break
            data += part
    return data
