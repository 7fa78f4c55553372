"""Does a long job creep? Memory, threads, open files and step time of two processes over time.

    python scripts/bench/soak.py                       # three jobs of 20 minutes each
    python scripts/bench/soak.py --minutes 5 --only saves

A tiny training of two processes runs under `python -m jaxdist.launch`, without pause: once with
steps alone, once with a save every ten steps, once with an evaluation every ten steps. Whatever
grows in one of them and not in the first grows with saves or evaluations. Each half of a job gets a
slope of its own (least squares over the samples), because allocators and caches fill up at first: a
leak shows in the second half too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "soak.md"
OFF = 10**9
VARIANTS = {
    "steps": ["--checkpoint.save_interval_steps=0", "--eval.interval_steps=0"],
    "saves": ["--checkpoint.save_interval_steps=10", "--eval.interval_steps=0"],
    "evaluations": ["--checkpoint.save_interval_steps=0", "--eval.interval_steps=10"],
}
TRAIN = [
    *("--simulate=1", "--mesh=dp=2", f"--steps={OFF}", "--model.num_layers=2"),
    *("--model.d_model=64", "--model.num_heads=4", "--model.mlp_dim=128"),
    *("--train.seq_len=64", "--train.global_batch_size=8", "--eval.max_batches=2"),
    "--monitoring.tracker=",
]


def main() -> int:
    """Run the jobs one after another and write the page after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=20, help="of each job (default %(default)s)"
    )
    parser.add_argument("--sample-s", type=float, default=5, help="seconds between two samples")
    parser.add_argument("--only", choices=VARIANTS, help="one of the jobs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = {}
    for name in [arguments.only] if arguments.only else VARIANTS:
        with tempfile.TemporaryDirectory(prefix="bench-soak-") as folder:
            results[name] = soak(
                Path(folder), VARIANTS[name], arguments.minutes, arguments.sample_s
            )
        arguments.out.write_text(page(results, arguments.minutes))
    print(arguments.out.read_text())
    return 0


def soak(folder: Path, flags: list[str], minutes: float, sample_s: float) -> dict[str, Any]:
    """Return the samples of one job from its tenth step: name -> [samples], and its step times."""
    command = [sys.executable, "-m", "jaxdist.launch", "--nproc-per-node=2", "--"]
    command += [*TRAIN, *flags, f"--run-dir={folder / 'run'}"]
    with open(folder / "console.log", "wb") as console:
        job = subprocess.Popen(
            command, stdout=console, stderr=console, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    samples = []
    try:
        wait_for_steps(folder, job, 10)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            if job.poll() is not None:
                raise SystemExit((folder / "console.log").read_text()[-3000:])
            samples.append({"time": time.time(), **sample(job.pid)})
            time.sleep(sample_s)
    finally:
        job.terminate()
        job.wait(timeout=120)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return {"samples": samples, "records": records}


def wait_for_steps(folder: Path, job: subprocess.Popen[bytes], count: int) -> None:
    """Wait until the job has finished `count` steps."""
    metrics = folder / "run" / "metrics.jsonl"
    until = time.monotonic() + 300
    while time.monotonic() < until and job.poll() is None:
        if metrics.exists() and metrics.read_text().count('"kind": "train"') >= count:
            return
        time.sleep(0.5)
    raise SystemExit((folder / "console.log").read_text()[-3000:])


def sample(launcher: int) -> dict[str, int]:
    """Return the sums over both training processes: private bytes, threads, open files."""
    total = {"memory": 0, "threads": 0, "files": 0}
    for process in training_processes(launcher):
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        total["memory"] += 1024 * int(fields["RssAnon"].split()[0])
        total["threads"] += int(fields["Threads"])
        total["files"] += len(os.listdir(process / "fd"))
    return total


def training_processes(launcher: int) -> list[Path]:
    """Return the /proc directories of the training processes below the launcher."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == launcher and b"jaxdist.train" in words:
            processes.append(process)
    return processes


def slope_per_minute(times: list[float], values: list[float]) -> float:
    """Return the least-squares slope, in units of the values per minute."""
    return float(np.polyfit(np.asarray(times) - times[0], values, 1)[0] * 60)


def page(results: dict[str, dict[str, Any]], minutes: float) -> str:
    """Return the results as Markdown."""
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    lines = [
        "# Memory, threads and open files of a long job",
        "",
        f"{os.cpu_count()} CPU cores, {versions}, {datetime.date.today()}; `python "
        f"scripts/bench/soak.py --minutes {minutes:g}`. Two processes; private resident memory of "
        "both together.",
        "",
        "| job | steps | memory at start, end | MB a minute, 1st half | 2nd half | bytes a step, "
        "2nd half | threads | open files | median step, 1st and last tenth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(name, one) for name, one in results.items())]) + "\n"


def row(name: str, result: dict[str, Any]) -> str:
    """Return one line of the table."""
    samples, records = result["samples"], result["records"]
    half = len(samples) // 2
    times = [one["time"] for one in samples]
    memory = [one["memory"] / 1e6 for one in samples]
    slopes = [
        slope_per_minute(times[part], memory[part]) for part in (slice(half), slice(half, None))
    ]
    steps = [r for r in records if times[half] <= r["time"] <= times[-1]]
    each = slopes[1] * 1e6 * (times[-1] - times[half]) / 60 / max(len(steps), 1)
    ends = lambda key: f"{samples[0][key]}, {samples[-1][key]}"
    tenth = max(len(records) // 10, 1)
    medians = [
        np.median([r["step_time_s"] for r in part]) * 1e3
        for part in (records[2:tenth], records[-tenth:])
    ]
    return (
        f"| {name} | {records[-1]['step']:,} | {memory[0]:.0f}, {memory[-1]:.0f} MB | "
        f"{slopes[0]:+.2f} | {slopes[1]:+.2f} | {each:+.0f} | {ends('threads')} | "
        f"{ends('files')} | {medians[0]:.1f}, {medians[1]:.1f} ms |"
    )


if __name__ == "__main__":
    sys.exit(main())
