"""Order, mixing, splits and packing: which rows exist, and when training uses them."""

import json

import grain
import numpy as np
import pytest
from commands import Fork
from data_cases import cache, open_text, write_text  # noqa: F401

from jaxdist.data import Order, best_fit
from jaxdist.data.best_fit import BestFitPlan, best_fit_runs
from jaxdist.data.corpus import Corpus
from jaxdist.data.packing import fit_documents

pytestmark = pytest.mark.smoke


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_each_epoch_uses_every_row_once(size):
    order = Order([size], [], seed=3)
    for epoch in range(3):
        samples = np.arange(epoch * size, (epoch + 1) * size)
        assert sorted(order.rows(samples)) == list(range(size))


def test_epochs_and_seeds_are_ordered_differently():
    def orders(seed, epoch):
        return Order([1000], [], seed).rows(np.arange(1000) + 1000 * epoch)

    # Two independent orders of 1000 rows agree in 1 position on average, almost never in 10.
    kinds = [orders(0, 0), orders(0, 1), orders(1, 0), orders(1, 1), orders(2, 0)]
    for i, one in enumerate(kinds):
        for other in kinds[:i]:
            assert (one == other).sum() < 10


def test_every_row_is_equally_likely_at_every_position():
    counts = np.zeros((7, 7))
    for seed in range(1000):
        rows = Order([7], [], seed).rows(np.arange(7))
        counts[np.arange(7), rows] += 1
    expected = 1000 / 7
    # Chi-square with 36 degrees of freedom: 99.99 % of fair orders stay below 80.
    assert ((counts - expected) ** 2 / expected).sum() < 80


def test_large_orders_have_no_trace_of_the_storage_order():
    rows = Order([10**10], [], 0).rows(np.arange(100_000))
    assert len(np.unique(rows)) == 100_000
    assert rows.max() > 9.9e9
    # Correlation of 1e5 independent pairs: standard deviation 0.003.
    assert abs(np.corrcoef(np.arange(100_000), rows)[0, 1]) < 0.015
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.015


def test_order_is_pinned():
    """A checkpoint of an earlier version must get the same order; otherwise raise STATE_VERSION."""
    assert Order([1000], [], 7).rows(np.array([0, 1, 999, 1000, 123456])).tolist() == PINNED
    mixed = Order([10, 1000], [0.25, 0.75], 7).rows(np.arange(8)).tolist()
    assert mixed == PINNED_MIXED


PINNED = [531, 750, 580, 726, 177]
PINNED_MIXED = [8, 992, 7, 195, 186, 9, 502, 787]


def test_mixing_keeps_the_shares_at_any_step_and_epochs_within_each_source():
    sizes, weights = [30, 1000, 7], [5.0, 3.0, 2.0]
    rows = Order(sizes, weights, 0).rows(np.arange(20000))
    starts = np.cumsum([0, *sizes])
    for part, share in enumerate([0.5, 0.3, 0.2]):
        mine = (starts[part] <= rows) & (rows < starts[part + 1])
        seen = np.cumsum(mine)
        # A golden-ratio spread stays within a few samples of the exact share.
        assert np.abs(seen - share * np.arange(1, 20001)).max() < 8
        own = rows[mine] - starts[part]
        end = len(own) // sizes[part] * sizes[part]
        for epoch in own[:end].reshape(-1, sizes[part])[:50]:
            assert sorted(epoch) == list(range(sizes[part]))


def test_mixing_continues_after_a_period():
    rows = Order([100_000, 100_000], [1.0, 1.0], 0).rows(np.arange(140_000))
    assert len(np.unique(rows)) == 140_000


def test_stream_rows_are_consecutive_windows_and_targets_the_next_token(text):
    train, held = open_text(text, eval_fraction=0.0)
    stream = np.frombuffer(text.read_bytes() + b"\0", np.uint8)
    assert held is None
    assert train.num_rows == 1000 // 16
    batch = train.rows(np.array([3, 0, 61]))
    for row, index in enumerate([3, 0, 61]):
        at = index * 16
        np.testing.assert_array_equal(batch["tokens"][row], stream[at : at + 16])
        np.testing.assert_array_equal(batch["targets"][row], stream[at + 1 : at + 17])
    assert batch["weights"].min() == 1
    assert "segments" not in batch


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(32, 1), (33, 2), (34, 2), (48, 2)])
def test_a_row_needs_a_target_for_its_last_input(tmp_path, num_tokens, num_rows):
    path = tmp_path / "short.txt"
    path.write_text("x" * (num_tokens - 1))  # plus the end token
    train, _ = open_text(path, eval_fraction=0.0)
    assert train.num_rows == num_rows
    assert train.rows(np.arange(num_rows))["targets"].shape == (num_rows, 16)


def test_held_out_tokens_are_the_end_of_the_stream_and_never_trained_on(text):
    train, held = open_text(text, eval_fraction=0.2)
    stream = np.frombuffer(text.read_bytes() + b"\0", np.uint8)
    cut = round(1001 * 0.8)
    trained = train.rows(np.arange(train.num_rows))
    tested = held.rows(np.arange(held.num_rows))
    np.testing.assert_array_equal(trained["tokens"].ravel(), stream[: train.num_rows * 16])
    np.testing.assert_array_equal(tested["tokens"].ravel(), stream[cut : cut + held.num_rows * 16])
    assert train.num_rows * 16 + 1 <= cut  # the last target is before the cut too


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_held_out_documents_are_complete(tmp_path, packing):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": chr(65 + i) * 20}) + "\n" for i in range(26)))
    train, held = open_text(path, packing=packing, seq_len=32, eval_fraction=0.25)
    seen = [set(np.unique(d.rows(np.arange(d.num_rows))["tokens"])) - {0} for d in (train, held)]
    assert not seen[0] & seen[1]
    assert 65 in seen[0]
    assert 89 in seen[1]


def test_eval_sources_replace_the_held_out_part(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("other " * 40)
    train, held = open_text(text, eval_sources=[str(other)])
    assert train.num_rows == 1000 // 16
    assert held.num_rows == 240 // 16
    assert held.tokenizer.decode(held.rows(np.array([0]))["tokens"][0]).startswith("other other")


def documents_file(tmp_path, lengths):
    path = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": chr(i + 1) * n}) for i, n in enumerate(lengths)]
    path.write_text("\n".join(lines))
    return path


def check_packed(batch):
    for tokens, targets, weights, segments, positions in zip(
        *(batch[k] for k in ("tokens", "targets", "weights", "segments", "positions")), strict=True
    ):
        for at in range(len(tokens)):
            if segments[at] == 0:
                assert weights[at] == 0
                continue
            started = at == 0 or segments[at] != segments[at - 1]
            assert positions[at] == (0 if started else positions[at - 1] + 1)
            if not started:  # a segment has only one document, ended by byte 0
                assert tokens[at] in (tokens[at - 1], 0)
                assert tokens[at - 1] != 0
            if weights[at]:
                assert targets[at] in (tokens[at], 0)
                assert tokens[at] != 0
            else:
                assert tokens[at] == 0


def test_packed_windows_mark_documents(tmp_path):
    lengths = [3, 1, 0, 40, 7, 8, 2, 16, 15, 5]  # document "8" ends at a row boundary
    path = documents_file(tmp_path, lengths)
    train, _ = open_text(path, packing="documents", eval_fraction=0.0)
    batch = train.rows(np.arange(train.num_rows))
    check_packed(batch)
    stream = b"".join(bytes([i + 1]) * n + b"\0" for i, n in enumerate(lengths) if n)
    assert bytes(batch["tokens"].ravel().astype(np.uint8)) == stream[: batch["tokens"].size]
    assert batch["segments"].min() == 1


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_rows_hold_every_document_once_and_cut_only_long_ones(tmp_path, seed):
    lengths = np.random.default_rng(seed).integers(1, 50, 60)
    path = documents_file(tmp_path, lengths)
    train, _ = open_text(path, packing="best_fit", eval_fraction=0.0)
    batch = train.rows(np.arange(train.num_rows))
    check_packed(batch)
    inputs = batch["tokens"][batch["segments"] > 0]
    # Each document of n bytes has n inputs: its end token is only ever a target.
    np.testing.assert_array_equal(np.bincount(inputs, minlength=61)[1:], lengths)
    for document, length in enumerate(lengths, start=1):
        rows = np.flatnonzero((batch["tokens"] == document).any(1))
        assert len(rows) == -(-length // 16)
    # Never more than one row worse than first fit's bound (Johnson 1973): 11/9 optimum + 1.
    assert train.num_rows <= 11 / 9 * np.ceil(lengths.sum() / 16) + 1


def test_a_dataset_is_a_source_for_grain(text):
    train, _ = open_text(text)
    shuffled = grain.MapDataset.source(train).seed(1).shuffle()
    assert shuffled[0]["tokens"].shape == (16,)
    assert len(shuffled) == train.num_rows


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
import numpy as np
from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.config import about_tokens
import grain, pyarrow, tokenizers
status = lambda: {line.split(":")[0]: line.split()[1:] for line in open("/proc/self/status")}
before, began = int(status()["VmRSS"][0]), time.process_time()
config = DataConfig(sources=[sys.argv[1]], packing=sys.argv[2])
train, held = open_datasets(config, seq_len=2048)
assert train.num_rows > 4_000_000 and held.num_rows > 80_000 and train.fingerprint
assert len(train.rows(np.array([train.num_rows // 2]))["tokens"]) == 1
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
        process = Fork("-c", SCRIPT, folder, packing)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        seconds, megabytes = map(float, out.split())
        assert seconds <= 1 and megabytes <= 100
