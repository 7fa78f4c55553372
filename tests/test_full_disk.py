"""Files of a run next to its checkpoints, on a full or unavailable disk: the run never ends."""

import errno
import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap

import pytest
from commands import environment
from refusals import missing

from jaxdist.run import metrics_log
from jaxdist.run.metrics_log import RecordWriter, read_records
from jaxdist.run.monitoring.trackers import TensorBoard
from jaxdist.run.run_directory import RunDirectory
from jaxdist.runtime import storage


@pytest.fixture(autouse=True)
def propagating(monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxdist"), "propagate", True)


def train_record(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 1 / step}


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")

    def free():
        path.unlink()
        path.touch()

    return path, free


def test_records_are_buffered_while_the_disk_is_full_and_none_is_lost(full, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    path, free = full
    writer = RecordWriter(path)
    for step in range(1, 6):
        writer.write(train_record(step))
    free()
    for step in range(6, 9):
        writer.write(train_record(step))
    writer.close()
    assert read_records(path) == [train_record(step) for step in range(1, 9)]
    stopped, resumed = caplog.messages
    assert missing(stopped, path, os.strerror(errno.ENOSPC)) == []
    assert missing(resumed, path, "writable again") == []


def test_partial_line_is_completed_and_not_repeated(tmp_path, monkeypatch):
    path, real, calls = tmp_path / "metrics.jsonl", os.write, []

    def short(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, data[:7])
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    writer = RecordWriter(path)
    monkeypatch.setattr(storage.os, "write", short)
    writer.write(train_record(1))
    assert path.read_bytes() == b'{"kind"'
    writer.write(train_record(2))
    writer.close()
    assert read_records(path) == [train_record(1), train_record(2)]


def test_missing_file_is_not_recreated(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer = RecordWriter(path)
    real = os.write
    monkeypatch.setattr(
        storage.os, "write", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale"))
    )
    writer.write(train_record(1))
    monkeypatch.setattr(storage.os, "write", real)
    path.rename(tmp_path / "away")
    writer.write(train_record(2))
    assert not path.exists()
    (tmp_path / "away").rename(path)
    writer.write(train_record(3))
    writer.close()
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]


def test_buffer_is_bounded_and_lost_records_are_counted(full, monkeypatch, caplog):
    path, _ = full
    monkeypatch.setattr(metrics_log, "_MAX_PENDING_BYTES", 200)
    writer = RecordWriter(path)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        for step in range(1, 20):
            writer.write(train_record(step))
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    writer.close()
    assert missing(caplog.messages[-1], "are lost", os.strerror(errno.ENOENT)) == []


def test_remaining_records_are_saved_elsewhere_at_the_end(tmp_path, full, monkeypatch, caplog):
    path, _ = full
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = RecordWriter(path)
    for step in (1, 2):
        writer.write(train_record(step))
    writer.close()
    (kept,) = tmp_path.glob("jaxdist-metrics-*.jsonl")
    assert str(kept) in caplog.messages[-1]
    assert read_records(kept) == [train_record(1), train_record(2)]


def test_tensorboard_reports_missing_points_once(tmp_path, monkeypatch, caplog):
    board = TensorBoard(tmp_path / "tensorboard")

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(board._writer, "flush", fail)
    for step in range(3):
        board.scalars(step, {"loss": 1.0})
    monkeypatch.undo()
    board.close()
    (line,) = [message for message in caplog.messages if "tensorboard" in message]
    assert missing(line, tmp_path, os.strerror(errno.ENOSPC), "metrics.jsonl") == []


def test_unwritable_log_is_reported_once_and_keeps_the_exit_code():
    code = """
    from jaxdist import runtime
    def main():
        log = runtime.setup_logging(0, "/dev/full")
        for i in range(50):
            log.info("line %d", i)
        return 75
    runtime.run_command(main)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 75
    assert done.stdout.splitlines() == [f"line {i}" for i in range(50)]
    assert done.stderr.count("/dev/full") == done.stderr.count(os.strerror(errno.ENOSPC)) == 1
    assert "Logging error" not in done.stderr and "Traceback" not in done.stderr


def test_training_does_not_fail_if_its_console_is_full():
    code = """
    from jaxdist import runtime
    def main():
        log = runtime.setup_logging()
        for i in range(50):
            log.info("line %d", i)
    runtime.run_command(main, resumes=True)
    """
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"PYTHONUNBUFFERED": ""},
            timeout=120,
        )
    assert done.returncode == 0
    first, last = done.stderr.splitlines()
    for line in (first, last):
        assert missing(line, "warning", "standard output", os.strerror(errno.ENOSPC)) == []


def test_launched_process_does_not_recreate_its_run_directory(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setenv("JAXDIST_LOG_DIR", str(path / "logs"))
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        RunDirectory.open(path)
    assert not path.exists()
    RunDirectory.open(tmp_path / "another")  # not the launcher's: created as usual
    (path / "logs").mkdir(parents=True)
    assert RunDirectory.open(path).checkpoints.is_directory()
