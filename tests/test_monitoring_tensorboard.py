"""Event files, read without TensorFlow and with an independent CRC."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from monitored import crc32c, scalars, start, tensorboard_events, train

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run.metrics_log import read_records

pytestmark = pytest.mark.usefixtures("propagating")


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
