"""Runs on object storage: a real S3 server over HTTP, and the same answers as a local directory."""

import errno
import logging
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import object_servers
import pytest
from commands import ROOT, TINY, environment
from object_runs import history, kill_and_resume, take_a_lock_twice
from object_servers import SECRET
from refusals import missing, refused

from jaxdist.checkpoint import lock as lock_room
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.checkpoint.object_io import zarr_metadata
from jaxdist.run.metrics_log import RecordWriter, read_records
from jaxdist.runtime import entry_point
from jaxdist.runtime.storage import Locked, flush_appended, locate, objects, parts


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, object_servers.s3(patch) as address:
        yield address


@pytest.fixture
def folder(server, request):
    return locate(f"s3://bucket/{re.sub('[^a-z0-9]+', '-', request.node.name)}")


def test_an_object_store_answers_as_a_local_directory_does(folder, tmp_path):
    assert history(folder) == history(locate(tmp_path / "run"))


def test_throttling_and_cut_connections_change_no_answer(server, monkeypatch, tmp_path):
    with object_servers.troubled(server, every=3) as (address, done):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = objects._make_store("s3", "bucket", max_retries=5)
        monkeypatch.setattr(objects, "_store", lambda *place: store)
        assert history(locate("s3://bucket/troubled")) == history(locate(tmp_path / "run"))
    assert {*done} == {"503", "cut"} and len(done) > 10


def test_an_array_on_a_store_says_its_own_chunks():
    """A dim of one keeps its chunk of one; zarr knows no chunk of zero."""
    said = zarr_metadata((6, 1, 0), (3, 1, 0), np.dtype("float32"))
    assert (said["shape"], said["chunks"], said["dtype"]) == ([6, 1, 0], [3, 1, 1], "<f4")


def test_a_location_is_a_url_whatever_path_made_of_it(folder):
    assert locate("s3:/bucket/a/") == locate("s3://bucket/a") == folder.parent / "a"
    assert os.fspath(folder / 7) == f"{folder}/7" and (folder / 7).parent == folder
    assert locate("s3://bucket").parent == locate("s3://bucket")
    assert not folder.is_local and folder.absolute() is folder


def test_an_object_is_created_once(folder):
    # One after the other: the server looks and writes in two steps.
    assert [(folder / "a").create() for _ in range(3)] == [True, False, False]


def test_what_the_store_refuses_is_kept_and_written_once(folder, monkeypatch):
    file = folder / "a.jsonl"
    monkeypatch.setattr(parts, "PART_BYTES", 8)
    appender = file.appender()
    appender.append(b"one\n")
    flush_appended()
    assert file.read() == b"one\n"
    with monkeypatch.context() as away:
        away.setattr(
            objects, "_store", lambda *place: objects._make_store("s3", "none", max_retries=0)
        )
        appender.append(b"two\n")
        flush_appended()
        with pytest.raises(OSError) as refusal:
            appender.append(b"three\n")
        assert refusal.value.errno == errno.ENXIO
        assert appender.pending == b"two\nthree\n"
    flush_appended()
    appender.append(b"four\n")
    appender.close()
    assert file.read() == b"one\ntwo\nthree\nfour\n" and appender.pending == b""
    assert len(file.entries()) == 2 and file.parent.files() == ["a.jsonl"]


def test_records_that_the_store_refuses_are_told_once_and_none_is_missing(
    folder, monkeypatch, propagating, caplog
):
    caplog.set_level(logging.INFO, logger="jaxdist")
    writer = RecordWriter(folder / "metrics.jsonl")
    with monkeypatch.context() as away:
        away.setattr(
            objects, "_store", lambda *place: objects._make_store("s3", "none", max_retries=0)
        )
        for step in (1, 2, 3):
            writer.write({"kind": "train", "step": step})
            flush_appended()
    flush_appended()
    writer.write({"kind": "train", "step": 4})
    writer.close()
    stopped, resumed = caplog.messages
    assert missing(stopped, folder, "bucket") == []
    assert missing(resumed, folder, "written again") == []
    assert [record["step"] for record in read_records(folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_an_upload_that_raises_ends_no_other(folder, monkeypatch, propagating, caplog):
    monkeypatch.setattr(parts, "_failed", [])

    class Broken(parts._Uploaded):
        def upload(self):
            raise ValueError("broken")

    broken = Broken()
    broken._begin()
    appender = (folder / "a").appender()
    try:
        for line in (b"one\n", b"two\n"):
            appender.append(line)
            flush_appended()
        assert (folder / "a").read() == b"one\ntwo\n"
    finally:
        parts._growing.discard(broken)
    assert len(parts._failed) > 1 and len(caplog.messages) == 1


def test_a_descriptor_appends_for_programs_that_know_nothing_of_it(folder):
    file = folder / "process.log"
    for line in ("one", "two"):
        descriptor = file.append_descriptor()
        subprocess.run(["echo", line], stdout=descriptor, check=True)
        os.close(descriptor)
    flush_appended()
    assert file.read() == b"one\ntwo\n"


# -- two runs ----------------------------------------------------------------------------------


def test_of_two_that_take_a_lock_at_once_one_is_refused(folder):
    take_a_lock_twice(folder)


def test_a_beat_whose_answer_was_lost_loses_no_lock(folder, monkeypatch):
    file = (folder / ".lock").lock()
    file.write(b"1")
    put = objects.ObjectLocation._put_if

    def put_unanswered(*given):
        put(*given)
        raise OSError("no answer")

    with monkeypatch.context() as away:
        away.setattr(objects.ObjectLocation, "_put_if", put_unanswered)
        with pytest.raises(OSError, match="no answer"):
            file.write(b"2")
    file.write(b"3")
    assert (folder / ".lock").read() == b"3"
    other = (folder / ".lock").lock()
    assert other.read() == b"3"
    other.write(b"2")  # what was once unanswered is not any more
    with pytest.raises(Locked):
        file.write(b"4")


@pytest.mark.parametrize("of_first", ["another machine", "this machine"])
def test_a_second_run_waits_for_heartbeats_and_the_first_learns_that_it_lost(
    folder, monkeypatch, of_first
):
    """A container that was started again has the host, boot and process id of the one before."""
    monkeypatch.setattr(lock_room, "HEARTBEAT_S", 1.0)
    monkeypatch.setattr(lock_room, "_held", set())
    monkeypatch.setattr(lock_room, "_boot_id", lambda: of_first)
    first = DirectoryLock(folder, lambda line: None)
    first.acquire()
    lock_room._held.clear()
    monkeypatch.setattr(lock_room, "_boot_id", lambda: "this machine")
    second = DirectoryLock(folder, lambda line: None)
    with refused(folder, f"process {os.getpid()}"):
        second.acquire()
    assert first.lost() == ""
    first._stop.set()  # stopped, as by SIGSTOP; it may go on later
    first._writing.acquire()
    second.acquire()
    first._writing.release()
    assert missing(first.lost(), folder) == [] and second.lost() == ""
    second.release()
    third = DirectoryLock(folder, lambda line: pytest.fail(line))  # a released one is free at once
    third.acquire()
    third.release()


# -- what cannot be used -----------------------------------------------------------------------


def test_what_is_wrong_is_said_once_and_without_secrets(server, monkeypatch):
    with refused("s3://absent-bucket/run", "no such bucket"):
        locate("s3://absent-bucket/run")
    with refused("az://bucket", "s3://BUCKET/PATH"):
        locate("az://bucket/run")
    with refused("s3://BUCKET/PATH"):
        locate("s3://")
    objects._reach.cache_clear()
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
        with refused("s3://bucket/run", "AWS_ACCESS_KEY_ID"):
            locate("s3://bucket/run")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError) as away:  # another time it may
        locate("s3://bucket/run")
    assert away.value.errno == errno.EHOSTUNREACH
    assert SECRET not in str(away.value) and away.value.__cause__ is None


def test_a_store_that_is_away_ends_a_command_with_one_line(capsys, tmp_path, monkeypatch):
    away = objects._as_os_error(RuntimeError("connection refused"), "s3://bucket/run")
    log = logging.FileHandler(tmp_path / "log")
    monkeypatch.setattr(logging.getLogger("jaxdist"), "handlers", [log])
    assert away.errno == errno.EHOSTUNREACH
    assert entry_point._report(away, "try again") == 1
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert (tmp_path / "log").read_text() == f"{line}\n"
    assert missing(line, "s3://bucket/run", "try again") == []


def test_a_servers_words_do_not_reach_a_message():
    answer = (
        "Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch"
        f"</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"
    )
    error = objects._as_os_error(RuntimeError(answer), "s3://bucket/a")
    assert isinstance(error, PermissionError) and SECRET not in str(error)
    assert missing(str(error), "403", "SignatureDoesNotMatch", "s3://bucket/a") == []


# -- a run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_uploads_goes_on_with_the_same_bits(server, tmp_path):
    kill_and_resume("s3://bucket/runs/killed", tmp_path)


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_printed(server):
    page = (ROOT / "docs/storage.md").read_text()
    lines = re.findall(r"^python .*s3://BUCKET.*$", page, flags=re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.replace("BUCKET", "bucket"))
        smaller = ["--steps=2", *TINY] if "jaxdist.train" in words else []
        done = subprocess.run(
            [sys.executable, *words[1:], *smaller],
            env=environment(),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert manifest.steps_in(locate("s3://bucket/runs/NAME") / "checkpoints") == [2]
