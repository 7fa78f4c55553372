"""Measure the time from a killed process to the next trained step, by part.

    python scripts/bench/restart.py                      # ten kills each way; about 5 minutes
    python scripts/bench/restart.py --kills 3 --only forked

Four processes with one simulated device each train a tiny model under `python -m jaxdist.launch`.
After each save, the next process in turn is killed (SIGKILL); the launcher ends the others and
restarts all four. The new processes report the parts of their startup time in the event `restart`
of metrics.jsonl. The rest of the time since the kill is the launcher's detection time. `forked` is
the default: new processes are forks of one that has imported everything. `imported` is
`--preload=false`: each process does its own imports.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "restart.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from launched_job import workers_of  # noqa: E402, needs sys.path

NUM_PROCESSES = 4
WAYS = {"forked": [], "imported": ["--preload=false"]}
TRAIN = [
    *("--simulate=1", f"--mesh=dp={NUM_PROCESSES}", "--steps=1000000", "--model.num_layers=2"),
    *("--model.d_model=64", "--model.num_heads=4", "--model.mlp_dim=128"),
    *("--train.seq_len=64", "--train.global_batch_size=8", "--eval.interval_steps=0"),
    *("--checkpoint.save_interval_steps=50", "--monitoring.tracker="),
]
PARTS = ("notice", "relaunch", "imports", "join", "setup", "restore", "compile", "first_step")
"""Detection by the launcher, then the parts in `jaxdist.runtime.start_times`."""
SETTLE_S, PAUSE_S = 30.0, 2.0
"""Age of a job at the first kill, when the fork server has started; pause between two kills."""


def main() -> int:
    """Kill, measure and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of each way (default %(default)s)")
    parser.add_argument("--only", choices=WAYS, help="one of the ways")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = {}
    for way in [arguments.only] if arguments.only else WAYS:
        with tempfile.TemporaryDirectory(prefix="bench-restart-") as folder:
            results[way] = measure(Path(folder), WAYS[way], arguments.kills)
    text = page(results, arguments.kills)
    arguments.out.write_text(text)
    print(text)
    return 0


def measure(folder: Path, flags: list[str], kills: int) -> list[dict[str, float]]:
    """Return the seconds of each part, and `total`, for each kill of one job."""
    command = [sys.executable, "-m", "jaxdist.launch", f"--nproc-per-node={NUM_PROCESSES}", *flags]
    command += ["--", *TRAIN, f"--run-dir={folder / 'run'}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAXDIST_CACHE": str(folder / "cache")}
    with open(folder / "console.log", "wb") as console:
        job = subprocess.Popen(command, stdout=console, stderr=console, env=environ)
    began, metrics, restarted = time.monotonic(), folder / "run" / "metrics.jsonl", []
    try:
        for number in range(kills):
            wait_for(job, folder, lambda n=number: saves(metrics) > n)  # one since the last start
            time.sleep(max(PAUSE_S, began + SETTLE_S - time.monotonic()))
            victims = workers_of(job.pid)
            if len(victims) != NUM_PROCESSES:
                raise SystemExit(f"{len(victims)} processes\n{console_of(folder)}")
            killed_at = time.time()
            os.kill(victims[number % NUM_PROCESSES], signal.SIGKILL)
            wait_for(job, folder, lambda n=number: len(restarts(metrics)) > n)
            restarted.append(parts_of(restarts(metrics)[number], killed_at))
            print(restarted[-1], flush=True)
    finally:
        job.terminate()
        job.wait(timeout=120)
    return restarted


def parts_of(restart: dict[str, Any], killed_at: float) -> dict[str, float]:
    """Return the seconds of each part of a restart after a kill at `killed_at`."""
    total = restart["time"] - killed_at
    parts = {name: restart[f"{name}_s"] for name in PARTS[1:]}
    return {"notice": total - restart["seconds"], **parts, "total": total}


def wait_for(job: subprocess.Popen[bytes], folder: Path, condition: Any) -> None:
    """Wait until a condition holds; exit with the console text if the job ends first."""
    until = time.monotonic() + 120
    while not condition():
        if job.poll() is not None or time.monotonic() > until:
            raise SystemExit(console_of(folder))
        time.sleep(0.05)


def console_of(folder: Path) -> str:
    """Return the end of the job's console output."""
    return (folder / "console.log").read_text(errors="replace")[-3000:]


def records(metrics: Path) -> list[dict[str, Any]]:
    """Return the record of every complete line so far."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def restarts(metrics: Path) -> list[dict[str, Any]]:
    """Return the events with the times of each restart."""
    return [record for record in records(metrics) if record.get("event") == "restart"]


def saves(metrics: Path) -> int:
    """Return the number of starts that have saved a checkpoint."""
    saved, count = False, 0
    for record in records(metrics):
        if record.get("event") == "restart":
            count, saved = count + saved, False
        saved = saved or record.get("event") == "save"
    return count + saved


def page(results: dict[str, list[dict[str, float]]], kills: int) -> str:
    """Return the results as Markdown."""
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    lines = [
        "# From a killed process to the next trained step",
        "",
        f"{os.cpu_count()} CPU cores, {versions}, {datetime.date.today()}; `python "
        f"scripts/bench/restart.py --kills {kills}`. One of four processes of a tiny model is "
        "killed (SIGKILL); all four start again from the newest checkpoint on a local disk, with a "
        "warm compile cache. Seconds, medians over the kills.",
        "",
        "| new processes | " + " | ".join(PARTS) + " | total | fastest, slowest |",
        "|---|" + "---|" * (len(PARTS) + 2),
    ]
    for way, kills_of in results.items():
        cells = [f"{statistics.median(one[name] for one in kills_of):.2f}" for name in PARTS]
        totals = [one["total"] for one in kills_of]
        ends = f"{min(totals):.2f}, {max(totals):.2f}"
        lines.append(f"| {way} | {' | '.join(cells)} | {statistics.median(totals):.2f} | {ends} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
