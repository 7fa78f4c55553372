"""Every fault of a launched job, injected at random moments: what was seen, after how long.

    python scripts/bench/faults.py                      # 20 of each kind; about an hour
    python scripts/bench/faults.py --repeats 3 --seed 7

A small training job of two processes runs under `python -m jaxdist.launch`. Each fault of
`tests/fault_scenarios.py` is injected repeatedly in random order: two thirds at a random moment of
training (steps and saves), one third during startup and compilation. After every round the job must
end with exit code 0 and results bit-identical to an undisturbed run, with each step once. The table
is written after every round, so that no measurement is lost.

Faults that need a separate file system need root; without root they are skipped.
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
RESULTS = ROOT / "scripts" / "bench" / "results" / "fault_scenarios.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fault_scenarios as harness  # noqa: E402, needs sys.path
from fault_scenarios import FAULTS, FaultResult  # noqa: E402
from launched_job import PACE_S, Job, ScenarioFailed, no_mounts  # noqa: E402

_STEPS_PER_FAULT = 80
_TENSORBOARD = "--monitoring.tracker=tensorboard"  # one more file that fails on a full disk


def main() -> int:
    """Inject faults, write the table, and fail if a job ended badly."""
    arguments = _arguments()
    faults = [
        fault
        for fault in FAULTS.values()
        if not (fault.mounts and no_mounts()) and arguments.only in fault.name
    ]
    generator = random.Random(arguments.seed)
    results: list[FaultResult] = []
    wrong: list[str] = []
    rounds = 0
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as scratch:
        per_round = min(4, arguments.repeats)
        steps = _STEPS_PER_FAULT * per_round * len(faults)
        expected = _undisturbed(Path(scratch) / "undisturbed", steps)
        until = time.monotonic() + 60 * arguments.minutes
        left = {fault.name: arguments.repeats for fault in faults}
        while any(left.values()) and time.monotonic() < until:
            order = [fault for fault in faults for _ in range(min(per_round, left[fault.name]))]
            generator.shuffle(order)
            folder = Path(scratch) / f"round-{rounds}"
            struck, problem = _one_round(folder, steps, order, generator, expected, until)
            rounds += 1
            results += struck
            wrong += [problem] if problem else []
            for one in struck:
                left[one.fault] -= 1
            Path(arguments.out).write_text(_page(arguments, results, wrong, rounds))
    print(Path(arguments.out).read_text())
    return 1 if wrong or any(one.problem for one in results) else 0


def _undisturbed(folder: Path, steps: int) -> dict[int, tuple[str, str]]:
    """Return the bits of an undisturbed run with all guards on; no guard may report anything."""
    job = Job(folder, steps, _TENSORBOARD, *harness.GUARDS)
    try:
        job.start()
        if harness.finish(job) != 0:
            raise SystemExit(f"the undisturbed run failed:\n{job.output()[-3000:]}")
        if problems := harness.findings(job.run_dir):
            raise SystemExit(f"{steps} clean steps had findings: {problems[:10]}")
        return harness.step_results(job.run_dir)
    finally:
        job.close()


def _one_round(
    folder: Path,
    steps: int,
    order: list[harness.Fault],
    generator: random.Random,
    expected: dict[int, tuple[str, str]],
    until: float,
) -> tuple[list[FaultResult], str]:
    """Inject faults into one job in this order; return the results, and errors at its end."""
    job = Job(folder, steps, _TENSORBOARD, disk_mb=0 if no_mounts() else 48)
    results: list[FaultResult] = []
    try:
        job.pace(PACE_S)
        job.start()
        for fault in order:
            if time.monotonic() > until or job.process.poll() == 0:
                break  # the remaining faults belong to the next round
            moment = generator.choice(["start", "training", "training"])
            results.append(harness.inject(job, fault, generator, moment))
            print(results[-1], flush=True)
            if results[-1].problem:
                print(job.output()[-4000:], flush=True)
                return results, ""
        code = harness.finish(job)
        if code != 0:
            print(job.output()[-4000:], flush=True)
            return results, f"a job ended with exit code {code}"
        repeated = harness.step_results(job.run_dir)
        return results, "" if repeated == expected else "a job ended with other bits"
    except ScenarioFailed as error:
        print(job.output()[-4000:], flush=True)
        return results, str(error)
    finally:
        job.close()


def _page(
    arguments: argparse.Namespace, results: list[FaultResult], wrong: list[str], rounds: int
) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    lines = [
        "# Faults of a launched job",
        "",
        f"`python scripts/bench/faults.py --repeats {arguments.repeats} --seed {arguments.seed}`, "
        f"{datetime.date.today()}, Python {platform.python_version()}, {versions}; "
        f"{os.cpu_count()} CPU cores, load average {os.getloadavg()[1]:.1f} at the end"
        f"{'; ' + arguments.note if arguments.note else ''}. Two processes over gloo, "
        "watchdog 5 s, heartbeat 10 s, time to join 10 s, a save every 5 steps.",
        "",
        "seconds from the fault to the first line that names the cause, and to the first new train",
        "record; for a full disk and a lost directory from their end to the next committed save.",
        "",
        "| fault | injected | of it at a start | failed | detected, median | longest "
        "| recovered, median | longest |",
        "|---|---|---|---|---|---|---|---|",
        *(
            _row(name, [one for one in results if one.fault == name])
            for name in FAULTS
            if arguments.only in name
        ),
        "",
        f"{len(results)} faults in {rounds} jobs. Each job had to end with exit code 0, every step "
        f"once, with the bits of an undisturbed run: {len(wrong)} did not.",
        *(f"* {problem}" for problem in wrong),
        *(f"* {one}" for one in results if one.problem),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, results: list[FaultResult]) -> str:
    good = [one for one in results if not one.problem]
    if not good:
        return f"| {name} | {len(results)} | | {len(results)} | | | | |"
    detected, back = [one.detected_s for one in good], [one.recovered_s for one in good]
    return (
        f"| {name} | {len(results)} | {sum(one.moment == 'start' for one in results)} "
        f"| {len(results) - len(good)} | {statistics.median(detected):.1f} | {max(detected):.1f} "
        f"| {statistics.median(back):.1f} | {max(back):.1f} |"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="faults of each kind (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of order, victims and moments")
    parser.add_argument("--minutes", type=float, default=600, help="no new fault after these")
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--out", default=str(RESULTS), help="the page (default %(default)s)")
    parser.add_argument("--note", default="", help="conditions to put into the page")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
