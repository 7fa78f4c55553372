"""Real processes: killed at random moments, several at once, on other numbers of processes.

    python -m pytest -s tests/test_checkpoint_crash.py -k fifty

kills fifty and prints what they were doing, and how many steps were lost at most.
"""

import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

HOST = socket.gethostname()

# A run like training: deterministic steps whose losses go to a file, saves every few steps.
WORKER = r"""
import json, os, sys, time
settings = json.loads(sys.argv[1])
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.config.update("jax_num_cpu_devices", settings["devices"])
if settings["processes"] > 1:
    address = f"127.0.0.1:{settings['port']}"
    jax.distributed.initialize(
        address, settings["processes"], settings["process"], coordinator_bind_address=address,
        cluster_detection_method="deactivate", initialization_timeout=60,
        heartbeat_timeout_seconds=20, shutdown_timeout_seconds=10,
    )
import jax.numpy as jnp
import numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.core.mesh import MeshSpec

mesh = MeshSpec.parse(settings["mesh"]).build()
split, whole = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P())
shape = (4, 64, settings["width"])

def fresh(key):
    w = jax.random.normal(key, shape)
    return {"params": {"w": w}, "opt_state": {"mu": jnp.zeros(shape)},
            "rest": {"step": jnp.int32(0), "key": key}}

rest = {"step": whole, "key": whole}
placement = {"params": {"w": split}, "opt_state": {"mu": split}, "rest": rest}
make = jax.jit(lambda: fresh(jax.random.key(0)), out_shardings=placement)

# Element by element, so that the bits do not depend on how a mesh sums.
def update(state):
    key, draw = jax.random.split(state["rest"]["key"])
    gradient = jax.random.normal(draw, shape) + 0.1 * state["params"]["w"]
    mu = 0.9 * state["opt_state"]["mu"] + gradient
    w = state["params"]["w"] - 0.01 * mu
    rest = {"step": state["rest"]["step"] + 1, "key": key}
    return {"params": {"w": w}, "opt_state": {"mu": mu}, "rest": rest}, w[0, 0, :2]

update = jax.jit(update, donate_argnums=0, out_shardings=(placement, whole))
out = open(settings["out"], "a", buffering=1)
say = lambda **event: settings["process"] == 0 and out.write(
    json.dumps({**event, "time": time.monotonic()}) + "\n"
)
say(opening=True)
every = settings["every"]
in_background = settings["config"].get("async_save", True)
directory = settings["directory"].format(process=settings["process"])
checkpoints = Checkpointer(
    Path(directory), CheckpointConfig(save_interval_steps=every, **settings["config"]),
    log=lambda line: say(log=line),
)
say(opened=True)
shape_of = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
state = make()
checkpoints.probe(state)
step = checkpoints.choose()
if step is not None:
    target = jax.tree.map(shape_of, state, placement)
    say(restoring=step)
    state, meta, step = checkpoints.restore(target, step=step)
    assert meta == {"next": step}, meta
start = step or 0
say(start=start)
for step in range(start + 1, settings["steps"] + 1):
    state, sample = update(state)
    say(step=step, loss=[float(x).hex() for x in np.asarray(sample)])
    time.sleep(settings["pause_s"])
    broken = settings["broken"] if settings["process"] == settings["broken_on"] else []
    if step in broken:  # the file system goes away for this save and comes back
        checkpoints.wait()
        os.rename(directory, directory + "-gone")
    if due := checkpoints.due(step):
        in_background or say(saving=step)  # the call returns when all is written
        checkpoints.save(step, state, {"next": step}, due=due)
        in_background and say(saving=step)  # the call has waited for the save before
    if step in broken:
        checkpoints.wait()
        os.rename(directory + "-gone", directory)
committed = checkpoints.wait()
from jaxdist.checkpoint.checksum import digests
found = digests([state["params"]["w"], state["opt_state"]["mu"]])
say(finished=True, committed=committed, digests=found,
    events=[e["event"] for e in checkpoints.pop_events()])
checkpoints.close()
if settings["processes"] > 1:
    jax.distributed.shutdown()
os._exit(0)
"""


class Run:
    """One checkpoint directory and the records of every process that worked on it."""

    def __init__(self, path: Path, **settings):
        self.directory = path / "checkpoints"
        self.out = path / "records.jsonl"
        self.out.touch()
        self.settings = {
            "directory": str(self.directory),
            "out": str(self.out),
            "devices": 2,
            "mesh": "fsdp=2",
            "processes": 1,
            "process": 0,
            "steps": 30,
            "every": 3,
            "width": 512,
            "pause_s": 0.02,
            "broken": [],
            "broken_on": 0,
            "config": {},
            **settings,
        }

    def start(self, **changes) -> list[subprocess.Popen]:
        settings = {**self.settings, **changes}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            settings["port"] = probe.getsockname()[1]
        return [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, json.dumps({**settings, "process": process})],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(settings["processes"])
        ]

    def finish(self, **changes) -> list[dict]:
        """Run to the end; the records that this start wrote."""
        before = len(self.records())
        processes = self.start(**changes)
        errors = [process.communicate(timeout=180)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), errors
        return self.records()[before:]

    def records(self) -> list[dict]:
        lines = self.out.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def value(records: list[dict], key: str, default=None):
    """The last value of a key."""
    return next((r[key] for r in reversed(records) if key in r), default)


def losses(records: list[dict]) -> dict[int, list[str]]:
    """Step -> loss; every repetition of a step must have given the same bits."""
    seen: dict[int, list[str]] = {}
    for record in records:
        if "step" in record:
            assert seen.setdefault(record["step"], record["loss"]) == record["loss"], record
    return seen


def kill_at_random(run: Run, chance: random.Random, **changes) -> list[dict]:
    """Start with these changed settings, SIGKILL at a random moment; what was recorded.

    The moment is counted from the opening of the directory, from the beginning of the restore, of
    training, or of a save in the background; within a restore, if it takes as long as the last.
    """
    before = len(run.records())
    kinds = [("opening", 2.5), ("start", 1.5), ("saving", 0.06), ("saving", 0.06)]
    if any(" saved: " in record.get("log", "") for record in run.records()):
        kinds += [("restoring", restore_seconds(run.records()))] * 2
    event, longest = chance.choice(kinds)
    count = chance.randint(1, 4) if event == "saving" else 1
    (process,) = run.start(**changes)
    while sum(event in record for record in run.records()[before:]) < count:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, longest))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return run.records()[before:]


def restore_seconds(records: list[dict]) -> float:
    """How long the last restore took that came to its end."""
    pairs = itertools.pairwise(r for r in records if "restoring" in r or "start" in r)
    took = [b["time"] - a["time"] for a, b in pairs if "restoring" in a and "start" in b]
    return took[-1] if took else 0.3


def moment_of(records: list[dict]) -> str:
    """What a killed process was doing."""
    if value(records, "start") is None:
        return "opening" if value(records, "restoring") is None else "restoring"
    begun = [record["saving"] for record in records if "saving" in record]
    saved = [int(r["log"].split()[1]) for r in records if " saved: " in r.get("log", "")]
    return "writing" if begun and begun[-1] not in saved else "training"


def must_resume_from(records: list[dict], before: int) -> int:
    """The oldest step that the next start may fall back to.

    Whatever was logged as saved; and the last save but one that was begun, because a save waits
    for the one before it.
    """
    begun = [record["saving"] for record in records if "saving" in record]
    logged = [record["log"] for record in records if " saved: " in record.get("log", "")]
    saved = [int(line.split()[1]) for line in logged]
    return max([before, *begun[:-1], *saved])


def check_kills(path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    for name in ("killed", "whole"):
        (path / name).mkdir()
    run = Run(path / "killed", steps=10**6, pause_s=0.05, width=4096)
    every = run.settings["every"]
    floor = reached = 0
    lost: list[int] = []
    moments: Counter[str] = Counter()
    for _ in range(kills):
        in_background = chance.random() < 0.8
        records = kill_at_random(run, chance, config={"async_save": in_background})
        start = value(records, "start")
        if start is not None:
            assert start >= floor
            lost.append(reached - start)
            reached = value(records, "step", start)
        moments[moment_of(records)] += 1
        floor = must_resume_from(records, floor)
    last = max(losses(run.records()), default=0) + 4
    end = run.finish(steps=last, pause_s=0)
    assert value(end, "start") >= floor
    lost.append(reached - value(end, "start"))
    print(f"\n{kills} kills while {dict(moments)}; an interval of {every} steps; lost: {lost}")
    assert max(lost) <= every, lost
    if kills >= 50:
        assert moments["writing"] >= 5 and moments["restoring"] >= 5, moments
    whole = Run(path / "whole", steps=last, every=10**6, pause_s=0, width=4096).finish()
    assert losses(run.records()) == losses(whole)
    assert value(end, "digests") == value(whole, "digests")


def test_killed_at_random_moments_it_resumes_bit_for_bit(tmp_path):
    check_kills(tmp_path, kills=3, seed=0)


@pytest.mark.slow
def test_killed_at_fifty_random_moments_it_resumes_bit_for_bit(tmp_path):
    check_kills(tmp_path, kills=50, seed=1)


@pytest.mark.slow
def test_process_and_device_counts_may_change_at_every_start(tmp_path):
    """2 processes -> 1 -> 4 -> 1 on 64 devices -> 1: the same bits as one that never stopped."""
    for name in ("elastic", "whole"):
        (tmp_path / name).mkdir()
    run = Run(tmp_path / "elastic", width=64, pause_s=0)
    starts = [
        {"processes": 2, "devices": 2, "mesh": "fsdp=4"},
        {"processes": 1, "devices": 8, "mesh": "dp=2,fsdp=4"},
        {"processes": 4, "devices": 1, "mesh": "fsdp=2,tp=2"},
        {"processes": 1, "devices": 64, "mesh": "fsdp=64"},
        {"processes": 1, "devices": 1, "mesh": "dp=1"},
    ]
    for number, start in enumerate(starts):
        records = run.finish(steps=6 * (number + 1), **start)
        assert value(records, "start") == 6 * number
        assert value(records, "committed") is True
    whole = Run(tmp_path / "whole", width=64, pause_s=0, every=10**6).finish(steps=30)
    assert losses(run.records()) == losses(whole)
    assert value(records, "digests") == value(whole, "digests")


@pytest.mark.slow
def test_two_processes_fall_back_past_damage_together(tmp_path):
    run = Run(tmp_path, processes=2, mesh="fsdp=4", steps=6, width=64, pause_s=0)
    run.finish()
    largest = max((run.directory / "6" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    records = run.finish(steps=9)
    assert value(records, "start") == 3
    assert any("checkpoint 6 skipped: params/" in record.get("log", "") for record in records)
    assert value(records, "committed") is True
    losses(run.records())  # raises if the repeated steps gave other bits


@pytest.mark.slow
def test_two_processes_survive_a_failed_save_together(tmp_path):
    run = Run(tmp_path, processes=2, mesh="fsdp=4", steps=12, width=64, pause_s=0, broken=[6])
    records = run.finish()
    before, after = ["save"] * 3, ["save"] * 4  # 1, 3, 4; 7, 9, 10, 12
    assert value(records, "events") == ["probe", *before, "save_failed", *after]
    assert any("is gone: is its file system still mounted?" in r.get("log", "") for r in records)
    steps = sorted(p.name for p in run.directory.iterdir() if p.name.isdecimal())
    assert steps == ["12", "3", "9"]


@pytest.mark.slow
def test_a_mount_that_one_host_loses_fails_the_save_on_all_and_ends_none(tmp_path):
    mounts = {"directory": str(tmp_path / "mount-{process}"), "broken": [6], "broken_on": 1}
    run = Run(tmp_path, processes=2, mesh="fsdp=4", steps=12, width=64, pause_s=0, **mounts)
    run.directory.mkdir()
    for process in range(2):
        (tmp_path / f"mount-{process}").symlink_to(run.directory)
    records = run.finish()
    before, after = ["save"] * 3, ["save"] * 4  # 1, 3, 4; 7, 9, 10, 12
    assert value(records, "events") == ["probe", *before, "save_failed", *after]
    said = " ".join(record.get("log", "") for record in records)
    assert f"mount-1 is gone: is its file system still mounted? (process 1 on {HOST})" in said


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
        assert all("two runs would overwrite" in error for error in errors), errors
    finally:
        for process in first:
            process.kill()
            process.communicate()
