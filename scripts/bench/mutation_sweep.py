"""Makes small mistakes in the package at random places, and counts which of them tests notice.

    python scripts/bench/mutation_sweep.py [--count 300] [--only ROOM ...] [--seed 0]
        [--resume RESULTS.jsonl] [--workers 2] [--files 3] [--out TABLE.md]

A mistake (mutant) changes one expression: an operator, a comparison, a number, a truth value, a
condition, or what a function returns. Mutants are drawn evenly over the rooms, by the seed. Each is
tried in a copy of the repository with the fast tests of the few test files that import the changed
module, or its package, most closely; those must pass without it. It is killed when they fail or
take far longer. Survivors are listed with their line: a missing test, or a change without effect.

With `--resume` results are kept in a file, a line each, and mutants found there are not run again.
`mutants.py` plants faults that were written by hand.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import functools
import json
import platform
import queue
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mutants import NO_TEST, ROOT, clones, run_tests, uncommitted

ROOMS = {
    "step": ["jaxdist/core/step"],
    "parallel": ["jaxdist/core/parallel", "jaxdist/core/collectives.py", "jaxdist/core/attention"],
    "models": ["jaxdist/models"],
    "losses": ["jaxdist/core/losses.py", "jaxdist/core/precision.py"],
    "optim": ["jaxdist/optim"],
    "data": ["jaxdist/data"],
    "checkpoint": ["jaxdist/checkpoint"],
    "generate": [
        "jaxdist/generate.py",
        "jaxdist/run/decoding.py",
        "jaxdist/run/text_generation.py",
    ],
    "evaluation": ["jaxdist/evaluate.py", "jaxdist/run/evaluation_loop.py"],
}
LIMIT = 4.0
"""A mutant is killed too when its tests take this many times as long as without it, and 60 s."""

_OPERATORS: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
_COMPARISONS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
_TEXT_CALLS = ("setting", "log", "info", "warning", "print", "event", "append", "TypeVar")
"""Calls whose arguments are mostly words for people; `problems.append` is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed expression: `old` at offset `start` of a file becomes `new`."""

    room: str
    file: str
    line: int
    kind: str
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        short = lambda text: " ".join(text.split())[:60]
        return f"{self.file}:{self.line} {self.kind}: `{short(self.old)}` -> `{short(self.new)}`"

    def plant(self, root: Path) -> str:
        """Change the file below `root`; its text before."""
        path = root / self.file
        text = path.read_text()
        content = text.encode()
        end = self.start + len(self.old.encode())
        assert content[self.start : end].decode() == self.old
        path.write_bytes(content[: self.start] + self.new.encode() + content[end:])
        return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a mutant; `killed_by` is the first test that failed, "" if none did."""

    mutant: Mutant
    tests: list[str]
    killed_by: str
    seconds: float


class _Changes(ast.NodeVisitor):
    """Collects (node, kind, changed source) of a module; leaves types and words for people out."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.expr, str, str]] = []

    def _add(self, node: ast.expr, kind: str, new: ast.expr | str) -> None:
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        self.found.append((node, kind, f"({text})"))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right))
        if not words and type(node.op) in _OPERATORS:
            other = _OPERATORS[type(node.op)]()
            self._add(node, "arithmetic", ast.BinOp(node.left, other, node.right))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if type(node.ops[0]) in _COMPARISONS and not _is_main(node):
            ops = [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
            self._add(node, "comparison", ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "boolean", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, "boolean" if isinstance(node.op, ast.Not) else "sign", node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", repr(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, "constant", repr(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        if not _is_main(node.test):
            self._add(node.test, "condition", f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(node.test, "condition", f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add(node.value, "return", "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in _TEXT_CALLS:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """States what holds."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if not isinstance(node.slice, ast.Constant):
            self.visit(node.slice)


def _is_main(test: ast.expr) -> bool:
    """Whether a condition asks if the module is the program: no test imports it as that."""
    return isinstance(test, ast.Compare) and ast.unparse(test.left) == "__name__"


def mutants_of(room: str, file: Path) -> Iterator[Mutant]:
    """Every mutant of a module."""
    text = file.read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    changes = _Changes()
    changes.visit(ast.parse(text))
    name = str(file.relative_to(ROOT))
    for node, kind, new in changes.found:
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        old = text.encode()[start:end].decode()
        yield Mutant(
            room=room, file=name, line=node.lineno, kind=kind, start=start, old=old, new=new
        )


def sample(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """About `count` mutants, as many of each room; the same for the same code and seed."""
    drawn = []
    for room in rooms:
        paths = [ROOT / name for name in ROOMS[room]]
        files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
        found = [mutant for file in files for mutant in mutants_of(room, file)]
        share = min(len(found), -(-count // len(rooms)))
        drawn += random.Random(f"{seed} {room}").sample(found, share)
    return drawn


@functools.cache
def imports_of(file: Path) -> frozenset[str]:
    """Modules and their members that a file imports, dotted."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(named)


def tests_of(file: str, most: int) -> list[str]:
    """The test files closest to a module.

    They import it or have its name, import its package, or import a helper that does.
    """
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = module.rpartition(".")[0]
    stem = set(module.rpartition(".")[2].split("_"))
    words = stem | {package.rpartition(".")[2]}
    ranked = []
    for test in sorted((ROOT / "tests").glob("test_*.py")):
        own = imports_of(test)
        helpers = [ROOT / "tests" / f"{name}.py" for name in own]
        indirect = frozenset().union(*(imports_of(h) for h in helpers if h.is_file()))
        named = set(test.stem.split("_"))
        near = [module in own or stem <= named, package in own]
        near += [module in indirect, package in indirect]
        if any(near):
            alike = len(words & named)
            ranked.append((near.index(True), -alike, test.stat().st_size, test.name))
    return [f"tests/{name}" for *_, name in sorted(ranked)[:most]]


def try_mutant(
    mutant: Mutant, tests: list[str], usual_s: float, copies: queue.Queue[Path]
) -> Result:
    """Run the tests with the mutant in a copy that is free."""
    root = copies.get()
    try:
        text = mutant.plant(root)
        try:
            code, first, seconds = run_tests(root, _arguments(tests), LIMIT * usual_s + 60)
        finally:
            (root / mutant.file).write_text(text)
    finally:
        copies.put(root)
    killed_by = first if code not in (0, NO_TEST) else ""
    return Result(mutant=mutant, tests=tests, killed_by=killed_by, seconds=round(seconds, 1))


def _arguments(tests: list[str]) -> str:
    return " ".join(["-m 'not slow'", *tests])


def table(results: list[Result]) -> str:
    """Killed and survived by room, and the survivors, as Markdown."""
    rooms: dict[str, collections.Counter[bool]] = collections.defaultdict(collections.Counter)
    for result in results:
        rooms[result.mutant.room][bool(result.killed_by)] += 1
    lines = ["| room | mutants | killed | survived | kill rate |", "|---|---|---|---|---|"]
    everything: collections.Counter[bool] = sum(rooms.values(), collections.Counter())
    for room, counts in [*sorted(rooms.items()), ("all", everything)]:
        total = counts.total()
        rate = f"{counts[True] / max(1, total):.0%}"
        lines.append(f"| {room} | {total} | {counts[True]} | {counts[False]} | {rate} |")
    survivors = [result for result in results if not result.killed_by]
    lines += ["", "Survivors, and the tests that did not notice:", ""]
    for result in sorted(survivors, key=lambda r: (r.mutant.room, r.mutant.file, r.mutant.line)):
        tests = ", ".join(test.removeprefix("tests/") for test in result.tests) or "no test"
        lines.append(f"- {result.mutant.room}: {result.mutant} ({tests})")
    return "\n".join(lines) + "\n"


def read_results(path: Path | None) -> list[Result]:
    """What earlier runs have written."""
    if path is None or not path.exists():
        return []
    records = map(json.loads, path.read_text().splitlines())
    return [Result(**{**record, "mutant": Mutant(**record["mutant"])}) for record in records]


def main() -> int:
    """Sample, run, print the table; 2 when tests are red without a mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="mutants, over all rooms")
    parser.add_argument("--only", nargs="*", default=[], choices=[*ROOMS], help="rooms")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--resume", type=Path, help="file of results, made or gone on with")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at a time")
    parser.add_argument("--files", type=int, default=3, help="test files for a mutant at most")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    if left := uncommitted():
        parser.error(f"clones are of the last commit. Commit or remove first:\n{left}")
    chosen = sample(options.only or [*ROOMS], options.count, options.seed)
    known = {result.mutant: result for result in read_results(options.resume)}
    todo = [mutant for mutant in chosen if mutant not in known]
    selections = {m.file: tests_of(m.file, options.files) for m in todo}
    with clones(options.workers) as copies:
        usual: dict[tuple[str, ...], float] = {}
        for tests in sorted(map(tuple, {tuple(s) for s in selections.values() if s})):
            code, first, usual[tests] = run_tests(copies.queue[0], _arguments([*tests]))
            if code == NO_TEST:
                selections = {f: [] if tuple(s) == tests else s for f, s in selections.items()}
            elif code:
                print(f"red without a mutant: {' '.join(tests)}: {first}", file=sys.stderr)
                return 2
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            tried = []
            for mutant in todo:
                if tests := selections[mutant.file]:
                    seconds = usual[tuple(tests)]
                    tried.append(pool.submit(try_mutant, mutant, tests, seconds, copies))
                else:
                    known[mutant] = Result(mutant=mutant, tests=[], killed_by="", seconds=0.0)
            for done in concurrent.futures.as_completed(tried):
                result = known[done.result().mutant] = done.result()
                said = "killed  " if result.killed_by else "SURVIVED"
                print(said, result.mutant, f"{result.seconds:.0f} s", result.killed_by, flush=True)
                if options.resume:
                    with options.resume.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    text = table([known[mutant] for mutant in chosen])
    if options.out:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        head = (
            f"# Mutants at random places\n\n`python scripts/bench/mutation_sweep.py "
            f"--only {' '.join(options.only or ROOMS)} --count {options.count} --seed "
            f"{options.seed} --files {options.files}`, commit {commit}, "
            f"Python {platform.python_version()}.\n\n"
        )
        options.out.write_text(head + text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
