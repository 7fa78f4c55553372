"""Files that resemble text but are not, linked folders, byte order marks, Parquet types."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from decoders import FAMILIES
from hf_models import write_model, write_tokenizer
from refusals import refused

from jaxdist.config import read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.__main__ import main as data_main
from jaxdist.data.corpus import Corpus
from jaxdist.data.documents import read_pieces, read_records
from jaxdist.data.files import find_files
from jaxdist.data.images import TEST_FILE, TRAIN_FILES, open_cifar
from jaxdist.data.tokenizer import TOKENIZER_FILES, FileTokenizer
from jaxdist.generate import GenerateConfig
from jaxdist.models.huggingface.directory import open_weights
from jaxdist.models.huggingface.safetensors import INDEX
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError

BOM = b"\xef\xbb\xbf"
PATIENCE_S = 60
LINES = b'{"text": "hello"}\n{"text": "b"}\n'


def texts_of(path: Path) -> list[str]:
    return [piece.text for piece in read_pieces(path, "text")]


def write_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("train.bin", bytes(range(1, 60)).replace(b"", b"\0")[1:], "token numbers"),
        ("m.idx", b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\4", "Megatron"),
        ("utf16.txt", "plain text".encode("utf-16-le"), "UTF-16"),
        ("big.txt", "plain text".encode("utf-16-be"), "UTF-16"),
        ("late.txt", b"text " * 99 + b"\0" + b"text " * 99, "binary"),
        ("a.jsonl", b'{"text": "a\0b"}\n', "binary"),
    ],
)
def test_files_with_nul_bytes_are_rejected_as_text(tmp_path, name, data, kind):
    with refused(name, "NUL", kind):
        texts_of(write_file(tmp_path / name, data))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_byte_order_mark_is_removed_from_the_text(tmp_path, pack):
    end = "" if pack is bytes else ".gz"
    assert texts_of(write_file(tmp_path / f"a.txt{end}", pack(BOM + b"hello\n"))) == ["hello\n"]
    lines = write_file(tmp_path / f"a.jsonl{end}", pack(BOM + LINES))
    assert texts_of(lines) == ["hello", "b"]
    assert [record.value["text"] for record in read_records(lines, [])] == ["hello", "b"]


def test_fingerprint_changes_with_the_reader_version(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    config = DataConfig(sources=[str(write_file(tmp_path / "a.txt", BOM + b"hello " * 99))])
    fingerprint = lambda: open_datasets(config, seq_len=8)[0].fingerprint
    with monkeypatch.context() as before:
        before.setattr("jaxdist.data.corpus._READING", 1)
        before.setattr("jaxdist.data.documents.codecs.BOM_UTF8", b"no such mark")
        old = fingerprint()
    assert fingerprint() != old


@pytest.mark.parametrize("name", ["corpus.txt", "a.jsonl.txt", "lines", "data.json", "a.txt.gz"])
@pytest.mark.parametrize(
    "data",
    [
        LINES,
        b'\n {"a": {}}',
        b'[{"text": "a"}, {"text": "b"}]',
        b"[" + LINES.replace(b"}\n{", b"},\n{") + b"]",
    ],
)
def test_json_lines_are_never_read_as_text(tmp_path, name, data):
    data = gzip.compress(data) if name.endswith(".gz") else data
    with refused(name, ".jsonl"):
        texts_of(write_file(tmp_path / name, data))


@pytest.mark.parametrize(
    "text", ['{"a": 1}\nprose\n', "{\n}", "[link](x)", "3\n4\n", '{"open": (', '{\n "a": 1\n}\n']
)
def test_text_with_braces_is_read_as_text(tmp_path, text):
    assert texts_of(write_file(tmp_path / "a.txt", text.encode())) == [text]


def test_linked_folders_are_read_once_even_in_a_cycle(tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_file(folder / "a.txt", b"a")
    write_file(elsewhere / "b.txt", b"b")
    (folder / "more").symlink_to("../elsewhere")
    for name in ("loop", "loop2", "loop3"):
        (elsewhere / name).symlink_to("../folder")
    for source in (str(folder), f"{folder}/**/*.txt", f"{folder}/**"):
        assert [p.name for p in find_files(source)] == ["a.txt", "b.txt"], source


@pytest.mark.parametrize("source", ["", "/*", "/**/*.txt", "/gone.txt"])
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/nonexistent"), os.mkfifo])
def test_broken_links_and_pipes_are_rejected_by_name(tmp_path, make, source):
    write_file(tmp_path / "a.txt", b"a")
    make(tmp_path / "gone.txt")
    with refused("gone.txt", "regular file"):
        find_files(f"{tmp_path}{source}")


def save(path: Path, array: pa.Array, names=("text",)) -> Path:
    pa.parquet.write_table(pa.table([array] * len(names), names=list(names)), path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.string_view(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
    ],
    ids=str,
)
def test_every_parquet_text_type_is_read(tmp_path, kind):
    values = ["hé", "b"]
    values = [v.encode() for v in values] if "binary" in str(kind) else values
    path = save(tmp_path / "a.parquet", pa.array(values, kind))
    assert texts_of(path) == ["hé", "b"]
    assert [r.value["text"] for r in read_records(path, ["text"])] == ["hé", "b"]


def test_parquet_with_ambiguous_or_invalid_text_is_rejected(tmp_path):
    doubled = save(tmp_path / "a.parquet", pa.array(["a"]), ("text", "text"))
    with refused("a.parquet", "several columns", "text"):
        texts_of(doubled)
    prompts = save(tmp_path / "c.parquet", pa.array(["a"]), ("prompt", "prompt"))
    with refused("c.parquet", "several columns", "prompt"):  # optional, but ambiguous
        next(read_records(prompts, [], lambda name: False))
    with refused("b.parquet", "not UTF-8"):
        texts_of(save(tmp_path / "b.parquet", pa.array([b"\xff"])))


def thrift(value):
    """Return type and bytes of a value in Thrift's compact protocol; (n,) is a 64-bit integer."""
    varint = lambda n: bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])
    if isinstance(value, int | tuple):
        return (5, varint(value << 1)) if isinstance(value, int) else (6, varint(value[0] << 1))
    if isinstance(value, bytes):
        return 8, varint(len(value)) + value
    if isinstance(value, list):
        items = [thrift(v) for v in value]
        return 9, bytes([len(items) << 4 | items[0][0]]) + b"".join(data for _, data in items)
    out, last = b"", 0
    for number, field in value.items():
        kind, data = thrift(field)
        out, last = out + bytes([(number - last) << 4 | kind]) + data, number
    return 12, out + b"\0"


def forged_parquet(pages, num_rows=1, codec=0, optional=0):
    """Return Parquet of a column "text" with pages (kind, values, claimed bytes, stored bytes)."""
    encodings = {0: (5, {2: 0, 3: 3, 4: 3}), 2: (7, {2: 0}), 8: (5, {2: 8, 3: 3, 4: 3})}
    parts = []
    for kind, num_values, num_bytes, data in pages:
        field, encoding = encodings[kind]
        header = {1: kind % 8, 2: num_bytes, 3: len(data), field: {1: num_values, **encoding}}
        parts.append(thrift(header)[1] + data)
    size, rows, has_dictionary = (sum(map(len, parts)),), (num_rows,), pages[0][0] == 2
    offsets = {9: (4 + len(parts[0]),), 11: (4,)} if has_dictionary else {9: (4,)}
    column = {1: 6, 2: [0], 3: [b"text"], 4: codec, 5: rows, 6: size, 7: size, **offsets}
    schema = [{4: b"s", 5: 1}, {1: 6, 3: optional, 4: b"text", 6: 0}]
    group = {1: [{2: (4,), 3: column}], 2: size, 3: rows}
    footer = thrift({1: 2, 2: schema, 3: rows, 4: [group]})[1]
    return b"PAR1" + b"".join(parts) + footer + len(footer).to_bytes(4, "little") + b"PAR1"


WORD = b"\1\0\0\0a"
LONG_WORD = (8 << 20).to_bytes(4, "little") + b"a" * (8 << 20)
ZSTD = pa.compress(LONG_WORD * 32, "zstd", asbytes=True)
MANY = 5 * 10**8
MANY_EQUAL = thrift(MANY)[1] + b"\0"  # an encoded run of the value 0
BOMBS = {
    "dictionary": ([(2, 212_500_000, 5, WORD), (8, 1, 4, b"\1\2\0\0")],),
    "snappy": ([(0, 1, 2**31 - 1, pa.compress(WORD, "snappy", asbytes=True))], 1, 1),
    "zstd": ([(0, 32, len(LONG_WORD) * 32, ZSTD)], 32, 6),
    "nulls": ([(0, MANY, 10, b"\6\0\0\0" + MANY_EQUAL)], MANY, 0, 1),
    "repeated": ([(2, 1, 5, WORD), (8, MANY, 7, b"\1" + MANY_EQUAL)], MANY),
    "rows": ([(0, 1, 5, WORD)], 2**40),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_parquet_that_claims_too_much_memory_is_rejected_at_once(tmp_path, bomb):
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    path = write_file(tmp_path / "a.parquet", forged_parquet(*BOMBS[bomb]))
    with refused("a.parquet", "values" if bomb != "rows" else "header"):
        next(read_records(path, ["text"]))
    assert pool.max_memory() <= max(before, 64 << 20)


def test_parquet_that_repeats_one_long_text_is_rejected(tmp_path):
    pages = [(2, 1, len(LONG_WORD), LONG_WORD), (8, 9**5, 5, b"\1" + thrift(9**5)[1] + b"\0")]
    path = write_file(tmp_path / "a.parquet", forged_parquet(pages, 9**5))
    with refused("a.parquet", "200"):
        texts_of(path)
    assert pa.default_memory_pool().max_memory() < 1 << 30


def prompts_of(path: Path) -> list[str]:
    config = GenerateConfig(run="none", prompt_file=str(path))
    return [request["prompt"] for request in config.requests()]


def test_prompt_files_are_split_at_newlines_only(tmp_path):
    odd = ["a\x0bb\x0cc\x1cd\x1de\x1ef", "g\x85h\u2028i\u2029j", "", "k"]
    text = "\r\n".join(odd) + "\n"
    assert prompts_of(write_file(tmp_path / "p.txt", BOM + text.encode())) == odd
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a", "b")).encode()
    assert prompts_of(write_file(tmp_path / "p.ndjson", lines)) == ["a", "b"]
    assert prompts_of(write_file(tmp_path / "empty.txt", b"")) == []
    for name, data in (("q.txt", lines), ("r.txt", b"a\0b\n")):
        with refused(name):
            prompts_of(write_file(tmp_path / name, data))


@pytest.mark.parametrize("flag", ["config", "data.tokenizer", "data.chat_template"])
def test_pipes_and_devices_are_rejected_as_settings_files(tmp_path, flag):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with refused(path):
            read_run([f"--{flag}={path}", "--data.records=chat", "--data.sources=/dev"], command="")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    root = tmp_path_factory.mktemp("complete")
    write_model(root / "model", FAMILIES["llama3.1"])
    write_tokenizer(root / "model", ["ab"])
    text = write_file(root / "text.txt", b"abc")
    assert data_main([str(text), f"--out={root}/tokens", "--tokenizer=bytes"]) == 0
    (root / "images").mkdir()
    for name in (*TRAIN_FILES, TEST_FILE):
        write_file(root / "images" / f"{name}.bin", bytes(3073))
    return root


def weights_of(path: Path):
    if path.name not in ("config.json", "model.safetensors"):  # it is read before the others
        (path.parent / "model.safetensors").unlink()
    return open_weights(path.parent)


READERS = {
    "prompts.txt": prompts_of,
    "prompts.jsonl": prompts_of,
    "rows.parquet": lambda path: next(read_records(path, ["text"])),
    "shard": lambda path: next(locate(path).stream()),
    "block": lambda path: locate(path).part(0, 8),
    **{
        f"model/{name}": weights_of
        for name in ("config.json", "model.safetensors", "x.safetensors", INDEX)
    },
    **{
        f"model/{name}": lambda path: FileTokenizer(path.parent / "tokenizer.json")
        for name in TOKENIZER_FILES
    },
    **{
        f"tokens/{name}": lambda path: Corpus(path.parent)
        for name in ("corpus.json", "tokens-00000.bin", "documents.bin")
    },
    **{
        f"images/{name}.bin": lambda path: open_cifar(path.parent, "unit")
        for name in (TRAIN_FILES[0], TEST_FILE)
    },
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(complete, tmp_path, name):
    shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    # Unblock a reader that waits, even one in C that holds the GIL.
    write = ["sh", "-c", f'sleep {PATIENCE_S}; : > "$0"', str(path)]
    start = time.monotonic()
    writer = subprocess.Popen(write, start_new_session=True)
    try:
        with refused(name, error=OSError if name in ("shard", "block") else ConfigError):
            READERS[name](path)
        assert time.monotonic() - start < PATIENCE_S
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.wait()


def test_mesh_with_many_names_reports_one_problem():
    with refused("100000"):
        MeshSpec.parse(",".join(f"a{i}=1" for i in range(100_000)))
