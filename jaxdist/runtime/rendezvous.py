"""Before jax connects the processes: process 0 waits for all of them, or says who is missing.

jax's own coordinator aborts every process in C++ when one of them does not come in time: no Python
error, no name. Where another program holds the port, the others wait for it in vain. So the port
first serves a check-in over plain TCP. Each process sends one line with its process id and host.
When the last one has come, process 0 closes the port, answers all of them, and jax takes the port.

A process that is early, or that meets process 0 of an earlier attempt, tries again until its time
is up.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any, NoReturn

from jaxdist.runtime.cluster_environment import JoinPlan, is_loopback
from jaxdist.runtime.formatting.tables import few

_RETRY_S = 0.1
_LINE_S = 5.0  # for one short line, once the connection stands
_SERVICE_S = 30.0  # at least, for jax's service to listen once all are there
_LINE_BYTES = 4096
_NAMED = 8  # missing processes that a message lists


class RendezvousError(RuntimeError):
    """The processes of a job have not met; the next attempt may succeed."""

    advice = (
        "see the logs of the processes named: they may have failed or been stopped before. A "
        "firewall, a cut link or a wrong address keeps hosts apart too; a taken port may be an "
        "earlier attempt that is still ending"
    )


def wait_for_all(plan: JoinPlan, timeout_s: float) -> None:
    """Return in every process once all have checked in at the coordinator's address.

    The port is free again then, for jax's service.

    Raises:
        RendezvousError: the port is taken, process 0 is not there, or others are missing: named.
    """
    host, port = plan.coordinator_address.rsplit(":", 1)
    host, until = host.strip("[]"), time.monotonic() + timeout_s
    if plan.process_id == 0:
        _accept_all(_listen(host, int(port)), plan, until, timeout_s)
    else:
        _check_in(host, int(port), plan, until, timeout_s)


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


def _accept_all(server: socket.socket, plan: JoinPlan, until: float, timeout_s: float) -> None:
    present: dict[int, socket.socket] = {}
    hosts = {0: socket.gethostname()}
    try:
        while time.monotonic() < until:
            _drop_departed(present)  # before they are counted
            if len(present) == plan.num_processes - 1:
                break
            server.settimeout(max(0.01, min(1.0, until - time.monotonic())))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            said = _read_line(connection)
            index = said.get("process")
            if said.get("of") != plan.num_processes or not isinstance(index, int):
                connection.close()  # not of this job
                continue
            if index in present:  # it had given up and was started again
                present.pop(index).close()
            present[index] = connection
            hosts[index] = str(said.get("host"))
        # Closed before the answer: whoever has read it may find only jax's service there.
        server.close()
        missing = [i for i in range(1, plan.num_processes) if i not in present]
        words = _missing_text(plan, missing, hosts, timeout_s) if missing else ""
        for connection in present.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"missing": words}).encode() + b"\n")
    finally:
        server.close()
        for connection in present.values():
            connection.close()
    if words:
        raise RendezvousError(words)


def _drop_departed(present: dict[int, socket.socket]) -> None:
    """Forget processes whose connection has ended: they have ended, or will come again."""
    for connection in select.select(list(present.values()), [], [], 0)[0]:
        index = next(i for i, known in present.items() if known is connection)
        present.pop(index).close()


def _missing_text(
    plan: JoinPlan, missing: list[int], hosts: dict[int, str], timeout_s: float
) -> str:
    names = few(list(map(str, missing)), _NAMED)
    there = few([f"{i} on {host}" for i, host in hosts.items()], _NAMED)
    return (
        f"process {names} of {plan.num_processes} has not joined at {plan.coordinator_address} "
        f"within {timeout_s:.0f} s (runtime.join_timeout_s); there: {there}"
    )


# --- the others -----------------------------------------------------------------------------------


def _check_in(host: str, port: int, plan: JoinPlan, until: float, timeout_s: float) -> None:
    line = {"process": plan.process_id, "of": plan.num_processes, "host": socket.gethostname()}
    why = ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=_LINE_S) as connection:
                connection.sendall(json.dumps(line).encode() + b"\n")
                # Process 0's own time may end a little after ours: it knows who is missing.
                said = _read_line(connection, until - time.monotonic() + _LINE_S)
        except OSError as failure:
            why = str(failure)
        else:
            if "missing" in said:
                if said["missing"]:
                    raise RendezvousError(said["missing"])
                _wait_for_service(host, port, plan, max(until, time.monotonic() + _SERVICE_S))
                return
            why = "what answers there is not process 0 of this job, or it ended"
        time.sleep(_RETRY_S)
    _unreachable(plan, timeout_s, why)


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


def _read_line(connection: socket.socket, timeout_s: float = _LINE_S) -> dict[str, Any]:
    """One line of JSON; {} when there is none, or something else."""
    until = time.monotonic() + timeout_s
    data = b""
    with contextlib.suppress(OSError, ValueError):
        while not data.endswith(b"\n") and len(data) < _LINE_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))
            part = connection.recv(_LINE_BYTES)
            if not part:
                break
            data += part
        said = json.loads(data)
        return said if isinstance(said, dict) else {}
    return {}
