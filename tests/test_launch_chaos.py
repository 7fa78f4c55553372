"""Processes of a training job are killed at random moments; the run ends as if nothing had been.

`JAXDIST_CHAOS=20 pytest -s tests/test_launch_chaos.py` is the long form.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch_train import losses, workers

ROOT = Path(__file__).parent.parent
EVENTS = int(os.environ.get("JAXDIST_CHAOS", "3"))
STEPS = 100 * EVENTS

pytestmark = pytest.mark.slow


def start(run_dir: Path) -> subprocess.Popen:
    log = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o644)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxdist.launch", "--nproc=2", "--backoff-s=0.1"),
            "--max-backoff-s=0.5",
            *(f"--max-restarts={EVENTS}", "--", f"--run-dir={run_dir}", "--simulate=1"),
            *("--mesh=dp=2", f"--steps={STEPS}", "--model.num_layers=1", "--model.d_model=32"),
            *("--model.num_heads=2", "--model.num_kv_heads=2", "--train.global_batch_size=4"),
            *("--train.seq_len=32", "--checkpoint.save_interval_steps=5"),
            *("--eval.interval_steps=0", "--eval.final_max_batches=1"),
            "--runtime.heartbeat_timeout_s=10",
        ],
        stdout=log,
        stderr=log,
        cwd=ROOT,
    )


def wait_for(condition, process: subprocess.Popen, timeout_s: float = 120) -> float:
    """Seconds until the condition holds; also ends with the process."""
    began = time.monotonic()
    while not condition() and process.poll() is None:
        assert time.monotonic() < began + timeout_s
        time.sleep(0.02)
    return time.monotonic() - began


def test_random_kills_and_stops_never_change_the_end(tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "harmed"
    assert start(whole).wait(600) == 0
    generator = random.Random(0)
    process = start(run_dir)
    metrics = run_dir / "metrics.jsonl"
    logs = run_dir / "logs"
    noticed, recovered = [], []

    def attempts() -> int:
        return len(list(logs.glob("attempt-*-process-0.out")))

    def size() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    wait_for(lambda: attempts() == 1, process)
    for i in range(EVENTS):
        time.sleep(generator.uniform(0.0, 8.0))  # start-up, compilation, steps and saves
        if process.poll() is not None:
            break
        # Every fifth time the process is frozen, not killed: only its silence tells.
        number = signal.SIGSTOP if i % 5 == 4 else signal.SIGKILL
        before = attempts()
        victims = workers(process)
        if not victims:
            continue
        os.kill(generator.choice(victims), number)
        seconds = wait_for(lambda before=before: attempts() > before, process)
        written = size()
        noticed.append((number.name, round(seconds, 1)))
        recovered.append(
            round(seconds + wait_for(lambda written=written: size() > written, process), 1)
        )
    code = process.wait(600)
    print(f"\nuntil the next attempt: {noticed}\nuntil its first record: {recovered}")
    print(f"median until the first record: {statistics.median(recovered)} s")
    assert code == 0, run_dir.with_suffix(".log").read_text()[-5000:]
    assert losses(run_dir) == losses(whole)
