"""One elastic training: a host is killed, the other continues with the same batches, then both run.

The two devices of each host share rows, in a ring.

Other events are tested without training: `test_launch_elastic` with launchers of real processes,
`test_launch_rendezvous` with launchers in one process and a simulated clock.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ROOT, run
from launched_job import workers_of

STEPS = 160
TRAIN = [
    *("--model.num_layers=1", "--model.d_model=32", "--model.num_heads=2"),
    *("--model.num_kv_heads=2", "--train.seq_len=32", "--train.global_batch_size=4"),
    *(f"--steps={STEPS}", "--checkpoint.save_interval_steps=20"),
    *("--eval.interval_steps=0", "--eval.final_max_batches=1"),
    "--monitoring.tracker=",
    # A small rate: training does not amplify the rounding that differs between meshes, so that
    # 2e-5 holds for all steps and not only for 20.
    "--optim.peak_lr=1e-5",
]
HOST = ["--simulate=2", "--mesh=dp=2,cp=2", "--mesh.context_attention=ring"]

pytestmark = pytest.mark.slow


class Launcher:
    """Launcher of one host in an elastic job of two, with its output in a file."""

    def __init__(self, run_dir: Path, rank: int):
        self.log = run_dir.parent / f"host-{rank}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxdist.launch", "--nnodes=1:2", "--nproc-per-node=1"),
                    *(f"--node-rank={rank}", "--address=127.0.0.1", f"--run-dir={run_dir}"),
                    *("--heartbeat-timeout-s=5", "--rdzv-timeout-s=15", "--backoff-s=0.1", "--"),
                    *(f"--run-dir={run_dir}", *HOST, *TRAIN),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def signal_processes(self, number: int) -> None:
        for pid in workers_of(self.process.pid):
            os.kill(pid, number)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, condition, otherwise: str) -> None:
        until = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None and time.monotonic() < until, (
                f"{otherwise}; output:\n{self.output[-5000:]}"
            )
            time.sleep(0.05)

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.output, f"{text!r} is missing")


def records(run_dir: Path) -> list[dict]:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(run_dir: Path) -> dict[int, float]:
    return {r["step"]: float(r["loss"]) for r in records(run_dir) if r["kind"] == "train"}


def elastic_events(run_dir: Path) -> list[dict]:
    return [r for r in records(run_dir) if r.get("event") == "elastic"]


@pytest.fixture
def hosts():
    started: list[Launcher] = []
    yield started
    for host in started:
        host.process.kill()  # its processes die with it
        host.process.wait()


def test_a_job_shrinks_to_one_host_and_grows_again_with_the_same_batches(tmp_path, hosts):
    run_dir = tmp_path / "run"
    hosts += [Launcher(run_dir, rank) for rank in (0, 1)]
    left = hosts[1]  # the leader is lost
    left.wait_until(lambda: max(losses(run_dir), default=0) >= 30, "step 30 was not reached")

    hosts[0].process.send_signal(signal.SIGKILL)
    left.wait_for("launch: round 1: ")
    left.wait_until(lambda: len(elastic_events(run_dir)) == 1, "it did not go on alone")
    (event,) = elastic_events(run_dir)
    assert event["mesh"] == "cp=2"
    assert "2 microbatches of 2 rows" in event["message"]
    reached = max(losses(run_dir))
    left.wait_until(lambda: max(losses(run_dir)) > reached, "no step was done alone")

    # It must not finish before the other has rejoined, even on a slow machine.
    left.signal_processes(signal.SIGSTOP)
    hosts.append(Launcher(run_dir, 0))
    left.wait_for("4 devices can be used")
    left.signal_processes(signal.SIGCONT)
    hosts[2].wait_for("launch: round 2: ")
    assert [host.process.wait(300) for host in hosts[1:]] == [0, 0], left.output[-5000:]

    reference = tmp_path / "reference"
    flags = [f"--run-dir={reference}", "--simulate=1", "--mesh=dp=1", *TRAIN]
    done = run("train", *flags)
    assert done.returncode == 0, done.stderr
    expected, losses_of_run = losses(reference), losses(run_dir)
    assert sorted(losses_of_run) == sorted(expected) == list(range(1, STEPS + 1))
    assert losses_of_run == {step: pytest.approx(loss, rel=2e-5) for step, loss in expected.items()}
