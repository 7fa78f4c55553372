"""The check-in before a job is joined: all processes come, or the missing ones are named."""

import dataclasses
import json
import socket
import threading
import time

import pytest

from jaxdist.runtime.cluster_environment import JoinPlan
from jaxdist.runtime.rendezvous import RendezvousError, wait_for_all


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """Processes of a job as threads; process 0 plays jax's service once the port is its own."""

    def __init__(self, count: int, timeout_s: float = 20.0):
        self.plan = JoinPlan(num_processes=count, coordinator_address=f"127.0.0.1:{free_port()}")
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
    assert "process 1, 4 of 5 has not joined at" in said[0]
    assert "within 1 s (runtime.join_timeout_s)" in said[0]
    assert f"0 on {host}" in said[0] and f"3 on {host}" in said[0]


def test_without_process_0_the_others_say_so():
    job = Job(2, timeout_s=0.5)
    job.start(1)
    text = job.end()[1]
    assert f"cannot reach the coordinator {job.plan.coordinator_address} (process 0)" in text
    assert "Connection refused" in text


def test_a_taken_port_is_named_and_the_others_are_not_fooled_by_who_has_it():
    job = Job(2, timeout_s=1.0)
    with socket.create_server(job.address) as stranger:
        job.start(0, 1)
        said = job.end()
        stranger.close()
    assert f"coordinator port {job.address[1]} on {socket.gethostname()} cannot be used" in said[0]
    assert "Address already in use" in said[0]
    assert "cannot reach the coordinator" in said[1]


def test_strangers_at_the_port_and_processes_that_leave_are_not_counted():
    job = Job(3)
    job.start(0)
    time.sleep(0.1)
    words = [
        b"GET / HTTP/1.1\r\n\r\n",
        json.dumps({"process": 2, "of": 8, "host": "of another job"}).encode() + b"\n",
        json.dumps({"process": 2, "of": 3, "host": "ends before the others come"}).encode() + b"\n",
    ]
    for line in words:
        with socket.create_connection(job.address) as visitor:
            visitor.sendall(line)
            visitor.shutdown(socket.SHUT_WR)
            time.sleep(0.2)
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
    first.sendall(json.dumps({"process": 1, "of": 3, "host": "x"}).encode() + b"\n")
    time.sleep(0.2)
    first.close()
    time.sleep(0.2)
    job.start(1, 2)
    assert job.end() == {0: "", 1: "", 2: ""}
