"""The processes of one attempt, and forks of one with preloaded imports: how they end."""

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from commands import ROOT, environment, tiny
from launched import is_running

from jaxdist.run.monitoring.timers import steady_clock
from jaxdist.tools.launch import resources, supervisor, worker_group
from jaxdist.tools.launch.fork_server import ForkServer
from jaxdist.tools.launch.supervisor import FixedAgent, RestartPolicy, Supervisor
from jaxdist.tools.launch.worker_group import GroupResult, Placement, WorkerGroup


def run(tmp_path, script: str, processes: int = 1, hosts: int = 1) -> GroupResult:
    placement = Placement(
        nproc_per_node=processes,
        nnodes=hosts,
        node_rank=0,
        coordinator_address="127.0.0.1:1",
    )
    return WorkerGroup(["sh", "-c", script], placement, 0, tmp_path).run(5.0)


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 137"])
@pytest.mark.parametrize("kills", [0, 1])
def test_out_of_memory_is_distinguished_from_other_kills(tmp_path, monkeypatch, script, kills):
    counts = iter([4, *[4 + kills] * 9])
    monkeypatch.setattr(worker_group, "count_oom_kills", lambda: next(counts))
    result = run(tmp_path, script)
    assert result.exit_code == 137 and "SIGKILL" in result.cause
    assert ("dmesg" in result.cause) == (not kills)  # the kernel reported the cause
    assert ("--mem" in result.advice) == bool(kills)


@pytest.mark.parametrize(
    ("end", "hosts", "waits"),
    [("kill -9 $$", 1, False), ("kill -9 $$", 2, True), ("exit 3", 1, True)],
)
def test_remaining_processes_have_time_to_report_except_after_a_kill(
    tmp_path, monkeypatch, end, hosts, waits
):
    """On several hosts the kill may come from a launcher, for a cause on another host."""
    monkeypatch.setattr(worker_group, "COLLECT_S", 2.5)
    first, other = f"[ $JAXDIST_PROCESS_ID = 1 ] && {end}", "sleep 2; touch reported; sleep 60"
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, f"{first}; {other}", processes=2, hosts=hosts)
    assert result.first_process == 1 and result.exit_code == {"k": 137, "e": 3}[end[0]]
    assert (tmp_path / "reported").exists() == waits


@pytest.mark.parametrize(
    ("cgroup", "file", "count"),
    [
        ("4:memory:/old\n0::/\n", "", 0),
        ("4:memory:/old\n0::/\n", "/sys/fs/cgroup/memory/old/memory.oom_control", 5),
        ("4:memory:/old\n0::/\n", "/sys/fs/cgroup/memory/memory.oom_control", 5),
        ("0::/\n", "", 0),  # the root has no such file
        ("0::/\n", "/sys/fs/cgroup/memory.events", 5),
        ("0::/a/b\n", "/sys/fs/cgroup/a/b/memory.events", 5),
    ],
)
def test_oom_kill_count_of_the_kernel_is_read(monkeypatch, cgroup, file, count):
    files = {"/proc/self/cgroup": cgroup, file: "oom 9\noom_kill 5\noom_group_kill 1\n"}

    def text(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    monkeypatch.setattr(resources, "locate", lambda path: SimpleNamespace(text=lambda: text(path)))
    assert resources.count_oom_kills() == count


def test_clock_set_back_does_not_change_durations(tmp_path, monkeypatch):
    times = iter(range(2_000_000_000, 0, -3600))  # an hour back at each read
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    assert 0 <= run(tmp_path, "sleep 0.05; exit 3").seconds < 60
    clock = steady_clock()
    first, second = clock(), clock()
    assert 0 <= second - first < 60 and first > 1_900_000_000


def test_first_failure_is_independent_of_the_clock():
    """The clock was set back by an hour between the first record and the second."""
    failed = []
    for number, (at, wall) in enumerate([(10.0, 7200.0), (11.0, 3601.0)]):
        record = {"time": wall, "monotonic": at, "error": "ValueError: boom"}
        failed.append(
            SimpleNamespace(
                number=number,
                killed=False,
                ended_at=12.0,
                error_record=lambda record=record: json.loads(json.dumps(record)),
            )
        )
    first = min(failed, key=lambda one: worker_group._cause_order(one, True))
    assert first.number == 0


PROGRAM = """
import json, os, signal, sys, time
blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(json.dumps({
    "name": __name__, "words": sys.argv[1:], "given": os.environ["GIVEN"], "blocked": blocked,
    "session": os.getsid(0) == os.getpid(), "imported": "colorsys" in sys.modules,
    "stdin": sys.stdin.read(), "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
}))
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    started = ForkServer(["colorsys", "no_such_module", "numpy"])
    wait_until(started.is_ready)
    yield started
    started.close()


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def start(server, word: str):
    readable, output = os.pipe()
    process = server.start(
        [sys.executable, "-m", "program", word], {"GIVEN": f"given {word}"}, output
    )
    os.close(output)
    return process, os.fdopen(readable)


def test_a_reused_process_id_has_no_code_until_its_process_ends(server):
    server._codes.update(dict.fromkeys(range(2**22), 7))  # every process id ended with 7
    running, output = start(server, "wait")
    with output:
        assert running.poll() is None
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL


def test_fork_is_an_independent_process(server):
    running, output = start(server, "wait")
    assert json.loads(output.readline()) == {
        "name": "__main__",
        "words": ["wait"],
        "given": "given wait",
        "blocked": True,  # until training can handle a preemption signal
        "session": True,
        "imported": True,
        "stdin": "",
        "interrupt": False,
    }
    threads = os.listdir(f"/proc/{server._process.pid}/task")
    assert len(threads) == 1  # OpenBLAS has ended its own before the fork
    done, _ = start(server, "3")
    assert done.wait() == done.poll() == done.returncode == 3
    assert running.poll() is None and running.returncode is None
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL and output.read() == ""


def test_a_stop_request_may_interrupt_a_poll_that_reads_the_end_of_a_fork(server):
    done, _ = start(server, "0")
    channel, nested = server._socket, []

    def recv(*args):
        if not nested:  # as the handler of a signal that arrives before `recv`
            nested.append(True)
            done.poll()
        return channel.recv(*args)

    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 10**5))
    server._socket = SimpleNamespace(fileno=channel.fileno, recv=recv, close=channel.close)
    wait_until(lambda: done.poll() is not None)
    assert done.returncode == 0 and not server.is_gone()


def test_a_signal_to_a_process_whose_end_is_not_reported_yet_is_dropped():
    ended = subprocess.Popen(["true"])
    ended.wait()
    worker = object.__new__(worker_group.Worker)
    worker.process = SimpleNamespace(pid=ended.pid, poll=lambda: None)
    worker.signal(signal.SIGTERM)


def test_the_wait_before_a_restart_is_limited_after_any_number_of_failures():
    policy = RestartPolicy(max_restarts=9999, max_backoff_s=0.0)
    launcher = SimpleNamespace(policy=policy, stop_signal=0)
    assert Supervisor._wait_before_restart(launcher, 2000, -1)


def test_a_host_that_can_start_no_process_is_a_failure_and_no_bad_setting(tmp_path, monkeypatch):
    def start(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(worker_group.subprocess, "Popen", start)
    result = run(tmp_path, "true")
    assert result.exit_code == 1 and os.strerror(errno.EAGAIN) in result.report()


def test_forks_end_with_their_server_and_no_more_are_started(server):
    running, output = start(server, "wait")
    assert output.readline()
    os.kill(server._process.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(running.pid))
    assert server.is_gone() and not server.is_ready()
    with pytest.raises(OSError):
        start(server, "0")


STARTED = """
import importlib, sys
from jaxdist.tools.launch.fork_server import TRAINING
for name in TRAINING:
    importlib.import_module(name)
before = set(sys.modules)
from jaxdist import train
code = train.main()
late = set(sys.modules) - before - {"jaxdist.train"}
print("late:", *sorted(name for name in late if name.startswith(("jaxdist.", "flax", "grain"))))
sys.exit(code)
"""


@pytest.mark.slow
def test_fork_has_all_imports_of_training(tmp_path):
    """Every process of a restart imports each missing module again, at the same time."""
    flags = tiny("--simulate=1", "--mesh=dp=1", "--steps=2", f"--run-dir={tmp_path / 'run'}")
    command = [sys.executable, "-c", STARTED, *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].split() == ["late:"]


@pytest.mark.parametrize(("failures", "forks"), [(0, True), (1, True), (2, False)])
def test_after_two_failures_without_a_checkpoint_processes_are_not_forked(
    tmp_path, monkeypatch, failures, forks
):
    """The fork itself may be the cause of the failures."""
    subject = Supervisor(["x"], FixedAgent(1), tmp_path, RestartPolicy(preload=True))
    subject._failures = failures
    monkeypatch.setattr(supervisor, "start_command", lambda *args: "imported")

    class Ready:
        is_ready = staticmethod(lambda: True)
        start = staticmethod(lambda *args: "forked")

    subject._preloaded = Ready()
    assert subject._start(["x"], {}, 1) == ("forked" if forks else "imported")
