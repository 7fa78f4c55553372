"""Plants faults in a copy of the package, one at a time, and checks that tests turn red.

    python scripts/bench/mutants.py [--only NAME ...] [--workers 2] [--out TABLE.md] [--check]

`mutants.toml` lists the faults: a file, the text to replace, its replacement, and the tests that
must fail. The text must occur exactly once, so a fault that no longer fits the code is an error and
not a pass. Each selection of tests must pass without a fault first: a red test would prove nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import platform
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 900
NO_TEST = 5
"""Exit code of pytest if the given files contain no selected test."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong line. `tests` are pytest arguments; `room` groups the table."""

    name: str
    room: str
    file: str
    old: str
    new: str
    tests: str

    def plant(self, root: Path) -> str:
        """Change the file below `root`; return its text before the change.

        Raises:
            ValueError: the text to replace does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))
        return text


def read_faults(only: list[str]) -> list[Fault]:
    """Return all faults of mutants.toml, or only the named ones."""
    tables = tomllib.loads((Path(__file__).with_suffix(".toml")).read_text())["fault"]
    faults = [Fault(**table) for table in tables]
    return [fault for fault in faults if not only or fault.name in only]


def run_tests(root: Path, tests: str, timeout_s: float = TIMEOUT_S) -> tuple[int, str, float]:
    """Return pytest's exit code, the first test that failed, seconds."""
    start = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command = [*pytest, "-m", "product or not product", *shlex.split(tests)]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and processes of the tests
            code, output = 1, "FAILED (ran into the time limit)"
        except BaseException:  # Ctrl-C does not reach another session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    first = failed[0].split(" ", 1)[1].split(" - ")[0] if failed else output[-300:]
    return code, first, time.monotonic() - start


def try_fault(fault: Fault, copies: queue.Queue[Path]) -> tuple[Fault, bool, str, float]:
    """Test a fault in a free copy; return (fault, caught, the test that caught it, seconds)."""
    root = copies.get()
    try:
        text = fault.plant(root)
        try:
            code, first, seconds = run_tests(root, fault.tests)
        finally:
            (root / fault.file).write_text(text)
    finally:
        copies.put(root)
    return fault, code == 1, first if code == 1 else "", seconds


def uncommitted() -> str:
    """Return the uncommitted changes as git lists them; "" if there are none."""
    parts = ["jaxdist", "tests", "scripts", "configs", "pyproject.toml"]
    command = ["git", "status", "--porcelain", "--", *parts]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def clones(count: int) -> Iterator[queue.Queue[Path]]:
    """Create that many copies of the last commit, for workers to borrow and return."""
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            copy = Path(folder) / str(number)
            subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
            copies.put(copy)
        yield copies


def table(results: list[tuple[Fault, bool, str, float]]) -> str:
    """Return the results as Markdown."""
    lines = ["| room | fault | caught by | s |", "|---|---|---|---|"]
    for fault, caught, first, seconds in sorted(results, key=lambda r: (r[0].room, r[0].name)):
        test = f"`{first.removeprefix('tests/')}`" if caught else "**not caught**"
        lines.append(f"| {fault.room} | {fault.name} | {test} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Plant, test, print the table; return 1 if a fault survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of faults to plant")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at a time")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--check", action="store_true", help="only check that all faults fit")
    options = parser.parse_args()
    if left := uncommitted():
        parser.error(f"clones are of the last commit. Commit or remove first:\n{left}")
    faults = read_faults(options.only)
    with clones(options.workers) as copies:
        copy = copies.queue[0]
        for fault in faults:
            (copy / fault.file).write_text(fault.plant(copy))
        if options.check:
            print(f"{len(faults)} faults fit the code")
            return 0
        for tests in sorted({fault.tests for fault in faults}):
            code, first, _ = run_tests(copy, tests)
            if code:
                print(f"red without a fault: {tests}: {first}", file=sys.stderr)
                return 2
        results = []
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            tried = [pool.submit(try_fault, fault, copies) for fault in faults]
            for done in concurrent.futures.as_completed(tried):
                results.append(done.result())
                fault, caught, first, seconds = results[-1]
                print(
                    f"{'caught' if caught else 'MISSED'} {fault.name} {seconds:.0f} s {first}",
                    flush=True,
                )
    missed = [result for result in results if not result[1]]
    text = table(results)
    if options.out:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        head = (
            "# Planted faults\n\n"
            f"`python scripts/bench/mutants.py`, commit {commit}, "
            f"Python {platform.python_version()}: {len(results)} faults planted one at a time, "
            f"{len(results) - len(missed)} caught.\n\n"
        )
        options.out.write_text(head + text)
    print(text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
