"""Forks of a process with preloaded imports: output, exit codes, and cleanup."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT, environment, tiny
from launched import is_running

from jaxdist.tools.launch import supervisor
from jaxdist.tools.launch.fork_server import ForkServer
from jaxdist.tools.launch.supervisor import FixedAgent, RestartPolicy, Supervisor

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
    started = ForkServer(["colorsys", "no_such_module"])
    wait_until(started.is_ready)
    yield started
    started.close()


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def start(server, word: str):
    """Start a fork that runs the program; return it and a file with its output."""
    readable, output = os.pipe()
    process = server.start(
        [sys.executable, "-m", "program", word], {"GIVEN": f"given {word}"}, output
    )
    os.close(output)
    return process, os.fdopen(readable)


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
    done, _ = start(server, "3")
    assert done.wait() == done.poll() == done.returncode == 3
    assert running.poll() is None and running.returncode is None
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL and output.read() == ""


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
