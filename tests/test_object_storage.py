"""Runs on object storage: a real S3 server over HTTP, and the same answers as a local directory."""

import errno
import logging
import os
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import object_servers
import pytest
from commands import ROOT, TINY, environment
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


def history(folder) -> list:
    """What a sequence of operations answers."""
    said = [folder.entries(), folder.files(), folder.exists(), (folder / "a").version()]
    (folder / "b" / "c").make_directory()
    for name in ("b/c/2", "b/1", "a", "ab"):
        (folder / name).write(name * 3)
    (folder / "a").write(b"new")
    said += [folder.entries(), folder.files(), (folder / "b").entries(), folder.sizes()]
    said += [(folder / name).exists() for name in ("a", "b", "b/c", "c", "b/c/2/x")]
    said += [(folder / name).is_directory() for name in ("a", "b", "c")]
    said += [(folder / "ab").size(), (folder / "ab").read(), (folder / "b" / "1").part(1, 4)]
    said += [b"".join((folder / "ab").stream()), (folder / "a").text(), (folder / "a").name]
    said += [(folder / "new").create(), (folder / "new").create(), (folder / "new").read()]
    for name in ("lines", "lines"):  # a start, and one that goes on
        appender = (folder / name).appender()
        said.append(appender.cut_torn_tail())
        appender.append(b"one\n")
        appender.append(b"two\n")
        appender.close()
        appender.close()
    said += [(folder / "lines").read(), (folder / "lines").size(), (folder / "lines").exists()]
    said += [folder.entries(), folder.files(), folder.sizes()["lines"]]
    (folder / "a").delete()
    (folder / "a").delete()
    (folder / "b").delete_tree()
    (folder / "b").delete_tree()
    said.append(folder.files())
    (folder / "lines").delete_tree()
    with pytest.raises(FileNotFoundError):
        (folder / "lines").read()
    with pytest.raises(FileNotFoundError):
        (folder / "lines").size()
    return [*said, folder.files()]


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
    one, two = (folder / ".lock").lock(), (folder / ".lock").lock()
    assert not one.is_exclusive and one.read() == two.read() == b""
    one.write(b"one")
    with pytest.raises(Locked) as taken:
        two.write(b"two")
    assert taken.value.holder == b"one" and (folder / ".lock").read() == b"one"
    one.write(b"still one")  # its next heartbeat
    assert two.read() == b"still one"
    two.write(b"two")  # took over what it has seen
    with pytest.raises(Locked):
        one.write(b"back again")


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

RUN = """
import os, sys
import jaxdist
from jaxdist.runtime import simulate

def crash(record):
    if record["kind"] == "train" and record["step"] == 3:
        os.environ["JAXDIST_CRASH_POINT"] = "during_upload"

SETTINGS = {
    "model": {"d_model": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 64},
    "train": {"seq_len": 32, "global_batch_size": 8},
    "mesh": "dp=4,fsdp=2",
    "eval": {"interval_steps": 0, "final_max_batches": 2},
    "optim.warmup_steps": 2,
    "checkpoint": {"save_interval_steps": 2, "max_to_keep": 1},
}

def train(path, **settings):
    return jaxdist.train({**SETTINGS, **settings}, steps=4, run_dir=path, progress=False)

if __name__ == "__main__":
    jaxdist.train({**SETTINGS, "simulate": 8}, steps=4, run_dir=sys.argv[1], progress=False,
                  callbacks=crash)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_uploads_goes_on_with_the_same_bits(server, tmp_path):
    url, program = "s3://bucket/runs/killed", {"__name__": "in this process"}
    exec(RUN, program)
    killed = subprocess.run(
        [sys.executable, "-c", RUN, url],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    checkpoints = locate(url) / "checkpoints"
    whole = manifest.steps_in(checkpoints)
    there = {name for name in checkpoints.entries() if name.isdecimal()}
    assert whole and {str(step) for step in whole} < there, "no upload was cut short"
    assert all(manifest.damage(checkpoints / step) == "" for step in whole)

    resumed, local = program["train"](url), program["train"](tmp_path / "local")
    assert resumed.exit_reason == local.exit_reason == "finished"
    bits = [[float(loss).hex() for loss in run.losses] for run in (resumed, local)]
    assert bits[0] == bits[1] and len(bits[0]) == 4
    assert '"event": "restore"' in (locate(url) / "metrics.jsonl").text()
    assert manifest.steps_in(checkpoints) == [4]

    stored, written = checkpoints / 4, locate(tmp_path / "local" / "checkpoints" / "4")
    told = [(place / "meta" / "metadata").json()["arrays"] for place in (stored, written)]
    assert told[0] == told[1]  # a checksum for each array
    (chunk,) = [name for name in stored.files() if name.endswith("params/embed.table/0.0")]
    data = bytearray((stored / chunk).read())
    data[7] ^= 1
    (stored / chunk).write(data)
    assert missing(manifest.damage(stored), chunk) == []
    for name in locate(url).files():
        assert SECRET.encode() not in (locate(url) / name).read(), name
    assert [n for n in locate(url).files() if n.startswith("tensorboard/")]
    assert (locate(url) / "logs" / "process-0.log").size() > 0


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
