"""Trackers and event files get every point of a run, and none of their errors reaches it."""

import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from monitored import crc32c, scalars, start, tensorboard_events, train

import jaxdist
from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run.metrics_log import read_records
from jaxdist.run.monitoring import trackers
from jaxdist.run.monitoring.trackers import Identity, Trackers, run_id_of

pytestmark = pytest.mark.usefixtures("propagating")

ROOT = Path(__file__).parent.parent
IDENTITY = Identity(
    run_id=run_id_of(1.0), name="run", settings={"train.steps": 4, "name": "x"}, directory="."
)
GOT: list = []


class Notebook:
    """Tracker that stores its calls; subclasses fail in the way that their names describe."""

    def __init__(self, **identity):
        GOT.append(identity)

    def log(self, step, values):
        GOT.append((step, dict(values)))

    def finish(self, summary):
        GOT.append(summary)


class Breaking(Notebook):
    def log(self, step, values):
        raise ConnectionError("no route to the tracker")


HELD = threading.Event()


class Stuck(Notebook):
    def log(self, step, values):
        HELD.wait()


@pytest.fixture(autouse=True)
def nothing_yet():
    GOT.clear()


def named(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def warnings_of(caplog) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


def test_a_run_and_its_restart_are_one_run_of_a_tracker(tmp_path):
    config = {
        "model": {"d_model": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 64},
        "train": {"seq_len": 32, "global_batch_size": 16},
        "eval": {"interval_steps": 0, "final_max_batches": 2},
        "monitoring": {"log_interval_steps": 1},
        "run_dir": tmp_path / "run",
    }
    tracker = {"monitoring.tracker": [named(Notebook), named(Breaking)]}
    for steps in (2, 3):
        run = jaxdist.train({**config, **tracker}, steps=steps, progress=False)
    first, *_, again = [entry for entry in GOT if isinstance(entry, dict) and "run_id" in entry]
    assert first["run_id"] == again["run_id"] and len(first["run_id"]) == 16
    assert (first["name"], again["settings"]["train.steps"]) == ("run", 3)
    points = [entry for entry in GOT if isinstance(entry, tuple)]
    losses = [values["train/loss"] for _, values in points if "train/loss" in values]
    assert losses == run.losses
    assert [step for step, values in points if "eval/loss" in values] == [2, 3]
    ends = [entry["exit_reason"] for entry in GOT if "exit_reason" in entry]
    assert ends == ["finished", "finished"]  # of the tracker that did not fail


def test_a_failing_tracker_is_named_once_and_disabled(caplog):
    both = Trackers([named(Breaking), named(Notebook), "no_such_module:f"], IDENTITY)
    for step in (1, 2, 3):
        both.log(step, {"train/loss": 1.0})
    both.finish({"exit_reason": "finished"})
    assert sorted(w.split()[1] for w in warnings_of(caplog)) == sorted(
        [named(Breaking), "no_such_module:f"]
    )
    assert [entry[0] for entry in GOT if isinstance(entry, tuple)] == [1, 2, 3]


def test_a_tracker_that_hangs_delays_nothing(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "_MAX_QUEUED", 5)
    monkeypatch.setattr(trackers, "_FINISH_S", 0.05)
    stuck = Trackers([named(Stuck)], IDENTITY)
    for step in range(4):
        stuck.log(step, {})
    stuck.close()
    full = Trackers([named(Stuck)], IDENTITY)
    for step in range(9):
        full.log(step, {})
    full.close()
    HELD.set()
    assert len(warnings_of(caplog)) == 2


@pytest.mark.parametrize("name", ["wandb2", "module", "a:b:c"])
def test_a_name_that_is_no_tracker_is_refused(name):
    assert len(MonitoringConfig(tracker=[name]).problems()) == 1
    assert MonitoringConfig(tracker=["my.module:make"]).problems() == []


@pytest.mark.parametrize(
    ("reason", "preempted", "exit_code"),
    [
        ("finished", 0, 0),
        ("stopped_by_callback", 0, 0),
        ("stopped_early", 0, 0),
        ("preempted", 1, 1),  # wandb's state of a nonzero code after `mark_preempting`: preempted
        ("error", 0, 1),
    ],
)
def test_wandb_counts_only_failures_as_failed(monkeypatch, reason, preempted, exit_code):
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = Trackers(["wandb"], IDENTITY)
    tracker.finish({"exit_reason": reason})
    run = wandb.init.return_value
    run.finish.assert_called_once_with(exit_code=exit_code)
    assert run.mark_preempting.call_count == preempted


@pytest.mark.slow
def test_wandb_keeps_a_restarted_run_together(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    identity = Identity(run_id="00ab", name="run", settings={"a": 1}, directory=str(tmp_path))
    for steps in ((1, 2), (2, 3)):
        tracker = Trackers(["wandb"], identity)
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.finish({"exit_reason": "finished", "loss": 0.5})
        assert not tracker._workers
    runs = sorted((tmp_path / "wandb").glob("offline-run-*-00ab"))
    assert runs and all(list(path.glob("run-00ab.wandb")) for path in runs)


@pytest.mark.slow
def test_mlflow_keeps_a_restarted_run_together(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    for steps in ((1, 2), (2, 3)):
        tracker = Trackers(["mlflow"], IDENTITY)
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.finish({"exit_reason": "finished", "loss": 0.5})
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("jaxdist").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [
        (1, 1.0), (2, 0.5), (2, 0.5), (3, 1 / 3)
    ]  # fmt: skip
    assert run.data.params["train.steps"] == "4" and run.data.metrics["summary/loss"] == 0.5
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")


def test_reference_crc_is_castagnoli():
    assert crc32c(b"123456789") == 0xE3069283


def test_tensorboard_has_curves_and_config(tmp_path):
    config = MonitoringConfig(log_interval_steps=2)
    monitor = start(tmp_path, config, total_steps=6, config_text="[model]\nd_model = 8")
    for step in range(1, 7):
        train(monitor, step, applied=jnp.asarray(True))
    monitor.eval(6, {"loss": 0.5})
    monitor.close()
    points = scalars(monitor.run.tensorboard)
    loss = [(step, value) for step, tag, value in points if tag == "train/loss"]
    assert loss == [(s, float(np.float32(1 / s))) for s in (1, 2, 4, 6)]  # the first is shown too
    assert (6, "eval/loss", 0.5) in points and (6, "train/applied", 1.0) in points
    assert (6, "speed/tokens_per_s", 200.0) in points
    texts = [
        value.tensor.string_val[0].decode()
        for event in tensorboard_events(monitor.run.tensorboard)
        for value in event.summary.value
        if value.WhichOneof("value") == "tensor"
    ]
    assert len(texts) == 1 and "d_model = 8" in texts[0]


def test_tensorboard_imports_no_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    program = (
        "from jaxdist.run.monitoring.trackers import TensorBoard; TensorBoard('board').close(); "
        "import torch"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.stderr.strip(), len(list((tmp_path / "board").iterdir()))) == ("imported", 1)


def test_statistics_of_layers_are_one_event_and_a_curve_each(tmp_path):
    monitor = start(tmp_path, MonitoringConfig(layer_statistics_steps=2), total_steps=6)
    for step in range(1, 5):
        measured = {"grad_norm": {"embed/table": jnp.float32(step), "layers/up": jnp.arange(2.0)}}
        train(monitor, step, layer_statistics=measured)
    monitor.close()
    records = [r for r in read_records(monitor.run.metrics) if r.get("event") == "layer_statistics"]
    assert [r["step"] for r in records] == [2, 4]
    assert records[0]["grad_norm"] == {"embed/table": 2.0, "layers/up": [0.0, 1.0]}
    points = scalars(monitor.run.tensorboard)
    assert {(2, "grad_norm/embed/table", 2.0), (4, "grad_norm/layers/up/001", 1.0)} <= set(points)
    assert not any("layer_statistics" in r for r in read_records(monitor.run.metrics))


def test_diverged_losses_reach_tensorboard_without_warnings(tmp_path, caplog):
    monitor = start(tmp_path, MonitoringConfig(log_interval_steps=1))
    train(monitor, 1, loss=math.nan)
    monitor.close()
    (point,) = [p for p in scalars(monitor.run.tensorboard) if p[1] == "train/loss"]
    assert math.isnan(point[2])
    assert not [r for r in caplog.records if r.name.startswith("tensorboardX")]
