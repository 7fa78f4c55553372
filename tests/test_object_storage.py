"""Runs on object storage: an S3 server over HTTP gives the same results as a local directory."""

import dataclasses
import errno
import json
import logging
import os
import pickle
import re
import shlex
import subprocess
import tomllib

import jax.numpy as jnp
import numpy as np
import object_servers
import pytest
from commands import ROOT, TINY, run, run_here
from data_cases import cache, write_source  # noqa: F401
from decoders import FAMILIES
from hf_models import write_model, write_tokenizer
from object_runs import history, kill_and_resume, take_a_lock_twice, upload
from object_servers import SECRET
from refusals import missing, refused

from jaxdist.checkpoint import lock as lock_room
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.checkpoint.object_io import ObjectWriter, open_array, zarr_metadata
from jaxdist.data import DataConfig, load_tokenizer, open_datasets
from jaxdist.data.config import settings_of_tokens
from jaxdist.data.corpus import write_corpus
from jaxdist.data.encoding import make_encoder
from jaxdist.data.tokenizer import ByteTokenizer
from jaxdist.models.huggingface.directory import is_model, open_weights
from jaxdist.run.metrics_log import RecordWriter, read_records
from jaxdist.runtime import entry_point
from jaxdist.runtime.storage import Locked, flush_appended, locate, objects, parts
from jaxdist.tools.sweep.__main__ import read_sweep


@pytest.fixture
def folder(server, request):
    return locate(f"s3://bucket/{re.sub('[^a-z0-9]+', '-', request.node.name)}")


def test_object_store_matches_a_local_directory(folder, tmp_path):
    assert history(folder) == history(locate(tmp_path / "run"))


def test_throttling_and_cut_connections_change_no_result(server, monkeypatch, tmp_path):
    with object_servers.troubled(server, every=3) as (address, done):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = objects._make_store("s3", "bucket", max_retries=5)
        monkeypatch.setattr(objects, "_store", lambda *location: store)
        assert history(locate("s3://bucket/troubled")) == history(locate(tmp_path / "run"))
    assert {*done} == {"503", "cut"} and len(done) > 10


def test_arrays_are_read_from_a_store_as_they_were_written(folder):
    writer, array = ObjectWriter(), jnp.arange(6.0).reshape(2, 3)
    writer.start(folder, {"state": {"w": array}})
    writer.wait()
    writer.close()
    np.testing.assert_array_equal(open_array(folder, "state", ["w"]).read(), array)


def test_array_metadata_has_valid_chunks():
    """A dim of one keeps its chunk of one; zarr does not allow a chunk of zero."""
    metadata = zarr_metadata((6, 1, 0), (3, 1, 0), np.dtype("float32"))
    assert (metadata["shape"], metadata["chunks"], metadata["dtype"]) == (
        [6, 1, 0],
        [3, 1, 1],
        "<f4",
    )


def test_location_of_a_collapsed_url_is_the_url(folder):
    assert locate("s3:/bucket/a/") == locate("s3://bucket/a") == folder.parent / "a"
    assert os.fspath(folder / 7) == f"{folder}/7" and (folder / 7).parent == folder
    assert locate("s3://bucket").parent == locate("s3://bucket")
    assert not folder.is_local and folder.absolute() is folder


def test_an_object_is_created_once(folder):
    # One after another: the server checks and writes in two steps.
    assert [(folder / "a").create() for _ in range(3)] == [True, False, False]


def test_refused_data_is_kept_and_written_once(folder, monkeypatch):
    file = folder / "a.jsonl"
    monkeypatch.setattr(parts, "PART_BYTES", 8)
    appender = file.appender()
    appender.append(b"one\n")
    flush_appended()
    assert file.read() == b"one\n"
    with monkeypatch.context() as away:
        away.setattr(
            objects, "_store", lambda *location: objects._make_store("s3", "none", max_retries=0)
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


def test_refused_records_are_reported_once_and_none_is_lost(
    folder, monkeypatch, propagating, caplog
):
    caplog.set_level(logging.INFO, logger="jaxdist")
    writer = RecordWriter(folder / "metrics.jsonl")
    with monkeypatch.context() as away:
        away.setattr(
            objects, "_store", lambda *location: objects._make_store("s3", "none", max_retries=0)
        )
        for step in (1, 2, 3):
            writer.write({"kind": "train", "step": step})
            flush_appended()
    flush_appended()
    writer.write({"kind": "train", "step": 4})
    writer.close()
    stopped, resumed = caplog.messages
    assert missing(stopped, folder, "bucket") == []
    assert missing(resumed, folder, "writable again") == []
    assert [record["step"] for record in read_records(folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_failing_upload_does_not_stop_others(folder, monkeypatch, propagating, caplog):
    monkeypatch.setattr(parts, "_failed", [])

    class Broken(parts._Uploaded):
        _location = folder / "broken"

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


def test_append_descriptor_works_for_subprocesses(folder):
    file = folder / "process.log"
    for line in ("one", "two"):
        descriptor = file.append_descriptor()
        subprocess.run(["echo", line], stdout=descriptor, check=True)
        os.close(descriptor)
    flush_appended()
    assert file.read() == b"one\ntwo\n"


def test_second_of_two_concurrent_locks_is_refused(folder):
    take_a_lock_twice(folder)


def test_heartbeat_with_a_lost_response_keeps_the_lock(folder, monkeypatch):
    file = (folder / ".lock").lock()
    file.write(b"1")
    put = objects.ObjectLocation._put_if

    def put_unanswered(*args):
        put(*args)
        raise OSError("no answer")

    with monkeypatch.context() as away:
        away.setattr(objects.ObjectLocation, "_put_if", put_unanswered)
        with pytest.raises(OSError, match="no answer"):
            file.write(b"2")
    file.write(b"3")
    assert (folder / ".lock").read() == b"3"
    other = (folder / ".lock").lock()
    assert other.read() == b"3"
    other.write(b"2")  # a write without a response is no longer accepted
    with pytest.raises(Locked):
        file.write(b"4")


@pytest.mark.parametrize("of_first", ["another machine", "this machine"])
def test_second_run_waits_for_heartbeats_and_the_first_detects_the_loss(
    folder, monkeypatch, of_first
):
    """A restarted container has the host, boot id and process id of the one before."""
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
    first._stop.set()  # stopped, as by SIGSTOP; it may continue later
    first._writing.acquire()
    second.acquire()
    first._writing.release()
    assert missing(first.lost(), folder) == [] and second.lost() == ""
    second.release()
    third = DirectoryLock(folder, lambda line: pytest.fail(line))  # a released lock is free at once
    third.acquire()
    third.release()


@pytest.fixture
def read_ranges(monkeypatch):
    ranges, part = [], objects.ObjectLocation.part

    def record_range(location, start, length):
        ranges.append((location.name, length))
        return part(location, start, length)

    monkeypatch.setattr(objects.ObjectLocation, "part", record_range)
    return ranges


@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_rows_of_a_token_folder_are_read_by_ranges(folder, tmp_path, read_ranges, packing):
    encoder = make_encoder(load_tokenizer("bytes"))
    texts = write_source(tmp_path, "jsonl", [f"text {i} " * (i % 7 + 1) for i in range(300)])
    write_corpus([texts], tmp_path / "tokens", encoder, shard_tokens=3000)
    upload(tmp_path / "tokens", str(folder))
    (stored, _), (local, _) = (
        open_datasets(DataConfig(sources=[str(source)], packing=packing), seq_len=16)
        for source in (folder, tmp_path / "tokens")
    )
    assert stored.fingerprint == local.fingerprint
    assert not [name for name, _ in read_ranges if name.startswith("tokens-")]
    some = np.array([0, 5, 187, 190, local.num_rows - 1])  # of windows; 187 is in two shards
    for name, values in local.rows(some).items():
        np.testing.assert_array_equal(stored.rows(some)[name], values)
    tokens = sum(length for name, length in read_ranges if name.startswith("tokens-"))
    fields = len(local.fields)
    assert 0 < tokens <= 2 * 17 * len(some) * fields
    ends = [length for name, length in read_ranges if name == "documents.bin"]
    assert ends == ([] if packing == "stream" else [8 * 300])
    again = pickle.loads(pickle.dumps(stored.parts[0].corpus))  # for worker processes
    np.testing.assert_array_equal(
        again.tokens(2990, 3010), local.parts[0].corpus.tokens(2990, 3010)
    )


def test_records_on_an_object_store_equal_those_on_disk(folder, tmp_path):
    pairs = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(50)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    encoder = make_encoder(load_tokenizer("bytes"), records="completion")
    write_corpus([path], tmp_path / "tokens", encoder)
    upload(tmp_path / "tokens", str(folder))
    assert settings_of_tokens(str(folder))[0]["records"] == "completion"
    assert DataConfig(sources=[str(folder)]).packs_documents
    (stored, _), (local, _) = (
        open_datasets(DataConfig(sources=[str(source)], eval_fraction=0.0), seq_len=16)
        for source in (folder, tmp_path / "tokens")
    )
    every = np.arange(local.num_rows)
    for name, values in local.rows(every).items():
        np.testing.assert_array_equal(stored.rows(every)[name], values)


def test_too_little_text_and_a_truncated_token_folder_are_refused(folder, tmp_path):
    (folder / "text.txt").write("text")
    with refused(folder, "data.sources", "seq_len=16"):
        open_datasets(DataConfig(sources=[str(folder)]), seq_len=16)
    with refused(folder, "data.tokenizer"):
        open_datasets(DataConfig(tokenizer=f"{folder}/tokenizer.json"), seq_len=16)
    write_corpus([write_source(tmp_path, "txt")], tmp_path / "t", make_encoder(ByteTokenizer()))
    os.truncate(tmp_path / "t" / "tokens-00000.bin", 3)
    upload(tmp_path / "t", f"{folder}/cut")
    with refused("tokens-00000.bin", "3 bytes"):
        open_datasets(DataConfig(sources=[f"{folder}/cut"]), seq_len=16)


def test_weights_are_read_by_ranges(folder, tmp_path, read_ranges):
    write_model(tmp_path, FAMILIES["llama2"])
    size = (tmp_path / "model.safetensors").stat().st_size
    upload(tmp_path, str(folder))
    stored, local = open_weights(folder), open_weights(tmp_path)
    headers = sum(length for _, length in read_ranges)
    assert is_model(str(folder)) and stored.model == local.model and headers < size / 4
    for name, tensor in local.tensors.items():
        assert stored.tensors[name].read().tobytes() == tensor.read().tobytes(), name
    read_ranges.clear()
    table = "model.embed_tokens.weight"
    block = (slice(3, 7), slice(1, 4))
    np.testing.assert_array_equal(
        stored.tensors[table].read(block), local.tensors[table].read(block)
    )
    row = local.tensors[table].shape[1] * 4
    assert read_ranges == [("model.safetensors", 4 * row)]
    for length in (4, 100, size - 1):
        (folder / "model.safetensors").write((tmp_path / "model.safetensors").read_bytes()[:length])
        with refused(folder, "model.safetensors"):
            open_weights(folder)


def test_errors_name_the_url_and_contain_no_secrets(server, monkeypatch):
    with refused("s3://absent-bucket/run", "no such bucket"):
        locate("s3://absent-bucket/run")
    with refused("az://bucket", "s3://BUCKET/PATH"):
        locate("az://bucket/run")
    for nameless in ("s3://", "s3:/"):  # Path turns the first into the second
        with refused("no bucket", "s3://BUCKET/PATH"):
            locate(nameless)
    objects._reach.cache_clear()
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
        with refused("s3://bucket/run", "AWS_ACCESS_KEY_ID"):
            locate("s3://bucket/run")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError) as away:  # a later attempt may succeed
        locate("s3://bucket/run")
    assert away.value.errno == errno.EHOSTUNREACH
    assert SECRET not in str(away.value) and away.value.__cause__ is None


@pytest.mark.parametrize(
    ("status", "code", "facts"),
    [
        (400, "ExpiredToken", ["expired", "AWS_SESSION_TOKEN"]),
        (403, "AccessDenied", ["denied", "403 AccessDenied", "AWS_ACCESS_KEY_ID"]),
    ],
)
def test_expired_credentials_are_reported_at_startup_and_in_a_run(
    folder, monkeypatch, status, code, facts
):
    appender = (folder / "a.jsonl").appender()
    with object_servers.refusing(status, code) as address, monkeypatch.context() as expired:
        expired.setenv("AWS_ENDPOINT_URL", address)
        objects._reach.cache_clear()
        with refused(folder, *facts) as refusal:
            locate(str(folder))
        assert SECRET not in str(refusal.value) and "AKIATEST" not in str(refusal.value)
        store = objects._make_store("s3", "bucket", max_retries=2)
        expired.setattr(objects, "_store", lambda *location: store)
        appender.append(b"one\n")
        flush_appended()
        with pytest.raises(OSError) as away:
            appender.append(b"two\n")
        assert away.value.errno == errno.EACCES and SECRET not in str(away.value)
    appender.close()  # the credentials were renewed
    assert (folder / "a.jsonl").read() == b"one\ntwo\n"


def test_sweep_finds_its_runs_and_other_paths_are_refused(folder):
    first, second = read_sweep(["--grid=seed=1,2", "--steps=2", f"--run-dir={folder}"])[0]
    assert str(first.path) == f"{folder}/seed=1" and not first.is_finished()
    (first.path / "summary.json").write('{"exit_reason": "finished", "step": 2}')
    assert first.is_finished() and not second.is_finished()
    for name, more in {"report": [], "compare": [first.path]}.items():
        with refused(f"{folder}/none"):
            run_here(f"tools.{name}.__main__", f"{folder}/none", *more)
    with refused(f"{folder}/none"):
        run_here("evaluate", f"{folder}/none")


def test_unreachable_store_ends_a_command_with_one_line(capsys, tmp_path, monkeypatch):
    away = objects._as_os_error(RuntimeError("connection refused"), "s3://bucket/run")
    log = logging.FileHandler(tmp_path / "log")
    monkeypatch.setattr(logging.getLogger("jaxdist"), "handlers", [log])
    assert away.errno == errno.EHOSTUNREACH
    assert entry_point._report(away, "try again") == 1
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert (tmp_path / "log").read_text() == f"{line}\n"
    assert missing(line, "s3://bucket/run", "try again") == []


def test_server_response_text_is_not_in_the_message():
    answer = (
        "Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch"
        f"</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"
    )
    error = objects._as_os_error(RuntimeError(answer), "s3://bucket/a")
    assert isinstance(error, PermissionError) and SECRET not in str(error)
    assert missing(str(error), "403", "SignatureDoesNotMatch", "s3://bucket/a") == []


@pytest.mark.slow
def test_run_killed_during_an_upload_resumes_bit_identically(server, tmp_path):
    kill_and_resume("s3://bucket/runs/killed", tmp_path)


@pytest.mark.slow
def test_commands_of_the_storage_page_run_as_printed(server):
    page = (ROOT / "docs/storage.md").read_text()
    lines = re.findall(r"^python .*s3://BUCKET.*$", page, flags=re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.replace("BUCKET", "bucket"))
        smaller = ["--steps=2", *TINY] if "jaxdist.train" in words else []
        done = run(words[2].removeprefix("jaxdist."), *words[3:], *smaller, cwd=ROOT)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert manifest.steps_in(locate("s3://bucket/runs/NAME") / "checkpoints") == [2]


@pytest.mark.slow
def test_run_with_url_inputs_matches_one_with_local_files(server, tmp_path):
    files = tmp_path / "in"
    write_model(files / "model", dataclasses.replace(FAMILIES["llama2"], vocab_size=320))
    texts = [f"the {i}th of some texts" for i in range(300)]
    write_tokenizer(files / "model", texts)
    tokenizer = load_tokenizer(str(files / "model" / "tokenizer.json"))
    source = write_source(tmp_path, "jsonl", texts)
    write_corpus([source], files / "tokens", make_encoder(tokenizer))
    (files / "held").mkdir()
    write_source(files / "held", "jsonl", texts[:100])
    lines = ["[train]", "steps = 2", "seq_len = 16", "global_batch_size = 8"]
    (files / "run.toml").write_text("\n".join(lines))
    losses, ledgers = {}, {}
    for base in (str(upload(files, "s3://bucket/made")), str(files)):
        run_dir = f"{base}/run"
        flags = [f"--config={base}/run.toml", f"--data.sources={base}/tokens"]
        flags += [f"--init-from={base}/model", f"--run-dir={run_dir}", "--mesh=fsdp=4,tp=2"]
        flags += [f"--data.eval-sources={base}/held/*.jsonl", "--monitoring.tracker="]
        assert run_here("train", *flags) == 0
        records = read_records(f"{run_dir}/metrics.jsonl")
        losses[base] = [r["loss"] for r in records if r["kind"] in ("train", "eval")]
        ledgers[base] = [r["data_ledger"] for r in records if r["kind"] == "train"]
        settings = tomllib.loads((locate(run_dir) / "config.toml").text())
        assert settings["data"]["tokenizer"] == f"{base}/model/tokenizer.json"
    first, second = losses.values()
    assert len(first) == 3 and [*map(float.hex, first)] == [*map(float.hex, second)]
    first, second = ledgers.values()
    assert len(set(first)) == 2 and first == second
    assert run_here("generate", "s3://bucket/made/run", "--prompt=the", "--max-new-tokens=4") == 0
