"""Resume on another mesh: runs saved on one mesh continue on another, for every pair.

For each pair every leaf has the same bits after gathering, the next 20 batches are the same, and
the next 20 losses match those of an uninterrupted run on one device, within the contract.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from commands import Fork, free_port

pytestmark = pytest.mark.slow

MESHES = {
    "one": ("dp=1", []),
    "dp8_zero3": ("dp=8", ["--zero=3"]),
    "fsdp8": ("fsdp=8", []),
    "tp4": ("tp=4", []),
    "pp2_interleaved": ("pp=2", ["--pipeline.num_virtual_stages=2"]),
    "dp2_fsdp2_tp2": ("dp=2,fsdp=2,tp=2", []),
    "dp2_cp2": ("dp=2,cp=2", []),
    "fsdp64": ("fsdp=64", []),
    "dp4_tp4_pp4": ("dp=4,tp=4,pp=4", []),
}
CYCLE = [
    *("one", "dp4_tp4_pp4", "fsdp8", "tp4", "dp8_zero3", "pp2_interleaved", "dp2_fsdp2_tp2"),
    *("fsdp64", "dp2_cp2", "one"),
]
PAIRS = list(itertools.pairwise(CYCLE))
"""Every mesh is saved on once and continued on once."""
STARTS = [  # processes, devices of each, mesh, rows and positions of a batch on each device
    (2, 2, "dp=2,tp=2", [32, 16]),
    (4, 1, "fsdp=2,cp=2", [32, 8]),
]
SAVED_AFTER, NEXT = 3, 20
TOLERANCE = 2e-5  # the numerics contract for 20 steps on another mesh


def work(path: Path, jobs: list[dict], *, devices: int, processes: int = 1) -> list[dict]:
    out = path / f"records-{len(list(path.glob('records-*')))}.jsonl"
    settings = {"devices": devices, "processes": processes, "jobs": jobs, "out": str(out)}
    settings["data"] = str(path / "texts.jsonl")
    settings["port"] = free_port()
    started = [
        Fork("mesh_worker", json.dumps({**settings, "process": n})) for n in range(processes)
    ]
    outputs = [process.communicate(timeout=1800) for process in started]
    assert [process.returncode for process in started] == [0] * processes, outputs
    return [json.loads(line) for line in out.read_text().splitlines()]


def job(name: str, mesh: str, **settings) -> dict:
    shape, flags = MESHES[mesh]
    base = {"name": name, "mesh": shape, "flags": flags, "source": "", "target": "", "steps": 0}
    return {**base, "save_after": SAVED_AFTER, **settings}


def write_texts(path: Path) -> None:
    rng = np.random.default_rng(0)
    words = ["mesh", "axis", "shard", "stage", "step"]
    lines = [
        json.dumps({"text": " ".join(rng.choice(words, rng.integers(2, 30)))}) for _ in range(900)
    ]
    (path / "texts.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> tuple[Path, dict, dict]:
    """Return (checkpoints, the uninterrupted run, job name -> its record), of one process."""
    path = tmp_path_factory.mktemp("matrix")
    write_texts(path)
    jobs = [job("whole", "one", steps=(1 + len(STARTS)) * SAVED_AFTER + NEXT)]
    jobs += [job(mesh, mesh, steps=SAVED_AFTER, target=str(path / mesh)) for mesh in MESHES]
    jobs += [
        job(f"{source}->{target}", target, steps=NEXT, source=str(path / source))
        for source, target in PAIRS
    ]
    records = {record["job"]: record for record in work(path, jobs, devices=64)}
    return path, records.pop("whole"), records


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_run_continues_on_another_mesh(matrix, source, target):
    _, uninterrupted, records = matrix
    before, after = records[source], records[f"{source}->{target}"]
    check_continues(uninterrupted, before, after)
    assert before["restored"] == uninterrupted["restored"]  # initial parameters, bit for bit


def check_continues(uninterrupted: dict, before: dict, after: dict) -> None:
    start = after["start"]
    assert start == before["start"] + SAVED_AFTER
    assert after["restored"] == before["saved"]
    assert len(after["restored"]) > 20
    assert after["batches"][:NEXT] == uninterrupted["batches"][start : start + NEXT]
    assert len(set(after["batches"])) == NEXT
    expected = uninterrupted["losses"][start : start + NEXT]
    np.testing.assert_allclose(after["losses"][:NEXT], expected, rtol=TOLERANCE)


def test_run_continues_with_1_2_and_4_processes(matrix, tmp_path):
    """Real processes over gloo; each start continues from the save of the previous one.

    `test_checkpoint_crash` covers the change from four processes to one, with checkpoints alone.
    """
    path, uninterrupted, records = matrix
    previous, source = records["one"], str(path / "one")
    write_texts(tmp_path)
    for number, (processes, devices, mesh, held) in enumerate(STARTS):
        target = str(tmp_path / str(number))
        one = job(str(number), "one", source=source, target=target, steps=NEXT) | {"mesh": mesh}
        (record,) = work(tmp_path, [one], devices=devices, processes=processes)
        check_continues(uninterrupted, previous, record)
        assert record["held"] == held
        previous, source = record, target
