"""Files on an S3 server: text that becomes tokens, files that grow, and reads at the start."""

import dataclasses
import gzip
import json
import re
import threading

import object_servers
import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import Fork, run_here, tiny
from data_cases import cache  # noqa: F401
from hf_models import CHATML, write_tokenizer
from object_runs import upload
from refusals import missing, refused
from test_data_images import make_batches

from jaxdist.config import read_run
from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.cache import cache_folder
from jaxdist.data.corpus import Corpus, cached_corpus
from jaxdist.data.encoding import TextEncoder
from jaxdist.data.files import find_files, source_digest
from jaxdist.data.images import open_cifar
from jaxdist.data.tokenizer import ByteTokenizer
from jaxdist.run.metrics_log import read_outline
from jaxdist.runtime.storage import flush_appended, locate, location, objects, parts
from jaxdist.settings import ConfigError


@pytest.mark.parametrize(("form", "ending"), [("py", ""), ("bin", ".bin")])
def test_images_in_a_bucket_equal_those_of_the_folder(server, tmp_path, form, ending):
    make_batches(tmp_path)
    stored = upload(tmp_path / form, f"s3://bucket/cifar-{form}")
    fingerprints = lambda url: [part.fingerprint for part in open_cifar(url, "half")]
    assert fingerprints(stored) == fingerprints(tmp_path / form)
    config = read_run(["--model", "cnn", "--data.sources", str(stored)], command="train")
    assert config.data.sources == [str(stored)]
    with refused("data.sources", "images"):
        read_run(["--model", "decoder", "--data.sources", str(stored)], command="train")
    (stored / f"data_batch_4{ending}").write(b"no batch")
    with refused(f"data_batch_4{ending}'", "not a CIFAR-10 batch"):
        open_cifar(stored, "half")
    (stored / f"data_batch_4{ending}").delete()
    with refused(str(stored), f"lacks data_batch_4{ending}."):
        open_cifar(stored, "half")


@pytest.fixture(scope="module")
def text(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": f"the {i}th " * (i % 5 + 1)}) + "\n" for i in range(2000)]
    (folder / "a").mkdir()
    (folder / "a" / "lines.jsonl").write_text("".join(lines))
    (folder / "a" / "more.jsonl.gz").write_bytes(gzip.compress("".join(lines[::2]).encode()))
    (folder / "notes.txt").write_text("a text\n" * 3000)
    rows = {"text": [f"row {i}" for i in range(300)], "html": [f"{i}" * 5000 for i in range(300)]}
    pa.parquet.write_table(pa.table(rows), folder / "rows.parquet", compression="none")
    return str(folder), str(upload(folder, "s3://bucket/text"))


@pytest.fixture
def content_read(monkeypatch):
    lengths, part = [], objects.ObjectLocation.part

    def noting(location, start, length):
        lengths.append(length)
        return part(location, start, length)

    monkeypatch.setattr(objects.ObjectLocation, "part", noting)
    return lengths


@pytest.mark.parametrize(
    "source", ["a", "a/lines.jsonl", "**/*.jsonl*", "[!a]otes.t?t", "rows.parquet"]
)
def test_text_in_a_bucket_has_the_tokens_of_local_files(text, tmp_path, source, request):
    corpora = []
    for url in text:
        out = f"{url}-tokens/{request.node.callspec.id}"
        assert run_here("data.__main__", f"{url}/{source}", "--out", out) == 0
        corpora.append(Corpus(out))
    assert corpora[0].fingerprint == corpora[1].fingerprint and corpora[0].num_tokens > 1000
    assert str(corpora[1].folder).startswith("s3://")


def test_only_required_parquet_columns_are_read(text, tmp_path, content_read):
    (file,) = find_files(f"{text[1]}/rows.parquet")
    assert run_here("data.__main__", str(file), "--out", tmp_path / "tokens") == 0
    assert 0 < sum(content_read) < file.num_bytes / 10


def test_unreadable_and_unwritable_urls_are_rejected(text, tmp_path, monkeypatch):
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
        expired.setattr(objects, "_store", lambda *args: store)
        with refused(text[1], "expired"):
            run_here("data.__main__", f"{text[1]}/notes.txt", *out)
    assert not (tmp_path / "tokens").exists()


def rows_of(*sources: str, **settings):
    config = DataConfig(sources=list(sources), **settings)
    return open_datasets(config, seq_len=16)[0]


@pytest.mark.parametrize("source", ["notes.txt", "a", "**/*.jsonl*", "rows.parquet"])
def test_run_on_text_in_a_bucket_has_the_rows_of_local_files(text, source):
    local, stored = (rows_of(f"{url}/{source}", packing="documents") for url in text)
    assert stored.num_rows > 100
    assert (stored.fingerprint, stored.num_rows) == (local.fingerprint, local.num_rows)
    config = read_run([f"--data.sources={text[1]}/{source}"], command="train")
    assert config.data.sources == [f"{text[1]}/{source}"]


def test_text_in_a_bucket_is_read_only_if_changed(server, content_read):
    bucket = locate("s3://bucket/changing")
    (bucket / "a.txt").write("one text\n" * 100)
    (bucket / "b.txt").write("two text\n" * 100)
    first = rows_of(str(bucket)).fingerprint
    assert sum(content_read) == 2 * 900
    content_read.clear()
    assert rows_of(str(bucket)).fingerprint == rows_of(f"{bucket}/*.txt").fingerprint == first
    assert not content_read
    (bucket / "b.txt").write("six text\n" * 100)  # of the same size
    assert rows_of(str(bucket)).fingerprint != first
    assert sum(content_read) == 2 * 900


def test_objects_without_etag_are_identified_by_their_bytes(text):
    (stored,), (local,) = (find_files(f"{url}/notes.txt") for url in reversed(text))
    untagged = dataclasses.replace(stored, tag="")
    assert stored.tag and source_digest([stored]) != source_digest([local])
    assert source_digest([untagged]) == source_digest([local])


@pytest.mark.parametrize(("written", "is_refused"), [("a.txt", True), ("later.txt", False)])
def test_text_changed_during_reading_is_rejected(server, written, is_refused):
    bucket = locate(f"s3://bucket/unsteady/{written}-is-written")
    (bucket / "a.txt").write("one text\n" * 100)

    class Meanwhile(ByteTokenizer):
        def encode_batch(self, texts):
            (bucket / written).write("six text\n" * 100)
            return super().encode_batch(texts)

    files, encoder = find_files(str(bucket)), TextEncoder(Meanwhile(), "text")
    made = lambda: cached_corpus(files, str(bucket), encoder).num_documents
    if not is_refused:
        assert made() == 1
        return
    with refused(bucket / "a.txt", "changed"):
        made()
    assert not list(cache_folder().rglob("corpus.json"))


def test_images_and_text_are_distinguished_by_url(text):
    with refused("data.sources", "not a CIFAR-10 folder"):
        read_run(["--model", "cnn", f"--data.sources={text[1]}/notes.txt"], command="train")


def test_chat_template_in_a_bucket_is_used(server, tmp_path):
    """Next to the tokenizer, or by its own URL."""
    chat = {"messages": [{"role": r, "content": "of a text"} for r in ("user", "assistant")]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 50)
    write_tokenizer(tmp_path, ["of a text"], template=CHATML)
    bucket = upload(tmp_path, "s3://bucket/chat")
    settings = {"records": "chat", "packing": "best_fit"}
    fingerprints = {
        where: rows_of(
            f"{where}/chats.jsonl", tokenizer=f"{where}/tokenizer.json", **settings
        ).fingerprint
        for where in (tmp_path, bucket)
    }
    assert len(set(fingerprints.values())) == 1
    (bucket / "chat_template.jinja").delete()
    again = {"tokenizer": f"{bucket}/tokenizer.json", **settings}
    plain = rows_of(f"{bucket}/chats.jsonl", **again).fingerprint
    (bucket / "mine.jinja").write(CHATML)
    named = rows_of(f"{bucket}/chats.jsonl", chat_template=f"{bucket}/mine.jinja", **again)
    assert plain != named.fingerprint == fingerprints[bucket]
    with refused("data.chat_template", f"{bucket}/none.jinja"):
        rows_of(f"{bucket}/chats.jsonl", chat_template=f"{bucket}/none.jinja", **again)


def test_object_is_rejected_as_run_directory(text):
    with refused("run_dir", f"{text[1]}/notes.txt", "is a file"):
        read_run([f"--run-dir={text[1]}/notes.txt"], command="test")


def test_prompts_and_answers_must_be_local_files(server):
    flags = ["--prompt-file=s3://bucket/asks.txt", "--out=s3://bucket/answers.jsonl"]
    with refused("prompt_file", "asks.txt", "out", "answers.jsonl", num_problems=2):
        run_here("generate", "s3://bucket/trained", *flags)


ENDS = """
import concurrent.futures, pathlib, sys
from jaxdist.checkpoint import lock
from jaxdist.runtime import entry_point, run_command
from jaxdist.runtime.storage import locate, parts

parts._END_S = lock.RELEASE_S = entry_point._EXIT_S = 1.5

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


def test_hanging_store_does_not_prevent_process_exit(server, monkeypatch, tmp_path):
    """Each wait ends and reports its purpose; the exit code is that of the work."""
    hangs, over = tmp_path / "hangs", threading.Event()

    def answer(request, ask):
        if hangs.exists():
            over.wait(300)
        return ask(request)

    with object_servers.passing_on(server, answer) as way:
        monkeypatch.setenv("AWS_ENDPOINT_URL", way)
        done = Fork("-c", ENDS, hangs)
        out, errors = done.communicate(timeout=200)
        over.set()
    assert done.returncode == 75, errors
    assert missing(out, "late s3://bucket/ends/a b'lost'") == []
    waits = ["releasing the lock of s3://bucket/ends", "may be lost", "reader_0"]
    assert missing(errors, *waits) == []


@pytest.fixture
def folder(server, request):
    return locate(f"s3://bucket/{re.sub('[^a-z0-9]+', '-', request.node.name)}")


@pytest.mark.parametrize("is_one_object", [True, False])
def test_start_reads_only_the_end_of_the_records(folder, monkeypatch, is_one_object):
    monkeypatch.setattr(location, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(parts, "PART_BYTES", 4096)
    totals = {"kind": "event", "event": "totals", "step": 5000, "last": {"kind": "train"}}
    steps = ({"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 5001))
    lines = [json.dumps(record) + "\n" for record in (*steps, totals)]
    if is_one_object:
        folder.write("".join(lines))
    else:
        appender = folder.appender()
        for begin in range(0, len(lines), 1000):
            appender.append("".join(lines[begin : begin + 1000]).encode())
            flush_appended()
        appender.close()
    assert b"".join(folder.stream()) == "".join(lines).encode() == folder.read()
    sizes, get, part = [], objects.ObjectLocation._get, objects.ObjectLocation.part

    def noting_get(self, key):
        sizes.append(len((result := get(self, key))[0]))
        return result

    def noting_part(self, start, length):
        sizes.append(length)
        return part(self, start, length)

    monkeypatch.setattr(objects.ObjectLocation, "_get", noting_get)
    monkeypatch.setattr(objects.ObjectLocation, "part", noting_part)
    assert read_outline(folder, 5000)[1:] == [totals]
    assert 0 < sum(sizes) < folder.size() / 4
    assert b"".join([*folder.blocks_backward()][::-1]) == folder.read()


def objects_of(folder) -> dict[str, tuple[int, str]]:
    return {meta["path"]: (meta["size"], meta["e_tag"]) for meta in folder._below()}


def test_rejected_start_changes_no_object(folder):
    flags = ["--train.steps=2", f"--run-dir={folder}"]
    assert run_here("train", *tiny(*flags)) == 0
    flush_appended()
    before = objects_of(folder).items()
    first = [f"--run-dir={folder}-new", f"--init-from={folder}", "--model.d_model=64"]
    # test_stored_settings rejects more starts in a folder.
    for rejected in ([*flags, "--optim.optimizer=sgd"], [*flags, "--resume=never"], first):
        with pytest.raises(ConfigError):
            run_here("train", *tiny(*rejected))
        flush_appended()
        after = objects_of(folder).items()
        assert dict(after - before) == dict(before - after) == {}, rejected
    assert objects_of(locate(f"{folder}-new")) == {}
