"""Batch sizes and lengths of rows that change at given steps: data, learning rate, training."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run_here
from data_cases import sharding_on

from jaxdist.config import RunConfig, read_run
from jaxdist.config.command_line import stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch, position_ids_of
from jaxdist.core.step import TrainConfig
from jaxdist.core.step.shapes import steps_for
from jaxdist.data import DataConfig, Loader, Position, open_datasets, resume_position
from jaxdist.data.packing import divide_rows
from jaxdist.optim import OptimConfig, make_lr_schedule
from jaxdist.plan.__main__ import main as plan
from jaxdist.run.data_checks import with_steps
from jaxdist.run.metrics_log import read_records
from jaxdist.run.setup import assemble
from jaxdist.tools.spike import main as spike

BATCHES, LENGTHS = ["0:4", "3:8", "7:16"], ["0:8", "5:16", "9:32"]
SHAPES = [(4, 8)] * 3 + [(8, 8)] * 2 + [(8, 16)] * 2 + [(16, 16)] * 2 + [(16, 32)] * 9
"""Samples and length of rows of steps 1, 2, ... with these schedules."""


def train_config(**settings):
    return TrainConfig(**{"global_batch_size": 16, "seq_len": 32, **settings})


def test_stages_are_those_of_a_walk_over_the_steps():
    config = train_config(batch_schedule=BATCHES, seq_schedule=LENGTHS)
    samples = 0
    for step, shape in enumerate(SHAPES):
        stage = [one for one in config.stages if one.first_step <= step][-1]
        assert stage.shape == shape and config.samples_before(step) == samples
        in_tokens = config.in_stage(stage)
        assert in_tokens.global_batch_size * in_tokens.seq_len == shape[0] * 32
        assert [steps_for(config.stages, samples + n) for n in (1, shape[0])] == [step + 1] * 2
        samples += shape[0]
    assert train_config().stages == [(0, 0, 16, 32)]


def test_stages_after_tokens_begin_with_the_first_step_after_them():
    config = train_config(
        batch_schedule=["0:4", "385tokens:8", "2e3tokens:16"], seq_schedule=["0:8", "1000tokens:32"]
    )
    tokens, boundaries = 0, [385, 2000, 1000]
    first = {}
    for step in range(40):
        for boundary in boundaries:
            if tokens >= boundary:
                first.setdefault(boundary, step)
        tokens += 32 * [one for one in config.stages if one.first_step <= step][-1].batch_size
    assert [stage.first_step for stage in config.stages] == sorted([0, *first.values()])


def test_microbatches_are_not_larger_than_those_of_the_largest_batch():
    config = train_config(batch_schedule=BATCHES, seq_schedule=LENGTHS, num_microbatches=4)
    counts = [config.in_stage(stage).num_microbatches for stage in config.stages]
    assert counts == [1, 2, 2, 4, 4]
    odd = train_config(batch_schedule=["0:6", "1:16"], num_microbatches=4)
    assert odd.in_stage(odd.stages[0]).num_microbatches == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_schedule": ["4"]}, ["STEP:NUMBER"]),
        ({"batch_schedule": ["2:8", "4:16"]}, ["begin at step 0"]),
        ({"batch_schedule": ["0:8", "4:12"]}, ["global_batch_size=12"]),
        ({"batch_schedule": ["0:0", "4:16"]}, ["no 0"]),
        ({"batch_schedule": ["0:32", "4:16"]}, ["global_batch_size=32"]),
        ({"batch_schedule": ["0:4", "4:8", "4:16"]}, ["0, 4, 4"]),
        ({"seq_schedule": ["0:12", "4:32"]}, ["12 does not divide"]),
        ({"seq_schedule": ["0:8", "1e6tokens:16", "9:32"]}, ["0, 1954, 9"]),
        ({"seq_schedule": ["x"], "batch_schedule": ["1:16"]}, ["batch_schedule", "seq_schedule"]),
    ],
)
def test_wrong_schedules_are_rejected(settings, words):
    problems = train_config(**settings).problems()
    assert all(any(word in problem for problem in problems) for word in words), problems


def problems_of(*flags):
    try:
        read_run(["--train.seq_schedule=0:32,9:128", *flags], command="x")
    except Exception as error:
        return str(error)
    return ""


def test_lengths_need_texts_that_can_be_cut(tmp_path):
    assert not problems_of() and not problems_of("--data.packing=documents")
    for flags, word in (
        (["--data.packing=best_fit"], "best_fit"),
        (["--data.records=completion"], "completion"),
        (["--data.sources=rows:make"], "rows:make"),
        (["--model=cnn", "--data.sources=rows:make"], "model.kind=cnn"),
        (["--model=custom", "--model.factory=a:b"], "model.kind=custom"),
    ):
        text = problems_of(*flags)
        assert "train.seq_schedule with" in text and word in text


def test_mesh_that_does_not_divide_a_stage_is_rejected():
    train = TrainConfig(batch_schedule=["0:4", "9:16"], seq_schedule=["0:2", "5:128"])
    config = RunConfig(train=train)
    assert not config.mesh_problems(MeshSpec.parse("dp=4,tp=2", 8))
    for mesh, words in (
        ("dp=8", []),  # 4 samples are 256 rows of 2 tokens, but step 6 has 4 rows
        ("cp=2,dp=4", ["cp=2 does not divide", "from step 1 on"]),
        ("tp=4,dp=2", ["tp × cp = 4", "not 2"]),
    ):
        text = " ".join(config.mesh_problems(MeshSpec.parse(mesh, 8)))
        assert text and all(word in text for word in words), (mesh, text)
    assert "from step 6 on" in " ".join(config.mesh_problems(MeshSpec.parse("dp=8", 8)))
    assert config.choose_mesh(8)[0].num_replicas <= 4


def test_learning_rate_is_a_function_of_step_and_batch():
    """The reference is the closed form: cosine of the step, times the factor of the batch."""
    batches = [(0, 4), (3, 8), (7, 16)]
    rows = np.array([4] * 3 + [8] * 4 + [16] * 13)
    steps = np.arange(20)
    settings = {"peak_lr": 0.5, "warmup_steps": 5, "min_lr_ratio": 0.25}
    cosine = 0.5 * (1 + np.cos(np.pi * np.clip((steps - 5) / 15, 0, 1)))
    expected = np.where(steps < 5, 0.5 * (steps + 1) / 6, 0.125 + 0.375 * cosine)
    for scaling, factor in (("none", 1), ("linear:8", rows / 8), ("sqrt:8", np.sqrt(rows / 8))):
        config = OptimConfig(lr_scaling=scaling, **settings)
        schedule = make_lr_schedule(config, total_steps=20, global_batch_size=16, batches=batches)
        assert np.allclose(schedule(jnp.arange(20)), expected * factor, rtol=1e-6)


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        folder = Path(name)
        folder.mkdir()
        for number in range(40):
            (folder / f"{number}.txt").write_text(f"{name}{number} " * rng.integers(1, 60))


def opened(packing="documents", seq_len=32, **settings):
    config = DataConfig(sources=["a"], tokenizer="bytes", packing=packing, eval_fraction=0.0)
    return open_datasets(config, seq_len=seq_len, **settings)[0]


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_parts_of_rows_are_the_rows_of_that_length(text, packing):
    rows, shorter = opened(packing), opened(packing, seq_len=8)
    divided = divide_rows(rows.rows(np.arange(rows.num_rows)), 4)
    expected = shorter.rows(np.arange(4 * rows.num_rows))
    assert divided.keys() == expected.keys() and len(rows.fields) == (
        3 if packing == "stream" else 5
    )
    for name, values in expected.items():
        assert np.array_equal(divided[name], values) and divided[name].dtype == values.dtype, name


TRAIN = train_config(batch_schedule=BATCHES, seq_schedule=LENGTHS)


START = Position()


def walk(steps, mesh="dp=1", start=START, **settings):
    """Return batches and digests of the next steps, and the state of the loader."""
    loader = Loader(
        opened(), global_batch_size=16, seed=3, sharding=sharding_on(mesh), start=start,
        **{"stages": TRAIN.stages, **settings},
    )  # fmt: skip
    batches = []
    for _ in range(steps):
        batch = {name: np.asarray(x) for name, x in next(loader).items()}
        batches.append((batch, loader.digest, loader.rows(loader.first_sample)))
    state = json.loads(json.dumps(loader.state()))
    loader.close()
    return batches, state


def test_batches_are_consecutive_samples_cut_to_the_length(text):
    data = opened()
    rows = data.order(3).rows(np.arange(300))
    batches, state = walk(len(SHAPES))
    first = 0
    for (size, length), (batch, _, numbers) in zip(SHAPES, batches, strict=True):
        samples = rows[first : first + size]
        expected = divide_rows(data.rows(samples), 32 // length)
        assert batch["tokens"].shape == (size * 32 // length, length)
        for name, x in expected.items():
            assert np.array_equal(batch[name], x), (first, name)
        assert numbers == samples.tolist()
        first += size
    assert state["next_sample"] == first
    lengths = train_config(batch_schedule=BATCHES).stages
    loader = Loader(
        data, global_batch_size=16, seed=3, sharding=sharding_on("dp=1"), stages=lengths
    )
    next(loader)
    assert loader.digest != batches[0][1]  # the ledger covers the length
    loader.close()


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2", "cp=2,dp=2"])
@pytest.mark.parametrize("stop", [2, 3, 6, 12])
def test_batches_do_not_depend_on_mesh_and_restarts(text, mesh, stop):
    planned, _ = walk(14)
    before, state = walk(stop, mesh)
    position = resume_position(state, opened(), seed=3)
    position = dataclasses.replace(position, step=stop)
    after, _ = walk(14 - stop, "fsdp=4", position)
    in_order = (lambda x: x) if "cp" not in mesh else _in_order
    for number, ((one, first, _), (two, second, _)) in enumerate(
        zip([*before, *after], planned, strict=True)
    ):
        order = in_order if number < stop else lambda x: x
        assert first == second
        assert all(np.array_equal(order(x), two[name]) for name, x in one.items())


def _in_order(values):
    """Return a field [rows, seq] on cp=2 with its positions in ascending order."""
    size = values.shape[1] // 2
    positions = np.concatenate([position_ids_of(i, size, 2) for i in range(2)])
    return values[:, np.argsort(positions)]


def test_skipped_samples_keep_the_shapes(text):
    batches, _ = walk(12, start=Position(0, ((4, 8), (30, 36))))
    numbers = [rows for _, _, rows in batches]
    assert [len(rows) for rows in numbers] == [size for size, _ in SHAPES[:12]]
    order = opened().order(3).rows(np.arange(300))
    firsts = [order.tolist().index(rows[0]) for rows in numbers]
    assert firsts == [0, 8, 12, 16, 36, 44, 52, 60, 76, 92, 108, 124]


def test_epochs_become_the_steps_of_all_stages(text):
    flags = ["--data.sources=a", "--data.tokenizer=bytes", "--model.vocab_size=256"]
    flags += ["--train.seq_len=32", "--train.batch_schedule=0:4,3:8,7:16", "--train.epochs=2"]
    config = read_run(flags, command="x")
    data = open_datasets(config.data, seq_len=32)[0]
    steps = with_steps(config, data).train.steps
    assert steps == 7 + math.ceil((2 * data.num_rows - 12 - 32) / 16)


FLAGS = [
    "--data.sources=a,b", "--data.tokenizer=bytes", "--data.mixture_weights=1,1,6:3/1",
    "--model.vocab_size=256", "--model.d_model=16", "--model.num_layers=2", "--model.num_heads=4",
    "--model.mlp_dim=32", "--train.seq_len=32", "--train.global_batch_size=16",
    "--train.batch_schedule=0:8,4:16", "--train.seq_schedule=0:16,2:32", "--optim.warmup_steps=1",
    "--optim.lr_scaling=sqrt:16", "--eval.interval_steps=0", "--eval.final_max_batches=1",
    "--eval.sample=none", "--monitoring.tracker=", "--checkpoint.save_interval_steps=3",
    "--optim.decay_steps=7", "--data.packing=documents",
]  # fmt: skip


def trained(run):
    return [r for r in read_records(f"{run}/metrics.jsonl") if r["kind"] == "train"]


def reference_losses(config):
    """Return the losses of 8 steps by the steps of three runs without schedules, on one device."""
    data = open_datasets(config.data, seq_len=32, samples_before=config.train.samples_before)[0]
    rows, state, losses, first = data.order(config.seed).rows(np.arange(300)), None, [], 0
    for num_steps, size, length in ((2, 8, 16), (2, 8, 32), (4, 16, 32)):
        changed = ("schedule", "scaling", "seq_len", "train.global_batch_size")
        flags = [flag for flag in FLAGS if not any(name in flag for name in changed)]
        flags += [f"--train.seq_len={length}", f"--train.global_batch_size={size * 32 // length}"]
        flags += [f"--optim.peak_lr={3e-3 * math.sqrt(size / 16)!r}", "--steps=8", "--mesh=dp=1"]
        parts = assemble(read_run(flags, command="x"), jax.devices()[:1])
        state = parts.init_state() if state is None else state
        for _ in range(num_steps):
            batch = divide_rows(data.rows(rows[first : first + size]), 32 // length)
            batch = place_batch(batch, parts.step.batch_sharding)
            state, metrics = parts.step.train(state, batch, math.inf)
            losses.append(float(metrics["loss"]))
            first += size
    return losses


def test_run_is_that_of_its_stages_on_any_mesh(text):
    assert run_here("train", *FLAGS, "--mesh=dp=2,tp=2,cp=2", "--steps=3", "--run-dir=run") == 0
    assert run_here("train", *FLAGS, "--mesh=fsdp=8", "--steps=8", "--run-dir=run") == 0
    lines = trained("run")
    assert [(r["global_batch_size"], r["seq_len"]) for r in lines] == (
        [(16, 16)] * 2 + [(8, 32)] * 2 + [(16, 32)] * 4
    )
    assert [r["first_sample"] for r in lines] == [0, 8, 16, 24, 32, 48, 64, 80]
    config = stored_run("run/config.toml")
    expected = reference_losses(config)
    assert [r["loss"] for r in lines] == pytest.approx(expected, rel=2e-5)
    assert max(np.diff(expected)) < 0  # the parameters change
    sums = [r["tokens/a"] + r["tokens/b"] for r in lines]
    assert sums == [r["tokens"] for r in lines]
    events = [r for r in read_records("run/metrics.jsonl") if r.get("event") == "batch_stage"]
    assert [r["step"] for r in events] == [0, 2, 3, 4]
    compiled = [r for r in read_records("run/metrics.jsonl") if "compile" in r.get("event", "")]
    assert [(r["event"], r["count"]) for r in compiled] == [("compile", 1)] * 4


def test_plan_counts_the_stages(capsys):
    flags = ["--gpus=h100:2", "--compile=false", "--json", "--mesh=dp=2", "--steps=20"]
    small = ["--train.batch_schedule=0:4,10:16", "--train.seq_schedule=0:32,5:128"]
    days, stages = {}, []
    for name, settings in {
        "stages": small,
        "first": ["--train.global_batch_size=16", "--train.seq_len=32"],
        "second": ["--train.global_batch_size=4"],
        "last": [],
    }.items():
        capsys.readouterr()
        assert plan([*flags, *settings]) == 0
        (report,) = json.loads(capsys.readouterr().out)["plans"]
        days[name] = report["step"]["seconds"]
        if name == "stages":
            stages, tokens = report["stages"], report["cost"]["on_demand"]["tokens"]
            total = report["cost"]["on_demand"]["days"] * (1 - report["checkpoints"]["lost"])
    assert tokens == (10 * 4 + 10 * 16) * 128 and len(stages) == 3
    seconds = [stage["seconds"] for stage in stages]
    assert seconds == pytest.approx([days[name] for name in ("first", "second", "last")])
    expected = 5 * seconds[0] + 5 * seconds[1] + 10 * seconds[2]
    assert total * 86400 == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_step_of_a_stage_is_replayed(text, capsys):
    assert run_here("train", *FLAGS, "--mesh=dp=8", "--steps=8", "--run-dir=run") == 0
    for step in (2, 6):
        capsys.readouterr()
        assert run_here("train", f"--replay=run:{step}", "--mesh=dp=8") == 0
        out = capsys.readouterr().out
        assert out.count("the same bits as recorded") == 3 and "verdict: deterministic" in out
    capsys.readouterr()
    assert spike(["run", "2", "--json", "--top=0"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["rows"]) == 8 and {row["source"] for row in result["rows"]} <= {"a", "b"}
    assert result["mean_row_loss"] == pytest.approx(result["loss"], rel=1e-5)
