"""Mixtures that change: a pure function of the sample, and the only accepted change of data."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import run_here
from data_cases import sharding_on
from refusals import refused

from jaxdist.data import DataConfig, Loader, Order, open_datasets, resume_position
from jaxdist.data.order import MixtureStage
from jaxdist.run.metrics_log import read_records
from jaxdist.tools.spike import main

SIZES, STARTS = [70, 90, 50], [0, 70, 160, 210]
BATCH = 8


def part_of(rows):
    return np.searchsorted(STARTS, rows, side="right") - 1


def test_every_part_continues_its_epochs_through_all_stages():
    stages = [
        MixtureStage(0, (0, 1), (3.0, 1.0)), MixtureStage(400, (0, 2), (1.0, 1.0)),
        MixtureStage(500, (1,)), MixtureStage(570, (0, 1, 2), (1.0, 1.0, 2.0)),
    ]  # fmt: skip
    samples = np.arange(1300)
    rows = Order(SIZES, [], 5, stages=stages).rows(samples)
    plain = Order(SIZES, [1.0, 1.0, 1.0], 5).rows(np.arange(6000))
    for part in range(3):  # the sequence of a part does not depend on the mixture
        drawn = rows[part_of(rows) == part]
        assert np.array_equal(drawn, plain[part_of(plain) == part][: len(drawn)])
    ends = [*(stage.first_sample for stage in stages[1:]), len(rows)]
    for stage, end in zip(stages, ends, strict=True):
        counts = np.bincount(part_of(rows[stage.first_sample : end]), minlength=3)
        weights = np.zeros(3)
        weights[list(stage.parts)] = stage.weights or (1.0,)
        expected = weights / weights.sum() * (end - stage.first_sample)
        assert np.abs(counts - expected).max() < 3
    shuffled = np.random.default_rng(0).permutation(samples)
    assert np.array_equal(Order(SIZES, [], 5, stages=stages).rows(shuffled), rows[shuffled])


def test_stages_by_size_are_one_shuffled_pass():
    stages = [
        MixtureStage(0, (0, 2)),
        MixtureStage(60, (1, 2), (1.0, 1.0)),
        MixtureStage(100, (0, 2)),
    ]
    rows = Order(SIZES, [], 5, stages=stages).rows(np.arange(160))
    both = np.concatenate([rows[:60], rows[100:]])  # the pass continues after the other stage
    of_two = np.r_[0:70, 160:210]
    assert sorted(both) == sorted(of_two)
    joint = Order([70, 50], [], 5).rows(np.arange(120))
    assert np.array_equal(both, of_two[joint])


def opened(**settings):
    config = DataConfig(tokenizer="bytes", eval_fraction=0.0, **settings)
    return open_datasets(config, seq_len=8, samples_before=lambda step: step * BATCH)[0]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, length in (("a", 90), ("b", 60), ("c", 70)):
        Path(f"{name}.txt").write_text("".join(f"{name} {i} " for i in range(length)))


def walk(dataset, steps, mesh="dp=2", **start):
    loader = Loader(dataset, global_batch_size=BATCH, seed=3, sharding=sharding_on(mesh), **start)
    batches = [(np.asarray(next(loader)["tokens"]), loader.digest) for _ in range(steps)]
    state = json.loads(json.dumps(loader.state()))
    loader.close()
    return batches, state


OLD = {"sources": ["a.txt", "b.txt"]}
NEW = {"sources": ["a.txt", "b.txt", "c.txt"], "mixture_weights": ["0:size/size/0", "5:1/0/3"]}


def resumed(state, **settings):
    return resume_position(state, opened(**settings), seed=3)


def test_declared_change_continues_the_ledger_on_any_mesh(files):
    before, state = walk(opened(**OLD), 5)
    planned, _ = walk(opened(**NEW), 12)
    after, _ = walk(opened(**NEW), 7, mesh="fsdp=4", start=resumed(state, **NEW))
    for one, two in zip([*before, *after], planned, strict=True):
        assert np.array_equal(one[0], two[0]) and one[1] == two[1]
    undisturbed, _ = walk(opened(**OLD), 6)
    assert undisturbed[5][1] != planned[5][1]
    of_c = [sum(ord("c") in row for row in tokens) for tokens, _ in planned]
    assert of_c[:5] == [0] * 5 and 30 <= sum(of_c[5:]) <= 46
    # A change of the second stage, after the checkpoint of the first one, is declared too.
    _, state = walk(opened(**OLD, mixture_weights=[1.0, 2.0]), 5)
    resumed(state, **NEW | {"mixture_weights": [1.0, 2.0, 0.0, "9:0/1/1"]})
    two = {**OLD, "mixture_weights": [1.0, 2.0, "5:2/1", "9:0/1"]}
    resumed(state, **two)
    _, state = walk(opened(**two), 7)
    resumed(state, **OLD, mixture_weights=[1.0, 2.0, "5:2/1", "8:1/1"])


@pytest.mark.parametrize(
    "change",
    [
        {"mixture_weights": [1.0, 1.0]},
        {"sources": ["a.txt", "b.txt", "c.txt"]},
        {"sources": ["a.txt", "c.txt"]},
        NEW | {"mixture_weights": ["0:size/size/0", "4:1/0/3"]},
        NEW | {"mixture_weights": ["5:1/0/3"]},
        NEW | {"sources": ["c.txt", "a.txt", "b.txt"]},
    ],
    ids=["weights", "added", "replaced", "past", "first", "order"],
)
def test_undeclared_change_is_rejected(files, change):
    _, state = walk(opened(**OLD), 5)
    with refused("data changed", "data.mixture_weights"):
        resumed(state, **OLD | change)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mixture_weights": ["5:1"]}, "1 numbers for 2 sources"),
        ({"mixture_weights": ["5:1/x"]}, "STEP:WEIGHT"),
        ({"mixture_weights": ["5:1/size"]}, "mixes size"),
        ({"mixture_weights": ["5:1/1", "5:1/2"]}, "increasing steps"),
        ({"mixture_weights": ["5:0/0"]}, "remove its source"),
        ({"mixture_weights": [0.0, 1.0]}, "never used"),
        ({"sources": ["a.txt"], "mixture_weights": ["5:1"]}, "several sources"),
    ],
)
def test_wrong_stages_are_rejected(files, settings, word):
    with refused(word):
        opened(**OLD | settings)


def test_passes_count_what_is_drawn():
    stages = [
        MixtureStage(0, (0, 1), (3.0, 1.0)), MixtureStage(400, (0, 2)),
        MixtureStage(500, (1, 2), (1.0, 1.0)),
    ]  # fmt: skip
    for given in ((), stages):
        order = Order(SIZES, [], 5, stages=given)
        for samples in (1, 390, 400, 470, 900):
            drawn = np.bincount(part_of(order.rows(np.arange(samples))), minlength=3)
            passes = np.array(order.passes(samples))
            # A joint order is counted as its average.
            assert passes @ SIZES == pytest.approx(samples)
            assert np.abs(passes * SIZES - drawn).max() <= 12


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ("passes:1", "1 limits for 2"),
        ("passes:x/1", "passes:LIMIT"),
        ("passes:0/1", "never used"),
    ],
)
def test_wrong_limits_are_rejected(files, limits, word):
    with refused(word):
        opened(**OLD, mixture_weights=[1.0, 1.0, limits])


def test_run_that_needs_more_passes_is_rejected(files):
    flags = [*FLAGS, "--data.sources=a.txt,b.txt", "--mesh=dp=8"]
    data = opened(**OLD, mixture_weights=[3.0, 1.0])
    parts, _ = data.part_of(data.order(0).rows(np.arange(8 * 500)))
    drawn = np.cumsum(parts)[7::8]  # rows of the second source after each step
    steps = int(np.count_nonzero(drawn <= 1.5 * data.parts[1].num_rows))
    limited = "--data.mixture_weights=3,1,passes:-/1.5"
    with refused("'b.txt'", "allows 1.5", f"train.steps={steps}"):
        run_here("train", *flags, limited, f"--steps={steps + 9}", "--run-dir=run")
    assert not Path("run").exists()
    flags = [*flags, "--data.mixture_weights=1,1,passes:9/-"]
    assert run_here("train", *flags, "--steps=2", "--run-dir=run") == 0


FLAGS = [
    "--data.tokenizer=bytes", "--model.vocab_size=256", "--model.d_model=16",
    "--model.num_layers=1", "--model.num_heads=2", "--model.mlp_dim=16", "--train.seq_len=8",
    "--train.global_batch_size=8", "--optim.warmup_steps=1", "--eval.interval_steps=0",
    "--monitoring.tracker=", "--checkpoint.save_interval_steps=4", "--data.eval_fraction=0",
]  # fmt: skip
CHANGED = ["--data.sources=a.txt,b.txt,c.txt", "--data.mixture_weights=0:size/size/0,4:1/0/3"]


@pytest.mark.slow
def test_declared_change_of_a_run_is_replayed(files, capsys):
    old = [*FLAGS, "--data.sources=a.txt,b.txt"]
    assert run_here("train", *old, "--steps=4", "--mesh=dp=8", "--run-dir=run") == 0
    with refused("data changed", "mixture_weights"):
        run_here("train", *FLAGS, CHANGED[0], "--steps=7", "--mesh=dp=8", "--run-dir=run")
    flags = [*FLAGS, *CHANGED, "--steps=7"]
    assert run_here("train", *flags, "--mesh=dp=4,fsdp=2", "--run-dir=run") == 0
    assert run_here("train", *flags, "--mesh=dp=8", "--run-dir=planned") == 0
    ledgers = [
        [r["data_ledger"] for r in read_records(f"{run}/metrics.jsonl") if r["kind"] == "train"]
        for run in ("run", "planned")
    ]
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) == 7
    for step in (3, 6):  # both from checkpoints with the settings before the change
        capsys.readouterr()
        assert run_here("train", f"--replay=run:{step}", "--mesh=dp=8") == 0
        assert f"rows of step {step}" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["run", "6", "--json", "--top=0"]) == 0
    sources = [
        row["source"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ]
    assert set(sources) == {"a.txt", "c.txt"} and sources.count("c.txt") >= 5
    text = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(text.replace('"4:1/0/3"', '"4:1/0/2"'))
    with refused("step 5", "digest"):
        run_here("train", "--replay=run:6", "--mesh=dp=8")


@pytest.mark.parametrize(
    "mesh", ["dp=2,cp=2,tp=2", pytest.param("pp=2,dp=4", marks=pytest.mark.product)]
)
def test_metrics_have_loss_and_tokens_of_each_source(files, mesh):
    flags = [f for f in FLAGS if "num_layers" not in f and "batch_size" not in f]
    flags += [f"--mesh={mesh}", "--train.loss_chunk_tokens=32", "--model.num_layers=2"]
    flags += ["--train.global_batch_size=16"]
    data = ["--data.sources=a.txt,b.txt,c.txt", "--data.mixture_weights=0:3/1/0,2:0/1/1"]
    assert run_here("train", *flags, *data, "--steps=4", "--run-dir=run") == 0
    records = [r for r in read_records("run/metrics.jsonl") if r["kind"] == "train"]
    assert [{k for k in r if k.startswith("loss/")} for r in records] == (
        [{"loss/a.txt", "loss/b.txt"}] * 2 + [{"loss/b.txt", "loss/c.txt"}] * 2
    )
    total = dict.fromkeys(("a.txt", "b.txt", "c.txt"), 0)
    for record in records:
        drawn = {s: record.get(f"tokens/{s}", 0) - n for s, n in total.items()}
        loss = sum(record.get(f"loss/{s}", 0) * n for s, n in drawn.items()) / 128
        assert loss == pytest.approx(record["loss"], rel=1e-5)
        total = {s: n + drawn[s] for s, n in total.items()}
        assert sum(total.values()) == record["tokens"]
    assert abs(total["a.txt"] - 8 * 24) <= 8  # 3 of 4 rows of 2 steps
    assert not [name for name in records[0] if name.startswith("row_")]


def test_loss_of_a_source_is_that_of_its_rows(files, capsys):
    """The reference are the row losses of `data spike`, from a separate forward pass."""
    data = ["--data.sources=a.txt,b.txt", "--data.mixture_weights=3,1"]
    assert run_here("train", *FLAGS, *data, "--steps=3", "--mesh=dp=8", "--run-dir=run") == 0
    record = [r for r in read_records("run/metrics.jsonl") if r["kind"] == "train"][2]
    capsys.readouterr()
    assert main(["run", "3", "--json", "--top=0"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    for source in ("a.txt", "b.txt"):
        losses = [row["loss"] for row in rows if row["source"] == source]
        assert losses and record[f"loss/{source}"] == pytest.approx(np.mean(losses), rel=1e-4)
