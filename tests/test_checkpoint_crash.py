"""Kill real processes at every named point, several at once, with different numbers of processes.

`scripts/bench/checkpoint_kills.py` kills fifty times at random moments instead.
"""

import json
import signal
import socket
import time
from pathlib import Path

import pytest
from checkpoint_worker import DEFAULTS
from commands import Fork, free_port
from refusals import missing
from store_kills import losses

from jaxdist.checkpoint.crash_points import POINTS

HOST = socket.gethostname()


class Run:
    """One checkpoint directory and the records of every process that worked on it."""

    def __init__(self, path: Path, **settings):
        self.directory = path / "checkpoints"
        self.out = path / "records.jsonl"
        self.out.touch()
        named = {"directory": str(self.directory), "out": str(self.out)}
        self.settings = {**DEFAULTS, **named, **settings}

    def start(self, **changes) -> list[Fork]:
        settings = {**self.settings, **changes}
        settings["port"] = free_port()
        return [
            Fork("checkpoint_worker", json.dumps({**settings, "process": process}))
            for process in range(settings["processes"])
        ]

    def finish(self, **changes) -> list[dict]:
        before = len(self.records())
        processes = self.start(**changes)
        errors = [process.communicate(timeout=180)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), errors
        return self.records()[before:]

    def records(self) -> list[dict]:
        lines = self.out.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def value(records: list[dict], key: str, default=None):
    return next((r[key] for r in reversed(records) if key in r), default)


# Crash point -> checkpoint from which the start killed there resumes (None: it is killed before).
# Saves are due at every even step; those at 2, 6, 10, ... are kept only until the next. Two of the
# others are kept; the first start leaves 4 and 8.
CRASHES = {
    "lock_taken": None,
    "before_arrays": 8,
    "during_arrays": 8,
    "after_arrays": 8,
    "before_manifest": 8,
    "after_manifest": 8,  # leaves 10
    "during_retention": 10,  # leaves 12
    "during_restore": None,
    "during_mark": None,  # 12 is corrupt before this start
}


def test_kill_at_any_named_point_leaves_complete_checkpoints_and_resumes_bit_identically(tmp_path):
    others = {"during_upload", "during_moments"}  # of test_object_storage and test_offload_moments
    assert {*CRASHES, *others} == set(POINTS)
    settings = {"every": 4, "width": 64, "pause_s": 0, "preflight": False}
    settings["config"] = {"max_to_keep": 2}
    run = Run(tmp_path, **settings)
    alone = {
        "directory": str(tmp_path / "whole"),
        "out": str(tmp_path / "whole.jsonl"),
        "every": 99,
    }
    starts = [["", {"steps": 8}], *[[point, {"steps": 100}] for point in CRASHES]]
    starts += [["", {"steps": 16}], ["", {"steps": 16, **alone}]]
    done = Fork("checkpoint_worker", json.dumps(run.settings), json.dumps(starts))
    _, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors[-3000:]

    children, began, records = {}, None, run.records()
    for record in records:
        began = record.get("start", began)
        if "point" in record:
            children[record["point"]] = (record, began)
            began = None
    for point, start in CRASHES.items():
        record, began = children[point]
        assert record["killed"] and record["status"] == signal.SIGKILL, (point, errors[-3000:])
        assert began == start, point
        corrupt = {"12"} if point == "during_mark" else set()
        assert {step for step, is_intact in record["left"].items() if not is_intact} == corrupt, (
            point
        )
    assert list(children["before_manifest"][0]["left"]) == ["4", "8"]
    assert list(children["after_manifest"][0]["left"]) == ["4", "8", "10"]
    assert list(children["during_retention"][0]["left"]) == ["8", "10", "12"]
    assert [record["start"] for record in records if "start" in record][-1] == 10  # skips 12
    assert list(children[""][0]["left"]) == ["12", "16"]

    uninterrupted = [json.loads(line) for line in Path(alone["out"]).read_text().splitlines()]
    assert losses(records) == losses(uninterrupted)
    assert value(records, "checksums") == value(uninterrupted, "checksums")


@pytest.mark.slow
def test_process_and_device_counts_may_change_at_every_start(tmp_path):
    """2 processes -> 1 -> 4 -> 1 on 16 devices -> 1: bit-identical to a run that never stopped."""
    for name in ("elastic", "whole"):
        (tmp_path / name).mkdir()
    run = Run(tmp_path / "elastic", width=64, pause_s=0)
    starts = [
        {"processes": 2, "devices": 2, "mesh": "fsdp=4"},
        {"processes": 1, "devices": 8, "mesh": "dp=2,fsdp=4"},
        {"processes": 4, "devices": 1, "mesh": "fsdp=2,tp=2"},
        {"processes": 1, "devices": 16, "mesh": "fsdp=16"},
        {"processes": 1, "devices": 1, "mesh": "dp=1"},
    ]
    for number, start in enumerate(starts):
        records = run.finish(steps=6 * (number + 1), **start)
        assert value(records, "start") == 6 * number
        assert value(records, "committed") is True
    uninterrupted = Run(tmp_path / "whole", width=64, pause_s=0, every=10**6).finish(steps=30)
    assert losses(run.records()) == losses(uninterrupted)
    assert value(records, "checksums") == value(uninterrupted, "checksums")


@pytest.mark.slow
def test_two_processes_skip_a_damaged_checkpoint_together(tmp_path):
    run = Run(tmp_path, processes=2, mesh="fsdp=4", steps=6, width=64, pause_s=0)
    run.finish()
    largest = max((run.directory / "6" / "arrays").rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    records = run.finish(steps=9)
    assert value(records, "start") == 3
    assert any(
        "6 is skipped, because it cannot be loaded: arrays/" in r.get("log", "") for r in records
    )
    assert value(records, "committed") is True
    losses(run.records())  # raises if the repeated steps gave other bits


@pytest.mark.slow
def test_mount_lost_on_one_host_fails_the_save_on_all_and_ends_no_process(tmp_path):
    mounts = {"directory": str(tmp_path / "mount-{process}"), "broken": [6], "broken_on": 1}
    run = Run(tmp_path, processes=2, mesh="fsdp=4", steps=12, width=64, pause_s=0, **mounts)
    run.directory.mkdir()
    for process in range(2):
        (tmp_path / f"mount-{process}").symlink_to(run.directory)
    records = run.finish()
    before, after = ["save"] * 3, ["save"] * 4  # 1, 3, 4; 7, 9, 10, 12
    assert value(records, "events") == ["preflight", *before, "save_failed", *after]
    logs = [record.get("log", "") for record in records]
    assert any(missing(line, "mount-1 is gone", f"process 1 on {HOST}") == [] for line in logs)


@pytest.mark.slow
def test_every_process_of_a_second_run_is_refused(tmp_path):
    run = Run(tmp_path, processes=2, mesh="fsdp=4", width=64, steps=10**6)
    first = run.start()
    try:
        while value(run.records(), "start") is None:
            assert first[0].poll() is None, first[0].communicate()[1]
            time.sleep(0.05)
        second = run.start(out=str(tmp_path / "second.jsonl"))
        errors = [process.communicate(timeout=120)[1] for process in second]
        assert all(process.returncode for process in second)
        pid = first[0].pid
        assert all(missing(e, "ConfigError", f"process {pid} on {HOST}") == [] for e in errors)
    finally:
        for process in first:
            process.kill()
            process.communicate()
