"""Kill real processes without a shared local disk, lose disks, and resume bit-identically."""

import itertools
import json
from pathlib import Path

import pytest
from commands import Fork
from refusals import missing

pytestmark = pytest.mark.slow


def run_plan(folder: Path, plan: list[dict]) -> list[list[dict]]:
    """Run the plan; return the records of each start."""
    folder.mkdir()
    settings = json.dumps({"folder": str(folder), "plan": plan})
    done = Fork("local_tier_worker", settings)
    _, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors[-3000:]
    finished, records = [], (folder / "records.jsonl").read_text().splitlines()
    starts = [[]]
    for record in map(json.loads, records):
        starts[-1].append(record)
        if "ended" in record:
            finished.append(starts[-1])
            starts.append([])
    for start, planned in zip(finished, plan, strict=True):
        ended = start[-1]
        assert all(ended["killed"]) if planned.get("kill") else not any(ended["ended"]), (
            planned, ended, errors[-3000:],
        )  # fmt: skip
    return finished


def value(records: list[dict], key: str):
    return next(record[key] for record in reversed(records) if key in record)


def losses(records: list[dict]) -> dict[int, list[str]]:
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    (records,) = run_plan(folder, [{"do": "run", "processes": 1, "steps": 12}])
    return records


def test_two_killed_hosts_with_each_disk_lost_resume_bit_identically(tmp_path, uninterrupted):
    """Saves at 2 (local), 4, 6 (local), 8, 10 (local); each start is killed two steps later."""
    two = {"do": "run", "processes": 2}
    starts = run_plan(
        tmp_path / "run",
        [
            {**two, "steps": 6, "kill": True},
            {**two, "steps": 7, "kill": True},
            {**two, "steps": 7, "wipe": [0], "kill": True},
            {**two, "steps": 7, "wipe": [1], "kill": True},
            {**two, "steps": 12, "wipe": [0, 1]},  # one more than claimed
        ],
    )
    assert missing(value(starts[0], "claim"), "any host of 2") == []
    assert [value(start, "began") for start in starts] == [0, 6, 6, 6, 4]
    expected = losses(uninterrupted)
    for start in starts:
        assert {step: expected[step] for step in losses(start)} == losses(start)
    assert value(starts[-1], "checksums") == value(uninterrupted, "checksums")
    assert value(starts[-1], "events").count("local_save") == 2  # 6 and 10


def test_loss_of_every_subset_of_four_hosts_is_survived_as_claimed(tmp_path):
    four = {"processes": 4, "steps": 6}
    first, subsets = run_plan(
        tmp_path / "run",
        [{**four, "do": "run", "kill": True}, {**four, "do": "subsets"}],
    )
    assert missing(value(first, "claim"), "any host of 4") == []
    tried = {tuple(record["lost"]): record for record in subsets if "lost" in record}
    assert len(tried) == 16
    for lost, record in tried.items():
        neighbours_too = any({process, (process + 1) % 4} <= set(lost) for process in range(4))
        assert record["step"] == (4 if neighbours_too else 6), lost
        if not neighbours_too:
            assert record["checksums"] == value(first, "checksums")
    assert sum(record["step"] == 6 for record in tried.values()) == 7
    assert list(itertools.combinations(range(4), 2)) == [lost for lost in tried if len(lost) == 2]


def test_processes_that_share_a_disk_write_and_fetch_their_shards_once(tmp_path, uninterrupted):
    """Four replicas on two hosts: each host holds all shards, and a new host fetches them once."""
    hosts = {"do": "run", "processes": 4, "mesh": "dp=4", "hosts": [0, 0, 1, 1]}
    first, second = run_plan(
        tmp_path / "run",
        [{**hosts, "steps": 6, "kill": True}, {**hosts, "steps": 7, "wipe": [0], "kill": True}],
    )
    assert missing(value(first, "claim"), "any host of 2") == []
    assert value(second, "began") == 6
    expected = losses(uninterrupted)
    assert {**losses(first), **losses(second)} == {step: expected[step] for step in range(1, 8)}
    for host in (0, 1):
        documents = list((tmp_path / "run" / f"disk-{host}").rglob("document.json"))
        assert sorted(path.parent.name for path in documents) == ["2", "6"][host == 0 :]
