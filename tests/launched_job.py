"""A tiny training job of two launched processes, into which tests inject faults.

Its rows come from `faulty_dataset`. Its run directory can be on a separate file system, which tests
can fill and unmount.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from commands import ROOT

PACE_S = 0.05  # seconds per row, two rows a step and process: slow enough to inject between steps
DETECT_S, RECOVER_S = 120.0, 180.0  # for a loaded machine; measured: a few seconds
TRAIN = [
    *("--simulate=1", "--mesh=dp=2", "--model.num_layers=1", "--model.d_model=32"),
    *("--model.num_heads=2", "--model.num_kv_heads=2", "--train.global_batch_size=4"),
    *("--train.seq_len=32", "--data.sources=faulty_dataset:rows"),
    *("--checkpoint.save_interval_steps=5", "--eval.interval_steps=0"),
    "--monitoring.tracker=",
    *("--runtime.heartbeat_timeout_s=10", "--runtime.join_timeout_s=10"),
    "--resilience.step_timeout_s=5",
]


def training(*flags: str) -> list[str]:
    names = {flag.partition("=")[0] for flag in flags}
    return [flag for flag in TRAIN if flag.partition("=")[0] not in names] + list(flags)


def workers_of(launcher: int) -> list[int]:
    words = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    pids = []
    try:
        for child in children_of(launcher):
            if b"jaxdist.train" in words(child):
                pids.append(child)
            elif b"jaxdist.tools.launch.fork_server" in words(child):
                pids += [fork for fork in children_of(child) if words(fork) != [b""]]
    except OSError:  # one has ended in the meantime
        return []
    return pids


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class ScenarioFailed(Exception):
    """Error if a fault's cause was not reported or the job did not continue."""


class Job:
    """A run in `folder`, started again by `start` as a scheduler would.

    Args:
       folder: created; holds the console output, the requests of `faulty_dataset` and the run.
       steps: of the complete run.
       flags: training flags; they replace those of `TRAIN` with the same name.
       disk_mb: size of a separate file system for the run, which can be filled and unmounted; 0:
           the run is in the folder.
    """

    def __init__(self, folder: Path, steps: int, *flags: str, disk_mb: int = 0):
        self.folder, self.steps = folder, steps
        self.train = training(*flags, f"--run-dir={folder / 'mount' / 'run'}", f"--steps={steps}")
        self.mount = folder / "mount"
        self.run_dir = self.mount / "run"
        self.console = folder / "console.log"
        self.process: subprocess.Popen | None = None
        self.mount.mkdir(parents=True)
        self._disk = folder / "disk" if disk_mb else None
        if self._disk is not None:
            self._disk.mkdir()
            _mount("-t", "tmpfs", "-o", f"size={disk_mb}m", "tmpfs", str(self._disk))
            self.bring_back()

    def start(self, *flags: str) -> None:
        own = [
            *("--nproc-per-node=2", "--backoff-s=0.1", "--max-backoff-s=1", "--max-restarts=20"),
            *(*flags, "--"),
        ]
        with open(self.console, "ab") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxdist.launch", *own, *self.train],
                stdout=console,
                stderr=console,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                    "FAULT_FOLDER": str(self.folder),
                },
            )

    def pace(self, seconds: float) -> None:
        """Set the seconds that each row takes from now on."""
        fresh = self.folder / "pace.new"
        fresh.write_text(str(seconds))
        os.replace(fresh, self.folder / "pace")

    def workers(self) -> list[int]:
        """Return process ids in the order of their indices if both processes exist, else none.

        A child that is still a copy of the launcher does not count. Stopping it before it executes
        its own program would stop the launcher too, which waits for that.
        """
        pids = workers_of(self.process.pid)
        return pids if len(pids) == 2 else []

    def output(self, since: int = 0) -> str:
        with open(self.console, "rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def position(self) -> int:
        return self.console.stat().st_size if self.console.exists() else 0

    def num_bytes(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def trains(self, since: int) -> bool:
        try:
            with open(self.run_dir / "metrics.jsonl", "rb") as file:
                file.seek(since)
                return b'"kind": "train"' in file.read()
        except OSError:
            return False

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float) -> float:
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + timeout_s:
                raise ScenarioFailed(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_for_line(self, pattern: str, since: int, timeout_s: float = DETECT_S) -> float:
        return self.wait(lambda: re.search(pattern, self.output(since)), pattern, timeout_s)

    def wait_for_end(self, timeout_s: float = RECOVER_S) -> int:
        self.wait(lambda: self.process.poll() is not None, "the launcher ends", timeout_s)
        return self.process.returncode

    def preempt(self) -> None:
        """End the job as a scheduler does, with a save; requires that training has started."""
        self.wait(self.workers, "two processes", DETECT_S)
        since = self.position()
        self.process.send_signal(signal.SIGTERM)
        code = self.wait_for_end()
        if code != 75:
            raise ScenarioFailed(
                f"SIGTERM to the launcher: exit code {code}: {self.output(since)[-800:]}"
            )

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the run's file system completely."""
        rest = self._disk / "filler"
        with open(rest, "wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        try:
            yield
        finally:
            rest.unlink()

    def take_away(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.mount)], check=True)

    def bring_back(self) -> None:
        _mount("--bind", str(self._disk), str(self.mount))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for path in (self.mount, self._disk) if self._disk else ():
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def no_mounts() -> str:
    """Return why no file system can be mounted here, or an empty text if one can."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    if shutil.which("mount") is None:
        return "no mount command here"
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    trial = subprocess.run(words, capture_output=True, text=True)
    return (
        f"no file system can be mounted: {trial.stderr.strip()[-200:]}" if trial.returncode else ""
    )
