"""Bad losses are detected and recorded with their rows; the run skips, rolls back or stops."""

import dataclasses
import json
import math
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as reference
from commands import losses, records, run_here, tiny
from data_cases import sharding_on
from refusals import refused

from jaxdist.config.resilience import ResilienceConfig
from jaxdist.data import DataConfig, Loader, Position, open_datasets, resume_position
from jaxdist.data.order import Order
from jaxdist.run import session
from jaxdist.run.metrics_log import current, read_records
from jaxdist.run.resilience import anomalies
from jaxdist.run.resilience.anomalies import LossGuard, Stopped, read_anomalies
from jaxdist.run.session import Session

ROWS, BATCH, STEPS = 320, 8, 40
BAD_ROW = 77

MODULE = f"""
import numpy as np

def row(index, seq_len, bad):
    tokens = (np.arange(seq_len + 1) + index) % 7
    weights = np.ones(seq_len)
    if bad == "nan" and index == {BAD_ROW}:
        weights[3] = np.nan
    if bad == "spike" and index == {BAD_ROW}:
        tokens = np.random.default_rng(0).integers(0, 256, seq_len + 1)
        weights[:] = 1000.0
    return {{"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}}

def rows(bad):
    def make(*, seq_len, seed):
        found = [row(i, seq_len, bad) for i in range({ROWS})]
        return found, found[:8]
    return make

clean, nan, spike = rows(""), rows("nan"), rows("spike")
"""


def bad_step(seed: int = 0) -> int:
    """Return the step of the first epoch whose batch has the bad row, from the data order alone."""
    rows = Order([ROWS], [], seed).rows(np.arange(ROWS))
    return int(np.flatnonzero(rows == BAD_ROW)[0]) // BATCH + 1


SEED = next(seed for seed in range(99) if 34 <= bad_step(seed) <= 37)


class Rows:
    """Stand-in for a loader, with the method that a guard uses."""

    left_out = ()

    def rows(self, first_sample):
        return list(range(first_sample, first_sample + 4))


def guard(path=None, **settings) -> LossGuard:
    return LossGuard(ResilienceConfig(**settings), path)


def feed(subject: LossGuard, losses, first_step=1, **metrics):
    results = []
    for step, loss in enumerate(losses, start=first_step):
        values = {"loss": loss, "grad_norm": 1.0, **metrics}
        results.append(subject.check(step, values, Rows(), 4 * step))
    return [anomaly for anomaly in results if anomaly]


def noisy(count, level=3.0, noise=0.05, slope=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return list(level + slope * np.arange(count) + noise * rng.normal(size=count))


def test_a_spike_is_detected_and_recorded_with_its_rows(tmp_path):
    path = tmp_path / "anomalies.jsonl"
    (anomaly,) = feed(guard(path), [*noisy(40), 5.0, *noisy(20)])
    assert (anomaly.step, anomaly.kind, anomaly.action) == (41, "loss_spike", "report")
    assert anomaly.rows == [164, 165, 166, 167]
    assert read_anomalies(path) == [anomaly]
    assert "step 41: loss 5 is above" in str(anomaly) and "rows 164, 165" in str(anomaly)


def test_every_parser_of_json_can_read_an_anomaly(tmp_path):
    path = tmp_path / "anomalies.jsonl"
    (anomaly,) = feed(guard(path), [math.nan])
    constants = []
    json.loads(path.read_text(), parse_constant=constants.append)
    assert constants == [] and math.isnan(read_anomalies(path)[0].loss)
    assert read_anomalies(path)[0].limit == anomaly.limit == math.inf


def test_a_line_truncated_by_a_kill_damages_no_other(tmp_path):
    path = tmp_path / "anomalies.jsonl"
    for last in (5.0, 6.0, 7.0):
        assert len(feed(guard(path), [*noisy(40), last])) == 1
        if last == 6.0:
            path.write_bytes(path.read_bytes()[:-20])
    assert [anomaly.loss for anomaly in read_anomalies(path)] == [5.0, 7.0]


@pytest.mark.parametrize(
    "values",
    [
        noisy(300),
        noisy(300, noise=0.0),
        noisy(300, noise=0.5),
        noisy(100, level=8, slope=-0.05),
        [8.0 * 0.9**n for n in range(80)],
        noisy(200, slope=0.002),
        [9.0, 1.0] * 100,
        [*[3.0] * 40, 3.03],
    ],
    ids=["noise", "constant", "loud", "falling", "steep", "drifting", "two_levels", "wrinkle"],
)
def test_a_normal_run_reports_nothing(values):
    assert feed(guard(), values) == []


def test_limit_equals_median_plus_deviations(monkeypatch):
    monkeypatch.setattr(anomalies, "SPIKE_DEVIATIONS", 5.0)
    monkeypatch.setattr(anomalies, "SPIKE_WINDOW_STEPS", 16)
    subject = guard()
    values = noisy(40, noise=0.3)
    feed(subject, values)
    recent = np.array(values[39 - 17 : 39])  # steps up to 39 are known when 41 is dispatched
    recent = recent[-16:]
    median = np.median(recent)
    expected = median + 5 * 1.4826 * np.median(np.abs(recent - median))
    assert subject.limit(41) == pytest.approx(expected, rel=1e-12)


def test_limit_is_the_same_in_a_resumed_run():
    subject, values = guard(), noisy(60)
    feed(subject, values[:40])
    resumed = guard()
    resumed.restore(json.loads(json.dumps(subject.state())))
    feed(subject, values[40:], first_step=41)
    feed(resumed, values[40:], first_step=41)
    assert resumed.limit(61) == subject.limit(61) < math.inf


def test_nan_is_an_anomaly_but_an_overflow_under_a_loss_scale_is_not():
    assert [o.kind for o in feed(guard(), [math.nan, math.inf, 1.0])] == ["nonfinite_loss"] * 2
    assert [o.kind for o in feed(guard(), [1.0], grad_norm=math.inf)] == ["nonfinite_loss"]
    assert feed(guard(), [1.0], grad_norm=math.inf, loss_scale=1024.0) == []


def test_too_many_rollbacks_end_the_run(monkeypatch):
    monkeypatch.setattr(anomalies, "MAX_ROLLBACKS", 2)
    subject = guard(nonfinite_policy="rollback")
    actions = [o.action for o in feed(subject, [math.nan] * 3)]
    assert actions == ["rollback", "rollback", "stop"]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    (tmp_path / "bad_rows.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    return open_datasets(DataConfig(sources=["bad_rows:clean"]), seq_len=8)[0]


def test_skipped_batches_are_missing_and_the_others_keep_their_order(dataset):
    settings = {"global_batch_size": 4, "seed": 3, "sharding": sharding_on("dp=2")}
    complete = Loader(dataset, **settings)
    expected = [jax.device_get(next(complete)["tokens"]) for _ in range(7)]
    loader = Loader(dataset, **settings, start=Position(0, ((8, 12), (12, 16))))
    firsts, batches = [], []
    for _ in range(4):
        batches.append(jax.device_get(next(loader)["tokens"]))
        firsts.append(loader.first_sample)
    state = json.loads(json.dumps(loader.state()))
    batches.append(jax.device_get(next(loader)["tokens"]))
    assert firsts == [0, 4, 16, 20]
    for batch, expected_batch in zip(batches, [expected[i] for i in (0, 1, 4, 5, 6)], strict=True):
        assert np.array_equal(batch, expected_batch)
    position = resume_position(state, dataset, seed=3)
    assert (position.sample, position.left_out) == (24, ((8, 12), (12, 16)))
    assert loader.rows(4) == [int(row) for row in dataset.order(3).rows(np.arange(4, 8))]
    larger = Loader(dataset, **{**settings, "global_batch_size": 6}, start=Position(0, ((8, 12),)))
    firsts = [(next(larger), larger.first_sample)[1] for _ in range(3)]
    assert firsts == [0, 12, 18]  # a batch from 6 on would reach into them
    for each in (complete, loader, larger):
        each.close()


def test_a_step_above_the_limit_is_not_applied_and_one_below_is():
    # test_parity compiles the same program.
    case = reference.Case("learned", "dp=8", zero=2, microbatches=2, remat="full")
    step, state = reference.step_of(case)
    batch = jax.device_put(reference.batch_of(case.model), step.batch_sharding)
    before = jax.device_get(state.params)
    state, plain = step.train(state, batch, np.inf)
    after = jax.device_get(state.params)
    for limit, applied in ((float(plain["loss"]) - 0.1, False), (math.inf, True)):
        _, state = reference.step_of(case)
        state, metrics = step.train(state, batch, limit)
        assert bool(metrics["applied"]) is applied
        assert float(metrics["loss"]) == float(plain["loss"])
        assert reference.distance(jax.device_get(state.params), after if applied else before) == 0
        assert int(state.step) == 1


JOB = tiny(
    *("--train.seq_len=16", f"--steps={STEPS}", f"--seed={SEED}"),
    *("--checkpoint.save_interval_steps=5", "--checkpoint.max_to_keep=9"),
    "--eval.interval_steps=0",
    *("--model.num_layers=1", "--optim.peak_lr=0.01"),
    # The losses that the policies check fall as fast as those of 256 tokens.
    *("--data.tokenizer=bytes", "--model.vocab_size=256"),
)  # fmt: skip


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "bad_rows.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_rows", raising=False)


def train(name, run_dir, *flags) -> int:
    return run_here(
        "train",
        f"--data.sources=bad_rows:{name}",
        f"--run-dir={run_dir}",
        "--mesh=dp=8",
        *JOB,
        *flags,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("module")
def test_rollback_continues_after_the_offending_batch(tmp_path):
    run_dir = tmp_path / "run"
    assert train("nan", run_dir, "--resilience.nonfinite_policy=rollback") == 0
    bad = bad_step(SEED)
    (anomaly,) = read_anomalies(run_dir / "anomalies.jsonl")
    assert (anomaly.step, anomaly.kind, anomaly.action) == (bad, "nonfinite_loss", "rollback")
    assert BAD_ROW in anomaly.rows
    went_back_to = (bad - 1) // 5 * 5
    (rollback,) = (e for e in records(run_dir, "event") if e["event"] == "rollback")
    assert rollback["step"] == went_back_to
    twice: dict[int, list[float]] = {}
    for record in records(run_dir, "train"):
        twice.setdefault(record["step"], []).append(float(record["loss"]))
    # Steps repeated before the anomaly have the same bits; the offending step is good now.
    assert sorted(twice) == list(range(1, STEPS + 1))
    for step in range(went_back_to + 1, bad):
        assert len(twice[step]) == 2 and twice[step][0] == twice[step][1]
    assert math.isnan(twice[bad][0]) and math.isfinite(twice[bad][1])
    kept = [r for r in current(read_records(run_dir / "metrics.jsonl")) if r["kind"] == "train"]
    assert [r["step"] for r in kept] == list(range(1, STEPS + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["tokens"] == STEPS * BATCH * 16
    document = json.loads((run_dir / f"checkpoints/{STEPS}/meta/metadata").read_text())
    data = document["meta"]["data"]
    assert data["next_sample"] == (STEPS + 1) * BATCH
    assert data["left_out"] == [[(bad - 1) * BATCH, bad * BATCH]]
    assert train("clean", tmp_path / "clean") == 0
    assert not (tmp_path / "clean/anomalies.jsonl").exists()
    healthy = losses(tmp_path / "clean")
    assert all(losses(run_dir)[step] == healthy[step] for step in range(1, bad))


@pytest.mark.slow
@pytest.mark.usefixtures("module")
def test_a_spike_is_skipped_or_stops_the_run(tmp_path):
    run_dir = tmp_path / "run"
    assert train("spike", run_dir, "--resilience.spike_policy=skip") == 0
    (anomaly,) = read_anomalies(run_dir / "anomalies.jsonl")
    assert (anomaly.step, anomaly.kind) == (
        bad_step(SEED),
        "loss_spike",
    ) and BAD_ROW in anomaly.rows
    applied = {r["step"]: r["applied"] for r in records(run_dir, "train")}
    assert [step for step, yes in applied.items() if not yes] == [anomaly.step]
    assert "loss_anomaly" in {r["event"] for r in records(run_dir, "event")}
    with refused("resilience.spike_policy='stop'", f"step {bad_step(SEED)}", error=Stopped):
        train("spike", tmp_path / "stop", "--resilience.spike_policy=stop")
    summary = json.loads((tmp_path / "stop/summary.json").read_text())
    assert summary["exit_reason"] == "loss_spike"


def test_consecutive_skips_ignore_steps_without_labels_and_loss_scale_search():
    subject = guard()
    bad = dict(grad_norm=math.inf, applied=False)
    feed(subject, [1.0] * 16, **bad, loss_scale=2.0)
    assert subject.skipped == 0
    feed(subject, [1.0] * 3, **bad, loss_scale=1.0)
    feed(subject, [None] * 5, weight=0, applied=False)
    assert (subject.skipped, subject.skip_kind) == (3, "nonfinite_loss")
    feed(subject, [1.0], applied=True)
    assert subject.skipped == 0
    feed(subject, [99.0] * 4, grad_norm=1.0, applied=False)
    assert (subject.skipped, subject.skip_kind) == (4, "loss_spike")
    feed(subject, [math.nan], grad_norm=1.0, applied=False)
    assert (subject.skipped, subject.skip_kind) == (5, "nonfinite_loss")


@pytest.mark.slow
def test_a_checkpoint_with_nan_parameters_is_rejected_before_anything_changes(
    tmp_path, monkeypatch
):
    save = Session.save

    def save_nan(self, *args, **kwargs):
        spoiled = jax.tree.map(lambda x: x * jnp.nan, self.state.params)
        self.state = dataclasses.replace(self.state, params=spoiled)
        save(self, *args, **kwargs)

    job = [flag for flag in JOB if not flag.startswith("--steps")]
    flags = [*job, "--mesh=dp=8", f"--run-dir={tmp_path / 'run'}"]
    with monkeypatch.context() as older:
        older.setattr(Session, "save", save_nan)
        older.setattr(session, "nonfinite_names", lambda params: [])
        assert run_here("train", *flags, "--steps=1") == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with refused("checkpoint 1", "NaN", "checkpoints/1"):
        run_here("train", *flags, "--steps=2")
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
