"""Training under the launcher survives what kills it, and ends with the bits of an unharmed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = 60

pytestmark = pytest.mark.slow


def start(run_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "jaxdist.launch",
                "--nproc-per-node=2",
                "--backoff-s=0.1",
                "--",
            ),
            *(f"--run-dir={run_dir}", "--simulate=1", "--mesh=dp=2", f"--steps={STEPS}"),
            *("--model.num_layers=1", "--model.d_model=32", "--model.num_heads=2"),
            *("--model.num_kv_heads=2", "--train.global_batch_size=4", "--train.seq_len=32"),
            *("--checkpoint.save_interval_steps=10", "--eval.interval_steps=0"),
            *("--eval.final_max_batches=1",),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def losses(run_dir: Path) -> dict[int, str]:
    """Step -> loss as written; a step done twice must have the same loss twice."""
    found: dict[int, str] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            loss = float(record["loss"]).hex()
            assert found.setdefault(record["step"], loss) == loss
    return found


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached: {process.communicate(timeout=10)[0][-3000:]}")


def workers(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory) -> dict[int, str]:
    run_dir = tmp_path_factory.mktemp("unharmed") / "run"
    process = start(run_dir)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    found = losses(run_dir)
    assert len(found) >= 2 and STEPS in found
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_replaced_and_the_bits_are_the_same(tmp_path, unharmed, victim):
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_for_step(run_dir, 12, process)
    time.sleep(random.Random(victim).uniform(0, 0.3))
    os.kill(workers(process)[victim], signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert f"process {victim} failed first" in out and "restart 1 of 3" in out
    assert losses(run_dir) == unharmed


def test_a_preempted_run_goes_on_where_it_stopped(tmp_path, unharmed):
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_for_step(run_dir, 12, process)
    os.kill(workers(process)[1], signal.SIGUSR1)  # one process alone, not the launcher
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 75, out
    again = start(run_dir)
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0, out
    assert "resumed from step" in out
    assert losses(run_dir) == unharmed
