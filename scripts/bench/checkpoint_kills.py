"""Kill a run at random moments and show that no bit is lost, and how many steps at most.

    python scripts/bench/checkpoint_kills.py                    # 50 kills; about 5 minutes
    python scripts/bench/checkpoint_kills.py --kills 5 --seed 7
    python scripts/bench/checkpoint_kills.py --store s3 gs      # 20 kills at named points of each

The run of `tests/checkpoint_worker.py` saves every 3 steps. It is killed (SIGKILL) while it opens
its directory, restores, trains or writes in the background, and started again. At the end its
losses and state must be bit-identical to a run that was never killed, and no kill may have cost
more than one interval. `tests/test_checkpoint_crash.py` kills at every named point instead.

With `--store` the checkpoints are on an object store, a real server over HTTP (moto for S3,
fake-gcs-server for Google's; see `tests/object_servers.py`). The run is killed once at every named
point during background saves, and again during foreground saves. Each start must resume from the
newest complete checkpoint, and the last must be bit-identical to a run that was never killed. The
script writes a page of results.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "checkpoint_worker.py"
RESULTS = ROOT / "scripts" / "bench" / "results" / "store_kills.md"
EVERY = 3

Records = list[dict[str, Any]]


class Run:
    """One directory of checkpoints, and the records of all starts in it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        self.out = folder / "records.jsonl"
        self.out.touch()
        paths = {"directory": str(folder / "checkpoints"), "out": str(self.out)}
        self.settings = {**paths, "every": EVERY, "width": 4096, **settings}

    def start(self, **changes: Any) -> subprocess.Popen[str]:
        """Start a process in this directory."""
        settings = json.dumps({**self.settings, **changes})
        return subprocess.Popen(
            [sys.executable, WORKER, settings], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def finish(self, **changes: Any) -> Records:
        """Run to the end; return the records of this start."""
        before = len(self.records())
        process = self.start(**changes)
        errors = process.communicate(timeout=600)[1]
        if process.returncode:
            raise RuntimeError(errors)
        return self.records()[before:]

    def records(self) -> Records:
        """Return all records so far, except a line truncated by a kill."""
        lines = self.out.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def value(records: Records, key: str, default: Any = None) -> Any:
    """Return the last value of a key."""
    return next((r[key] for r in reversed(records) if key in r), default)


def losses(records: Records) -> dict[int, list[str]]:
    """Return step -> loss; every repetition of a step must be bit-identical."""
    seen: dict[int, list[str]] = {}
    for record in records:
        if "step" in record and seen.setdefault(record["step"], record["loss"]) != record["loss"]:
            raise RuntimeError(f"step {record['step']} gave other bits: {record}")
    return seen


def saved_steps(records: Records) -> list[int]:
    """Return the steps whose commit was logged."""
    logged = [record["log"] for record in records if " saved: " in record.get("log", "")]
    return [int(line.split()[1]) for line in logged]


def restore_seconds(records: Records) -> float:
    """Return the duration of the last completed restore."""
    pairs = itertools.pairwise(r for r in records if "restoring" in r or "start" in r)
    took = [b["time"] - a["time"] for a, b in pairs if "restoring" in a and "start" in b]
    return took[-1] if took else 0.3


def kill_at_random(run: Run, chance: random.Random, **changes: Any) -> Records:
    """Start, send SIGKILL at a random moment, and return the records.

    The delay starts at an event: the directory is opened, a restore begins, training begins, or a
    save begins. After the start of a restore it is at most the duration of the last restore.
    """
    earlier = run.records()
    kinds = [("opening", 2.5), ("start", 1.5), ("saving", 0.06), ("saving", 0.06)]
    if saved_steps(earlier):
        kinds += [("restoring", restore_seconds(earlier))] * 2
    event, longest = chance.choice(kinds)
    count = chance.randint(1, 4) if event == "saving" else 1
    process = run.start(**changes)
    while sum(event in record for record in run.records()[len(earlier) :]) < count:
        if process.poll() is not None:
            raise RuntimeError(process.communicate()[1])
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, longest))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return run.records()[len(earlier) :]


def moment_of(records: Records) -> str:
    """Return the activity of a process when it was killed."""
    if value(records, "start") is None:
        return "opening" if value(records, "restoring") is None else "restoring"
    begun = [record["saving"] for record in records if "saving" in record]
    return "writing" if begun and begun[-1] not in saved_steps(records) else "training"


def oldest_resume(records: Records, before: int) -> int:
    """Return the oldest step from which the next start may resume.

    Saves that were logged count, and so does the second-to-last save that was begun, because a save
    waits for the previous one.
    """
    begun = [record["saving"] for record in records if "saving" in record]
    return max([before, *begun[:-1], *saved_steps(records)])


def stores_page(stores: list[str]) -> str:
    """Kill at every named point on each store; return the results as Markdown.

    Raises:
        AssertionError: a wrong checkpoint was loaded, or bits differ.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import object_servers
    import pytest
    from store_kills import kill_at

    from jaxdist.checkpoint.crash_points import POINTS

    servers = {"s3": object_servers.s3, "gs": object_servers.gcs}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = [
        "# Kills at named points of a run whose checkpoints lie on an object store",
        "",
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, jax "
        f"{importlib.metadata.version('jax')}, commit {commit}, {datetime.date.today()}; `python "
        f"scripts/bench/checkpoint_kills.py --store {' '.join(stores)}`. Servers over HTTP: moto "
        f"{importlib.metadata.version('moto')} for s3, fake-gcs-server behind a translator of "
        "uploads for gs. Each start went on from the newest whole checkpoint that the kill before "
        "had left; nothing else was loaded; losses and state have the bits of a run on disk that "
        "was never killed.",
        "",
        "| store | saves in the | killed at | whole checkpoints left | corrupt | the next start |",
        "|---|---|---|---|---|---|",
    ]
    steps = lambda numbers: ", ".join(map(str, numbers)) or "none"
    for store in stores:
        for ground in ("background", "foreground"):
            with (
                pytest.MonkeyPatch.context() as patch,
                servers[store](patch),
                tempfile.TemporaryDirectory() as folder,
            ):
                url = f"{store}://bucket/{ground}/checkpoints"
                kills = kill_at(url, Path(folder), POINTS, async_save=ground == "background")
            for kill in kills:
                start = f"from {kill.next_start}" if kill.next_start is not None else "killed first"
                lines.append(
                    f"| {store} | {ground} | `{kill.point}` | {steps(kill.complete)} | "
                    f"{steps(kill.corrupt)} | {start} |"
                )
    return "\n".join([*lines, ""])


def main() -> int:
    """Kill, compare, print one line; return 1 if a bit or more than an interval was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("s3", "gs"), nargs="+", help="kill at named points")
    parser.add_argument("--out", type=Path, default=RESULTS, help="page of results of --store")
    options = parser.parse_args()
    if options.store:
        page = stores_page(options.store)
        options.out.write_text(page)
        print(page)
        return 0
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "killed", steps=10**6, pause_s=0.05)
        floor = reached = 0
        lost: list[int] = []
        moments: Counter[str] = Counter()
        for _ in range(options.kills):
            in_background = chance.random() < 0.8
            records = kill_at_random(run, chance, config={"async_save": in_background})
            start = value(records, "start")
            if start is not None:
                if start < floor:
                    raise RuntimeError(f"went on from {start}, and {floor} was committed")
                lost.append(reached - start)
                reached = value(records, "step", start)
            moments[moment_of(records)] += 1
            floor = oldest_resume(records, floor)
        last = max(losses(run.records()), default=0) + 4
        end = run.finish(steps=last, pause_s=0)
        lost.append(reached - value(end, "start"))
        undisturbed = Run(Path(folder) / "whole", steps=last, pause_s=0).finish(every=10**6)
        same = losses(run.records()) == losses(undisturbed)
        same = same and value(end, "checksums") == value(undisturbed, "checksums")
    print(
        f"{options.kills} kills while {dict(moments)}: at most {max(lost)} steps lost (interval "
        f"{EVERY}); losses and state {'equal' if same else 'DIFFER FROM'} those of a run that was "
        "never killed"
    )
    return 0 if same and max(lost) <= EVERY else 1


if __name__ == "__main__":
    sys.exit(main())
