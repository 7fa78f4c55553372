"""Two hosts whose link is cut during training: both report it, end, and resume afterwards.

Network namespaces simulate the hosts. The shared run directory stays reachable, like a separate
storage network; the processes reach each other only over the link.
"""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import fault_scenarios
import network_hosts
import pytest
from commands import ROOT
from launched_job import training
from network_hosts import Hosts

NAMES = ("h0", "h1")
STEPS = 70
PORT = 29400
HEARTBEAT_S, WATCHDOG_S = 8, 6
JOIN_S = 20  # two concurrent starts on a loaded machine are up to 8 s apart
# The line must be there after the timeout and the delay that a loaded machine adds.
NAMED_WITHIN_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network_hosts.missing()), reason=network_hosts.missing() or "-"),
]


class Run:
    """A launcher on each host, one process each."""

    def __init__(self, hosts: Hosts, folder: Path, *flags: str, restarts: int = 30):
        self.hosts, self.folder = hosts, folder
        self.run_dir = folder / "run"
        folder.mkdir(exist_ok=True)
        self.launchers = [self._launch(host, restarts, flags) for host in (0, 1)]

    def _launch(self, host: int, restarts: int, flags: tuple[str, ...]) -> subprocess.Popen:
        own = [
            *(
                "--nproc-per-node=1",
                "--nnodes=2",
                f"--node-rank={host}",
                f"--coordinator-address=h0:{PORT}",
            ),
            *("--backoff-s=0.2", "--max-backoff-s=1", f"--max-restarts={restarts}", "--"),
        ]
        train = training(
            f"--run-dir={self.run_dir}",
            f"--steps={STEPS}",
            f"--runtime.join_timeout_s={JOIN_S}",
            *flags,
        )
        return self.hosts.start(
            host,
            [sys.executable, "-m", "jaxdist.launch", *own, *train],
            self.folder / f"console-{host}.log",
            env={
                **os.environ,
                "JAXDIST_JOB_TOKEN": "secret",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                "FAULT_FOLDER": str(self.folder),
            },
        )

    def output(self, host: int) -> str:
        return (self.folder / f"console-{host}.log").read_text(errors="replace")

    def outputs(self) -> str:
        return self.output(0)[-4000:] + self.output(1)[-4000:]

    def wait_for_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), 180)

    def wait_for_line(self, host: int, pattern: str, timeout_s: float) -> float:
        return self.wait(lambda: re.search(pattern, self.output(host)), timeout_s)

    def wait(self, condition, timeout_s: float) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + timeout_s, self.outputs()
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self, timeout_s: float = 300) -> list[int]:
        return [launcher.wait(timeout_s) for launcher in self.launchers]


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path / "hosts", NAMES) as running:
        yield running


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uncut")
    with Hosts(folder / "hosts", NAMES) as running:
        run = Run(running, folder / "job")
        assert run.end() == [0, 0], run.outputs()
    return fault_scenarios.step_results(run.run_dir)


FIRST = {
    "heartbeat": (
        [f"--runtime.heartbeat_timeout_s={HEARTBEAT_S}", "--resilience.step_timeout_s=600"],
        # Or the other host detected it first and reported why it ends.
        r"lost (process 1 on h1|touch with process 1)|process 1 on h1 is lost",
        r"lost (process 0 on h0|touch with process 0)|process 0 on h0 is lost",
    ),
    "watchdog": (
        ["--runtime.heartbeat_timeout_s=600", f"--resilience.step_timeout_s={WATCHDOG_S}"],
        r"watchdog: .*(the network between them hangs|process [01] on h[01])",
        r"watchdog: .*(the network between them hangs|process [01] on h[01])",
    ),
}


def cut_and_mend(hosts, tmp_path, uncut, case: str) -> None:
    """Cut the link during training; both hosts must report it, end, and resume when it is back."""
    flags, first, second = FIRST[case]
    generator = random.Random(len(flags[0]))
    # During a save the watchdog waits and the heartbeat detects a cut link; avoid that here.
    run = Run(hosts, tmp_path / "job", *flags, "--checkpoint.save_interval_steps=25")
    (run.folder / "pace").write_text("0.03")
    run.wait_for_line(0, "checkpoint 25 saved", 180)
    time.sleep(generator.uniform(0.0, 0.7))
    hosts.cut(1)
    named = [run.wait_for_line(0, first, NAMED_WITHIN_S)]
    named.append(named[0] + run.wait_for_line(1, second, NAMED_WITHIN_S))
    for host in (0, 1):
        run.wait_for_line(host, "restart 1 of 30", NAMED_WITHIN_S)
    time.sleep(generator.uniform(0.0, 5.0))  # attempts that cannot connect
    (run.folder / "pace").unlink()
    size = (run.run_dir / "metrics.jsonl").stat().st_size
    hosts.mend(1)
    grown = lambda: b'"kind": "train"' in (run.run_dir / "metrics.jsonl").read_bytes()[size:]
    back = run.wait(grown, 120)
    assert run.end() == [0, 0], run.outputs()
    assert '"event": "restore"' in (run.run_dir / "metrics.jsonl").read_text()[size:]
    assert fault_scenarios.step_results(run.run_dir) == uncut
    print(f"named after {named[0]:.1f} and {named[1]:.1f} s, back {back:.1f} s after")


def test_cut_link_ends_both_hosts_and_they_resume(hosts, tmp_path, uncut):
    cut_and_mend(hosts, tmp_path, uncut, "heartbeat")
