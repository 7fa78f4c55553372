"""Elastic launches without training: who is chosen, who is lost, who waits, who leads, who ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import Launched

from jaxdist.launch import host as host_module
from jaxdist.launch import rendezvous
from jaxdist.launch.attempt import Outcome
from jaxdist.launch.elastic import ElasticPlan, Range, Sizes, choose, impossible
from jaxdist.launch.local import read_plan
from jaxdist.launch.rendezvous import Host, Rendezvous, Round
from jaxdist.launch.rounds import ElasticPlaces
from jaxdist.launch.sizing import read_sizes

ROOT = Path(__file__).parent.parent
LOST_S, JOIN_S = 15.0, 30.0


# --- the choice -----------------------------------------------------------------------------------


def a_host(rank: int, devices: int, nproc: int | None = None, gpus: bool = True) -> Host:
    nproc = devices if nproc is None else nproc
    return Host(
        rank=rank, uuid=f"u{rank}", address=f"n{rank}", nproc=nproc, devices=devices, gpus=gpus
    )


def a_plan(nproc: str = "1:8", nnodes: str = "1:4", **fields) -> ElasticPlan:
    ranges = {"nproc": Range.parse("nproc", nproc), "nnodes": Range.parse("nnodes", nnodes)}
    return ElasticPlan(**{"address": "n", **ranges, **fields})


@pytest.mark.parametrize(
    ("gpus", "nproc", "nnodes", "legal", "expected"),
    [
        ([8, 8], "1:8", "1:2", [4, 8, 16], ([0, 1], 8, 1)),
        ([8, 7], "1:8", "1:2", [4, 8, 16], ([0], 8, 1)),  # 14 is not legal; one host beats two
        ([4, 4], "1:8", "1:2", [4], ([0], 4, 1)),  # among equals the fewest hosts
        ([4, 4, 4], "1:4", "2:3", [4, 8], ([0, 1], 4, 1)),
        ([4, 8, 8], "1:8", "1:3", [4, 8, 16], ([1, 2], 8, 1)),  # the small one is left out
        ([7], "1:8", "1:1", [2, 4, 8], ([0], 4, 1)),
        ([8, 8], "1:1", "1:2", [4, 8, 16], ([0, 1], 1, 8)),  # one process takes a host's GPUs
        ([6, 6], "1:1", "1:2", [4, 8, 16], ([0, 1], 1, 4)),  # and may be shown fewer
        ([7], "1:4", "1:1", [4, 6, 8], ([0], 3, 2)),  # 6 GPUs for 3 processes, not 4 for 4
        ([7], "1:4", "1:1", None, ([0], 4, 1)),  # of another program, the most processes
        ([7], "1:8", "1:1", None, ([0], 7, 1)),
        ([3], "4:8", "1:1", None, None),
        ([8], "1:8", "2:4", None, None),
        ([3], "1:8", "1:2", [4, 8], None),
    ],
)
def test_the_largest_legal_job_is_chosen(gpus, nproc, nnodes, legal, expected):
    hosts = [a_host(rank, count, min(count, int(nproc[-1]))) for rank, count in enumerate(gpus)]
    choice = choose(hosts, a_plan(nproc, nnodes), Sizes(legal=legal))
    if expected is None:
        assert choice is None
    else:
        assert ([h.rank for h in choice.hosts], choice.nproc, choice.devices) == expected


def test_a_host_that_has_lost_all_gpus_has_no_place_beside_one_with_some():
    hosts = [a_host(0, 8, gpus=False), a_host(1, 2)]
    choice = choose(hosts, a_plan(), Sizes())
    assert [h.rank for h in choice.hosts] == [1]


def test_simulated_devices_are_not_dealt_out():
    hosts = [a_host(0, 8, nproc=2, gpus=False)]  # two processes that simulate four each
    assert choose(hosts, a_plan("1:2"), Sizes(legal=[6], simulate=4)) is None
    choice = choose(hosts, a_plan("1:2"), Sizes(legal=[4, 6], simulate=4))
    assert (choice.nproc, choice.devices) == (1, 4)
    # One process may leave devices idle: training takes the first ones.
    choice = choose(hosts, a_plan("1:2"), Sizes(legal=[3, 6], simulate=4))
    assert (choice.nproc, choice.devices) == (1, 4)
    # It may not have more than the mesh names: training refuses that.
    assert choose(hosts, a_plan("1:1"), Sizes(legal=[1, 2], simulate=4)) is None


def test_ranges_that_never_make_a_legal_job_are_refused():
    plan = a_plan("3:3", "1:1")
    (line,) = impossible(plan, Sizes(legal=[1, 2, 4], simulate=1))
    assert "--nnodes 1:1 × --nproc 3:3" in line and "1, 2, 4 devices" in line
    assert impossible(a_plan("1:4", "1:1"), Sizes(legal=[1, 2, 4], simulate=1)) == []
    assert impossible(plan, Sizes()) == []


# --- the rendezvous -------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeAttempt:
    """What `watch` may do to an attempt."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.cause = ""

    def ask_to_stop(self) -> None:
        self.is_stopping = True

    def abandon(self, cause: str) -> None:
        self.cause = cause


class Participant:
    """A launcher, a step at a time: it polls while it waits and watches while it runs."""

    def __init__(self, world: "World", rank: int):
        self.world, self.rank, self.lines = world, rank, []
        meeting = Rendezvous(world.folder, rank, f"n{rank}", lost_after_s=LOST_S, clock=world.clock)
        self.places = ElasticPlaces(
            world.plan, meeting, world.sizes, tells_itself=world.trains, write=self.lines.append
        )
        meeting.look()
        self.attempt: FakeAttempt | None = None
        self.code: int | None = None
        self.rounds: list[Round] = []
        self.causes: list[str] = []
        self.places.wait()

    def step(self) -> None:
        self.places.meeting.say()  # as the beating thread does
        if self.attempt is not None:
            self.places.watch(self.attempt)
            if self.attempt.cause:
                self.causes.append(self.attempt.cause)
                self.ends(1)
            return
        if self.code is not None:
            return
        found = self.places.poll()
        if isinstance(found, Round):
            self.place = self.places.enter(found)
            self.rounds.append(found)
            self.attempt = FakeAttempt()
        elif found is not None:
            self.code = found
            self.places.close(found, 0)

    def ends(self, code: int) -> None:
        """Its processes end, and it goes on as the supervisor would after a failure or a save."""
        cause = self.attempt.cause
        self.attempt = None
        self.places.ended(Outcome(exit_code=code, attempt=0, cause=cause))
        if code:
            self.places.wait()

    @property
    def ranks(self) -> list[int]:
        return [host.rank for host in self.rounds[-1].members]

    @property
    def is_running(self) -> bool:
        return self.attempt is not None


class World:
    """A directory, a clock and the launchers that live."""

    def __init__(self, folder: Path, plan: ElasticPlan, sizes: Sizes):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan, self.sizes, self.trains = folder, plan, sizes, True
        self.clock = Clock()
        self.living: dict[int, Participant] = {}

    def start(self, rank: int) -> Participant:
        self.living[rank] = Participant(self, rank)
        return self.living[rank]

    def kill(self, rank: int) -> None:
        """Without a word, as a power failure does."""
        del self.living[rank]

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for participant in list(self.living.values()):
                participant.step()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "count_gpus", lambda: 0)
    sizes = Sizes(legal=[1, 2, 3, 4], simulate=1)
    return World(tmp_path / "launch", a_plan("1:1", "1:3", join_timeout_s=JOIN_S), sizes)


def test_all_hosts_start_at_once(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    assert [h.ranks for h in hosts] == [[0, 1, 2]] * 3
    assert len({h.rounds[0].id for h in hosts}) == 1
    assert [h.place.node_rank for h in hosts] == [0, 1, 2]
    assert {h.place.coordinator for h in hosts} == {f"n0:{hosts[0].rounds[0].members[0].port}"}


def test_a_host_that_does_not_come_is_not_waited_for_longer_than_said(world):
    hosts = [world.start(1), world.start(2)]
    world.run(JOIN_S - 2)
    assert not any(h.is_running for h in hosts)
    world.run(5)
    assert [h.ranks for h in hosts] == [[1, 2]] * 2
    assert any("(n2), 1 short of 3" in line for line in hosts[0].lines)


def test_too_few_hosts_give_up_with_the_code_that_asks_for_a_restart(world):
    world.plan = a_plan("1:1", "2:3", join_timeout_s=JOIN_S)
    host = world.start(0)
    world.run(JOIN_S + 3)
    assert host.code == 75
    assert any("makes no job of --nnodes 2:3" in line and "n0" in line for line in host.lines)


def test_stale_files_fool_nobody(world, tmp_path):
    world.start(0), world.start(1), world.start(2)
    world.run(3)
    for rank in range(3):
        world.kill(rank)  # files say: round 0 runs on 0, 1, 2
    world.clock.now += 1000
    host = world.start(1)
    world.run(3)
    assert not host.is_running  # waits for the others, who only seem to be there
    world.run(JOIN_S)
    assert host.ranks == [1] and host.rounds[-1].number == 1


def test_a_job_that_was_over_before_ends_nothing_now(world):
    world.plan = a_plan("1:1", "1:1", join_timeout_s=JOIN_S)
    first = world.start(0)
    world.run(2)
    first.ends(2)
    first.places.close(2, 0)
    world.kill(0)
    again = world.start(0)
    world.run(2)
    assert again.is_running and again.code is None


def test_a_lost_host_is_noticed_by_its_silence_and_named(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    world.kill(2)
    world.run(LOST_S - 2)
    assert all(h.is_running and not h.attempt.cause for h in hosts[:2])
    world.run(5)
    assert not any(h.is_running for h in hosts[:2])
    for h in hosts[:2]:
        (cause,) = h.causes
        assert cause.startswith("host 2 (n2) is lost: no sign of life for 15 s")
    world.run(JOIN_S + 3)
    assert [h.ranks for h in hosts[:2]] == [[0, 1]] * 2


def test_a_lost_leader_is_followed_by_the_next(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    world.kill(0)
    world.run(LOST_S + JOIN_S + 6)
    assert [h.ranks for h in hosts[1:]] == [[1, 2]] * 2
    assert hosts[1].place.node_rank == 0 and hosts[1].place.coordinator.startswith("n1:")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_host_that_comes_back_is_taken_in_without_a_failure(world, rank):
    hosts = {r: world.start(r) for r in range(3)}
    world.run(4)
    world.kill(rank)
    world.run(LOST_S + JOIN_S + 6)
    others = [hosts[r] for r in range(3) if r != rank]
    assert all(h.is_running and rank not in h.ranks for h in others)
    hosts[rank] = world.start(rank)
    world.run(4)
    # One host's processes are asked; they tell the others themselves.
    assert [h.attempt.is_stopping for h in others] == [True, False]
    for h in others:
        h.ends(75)
        assert h.places.goes_on()
    world.run(4)
    assert [h.ranks for h in hosts.values()] == [[0, 1, 2]] * 3


def test_processes_that_do_not_tell_each_other_are_all_asked(world):
    world.trains = False
    hosts = [world.start(rank) for rank in (0, 1)]
    world.run(JOIN_S + 3)
    world.start(2)
    world.run(4)
    assert all(h.attempt.is_stopping for h in hosts)


def test_who_is_not_needed_waits_as_a_spare_and_ends_with_the_job(world):
    world.sizes = Sizes(legal=[1, 2], simulate=1)
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    assert [h.is_running for h in hosts] == [True, True, False]
    assert any("waits as a spare" in line for line in hosts[2].lines)
    world.run(JOIN_S * 3)
    assert hosts[2].code is None and len(hosts[0].rounds) == 1
    for h in hosts[:2]:
        h.ends(0)
        h.places.close(0, 0)
    world.run(2)
    assert hosts[2].code == 0


def test_a_spare_takes_the_place_of_a_lost_host(world):
    world.sizes = Sizes(legal=[1, 2], simulate=1)
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    world.kill(0)
    world.run(LOST_S + JOIN_S + 6)
    assert [h.ranks for h in hosts[1:]] == [[1, 2]] * 2


@pytest.mark.parametrize("code", [2, 85, 1])
def test_a_final_failure_ends_spares_and_members_alike(world, code):
    world.sizes = Sizes(legal=[1, 2], simulate=1)
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[0].ends(code)
    hosts[0].places.close(code, 0)
    world.kill(0)
    hosts[1].ends(1)
    world.run(3)
    assert [h.code for h in hosts[1:]] == [code, code]


def test_a_host_that_was_asked_to_leave_is_not_waited_for(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[2].attempt.ask_to_stop()
    world.run(2)
    assert hosts[2].places.meeting.me.state == "leaving"
    for h in hosts:
        h.ends(75)
    hosts[2].places.close(75, int(signal.SIGTERM))
    world.kill(2)
    assert all(h.places.goes_on() for h in hosts[:2])
    world.run(JOIN_S + 3)
    assert [h.ranks for h in hosts[:2]] == [[0, 1]] * 2


def test_a_member_whose_part_has_failed_is_not_waited_for_without_end(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[1].ends(1)
    world.run(5)
    assert not hosts[0].causes
    world.run(LOST_S)
    assert hosts[0].causes == ["host 1 (n1) has ended its part of the round (waiting)"]


def test_done_is_done_when_all_are(world):
    hosts = [world.start(rank) for rank in range(3)]
    world.run(4)
    hosts[0].ends(0)
    hosts[1].ends(0)
    hosts[2].ends(1)
    never = lambda: 0
    assert not hosts[0].places.all_done(never)
    for h in hosts[:2]:
        h.places.wait()
    world.run(4)
    assert all(h.is_running for h in hosts)
    for h in hosts:
        h.ends(0)
    world.clock.now += 1
    for h in hosts:
        h.places.meeting.say()
    assert all(h.places.all_done(never) for h in hosts)


def test_gpus_that_come_back_make_the_next_round_larger(tmp_path, monkeypatch):
    there = [8]
    monkeypatch.setattr(host_module, "count_gpus", lambda: there[0])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = a_plan("1:8", "1:1", grow_interval_s=60.0)
    world = World(tmp_path / "launch", plan, Sizes(legal=[4, 8]))
    host = world.start(0)
    world.run(2)
    assert (host.place.nproc, host.place.visible_gpus) == (8, "")
    there[0] = 7
    host.ends(1)
    world.run(2)
    assert (host.place.nproc, host.place.visible_gpus) == (4, "0,1,2,3")
    there[0] = 8
    world.run(50)
    assert not host.attempt.is_stopping
    world.run(15)
    assert host.attempt.is_stopping
    host.ends(75)
    assert host.places.goes_on()
    world.run(2)
    assert host.place.nproc == 8
    there[0] = 0  # a driver that fails is no CPU
    host.ends(1)
    world.run(JOIN_S + 3)
    assert host.code == 75


def test_a_save_on_one_host_alone_that_nobody_asked_for_ends_the_launch(world):
    world.plan = a_plan("1:1", "1:1")
    host = world.start(0)
    world.run(2)
    host.ends(75)
    assert not host.places.goes_on()


def test_a_beating_launcher_of_the_same_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.1)
    first = Rendezvous(tmp_path, 1, "n1", lost_after_s=3)
    assert first.claim() is None
    assert Rendezvous(tmp_path, 1, "n2", lost_after_s=3).claim().address == "n1"
    first.fall_silent()
    time.sleep(0.3)
    assert Rendezvous(tmp_path, 1, "n2", lost_after_s=3).claim() is None


def test_files_are_whole_at_any_moment_and_rubbish_is_no_host(tmp_path):
    (tmp_path / "host-3.json").write_text('{"rank": 3, "uu')
    (tmp_path / "host-4.json").write_text("[]")
    (tmp_path / "round.json").write_text("{}")
    one = Rendezvous(tmp_path, 0, "n0", lost_after_s=3)
    assert list(one.look()) == [0]
    assert one.read_round() is None


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--nproc=8:4"], ["--nproc 8:4: MAX is smaller than MIN. Use --nproc 4:8."]),
        (["--nproc=0:4"], ["--nproc 0:4: MIN is 0. Use MIN ≥ 1, e.g. --nproc 1:8."]),
        (["--nproc=a:b"], ["--nproc 'a:b' is neither a number nor a range. Use e.g. --nproc 8"]),
        (["--nproc=many"], ["--nproc 'many' is neither a number nor a range"]),
        (["--nnodes=1:", "--nproc=1"], ["--nnodes '1:' is neither a number nor a range"]),
        (
            ["--nnodes=1:2", "--nproc=1", "--coordinator=n0:1", "--run-dir=x"],
            ["--coordinator n0:1 with a range: any host may be lost", "--address says"],
        ),
        (["--nnodes=1:2", "--nproc=1"], ["--nnodes 1:2 without --run-dir: the hosts meet there"]),
        (["--nnodes=1:2", "--run-dir=x"], ["--nnodes 2 without --nproc"]),
        (
            ["--nnodes=3:2", "--nproc=0:1", "--max-restarts=-1"],
            ["--nnodes 3:2: MAX is smaller", "--nproc 0:1: MIN is 0", "--max-restarts -1"],
        ),
        (["--nproc=2", "--address=n0"], ["--address n0 without a range"]),
        (["--nproc=1:2", "--lost-after-s=1"], ["--lost-after-s 1 is too short"]),
        (["--nproc=1:2", "--join-timeout-s=0"], ["--join-timeout-s 0 is no time"]),
        (["--nnodes=1:2", "--nproc=1", "--node-rank=2", "--run-dir=x"], ["--node-rank 2 is not"]),
    ],
)
def test_bad_ranges_say_what_is_allowed(capsys, flags, texts):
    from jaxdist.launch.local import main

    assert main(flags) == 2
    err = capsys.readouterr().err
    assert all(text in err for text in texts), err


def test_training_is_told_that_it_is_elastic():
    plan = read_plan(["--nproc", "1:2", "--", "--mesh", "dp=2"])
    assert plan.command[-1] == "--mesh.elastic=true" and plan.nproc == 2
    plan = read_plan(["--nproc", "1:2", "--", "--mesh", "dp=2", "--mesh.elastic=true"])
    assert plan.command.count("--mesh.elastic=true") == 1
    plan = read_plan(["--nproc", "1:2", "--program", "python worker.py"])
    assert plan.command == ["python", "worker.py"]
    plan = read_plan(["--nproc", "2", "--", "--mesh", "dp=2"])
    assert "--mesh.elastic=true" not in plan.command and plan.elastic is None


def launch(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxdist.launch", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--simulate=1"], "mesh.elastic with mesh.shape='auto'"),
        (["--simulate=1", "--mesh=dp=-1"], "mesh.elastic with mesh.shape='dp=-1'"),
        (["--simulate=1", "--mesh=dp=5"], "global_batch_size=32 is not a multiple of 5"),
        (["--simulate=1", "--mesh=tp=4"], "--nnodes 1:1 × --nproc 1:2 never makes a legal job"),
        (["--no-such=1"], "--no_such is not a setting"),
    ],
)
def test_what_can_never_be_trained_is_refused_before_anything_starts(tmp_path, flags, text):
    done = launch("--nproc=1:2", f"--run-dir={tmp_path / 'run'}", "--", *flags)
    assert done.returncode == 2 and text in done.stderr
    assert not (tmp_path / "run").exists()


def test_sizes_are_those_of_the_mesh_where_it_is_elastic():
    train = ["--simulate=2", "--mesh=dp=4,tp=2"]
    assert read_sizes([*train, "--mesh.elastic=true"]) == Sizes(legal=[2, 4, 8], simulate=2)
    assert read_sizes(train) == Sizes(legal=None, simulate=2)


def gpu_list(count: int) -> str:
    return "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\n" for i in range(count))


def test_eight_gpus_then_seven_then_eight_again(tmp_path, monkeypatch):
    gpus = tmp_path / "bin" / "nvidia-smi"
    gpus.parent.mkdir()
    gpus.write_text("#!/bin/sh\ncat $GPU_LIST\n")
    gpus.chmod(0o755)
    listing = tmp_path / "gpus"
    listing.write_text(gpu_list(8))
    monkeypatch.setenv("GPU_LIST", str(listing))
    monkeypatch.setenv("PATH", f"{gpus.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launched = Launched(
        tmp_path,
        f"""
        count = int(os.environ["JAXDIST_NUM_PROCESSES"])
        listing = Path(os.environ["GPU_LIST"])
        (RUN / f"ran-{{ATTEMPT}}-{{count}}-{{INDEX}}").touch()
        if ATTEMPT == 0:
            if INDEX == 0:
                time.sleep(0.5)
                listing.write_text({gpu_list(7)!r})
                raise OSError("GPU 7 has fallen off the bus")
            time.sleep(600)
        stop = runtime.Preemption()
        if ATTEMPT == 1:
            if INDEX == 0:
                fresh = RUN / "fresh"
                fresh.write_text({gpu_list(8)!r})
                os.replace(fresh, listing)
            while not stop.preempted():
                time.sleep(0.02)
            return runtime.EXIT_PREEMPTED
        """,
        "--nproc=1:8",
        "--grow-interval-s=1",
    )
    code, _, err = launched.end()
    assert code == 0, err
    ran = sorted(path.name for path in launched.run_dir.glob("ran-*"))
    assert ran == sorted(
        f"ran-{attempt}-{count}-{i}"
        for attempt, count in enumerate((8, 7, 8))
        for i in range(count)
    )
    assert "7 devices are here, 8 were" in err and "8 devices can be used" in err
    assert err.count("restart 1 of 3") == 1  # growing is no failure
    assert len(re.findall(r"launch: round \d:", err)) == 3


UNTIL_FINISH = """
count = int(os.environ["JAXDIST_NUM_PROCESSES"])
stop = runtime.Preemption()
(RUN / f"ran-{ATTEMPT}-{count}-{INDEX}").touch()
while not (RUN / "finish").exists():
    if stop.preempted():
        return runtime.EXIT_PREEMPTED
    time.sleep(0.02)
return int((RUN / "finish").read_text())
"""


@pytest.fixture
def start(tmp_path):
    """Starts launchers of one job of 1 to 2 hosts, and ends them with the test."""
    started: list[Launched] = []

    def start(rank: int, *flags: str) -> Launched:
        flags = (f"--node-rank={rank}", "--address=127.0.0.1", "--lost-after-s=4", *flags)
        elastic = ("--nnodes=1:2", "--nproc=1", "--join-timeout-s=15", *flags)
        started.append(Launched(tmp_path, UNTIL_FINISH, *elastic))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_launchers_of_any_program_shrink_and_grow(start, victim):
    hosts = [start(0), start(1)]
    hosts[0].wait_for("ran-0-2-0", "ran-0-2-1")
    hosts[victim].process.kill()
    left = hosts[1 - victim]
    left.wait_for("ran-1-1-0")
    hosts[victim] = start(victim)
    left.wait_for("ran-2-2-0", "ran-2-2-1")  # the program was asked: it tells nobody itself
    (left.run_dir / "finish").write_text("0")
    ends = [host.end() for host in hosts]
    assert [code for code, *_ in ends] == [0, 0], ends
    assert f"host {victim} (127.0.0.1) is lost: no sign of life for 4 s" in ends[1 - victim][2]
    assert ends[1 - victim][2].count("restart 1 of 3") == 1  # for the loss, not for growing


@pytest.mark.slow
def test_a_second_launcher_with_the_same_rank_is_refused_and_harms_nobody(start):
    hosts = [start(0), start(1)]
    hosts[0].wait_for("ran-0-2-0", "ran-0-2-1")
    code, _, err = start(1).end()
    assert code == 2 and "--node-rank 1 is taken by a launcher on 127.0.0.1" in err
    (hosts[0].run_dir / "finish").write_text("0")
    assert [host.end()[0] for host in hosts] == [0, 0]


@pytest.mark.slow
def test_a_spent_budget_ends_every_host_with_its_code(start):
    hosts = [start(rank, "--max-restarts=1") for rank in (0, 1)]
    hosts[0].wait_for("ran-0-2-0", "ran-0-2-1")
    (hosts[0].run_dir / "finish").write_text("3")
    ends = [host.end() for host in hosts]
    assert [code for code, *_ in ends] == [3, 3], ends
    assert any("giving up: 2 attempts in a row" in err for _, _, err in ends)
