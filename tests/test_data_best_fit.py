"""Best fit by the lengths of documents: the rows of best-fit decreasing, for millions at once."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxdist.data import DataConfig, best_fit, open_datasets
from jaxdist.data.best_fit import BestFitPlan, best_fit_runs
from jaxdist.data.corpus import Corpus
from jaxdist.data.packing import fit_documents


def write_corpus(folder, lengths, weights=None):
    folder.mkdir()
    total, ends = int(lengths.sum()), np.cumsum(lengths)
    (np.arange(total) % 251).astype("u1").tofile(folder / "tokens-00000.bin")
    ends.astype("<u8").tofile(folder / "documents.bin")
    shards = [{"file": "tokens-00000.bin", "num_tokens": total}]
    about = {
        "format": "jaxdist-tokens-1", "text_format": 2, "dtype": "|u1", "num_tokens": total,
        "num_documents": len(ends), "vocab_size": 256, "records": "text", "shards": shards,
        "tokenizer": {"name": "bytes", "fingerprint": "bytes-end0", "end_id": 0, "eos_token": ""},
        "chat_template": "plain", "fingerprint": "f" * 32,
    }  # fmt: skip
    if weights is not None:
        weights.astype("u1").tofile(folder / "weights-00000.bin")
        about |= {"weights": [{**shards[0], "file": "weights-00000.bin"}], "records": "chat"}
    (folder / "corpus.json").write_text(json.dumps(about))
    return Corpus(folder)


def free_spaces(lengths, seq_len):
    """Return the sorted free spaces of rows by best-fit decreasing, one piece at a time."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else seq_len) - length)
    return sorted(free)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_best_fit_decreasing(seed):
    random = np.random.default_rng(seed)
    seq_len = int(random.integers(2, 70))
    lengths = random.integers(1, seq_len, random.integers(1, 400))
    if seed % 2:
        lengths = np.minimum(random.geometric(0.2, 300), seq_len - 1)
    counts = np.bincount(lengths, minlength=seq_len)
    runs = best_fit_runs(counts, seq_len)
    seen, spaces = {length: [] for length in range(seq_len)}, []
    for row in range(int(runs.starts[-1])):
        spaces.append(seq_len)
        for length, first, count in runs.pieces(row):
            seen[length] += range(first, first + count)
            spaces[-1] -= length * count
    assert sorted(spaces) == free_spaces(lengths, seq_len)
    assert all(sorted(ids) == list(range(counts[length])) for length, ids in seen.items())


@pytest.mark.parametrize("drop_long", [False, True])
@pytest.mark.parametrize("span", [(0, 1.0), (0, 0.7), (0.7, 1.0)])
def test_pieces_are_those_of_earlier_versions(tmp_path, monkeypatch, drop_long, span):
    monkeypatch.setattr(best_fit, "_BLOCK", 32)
    monkeypatch.setattr(best_fit, "_GROUP", 8)
    random = np.random.default_rng(1)
    lengths = np.where(random.random(300) < 0.8, random.integers(0, 20, 300), 70)
    corpus = write_corpus(tmp_path / "corpus", lengths)
    start, stop = (int(np.cumsum(lengths)[int(share * 299)]) * (share > 0) for share in span)
    arguments = {"corpus": corpus, "start": start, "stop": stop, "seq_len": 16}
    plans = [make(**arguments, drop_long=drop_long) for make in (fit_documents, BestFitPlan)]
    pieces = [sorted(p for i in range(plan.num_rows) for p in plan.pieces(i)) for plan in plans]
    assert plans[0].num_rows == plans[1].num_rows > 30 and pieces[0] == pieces[1]
    assert max(sum(n for _, n in plans[1].pieces(i)) for i in range(plans[1].num_rows)) == 16


def test_pieces_of_cut_documents_without_a_learned_token_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(best_fit, "_BLOCK", 32)
    monkeypatch.setattr(best_fit, "_GROUP", 8)
    random = np.random.default_rng(2)
    lengths = np.where(random.random(200) < 0.5, random.integers(2, 17, 200), 60)
    weights = random.random(lengths.sum()) < 0.03
    corpus = write_corpus(tmp_path / "corpus", lengths, weights)
    plan = BestFitPlan(corpus=corpus, start=0, stop=int(lengths.sum()), seq_len=16, drop_long=False)
    pieces = sorted(p for i in range(plan.num_rows) for p in plan.pieces(i))
    expected, dropped, start = [], 0, 0
    for length in lengths.tolist():
        cuts = [(at, min(16, length - 1 - at)) for at in range(0, length - 1, 16)]
        for at, size in cuts:
            is_learned = weights[start + at + 1 : start + at + size + 1].any()
            expected += [(start + at, size)] * bool(len(cuts) == 1 or is_learned)
            dropped += len(cuts) > 1 and not is_learned
        start += length
    assert pieces == expected and dropped > 50


SCRIPT = """
import sys, time
from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.config import about_tokens
import grain, pyarrow, tokenizers
status = lambda: {line.split(":")[0]: line.split()[1:] for line in open("/proc/self/status")}
before, began = int(status()["VmRSS"][0]), time.process_time()
config = DataConfig(sources=[sys.argv[1]], packing=sys.argv[2])
train, held = open_datasets(config, seq_len=2048)
assert train.num_rows > 4_000_000 and held.num_rows > 80_000 and train.fingerprint
print(time.process_time() - began, (int(status()["VmHWM"][0]) - before) / 1e3)
"""


def test_ten_million_documents_open_in_a_second_and_little_memory(tmp_path):
    lengths = np.random.default_rng(0).lognormal(6.4, 1.0, 10_000_000).astype(np.int64) + 2
    folder = tmp_path / "tokens"
    write_corpus(folder, lengths[:1])
    ends = np.cumsum(lengths).astype("<u8")
    ends.tofile(folder / "documents.bin")
    with (folder / "tokens-00000.bin").open("wb") as file:
        file.truncate(int(ends[-1]))  # 10 GB without blocks
    about = json.loads((folder / "corpus.json").read_text())
    about |= {"num_tokens": int(ends[-1]), "num_documents": len(ends)}
    about["shards"][0]["num_tokens"] = int(ends[-1])
    (folder / "corpus.json").write_text(json.dumps(about))
    for packing in ("stream", "documents", "best_fit"):
        command = [sys.executable, "-c", SCRIPT, str(folder), packing]
        result = subprocess.run(command, capture_output=True, text=True)
        assert not result.returncode, result.stderr
        seconds, megabytes = map(float, result.stdout.split())
        assert seconds <= 1 and megabytes <= 100


def test_the_order_of_a_row_number_is_pure(tmp_path):
    lengths = np.random.default_rng(3).integers(2, 40, 500)
    write_corpus(tmp_path / "corpus", lengths)
    config = DataConfig(sources=[str(tmp_path / "corpus")], packing="best_fit")
    one, two = (open_datasets(config, seq_len=16)[0] for _ in range(2))
    numbers = np.random.default_rng(4).permutation(one.num_rows)
    assert np.array_equal(
        one.rows(numbers)["tokens"], two.rows(np.sort(numbers))["tokens"][numbers]
    )
