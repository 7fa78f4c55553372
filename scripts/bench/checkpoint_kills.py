"""Kill a run at random moments and show that no bit is lost, and how many steps at most.

    python scripts/bench/checkpoint_kills.py                    # 50 kills; about 5 minutes
    python scripts/bench/checkpoint_kills.py --kills 5 --seed 7

The run of `tests/checkpoint_worker.py` saves every 3 steps. It is killed (SIGKILL) while it opens
its directory, restores, trains or writes in the background, and started again. At the end its
losses and state must have the bits of a run that was never killed, and no kill may have cost more
than one interval. `tests/test_checkpoint_crash.py` kills at every named point instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
EVERY = 3

Records = list[dict[str, Any]]


class Run:
    """One directory of checkpoints and what was recorded by all starts in it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        self.out = folder / "records.jsonl"
        self.out.touch()
        paths = {"directory": str(folder / "checkpoints"), "out": str(self.out)}
        self.settings = {**paths, "every": EVERY, "width": 4096, **settings}

    def start(self, **changes: Any) -> subprocess.Popen[str]:
        """A process that works on it."""
        settings = json.dumps({**self.settings, **changes})
        return subprocess.Popen(
            [sys.executable, WORKER, settings], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def finish(self, **changes: Any) -> Records:
        """Run to the end; what this start recorded."""
        before = len(self.records())
        process = self.start(**changes)
        errors = process.communicate(timeout=600)[1]
        if process.returncode:
            raise RuntimeError(errors)
        return self.records()[before:]

    def records(self) -> Records:
        """Everything recorded so far; a line cut short by a kill is left out."""
        lines = self.out.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def value(records: Records, key: str, default: Any = None) -> Any:
    """The last value of a key."""
    return next((r[key] for r in reversed(records) if key in r), default)


def losses(records: Records) -> dict[int, list[str]]:
    """Step -> loss; every repetition of a step must have given the same bits."""
    seen: dict[int, list[str]] = {}
    for record in records:
        if "step" in record and seen.setdefault(record["step"], record["loss"]) != record["loss"]:
            raise RuntimeError(f"step {record['step']} gave other bits: {record}")
    return seen


def saved_steps(records: Records) -> list[int]:
    """Steps whose commit was logged."""
    logged = [record["log"] for record in records if " saved: " in record.get("log", "")]
    return [int(line.split()[1]) for line in logged]


def restore_seconds(records: Records) -> float:
    """How long the last restore took that came to its end."""
    pairs = itertools.pairwise(r for r in records if "restoring" in r or "start" in r)
    took = [b["time"] - a["time"] for a, b in pairs if "restoring" in a and "start" in b]
    return took[-1] if took else 0.3


def kill_at_random(run: Run, chance: random.Random, **changes: Any) -> Records:
    """Start, and SIGKILL at a random moment; what was recorded.

    The moment is counted from an event: the directory is opened, a restore begins, training begins,
    a save begins. Within a restore it falls into the time that the last one took.
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
    """What a killed process was doing."""
    if value(records, "start") is None:
        return "opening" if value(records, "restoring") is None else "restoring"
    begun = [record["saving"] for record in records if "saving" in record]
    return "writing" if begun and begun[-1] not in saved_steps(records) else "training"


def oldest_resume(records: Records, before: int) -> int:
    """The oldest step that the next start may go on from.

    What was logged as saved counts, and so does the last save but one that was begun, because a
    save waits for the one before it.
    """
    begun = [record["saving"] for record in records if "saving" in record]
    return max([before, *begun[:-1], *saved_steps(records)])


def main() -> int:
    """Kill, compare, print one line; 1 if a bit or more than an interval was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
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
        whole = Run(Path(folder) / "whole", steps=last, pause_s=0).finish(every=10**6)
        same = losses(run.records()) == losses(whole)
        same = same and value(end, "checksums") == value(whole, "checksums")
    print(
        f"{options.kills} kills while {dict(moments)}: at most {max(lost)} steps lost (interval "
        f"{EVERY}); losses and state {'equal' if same else 'DIFFER FROM'} those of a run that was "
        "never killed"
    )
    return 0 if same and max(lost) <= EVERY else 1


if __name__ == "__main__":
    sys.exit(main())
