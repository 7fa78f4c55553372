"""A pipeline of the user's own, written with grain, named as module:function."""

import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.axes import row_axes
from jaxdist.core.types import ConfigError
from jaxdist.data import DataConfig, Loader, eval_batches, open_datasets

MODULE = """
import grain
import numpy as np

def row(seq_len, seed):
    def make(i):
        tokens = np.arange(i, i + seq_len + 1) + seed
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": np.ones(seq_len)}
    return make

def pipeline(*, seq_len, seed):
    rows = grain.MapDataset.range(100).map(row(seq_len, seed))
    return rows[10:], rows[:10]

def images(*, seq_len, seed):
    return [{"images": np.full((4, 4, 1), i), "labels": i, "weights": 1} for i in range(12)]

def ragged(*, seq_len, seed):
    return [row(seq_len + (i == 5), 0)(i) for i in range(120)]

def unweighted(*, seq_len, seed):
    return [{"tokens": np.zeros(4), "targets": np.zeros(4)}]

def arrays(*, seq_len, seed):
    return np.zeros((3, 4))

def empty(*, seq_len, seed):
    return []

def iterator(*, seq_len, seed):
    return (i for i in range(3))
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_rows", None)


def open_function(name, **settings):
    config = DataConfig(sources=[f"my_rows:{name}"], **{"vocab_size": 300, **settings})
    return open_datasets(config, seq_len=8, seed=100)


def on_two_devices() -> NamedSharding:
    return NamedSharding(MeshSpec(data=2).build(jax.devices()[:2]), PartitionSpec(row_axes()))


def test_a_grain_pipeline_is_shuffled_and_batched_like_files():
    train, held = open_function("pipeline")
    assert (train.kind, train.num_rows, held.num_rows, train.vocab_size) == ("text", 90, 10, 300)
    loader = Loader(train, global_batch_size=6, seed=1, sharding=on_two_devices())
    starts = [np.asarray(next(loader)["tokens"])[:, 0] for _ in range(15)]
    loader.close()
    assert sorted(np.concatenate(starts)) == list(range(110, 200))
    expected = train.order(1).rows(np.arange(6)) + 110
    np.testing.assert_array_equal(starts[0], expected)
    batches = list(eval_batches(held, global_batch_size=6, sharding=on_two_devices()))
    assert sum(float(b["weights"].sum()) for b in batches) == 10 * 8
    assert batches[0]["tokens"].dtype == np.int32


def test_images_of_ones_own():
    train, held = open_function("images", vocab_size=12)
    assert (train.kind, train.vocab_size, held) == ("images", 12, None)
    batch = train.rows(np.array([3, 1]))
    assert batch["images"].shape == (2, 4, 4, 1)
    assert batch["images"].dtype == np.float32
    assert batch["labels"].tolist() == [3, 1]


def test_fingerprint_follows_rows():
    one, _ = open_function("pipeline")
    assert one.fingerprint == open_function("pipeline")[0].fingerprint
    other, _ = open_datasets(
        DataConfig(sources=["my_rows:pipeline"], vocab_size=300), seq_len=8, seed=101
    )
    assert other.fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", "cannot be loaded: module 'my_rows' has no attribute 'nothing'"),
        ("unweighted", r"rows without weights \(they have: tokens, targets\)"),
        ("arrays", "rows of type ndarray, not dicts"),
        ("empty", "has no rows"),
        ("iterator", "returned generator, which has no random access"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(name, error):
    with pytest.raises(ConfigError, match=error):
        open_function(name)


def test_what_a_function_needs_is_said_at_once():
    with pytest.raises(ConfigError, match="stands alone") as caught:
        open_function("pipeline", eval_sources=["stdlib"], vocab_size=0)
    assert "Set data.vocab_size" in caught.value.problems[1]
    with pytest.raises(ConfigError, match="No module named 'no_such'"):
        open_datasets(DataConfig(sources=["no_such:rows"], vocab_size=9), seq_len=8)


def test_a_row_of_another_shape_is_named():
    train, _ = open_function("ragged")
    with pytest.raises(ConfigError, match=r"tokens of row 5 has shape \(9,\), the first row has"):
        train.rows(np.arange(12))
