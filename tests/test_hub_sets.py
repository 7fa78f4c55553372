"""Data sets of the Hugging Face hub as sources, from a local hub that serves files over HTTP."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data_cases import tar_members, write_tar
from hub_server import Hub, hub_in_use
from huggingface_hub import constants
from refusals import refused

from jaxdist.config import read_run
from jaxdist.data import load_tokenizer, open_datasets
from jaxdist.data.__main__ import main as data_command
from jaxdist.data.config import DataConfig
from jaxdist.data.corpus import Corpus
from jaxdist.data.encoding import make_encoder
from jaxdist.data.files import find_files
from jaxdist.data.hub_sets import HubSet, parse_hub_set
from jaxdist.data.token_files import open_corpus
from jaxdist.settings import write_toml

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    with hub_in_use(tmp_path, monkeypatch) as server:
        yield server


def texts(number: int, size: int = 40) -> list[str]:
    return [f"text {i} of file {number}, with words {'and words ' * (i % 7)}" for i in range(size)]


def write_parquet(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"id": range(len(rows)), "text": rows}), path)
    return path


def write_lines(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_set(folder: Path, num_files: int = 3) -> list[str]:
    for number in range(num_files):
        name = f"train-{number:05d}-of-{num_files:05d}.parquet"
        write_parquet(folder / "data" / name, texts(number))
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", ["a test"] * 9)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Set\n")
    return [text for number in range(num_files) for text in texts(number)]


def tokens_of(*rows: str) -> list[int]:
    return [byte for row in rows for byte in [*row.encode(), 0]]


def corpus_tokens(corpus: Corpus) -> list[int]:
    return corpus.tokens(0, corpus.num_tokens).tolist()


def opened_tokens(source: str) -> list[int]:
    return corpus_tokens(open_corpus(source, make_encoder(load_tokenizer("bytes"))))


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf://a/b", HubSet("a/b", "", "", "")),
        ("hf://a/b/c", HubSet("a/b", "c", "", "")),
        ("hf://a/b@v1", HubSet("a/b", "", "v1", "")),
        ("hf://a/b:test", HubSet("a/b", "", "", "test")),
        ("hf://a/b.c/d/e@refs/pr/1:x", HubSet("a/b.c", "d/e", "refs/pr/1", "x")),
    ],
)
def test_name_of_a_source(source, parts):
    assert parse_hub_set(source) == parts and str(parts) == source


@pytest.mark.parametrize("source", ["hf://a", "hf://", "hf://a/b@", "hf://a/b:", "hf://a/b//c"])
def test_wrong_names_are_refused(source):
    with refused(source, "hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT]"):
        parse_hub_set(source)


def test_parquet_of_the_hub_equals_local_files(hub, tmp_path):
    expected = write_set(tmp_path / "set")
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    assert opened_tokens("hf://org/set") == tokens_of(*expected)
    assert not any("test" in name for name in hub.sent)
    train, _ = open_datasets(DataConfig(sources=["hf://org/set"], eval_fraction=0.0), seq_len=8)
    files = DataConfig(sources=["set/data/train*"], eval_fraction=0.0)
    assert open_datasets(files, seq_len=8)[0].fingerprint == train.fingerprint


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "txt", "tar", "tar.gz"])
def test_other_formats_and_a_named_split(hub, tmp_path, suffix):
    rows = texts(0)
    if suffix == "txt":
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "valid.txt").write_text(rows[0])
        rows = rows[:1]
    elif "tar" in suffix:
        (tmp_path / "set").mkdir()
        write_tar(tmp_path / "set" / f"valid.{suffix}", tar_members(rows))
        (tmp_path / "set" / "LICENSE.txt").write_text("words")
    else:
        write_lines(tmp_path / "set" / f"valid.{suffix}", rows)
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    assert opened_tokens("hf://org/set:validation") == tokens_of(*rows)
    with refused("'train'", "validation"):
        find_files("hf://org/set")


def test_configs_of_the_readme_and_of_folders(hub, tmp_path):
    root = tmp_path / "set"
    write_parquet(root / "sample" / "10BT" / "000_00000.parquet", ["small"])
    write_parquet(root / "data" / "dump" / "train-00000.parquet", ["large"])
    write_parquet(root / "data" / "dump" / "test-00000.parquet", ["held out"])
    write_parquet(root / "old" / "data" / "dump" / "train-00000.parquet", ["of no config"])
    (root / "LICENSE.txt").write_text("words")
    configs = """---
configs:
- config_name: all
  data_files:
  - split: train
    path: data/*/train*
  - split: test
    path: [data/*/test*]
- config_name: sample-10BT
  data_files: "sample/10BT/*"
- config_name: part
  data_dir: data/dump
- config_name: inner
  data_dir: data
  data_files: dump/train*
---
"""
    (root / "README.md").write_text(configs)
    hub.store("datasets", "org/set", root, OLD)
    names = lambda source: [file.path for file in find_files(source)]
    small = ["sample/10BT/000_00000.parquet"]
    assert names("hf://org/set/sample-10BT") == names("hf://org/set/sample/10BT") == small
    assert names("hf://org/set/all") == names("hf://org/set/part") == names("hf://org/set/inner")
    assert names("hf://org/set/all") == ["data/dump/train-00000.parquet"]
    assert names("hf://org/set/all:test") == ["data/dump/test-00000.parquet"]
    with refused("several configs", "all", "sample-10BT"):
        names("hf://org/set")
    with refused("'none'", "all", "sample-10BT"):
        names("hf://org/set/none")


def test_unreadable_formats_name_the_parquet_copy(hub, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text\nabc\n")
    hub.store("datasets", "org/csv", tmp_path / "set", OLD)
    with refused(".csv", "hf://org/csv/default@refs/convert/parquet"):
        find_files("hf://org/csv")
    write_parquet(tmp_path / "copy" / "default" / "train" / "0000.parquet", ["abc"])
    hub.store("datasets", "org/csv", tmp_path / "copy", NEW, "refs/convert/parquet")
    files = find_files("hf://org/csv/default@refs/convert/parquet")
    assert [file.path for file in files] == ["default/train/0000.parquet"]


def test_run_keeps_the_commit_of_its_first_start(hub, tmp_path):
    write_set(tmp_path / "old", 1)
    hub.store("datasets", "org/set", tmp_path / "old", OLD)
    flags = ["--data.sources=hf://org/set", "--data.eval_sources=hf://org/set:test"]
    flags += ["--run-dir=run", "--model.vocab_size=256"]
    first = read_run(flags, command="jaxdist.train")
    assert first.data.sources == [f"hf://org/set@{OLD}"]
    assert first.data.eval_sources == [f"hf://org/set@{OLD}:test"]
    Path("run").mkdir()
    Path("run/config.toml").write_text(write_toml(first))
    write_parquet(tmp_path / "new" / "train.parquet", ["changed"])
    write_parquet(tmp_path / "new" / "test.parquet", ["changed"])
    hub.store("datasets", "org/set", tmp_path / "new", NEW)
    hub.forget()
    assert read_run(flags, command="jaxdist.train") == first
    assert opened_tokens(first.data.sources[0]) == tokens_of(*texts(0))
    flags[2] = "--run-dir=other"
    assert read_run(flags, command="jaxdist.train").data.sources == [f"hf://org/set@{NEW}"]


def test_missing_gated_and_unreachable_sets_are_refused_before_the_start(
    hub, tmp_path, monkeypatch
):
    write_set(tmp_path / "set", 1)
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    hub.gated.add("org/set")
    read = lambda source: read_run(
        [f"--data.sources={source}", "--run-dir=run", "--model.vocab_size=256"], command="x"
    )
    with refused("'org/none'", hub.address, "HF_TOKEN"):
        read("hf://org/none")
    with refused("'v9'", "org/set"):
        read("hf://org/set@v9")
    with refused("org/set", f"{hub.address}/datasets/org/set", "HF_TOKEN"):
        read("hf://org/set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused("org/other", "HF_HUB_OFFLINE", "--repo-type dataset"):
        read("hf://org/other")
    assert not Path("run").exists()


def test_offline_after_a_download(hub, tmp_path, monkeypatch):
    """A second start needs no network, nor the downloaded files."""
    expected = write_set(tmp_path / "set", 2)
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    assert opened_tokens("hf://org/set") == tokens_of(*expected)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.forget()
    for file in (tmp_path / "hub").rglob("*.parquet"):
        file.unlink()
    assert opened_tokens("hf://org/set") == tokens_of(*expected)
    hub.forget()
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "another"))
    with refused("hf://org/set", "HF_HUB_OFFLINE"):
        opened_tokens("hf://org/set")  # neither tokens nor files


def test_killed_download_and_tokenization_are_continued(hub, tmp_path):
    expected = write_set(tmp_path / "set", 5)
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    stalled = "data/train-00003-of-00005.parquet"
    hub.stalled.add(stalled)
    program = (
        "import sys, jaxdist.data.corpus as corpus\n"
        "from jaxdist.data.__main__ import main\n"
        "corpus.PART_BYTES = 1\n"
        "main(sys.argv[1:])\n"
    )
    environment = {**os.environ, **hub.environment, "HF_HUB_CACHE": str(tmp_path / "hub")}
    words = [sys.executable, "-c", program, "hf://org/set", "--out", "tokens"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE) as process:
        parts = lambda: len(list(Path(".tokens.parts").glob("*/0000[0-2]/corpus.json")))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None and parts() < 3:
            time.sleep(0.05)
        time.sleep(0.3)  # the server sends half of the fourth file
        process.send_signal(signal.SIGKILL)
    assert parts() == 3 and not Path("tokens").exists()
    hub.stalled.clear()
    before = list(hub.sent)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert corpus_tokens(Corpus("tokens")) == tokens_of(*expected)
    again = [name for name in hub.sent[len(before) :] if not name.startswith("README")]
    assert [name.partition("+")[0] for name in again] == [stalled], again
    assert not Path(".tokens.parts").exists()
    data_command(["set/data/train*", "--out", "local"])
    assert Corpus("tokens").fingerprint == Corpus("local").fingerprint


def test_conversations_of_several_parts(hub, tmp_path, monkeypatch):
    """Weights are joined like tokens."""
    monkeypatch.setattr("jaxdist.data.corpus.PART_BYTES", 1)
    for number in range(3):
        row = {"prompt": f"question {number}", "completion": " an answer" * (number + 1)}
        path = tmp_path / "set" / f"train-{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row) + "\n")
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    data_command(["hf://org/set", "--out", "parts", "--records", "completion"])
    monkeypatch.setattr("jaxdist.data.corpus.PART_BYTES", 1 << 20)
    data_command(["set", "--out", "one", "--records", "completion"])
    parts, one = Corpus("parts"), Corpus("one")
    assert parts.fingerprint == one.fingerprint and len(parts._shards) == 3
    np.testing.assert_array_equal(parts.document_ends, one.document_ends)
    weights = [corpus.weights(0, corpus.num_tokens) for corpus in (parts, one)]
    np.testing.assert_array_equal(*weights)


def test_damaged_file_is_named(hub, tmp_path):
    write_set(tmp_path / "set", 2)
    (tmp_path / "set" / "data" / "train-00001-of-00002.parquet").write_bytes(b"PAR1 damaged")
    hub.store("datasets", "org/set", tmp_path / "set", OLD)
    with refused(f"hf://org/set@{OLD}/data/train-00001-of-00002.parquet"):
        opened_tokens("hf://org/set")
    assert not list((tmp_path / "cache").rglob("corpus.json"))
