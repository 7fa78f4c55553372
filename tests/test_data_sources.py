"""Files to tokens: every text format, the cache, token folders, tokenizers, error messages."""

import concurrent.futures
import errno
import gzip
import json
import logging
import os
import shutil
import signal
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import Fork
from data_cases import TEXTS, cache, tar_members, write_source, write_tar, zstd  # noqa: F401
from refusals import missing, refused

from jaxdist.data import DataConfig, corpus, load_tokenizer, open_datasets
from jaxdist.data import __main__ as command
from jaxdist.data import documents as documents_room
from jaxdist.data.__main__ import main
from jaxdist.data.config import settings_of_tokens
from jaxdist.data.corpus import Corpus, cached_corpus, write_corpus
from jaxdist.data.documents import is_text, read_pieces, read_records
from jaxdist.data.encoding import TextEncoder
from jaxdist.data.files import find_files, library_files
from jaxdist.data.hub_stream import _LocalFile
from jaxdist.data.tokenizer import ByteTokenizer, train_bpe
from jaxdist.settings import ConfigError, problems_of


def documents_of(source: Path, field="text") -> list[str]:
    documents, held = [], ""
    for file in find_files(str(source)):
        for piece in read_pieces(file, field):
            held += piece.text
            if piece.last:
                documents.append(held)
                held = ""
    assert not held
    return documents


@pytest.mark.parametrize(
    "form",
    ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "folder", "tar", "tar.gz", "tar.zst"],
)
def test_every_format_gives_the_same_documents(tmp_path, form):
    assert sorted(documents_of(write_source(tmp_path, form))) == sorted(TEXTS)


@pytest.mark.parametrize("form", ["txt", "txt.gz"])
def test_a_text_file_is_one_document_byte_for_byte(tmp_path, form):
    assert documents_of(write_source(tmp_path, form)) == ["".join(TEXTS)]
    path = tmp_path / "windows.txt"
    path.write_bytes(b"a\r\nb\rc\n")
    assert documents_of(path) == ["a\r\nb\rc\n"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_parts_of_a_tar_are_its_samples(tmp_path, form, monkeypatch):
    """Wherever a part begins, each sample is in one part, with its long name and metadata."""
    rng = np.random.default_rng(0)
    long = "x" * (90 if form == tarfile.USTAR_FORMAT else 150)
    texts = [f"text {i} " + "ustar " * int(rng.integers(0, 300)) for i in range(60)]
    kinds = ("json", "txt", "meta.json")
    members = [
        (f"{long * (i % 3 == 0)}/{i}.{kind}", text if kind == "txt" else "{}")
        for i, text in enumerate(texts)
        for kind in kinds
    ]
    path = write_tar(tmp_path / "a.tar", members, format=form)
    size = path.stat().st_size
    about = {"repo": "org/set@0", "path": "a.tar", "num_bytes": size, "tag": "", "local": path}
    for num_parts in (1, 2, 7, 40, size // 512):
        files = [_LocalFile(**about, part=i, num_parts=num_parts) for i in range(num_parts)]
        read = [[piece.text for piece in read_pieces(file, "text")] for file in files]
        assert [text for part in read for text in part] == texts
        assert num_parts > 7 or all(read)


def test_records_of_a_tar(tmp_path):
    rows = [{"prompt": f"question {i}", "completion": "an answer"} for i in range(9)]
    texts = [json.dumps(row, indent=2) for row in rows]
    members = [(f"{i}.{kind}", text) for i, text in enumerate(texts) for kind in ("txt", "json")]
    path = write_tar(tmp_path / "a.tar", members)
    records = list(read_records(path, []))
    assert [record.value for record in records] == rows
    assert records[1].source == f"{path}/1.json:1"
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    opened = [
        open_datasets(DataConfig(sources=[str(name)], records="completion"), seq_len=16)[0]
        for name in (path, lines)
    ]
    assert opened[0].fingerprint == opened[1].fingerprint
    texts = write_tar(tmp_path / "texts.tar", [("0.txt", "a"), ("1.txt", "b")])
    with refused(f"{texts}/0.txt", "data.records"):
        list(read_records(texts, []))
    assert is_text(texts, "text") and not is_text(path, "text")


def test_globs_and_order_are_independent_of_the_file_system(tmp_path):
    folder = write_source(tmp_path, "folder")
    files = find_files(str(folder / "**" / "*.txt"))
    assert files == sorted(files) == find_files(str(folder))
    assert len(files) == len(TEXTS)


def test_stdlib_source_is_fast_deterministic_and_without_tests():
    files = library_files()
    assert files == library_files()
    assert len(files) > 100
    assert any(f.name == "argparse.py" for f in files)
    assert not any({"test", "tests", "site-packages"} & set(f.parts[3:]) for f in files)


def test_reading_long_texts_in_pieces_keeps_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_room, "PIECE_BYTES", 64)
    lines = [f"line {i} with wörds and    gaps\n" + "\n" * (i % 3) for i in range(200)]
    path = write_source(tmp_path, "txt", lines)
    pieces = list(read_pieces(path, "text"))
    assert len(pieces) > 50
    assert [p.last for p in pieces].count(True) == 1
    assert "".join(p.text for p in pieces) == "".join(lines)
    train_bpe(lines, 400, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    expected = tokenizer.encode("".join(lines))
    np.testing.assert_array_equal(
        np.concatenate(tokenizer.encode_batch([p.text for p in pieces])), expected
    )


def test_text_without_line_ends_is_split_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_room, "PIECE_BYTES", 64)
    path = tmp_path / "long.txt"
    path.write_text("€" * 1000)
    pieces = list(read_pieces(path, "text"))
    assert len(pieces) > 3
    assert "".join(p.text for p in pieces) == "€" * 1000


def write(files, folder, **settings):
    write_corpus(files, folder, TextEncoder(ByteTokenizer(), "text"), **settings)
    return Corpus(folder)


def test_killed_corpus_is_not_treated_as_complete(tmp_path):
    """After SIGKILL during writing the folder is absent, so the next start creates it."""
    source = write_source(tmp_path, "txt", ["some text\n"] * 1000)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from jaxdist.data.corpus import write_corpus\n"
        "from jaxdist.data.encoding import TextEncoder\n"
        "from jaxdist.data.tokenizer import ByteTokenizer\n"
        "from jaxdist.runtime.progress import Progress\n"
        "Progress.reach = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "encoder = TextEncoder(ByteTokenizer(), 'text')\n"
        "write_corpus([Path(sys.argv[1])], Path(sys.argv[2]), encoder)\n"
    )
    out = tmp_path / "out"
    process = Fork("-c", code, source, out)
    process.communicate()
    assert process.returncode == -9
    assert not out.exists()
    (left,) = tmp_path.glob(".out.partial-*")
    other = tmp_path / ".out.partial-another.host-1-abc"  # another host's file stays unchanged
    other.mkdir()
    assert write([source], out).num_tokens == 10001
    assert not left.exists() and other.exists()


def test_parts_of_another_process_are_used(tmp_path, monkeypatch):
    """Without file locks, processes tokenize the same parts at the same time."""

    def beaten(folder, *arguments, fill=corpus._fill):
        fill(folder, *arguments)
        shutil.copytree(folder, folder.with_name(folder.name[1:6]))

    monkeypatch.setattr(corpus, "_fill", beaten)
    monkeypatch.setattr(corpus, "PART_BYTES", 1)
    assert write([write_source(tmp_path, "txt")] * 2, tmp_path / "out").num_documents == 2


def test_interrupted_command_leaves_no_files(tmp_path, monkeypatch):
    source = write_source(tmp_path, "txt", ["some text\n"] * 100)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(
        "jaxdist.data.corpus._fill", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            main([str(source), f"--out={tmp_path / 'out'}"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == [source]


def test_cached_corpus_follows_the_content_and_logs_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    source = write_source(tmp_path, "txt")

    def folder():
        return cached_corpus([source], "mine", TextEncoder(ByteTokenizer(), "text")).folder

    first = folder()
    assert folder() == first
    assert [r.message for r in caplog.records if "tokenizing mine: 1 files" in r.message] == [
        caplog.records[0].message
    ]
    changed = source.read_bytes().replace(b"first", b"worst")
    times = source.stat().st_atime, source.stat().st_mtime
    source.write_bytes(changed)
    os.utime(source, times)  # same size, same time: only the content differs
    second = folder()
    assert second != first
    assert b"worst" in bytes(Corpus(second).tokens(0, 20))


def test_concurrent_starts_tokenize_once(tmp_path):
    """Threads simulate processes, because the lock belongs to an open file, not to a process."""
    source = write_source(tmp_path, "txt")
    together = threading.Barrier(3)
    calls = []

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            calls.append(texts)
            time.sleep(0.3)  # long enough for the others to arrive at the lock
            return super().encode_batch(texts)

    def start(_):
        together.wait()
        return cached_corpus([source], "mine", TextEncoder(Slow(), "text")).fingerprint

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(start, range(3)))) == 1
    assert len(calls) == 1


def test_truncated_or_foreign_corpus_is_rejected(tmp_path):
    folder = tmp_path / "corpus"
    write([write_source(tmp_path, "txt")], folder)
    about = json.loads((folder / "corpus.json").read_text())
    tokens = folder / "tokens-00000.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with refused("tokens-00000.bin", "truncated"):
        Corpus(folder)
    (folder / "corpus.json").write_text(json.dumps(about | {"format": "other"}))
    with refused("format 'other'"):
        Corpus(folder)
    (folder / "corpus.json").write_text(json.dumps(about)[:-20])
    with refused("corpus.json'", "cannot be read"):
        Corpus(folder)
    del about["shards"]
    (folder / "corpus.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="lacks shards"):
        Corpus(folder)


def test_command_trains_a_bpe_and_stores_it_with_the_tokens(tmp_path):
    source = write_source(tmp_path, "jsonl", [f"text number {i} of many" for i in range(300)])
    out = tmp_path / "tokens"
    assert main([str(source), "--out", str(out), "--train-bpe", "300"]) == 0
    settings, vocab_size = settings_of_tokens(str(out))
    assert vocab_size == 300
    data = DataConfig(sources=[str(out)], eval_fraction=0.0, **settings)
    train, _ = open_datasets(data, seq_len=8)
    assert train.vocab_size == 300
    assert train.tokenizer.decode(train.parts[0].corpus.tokens(0, 12)).startswith("text number 0")


def test_bpe_sample_has_the_requested_size_and_is_evenly_spread(tmp_path, monkeypatch):
    texts = [f"text number {i}" for i in range(300)]
    source, learned = write_source(tmp_path, "jsonl", texts), []

    def learn(sample, vocab_size, path):
        learned.extend(sample)
        train_bpe(learned, vocab_size, path)

    monkeypatch.setattr(command, "train_bpe", learn)
    quarter = str(0.2500001 * source.stat().st_size / 1e6)
    flags = ["--out", str(tmp_path / "tokens"), "--train-bpe", "260", "--bpe-mb", quarter]
    assert main([str(source), *flags]) == 0
    assert learned == texts[3::4]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--train-bpe", "100"], ["--train-bpe 100", "256 bytes"]),
        (["--train-bpe", "90000"], ["--train-bpe 90000", "yields only"]),
        (["--train-bpe", "300", "--tokenizer", "x"], ["Remove one"]),
        (["--eos-token", "<s>"], ["eos_token"]),
        (["--tokenizer", "nowhere.json"], ["'nowhere.json'"]),
        (["--text-field", "body"], ["source.jsonl:1 ", "field 'body'", "text, other"]),
    ],
)
def test_command_exits_with_2_on_bad_input_and_leaves_no_files(tmp_path, options, facts):
    source = write_source(tmp_path, "jsonl")
    with pytest.raises(ConfigError) as caught:
        main([str(source), "--out", str(tmp_path / "out"), *options])
    assert missing(str(caught.value), *facts) == []
    assert sorted(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EACCES, ConfigError), (errno.ENOSPC, OSError)]
)
def test_unwritable_folder_is_reported_by_name(tmp_path, monkeypatch, number, error):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("jaxdist.data.corpus._fill", fail)
    source = write_source(tmp_path, "txt")
    with pytest.raises(error, match=os.strerror(number)) as failure:
        main([str(source), f"--out={tmp_path / 'out'}"])
    assert str(tmp_path / "out") in str(failure.value)


def save(name, data):
    def make(folder):
        (folder / name).write_bytes(data)
        return folder / name

    return make


GOOD = b'{"text": "a text that is long enough for a row of eight tokens"}\n'
TWO = ("0.txt", "x" * 99), ("1.txt", "y" * 99)
PARQUET_TEXT = {"other": ["a"]}
PARQUET_NUMBERS = {"text": [1, 2]}


def save_parquet(columns):
    def make(folder):
        pa.parquet.write_table(pa.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return make


def save_tar(*members, keep=None, spoil=None):
    def make(folder):
        path = write_tar(folder / "a.tar", members)
        data = bytearray(path.read_bytes()[:keep])
        if spoil is not None:
            data[spoil] ^= 1
        path.write_bytes(data)
        return path

    return make


def save_folder(**files):
    def make(folder):
        for name, data in files.items():
            (folder / name.replace("_", ".")).write_bytes(data)
        return folder

    return make


BAD_SOURCES = {
    "missing": (lambda f: f / "none.txt", "none.txt'", "not exist"),
    "glob_without_match": (lambda f: f / "*.txt", "/*.txt'", "no file"),
    "empty_folder": (lambda f: f, "folder without files"),
    "empty_file": (save("a.txt", b""), "a.txt", "is empty"),
    "empty_files": (save_folder(a_txt=b"", b_txt=b""), "holds no text"),
    "too_short": (save("a.txt", b"abc"), "seq_len=8", "4 tokens"),
    "not_utf8": (save("a.txt", b"abc\xff\xfe" * 9), "a.txt", "UTF-8", "byte 3 is 0xff"),
    "binary": (save("train.bin", b"\1\2" * 99), "train.bin", "uint16 513", "256 tokens"),
    "json": (save("a.json", GOOD), "a.json", "is .json"),
    "broken_line": (save("a.jsonl", GOOD + b'{"text": \n'), "a.jsonl:2 ", "not JSON"),
    "missing_field": (save("a.jsonl", GOOD + b'{"body": "x"}\n'), "a.jsonl:2 ", "field 'text'"),
    "not_text": (save("a.jsonl", b'{"text": 3}\n'), "a.jsonl:1 ", "no text 'text'"),
    "not_an_object": (save("a.jsonl", b'["x"]\n'), "a.jsonl:1 ", "field 'text'"),
    "line_not_utf8": (save("a.jsonl", GOOD + b'{"text": "\xff"}\n'), "UTF-8", "row 2"),
    "cut_off_gzip": (save("a.jsonl.gz", gzip.compress(GOOD * 99)[:-9]), "a.jsonl.gz", "damaged"),
    "not_gzip": (save("a.jsonl.gz", GOOD), "a.jsonl.gz", "damaged"),
    "flipped_gzip": (
        save("a.txt.gz", gzip.compress(GOOD)[:20] + b"\0\0\0\0" + gzip.compress(GOOD)[24:]),
        "a.txt.gz", "damaged",
    ),
    "cut_off_zstd": (
        save("a.jsonl.zst", zstd(os.urandom(9999).hex().encode())[:-99]),
        "a.jsonl.zst", "damaged",
    ),
    "not_zstd": (save("a.jsonl.zst", GOOD), "a.jsonl.zst", "damaged"),
    "missing_column": (save_parquet(PARQUET_TEXT), "no column text", "has: other"),
    "column_of_numbers": (save_parquet(PARQUET_NUMBERS), "column text", "int64"),
    "not_parquet": (save("a.parquet", GOOD), "a.parquet", "complete Parquet"),
    "tar_of_images": (
        save_tar(("0.txt", "x"), ("0.jpg", b"\xff")), "a.tar/0.jpg", "images", "module:function",
    ),
    "tar_with_two_texts": (save_tar(("0.en.txt", "x"), ("0.de.txt", "y")), "0.en.txt", "0.de.txt"),
    "tar_without_its_end": (save_tar(*TWO, keep=2048), "a.tar", "complete tar", "end"),
    "tar_cut_off": (save_tar(*TWO, keep=1800), "a.tar", "complete tar", "unexpected end"),
    "tar_with_damaged_header": (save_tar(*TWO, spoil=1024), "a.tar", "complete tar", "header"),
    "tar_with_damaged_start": (save_tar(*TWO, spoil=0), "a.tar", "complete tar", "bad checksum"),
    "tar_with_binary_text": (save_tar(("0.txt", b"a\0")), "a.tar/0.txt", "byte 1 is a NUL"),
    "tar_with_bad_json": (save_tar(("0.json", "{")), "a.tar/0.json:1 ", "not JSON"),
    "tar_without_field": (save_tar(("0.json", "{}")), "a.tar/0.json:1 ", "field 'text'"),
    "empty_tar": (save_tar(), "holds no text"),
    "mixed_folder": (save_folder(a_txt=GOOD, b_jsonl=GOOD), "a.txt", "b.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_source_gives_one_clear_error(tmp_path, case):
    make, *facts = BAD_SOURCES[case]
    config = DataConfig(sources=[str(make(tmp_path))], eval_fraction=0.0)
    with refused(*facts) as caught:
        open_datasets(config, seq_len=8)
    assert "\n" not in caught.value.problems[0]


def test_empty_held_out_split_is_rejected_with_the_fix(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 12)
    with refused(path, "data.eval_fraction=0.02"):
        open_datasets(DataConfig(sources=[str(path)]), seq_len=8)


def test_a_short_text_holds_out_one_row(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    train, held = open_datasets(DataConfig(sources=[str(path)]), seq_len=8)
    assert (train.num_rows, held.num_rows) == (11, 1)


def test_config_reports_all_problems_at_once():
    problems = DataConfig(
        sources=["nowhere", "stdlib"],
        mixture_weights=[1.0],
        tokenizer="nowhere.json",
        eval_sources=["nothing"],
    ).problems()
    words = ["nowhere'", "'nothing'", "weights: 1 numbers", "tokenizer="]
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem
    assert DataConfig().problems() == []
    assert "empty" in DataConfig(sources=[]).problems()[0]
    bad = {"eval_fraction": 1.0, "num_workers": -1}
    assert len(problems_of(DataConfig(**bad), "data")) == len(bad)
    for weights in ([1.0, 0.0], [1.0, float("nan")], [1.0, -1.0], [1.0, 1e-9]):
        config = DataConfig(sources=["stdlib"] * 2, mixture_weights=weights)
        assert len(problems_of(config, "data")) == 1


def test_unwritable_cache_is_reported_by_name(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "file"))
    with refused(f"JAXDIST_CACHE='{tmp_path / 'file'}'", os.strerror(errno.ENOTDIR)):
        open_datasets(DataConfig(sources=[str(write_source(tmp_path, "txt"))]), seq_len=8)
