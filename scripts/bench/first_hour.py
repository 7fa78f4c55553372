"""From README's first command to the first loss line: how long, and where the time goes.

    python scripts/bench/first_hour.py [--python PYTHON] [--environment DIR] [--out TABLE.md]

README's first command creates an environment, installs the package and trains. The script copies
the files that git tracks into a new folder with an empty home, and times there:

    1. environment and installation, as in README (not with `--environment`)
    2. training as in README, twice: cold (nothing tokenized or compiled yet), then warm. The time
       is from the start of the process to the first step line with its loss
    3. training twice more from another empty home, with a timer around each part

This takes about 4 minutes on 2 quiet cores; the installation time depends on the network.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
STATES = ("cold", "warm")
GOALS_S = {"cold": 40.0, "warm": 15.0}
LIMIT_S = 600.0
"""Timeout of the first step."""


def first_command() -> tuple[list[str], list[str]]:
    """Return the installation and the training part of README's first command."""
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"<!-- install: train -->\n```bash\n(.*?)\n```", readme)
    *install, train = line.split(" && ")
    return install, shlex.split(train)


def copy_checkout(folder: Path) -> None:
    """Copy the files that git tracks, as in a clone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def environ_of(home: Path) -> dict[str, str]:
    """Return the environment of a new user: no jaxdist variables, and an empty home."""
    ours = ("PYTHON", "JAX", "XLA", "XDG", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    home.mkdir(exist_ok=True)
    return {**kept, "HOME": str(home), "PYTHONUNBUFFERED": "1"}


def install(commands: list[str], python: str, folder: Path) -> dict[str, float]:
    """Return the seconds of each command that creates the environment."""
    seconds = {}
    for command in commands:
        words = shlex.split(command)
        words[0] = python if words[0] == "python3" else words[0]
        begin = time.perf_counter()
        subprocess.run(words, cwd=folder, check=True)
        seconds[" ".join(words[1:3])] = time.perf_counter() - begin
    return seconds


def seconds_to_loss(words: list[str], folder: Path, home: Path) -> float:
    """Return the seconds from the start of a command to its first step line; then kill it."""
    begin = time.perf_counter()
    running = subprocess.Popen(
        words, cwd=folder, env=environ_of(home), stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    try:
        for line in running.stdout:
            if re.match(r"step +1/\d+ +loss ", line):
                return time.perf_counter() - begin
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    raise SystemExit(f"{shlex.join(words)} ended without a step")


def phases_to_loss(python: str, folder: Path, home: Path) -> dict[str, float]:
    """Return the seconds of each part of this run up to its first record."""
    words = [python, str(Path(__file__)), "--inside"]
    done = subprocess.run(
        words, cwd=folder, env=environ_of(home), capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


class Clock:
    """Times the parts of this thread's work; nested parts do not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._parts = ["the rest"]
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`."""
        self._turn()
        self._parts.append(name)
        try:
            yield
        finally:
            self._turn()
            self._parts.pop()

    def read(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        self._turn()
        return dict(self.seconds)

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def around(self, owner: Any, function: str, name: str) -> None:
        """Count every call of a function as `name`."""
        inner = getattr(owner, function)

        @functools.wraps(inner)
        def timed(*args: Any, **named: Any) -> Any:
            with self.part(name):
                return inner(*args, **named)

        setattr(owner, function, timed)

    def imports(self) -> None:
        """Count imports of this thread from now on."""
        inner: Callable[..., Any] = builtins.__import__
        thread = threading.get_ident()

        def timed(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != thread or self._parts[-1] == "imports":
                return inner(*args, **named)
            with self.part("imports"):
                return inner(*args, **named)

        builtins.__import__ = timed


def inside() -> None:
    """Train as the command does with a timer around each part; print the seconds and exit."""
    begun = _process_age_s()
    sys.path[0] = ""  # as with `python -m`, instead of this script's folder
    clock = Clock()
    clock.imports()
    import jaxdist.data
    import jaxdist.plan.audit
    from jaxdist import runtime, train
    from jaxdist.checkpoint import Checkpointer
    from jaxdist.config import read_run
    from jaxdist.run.monitoring.timers import CompileTracker, StepTimer
    from jaxdist.run.program import Program
    from jaxdist.run.session import Session
    from jaxdist.run.setup import Parts
    from jaxdist.run.step_report import StepReporter

    clock.around(train, "start_devices", "devices")
    clock.around(jaxdist.data, "open_datasets", "data, tokenised")
    clock.around(jaxdist.plan.audit, "check_mesh", "tracing the step, mesh audit")
    clock.around(Parts, "init_state", "initial state")
    clock.around(CompileTracker, "compile", "compiling the step")
    clock.around(Checkpointer, "finish_preflight", "waiting for the save probe")
    clock.around(Session, "next_batch", "first batch")
    clock.around(StepTimer, "dispatch", "first step")
    clock.around(StepReporter, "flush", "first step")

    def report(record: dict[str, Any]) -> None:
        print(json.dumps({"starting Python": begun, **clock.read()}), flush=True)
        os._exit(0)

    with clock.part("settings"):
        config = read_run([], command="jaxdist.train")
    traces = runtime.TraceRequests()
    train.run(config, Program(on_record=report), runtime.Preemption(), traces.take)


def _process_age_s() -> float:
    """Return the seconds since this process was started."""
    started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - started / os.sysconf("SC_CLK_TCK")


def table(
    totals: dict[str, float], phases: dict[str, dict[str, float]], installed: dict[str, float]
) -> list[str]:
    """Return the results as Markdown."""
    lines = ["| from the command to the first loss line | seconds | goal |", "|---|---|---|"]
    lines += [f"| training, {name} | {totals[name]:.1f} | {GOALS_S[name]:.0f} |" for name in STATES]
    lines += [f"| installing: {name} | {took:.1f} | |" for name, took in installed.items()]
    if installed:
        everything = totals["cold"] + sum(installed.values())
        lines.append(f"| the whole of README's first command | {everything:.1f} | |")
    lines += ["", "| part of training | cold, s | warm, s |", "|---|---|---|"]
    names = dict.fromkeys(name for state in STATES for name in phases[state])
    for name in sorted(names, key=lambda name: -phases["cold"].get(name, 0.0)):
        cold, warm = (phases[state].get(name, 0.0) for state in STATES)
        lines.append(f"| {name} | {cold:.2f} | {warm:.2f} |")
    cold, warm = (sum(phases[state].values()) for state in STATES)
    return [*lines, f"| together | {cold:.2f} | {warm:.2f} |"]


def conditions(python: str, load: float) -> str:
    """Return versions, cores, load and time."""
    summary = (
        "import jax, platform; print('Python', platform.python_version(), 'jax', jax.__version__)"
    )
    versions = subprocess.run([python, "-c", summary], check=True, capture_output=True, text=True)
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return (
        f"{versions.stdout.strip()}, {len(os.sched_getaffinity(0))} cores, load average {load:.1f} "
        f"at the start, {now} UTC."
    )


def main() -> int:
    """Install, train, print the tables; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="python3", help="makes the environment")
    parser.add_argument("--environment", help="one that is installed already: install nothing")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside()
    load = os.getloadavg()[0]
    commands, words = first_command()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkout"
        copy_checkout(folder)
        installed = {}
        if not options.environment:
            installed = install(commands, options.python, folder)
        python = str(Path(options.environment or folder / ".venv").absolute() / "bin" / "python")
        words[0] = python
        home, other = Path(name) / "home", Path(name) / "other"
        totals = {state: seconds_to_loss(words, folder, home) for state in STATES}
        for compiled in [*(folder / "jaxdist").rglob("__pycache__")]:
            shutil.rmtree(compiled)
        phases = {state: phases_to_loss(python, folder, other) for state in STATES}
        lines = [conditions(python, load), "", *table(totals, phases, installed)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        head = f"# The first hour's first minute\n\n`python scripts/bench/{Path(__file__).name}`: "
        options.out.write_text(head + text)
    return int(any(totals[state] > GOALS_S[state] for state in STATES))


if __name__ == "__main__":
    sys.exit(main())
