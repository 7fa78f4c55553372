"""The check-in before a job is joined: all processes come, or the missing ones are named."""

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
    """Processes of a job as threads; process 0 plays jax's service once the port is its own."""

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
        """What process `index` says when it comes."""
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
def test_all_come_in_any_order_and_the_port_is_free_afterwards(order):
    job = Job(4)
    for index in order:
        job.start(index)
        time.sleep(0.05)
    assert job.end() == dict.fromkeys(range(4), "")


def test_who_is_missing_is_named_to_all_that_came():
    job = Job(5, timeout_s=1.0)
    job.start(0, 2, 3)
    said = job.end()
    host = socket.gethostname()
    assert set(said) == {0, 2, 3} and len(set(said.values())) == 1
    facts = "process 1, 4 of 5", job.plan.coordinator_address, "1 s (runtime.join_timeout_s)"
    assert missing(said[0], *facts, f"0 on {host}", f"3 on {host}") == []


@pytest.fixture
def few_files():
    """Leave this process 40 more open files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_command_raises_its_soft_limits_and_a_larger_job_joins(few_files, monkeypatch):
    monkeypatch.setattr(entry_point, "_exit", lambda code, line: None)
    runtime.run_command(lambda: 0)
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK):
        soft, hard = resource.getrlimit(limit)
        assert soft == hard or soft == 1 << 20
    job = Job(40)
    job.start(*range(40))
    assert job.end() == dict.fromkeys(range(40), "")


def test_a_limit_of_open_files_that_is_too_low_is_named(few_files):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ConfigError) as error:
        wait_for_all(Job(60).plan, 1.0)
    facts = "of 60", f"open {few_files} files", "RLIMIT_NOFILE", f"hard limit {hard}"
    assert missing(str(error.value), *facts) == []
    assert "joined" not in str(error.value)


def test_a_connection_without_a_free_file_is_named(monkeypatch):
    def no_file(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", no_file)
    job = Job(2, timeout_s=0.5)
    job.start(0)
    time.sleep(0.2)
    with socket.create_connection(job.address):
        assert missing(job.end()[0], os.strerror(errno.EMFILE), "ulimit -n") == []


def test_without_process_0_the_others_say_so():
    job = Job(2, timeout_s=0.5)
    job.start(1)
    text = job.end()[1]
    facts = "process 1", f"{job.plan.coordinator_address} (process 0)"
    assert missing(text, *facts, os.strerror(errno.ECONNREFUSED)) == []


def test_a_taken_port_is_named_and_the_others_are_not_fooled_by_who_has_it():
    job = Job(2, timeout_s=1.0)
    with socket.create_server(job.address) as stranger:
        job.start(0, 1)
        said = job.end()
        stranger.close()
    where = f"port {job.address[1]} on {socket.gethostname()}"
    assert missing(said[0], where, os.strerror(errno.EADDRINUSE)) == []
    assert missing(said[1], "process 1", f"{job.plan.coordinator_address} (process 0)") == []


def test_strangers_at_the_port_and_processes_that_leave_are_not_counted():
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
            with contextlib.suppress(OSError):  # turned away already
                visitor.shutdown(socket.SHUT_WR)
            time.sleep(0.05)
    job.start(1)
    time.sleep(0.5)
    assert job.ended == {}
    job.start(2)
    assert job.end() == {0: "", 1: "", 2: ""}


def test_a_process_that_starts_again_takes_its_own_place():
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


def test_silent_connections_delay_nobody():
    job = Job(3)
    job.start(0)
    time.sleep(0.1)
    silent = [socket.create_connection(job.address) for _ in range(200)]
    silent[0].sendall(b"jaxdist")
    began = time.monotonic()
    job.start(1, 2)
    assert job.end() == {0: "", 1: "", 2: ""}
    assert time.monotonic() - began < 4  # one that is waited for costs 5 s
    for connection in silent:
        connection.close()


def test_a_connection_that_is_overdue_and_one_too_many_is_closed_once():
    job = Job(2)
    with socket.create_server(job.address) as server:
        check_in = rendezvous._CheckInServer(server, job.plan)
        silent = [socket.create_connection(job.address) for _ in range(rendezvous._SILENT + 2)]
        while len(check_in._silent) < len(silent):
            check_in._accept()
        # The oldest are overdue, and more wait than may.
        for connection in list(check_in._silent)[:3]:
            check_in._silent[connection] = (0.0, b"")
        check_in.serve(0.0)
        assert len(check_in._silent) == len(silent) - 3
        check_in.close()
    for connection in silent:
        connection.close()


def test_two_jobs_on_one_port_do_not_mix():
    ours, theirs = Job(2, timeout_s=1.5), Job(2, timeout_s=1.5, token="b")
    theirs.plan = dataclasses.replace(
        theirs.plan, coordinator_address=ours.plan.coordinator_address
    )
    ours.start(0)
    time.sleep(0.1)
    theirs.start(1)
    assert missing(theirs.end()[1], "not process 0", "token") == []
    assert missing(ours.end()[0], "rejected", "127.0.0.1", "token") == []


def test_an_answer_without_the_token_is_not_believed():
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
        assert missing(job.end()[1], "not process 0", "token") == []
        stranger.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("early", [True, False])
def test_a_request_to_stop_ends_the_wait_at_once(process, early, capsys):
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
        time.sleep(0.1)  # the second notice comes while nothing waits, and ends nothing
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
def test_jaxs_service_listens_where_all_processes_come(
    came_by, own, expected, monkeypatch, propagating, caplog
):
    entries = [(None, None, None, "", (address, 0)) for address in own]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: entries)
    connections = [SimpleNamespace(getsockname=lambda a=a: (a, 1, 0, 0)) for a in came_by]
    plan = JoinPlan(num_processes=3, coordinator_address="node0:4000")
    assert rendezvous._service_address(plan, connections) == expected
    assert len(caplog.records) == (expected == "[::]:4000")


def test_on_one_host_jaxs_service_listens_on_loopback_alone():
    assert rendezvous._service_address(Job(2).plan, []).startswith("127.0.0.1:")
