"""The check-in before a job is joined: all processes arrive, or the missing ones are reported."""

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from commands import free_port
from refusals import missing

from jaxdist import runtime
from jaxdist.runtime import entry_point, rendezvous
from jaxdist.runtime.cluster_environment import JoinPlan
from jaxdist.runtime.rendezvous import RendezvousError, wait_for_all
from jaxdist.settings import ConfigError


class Job:
    """Processes of a job as threads; process 0 acts as jax's service once it owns the port."""

    def __init__(self, count: int, timeout_s: float = 20.0, token: str = "a"):
        address = f"127.0.0.1:{free_port()}"
        self.plan = JoinPlan(num_processes=count, coordinator_address=address, token=token)
        self.timeout_s = timeout_s
        self.ended: dict[int, str] = {}
        self.threads: list[threading.Thread] = []
        self.services: list[socket.socket] = []

    def start(self, *indices: int) -> None:
        for index in indices:
            self.threads.append(threading.Thread(target=self.come, args=(index,), daemon=True))
            self.threads[-1].start()

    def come(self, index: int) -> None:
        plan = dataclasses.replace(self.plan, process_id=index)
        try:
            wait_for_all(plan, self.timeout_s)
            if index == 0:
                self.services.append(socket.create_server(self.address))
            self.ended[index] = ""
        except RendezvousError as error:
            self.ended[index] = str(error)

    def line(self, index: object, of: object = None, token: str = "a") -> bytes:
        proof = rendezvous._proof(dataclasses.replace(self.plan, token=token), str(index))
        return b"jaxdist %b %b %b host\n" % (
            proof, str(index).encode(), str(of or self.plan.num_processes).encode(),
        )  # fmt: skip

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.plan.coordinator_address.rsplit(":", 1)
        return host, int(port)

    def end(self) -> dict[int, str]:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        for service in self.services:
            service.close()
        return self.ended


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_processes_join_in_any_order_and_the_port_is_free_afterwards(order):
    job = Job(4)
    for index in order:
        job.start(index)
        time.sleep(0.05)
    assert job.end() == dict.fromkeys(range(4), "")


def test_missing_processes_are_reported_to_all_that_joined():
    job = Job(5, timeout_s=1.0)
    job.start(0, 2, 3)
    messages = job.end()
    host = socket.gethostname()
    assert set(messages) == {0, 2, 3} and len(set(messages.values())) == 1
    facts = "process 1, 4 of 5", job.plan.coordinator_address, "1 s (runtime.join_timeout_s)"
    assert missing(messages[0], *facts, f"0 on {host}", f"3 on {host}") == []


@pytest.fixture
def few_files():
    """Limit this process to 40 more open files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_command_raises_its_soft_limit_and_a_larger_job_joins(few_files, monkeypatch):
    monkeypatch.setattr(entry_point, "_exit", lambda code, line: None)
    runtime.run_command(lambda: 0)
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK):
        soft, hard = resource.getrlimit(limit)
        assert soft == hard or soft == 1 << 20
    job = Job(40)
    job.start(*range(40))
    assert job.end() == dict.fromkeys(range(40), "")


def test_too_low_open_file_limit_is_reported(few_files):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ConfigError) as error:
        wait_for_all(Job(60).plan, 1.0)
    facts = "of 60", f"open {few_files} files", "RLIMIT_NOFILE", f"hard limit {hard}"
    assert missing(str(error.value), *facts) == []
    assert "joined" not in str(error.value)


def test_connection_without_a_free_descriptor_is_reported(monkeypatch):
    def no_file(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", no_file)
    job = Job(2, timeout_s=0.5)
    job.start(0)
    time.sleep(0.2)
    with socket.create_connection(job.address):
        assert missing(job.end()[0], os.strerror(errno.EMFILE), "ulimit -n") == []


def test_other_processes_report_a_missing_process_0():
    job = Job(2, timeout_s=0.5)
    job.start(1)
    text = job.end()[1]
    facts = "process 1", f"{job.plan.coordinator_address} (process 0)"
    assert missing(text, *facts, os.strerror(errno.ECONNREFUSED)) == []


def test_taken_port_is_reported_and_its_owner_is_not_trusted():
    job = Job(2, timeout_s=1.0)
    with socket.create_server(job.address) as stranger:
        job.start(0, 1)
        messages = job.end()
        stranger.close()
    where = f"port {job.address[1]} on {socket.gethostname()}"
    assert missing(messages[0], where, os.strerror(errno.EADDRINUSE)) == []
    assert missing(messages[1], "process 1", f"{job.plan.coordinator_address} (process 0)") == []


def test_strangers_and_disconnected_processes_are_not_counted():
    job = Job(3)
    job.start(0)
    time.sleep(0.1)
    words = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 4000 + b"\n",
        b"x" * 100_000,
        b"\xff\x00\n",
        job.line(2, of=8),
        job.line(2, token="b"),  # of another job
        job.line(-1),
        job.line(0),
        job.line(3),
        job.line(10**30),
        job.line(2)[:-9] + b"\n",
        job.line(2).replace(b" 2 ", b" 1 "),  # the proof of another process
        job.line(2),  # ends before the others come
    ]
    for line in words:
        with socket.create_connection(job.address) as visitor:
            visitor.sendall(line)
            with contextlib.suppress(OSError):  # already rejected
                visitor.shutdown(socket.SHUT_WR)
            time.sleep(0.05)
    job.start(1)
    time.sleep(0.5)
    assert job.ended == {}
    job.start(2)
    assert job.end() == {0: "", 1: "", 2: ""}


def test_restarted_process_keeps_its_index():
    job = Job(3)
    job.start(0)
    time.sleep(0.1)
    first = socket.create_connection(job.address)
    first.sendall(job.line(1))
    time.sleep(0.2)
    first.close()
    time.sleep(0.2)
    job.start(1, 2)
    assert job.end() == {0: "", 1: "", 2: ""}


def test_silent_connections_do_not_delay_the_join():
    job = Job(3)
    job.start(0)
    time.sleep(0.1)
    silent = [socket.create_connection(job.address) for _ in range(200)]
    silent[0].sendall(b"jaxdist")
    began = time.monotonic()
    job.start(1, 2)
    assert job.end() == {0: "", 1: "", 2: ""}
    assert time.monotonic() - began < 4  # waiting for one would cost 5 s
    for connection in silent:
        connection.close()


def test_overdue_and_excess_connections_are_closed_once():
    job = Job(2)
    with socket.create_server(job.address) as server:
        check_in = rendezvous._CheckInServer(server, job.plan)
        silent = [socket.create_connection(job.address) for _ in range(rendezvous._SILENT + 2)]
        while len(check_in._silent) < len(silent):
            check_in._accept()
        # The oldest are overdue, and more connections wait than allowed.
        for connection in list(check_in._silent)[:3]:
            check_in._silent[connection] = (0.0, b"")
        check_in.serve(0.0)
        assert len(check_in._silent) == len(silent) - 3
        check_in.close()
    for connection in silent:
        connection.close()


def test_two_jobs_on_one_port_do_not_mix():
    first_job, second_job = Job(2, timeout_s=1.5), Job(2, timeout_s=1.5, token="b")
    second_job.plan = dataclasses.replace(
        second_job.plan, coordinator_address=first_job.plan.coordinator_address
    )
    first_job.start(0)
    time.sleep(0.1)
    second_job.start(1)
    assert missing(second_job.end()[1], "not answer as process 0", "token") == []
    assert missing(first_job.end()[0], "rejected", "127.0.0.1", "token") == []


def test_response_without_the_token_is_rejected():
    job = Job(2, timeout_s=1.0)
    with socket.create_server(job.address) as stranger:

        def answer():
            while True:
                try:
                    connection, _ = stranger.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"jaxdist " + b"0" * 64 + b" \n")

        threading.Thread(target=answer, daemon=True).start()
        job.start(1)
        assert missing(job.end()[1], "not answer as process 0", "token") == []
        stranger.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("early", [True, False])
def test_stop_request_ends_the_wait_immediately(process, early, capsys):
    handlers = {number: signal.getsignal(number) for number in runtime.NOTICES}
    plan = dataclasses.replace(Job(2).plan, process_id=process)
    try:
        stop = runtime.Preemption()
        kill = lambda: os.kill(os.getpid(), signal.SIGTERM)
        if early:
            kill()
        threading.Timer(0 if early else 0.3, kill).start()
        began = time.monotonic()
        with pytest.raises(SystemExit) as left, stop.at_once():
            wait_for_all(plan, 30.0)
        assert left.value.code == runtime.EXIT_PREEMPTED
        assert time.monotonic() - began < 1.3
        time.sleep(0.1)  # the second signal arrives while nothing waits, and ends nothing
        assert len(capsys.readouterr().err.splitlines()) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("came_by", "own", "expected"),
    {
        "one address": (["::ffff:10.0.0.7", "::ffff:10.0.0.7"], ["10.0.0.7"], "10.0.0.7:4000"),
        "IPv6": (["fd00::7"], ["fd00::7", "10.0.0.7"], "[fd00::7]:4000"),
        "two networks": (["10.0.0.7", "192.168.1.7"], ["10.0.0.7"], "[::]:4000"),
        "its own name is loopback": (["10.0.0.7"], ["127.0.1.1"], "[::]:4000"),
    }.values(),
)
def test_jax_service_listens_on_the_address_of_the_check_in(
    came_by, own, expected, monkeypatch, propagating, caplog
):
    entries = [(None, None, None, "", (address, 0)) for address in own]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: entries)
    connections = [SimpleNamespace(getsockname=lambda a=a: (a, 1, 0, 0)) for a in came_by]
    plan = JoinPlan(num_processes=3, coordinator_address="node0:4000")
    assert rendezvous._service_address(plan, connections) == expected
    assert len(caplog.records) == (expected == "[::]:4000")


def test_jax_service_listens_only_on_loopback_for_one_host():
    assert rendezvous._service_address(Job(2).plan, []).startswith("127.0.0.1:")
