"""Nothing wrong is ever loaded silently: damaged files, failing disks, a second run."""

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    lock,
    manifest,
    restoring,
    saving,
    store,
)
from jaxdist.checkpoint.store import Store
from jaxdist.types import ConfigError

STEPS = (2, 4)


def state_at(step: int, size: int = 1024) -> dict:
    values = np.random.default_rng(step).standard_normal(size).astype(np.float32)
    device = jax.devices()[0]
    return jax.tree.map(
        lambda x: jax.device_put(x, device),
        {
            "params": {"w": values},
            "opt_state": ({"mu": values * 2},),
            "rest": {"step": np.int32(step), "key": jax.random.key(step)},
        },
    )


def like(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_is_step(restored, step: int) -> None:
    expected = state_at(step)
    assert int(restored["rest"]["step"]) == step
    np.testing.assert_array_equal(restored["params"]["w"], expected["params"]["w"])
    np.testing.assert_array_equal(restored["opt_state"][0]["mu"], expected["opt_state"][0]["mu"])
    np.testing.assert_array_equal(
        *(jax.random.key_data(s["rest"]["key"]) for s in (restored, expected))
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pristine")
    writer = Checkpointer(path, CheckpointConfig(), log=lambda line: None)
    for step in STEPS:
        writer.save(step, state_at(step), {"next": step})
    writer.close()
    return path


@pytest.fixture
def run(pristine, tmp_path):
    """A fresh copy of a directory with checkpoints 2 and 4, a way to open it, and its log."""

    class Run:
        path = tmp_path / "checkpoints"

        def open(self, **settings) -> Checkpointer:
            read_only = settings.pop("read_only", False)
            self.opened = Checkpointer(
                self.path, CheckpointConfig(**settings), log=self.lines.append, read_only=read_only
            )
            return self.opened

    run = Run()
    run.lines = []
    shutil.copytree(pristine, run.path)
    yield run
    if hasattr(run, "opened"):
        run.opened.close()


def flip_bit(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    file.write_bytes(data)


DAMAGE = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "bit_flipped": flip_bit,
    "emptied": lambda file: os.truncate(file, 0),
    "deleted": lambda file: file.unlink(),
}


def all_files(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_seen(pristine, tmp_path, damage):
    names = [p.relative_to(pristine / "4") for p in all_files(pristine / "4")]
    assert len(names) > 20
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
def test_resume_goes_past_a_damaged_checkpoint_and_says_why(run, damage):
    victim = max(all_files(run.path / "4" / "params"), key=lambda p: p.stat().st_size)
    DAMAGE[damage](victim)
    opened = run.open()
    restored, meta, step = opened.restore(like(state_at(4)))
    assert (step, meta) == (2, {"next": 2})
    assert_is_step(restored, 2)
    assert [line for line in run.lines if line.startswith("checkpoint 4 skipped: params/")]
    assert (run.path / "4.damaged").is_dir() and not (run.path / "4").exists()
    assert {"event": "checkpoint_skipped", "step": 4}.items() <= opened.pop_events()[0].items()


def seal_again(checkpoint: Path) -> None:
    """A manifest that fits the damaged files: only the arrays' digests can tell."""
    files = {n: manifest.fingerprint(checkpoint / n) for n in manifest.files_of(checkpoint)}
    manifest.write(checkpoint, int(checkpoint.name), files, {})


def data_file_of(checkpoint: Path, value: np.ndarray) -> tuple[Path, int]:
    """The file that holds an array's bytes, and where."""
    for file in all_files(checkpoint):
        if (at := file.read_bytes().find(np.asarray(value).tobytes())) >= 0:
            return file, at
    raise AssertionError("no file holds the array uncompressed")


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_digests_catch_what_the_manifest_cannot(run, verify):
    file, at = data_file_of(run.path / "4", state_at(4)["params"]["w"])
    data = bytearray(file.read_bytes())
    data[at + 100] ^= 1
    file.write_bytes(data)
    seal_again(run.path / "4")
    opened = run.open(verify=verify)
    assert opened.choose() == 4  # the files look right
    restored, _, step = opened.restore(like(state_at(4)), step=4)  # as the training loop does
    assert step == 2
    assert_is_step(restored, 2)
    assert any("other bits than were saved in params/w" in line for line in run.lines)
    with pytest.raises(CheckpointError, match=r"checkpoint 9 .* does not exist\. Others there: 2"):
        opened.restore(like(state_at(4)), step=9)


def test_a_damaged_checkpoint_asked_for_by_number_is_refused(run):
    flip_bit(run.path / "4" / "meta" / "metadata")
    opened = run.open()
    with pytest.raises(CheckpointError, match=r"checkpoint 4 .* cannot be used: meta/metadata has"):
        opened.restore(like(state_at(4)), step=4)
    assert opened.steps() == [2, 4]


def test_quick_verification_never_loads_a_wrong_bit(run, tmp_path, monkeypatch):
    """Every file of the newest checkpoint in turn, none of them small enough to be read twice."""
    monkeypatch.setattr(restoring, "_SMALL_BYTES", 1000)
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


def test_a_checkpoint_without_its_manifest_is_not_trusted(run):
    (run.path / "4" / "manifest.json").unlink()
    assert run.open().choose() == 2
    assert "checkpoint 4 skipped: no manifest.json" in run.lines


def test_an_empty_directory_named_as_the_newest_is_skipped(run):
    (run.path / "9").mkdir()
    assert run.open().choose() == 4
    assert "checkpoint 9 skipped: an empty directory" in run.lines


def test_a_renamed_checkpoint_is_not_taken_for_another_step(run):
    (run.path / "4").rename(run.path / "400")
    assert run.open().choose() == 2
    assert "checkpoint 400 skipped: its manifest is of step 4" in run.lines[-1]


def test_files_that_are_no_checkpoints_are_left_alone(run):
    (run.path / "notes.txt").write_text("mine")
    (run.path / "7").write_text("a file, not a directory")
    (run.path / "4.damaged").mkdir()
    assert run.open().choose() == 4
    assert (run.path / "notes.txt").exists() and (run.path / "7").exists()


def test_a_run_killed_in_its_very_first_save_starts_over(run):
    """Killed at the last moment before the save counts: files and manifest are complete."""
    shutil.rmtree(run.path / "2")
    (run.path / ".saving").mkdir()
    (run.path / "4").rename(run.path / ".saving" / "4")
    opened = run.open()
    assert opened.choose() is None
    assert sorted(p.name for p in run.path.iterdir()) == [".lock"]


def test_a_save_has_no_name_before_its_manifest_is_complete(run, monkeypatch):
    opened = resume_then(run)
    seen = []
    publish = manifest.publish

    def look(saved, checkpoint):
        seen.append((opened.directory / "6").exists())
        assert manifest.read(saved)["step"] == 6
        publish(saved, checkpoint)
        seen.append((opened.directory / "6").exists())

    monkeypatch.setattr(manifest, "publish", look)
    opened.save(6, state_at(6), {}, force=True)
    assert opened.wait() is True and seen == [False, True]


KILLED_WHILE_PUBLISHING = """
import itertools, os, shutil, sys
from pathlib import Path
from jaxdist.checkpoint import manifest

saved = Path(sys.argv[1])
for moment in itertools.count():
    root = Path(sys.argv[2]) / str(moment)
    partial, named = root / manifest.SAVING_NAME / "4", root / "4"
    shutil.copytree(saved, partial)
    if not (child := os.fork()):
        events = itertools.count()
        sys.addaudithook(lambda *_: next(events) == moment and os._exit(9))
        manifest.publish(partial, named)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = "whole"
    if named.exists():
        files = manifest.read(named)["files"]
        assert set(manifest.files_of(named)) == set(files), moment
        assert not manifest.content_problems(named, files, files), moment
    else:
        assert not manifest.content_problems(partial, *[manifest.read(partial)["files"]] * 2)
        found = "absent"
    print(found, flush=True)
    if status == 0:
        break
"""


def test_killed_at_any_operation_of_publishing_a_checkpoint_is_whole_or_absent(pristine, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_PUBLISHING, str(pristine / "4"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert found[0] == "absent" and found[-1] == "whole" and len(found) >= 3


def test_a_clock_that_runs_backwards_changes_nothing(run, monkeypatch):
    """Newest is the highest step, whatever the clock and the files' times say."""
    for number, step in enumerate(STEPS):  # the older checkpoint has the younger files
        for file in all_files(run.path / str(step)):
            os.utime(file, (2_000_000_000 - number * 10**8,) * 2)
    clock = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock) * 10**9)
    opened = run.open(keep_newest=2)
    restored, _, step = opened.restore(like(state_at(4)))
    assert step == 4
    assert_is_step(restored, 4)
    for step in (6, 8, 10):
        opened.save(step, state_at(step), {}, force=True)
        assert opened.wait() is True
    assert opened.steps() == [8, 10] and opened.choose() == 10
    # Saves by the minute: a clock that went back waits for its time, and nothing breaks.
    assert opened.due(11, now=-1e9) == ""
    assert opened.due(11, now=1e9) == "interval"


def test_when_none_is_good_it_refuses_every_time(run):
    for step in STEPS:
        flip_bit(run.path / str(step) / "meta" / "metadata")
    for _ in range(2):  # a second start must not find an empty directory and begin from nothing
        opened = run.open()
        with pytest.raises(
            CheckpointError, match="can be trusted, so nothing was resumed"
        ) as caught:
            opened.choose()
        assert "checkpoint 2: meta/metadata" in str(caught.value)
        assert "checkpoint 4: meta/metadata" in str(caught.value)
        opened.close()


def test_an_empty_run_has_nothing_to_resume(tmp_path):
    opened = Checkpointer(tmp_path / "new", CheckpointConfig())
    assert opened.choose() is None and opened.steps() == []
    opened.close()


def test_reading_only_changes_nothing(run):
    flip_bit(run.path / "4" / "meta" / "metadata")
    before = sorted(p.as_posix() for p in run.path.rglob("*"))
    reader = run.open(read_only=True)
    assert_is_step(reader.restore(like(state_at(4)))[0], 2)
    assert sorted(p.as_posix() for p in run.path.rglob("*")) == before


def test_a_checkpoint_that_a_process_could_not_load_is_passed_by_the_next_start(run):
    (run.path / "4" / "rejected.txt").write_text("it could not be read (ValueError: x)")
    assert run.open().choose() == 2
    assert (
        "an earlier start could not load it: it could not be read (ValueError: x)" in run.lines[-1]
    )


def test_leftovers_of_a_killed_save_are_removed(run):
    for name in (".saving/6.orbax-checkpoint-tmp", ".saving/6", ".deleted-0"):
        (run.path / name / "params").mkdir(parents=True)
    run.open()
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "2", "4"]


# -- saves that fail -------------------------------------------------------------------------------


def untouched(run, pristine) -> None:
    """Checkpoints 2 and 4 are what they were."""
    for step in STEPS:
        for file in all_files(pristine / str(step)):
            copy = run.path / file.relative_to(pristine)
            assert copy.read_bytes() == file.read_bytes()


def resume_then(run, **settings) -> Checkpointer:
    opened = run.open(keep_newest=5, **settings)
    opened.restore(like(state_at(4)))
    return opened


def test_a_file_in_the_way_is_set_aside(run):
    opened = resume_then(run)
    (run.path / "6").write_text("in the way")
    (run.path / ".saving").mkdir()
    (run.path / ".saving" / "8").write_text("in the way")
    for step in (6, 8):
        opened.save(step, state_at(step), {})
        assert opened.wait() is True
    assert opened.steps() == [2, 4, 6, 8]
    assert (run.path / "6.damaged").read_text() == "in the way"


def test_files_that_cannot_grow_fail_the_save_in_the_background(run, pristine):
    opened = resume_then(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        opened.save(6, state_at(6, size=1 << 18), {})
        assert opened.wait() is False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    untouched(run, pristine)
    assert any(line.startswith("SAVE FAILED at step 6: ") for line in run.lines)
    failed = opened.pop_events()[-1]
    assert (failed["event"], failed["step"], failed["in_a_row"]) == ("save_failed", 6, 1)
    opened.save(8, state_at(8), {})
    assert opened.wait() is True
    assert opened.steps() == [2, 4, 8]


def test_a_vanished_directory_fails_the_save_and_is_not_made_anew(run):
    opened = resume_then(run)
    shutil.move(run.path, run.path.with_name("elsewhere"))
    opened.save(6, state_at(6), {})
    assert opened.wait() is False
    assert not run.path.exists()
    assert any("is gone: is its file system still mounted?" in line for line in run.lines)


def test_what_is_made_anew_below_a_lost_mount_holds_no_checkpoint(run, pristine, monkeypatch):
    """Orbax makes missing directories: a save under way when the mount goes would look complete."""
    opened = resume_then(run)
    away = run.path.with_name("elsewhere")
    real = Store.start_write

    def goes_away(self, *args):
        shutil.move(run.path, away)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "start_write", goes_away)
        opened.save(6, state_at(6), {}, force=True)
    opened.save(8, state_at(8), {}, force=True)  # what Orbax made is there now
    assert opened.wait() is False
    assert sum("is gone: is its file system still mounted?" in line for line in run.lines) == 2
    assert not any(path.name.isdecimal() for path in run.path.iterdir())
    shutil.rmtree(run.path)
    shutil.move(away, run.path)
    untouched(run, pristine)
    opened.save(10, state_at(10), {})
    assert opened.wait() is True


def test_a_manifest_that_cannot_be_written_means_no_checkpoint(run, pristine, monkeypatch):
    opened = resume_then(run)
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(manifest, "write", full)
        opened.save(6, state_at(6), {})
        assert opened.wait() is False
    untouched(run, pristine)
    assert opened.steps() == [2, 4]


def test_too_little_space_is_known_before_writing(run, pristine, monkeypatch):
    opened = resume_then(run)
    usage = shutil.disk_usage(run.path)._replace(free=100)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage)
    opened.save(6, state_at(6), {})
    assert opened.wait() is False
    untouched(run, pristine)
    assert any("no space: a checkpoint takes 8.20 kB" in line for line in run.lines)


def test_training_stops_after_so_many_failures_in_a_row(run, monkeypatch):
    opened = resume_then(run, max_failures=2)
    finish = store.Store.finish_write
    broken = True

    def fail(self):
        finish(self)
        if broken:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.Store, "finish_write", fail)
    opened.save(6, state_at(6), {})
    assert opened.wait() is False
    broken = False
    opened.save(8, state_at(8), {})
    assert opened.wait() is True  # the count starts again
    broken = True
    opened.save(10, state_at(10), {})
    opened.save(12, state_at(12), {})
    with pytest.raises(CheckpointError, match=r"2 saves in a row have failed, the last at step 12"):
        opened.save(14, state_at(14), {})
    assert opened.choose() == 8


def small_file_system(path: Path, mib: int):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command here, so no small file system to fill")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


@contextlib.contextmanager
def read_only(directory: Path):
    """The directory under a read-only mount of itself: not even root can write there."""
    mount = ["mount", "--bind", str(directory), str(directory)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_directory_that_becomes_read_only_stops_no_training(run, pristine):
    opened = resume_then(run)
    with read_only(run.path):
        opened.save(6, state_at(6), {}, force=True)
        assert opened.wait() is False
        assert any(
            line.startswith("SAVE FAILED at step 6") and "Read-only file system" in line
            for line in run.lines
        ), run.lines
        reader = Checkpointer(run.path, CheckpointConfig(), read_only=True)
        assert_is_step(reader.restore(like(state_at(4)))[0], 4)
    untouched(run, pristine)
    opened.save(8, state_at(8), {}, force=True)
    assert opened.wait() is True and opened.steps() == [2, 4, 8]


def test_a_run_on_a_read_only_directory_is_refused(run):
    with (
        read_only(run.path),
        pytest.raises(ConfigError, match=r"cannot be written .*Read-only file system"),
    ):
        Checkpointer(run.path, CheckpointConfig())


@pytest.mark.parametrize("known_before", [True, False], ids=["known_before", "while_writing"])
def test_a_full_disk_harms_no_older_checkpoint(tmp_path, monkeypatch, known_before):
    disk = tmp_path / "disk"
    small_file_system(disk, 8)
    try:
        if not known_before:
            usage = shutil.disk_usage(disk)._replace(free=1 << 40)
            monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage)
        lines = []
        opened = Checkpointer(disk / "checkpoints", CheckpointConfig(), log=lines.append)
        opened.save(2, state_at(2, size=1 << 19), {}, force=True)
        assert opened.wait() is True
        opened.save(4, state_at(4, size=1 << 19), {}, force=True)
        assert opened.wait() is False, lines
        assert any(line.startswith("SAVE FAILED at step 4") for line in lines)
        assert opened.verify(2) == ""
        assert sorted(p.name for p in opened.directory.iterdir()) == [".lock", "2"]
        opened.save(6, state_at(6), {}, force=True)  # a smaller one fits
        assert opened.wait() is True and opened.verify(6) == ""
        opened.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


# -- one run per directory -------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from jaxdist.checkpoint.lock import DirectoryLock
DirectoryLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_on_the_same_directory_is_refused(tmp_path):
    first = Checkpointer(tmp_path, CheckpointConfig())
    with pytest.raises(ConfigError, match=r"in use by process .* two runs would overwrite"):
        Checkpointer(tmp_path, CheckpointConfig())
    first.close()
    Checkpointer(tmp_path, CheckpointConfig()).close()


def test_another_process_is_refused_while_it_lives_and_succeeded_when_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(
        ConfigError, match=f"in use by process {holder.pid} on {socket.gethostname()}"
    ):
        Checkpointer(tmp_path, CheckpointConfig())
    holder.kill()
    holder.wait()
    lines = []
    Checkpointer(tmp_path, CheckpointConfig(), log=lines.append).close()
    assert f"took over from process {holder.pid}" in lines[0]


@pytest.mark.parametrize("alive", [True, False])
def test_a_holder_on_another_host_is_watched_for_signs_of_life(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.2)
    record = {"pid": 1, "host": "elsewhere", "boot": "another", "state": "held", "beat": 0}
    file = tmp_path / lock.FILE_NAME
    file.write_text(json.dumps(record))
    if not alive:
        lines = []
        Checkpointer(tmp_path, CheckpointConfig(), log=lines.append).close()
        assert "watching whether process 1 on elsewhere still uses it" in lines[0]
        assert "took over from process 1 on elsewhere, which is gone" in lines[1]
        return
    beats = iter(range(1, 1000))
    monkeypatch.setattr(
        lock.time, "sleep", lambda _: file.write_text(json.dumps({**record, "beat": next(beats)}))
    )
    with pytest.raises(ConfigError, match="in use by process 1 on elsewhere"):
        Checkpointer(tmp_path, CheckpointConfig())


def test_the_holder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    held = lock.DirectoryLock(tmp_path)
    held.acquire()
    seen = set()
    while len(seen) < 3:
        text = (tmp_path / lock.FILE_NAME).read_text()
        if text.endswith("}"):
            seen.add(json.loads(text)["beat"])
    held.release()
    assert json.loads((tmp_path / lock.FILE_NAME).read_text())["state"] == "released"


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made .*Choose another --run-dir"):
        Checkpointer(tmp_path / "file" / "checkpoints", CheckpointConfig())
