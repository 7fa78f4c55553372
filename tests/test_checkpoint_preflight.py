"""Test the save path before training: its checks, their order, and concurrent work."""

import shutil
import threading
from types import SimpleNamespace

import pytest
from commands import records, run_here, tiny
from refusals import refused
from test_checkpoint import checkpointer, small_state

from jaxdist.checkpoint import CheckpointError, orbax_io
from jaxdist.checkpoint.checkpointer import try_save_path
from jaxdist.runtime.storage import locate

pytestmark = pytest.mark.smoke


def test_preflight_leaves_no_file_and_checks_free_space(tmp_path, monkeypatch):
    writer = checkpointer(tmp_path)
    writer.preflight(small_state())
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    assert [e["event"] for e in writer.pop_events()] == ["preflight"]
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with refused(tmp_path, "no space", "20 B", "10 B free", error=CheckpointError):
        writer.preflight(small_state())
    writer.close()


def test_preflight_reads_after_all_processes_have_written(tmp_path, monkeypatch):
    done = []
    group = SimpleNamespace(
        is_leader=True, decide=lambda action: action(), synchronize=lambda: done.append("meet")
    )
    read, write = orbax_io.read, orbax_io.OrbaxWriter.wait
    monkeypatch.setattr(orbax_io, "read", lambda *a: (done.append("read"), read(*a))[1])
    monkeypatch.setattr(
        orbax_io.OrbaxWriter, "wait", lambda self: (write(self), done.append("written"))[0]
    )
    try_save_path(locate(tmp_path), group)
    assert done == ["written", "meet", "read", "meet"]


def test_preflight_reports_failures(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(orbax_io, "read", broken)
    writer = checkpointer(tmp_path)
    with refused("before training", "OSError: [Errno 5]", error=CheckpointError):
        writer.preflight()
    writer.close()


def test_preflight_runs_concurrently_with_other_work(tmp_path, monkeypatch):
    begun, may_fail = threading.Event(), threading.Event()

    def failing(*_):
        begun.set()
        assert may_fail.wait(60)
        raise CheckpointError("no place")

    monkeypatch.setattr("jaxdist.checkpoint.checkpointer.try_save_path", failing)
    writer = checkpointer(tmp_path)
    writer.start_preflight()
    assert begun.wait(60)
    may_fail.set()
    with refused("no place", error=CheckpointError):
        writer.finish_preflight()
    writer.finish_preflight()  # reported once
    monkeypatch.setattr(writer, "_group", SimpleNamespace(num_processes=2))
    threads = []
    monkeypatch.setattr(writer, "preflight", lambda _: threads.append(threading.get_ident()))
    writer.start_preflight()
    assert threads == [threading.get_ident()]
    writer.close()


def test_a_failed_preflight_ends_the_start_before_the_first_step(tmp_path, monkeypatch):
    def failing(*_):
        raise CheckpointError("no place")

    monkeypatch.setattr("jaxdist.checkpoint.checkpointer.try_save_path", failing)
    with refused("no place", error=CheckpointError):
        run_here("train", *tiny("--steps=2"), f"--run-dir={tmp_path}")
    assert records(tmp_path, "train") == []
