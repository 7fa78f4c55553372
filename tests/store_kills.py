"""Run with checkpoints on an object store, killed at named points."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from checkpoint_worker import DEFAULTS
from commands import Fork

EVERY = 4
BEFORE_TRAINING = ("lock_taken", "during_restore", "during_mark")
"""Points in the startup of a run; all others are in a save."""


class Kill(NamedTuple):
    """Steps of complete and corrupt checkpoints after a kill, and the next start's first step."""

    point: str
    complete: list[int]
    corrupt: list[int]
    next_start: int | None  # None: the next start was killed before it had restored


def kill_at(url: str, folder: Path, points: Sequence[str], *, async_save: bool) -> list[Kill]:
    """Kill a run once at each point, in turn, and let it finish.

    Asserts that each start was killed, that each resumes from the newest complete checkpoint that
    the previous kill left, and that losses and state are bit-identical to an uninterrupted run on
    disk. Before the point `during_mark` a bit of the newest checkpoint is flipped.
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
    """Run the starts one after another, each in a fork of one process."""
    done = Fork("checkpoint_worker", json.dumps(settings), json.dumps(starts))
    _, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors[-3000:]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def losses(records: list[dict]) -> dict[int, list[str]]:
    """Return step -> loss; every repetition of a step must have given the same bits."""
    seen: dict[int, list[str]] = {}
    for record in records:
        if "step" in record:
            assert seen.setdefault(record["step"], record["loss"]) == record["loss"], record
    return seen


def kills_in(records: list[dict]) -> list[Kill]:
    kills: list[Kill] = []
    began, newest = None, None  # start step of the present records; newest step before it
    was_flipped = False
    for record in records:
        began = record.get("start", began)
        if "point" not in record:
            continue
        assert began in (None, newest or 0), f"{record['point']}: from {began}, not {newest}"
        if kills:
            kills[-1] = kills[-1]._replace(next_start=began)
        complete = [int(step) for step, is_intact in record["left"].items() if is_intact]
        corrupt = [int(step) for step, is_intact in record["left"].items() if not is_intact]
        if record["point"]:
            assert record["killed"], record
            assert began is not None or record["point"] in BEFORE_TRAINING, record
            was_flipped = was_flipped or record["point"] == "during_mark"
            assert not corrupt or was_flipped, record
            kills.append(Kill(record["point"], complete, corrupt, None))
        began, newest = None, max(complete)
    return kills
