"""Order, mixing, splits and packing: which rows exist, and when training uses them."""

import json

import grain
import numpy as np
import pytest
from data_cases import open_text, write_text

from jaxdist.data import Order

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path_factory.mktemp("cache")))


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


def test_sample_maps_to_one_row_for_any_query():
    order = Order([50, 70], [0.3, 0.7], 1)
    complete = order.rows(np.arange(500))
    assert np.concatenate(
        [order.rows(np.arange(i, i + 20)) for i in range(0, 500, 20)]
    ).tolist() == (complete.tolist())
    assert order.rows(np.array([499, 3])).tolist() == complete[[499, 3]].tolist()


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


@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_rows_match_the_declared_fields(text, tmp_path, packing):
    other = tmp_path / "other.txt"
    other.write_text("some other text " * 40)
    train, _ = open_text(text, other, packing=packing, eval_fraction=0.0)
    batch = train.rows(np.array([train.num_rows - 1, 0, 1]))
    got = {name: (values.shape, values.dtype) for name, values in batch.items()}
    assert got == {name: ((3, *shape), dtype) for name, (shape, dtype) in train.fields.items()}


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
