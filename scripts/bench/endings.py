"""Every bad ending of a launched job, struck at random moments: what was seen, after how long.

    python scripts/bench/endings.py                     # 20 of each kind; about an hour
    python scripts/bench/endings.py --repeats 3 --seed 7

A tiny training of two processes runs under `python -m jaxdist.launch`; each kind of
`tests/endings.py` strikes it again and again, in random order, two thirds of the time at a random
moment of training (steps and saves), one third while it starts and compiles. After every round the
job must end with exit code 0 and with the bits of an unharmed run, each step there once. The table
is written after every round, so that what was measured is never lost.

Endings that need a file system of their own need root; without it they are left out, and said so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "endings.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import endings as harness  # noqa: E402, after the path
from endings import KINDS, Told  # noqa: E402
from launched_job import PACE_S, Bad, Job, no_mounts  # noqa: E402

_STEPS_PER_BLOW = 80


def main() -> int:
    """Strike, write the table, and fail if one ending was bad."""
    arguments = _arguments()
    kinds = [
        kind
        for kind in KINDS.values()
        if not (kind.mounts and no_mounts()) and arguments.only in kind.name
    ]
    generator = random.Random(arguments.seed)
    told: list[Told] = []
    wrong: list[str] = []
    rounds = 0
    with tempfile.TemporaryDirectory(prefix="bench-endings-") as scratch:
        per_round = min(4, arguments.repeats)
        steps = _STEPS_PER_BLOW * per_round * len(kinds)
        expected = _unharmed(Path(scratch) / "unharmed", steps)
        until = time.monotonic() + 60 * arguments.minutes
        left = {kind.name: arguments.repeats for kind in kinds}
        while any(left.values()) and time.monotonic() < until:
            order = [kind for kind in kinds for _ in range(min(per_round, left[kind.name]))]
            generator.shuffle(order)
            folder = Path(scratch) / f"round-{rounds}"
            struck, problem = _one_round(folder, steps, order, generator, expected, until)
            rounds += 1
            told += struck
            wrong += [problem] if problem else []
            for one in struck:
                left[one.kind] -= 1
            Path(arguments.out).write_text(_page(arguments, told, wrong, rounds))
    print(Path(arguments.out).read_text())
    return 1 if wrong or any(one.problem for one in told) else 0


def _unharmed(folder: Path, steps: int) -> dict[int, tuple[str, str]]:
    job = Job(folder, steps)
    try:
        job.start()
        if harness.finish(job) != 0:
            raise SystemExit(f"the unharmed run failed:\n{job.error_record()[-3000:]}")
        return harness.bits(job.run_dir)
    finally:
        job.close()


def _one_round(
    folder: Path,
    steps: int,
    order: list[harness.Kind],
    generator: random.Random,
    expected: dict[int, tuple[str, str]],
    until: float,
) -> tuple[list[Told], str]:
    """Strike one job in this order; what was told, and what was wrong with its end."""
    job = Job(folder, steps, disk_mb=0 if no_mounts() else 48)
    told: list[Told] = []
    try:
        job.pace(PACE_S)
        job.start()
        for kind in order:
            if time.monotonic() > until or job.process.poll() == 0:
                break  # what is left belongs to the next round
            moment = generator.choice(["start", "training", "training"])
            told.append(harness.suffer(job, kind, generator, moment))
            print(told[-1], flush=True)
            if told[-1].problem:
                print(job.error_record()[-4000:], flush=True)
                return told, ""
        code = harness.finish(job)
        if code != 0:
            print(job.error_record()[-4000:], flush=True)
            return told, f"a job ended with exit code {code}"
        found = harness.bits(job.run_dir)
        return told, "" if found == expected else "a job ended with other bits"
    except Bad as error:
        print(job.error_record()[-4000:], flush=True)
        return told, str(error)
    finally:
        job.close()


def _page(arguments: argparse.Namespace, told: list[Told], wrong: list[str], rounds: int) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    lines = [
        "# Bad endings of a launched job",
        "",
        f"`python scripts/bench/endings.py --repeats {arguments.repeats} --seed {arguments.seed}`, "
        f"{datetime.date.today()}, Python {platform.python_version()}, {versions}; "
        f"{os.cpu_count()} CPU cores, load average {os.getloadavg()[1]:.1f} at the end"
        f"{'; ' + arguments.note if arguments.note else ''}. Two processes over gloo, "
        "watchdog 5 s, heartbeat 10 s, time to join 10 s, a save every 5 steps.",
        "",
        "Seconds from the blow to the first line that names the cause, and to the first new train",
        "record; for a full disk and a lost directory from their end to the next committed save.",
        "",
        "| ending | struck | of it at a start | bad endings | detected, median | longest "
        "| recovered, median | longest |",
        "|---|---|---|---|---|---|---|---|",
        *(
            _row(name, [one for one in told if one.kind == name])
            for name in KINDS
            if arguments.only in name
        ),
        "",
        f"{rounds} jobs of {len(told)} blows in all. Each had to end with exit code 0, every step "
        f"there once, with the bits of an unharmed run: {len(wrong)} did not.",
        *(f"* {problem}" for problem in wrong),
        *(f"* {one}" for one in told if one.problem),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, told: list[Told]) -> str:
    good = [one for one in told if not one.problem]
    if not good:
        return f"| {name} | {len(told)} | | {len(told)} | | | | |"
    found, back = [one.detected_s for one in good], [one.recovered_s for one in good]
    return (
        f"| {name} | {len(told)} | {sum(one.moment == 'start' for one in told)} "
        f"| {len(told) - len(good)} | {statistics.median(found):.1f} | {max(found):.1f} "
        f"| {statistics.median(back):.1f} | {max(back):.1f} |"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="blows of each kind (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of order, victims and moments")
    parser.add_argument("--minutes", type=float, default=600, help="no new blow after these")
    parser.add_argument("--only", default="", help="kinds with this in their name")
    parser.add_argument("--out", default=str(RESULTS), help="the page (default %(default)s)")
    parser.add_argument("--note", default="", help="conditions to put into the page")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
