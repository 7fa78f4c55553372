"""Exports during training equal those of `convert`, and are complete or absent."""

import shutil
import time

import pytest
from commands import records, run_here, tiny
from refusals import refused, snapshot

from jaxdist.checkpoint import exports as exports_module
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.events import EventLog
from jaxdist.checkpoint.exports import Exports
from jaxdist.checkpoint.save import Saved, steps_to_delete
from jaxdist.runtime.storage import locate
from jaxdist.tools.convert.__main__ import main as convert

CONFIG = CheckpointConfig(export="hf", save_interval_steps=2, export_interval_steps=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a run that kept checkpoints 4 and 8, and `to-hf` of checkpoint 4."""
    folder = tmp_path_factory.mktemp("exports")
    job = tiny("--train.steps=8", "--eval.final_max_batches=1", "--checkpoint.max_to_keep=1")
    every = ["--checkpoint.save_interval_steps=2", "--checkpoint.keep_interval_steps=4"]
    export = ["--checkpoint.export=hf", "--checkpoint.export_interval_steps=4"]
    assert run_here("train", *job, *every, *export, "--run-dir", folder / "run") == 0
    assert convert(["to-hf", str(folder / "run"), str(folder / "hf"), "--step=4"]) == 0
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made / "run", tmp_path / "run", ignore=shutil.ignore_patterns("export"))


def exports_of(run):
    events = EventLog(lambda line: None, leader=True)
    return Exports(locate(run / "checkpoints"), CONFIG, events), events


def ended(exports, events):
    """Return the events of all started exports."""
    exports.wait()
    exports.close()
    return [(event["event"], event["step"]) for event in events.pop()]


def test_checkpoints_are_exported_while_training_continues(made):
    export = made / "run" / "export"
    assert sorted(path.name for path in export.iterdir()) == ["4", "8"]
    assert snapshot(export / "4") == snapshot(made / "hf")
    events = [e for e in records(made / "run", "event") if e["event"].startswith("export")]
    assert [(e["event"], e["step"]) for e in events] == [("export", 4), ("export", 8)]


@pytest.fixture
def blocked(tmp_path, monkeypatch):
    """Make exports write a file and then stop before they end."""
    (tmp_path / "blocked_export.py").write_text(
        "import runpy, time\n"
        "from jaxdist.models.huggingface import safetensors\n"
        "def write_shards(folder, *rest):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    time.sleep(600)\n"
        "safetensors.write_shards = write_shards\n"
        "runpy.run_module('jaxdist.tools.convert.checkpoint_export', run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(exports_module, "_COMMAND", "blocked_export")
        yield patch


def partial_of(run, timeout_s=60):
    """Wait for an export that has written its first file; return its folder."""
    end = time.monotonic() + timeout_s
    while not (files := [*(run / "export").glob("*/model.safetensors")]):
        assert time.monotonic() < end
        time.sleep(0.02)
    return files[0].parent


def test_a_killed_export_is_absent_and_the_next_start_writes_it(made, run, blocked):
    exports, events = exports_of(run)
    begin = time.perf_counter()
    exports.committed(4)
    assert time.perf_counter() - begin < 0.1
    assert partial_of(run).name != "4" and not (run / "export" / "4").exists()
    assert exports.unfinished == [4]
    exports.close()
    assert not (run / "export" / "4").exists() and events.pop() == []

    blocked.undo()
    exports, events = exports_of(run)
    exports.resume(4)  # checkpoint 8 is newer than the one that the run resumes from
    assert ended(exports, events) == [("export", 4)]
    assert [path.name for path in (run / "export").iterdir()] == ["4"]
    assert snapshot(run / "export" / "4") == snapshot(made / "hf")


def test_a_repeated_step_replaces_its_export(made, run):
    old = run / "export" / "4"
    old.mkdir(parents=True)
    (old / "old.txt").write_text("of an earlier attempt")
    (run / "export" / "6").mkdir()
    exports, events = exports_of(run)
    exports.committed(4)
    exports.committed(6)  # not due: only the old export is deleted
    assert ended(exports, events) == [("export", 4)]
    assert snapshot(old) == snapshot(made / "hf") and not (run / "export" / "6").exists()


def test_a_failed_export_is_reported_and_nothing_else(run):
    (run / "export").write_text("a file where the folder should be")
    exports, events = exports_of(run)
    exports.committed(4)
    exports.wait()
    exports.close()
    (event,) = events.pop()
    assert (event["event"], event["step"]) == ("export_failed", 4)
    assert "export" in event["reason"]


def test_retention_keeps_checkpoints_until_their_export_ends():
    saved = {step: Saved() for step in (2, 4, 6, 8)}
    config = CheckpointConfig(max_to_keep=1)
    assert steps_to_delete(saved, config, in_use=[4]) == [2, 6]
    assert steps_to_delete(saved, config) == [2, 4, 6]


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--checkpoint.export_interval_steps=2000"], ["checkpoint.export=none"]),
        (
            ["--checkpoint.export=hf", "--checkpoint.export_interval_steps=1500"],
            ["save_interval_steps=1000", "Use 1000"],
        ),
    ],
)
def test_intervals_without_effect_are_rejected(tmp_path, flags, facts):
    with refused("export_interval_steps", *facts):
        run_here("train", "--run-dir", tmp_path / "run", *flags)
