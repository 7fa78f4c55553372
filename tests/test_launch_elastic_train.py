"""Two launchers, one killed: training goes on alone with the same batches, and grows again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = 1000

pytestmark = pytest.mark.slow


class Launcher:
    """One host's launcher of an elastic job of two, with its words in a file."""

    def __init__(self, run_dir: Path, rank: int, *flags: str):
        self.log = run_dir.parent / f"host-{rank}-{time.monotonic_ns()}.log"
        self.run_dir = run_dir
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxdist.launch", "--nnodes=1:2", "--nproc-per-node=1"),
                    *(f"--node-rank={rank}", "--address=127.0.0.1", f"--run-dir={run_dir}"),
                    *("--heartbeat-timeout-s=5", "--rdzv-timeout-s=20", "--backoff-s=0.1", "--"),
                    *(f"--run-dir={run_dir}", "--simulate=1", "--mesh=dp=2", *flags),
                    *(f"--steps={STEPS}", "--model.num_layers=1", "--model.d_model=32"),
                    *("--model.num_heads=2", "--model.num_kv_heads=2", "--train.seq_len=32"),
                    *("--train.global_batch_size=4", "--checkpoint.save_interval_steps=50"),
                    # A small rate: rounding, which differs between meshes, is not amplified by
                    # training itself, so that 2e-5 holds for all steps and not for 20.
                    "--optim.peak_lr=1e-5",
                    *("--eval.interval_steps=0", "--eval.final_max_batches=1"),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def signal_processes(self, number: int) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            os.kill(int(pid), number)

    @property
    def error_record(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(300)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.said, self, f"{text!r} was not said")


def wait_until(condition, launcher: Launcher, otherwise: str) -> None:
    until = time.monotonic() + 240
    while not condition():
        assert launcher.process.poll() is None and time.monotonic() < until, (
            f"{otherwise}; it said:\n{launcher.said[-5000:]}"
        )
        time.sleep(0.05)


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss; a step done twice counts as it came last."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: float(r["loss"]) for r in records if r["kind"] == "train"}


def events(run_dir: Path, name: str) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r.get("event") == name]


@pytest.fixture
def hosts():
    """Launchers that are ended with the test, whatever becomes of it."""
    started: list[Launcher] = []
    yield started
    for host in started:
        host.process.kill()  # its processes die with it
        host.process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    both = [Launcher(run_dir, rank) for rank in (0, 1)]
    try:
        assert [host.wait() for host in both] == [0, 0], both[0].said[-5000:]
    finally:
        for host in both:
            host.process.kill()
    found = losses(run_dir)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert not events(run_dir, "elastic")
    return found


@pytest.mark.parametrize("victim", [0, 1], ids=["the_leader", "the_other"])
def test_a_killed_host_is_done_without_and_taken_in_again(tmp_path, hosts, undisturbed, victim):
    run_dir = tmp_path / "run"
    hosts += [Launcher(run_dir, rank) for rank in (0, 1)]
    left = hosts[1 - victim]
    wait_until(lambda: max(losses(run_dir), default=0) >= 30, left, "step 30 was not reached")

    began = time.monotonic()
    hosts[victim].process.send_signal(signal.SIGKILL)
    left.wait_for("launch: round 1: ")
    alone_s = time.monotonic() - began
    wait_until(lambda: len(events(run_dir, "elastic")) == 1, left, "it did not go on alone")
    (said,) = events(run_dir, "elastic")
    assert said["mesh"] == "dp=1"
    assert "1 of the 2 devices of dp=2 are there; 2 microbatches of 2 rows" in said["message"]
    assert said["message"] in left.said
    reached = max(losses(run_dir))
    first_s = time.monotonic() - began
    wait_until(lambda: max(losses(run_dir)) > reached, left, "no step was done alone")

    # It must not be done before the other is back, however slow this machine starts that one.
    left.signal_processes(signal.SIGSTOP)
    hosts.append(Launcher(run_dir, victim))
    left.wait_for("2 devices can be used, round 1 uses 1: saving")
    began = time.monotonic()
    left.signal_processes(signal.SIGCONT)
    leader = hosts[-1] if victim == 0 else left
    leader.wait_for("launch: round 2: ")
    grown_s = time.monotonic() - began
    codes = [host.wait() for host in (left, hosts[-1])]
    assert codes == [0, 0], left.said[-5000:]
    print(
        f"\nthe round alone {alone_s:.1f} s after the kill, its first words {first_s:.1f} s; the "
        f"round of both {grown_s:.1f} s after the wish to grow"
    )
    assert 'shape = "dp=2"' in (run_dir / "config.toml").read_text()
    found = losses(run_dir)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, loss in undisturbed.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step


def test_a_host_that_is_asked_to_leave_saves_and_the_other_goes_on(tmp_path, hosts, undisturbed):
    run_dir = tmp_path / "run"
    hosts += [Launcher(run_dir, rank) for rank in (0, 1)]
    wait_until(lambda: max(losses(run_dir), default=0) >= 30, hosts[0], "step 30 was not reached")
    hosts[1].process.send_signal(signal.SIGTERM)
    assert hosts[1].wait() == 75
    assert hosts[0].wait() == 0, hosts[0].said[-5000:]
    assert "restart 1 of" not in hosts[0].said  # a preemption is no failure
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in records if r["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))  # none lost, none done twice
    found = losses(run_dir)
    assert all(found[step] == pytest.approx(loss, rel=2e-5) for step, loss in undisturbed.items())


def test_a_killed_process_costs_no_host(tmp_path, hosts, undisturbed):
    run_dir = tmp_path / "run"
    hosts += [Launcher(run_dir, rank) for rank in (0, 1)]
    wait_until(lambda: max(losses(run_dir), default=0) >= 120, hosts[0], "step 120 not reached")
    hosts[1].signal_processes(signal.SIGKILL)
    assert [host.wait() for host in hosts] == [0, 0], hosts[0].said[-5000:]
    assert "killed by SIGKILL" in hosts[1].said
    assert all("restart 1 of 3" in host.said for host in hosts)
    assert not events(run_dir, "elastic")
    assert losses(run_dir) == undisturbed  # the same mesh: the same bits


def test_what_one_host_cannot_heal_ends_both(tmp_path, hosts):
    run_dir = tmp_path / "run"
    hosts += [Launcher(run_dir, 0), Launcher(run_dir, 1, "--optim.warmup_steps=-1")]
    assert [host.wait() for host in hosts] == [2, 2]
