"""Run selected tests repeatedly without importing jax again: a server that forks a child per job.

    python scripts/bench/warm_tests.py        # one JSON object per line: jobs in, outcomes out

The server imports the slow, unchanging packages (jax, flax, Orbax, pytest), starts no device, and
forks a child for each job. The child imports the package and its tests from the checkout of the
job. If the job has `watched` modules, the child records the code blocks that each test runs. A
block is a group of statements that always run together: a function body, a branch, a loop body.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

SLOW_IMPORTS = (
    *("numpy", "jax", "jax.numpy", "jax.experimental.multihost_utils", "flax.nnx", "optax"),
    *("jax.experimental.pallas", "orbax.checkpoint", "tensorstore", "tokenizers", "jinja2"),
    *("pytest", "safetensors.numpy"),
)
ENVIRONMENT = {
    **{"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
    "OPENBLAS_NUM_THREADS": "1",  # keeps numpy from starting threads, which a fork would lose
}
NO_TEST = 5
"""Exit code of pytest if no test is selected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Tests to run in a checkout.

    Attributes:
        root: the checkout.
        files: test files, in order.
        selected: ids of the tests to run; empty = all tests of the files.
        slow: True = run only tests marked slow, False = only the others.
        watched: modules, below the root, whose blocks are recorded.
        cache: value of JAXDIST_CACHE.
        scratch: folder for files of the tests, emptied first.
        limit_s: the child is killed after this time.
    """

    root: str
    files: list[str]
    selected: list[str]
    slow: bool = False
    watched: list[str] = dataclasses.field(default_factory=list)
    cache: str
    scratch: str
    limit_s: float


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """Outcome of a job.

    Attributes:
        code: exit code of pytest.
        failed: the first test that failed, "" if none did.
        seconds: duration of the child.
        collected_s: seconds until the first test began.
        tests: id -> seconds of each passed test.
        blocks: id -> the blocks that the test ran, as indices into `names`.
        names: blocks as "FILE:LINE".
    """

    code: int = 1
    failed: str = ""
    seconds: float = 0.0
    collected_s: float = 0.0
    tests: dict[str, float] = dataclasses.field(default_factory=dict)
    blocks: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    names: list[str] = dataclasses.field(default_factory=list)


def bodies_of(tree: ast.Module) -> list[list[ast.stmt]]:
    """Return the blocks of a module's functions, each as its original list of statements."""
    groups: dict[int, list[ast.stmt]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                for name in ("body", "orelse", "finalbody"):
                    part = getattr(node, name, None)
                    if isinstance(part, list) and part:
                        groups[id(part)] = part
    return list(groups.values())


def block_at(tree: ast.Module, line: int) -> int:
    """Return the first line of the innermost block around a line; 0 outside of functions."""
    around = [(body[0].lineno, body[-1].end_lineno or 0) for body in bodies_of(tree)]
    inside = [(last - first, first) for first, last in around if first <= line <= last]
    return min(inside)[1] if inside else 0


def watched_code(root: Path, file: str) -> CodeType:
    """Compile a module that calls `__ran__` with the name of each block that it enters."""
    path = root / file
    tree = ast.parse(path.read_text())
    for body in bodies_of(tree):
        call = ast.parse(f"__ran__('{file}:{body[0].lineno}')").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, body[0])
        is_words = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        body.insert(int(is_words), call)  # keep a docstring first
    return compile(tree, str(path), "exec")


class _Watched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from the given code, by name."""

    def __init__(self, root: Path, codes: dict[str, CodeType]) -> None:
        self.root = root
        self.codes = {_module_name(file): (file, code) for file, code in codes.items()}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module in `codes`, else None."""
        if name not in self.codes:
            return None
        file = self.root / self.codes[name][0]
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, loader=self, submodule_search_locations=inside
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of a module."""
        exec(self.codes[module.__name__][1], module.__dict__)


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class _Notes:
    """A pytest plugin: selects tests, and records their times, blocks and the first failure."""

    def __init__(self, selected: list[str]) -> None:
        self.selected = set(selected)
        self.outcome = Outcome()
        self.began = time.monotonic()
        self.ran: set[str] = set()
        self.is_complete = True
        self._positions: dict[str, int] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.selected:
            items[:] = [item for item in items if item.nodeid in self.selected]
        self.outcome.collected_s = time.monotonic() - self.began

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcome.failed = self.outcome.failed or report.nodeid

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.ran.clear()
        self.outcome.tests[nodeid] = 0.0
        self.is_complete = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        tests, name = self.outcome.tests, report.nodeid
        tests[name] = round(tests[name] + report.duration, 3)
        self.is_complete &= report.passed
        if report.failed:
            self.outcome.failed = self.outcome.failed or name
        if report.when == "teardown" and not self.is_complete:
            del tests[name]
        elif report.when == "teardown" and self.ran:
            for block in self.ran:
                self._positions.setdefault(block, len(self._positions))
            self.outcome.blocks[name] = sorted(self._positions[block] for block in self.ran)

    def result(self) -> Outcome:
        self.outcome.names = list(self._positions)
        return self.outcome


def run_here(job: Job, codes: dict[str, CodeType], results: Path) -> int:
    """Run the tests of a job in this child process, and write their outcome."""
    import pytest

    os.chdir(job.root)
    sys.path.insert(0, job.root)
    os.environ.update(PYTHONPATH=job.root, JAXDIST_CACHE=job.cache)
    notes = _Notes(job.selected)
    if codes:
        builtins.__ran__ = notes.ran.add  # type: ignore[attr-defined]
        sys.meta_path.insert(0, _Watched(Path(job.root), codes))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={job.scratch}"]
    options += [] if codes else ["-x"]
    options += ["-m", "slow" if job.slow else "not slow"]
    code = pytest.main([*options, *job.files], plugins=[notes])
    outcome = notes.result()
    outcome.code = int(code)
    results.write_text(json.dumps(dataclasses.asdict(outcome)))
    return int(code)


def run_in_child(job: Job, codes: dict[str, CodeType]) -> Outcome:
    """Fork a child, wait up to its limit, kill its remaining processes, and read its outcome."""
    with tempfile.TemporaryDirectory(prefix="warm-tests-") as folder:
        results, output = Path(folder) / "results.json", Path(folder) / "output"
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                with open("/dev/null") as nothing, output.open("wb") as file:
                    os.dup2(nothing.fileno(), 0)
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                with contextlib.suppress(OSError):  # the OOM killer should choose the child
                    Path("/proc/self/oom_score_adj").write_text("1000")
                code = run_here(job, codes, results)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # do not wait for threads of jax and Orbax
        status = _wait(child, start + job.limit_s)
        seconds = time.monotonic() - start
        if results.exists():
            outcome = Outcome(**json.loads(results.read_text()))
        elif status is None:
            outcome = Outcome(failed="(ran into the time limit)")
        else:
            end = output.read_text(errors="replace")[-300:]
            outcome = Outcome(failed=f"(process ended with {status}) {end}")
    outcome.seconds = round(seconds, 2)
    if outcome.code not in (0, NO_TEST) and not outcome.failed:
        outcome.failed = f"(pytest ended with {outcome.code})"
    return outcome


def _wait(child: int, until: float) -> int | None:
    """Return the exit code of a child, None if it had to be killed; end its session."""
    status = None
    try:
        while time.monotonic() < until:
            ended, value = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(value)
                break
            time.sleep(0.02)
    finally:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if kill is os.killpg or status is None:
                    kill(child, signal.SIGKILL)
        if status is None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    return status


def serve() -> int:
    """Answer jobs until stdin ends."""
    sys.path.remove(str(Path(__file__).parent))  # tests must not import data.py, step.py, …
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports must not mix with replies
    warnings.filterwarnings("ignore", message="os.fork|This process")
    for name in SLOW_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    programs: dict[tuple[str, str], CodeType] = {}
    for line in sys.stdin:
        job = Job(**json.loads(line))
        for file in job.watched:
            if (job.root, file) not in programs:
                programs[job.root, file] = watched_code(Path(job.root), file)
        codes = {file: programs[job.root, file] for file in job.watched}
        print(json.dumps(dataclasses.asdict(run_in_child(job, codes))), file=replies, flush=True)
    return 0


class Server:
    """A server in a separate process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job) -> Outcome:
        """Run a job and return its outcome.

        Raises:
            RuntimeError: the server has ended.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the server of tests has ended; its words are above")
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End the server, and kill a running child."""
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[Server]]:
    """Start that many servers."""
    started: list[Server] = []
    try:
        started += [Server() for _ in range(count)]
        yield started
    finally:
        for server in started:
            server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(serve())
