"""Measure how long the processes of a run in a bucket survive its end if the store is gone.

    python scripts/bench/store_ends.py                   # 20 runs; about 20 minutes
    python scripts/bench/store_ends.py --only alone

A tiny model trains 12 steps on an S3 server of its own (moto, over HTTP): eight times as it is, six
times as two processes, and six times with a server that is stopped (SIGSTOP) or killed at one of
three moments: when the last step is told, when its checkpoint is committed, when the closing block
is printed. Measured is the time from the line of the last step to the exit of each process. A run
that ends with another code than it should, or later than `docs/storage.md` says, makes the exit
code 1; the stacks of all its threads are then in what it printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "store_ends.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import object_servers  # noqa: E402, needs sys.path

STEPS = 12
TRAIN = [
    *("--model.num_layers=1", "--model.d_model=32", "--model.num_heads=2", "--model.mlp_dim=64"),
    *("--train.seq_len=32", "--train.global_batch_size=4", f"--train.steps={STEPS}"),
    *("--monitoring.log_interval_steps=1", "--checkpoint.save_interval_steps=4"),
    "--eval.final_max_batches=1",
]
MOMENTS = {
    "last step": rf"step +{STEPS}/{STEPS}\b",
    "commit": rf"\b{STEPS} saved: ",
    "closing block": r"^ended\b",
}
"""Output lines of process 0."""

# Limits of waits in docs/storage.md; limit of retried requests of a save; and limit of an
# undisturbed end on a busy machine.
RETENTION_S, SUMMARY_S, LINES_S, LOCK_S, THREADS_S = 60, 60, 60, 30, 60
SAVE_S, WORK_S = 240, 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run: its processes, and the fault of its server with its moment."""

    processes: int = 1
    harm: str = ""  # "stopped" or "killed"
    moment: str = ""

    @property
    def kind(self) -> str:
        """Return the name in `--only`."""
        return "gone" if self.harm else ("alone" if self.processes == 1 else "two")

    def codes(self) -> tuple[int]:
        """Return the expected exit codes: a run without its last save or summary.json fails."""
        return (1,) if self.moment in ("last step", "commit") else (0,)

    def limit_s(self) -> int:
        """Return the documented limit from the last step to the last exit, in seconds."""
        if not self.harm:
            return WORK_S
        end_s = WORK_S + RETENTION_S + SUMMARY_S + LINES_S + LOCK_S + THREADS_S
        return end_s + SAVE_S if self.moment == "last step" else end_s


CASES = [
    *[Case()] * 8,
    *[Case(processes=2)] * 6,
    *[Case(harm=harm, moment=moment) for harm in ("stopped", "killed") for moment in MOMENTS],
]


@dataclasses.dataclass(frozen=True)
class Ended:
    """Outcome of a run.

    Attributes:
        work_s: seconds from the last step to the closing block; None = not printed.
        exit_s: seconds from the last step to the exit of each process.
        codes: exit codes of the processes.
    """

    case: Case
    work_s: float | None
    exit_s: list[float]
    codes: list[int]

    @property
    def is_right(self) -> bool:
        """Return True if every process ended in time with the expected exit code."""
        in_time = max(self.exit_s) <= self.case.limit_s()
        return in_time and all(code in self.case.codes() for code in self.codes)


class Process:
    """One process of a run: its lines with their times, and when it ended."""

    def __init__(self, command: list[str], environ: dict[str, str], seen: Callable[[str], None]):
        self.lines: list[tuple[float, str]] = []
        self.ended_at = 0.0
        self._seen = seen
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )
        self._threads = [threading.Thread(target=each) for each in (self._read, self._wait)]
        for thread in self._threads:
            thread.start()

    def when(self, pattern: str) -> float | None:
        """Return the time of the first line that matches."""
        return next((at for at, line in self.lines if re.search(pattern, line)), None)

    def join(self, until: float) -> None:
        """Wait for its end; after the deadline, dump its stacks and kill it."""
        self._threads[1].join(max(0.0, until - time.monotonic()))
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            time.sleep(2)
            self.process.kill()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.monotonic(), line.rstrip()))
            self._seen(line)

    def _wait(self) -> None:
        self.process.wait()
        self.ended_at = time.monotonic()


def run(case: Case, folder: Path) -> Ended:
    """Train once with a server of its own, and wait for the exits."""
    with pytest.MonkeyPatch.context() as patch, object_servers.s3_process(patch) as (_, server):
        return watch(case, folder, server.send_signal)


def watch(case: Case, folder: Path, signal_server: Callable[[int], None]) -> Ended:
    """Start the processes of a run, inject the server fault, and wait for their exits."""
    harms = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}

    def look(line: str) -> None:
        if case.harm and re.search(MOMENTS[case.moment], line):
            signal_server(harms[case.harm])

    port = object_servers.free_port()
    processes = []
    for number in range(case.processes):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environ["JAXDIST_CACHE"] = str(folder / "cache")
        command = [sys.executable, "-m", "jaxdist.train", "--run-dir=s3://bucket/run", *TRAIN]
        if case.processes > 1:
            environ["JAXDIST_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
            environ["JAXDIST_NUM_PROCESSES"] = str(case.processes)
            environ["JAXDIST_PROCESS_ID"] = str(number)
            command += [f"--mesh=dp={case.processes}", "--simulate=1"]
        processes.append(Process(command, environ, look if number == 0 else lambda line: None))
    began = time.monotonic()
    while (last := processes[0].when(MOMENTS["last step"])) is None:
        if processes[0].process.poll() is not None or time.monotonic() > began + 300:
            break
        time.sleep(0.01)
    last_at = last or time.monotonic()
    for process in processes:
        process.join(last_at + case.limit_s() + 60)
    done_at = processes[0].when(MOMENTS["closing block"])
    ended = Ended(
        case,
        done_at - last_at if done_at else None,
        [process.ended_at - last_at for process in processes],
        [process.process.returncode for process in processes],
    )
    if not ended.is_right or last is None:
        for process in processes:
            print("\n".join(f"{at - last_at:8.2f} {line}" for at, line in process.lines))
    return ended


def page(endings: list[Ended]) -> str:
    """Return the results as Markdown."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        "# The end of a run in a bucket",
        "",
        f"{os.cpu_count()} CPU cores, load average {load} when it ended, Python "
        f"{platform.python_version()}, jax {importlib.metadata.version('jax')}, moto "
        f"{importlib.metadata.version('moto')} over HTTP, commit {commit()}, "
        f"{datetime.date.today()}; `python scripts/bench/store_ends.py`. Seconds from the line of "
        f"the last of {STEPS} steps. Evaluation, the last save and its commit are part of them.",
        "",
        "| processes | the server is | closing block | exit of each process | exit codes | bound |",
        "|---|---|---|---|---|---|",
    ]
    for ended in endings:
        case = ended.case
        work = "none" if ended.work_s is None else f"{ended.work_s:.1f} s"
        exits = ", ".join(f"{seconds:.1f} s" for seconds in ended.exit_s)
        server = f"{case.harm} at the {case.moment}" if case.harm else "there"
        lines.append(
            f"| {case.processes} | {server} | {work} | {exits} | "
            f"{', '.join(map(str, ended.codes))} | {case.limit_s()} s |"
        )
    wrong = sum(not ended.is_right for ended in endings)
    return "\n".join([*lines, "", f"{len(endings)} runs, {wrong} not as they should be.", ""])


def commit() -> str:
    """Return the commit of the tested code."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Run all cases, print and write the page; return 1 if a process hung or ended wrongly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=("alone", "two", "gone"), help="one kind of runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="page of the results of all")
    options = parser.parse_args()
    endings = []
    with tempfile.TemporaryDirectory(prefix="bench-ends-") as folder:
        for case in CASES:
            if options.only in (None, case.kind):
                endings.append(run(case, Path(folder)))
                print(endings[-1], flush=True)
    text = page(endings)
    print(text)
    if not options.only:
        options.out.write_text(text)
    return 0 if all(ended.is_right for ended in endings) else 1


if __name__ == "__main__":
    sys.exit(main())
