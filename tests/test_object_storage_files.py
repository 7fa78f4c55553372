"""Files on an S3 server: text that becomes tokens, and files that grow until their process ends."""

import gzip
import json
import subprocess
import sys
import threading
import time

import object_servers
import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import environment, run_here
from object_runs import upload
from refusals import missing, refused
from test_data_images import make_batches

from jaxdist.config import read_run
from jaxdist.data.corpus import Corpus
from jaxdist.data.files import find_files
from jaxdist.data.images import open_cifar
from jaxdist.runtime.storage import objects


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, object_servers.s3(patch) as address:
        yield address


# -- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "ending"), [("py", ""), ("bin", ".bin")])
def test_images_in_a_bucket_are_those_of_the_folder(server, tmp_path, form, ending):
    make_batches(tmp_path)
    stored = upload(tmp_path / form, f"s3://bucket/cifar-{form}")
    fingerprints = lambda place: [part.fingerprint for part in open_cifar(place, "half")]
    assert fingerprints(stored) == fingerprints(tmp_path / form)
    config = read_run(["--model", "cnn", "--data.sources", str(stored)], command="train")
    assert config.data.sources == [str(stored)]
    with refused("data.sources", "holds images"):
        read_run(["--model", "decoder", "--data.sources", str(stored)], command="train")
    (stored / f"data_batch_4{ending}").write(b"no batch")
    with refused(f"data_batch_4{ending}'", "not a CIFAR-10 batch"):
        open_cifar(stored, "half")
    (stored / f"data_batch_4{ending}").delete()
    with refused(str(stored), f"lacks data_batch_4{ending}."):
        open_cifar(stored, "half")


# -- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(server, tmp_path_factory):
    """The same files in a folder and below a URL."""
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": f"the {i}th " * (i % 5 + 1)}) + "\n" for i in range(2000)]
    (folder / "a").mkdir()
    (folder / "a" / "lines.jsonl").write_text("".join(lines))
    (folder / "a" / "more.jsonl.gz").write_bytes(gzip.compress("".join(lines[::2]).encode()))
    (folder / "notes.txt").write_text("a text\n" * 3000)
    rows = {"text": [f"row {i}" for i in range(300)], "html": [f"{i}" * 5000 for i in range(300)]}
    pa.parquet.write_table(pa.table(rows), folder / "rows.parquet", compression="none")
    return str(folder), str(upload(folder, "s3://bucket/text"))


@pytest.mark.parametrize(
    "source", ["a", "a/lines.jsonl", "**/*.jsonl*", "[!a]otes.t?t", "rows.parquet"]
)
def test_text_in_a_bucket_becomes_the_tokens_of_the_same_files(text, tmp_path, source, request):
    found = []
    for place in text:
        out = f"{place}-tokens/{request.node.callspec.id}"
        assert run_here("data.__main__", f"{place}/{source}", "--out", out) == 0
        found.append(Corpus(out))
    assert found[0].fingerprint == found[1].fingerprint and found[0].num_tokens > 1000
    assert found[1].folder.uri().startswith("s3://")


def test_of_parquet_the_columns_that_are_needed_are_read(text, tmp_path, monkeypatch):
    read, part = [], objects.ObjectLocation.part

    def noting(location, start, length):
        read.append(length)
        return part(location, start, length)

    monkeypatch.setattr(objects.ObjectLocation, "part", noting)
    (file,) = find_files(f"{text[1]}/rows.parquet")
    assert run_here("data.__main__", str(file), "--out", tmp_path / "tokens") == 0
    assert 0 < sum(read) < file.num_bytes / 10


def test_what_cannot_be_read_or_written_is_refused(text, tmp_path, monkeypatch):
    out = ["--out", tmp_path / "tokens"]
    for source, fact in {
        f"{text[1]}/none": "matches no file",
        f"{text[1]}/*.nothing": "matches no file",
        text[1]: "mixes kinds",
        "s3://absent-bucket/text": "no such bucket",
    }.items():
        with refused(source, fact):
            run_here("data.__main__", source, *out)
    with refused("--out s3://bucket/text"):
        run_here("data.__main__", f"{text[0]}/notes.txt", "--out", "s3://bucket/text")
    with object_servers.refusing(400, "ExpiredToken") as address, monkeypatch.context() as expired:
        expired.setenv("AWS_ENDPOINT_URL", address)
        store = objects._make_store("s3", "bucket", max_retries=0)
        expired.setattr(objects, "_store", lambda *place: store)
        with refused(text[1], "expired"):
            run_here("data.__main__", f"{text[1]}/notes.txt", *out)
    assert not (tmp_path / "tokens").exists()


def test_an_object_is_no_run_directory(text):
    with refused("run_dir", f"{text[1]}/notes.txt", "is a file"):
        read_run([f"--run-dir={text[1]}/notes.txt"], command="test")


# -- the end -------------------------------------------------------------------------------------

ENDS = """
import concurrent.futures, pathlib, sys
from jaxdist.checkpoint import lock
from jaxdist.runtime import entry_point, run_command
from jaxdist.runtime.storage import locate, parts

parts._END_S = lock.RELEASE_S = entry_point._WAY_OUT_S = 1.5

def main():
    folder = locate("s3://bucket/ends")
    file, log = (folder / "a").appender(), (folder / "log").appender()
    held = lock.DirectoryLock(folder, print)
    held.acquire()
    pathlib.Path(sys.argv[1]).touch()  # from now on the store hangs
    concurrent.futures.ThreadPoolExecutor(1, "reader").submit((folder / "b").read)
    log.append(b"last words")
    file.append(b"lost")
    try:
        file.close()
    except TimeoutError as late:
        print("late", late.filename, file.pending)
    held.release()
    return 75

run_command(main)
"""


def test_a_store_that_hangs_keeps_no_process_from_its_end(server, monkeypatch, tmp_path):
    """Each wait has an end and says what for; the exit code is that of the work."""
    hangs, over = tmp_path / "hangs", threading.Event()

    def answer(request, ask):
        if hangs.exists():
            over.wait(60)
        return ask(request)

    with object_servers.passing_on(server, answer) as way:
        monkeypatch.setenv("AWS_ENDPOINT_URL", way)
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", ENDS, str(hangs)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        over.set()
    assert done.returncode == 75, done.stderr
    assert time.monotonic() - begun < 30
    assert missing(done.stdout, "late s3://bucket/ends/a b'lost'") == []
    waits = ["giving up the lock of s3://bucket/ends", "are lost", "reader_0"]
    assert missing(done.stderr, *waits) == []
