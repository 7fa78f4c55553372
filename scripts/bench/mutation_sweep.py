"""Makes small mistakes in the package at random places, and counts which of them tests notice.

    python scripts/bench/mutation_sweep.py [--count 300] [--only ROOM ...] [--seed 0] [--workers 2]
        [--minutes M] [--work FOLDER] [--results FILE.jsonl] [--again] [--slow] [--out TABLE.md]

`random_mutants.py` says what a mistake (mutant) is and what the rooms are; mutants are drawn evenly
over the rooms, by the seed, and the rooms take turns. First every fast test of the rooms is run
once without a mutant, to see which blocks of code it runs (`warm_tests.py`). Then each mutant is
planted in a copy of the repository and tried in up to three rounds, until one kills it:

1. the tests that run its block, the most special ones first, for about ten seconds
2. the other tests of the files that run its block, since a test may use what an earlier one has
   built, for about half a minute
3. with `--slow`, the slow tests of the files that import its module most closely

It is killed when a test fails, or takes far longer than without it. At the end the tests that
killed are run once more without a mutant; what a red one killed is not counted. Survivors are
listed with their line: a missing test, or a change without effect.

Records of the tests and results are kept below `--work`, a line after each mutant: a sweep that was
stopped goes on where it was with the same command. After `--minutes` no further mutant is tried,
and the table is of those that were. `--again` tries survivors once more, after new tests.
`mutants.py` plants faults that were written by hand.
"""

from __future__ import annotations

import argparse
import ast
import collections
import compileall
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import py_compile
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mutants import clones, uncommitted
from random_mutants import ROOMS, ROOT, Mutant, files_of, sample
from warm_tests import NO_TEST, Job, Outcome, Server, block_at, servers

LIMIT = 4.0
"""A mutant is also killed if its tests take longer than this × the normal time, plus 60 s."""

NEAR_S, FILES_S = 10.0, 30.0
"""Maximum seconds of tests in the first and second round, measured without a mutant."""

MOST_FILES = 4
"""Maximum test files per round, because each needs its imports."""

OTHER_ROOMS = (
    *("architecture", "coordination", "doctor", "formatting", "gpu_configs", "hardware", "hub"),
    *("kubernetes", "launch", "monitoring", "next_commands", "notebooks", "plan", "progress"),
    *("readme", "report", "runtime", "slurm", "sweep", "texts", "trackers", "wheel", "worker"),
)
"""Prefixes of test files for rooms without mutants, or that only start commands."""

PROGRAMS = Path(tempfile.gettempdir()) / f"jaxdist-tests-{os.getuid()}" / "xla"
"""Cache of compiled programs and corpora of the tests (tests/conftest.py)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a mutant.

    Attributes:
        files: test files that were run.
        num_tests: tests of the last round; 0 for slow ones, which are not counted.
        round: number of the last round, from 1.
        killed_by: the first test that failed, "" if none did.
        seconds: total time of all rounds.
    """

    mutant: Mutant
    files: list[str]
    num_tests: int
    round: int
    killed_by: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A test file without a mutant: seconds until its first test; id -> seconds, id -> blocks."""

    file: str
    collected_s: float
    tests: dict[str, float]
    blocks: dict[str, frozenset[str]]

    @property
    def seconds(self) -> float:
        """Return the seconds of the complete file."""
        return self.collected_s + sum(self.tests.values())


class Workplace:
    """A server of tests, and a copy of the repository to plant in."""

    def __init__(self, server: Server, root: Path, folder: Path) -> None:
        self.server = server
        self.root = root
        self.cache = folder / "cache"
        self.scratch = folder / "tests"
        self.cache.mkdir(parents=True)

    def run(
        self, files: list[str], selected: list[str], usual_s: float, **options: object
    ) -> Outcome:
        """Run tests with the planted mutant; discard its changes to the cache."""
        return self.server.run(
            Job(
                root=str(self.root), files=files, selected=selected, cache=str(self._own_cache()),
                scratch=str(self.scratch), limit_s=LIMIT * usual_s + 60, **options,
            )
        )  # fmt: skip

    def _own_cache(self) -> Path:
        """Return a cache with the tests' programs and copied corpora; a mutant may corrupt them."""
        corpora = self.cache / "corpora"
        shutil.rmtree(corpora, ignore_errors=True)
        for entry in PROGRAMS.iterdir() if PROGRAMS.is_dir() else []:
            if entry.name == "corpora":
                shutil.copytree(entry, corpora)
            elif entry.is_dir() and not (self.cache / entry.name).exists():
                (self.cache / entry.name).symlink_to(entry)
        return self.cache


def digest_of(*paths: Path) -> str:
    """Return a digest of the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def records(work: Path, workplaces: Sequence[Workplace], only: Sequence[str]) -> list[Record]:
    """Return the lines that each test file runs; cached in `work` while nothing changes."""
    watched = sorted({str(f.relative_to(ROOT)) for room in ROOMS for f in files_of(room)})
    package = digest_of(*sorted((ROOT / "jaxdist").rglob("*.py")), *_helpers())
    folder = work / "recorded" / package
    folder.mkdir(parents=True, exist_ok=True)
    tests = [
        path
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if (path.stem in only if only else not path.stem[5:].startswith(OTHER_ROOMS))
    ]
    kept = {path: folder / f"{path.stem}-{digest_of(path)}.json" for path in tests}
    todo = sorted((path for path in tests if not kept[path].exists()), key=_size, reverse=True)
    with concurrent.futures.ThreadPoolExecutor(len(workplaces)) as pool:
        free: queue.Queue[Workplace] = queue.Queue()
        for workplace in workplaces:
            free.put(workplace)

        def record(path: Path) -> None:
            workplace = free.get()
            name = f"tests/{path.name}"
            outcome = workplace.run([name], [], 150.0, watched=watched)
            free.put(workplace)
            if outcome.failed and not outcome.tests:  # the next sweep tries again
                print(f"{name} LEFT OUT, no test is green: {outcome.failed}", flush=True)
                return
            print(
                f"{name}: {len(outcome.tests)} tests, {outcome.seconds:.0f} s"
                + (f"; left out as red: {outcome.failed} …" if outcome.failed else ""),
                flush=True,
            )
            written = kept[path].with_suffix(".part")
            written.write_text(json.dumps(dataclasses.asdict(outcome)))
            written.rename(kept[path])

        list(pool.map(record, todo))
    there = [path for path in tests if kept[path].exists()]
    if not there:
        raise SystemExit("no test is green")
    return [_read_record(f"tests/{path.name}", kept[path]) for path in there]


def _size(path: Path) -> int:
    return path.stat().st_size


def _helpers() -> list[Path]:
    return sorted(set((ROOT / "tests").glob("*.py")) - set((ROOT / "tests").glob("test_*.py")))


def _read_record(file: str, path: Path) -> Record:
    outcome = Outcome(**json.loads(path.read_text()))
    names = outcome.names
    blocks = {
        test: frozenset(names[n] for n in outcome.blocks.get(test, [])) for test in outcome.tests
    }
    return Record(file=file, collected_s=outcome.collected_s, tests=outcome.tests, blocks=blocks)


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@functools.cache
def imports_of(file: Path) -> frozenset[str]:
    """Return the dotted modules and members that a file imports."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(named)


def near(file: str, tests: Iterable[str]) -> list[str]:
    """Return the test files closest to a module, the closest first.

    Close files import the module or have its name, import its package, or a helper that does.
    """
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = module.rpartition(".")[0]
    stem = set(module.rpartition(".")[2].split("_"))
    words = stem | {package.rpartition(".")[2]}
    ranked = []
    for test in tests:
        own = imports_of(ROOT / test)
        helpers = [ROOT / "tests" / f"{name}.py" for name in own]
        indirect = frozenset().union(*(imports_of(h) for h in helpers if h.is_file()))
        named = set(Path(test).stem.split("_"))
        is_near = [module in own or stem <= named, package in own]
        is_near += [module in indirect, package in indirect]
        if any(is_near):
            ranked.append((is_near.index(True), -len(words & named), _size(ROOT / test), test))
    return [name for *_, name in sorted(ranked)]


Round = tuple[list[str], list[str], float]
"""Test files, ids of the tests in them (none: all), seconds without a mutant."""


def rounds(mutant: Mutant, recorded: Sequence[Record]) -> Iterator[Round]:
    """Yield the first two rounds of a mutant; none if no test is related."""
    block = f"{mutant.file}:{block_at(_tree(mutant.file), mutant.line)}"
    ranked = sorted(
        (len(blocks) * (0.2 + one.tests[test]), test, one)
        for one in recorded
        for test, blocks in one.blocks.items()
        if block in blocks
    )
    if not ranked:  # module-level statements, or code run only by other processes
        closest = near(mutant.file, [one.file for one in recorded])[:MOST_FILES]
        complete = [next(one for one in recorded if one.file == file) for file in closest]
        yield from filter(None, (_rest(complete[:2], set()), _rest(complete[2:], set())))
        return
    chosen: list[str] = []
    files: list[str] = []
    total_s = 0.0
    for _, test, one in ranked:
        is_new = one.file not in files
        cost_s = one.tests[test] + is_new * one.collected_s
        if chosen and (total_s + cost_s > NEAR_S or (is_new and len(files) == MOST_FILES)):
            continue
        files += [one.file] * is_new
        chosen.append(test)
        total_s += cost_s
    yield files, chosen, total_s
    complete, total_s = [], 0.0
    for one in {id(one): one for *_, one in ranked}.values():
        if not complete or (total_s + one.seconds <= FILES_S and len(complete) < MOST_FILES):
            complete.append(one)
            total_s += one.seconds
    yield from filter(None, [_rest(complete, set(chosen))])


def _rest(complete: Sequence[Record], done: set[str]) -> Round | None:
    """Return the tests of files that are not done; None without any."""
    left = {one.file: [test for test in one.tests if test not in done] for one in complete}
    left = {file: tests for file, tests in left.items() if tests}
    if not left:
        return None
    selected = [test for tests in left.values() for test in tests]
    return list(left), selected, sum(one.seconds for one in complete)


def try_mutant(
    mutant: Mutant,
    recorded: Sequence[Record],
    slow: bool,
    free: queue.Queue[Workplace],
    end: float = float("inf"),
) -> Result | None:
    """Plant a mutant in a free copy, run its rounds, and remove the mutant.

    Return None if no copy is free before `end`, in seconds of `time.monotonic`.
    """
    steps: list[tuple[Round, bool]] = [(one, False) for one in rounds(mutant, recorded)]
    if slow:
        closest = near(mutant.file, [one.file for one in recorded])
        closest = [f for f in closest if "mark.slow" in (ROOT / f).read_text()][:2]
        steps += [((closest, [], 60.0), True)] if closest else []
    workplace = free.get()
    if time.monotonic() > end:
        free.put(workplace)
        return None
    seconds, last, killed_by = 0.0, 0, ""
    files: list[str] = []
    selected: list[str] = []
    try:
        text = mutant.plant(workplace.root)
        try:
            for last, ((files, selected, usual_s), is_slow) in enumerate(steps, 1):  # noqa: B007
                outcome = workplace.run(files, selected, usual_s, slow=is_slow)
                seconds += outcome.seconds
                if outcome.code not in (0, NO_TEST):
                    killed_by = outcome.failed
                    break
        finally:
            (workplace.root / mutant.file).write_text(text)
    finally:
        free.put(workplace)
    return Result(
        mutant=mutant, files=files, num_tests=len(selected), round=last, killed_by=killed_by,
        seconds=round(seconds, 1),
    )  # fmt: skip


def red_alone(killers: Iterable[str], free: queue.Queue[Workplace]) -> list[str]:
    """Return the tests that also fail without a mutant, run with the others of their file."""
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for test in killers:
        if "::" in test:
            by_file[test.partition("::")[0]].append(test)

    def check(file: str) -> list[str]:
        workplace = free.get()
        try:
            red: list[str] = []
            while selected := [test for test in by_file[file] if test not in red]:
                outcome = workplace.run([file], selected, 60.0)
                if outcome.failed not in selected:
                    return red
                red.append(outcome.failed)
            return red
        finally:
            free.put(workplace)

    with concurrent.futures.ThreadPoolExecutor(free.qsize()) as pool:
        return [test for red in pool.map(check, sorted(by_file)) for test in red]


def table(results: list[Result]) -> str:
    """Return killed and survived counts by room, and the survivors, as Markdown."""
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
    lines += ["", "Survivors, and the test files that did not notice:", ""]
    for result in sorted(survivors, key=lambda r: (r.mutant.room, r.mutant.file, r.mutant.line)):
        tests = ", ".join(Path(file).name for file in result.files) or "no test runs it"
        lines.append(f"- {result.mutant.room}: {result.mutant} ({tests})")
    return "\n".join(lines) + "\n"


def read_results(path: Path) -> dict[Mutant, Result]:
    """Return the results of earlier runs; later lines win."""
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    read = [Result(**{**record, "mutant": Mutant(**record["mutant"])}) for record in rows]
    return {result.mutant: result for result in read}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="mutants, over all rooms")
    parser.add_argument("--only", nargs="*", default=[], choices=[*ROOMS], help="rooms")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at a time")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="after these no mutant is begun"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[], help="only these test files, as test_optim (for a trial)"
    )
    work = Path(tempfile.gettempdir()) / f"jaxdist-sweep-{os.getuid()}"
    parser.add_argument("--work", type=Path, default=work, help="folder of records and results")
    parser.add_argument("--results", type=Path, help="results to go on with, of another commit too")
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    parser.add_argument("--slow", action="store_true", help="a third round, of slow tests")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    if left := uncommitted():
        parser.error(f"clones are of the last commit. Commit or remove first:\n{left}")
    return options


def _head(options: argparse.Namespace, commit: str) -> str:
    return (
        f"# Mutants at random places\n\n`python scripts/bench/mutation_sweep.py "
        f"--only {' '.join(options.only or ROOMS)} --count {options.count} --seed "
        f"{options.seed}{' --slow' if options.slow else ''}`, commit {commit}, "
        f"Python {platform.python_version()}.\n\n"
    )


def in_turn(chosen: Iterable[Mutant]) -> list[Mutant]:
    """Return mutants in round-robin order of rooms, so that a partial sweep covers all rooms."""
    rooms: dict[str, list[Mutant]] = collections.defaultdict(list)
    for mutant in chosen:
        rooms[mutant.room].append(mutant)
    return [m for turn in itertools.zip_longest(*rooms.values()) for m in turn if m is not None]


def sweep(
    options: argparse.Namespace,
    workplaces: list[Workplace],
    earlier: dict[Mutant, Result],
    log: Path,
) -> list[Result]:
    """Try new mutants; return all results of the sample except kills by failing tests."""
    end = time.monotonic() + 60 * options.minutes
    chosen = in_turn(sample(options.only or [*ROOMS], options.count, options.seed))
    recorded = records(options.work, workplaces, options.tests)
    free: queue.Queue[Workplace] = queue.Queue()
    for workplace in workplaces:
        free.put(workplace)
    todo = [m for m in chosen if m not in earlier or (options.again and not earlier[m].killed_by)]
    with concurrent.futures.ThreadPoolExecutor(len(workplaces)) as pool:
        tried = [pool.submit(try_mutant, m, recorded, options.slow, free, end) for m in todo]
        for done in concurrent.futures.as_completed(tried):
            if (result := done.result()) is None:
                continue
            earlier[result.mutant] = result
            verdict = "killed  " if result.killed_by else "SURVIVED"
            print(verdict, result.mutant, f"{result.seconds:.1f} s", result.killed_by, flush=True)
            with log.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    results = [earlier[mutant] for mutant in chosen if mutant in earlier]
    red = set(red_alone({result.killed_by for result in results}, free))
    for test in sorted(red):
        print(f"red without a mutant, so it proves nothing: {test}", file=sys.stderr)
    return [result for result in results if result.killed_by not in red]


def main() -> int:
    """Sample, run, print the table; return 2 if a mutant is untried or killed by a red test."""
    options = _options()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    options.work.mkdir(parents=True, exist_ok=True)
    log = options.results or options.work / f"results-{commit}.jsonl"
    with (
        tempfile.TemporaryDirectory() as folder,
        clones(options.workers) as copies,
        servers(options.workers) as started,
    ):
        workplaces = []
        for number, server in enumerate(started):
            root = copies.get()
            compileall.compile_dir(
                root / "jaxdist",
                quiet=1,
                invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
            )  # valid again after a mutant is removed
            workplaces.append(Workplace(server, root, Path(folder) / str(number)))
        results = sweep(options, workplaces, read_results(log), log)
    text = table(results)
    if options.out:
        options.out.write_text(_head(options, commit) + text)
    print(text)
    return (
        0
        if len(results) >= len(sample(options.only or [*ROOMS], options.count, options.seed))
        else 2
    )


if __name__ == "__main__":
    sys.exit(main())
