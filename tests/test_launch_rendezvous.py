"""Rendezvous of launchers without training: lost hosts, waiting, leaders and ends."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from refusals import missing, refused
from test_launch_elastic import a_plan

from jaxdist.tools.launch import rendezvous
from jaxdist.tools.launch import resources as host_module
from jaxdist.tools.launch.elastic_agent import ElasticAgent
from jaxdist.tools.launch.membership import ElasticConfig, LegalSizes
from jaxdist.tools.launch.rendezvous import Rendezvous, Round
from jaxdist.tools.launch.worker_group import GroupResult

LOST_S, JOIN_S = 15.0, 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeGroup:
    """Stand-in for a process group, with the operations that `watch` uses."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.cause = ""

    def request_stop(self) -> None:
        self.is_stopping = True

    def abort(self, cause: str) -> None:
        self.cause = cause


class Participant:
    """Launcher that runs step by step: it polls while it waits and watches while it runs."""

    def __init__(self, world: "World", rank: int):
        self.world, self.rank, self.lines = world, rank, []
        rendezvous = Rendezvous(
            world.folder, rank, f"n{rank}", heartbeat_timeout_s=LOST_S, clock=world.clock
        )
        self.agent = ElasticAgent(
            world.plan,
            rendezvous,
            world.sizes,
            stop_reaches_all=world.trains,
            write=self.lines.append,
        )
        rendezvous.read_hosts()
        self.group: FakeGroup | None = None
        self.code: int | None = None
        self.rounds: list[Round] = []
        self.causes: list[str] = []
        self.agent.offer_host()

    def step(self) -> None:
        self.agent.rendezvous.publish()  # as the heartbeat thread does
        if self.group is not None:
            self.agent.watch(self.group)
            if self.group.cause:
                self.causes.append(self.group.cause)
                self.ends(1)
            return
        if self.code is not None:
            return
        outcome = self.agent.poll()
        if isinstance(outcome, Round):
            self.placement = self.agent.join_round(outcome)
            self.rounds.append(outcome)
            self.group = FakeGroup()
        elif outcome is not None:
            self.code = outcome
            self.agent.close(outcome, 0)

    def ends(self, code: int) -> None:
        """End its processes and continue as the supervisor would after a failure or a save."""
        cause = self.group.cause
        self.group = None
        self.agent.on_group_end(GroupResult(exit_code=code, attempt=0, cause=cause))
        if code:
            self.agent.offer_host()

    @property
    def ranks(self) -> list[int]:
        return [host.rank for host in self.rounds[-1].members]

    @property
    def is_running(self) -> bool:
        return self.group is not None


class World:
    """Directory, clock and live launchers."""

    def __init__(self, folder: Path, plan: ElasticConfig, sizes: LegalSizes):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan, self.sizes, self.trains = folder, plan, sizes, True
        self.clock = Clock()
        self.living: dict[int, Participant] = {}

    def start(self, rank: int) -> Participant:
        self.living[rank] = Participant(self, rank)
        return self.living[rank]

    def kill(self, rank: int) -> None:
        del self.living[rank]

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for participant in list(self.living.values()):
                participant.step()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "count_gpus", lambda: 0)
    sizes = LegalSizes(legal=[1, 2, 3, 4], simulate=1)
    return World(tmp_path / "launch", a_plan("1:1", "1:3", rdzv_timeout_s=JOIN_S), sizes)


def test_all_hosts_start_at_once(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    assert [h.ranks for h in hosts] == [[0, 1, 2]] * 3
    assert len({h.rounds[0].id for h in hosts}) == 1
    assert [h.placement.node_rank for h in hosts] == [0, 1, 2]
    assert {h.placement.coordinator_address for h in hosts} == {
        f"n0:{hosts[0].rounds[0].members[0].port}"
    }


def test_a_missing_host_is_awaited_only_until_the_timeout(world):
    hosts = [world.start(1), world.start(2)]
    world.run(JOIN_S - 2)
    assert not any(h.is_running for h in hosts)
    world.run(5)
    assert [h.ranks for h in hosts] == [[1, 2]] * 2
    assert any("(n2), 1 short of 3" in line for line in hosts[0].lines)


def test_the_leader_waits_for_a_host_that_still_counts_its_gpus(world):
    world.plan = a_plan("1:1", "1:2", rdzv_timeout_s=JOIN_S)
    early = world.start(0)
    late = Rendezvous(world.folder, 1, "n1", heartbeat_timeout_s=LOST_S, clock=world.clock)
    for _ in range(5):
        late.publish()  # as after its claim
        world.run(1)
    assert not early.is_running
    hosts = [early, world.start(1)]
    world.run(4)
    assert [h.ranks for h in hosts] == [[0, 1]] * 2
    assert len(early.rounds) == 1


def test_too_few_hosts_give_up_with_exit_code_75(world):
    world.plan = a_plan("1:1", "2:3", rdzv_timeout_s=JOIN_S)
    host = world.start(0)
    world.run(JOIN_S + 3)
    assert host.code == 75
    assert any(missing(line, "--nnodes 2:3", "n0") == [] for line in host.lines)


def test_stale_files_are_ignored(world, tmp_path):
    world.start(0), world.start(1), world.start(2)
    world.run(3)
    for rank in range(3):
        world.kill(rank)  # the files record that round 0 runs on 0, 1, 2
    world.clock.now += 1000
    host = world.start(1)
    world.run(3)
    assert not host.is_running  # waits for the others, which only seem to exist
    world.run(JOIN_S)
    assert host.ranks == [1] and host.rounds[-1].number == 1


def test_the_end_of_an_earlier_job_is_ignored(world):
    world.plan = a_plan("1:1", "1:1", rdzv_timeout_s=JOIN_S)
    first = world.start(0)
    world.run(2)
    first.ends(2)
    first.agent.close(2, 0)
    world.kill(0)
    again = world.start(0)
    world.run(2)
    assert again.is_running and again.code is None


def test_a_lost_host_is_detected_by_its_missing_heartbeat(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    world.kill(2)
    world.run(LOST_S - 2)
    assert all(h.is_running and not h.group.cause for h in hosts[:2])
    world.run(5)
    assert not any(h.is_running for h in hosts[:2])
    for h in hosts[:2]:
        (cause,) = h.causes
        assert missing(cause, "host 2 (n2) is lost", "15 s") == []
    world.run(JOIN_S + 3)
    assert [h.ranks for h in hosts[:2]] == [[0, 1]] * 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_returning_host_joins_without_a_failure(world, rank):
    hosts = {r: world.start(r) for r in range(3)}
    world.run(4)
    world.kill(rank)
    world.run(LOST_S + JOIN_S + 6)
    others = [hosts[r] for r in range(3) if r != rank]
    assert all(h.is_running and rank not in h.ranks for h in others)
    assert others[0].placement.node_rank == 0
    address = others[0].placement.coordinator_address
    assert address.startswith(f"n{others[0].rank}:") and len(address) > 3
    hosts[rank] = world.start(rank)
    world.run(4)
    # The processes of one host get the request; they forward it to the others.
    assert [h.group.is_stopping for h in others] == [True, False]
    for h in others:
        h.ends(75)
        assert h.agent.continues_after_save()
    world.run(4)
    assert [h.ranks for h in hosts.values()] == [[0, 1, 2]] * 3


def test_processes_that_do_not_forward_a_stop_request_all_receive_it(world):
    world.trains = False
    hosts = [world.start(rank) for rank in (0, 1)]
    world.run(JOIN_S + 3)
    world.start(2)
    world.run(4)
    assert all(h.group.is_stopping for h in hosts)


def test_a_surplus_host_waits_as_a_spare_and_ends_with_the_job(world):
    world.sizes = LegalSizes(legal=[1, 2], simulate=1)
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    assert [h.is_running for h in hosts] == [True, True, False]
    assert any("a spare" in line for line in hosts[2].lines)
    world.run(JOIN_S * 3)
    assert hosts[2].code is None and len(hosts[0].rounds) == 1
    for h in hosts[:2]:
        h.ends(0)
        h.agent.close(0, 0)
    world.run(2)
    assert hosts[2].code == 0


@pytest.mark.parametrize("code", [2, 85, 87, 1])
def test_a_final_failure_ends_spares_and_members(world, code):
    world.sizes = LegalSizes(legal=[1, 2], simulate=1)
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[0].ends(code)
    hosts[0].agent.close(code, 0)
    world.kill(0)
    hosts[1].ends(1)
    world.run(3)
    assert [h.code for h in hosts[1:]] == [code, code]


def test_a_host_with_a_stop_request_is_not_awaited(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[2].group.request_stop()
    world.run(2)
    assert hosts[2].agent.rendezvous.own.state == "leaving"
    for h in hosts:
        h.ends(75)
    hosts[2].agent.close(75, int(signal.SIGTERM))
    world.kill(2)
    assert all(h.agent.continues_after_save() for h in hosts[:2])
    world.run(JOIN_S + 3)
    assert [h.ranks for h in hosts[:2]] == [[0, 1]] * 2


def test_a_host_that_finishes_after_a_stop_request_has_done_its_part(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[2].group.request_stop()  # in the last step: its processes finish instead of leaving
    world.run(2)
    for h in hosts:
        h.ends(0)
    hosts[2].agent.close(0, int(signal.SIGTERM))
    world.kill(2)
    clock = iter([0, 16, 32])  # the heartbeat of host 2 is lost after the first read
    no_stop = lambda: setattr(world.clock, "now", world.clock.now + next(clock)) or 0
    assert all(h.agent.all_hosts_done(no_stop) for h in hosts[:2])


def test_a_failed_member_ends_the_round_after_the_timeout(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[1].ends(1)
    hosts[1].agent.offer_host()
    world.run(5)
    assert not hosts[0].causes
    assert not any("a spare" in line for line in hosts[1].lines)
    world.run(LOST_S)
    (cause,) = hosts[0].causes
    assert missing(cause, "host 1 (n1)", "ended") == []


def test_the_job_is_done_after_all_members_are(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[0].ends(0)
    hosts[1].ends(0)
    hosts[2].ends(1)
    never = lambda: 0
    assert not hosts[0].agent.all_hosts_done(never)
    for h in hosts[:2]:
        h.agent.offer_host()
    world.run(4)
    assert all(h.is_running for h in hosts)
    for h in hosts:
        h.ends(0)
    world.clock.now += 1
    for h in hosts:
        h.agent.rendezvous.publish()
    assert all(h.agent.all_hosts_done(never) for h in hosts)


def test_returning_gpus_make_the_next_round_larger(tmp_path, monkeypatch):
    program, listing = tmp_path / "nvidia-smi", tmp_path / "gpus"
    program.write_text(f"#!/bin/sh\ncat {listing}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def see(count):
        lines = [f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\n" for i in range(count)]
        listing.write_text("".join(lines))

    see(8)
    plan = a_plan("1:8", "1:1", grow_interval_s=60.0)
    world = World(tmp_path / "launch", plan, LegalSizes(legal=[4, 8]))
    host = world.start(0)
    world.run(2)
    assert (host.placement.nproc_per_node, host.placement.visible_gpus) == (8, "")
    see(7)
    host.ends(1)
    world.run(2)
    assert (host.placement.nproc_per_node, host.placement.visible_gpus) == (4, "0,1,2,3")
    see(8)
    world.run(50)
    assert not host.group.is_stopping
    world.run(15)
    assert host.group.is_stopping
    host.ends(75)
    assert host.agent.continues_after_save()
    world.run(2)
    assert host.placement.nproc_per_node == 8
    see(0)  # a failing driver must not look like a CPU machine
    host.ends(1)
    world.run(JOIN_S + 3)
    assert host.code == 75


def test_a_save_of_a_single_host_without_a_stop_request_ends_the_launch(world):
    world.plan = a_plan("1:1", "1:1")
    host = world.start(0)
    world.run(2)
    host.ends(75)
    assert not host.agent.continues_after_save()


def test_a_live_launcher_of_the_same_rank_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.1)
    first = Rendezvous(tmp_path, 1, "n1", heartbeat_timeout_s=3)
    assert first.claim_rank() is None
    second = Rendezvous(tmp_path, 1, "n2", heartbeat_timeout_s=3)
    agent = ElasticAgent(a_plan(), second, LegalSizes(), stop_reaches_all=True)
    with refused("--node-rank 1", "n1"):
        agent.next_placement(lambda: 0)
    first.stop_heartbeat()
    time.sleep(0.3)
    assert Rendezvous(tmp_path, 1, "n2", heartbeat_timeout_s=3).claim_rank() is None


@pytest.fixture
def make_large(tmp_path, monkeypatch):
    """Return a builder of a running job of `count` hosts, and the number of files read so far.

    A host reads 8 files of others at a time instead of 32, as if the job had four times the hosts.
    """
    monkeypatch.setattr(rendezvous, "READS", 8)
    monkeypatch.setattr(host_module, "count_gpus", lambda: 0)
    reads, read_json = [0], rendezvous._read_json

    def counted(path):
        reads[0] += 1
        return read_json(path)

    def make(count: int) -> World:
        sizes = LegalSizes(legal=range(1, count + 1), simulate=1)
        world = World(tmp_path / str(count), a_plan("1:1", f"1:{count}"), sizes)
        for rank in range(count):
            world.start(rank)
        world.run(5)
        assert all(len(host.ranks) == count for host in world.living.values())
        return world

    monkeypatch.setattr(rendezvous, "_read_json", counted)
    return make, reads


def test_file_reads_of_a_job_grow_with_its_hosts(make_large):
    make, reads = make_large
    per_second = []
    for count in (32, 64, 128):
        world = make(count)
        before = reads[0]
        world.run(4)
        per_second.append((reads[0] - before) / 4)
    exponent = np.polyfit(np.log([32, 64, 128]), np.log(per_second), 1)[0]
    assert exponent <= 1.1 and per_second[-1] <= 128 * (8 + 3), per_second


@pytest.mark.parametrize("lost", [0, 50])
def test_loss_in_a_large_job_reaches_every_host_within_three_seconds(make_large, lost):
    """A host reads the file of another one every 64 / 8 seconds, the leader every second."""
    world = make_large[0](64)
    world.kill(lost)
    others = list(world.living.values())
    world.run(LOST_S - 2)
    assert all(host.is_running and not host.causes for host in others)
    world.run(5)
    for host in others:
        (cause,) = host.causes
        assert missing(cause, f"host {lost} (n{lost}) is lost") == []
    world.run(JOIN_S + 3)
    members = [rank for rank in range(64) if rank != lost]
    assert all(host.ranks == members for host in others)


def test_damaged_files_are_ignored(tmp_path):
    (tmp_path / "host-3.json").write_text('{"rank": 3, "uu')
    (tmp_path / "host-4.json").write_text("[]")
    (tmp_path / "round.json").write_text('{"id": "a", "number": 0}')
    (tmp_path / "members.json").write_text('{"id": "b", "members": []}')
    one = Rendezvous(tmp_path, 0, "n0", heartbeat_timeout_s=3)
    assert list(one.read_hosts()) == [0]
    assert one.read_round() is None
