"""Saves that fail and second runs damage no existing checkpoint."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from damaged import STEPS, all_files, resume_then, state_at
from orbax.checkpoint._src import asyncio_utils
from refusals import missing, refused

from jaxdist.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    lock,
    manifest,
    save,
)
from jaxdist.checkpoint.orbax_io import OrbaxWriter
from jaxdist.runtime.storage import Location, Locked, locate


def untouched(run, pristine) -> None:
    for step in STEPS:
        for file in all_files(pristine / str(step)):
            copy = run.path / file.relative_to(pristine)
            assert copy.read_bytes() == file.read_bytes()


def test_a_leftover_that_is_no_checkpoint_is_replaced(run):
    opened = resume_then(run)
    (run.path / "6").write_text("in the way")
    (run.path / "8" / "arrays").mkdir(parents=True)  # as a failed save leaves it
    for step in (6, 8):
        opened.save(step, state_at(step), {})
        assert opened.wait() is True
        assert opened.verify(step) == ""
    assert opened.steps() == [2, 4, 6, 8]


def test_a_file_size_limit_fails_the_background_save_with_one_line(run, pristine, capfd, caplog):
    opened = resume_then(run)
    run.lines.clear()
    large = jax.random.normal(jax.random.key(0), (40, 1 << 18))
    state = state_at(6) | {"opt_state": {f"m{i}": large[i] for i in range(40)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        opened.save(6, state, {})
        assert opened.wait() is False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    untouched(run, pristine)
    (line,) = run.lines
    assert line.startswith("SAVE FAILED at step 6: ")
    failed = opened.pop_events()[-1]
    assert (failed["event"], failed["step"], failed["in_a_row"]) == ("save_failed", 6, 1)
    assert failed["reason"].startswith(str(run.path / "6"))
    assert failed["reason"].endswith(os.strerror(errno.EFBIG))
    opened.save(8, state_at(8), {})
    assert opened.wait() is True
    assert opened.steps() == [2, 4, 8]
    assert (capfd.readouterr().err, caplog.records) == ("", [])


def test_event_loop_of_orbax_is_closed_after_its_last_write(run):
    """A write that ended later would print a traceback, because its loop is closed."""
    resume_then(run).save(6, state_at(6), {})  # makes a writer
    ended = []

    async def write(delay_s):
        await asyncio.sleep(delay_s)
        ended.append(delay_s)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def write_all():
        await asyncio.gather(write(0), write(0.01), write(0.02))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        asyncio_utils.run_sync(write_all())
    assert ended == [0, 0.01, 0.02]


def test_leftovers_that_cannot_be_deleted_yet_do_not_fail_the_next_save(run, monkeypatch):
    """Orbax's threads may still write to a failed save; then rmtree fails as well."""
    opened = resume_then(run)

    def still_written_to(directory):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(save.manifest, "delete_partial", still_written_to)
    opened.save(6, state_at(6), {})
    assert opened.wait() is True
    assert opened.steps()[-1] == 6


def test_a_vanished_directory_fails_the_save_and_is_not_recreated(run):
    opened = resume_then(run)
    shutil.move(run.path, run.path.with_name("elsewhere"))
    opened.save(6, state_at(6), {})
    assert opened.wait() is False
    assert not run.path.exists()
    failed = opened.pop_events()[-1]
    assert (failed["event"], failed["step"]) == ("save_failed", 6)
    assert missing(failed["reason"], run.path, "is gone") == []


def test_a_stale_handle_is_reported_to_other_processes_not_raised(run, monkeypatch):
    """If one of several processes raised, the others would wait for its message forever."""
    opened = resume_then(run)

    def stale(self):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(save.Saver, "_check_reachable", stale)
        assert os.strerror(errno.ESTALE) in opened._saver._why_unreachable()
        opened.save(6, state_at(6), {})
        assert opened.wait() is False
    failed = opened.pop_events()[-1]
    assert (failed["event"], failed["step"]) == ("save_failed", 6)
    assert os.strerror(errno.ESTALE) in failed["reason"]
    opened.save(8, state_at(8), {})
    assert opened.wait() is True


def test_a_failed_save_of_a_saved_step_leaves_its_checkpoint_alone(run, pristine, monkeypatch):
    opened = resume_then(run)

    def gone(self):
        raise CheckpointError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(save.Saver, "_check_reachable", gone)
        opened.save(4, state_at(4), {})
        assert opened.wait() is False
    untouched(run, pristine)
    assert opened.verify(4) == ""


def test_directories_recreated_below_a_lost_mount_hold_no_checkpoint(run, pristine, monkeypatch):
    """Orbax creates missing directories: a save that loses its mount would look complete."""
    opened = resume_then(run)
    away = run.path.with_name("elsewhere")
    real = OrbaxWriter.start

    def goes_away(self, *args):
        shutil.move(run.path, away)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(OrbaxWriter, "start", goes_away)
        opened.save(6, state_at(6), {}, force=True)
    opened.save(8, state_at(8), {}, force=True)  # the directory that Orbax created exists now
    assert opened.wait() is False
    failed = [e for e in opened.pop_events() if e["event"] == "save_failed"]
    assert [e["step"] for e in failed] == [6, 8]
    assert all(missing(e["reason"], run.path, "is gone") == [] for e in failed)
    assert opened.steps() == []
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


def test_too_little_space_is_detected_before_writing(run, pristine, monkeypatch):
    opened = resume_then(run)
    usage = shutil.disk_usage(run.path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    opened.save(6, state_at(6), {})
    assert opened.wait() is False
    untouched(run, pristine)
    assert any("no space: a checkpoint takes 8.0 KiB" in line for line in run.lines)


def test_training_stops_after_too_many_consecutive_failures(run, monkeypatch):
    monkeypatch.setattr(save, "MAX_FAILURES", 2)
    opened = resume_then(run)
    finish = OrbaxWriter.wait
    broken = True

    def fail(self):
        finish(self)
        if broken:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(OrbaxWriter, "wait", fail)
    opened.save(6, state_at(6), {})
    assert opened.wait() is False
    broken = False
    opened.save(8, state_at(8), {})
    assert opened.wait() is True  # the count starts again
    broken = True
    opened.save(10, state_at(10), {})
    opened.save(12, state_at(12), {})
    with refused("2 saves", "step 10", error=CheckpointError):
        opened.save(14, state_at(14), {})
    assert opened.choose() == 8


def small_file_system(path: Path, options: str):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command here, so no small file system to fill")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


@pytest.mark.parametrize(
    "rejected_before_writing", [True, False], ids=["before_writing", "while_writing"]
)
def test_a_full_disk_damages_no_older_checkpoint(tmp_path, monkeypatch, rejected_before_writing):
    disk = tmp_path / "disk"
    small_file_system(disk, "size=8m")
    try:
        if not rejected_before_writing:
            usage = shutil.disk_usage(disk)._replace(free=1 << 40)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        lines = []
        opened = Checkpointer(disk / "checkpoints", CheckpointConfig(), log=lines.append)
        opened.save(2, state_at(2, size=1 << 19), {}, force=True)
        assert opened.wait() is True
        opened.save(4, state_at(4, size=1 << 19), {}, force=True)
        assert opened.wait() is False, lines
        assert any(line.startswith("SAVE FAILED at step 4") for line in lines)
        assert opened.verify(2) == ""
        assert opened.directory.entries() == [".lock", "2"]
        opened.save(6, state_at(6), {}, force=True)  # a smaller one fits
        assert opened.wait() is True and opened.verify(6) == ""
        opened.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_run_on_a_read_only_directory_is_refused(tmp_path):
    disk = tmp_path / "disk"
    small_file_system(disk, "ro")
    try:
        with refused(disk, os.strerror(errno.EROFS), "--run-dir"):
            Checkpointer(disk, CheckpointConfig())
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


HOLDER = """
import sys, time
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.runtime.storage import locate
DirectoryLock(locate(sys.argv[1]), print).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_on_the_same_directory_is_refused(tmp_path):
    first = Checkpointer(tmp_path, CheckpointConfig())
    with refused(tmp_path, f"process {os.getpid()} on {socket.gethostname()}", "--run-dir"):
        Checkpointer(tmp_path, CheckpointConfig())
    first.close()
    Checkpointer(tmp_path, CheckpointConfig()).close()


def test_a_lock_is_refused_while_its_process_lives_and_taken_over_after_a_kill(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with refused(tmp_path, f"process {holder.pid} on {socket.gethostname()}", "--run-dir"):
        Checkpointer(tmp_path, CheckpointConfig())
    holder.kill()
    holder.wait()
    lines = []
    Checkpointer(tmp_path, CheckpointConfig(), log=lines.append).close()
    assert missing(lines[0], "took over", f"process {holder.pid}") == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_lock_holder_on_another_host_is_watched_for_heartbeats(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.2)
    record = {"pid": 1, "host": "elsewhere", "boot": "another", "state": "held", "beat": 0}
    file = tmp_path / lock.FILE_NAME
    file.write_text(json.dumps(record))
    if not alive:
        lines = []
        Checkpointer(tmp_path, CheckpointConfig(), log=lines.append).close()
        assert missing(lines[0], "heartbeat", "process 1 on elsewhere") == []
        assert missing(lines[1], "took over", "process 1 on elsewhere") == []
        return
    beats = iter(range(1, 1000))
    monkeypatch.setattr(
        lock.time, "sleep", lambda _: file.write_text(json.dumps({**record, "beat": next(beats)}))
    )
    with refused(tmp_path, "process 1 on elsewhere", "--run-dir"):
        Checkpointer(tmp_path, CheckpointConfig())


@pytest.mark.parametrize("beats", [0, 1])
def test_the_lock_of_a_lost_host_is_awaited(tmp_path, monkeypatch, beats):
    """A file server (NFS) keeps it for a while. The lock file of a live host changes."""
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.1)
    open_file, answers = Location.lock, iter(range(2))

    def locked(path):
        if (number := next(answers, None)) is None:
            return open_file(path)
        raise Locked(json.dumps({"boot": "another", "beat": beats * number}).encode())

    monkeypatch.setattr(Location, "lock", locked)
    with refused(tmp_path, "--run-dir") if beats else contextlib.nullcontext():
        Checkpointer(tmp_path, CheckpointConfig()).close()


def test_the_lock_holder_writes_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    held = lock.DirectoryLock(locate(tmp_path), print)
    held.acquire()
    seen = set()
    while len(seen) < 3:
        text = (tmp_path / lock.FILE_NAME).read_text()
        if text.endswith("}"):
            seen.add(json.loads(text)["beat"])
    held.release()
    assert json.loads((tmp_path / lock.FILE_NAME).read_text())["state"] == "released"


def test_a_lock_is_released_only_after_a_pending_heartbeat_is_written(tmp_path, monkeypatch):
    """A later write would go to whichever file has reused the closed descriptor."""
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    beating, done, order = threading.Event(), threading.Event(), []
    held = lock.DirectoryLock(locate(tmp_path), print)
    write = lock.LockFile.write

    def slow_write(file, data):
        if threading.current_thread() is held._beating:  # locks of other tests may beat too
            beating.set()
            done.wait(10)
            order.append("beat")
        write(file, data)

    monkeypatch.setattr(lock.LockFile, "write", slow_write)
    close = lock.LockFile.close
    closed = lambda file: (order.append("close") if file is held._file else None, close(file))
    monkeypatch.setattr(lock.LockFile, "close", closed)
    held.acquire()
    assert beating.wait(10)
    threading.Timer(0.1, done.set).start()
    held.release()
    assert order == ["beat", "close"]
    assert json.loads((tmp_path / lock.FILE_NAME).read_text())["state"] == "released"


def test_a_directory_that_cannot_be_created_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file" / "checkpoints", "--run-dir"):
        Checkpointer(tmp_path / "file" / "checkpoints", CheckpointConfig())
