"""A custom data pipeline, written with grain, named as module:function."""

import contextlib
import dataclasses
import json
import sys
import textwrap
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

import jaxdist
from jaxdist.config import read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.axes import row_axes
from jaxdist.data import DataConfig, Loader, eval_batches, open_datasets, resume_position
from jaxdist.data.custom import CustomRows, HuggingFaceRows
from jaxdist.data.stream import shard_of
from jaxdist.models import example
from jaxdist.run.data_checks import check_data_fits
from jaxdist.settings import ConfigError

MODULE = """
import grain
import ml_dtypes
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

def values(*, seq_len, seed):
    def make(i):
        return {
            **row(seq_len, 0)(i), "targets": np.full(seq_len, i + 0.25),
            "weights": np.ones(seq_len, int),
            "half": np.float16(i + 0.5), "brain": np.full(2, i + 0.5, ml_dtypes.bfloat16),
            "single": np.float32(i) / 3, "small": np.uint8(i), "long": -i, "mask": i % 2 == 0,
        }
    rows = grain.MapDataset.range(40).map(make)
    return rows[10:], rows[:10]

def points(*, seq_len, seed):
    def make(i):
        x = np.random.default_rng(i).normal(size=(seq_len, 3)).astype(np.float32)
        targets = np.float32(x @ [0.25, -0.5, 0.75] + 0.1)
        zeros = np.zeros(seq_len, int)
        return {"tokens": zeros, "targets": targets, "weights": x[:, 0] ** 2, "x": x}
    return [make(i) for i in range(8)]

def regression(*, seq_len):
    from flax import nnx
    from jaxdist.core.types import Model
    from jaxdist.models.layers import functional
    zeros = nnx.initializers.zeros
    init, axes, bind = functional(
        lambda rngs: nnx.Linear(3, 1, use_bias=False, kernel_init=zeros, rngs=rngs)
    )

    def head(params, _, batch, context):
        return bind(params)(batch["x"])[..., 0], {}

    def squares(output, batch, context):
        weights = batch["weights"]
        return {"loss": (weights * (output - batch["targets"])**2).sum(), "weight": weights.sum()}

    return Model(
        name="regression", init=init, axes=axes, rules={}, head=head, objective=squares, dims={},
        vocab_size=9,
    )

def value_stream(*, seq_len, seed):
    rows, held = values(seq_len=seq_len, seed=seed)
    return rows.to_iter_dataset(), held

def changing(*, seq_len, seed, field, first, last):
    return [{**row(seq_len, 0)(i), field: last if i == 29 else first} for i in range(99)]

def arrays(*, seq_len, seed):
    return np.zeros((3, 4))

def unseeded(*, seq_len):
    return [row(seq_len, 0)(i) for i in range(9)]

def empty(*, seq_len, seed):
    return []

def iterator(*, seq_len, seed):
    return (i for i in range(3))

def gaps(*, seq_len, seed):
    rows = grain.MapDataset.range(100).map(row(seq_len, seed))
    return rows.filter(lambda r: r["tokens"][0] != 107)

def endless(*, seq_len, seed):
    return grain.MapDataset.range(100).map(row(seq_len, seed)).repeat()

def stream(*, seq_len, seed):
    rows = grain.MapDataset.range(60).seed(seed).shuffle().repeat().map(row(seq_len, 0))
    rows = rows.to_iter_dataset().filter(lambda r: r["tokens"][0] % 3 != 0)
    return rows, grain.MapDataset.range(5).map(row(seq_len, 0))

def short(*, seq_len, seed):
    return grain.MapDataset.range(20).map(row(seq_len, 0)).to_iter_dataset()

def nothing_left(*, seq_len, seed):
    return short(seq_len=seq_len, seed=seed).filter(lambda r: False)

class Forgetful(grain.DatasetIterator):
    # Counts on from the start whatever it is told; what it calls its state is not one.
    def __init__(self, state):
        super().__init__()
        self.number, self.state = -1, state

    def __next__(self):
        self.number += 1
        return row(8, 0)(self.number)

    def get_state(self):
        return self.state

    def set_state(self, state):
        pass

class ForgetfulRows(grain.IterDataset):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def __iter__(self):
        return Forgetful(self.state)

def forgetful(*, seq_len, seed):
    return ForgetfulRows({"number": 1})

def stateless(*, seq_len, seed):
    return ForgetfulRows({"number": object()})
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_rows", None)


def open_function(name, **settings):
    config = DataConfig(sources=[f"my_rows:{name}"], **settings)
    return open_datasets(config, seq_len=8, seed=100)


def on_two_devices() -> NamedSharding:
    return NamedSharding(MeshSpec(data=2).build(jax.devices()[:2]), PartitionSpec(row_axes()))


def test_a_grain_pipeline_is_shuffled_and_batched_like_files():
    train, held = open_function("pipeline")
    assert (train.kind, train.num_rows, held.num_rows, train.vocab_size) == ("text", 90, 10, 208)
    loader = Loader(train, global_batch_size=6, seed=1, sharding=on_two_devices())
    starts = [np.asarray(next(loader)["tokens"])[:, 0] for _ in range(15)]
    loader.close()
    assert sorted(np.concatenate(starts)) == list(range(110, 200))
    expected = train.order(1).rows(np.arange(6)) + 110
    np.testing.assert_array_equal(starts[0], expected)
    batches = list(eval_batches(held, global_batch_size=6, sharding=on_two_devices()))
    assert sum(float(b["weights"].sum()) for b in batches) == 10 * 8
    assert batches[0]["tokens"].dtype == np.int32


def test_custom_images():
    train, held = open_function("images")
    assert (train.kind, train.vocab_size, held) == ("images", 12, None)
    batch = train.rows(np.array([3, 1]))
    assert batch["images"].shape == (2, 4, 4, 1)
    assert batch["images"].dtype == np.float32
    assert batch["labels"].tolist() == [3, 1]


def test_fingerprint_follows_rows():
    one, _ = open_function("pipeline")
    assert one.fingerprint == open_function("pipeline")[0].fingerprint
    other, _ = open_datasets(DataConfig(sources=["my_rows:pipeline"]), seq_len=8, seed=101)
    assert other.fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", "'my_rows'.*'nothing'"),
        ("unweighted", "weights.*tokens, targets"),
        ("arrays", "ndarray"),
        ("empty", "has no rows"),
        ("unseeded", "seed"),
        ("iterator", "generator"),
        ("endless", "repeats forever"),
        ("gaps", "row 7 is missing"),
        ("nothing_left", "has no rows"),
        ("forgetful", "resumed: from"),
        ("stateless", "resumed: its state"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(name, error):
    with pytest.raises(ConfigError, match=error):
        train, _ = open_function(name)
        train.rows(np.arange(train.num_rows))


def test_all_requirements_of_a_function_are_reported_together():
    with pytest.raises(ConfigError, match="the only source"):
        open_function("pipeline", eval_sources=["stdlib"])
    with refused("no_such:rows", "named 'no_such'"):
        open_datasets(DataConfig(sources=["no_such:rows"]), seq_len=8)


def test_a_row_of_another_shape_is_named():
    train, _ = open_function("ragged")
    with refused("tokens of row 5", "(9,)", "(8,)"):
        train.rows(np.arange(12))


FIELDS = {
    "tokens": "int32", "targets": "float32", "weights": "float32", "half": "float32",
    "brain": "float32", "single": "float32", "small": "int32", "long": "int32", "mask": "bool",
}  # fmt: skip


@pytest.mark.parametrize(("name", "workers"), [("values", 0), ("values", 1), ("value_stream", 0)])
def test_fields_keep_their_values(name, workers):
    train, held = open_function(name)
    options = {"global_batch_size": 6, "sharding": on_two_devices()}
    loader = Loader(train, seed=1, num_workers=workers, **options)
    for batch in (next(loader), next(eval_batches(held, **options))):
        fields = {field: np.asarray(value) for field, value in batch.items() if field in FIELDS}
        assert {field: str(value.dtype) for field, value in fields.items()} == FIELDS
        number = fields["tokens"][:, 0].astype(np.float64)
        np.testing.assert_array_equal(fields["targets"], number[:, None] + np.full(8, 0.25))
        np.testing.assert_array_equal(fields["half"], number + 0.5)
        np.testing.assert_array_equal(fields["brain"][:, 1], number + 0.5)
        np.testing.assert_array_equal(fields["single"], number.astype(np.float32) / np.float32(3))
        np.testing.assert_array_equal(fields["small"], number)
        np.testing.assert_array_equal(fields["long"], -number)
        np.testing.assert_array_equal(fields["mask"], number % 2 == 0)
    loader.close()


@pytest.mark.parametrize(
    ("field", "first", "last", "facts"),
    [
        ("own", 1, 2**31, ["own of row 29", "2147483648", "int32"]),
        ("own", 1, -(2**31) - 1, ["own of row 29", "-2147483649"]),
        ("own", 1, np.uint64(2**63), ["own of row 29", "9223372036854775808"]),
        ("own", 1.0, 1e39, ["own of row 29", "float32"]),
        ("own", 1, 0.5, ["own of row 29", "float64", "int32"]),
        ("own", True, 2, ["own of row 29", "int64", "bool"]),
        ("own", 1, "x", ["own of row 29", "<U1"]),
        ("own", [1, 2], [[1], [2, 3]], ["own of row 29", "shape"]),
        ("own", 1j, 1j, ["own has dtype complex128"]),
        ("own", "x", "x", ["own has dtype <U1"]),
        ("own", None, None, ["own has dtype object"]),
        ("own", [[1], [2, 3]], 0, ["own has dtype object"]),
        ("tokens", [0.5] * 8, 0, ["tokens has dtype float64", "integers"]),
        ("segments", [True] * 8, 0, ["segments has dtype bool", "integers"]),
    ],
)
def test_fields_that_a_batch_cannot_hold_are_rejected(field, first, last, facts):
    import my_rows

    rows = my_rows.changing(seq_len=8, seed=0, field=field, first=first, last=last)
    with refused("my_rows", *facts):
        CustomRows(rows, "my_rows").rows(np.arange(99))


def test_a_row_without_a_field_is_named():
    import my_rows

    rows = my_rows.changing(seq_len=8, seed=0, field="own", first=1, last=1)
    del rows[29]["own"]
    with refused("own of row 29", "missing"):
        CustomRows(rows, "my_rows").rows(np.arange(99))


def test_only_a_custom_model_accepts_targets_that_are_no_classes():
    train, _ = open_function("values")
    for flags, is_rejected in (
        ([], True),
        (["--model=custom", "--model.factory=jaxdist.models.example:build"], False),
    ):
        parts = SimpleNamespace(config=read_run(flags, command=""), model=example.build(seq_len=8))
        with refused("targets", "float32") if is_rejected else contextlib.nullcontext():
            check_data_fits(parts, train)


def test_a_regression_on_float_targets_equals_numpy():
    optim = {"optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "peak_lr": 0.1}
    settings = {
        "model": {"kind": "custom", "factory": "my_rows:regression"},
        "data": {"sources": ["my_rows:points"]},
        "train": {"seq_len": 8, "global_batch_size": 8},
        "optim": {**optim, "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1e6},
        "monitoring": {"tracker": []},
    }
    result = jaxdist.train(settings, steps=4, mesh="dp=8", run_dir="run", progress=False)
    import my_rows

    rows = my_rows.points(seq_len=8, seed=0)
    x, y, weights = (np.concatenate([r[f] for r in rows]) for f in ("x", "targets", "weights"))
    w, losses = np.zeros(3), []
    for _ in range(4):
        error = x.astype(np.float64) @ w - y
        losses.append((weights * error**2).sum() / weights.sum())
        w -= 0.1 * 2 * (weights * error) @ x / weights.sum()
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)  # float32
    assert losses[-1] < losses[0] / 2


def starts(loader, count):
    return [np.asarray(next(loader)["tokens"])[:, 0].tolist() for _ in range(count)]


def test_a_stream_trains_in_its_own_order_and_resumes_exactly():
    train, held = open_function("stream")
    assert (train.kind, held.num_rows) == ("text", 5)
    assert train.fingerprint == open_function("stream")[0].fingerprint
    settings = {"seed": 1, "sharding": on_two_devices()}
    complete = Loader(train, global_batch_size=4, **settings)
    batches = starts(complete, 6)
    assert batches[0] != sorted(batches[0])
    assert all(start % 3 for batch in batches for start in batch)
    assert complete.rows(8) == [8, 9, 10, 11]
    complete.close()
    loader = Loader(train, global_batch_size=4, prefetch=3, **settings)
    assert starts(loader, 2) == batches[:2]
    state = json.loads(json.dumps(loader.state()))
    loader.close()
    position = resume_position(state, train, seed=1)
    resumed = Loader(train, global_batch_size=4, start=position, **settings)
    assert (starts(resumed, 4), resumed.first_sample) == (batches[2:], 20)
    resumed.close()
    # Two of the old batches in one of the new, and samples 16 to 19 left out.
    position = dataclasses.replace(position, left_out=((16, 20),))
    larger = Loader(train, global_batch_size=8, start=position, **settings)
    assert starts(larger, 1) == [batches[2] + batches[3]]
    assert larger.state()["iterators"][0]["sample"] == 16
    assert (starts(larger, 1)[0][:4], larger.first_sample) == (batches[5], 20)
    larger.close()


def test_a_stream_that_ends_is_an_error_and_not_an_epoch():
    train, _ = open_function("short")
    loader = Loader(train, global_batch_size=8, seed=0, sharding=on_two_devices())
    starts(loader, 2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="sample 16"):
            next(loader)
    loader.close()


def test_a_stream_rejects_workers_and_a_resume_rejects_other_streams():
    train, _ = open_function("stream")
    settings = {"global_batch_size": 4, "seed": 0, "sharding": on_two_devices()}
    with pytest.raises(ConfigError, match=r"data\.num_workers=2"):
        Loader(train, **settings, num_workers=2)
    loader = Loader(train, **settings)
    next(loader)
    state = loader.state()
    loader.close()
    with refused("data changed"):
        resume_position(state, open_function("short")[0], seed=0)
    split = dataclasses.replace(resume_position(state, train, seed=0), iterators=({}, {}))
    with pytest.raises(ConfigError, match="2 readers"):
        Loader(train, **settings, start=split)


def test_shards_follow_the_rows_that_processes_hold():
    first, second = {(0, 4)}, {(4, 8)}
    assert shard_of({0: first, 1: second}, 1, "x") == (1, 2)
    assert shard_of({0: first, 1: second, 2: first, 3: second}, 2, "x") == (0, 2)  # pipeline
    assert shard_of({0: {(0, 2), (4, 6)}, 1: {(2, 4), (6, 8)}}, 1, "x") == (1, 2)
    for held in ({0: first, 1: first | second}, {0: {(0, 2)}, 1: {(2, 8)}}):
        with pytest.raises(ConfigError, match="shard_index"):
            shard_of(held, 0, "x")


def hugging_face_rows():
    datasets = pytest.importorskip("datasets", reason="needs .[reference] (datasets)")
    random = np.random.default_rng(0)
    rows, expected = [], []
    for length in random.integers(3, 18, 40).tolist():
        ids, mask = random.integers(1, 60, length), np.ones(length, int)
        labels = np.where(random.random(length) < 0.3, -100, ids)
        mask[length - 1 :] = length % 2
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask, "text": "x"})
        arrays = {"tokens": np.zeros(16), "targets": np.zeros(16), "weights": np.zeros(16)}
        for at in range(length - 1):
            arrays["tokens"][at] = ids[at]
            if labels[at + 1] != -100 and mask[at + 1]:
                arrays["targets"][at], arrays["weights"][at] = labels[at + 1], 1
        expected.append(arrays)
    return datasets.Dataset.from_list(rows), expected


def test_rows_of_empty_texts_learn_nothing():
    rows = HuggingFaceRows([{"input_ids": []}, {"input_ids": [5], "attention_mask": [1]}], 4)
    assert not any(values.any() for row in (rows[0], rows[1]) for values in row.values())


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_rows_of_hugging_face_datasets_are_shifted_and_padded(form):
    rows, expected = hugging_face_rows()
    train, _ = open_datasets(
        DataConfig(sources=["python:rows"]), seq_len=16, python_source=rows.with_format(form)
    )
    assert train.num_rows == 40 and train.kind == "text"
    for field, values in train.rows(np.arange(40)).items():
        assert np.array_equal(values, np.stack([row[field] for row in expected]))
    config = DataConfig(sources=["python:rows"])
    train, _ = open_datasets(config, seq_len=15, python_source=rows)
    with refused("17 input_ids", "train.seq_len=15"):
        train.rows(np.arange(40))


def test_torch_and_hugging_face_datasets_train_alike(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs .[reference] (PyTorch)")
    import jaxdist

    monkeypatch.chdir(tmp_path)
    rows, expected = hugging_face_rows()

    class Rows(torch.utils.data.Dataset):
        __len__ = lambda self: 40

        def __getitem__(self, index):
            row = expected[index]
            ids = {name: torch.tensor(row[name]).long() for name in ("tokens", "targets")}
            return {**ids, "weights": torch.tensor(row["weights"])}

    forms = [Rows(), rows, {"train": rows, "test": rows.select(range(8))}]
    runs = [
        jaxdist.train(
            data=data, steps=3, mesh="dp=8", progress=False,
            model={"d_model": 16, "num_layers": 1, "num_heads": 2, "mlp_dim": 16, "vocab_size": 64},
            train={"seq_len": 16, "global_batch_size": 8}, eval={"interval_steps": 0},
        )
        for data in forms
    ]  # fmt: skip
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert [len(run.evaluations) for run in runs] == [0, 0, 1]
