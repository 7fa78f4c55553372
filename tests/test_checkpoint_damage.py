"""Damaged, missing and foreign files are never loaded silently."""

import errno
import json
import os
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from damaged import DAMAGE, STEPS, all_files, assert_is_step, flip_bit, like, state_at
from refusals import missing, refused

from jaxdist.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    manifest,
    orbax_io,
    restore,
)
from jaxdist.checkpoint.events import CorruptCheckpoint
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_detected(pristine, tmp_path, damage):
    names = [p.relative_to(pristine / "4") for p in all_files(pristine / "4")]
    assert len(names) > 10
    for number, name in enumerate(names):
        copy = tmp_path / str(number) / "4"
        shutil.copytree(pristine / "4", copy)
        if (copy / name).stat().st_size == 0:
            assert damage != "deleted"
            continue
        DAMAGE[damage](copy / name)
        reader = Checkpointer(copy.parent, CheckpointConfig(), read_only=True)
        reason = reader.verify(4)
        assert reason and "\n" not in reason, name
        assert reader.verify(4) == reason
        assert name.name in reason


@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_skips_a_damaged_checkpoint_with_a_reason(run, damage):
    victim = max(all_files(run.path / "4" / "arrays"), key=lambda p: p.stat().st_size)
    DAMAGE[damage](victim)
    opened = run.open()
    restored, meta, step = opened.restore(like(state_at(4)))
    assert (step, meta) == (2, {"next": 2})
    assert_is_step(restored, 2)
    assert (run.path / "4" / manifest.CORRUPT).exists()
    skipped = opened.pop_events()[0]
    assert (skipped["event"], skipped["step"]) == ("checkpoint_skipped", 4)
    assert skipped["reason"].startswith("arrays/")


def test_wrong_moments_in_a_store_restore_the_previous_checkpoint(run):
    def load(stored, step):
        if step == 4:
            raise CorruptCheckpoint(f"wrong checksum of opt_state/mu in {stored.checkpoint}")

    opened, moments = run.open(), types.SimpleNamespace(leaves=[], load=load)
    restored, _, step = opened.restore(like(state_at(4)), moments=moments)
    assert step == 2 and (run.path / "4" / manifest.CORRUPT).exists()
    assert_is_step(restored, 2)


def commit_again(path: Path) -> None:
    """Write a manifest that matches the damaged files: only array checksums can detect it."""
    checkpoint = locate(path)
    files = manifest.fingerprints(checkpoint, manifest.files_of(checkpoint))
    manifest.write(checkpoint, int(checkpoint.name), files, {})


def data_file_of(checkpoint: Path, value: np.ndarray) -> tuple[Path, int]:
    """Return the file that holds an array's bytes, and the offset."""
    for file in all_files(checkpoint):
        if (at := file.read_bytes().find(np.asarray(value).tobytes())) >= 0:
            return file, at
    raise AssertionError("no file holds the array uncompressed")


def commit_with_wrong_arrays(checkpoint: Path) -> None:
    file, at = data_file_of(checkpoint, state_at(4)["params"]["w"])
    data = bytearray(file.read_bytes())
    data[at + 100] ^= 1
    file.write_bytes(data)
    commit_again(checkpoint)


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_array_checksums_detect_damage_the_manifest_cannot(run, verify):
    commit_with_wrong_arrays(run.path / "4")
    opened = run.open(verify=verify)
    assert opened.choose() == 4  # the files look intact
    restored, _, step = opened.restore(like(state_at(4)), step=4)  # as the training loop does
    assert step == 2
    assert_is_step(restored, 2)
    (skipped,) = (e for e in opened.pop_events() if e["event"] == "checkpoint_skipped")
    assert skipped["step"] == 4 and missing(skipped["reason"], "wrong checksum", "params/w") == []
    with refused("checkpoint 9", "there: 2", error=CheckpointError):
        opened.restore(like(state_at(4)), step=9)


def test_damaged_checkpoint_requested_by_number_is_rejected(run):
    flip_bit(run.path / "4" / "meta" / "metadata")
    opened = run.open()
    with refused("checkpoint 4", "meta/metadata", error=CheckpointError):
        opened.restore(like(state_at(4)), step=4)
    assert opened.steps() == [2, 4]


def test_quick_verification_never_loads_a_wrong_bit(run, tmp_path, monkeypatch):
    """Damage each file of the newest checkpoint in turn; none is small enough to be read twice."""
    monkeypatch.setattr(restore, "_SMALL_BYTES", 1000)
    names = [p.relative_to(run.path / "4") for p in all_files(run.path / "4")]
    outcomes = set()
    for number, name in enumerate(names):
        copy = tmp_path / f"flip{number}"
        shutil.copytree(run.path, copy)
        flip_bit(copy / "4" / name, at=0.7)
        opened = Checkpointer(copy, CheckpointConfig(verify="quick"), log=lambda line: None)
        try:
            restored, _, step = opened.restore(like(state_at(4)))
        except (CheckpointError, ConfigError):
            outcomes.add("refused")
        else:
            assert_is_step(restored, step)
            outcomes.add(step)
        finally:
            opened.close()
    assert outcomes == {2}


def test_file_sizes_detect_a_truncated_or_missing_file(run):
    """Quick verification checks only the sizes of large files."""
    checkpoint = locate(run.path / "4")
    files = manifest.read(checkpoint)["files"]
    assert manifest.size_problems(checkpoint, files) == []
    cut, gone = sorted(files)[:2]
    with open(run.path / "4" / cut, "ab") as file:
        file.write(b"x")
    (run.path / "4" / gone).unlink()
    problems = manifest.size_problems(checkpoint, files)
    assert [line.split()[0] for line in problems] == [cut, gone]
    assert f"{files[cut][0] + 1} of {files[cut][0]} bytes" in problems[0]


def test_manually_edited_manifest_is_rejected(run):
    """The manifest is still valid JSON: only its own checksum detects the edit."""
    path = run.path / "4" / manifest.FILE_NAME
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "metrics": {"loss": 0.0}}))
    assert run.open().choose() == 2
    with pytest.raises(ValueError, match="CRC-32"):
        manifest.read(locate(run.path / "4"))


def test_directory_without_manifest_is_ignored(run):
    (run.path / "4" / "manifest.json").unlink()
    (run.path / "9").mkdir()
    reader = run.open(read_only=True)
    assert (reader.steps(), reader.choose()) == ([2], 2)
    assert (run.path / "4").exists() and (run.path / "9").exists()
    opened = run.open()
    assert opened.choose() == 2
    assert any(missing(line, "removed", "steps 4, 9") == [] for line in run.lines)
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "2"]


def test_renamed_checkpoint_is_not_used_as_another_step(run):
    (run.path / "4").rename(run.path / "400")
    opened = run.open()
    assert opened.choose() == 2
    (skipped,) = (e for e in opened.pop_events() if e["event"] == "checkpoint_skipped")
    assert skipped["step"] == 400 and missing(skipped["reason"], "manifest", "step 4") == []


def test_unrelated_files_are_left_unchanged(run):
    (run.path / "notes.txt").write_text("mine")
    (run.path / "7").write_text("a file, not a directory")
    assert run.open().choose() == 4
    assert (run.path / "notes.txt").exists() and (run.path / "7").exists()


def test_corrupt_mark_stays_until_the_step_is_saved_again(run):
    flip_bit(run.path / "4" / "meta" / "metadata")
    for _ in range(2):  # a second start skips it too, and reports it
        opened = run.open(max_to_keep=5)
        assert opened.restore(like(state_at(4)))[2] == 2
        (skipped,) = [e for e in opened.pop_events() if e["event"] == "checkpoint_skipped"]
        assert skipped["step"] == 4 and "meta/metadata" in skipped["reason"]
        opened.close()
    opened = run.open(max_to_keep=5)
    opened.restore(like(state_at(4)))
    opened.save(4, state_at(4), {}, force=True)
    assert opened.verify(4) == "" and opened.choose() == 4
    commit_with_wrong_arrays(run.path / "4")  # detected only during the load
    assert opened.restore(like(state_at(4)))[2] == 2
    opened.save(4, state_at(4), {}, force=True)
    assert opened.choose() == 4


def test_start_is_refused_every_time_if_all_are_damaged(run):
    for step in STEPS:
        flip_bit(run.path / str(step) / "meta" / "metadata")
    for _ in range(2):  # a second start must not see an empty directory and start from scratch
        opened = run.open()
        with pytest.raises(CheckpointError) as caught:
            opened.choose()
        assert "checkpoint 2: meta/metadata" in str(caught.value)
        assert "checkpoint 4: meta/metadata" in str(caught.value)
        opened.close()


def test_read_only_access_changes_no_file(run):
    flip_bit(run.path / "4" / "meta" / "metadata")
    before = sorted(p.as_posix() for p in run.path.rglob("*"))
    reader = run.open(read_only=True)
    assert_is_step(reader.restore(like(state_at(4)))[0], 2)
    assert sorted(p.as_posix() for p in run.path.rglob("*")) == before


def test_next_start_skips_a_checkpoint_that_failed_to_load(run):
    (run.path / "4" / manifest.CORRUPT).write_text("it could not be read (ValueError: x)")
    opened = run.open()
    assert opened.choose() == 2
    (skipped,) = (e for e in opened.pop_events() if e["event"] == "checkpoint_skipped")
    assert skipped["step"] == 4 and "ValueError: x" in skipped["reason"]


def test_only_the_newest_of_many_checkpoints_is_read_and_others_can_be_deleted(run, monkeypatch):
    """Checkpoint 4 again as 202; of those in between only the manifests exist."""
    body = manifest.read(locate(run.path / "4"))
    shutil.copytree(run.path / "4", run.path / "202")
    for step in range(5, 203):
        (run.path / str(step)).mkdir(exist_ok=True)
        files = body["files"] if step == 202 else {}
        manifest.write(locate(run.path / str(step)), step, files, {})
    read, read_one = [], manifest.read
    monkeypatch.setattr(manifest, "read", lambda path: read.append(path.path) or read_one(path))
    opened = run.open(max_to_keep=2)
    assert len(opened.steps()) == 200 and opened.choose() == 202
    assert [Path(path).name for path in read] == ["202"]
    assert_is_step(opened.restore(like(state_at(4)))[0], 4)
    opened.save(203, state_at(203), {}, force=True)
    assert opened.steps() == [202, 203]


def without_memory(path, targets):
    raise MemoryError


@pytest.mark.parametrize("num_processes", [1, 2])
def test_unreadable_but_intact_checkpoint_is_not_marked(run, monkeypatch, num_processes):
    opened = run.open()
    opened._reader.group = types.SimpleNamespace(num_processes=num_processes)
    monkeypatch.setattr(orbax_io, "read", without_memory)
    with pytest.raises(CheckpointError) as failed:
        opened._reader._read(4, {})
    assert not isinstance(failed.value, CorruptCheckpoint)
    assert isinstance(failed.value.__cause__, MemoryError)
    assert not (run.path / "4" / manifest.CORRUPT).exists()


def test_one_of_several_processes_marks_a_damaged_checkpoint(run, monkeypatch):
    opened = run.open(verify="none")
    opened._reader.group = types.SimpleNamespace(num_processes=2)
    monkeypatch.setattr(orbax_io, "read", without_memory)
    flip_bit(run.path / "4" / "meta" / "metadata")
    with pytest.raises(CheckpointError, match="meta/metadata"):
        opened._reader._read(4, {})
    assert "meta/metadata" in (run.path / "4" / manifest.CORRUPT).read_text()


def test_unavailable_file_server_marks_no_checkpoint_corrupt(run, monkeypatch):
    fingerprint = manifest.fingerprint

    def stale(file):
        if str(file).startswith(f"{run.path}/4/"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fingerprint(file)

    opened = run.open()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "fingerprint", stale)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ESTALE)):
            opened.choose()
    assert opened.choose() == 4
