"""A rejected start leaves the run directory unchanged, byte for byte."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from commands import run_here, tiny
from damaged import flip_bit
from refusals import missing, refused, snapshot

from jaxdist.checkpoint import CheckpointError
from jaxdist.settings import ConfigError


def train(directory, *flags, steps=2) -> int:
    return run_here("train", *tiny(f"--train.steps={steps}", f"--run-dir={directory}", *flags))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train(path) == 0
    return path


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def lock_elsewhere(directory):
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); "
        "fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    )
    lock = directory / "checkpoints" / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE)
    holder.stdout.readline()
    return holder


def damage_arrays(directory):
    files = (directory / "checkpoints" / "2" / "arrays").rglob("*")
    flip_bit(max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size))


def replace_ledger(directory):
    file = directory / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records = [r | {"data_ledger": "0" * 8} if r.get("kind") == "train" else r for r in records]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


STATES = {
    "finished": lambda directory: None,
    "live": lock_elsewhere,
    "unfinished_save": lambda directory: (directory / "checkpoints" / "1").mkdir(),
    "torn_line": lambda directory: os.truncate(
        directory / "metrics.jsonl", (directory / "metrics.jsonl").stat().st_size - 9
    ),
    "no_lock_file": lambda directory: (directory / "checkpoints" / ".lock").unlink(),
    "no_logs": lambda directory: shutil.rmtree(directory / "logs"),
}
FLAGS = {
    "shape": "--model.d_model=64",
    "optimizer": "--optim.optimizer=sgd",
    "freeze": "--optim.freeze=embed",
    "mesh": "--mesh=dp=3",
    "data": "--data.sources=/nowhere",
    "never": "--resume=never",
}


@pytest.mark.parametrize(("state", "flag"), [*zip(STATES, FLAGS, strict=True)])
def test_a_rejected_start_changes_nothing(copy, state, flag):
    holder = STATES[state](copy)
    before = snapshot(copy)
    try:
        with pytest.raises(ConfigError):
            train(copy, FLAGS[flag])
        assert snapshot(copy) == before
    finally:
        if isinstance(holder, subprocess.Popen):
            holder.kill()
            holder.wait()


@pytest.mark.parametrize("damage", [damage_arrays, replace_ledger])
def test_a_start_rejected_for_damage_changes_nothing(copy, damage):
    damage(copy)
    before = snapshot(copy)
    with pytest.raises((ConfigError, CheckpointError)):
        train(copy, steps=3)
    assert snapshot(copy) == before


def test_a_rejected_first_start_leaves_nothing_behind(finished, tmp_path):
    directory = tmp_path / "new" / "run"
    with pytest.raises(ConfigError):
        train(directory, f"--init-from={finished}", "--model.d_model=64")
    assert list(tmp_path.iterdir()) == []
    assert train(directory) == 0


CHANGES = {
    "optimizer": [("optim.optimizer", "'adamw'", "sgd")],
    "freeze": [("optim.freeze", "[]", "embed")],
    "loss_scale": [("precision.compute_dtype", "'auto'", "float16")],
    "tied": [("model.tie_embeddings", "False", "True")],
    "several": [("optim.optimizer", "'adamw'", "muon"), ("model.num_layers", "2", "3")],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_rejected_resume_names_only_the_changed_settings(finished, changes):
    with refused() as caught:
        train(
            finished,
            *(f"--{name}={value.lower()}" for name, _, value in changes),
            "--seed=3",
            steps=4,
        )
    text = str(caught.value)
    for name, before, value in changes:
        flag = f"--{name.replace('_', '-')}"
        assert missing(text, f"{name}={before}", value, flag) == []
    assert text.count(" (now ") == len(changes)
    assert "params/" not in text and "opt_state/" not in text and "\n" not in text


def test_mismatch_without_a_changed_setting_names_three_arrays(copy, monkeypatch):
    read = "jaxdist.checkpoint.orbax_io.read_document"
    original = importlib.import_module("jaxdist.checkpoint.orbax_io").read_document

    def without_config(checkpoint):
        document = original(checkpoint)
        del document["meta"]["config"]
        return document

    monkeypatch.setattr(read, without_config)
    with refused("more arrays", num_problems=3):
        train(copy, "--model.d_model=64")
