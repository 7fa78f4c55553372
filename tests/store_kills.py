"""A run whose checkpoints lie on an object store, killed at named points."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from checkpoint_worker import DEFAULTS
from commands import ROOT, environment

WORKER = ROOT / "tests" / "checkpoint_worker.py"
EVERY = 4
BEFORE_TRAINING = ("lock_taken", "during_restore", "during_mark")
"""Points of the start of a run; all others are in a save of it."""


class Kill(NamedTuple):
    """What a kill left: steps of whole checkpoints, of corrupt ones, and from where it went on."""

    point: str
    whole: list[int]
    corrupt: list[int]
    next_start: int | None  # None: the next start was killed before it had restored


def kill_at(url: str, folder: Path, points: Sequence[str], *, async_save: bool) -> list[Kill]:
    """Kill a run once at each point, in turn, and let it end.

    Asserts that each start was killed, that each goes on from the newest whole checkpoint that the
    kill before left, and that losses and state have the bits of a run on disk that was not killed.
    Before the point `during_mark` a bit of the newest checkpoint is flipped.
    """
    settings = {**DEFAULTS, "every": EVERY, "width": 64, "pause_s": 0, "directory": url}
    settings["out"] = str(folder / "records.jsonl")
    settings["config"] = {"max_to_keep": 2, "async_save": async_save}
    settings["preflight"] = False
    run(settings, [["", {"steps": 2 * EVERY}], *[[point, {"steps": 1000}] for point in points]])
    records = read(folder / "records.jsonl")
    reached = max(record["step"] for record in records if "step" in record)
    last = reached + EVERY - reached % EVERY
    alone = {"directory": str(folder / "whole"), "out": str(folder / "whole.jsonl"), "every": 10**6}
    run(settings, [["", {"steps": last}], ["", {"steps": last, **alone}]])
    records, undisturbed = read(folder / "records.jsonl"), read(folder / "whole.jsonl")
    assert losses(records) == losses(undisturbed)
    sums = lambda records: [r["checksums"] for r in records if "checksums" in r][-1]
    assert sums(records) == sums(undisturbed)
    return kills_in(records)


def run(settings: dict, starts: list) -> None:
    """One start after the other, each in a fork of one process."""
    command = [sys.executable, str(WORKER), json.dumps(settings), json.dumps(starts)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def read(path: Path) -> list[dict]:
    """Records; a line that a kill cut short is left out."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def losses(records: list[dict]) -> dict[int, list[str]]:
    """Step -> loss; every repetition of a step must have given the same bits."""
    seen: dict[int, list[str]] = {}
    for record in records:
        if "step" in record:
            assert seen.setdefault(record["step"], record["loss"]) == record["loss"], record
    return seen


def kills_in(records: list[dict]) -> list[Kill]:
    """The kills of a run, from its records."""
    found: list[Kill] = []
    began, newest = None, None  # of the start that these records are of; before it
    was_flipped = False
    for record in records:
        began = record.get("start", began)
        if "point" not in record:
            continue
        assert began in (None, newest or 0), f"{record['point']}: from {began}, not {newest}"
        if found:
            found[-1] = found[-1]._replace(next_start=began)
        whole = [int(step) for step, is_whole in record["left"].items() if is_whole]
        corrupt = [int(step) for step, is_whole in record["left"].items() if not is_whole]
        if record["point"]:
            assert record["killed"], record
            assert began is not None or record["point"] in BEFORE_TRAINING, record
            was_flipped = was_flipped or record["point"] == "during_mark"
            assert not corrupt or was_flipped, record
            found.append(Kill(record["point"], whole, corrupt, None))
        began, newest = None, max(whole)
    return found
