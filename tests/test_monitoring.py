"""Sinks and run directory: exact records, whole lines after a kill, one writer, resume."""

import json
import logging
import math
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.monitoring import (
    Monitor,
    MonitoringConfig,
    RunDirectory,
    current,
    device_seconds,
    environment,
    read_records,
)
from jaxdist.monitoring.records import RecordWriter, decode, encode
from jaxdist.types import ConfigError

QUIET = MonitoringConfig(tensorboard=False, log_every_steps=1)


pytestmark = pytest.mark.usefixtures("propagating")


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def start(tmp_path, config=QUIET, *, total_steps=10, process_index=0, **kwargs) -> Monitor:
    run = RunDirectory.open(tmp_path / "run", process_index=process_index)
    return Monitor(config, run, total_steps=total_steps, **kwargs)


def train(monitor: Monitor, step: int, **metrics) -> None:
    values = {"loss": jnp.float32(1 / step), **metrics}
    monitor.train(step, values, tokens=100, step_time_s=0.5, data_wait_s=0.0)


def of_kind(records, kind):
    return [r for r in records if r["kind"] == kind]


def events(records, name):
    return [r for r in records if r.get("event") == name]


# -- metrics.jsonl ---------------------------------------------------------------------------------


def test_every_finite_float_reads_back_to_the_same_bits():
    draw = random.Random(0)
    patterns = [draw.getrandbits(64) for _ in range(2000)] + [1, 1 << 63, 0x7FEFFFFFFFFFFFFF]
    values = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in patterns]
    finite = [value for value in values if math.isfinite(value)]
    assert len(finite) > 1900
    back = decode(encode({"values": finite}))["values"]
    assert [struct.pack("<d", v) for v in back] == [struct.pack("<d", v) for v in finite]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_device_scalars_keep_their_value(dtype):
    value = jnp.asarray(1 / 3, dtype)
    assert decode(encode({"x": value}))["x"] == float(np.asarray(value, np.float64))


def test_nan_and_infinities_are_legal_json_and_come_back_as_floats():
    line = encode({"nan": math.nan, "up": math.inf, "down": -math.inf, "list": [math.nan]})

    def refuse(name):
        pytest.fail(f"{name} is no JSON")

    strict = json.loads(line, parse_constant=refuse)
    assert strict == {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "list": ["NaN"]}
    back = decode(line)
    assert math.isnan(back["nan"]) and back["up"] == math.inf and back["down"] == -math.inf


def test_what_is_no_scalar_is_refused():
    with pytest.raises(TypeError, match="a record holds scalars"):
        encode({"x": np.zeros(3)})


def test_train_record_holds_the_contract_fields_exactly(tmp_path):
    monitor = start(tmp_path)
    loss = jnp.float32(0.1)
    monitor.train(
        1,
        {"loss": loss, "grad_norm": 2.5, "learning_rate": np.float32(3e-4)},
        tokens=128,
        step_time_s=0.25,
        data_wait_s=0.01,
    )
    (record,) = of_kind(read_records(monitor.run.metrics), "train")
    del record["time"]
    assert record == {
        "kind": "train",
        "step": 1,
        "loss": float(np.float32(0.1)),  # not 0.1: every bit of the float32
        "grad_norm": 2.5,
        "learning_rate": float(np.float32(3e-4)),
        "tokens": 128,
        "tokens_per_s": 512.0,
        "tokens_per_s_per_device": 64.0,  # eight simulated devices
        "step_time_s": 0.25,
        "data_wait_s": 0.01,
    }  # no mfu and no memory: a CPU has neither a known peak nor memory statistics


def test_tokens_are_counted_over_the_run(tmp_path):
    monitor = start(tmp_path)
    for step in (1, 2, 3):
        train(monitor, step)
    tokens = [r["tokens"] for r in of_kind(read_records(monitor.run.metrics), "train")]
    assert tokens == [100, 200, 300]


def test_images_are_called_images(tmp_path):
    monitor = start(tmp_path, unit="images")
    train(monitor, 1)
    (record,) = of_kind(read_records(monitor.run.metrics), "train")
    assert record["images"] == 100 and record["images_per_s"] == 200.0
    assert not [key for key in record if "token" in key]


def test_records_are_written_every_so_many_steps_and_at_the_end(tmp_path):
    config = MonitoringConfig(tensorboard=False, record_every_steps=4)
    monitor = start(tmp_path, config, total_steps=10)
    for step in range(1, 11):
        train(monitor, step)
    assert [r["step"] for r in of_kind(read_records(monitor.run.metrics), "train")] == [4, 8, 10]


def test_a_torn_last_line_is_cut_when_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"kind": "train", "step": 1}\n'
    path.write_bytes(whole + b'{"kind": "tra')
    assert [r["step"] for r in read_records(path)] == [1]
    writer = RecordWriter(path)
    assert writer.torn == 13
    writer.write({"kind": "train", "step": 2})
    assert path.read_bytes() == whole + b'{"kind": "train", "step": 2}\n'


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train"}\n' + b"x" * 200_000)
    assert RecordWriter(path).torn == 200_000
    assert path.read_bytes() == b'{"kind": "train"}\n'


def test_a_broken_line_inside_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event"}\n{"kind" \n{"kind": "event"}\n')
    with pytest.raises(ConfigError, match="line 2 is no JSON"):
        read_records(path)
    for line in ("[1]", '{"kind": "train"}', '{"step": 1}'):
        path.write_text(f"{line}\n")
        with pytest.raises(ConfigError, match="line 1 is no record"):
            read_records(path)


WRITER = """
import itertools, sys
import jax, jax.numpy as jnp
from jaxdist.monitoring import Monitor, MonitoringConfig, RunDirectory
monitor = Monitor(MonitoringConfig(log_every_steps=1), RunDirectory.open(sys.argv[1]),
                  total_steps=10**9)
for step in itertools.count(1):
    monitor.train(step, {"loss": jnp.float32(1 / step)}, tokens=1, step_time_s=1.0, data_wait_s=0.0)
    print(step, flush=True)
"""


def test_kill_9_leaves_whole_lines_and_readable_curves(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
    )
    reported = 0
    for line in child.stdout:
        reported = int(line)
        if reported == 25:
            os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    run = RunDirectory.existing(tmp_path / "run")
    assert run.metrics.read_bytes().endswith(b"\n")
    steps = [r["step"] for r in of_kind(read_records(run.metrics), "train")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= reported >= 25
    drawn = [step for step, tag, _ in scalars(run.tensorboard) if tag == "train/loss"]
    assert len(drawn) >= reported  # each was flushed before the step was reported


# -- TensorBoard, read without TensorFlow and with a CRC of our own --------------------------------


def crc32c(data: bytes) -> int:
    """Castagnoli CRC, bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tensorboard_events(directory):
    from tensorboardX.proto import event_pb2

    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            (length_crc,) = struct.unpack_from("<I", data, at + 8)
            payload = data[at + 12 : at + 12 + length]
            (payload_crc,) = struct.unpack_from("<I", data, at + 12 + length)
            assert length_crc == masked_crc(data[at : at + 8]), path
            assert payload_crc == masked_crc(payload), path
            at += 16 + length
            yield event_pb2.Event.FromString(payload)


def scalars(directory):
    """(step, tag, value) as TensorBoard shows them: a session start purges from its step on."""
    from tensorboardX.proto import event_pb2

    points = []
    for event in tensorboard_events(directory):
        if event.session_log.status == event_pb2.SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                points.append((event.step, value.tag, value.simple_value))
    return points


def test_the_crc_of_these_tests_is_castagnoli():
    assert crc32c(b"123456789") == 0xE3069283


def test_tensorboard_holds_curves_and_config(tmp_path):
    config = MonitoringConfig(log_every_steps=2)
    monitor = start(tmp_path, config, total_steps=6, config_text="[model]\nd_model = 8")
    for step in range(1, 7):
        train(monitor, step, finite=jnp.asarray(True))
    monitor.eval(6, {"loss": 0.5})
    monitor.close()
    points = scalars(monitor.run.tensorboard)
    loss = [(step, value) for step, tag, value in points if tag == "train/loss"]
    assert loss == [(s, float(np.float32(1 / s))) for s in (1, 2, 4, 6)]  # the first is shown too
    assert (6, "eval/loss", 0.5) in points and (6, "train/finite", 1.0) in points
    assert (6, "speed/tokens_per_s", 200.0) in points
    texts = [
        value.tensor.string_val[0].decode()
        for event in tensorboard_events(monitor.run.tensorboard)
        for value in event.summary.value
        if value.WhichOneof("value") == "tensor"
    ]
    assert len(texts) == 1 and "d_model = 8" in texts[0]


def test_diverged_losses_reach_tensorboard_without_noise(tmp_path, caplog):
    monitor = start(tmp_path, MonitoringConfig(log_every_steps=1))
    train(monitor, 1, loss=math.nan)
    monitor.close()
    (point,) = [p for p in scalars(monitor.run.tensorboard) if p[1] == "train/loss"]
    assert math.isnan(point[2])
    assert not [r for r in caplog.records if r.name.startswith("tensorboardX")]


# -- resume ----------------------------------------------------------------------------------------


def test_resume_appends_and_purges_what_was_lost(tmp_path):
    config = MonitoringConfig(log_every_steps=1)
    with start(tmp_path, config) as first:
        for step in range(1, 8):
            train(first, step)
        first.eval(6, {"loss": 0.1})
    with start(tmp_path, config, start_step=5) as second:  # the newest checkpoint was step 5
        for step in range(6, 11):
            train(second, step, loss=jnp.float32(100.0 + step))
        second.eval(8, {"loss": 0.4})
    records = read_records(second.run.metrics)
    assert [r["step"] for r in of_kind(records, "train")] == [*range(1, 8), *range(6, 11)]
    history = of_kind(current(records), "train")
    assert [r["step"] for r in history] == list(range(1, 11))
    assert [r["loss"] for r in history[5:]] == [106.0, 107.0, 108.0, 109.0, 110.0]
    assert [r["tokens"] for r in history] == [100 * step for step in range(1, 11)]
    assert [r["step"] for r in of_kind(current(records), "eval")] == [8]
    drawn = [(s, v) for s, tag, v in scalars(second.run.tensorboard) if tag == "train/loss"]
    assert [s for s, _ in drawn] == list(range(1, 11))
    assert [v for s, v in drawn if s > 5] == [106.0, 107.0, 108.0, 109.0, 110.0]


def test_resuming_into_the_same_directory_is_a_choice(tmp_path):
    train(start(tmp_path), 1)
    assert RunDirectory.open(tmp_path / "run").resumed
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume auto"):
        RunDirectory.open(tmp_path / "run", resume=False)


def test_a_fresh_directory_is_not_resumed(tmp_path):
    assert not RunDirectory.open(tmp_path / "run", resume=False).resumed


def test_an_unusable_run_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*--run-dir"):
        RunDirectory.open(tmp_path / "file")


def test_a_missing_run_names_those_nearby(tmp_path):
    train(start(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"runn is no directory\. Runs there: .*/run\."):
        RunDirectory.existing(tmp_path / "runn")
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl\. Runs there: .*/run\."):
        RunDirectory.existing(tmp_path)


def test_a_changed_config_is_told_and_written(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    assert run.write_config("[model]\nd_model = 8\nheads = 2\n") == []
    changes = run.write_config("[model]\nd_model = 16\n[optim]\npeak_lr = 0.1\n")
    assert changes == [
        "model.d_model: 8 -> 16",
        "model.heads: 2 -> not set",
        "optim.peak_lr: not set -> 0.1",
    ]
    assert "d_model = 16" in run.config.read_text()


def test_environment_keeps_every_start(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    for command in ("one", "two", "three"):
        run.write_environment({"command": command})
    record = json.loads(run.environment.read_text())
    assert record["command"] == "three"
    assert [earlier["command"] for earlier in record["earlier"]] == ["one", "two"]


def test_environment_says_what_is_needed_to_run_again():
    record = environment(["python", "-m", "jaxdist.train", "--steps", "2 3"])
    assert record["command"] == "python -m jaxdist.train --steps '2 3'"
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"]["numpy"] == np.__version__
    assert record["devices"]["count"] == 8 and record["devices"]["platform"] == "cpu"
    assert len(record["hosts"]) == record["num_processes"] == 1
    json.dumps(record)


def test_environment_records_commit_and_uncommitted_changes(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    git("init")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-m", "one")
    monkeypatch.chdir(tmp_path)

    def mine():
        return [r for r in environment()["git"] if os.path.samefile(r["root"], tmp_path)]

    assert [(r["commit"], r["dirty"]) for r in mine()] == [(git("rev-parse", "HEAD"), False)]
    (tmp_path / "a.py").write_text("2")
    assert [r["dirty"] for r in mine()] == [True]


# -- who writes ------------------------------------------------------------------------------------


def test_only_process_0_writes(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    config = MonitoringConfig(log_every_steps=1)
    monitor = start(tmp_path, config, process_index=1)
    header(monitor)
    values = monitor.train(
        1, {"loss": jnp.float32(2.0)}, tokens=1, step_time_s=1.0, data_wait_s=0.0
    )
    assert values == {"loss": 2.0}  # every process knows the loss and may act on it
    assert monitor.eval(1, {"loss": 3.0}) == {"loss": 3.0}
    monitor.event("checkpoint_saved", step=1)
    monitor.run.write_config("a = 1")
    monitor.run.write_environment({})
    assert monitor.summary("finished")["loss"] == 2.0
    monitor.close()
    assert [p.name for p in (tmp_path / "run").rglob("*")] == ["logs"]
    assert caplog.records == []
    with pytest.raises(ValueError, match="only process 0"):
        monitor.run.open_metrics()


WORKER = """
import sys, time
rank, port = int(sys.argv[1]), sys.argv[2]
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate",
                           coordinator_bind_address=f"127.0.0.1:{port}")
true_time = time.time
time.time = lambda: true_time() + 100 * rank  # hosts whose clocks differ
from jaxdist.monitoring import environment, new_run_path
print("path", new_run_path("demo"), len(environment()["hosts"]), flush=True)
"""


@pytest.mark.slow
def test_processes_agree_on_the_run_directory():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [child.communicate(timeout=120)[0] for child in children]
    lines = [[line for line in out.splitlines() if line.startswith("path")] for out in said]
    assert lines[0] == lines[1] and len(lines[0]) == 1
    assert lines[0][0].endswith(" 2")


# -- the console -----------------------------------------------------------------------------------


def header(monitor: Monitor) -> None:
    monitor.header(
        mesh="dp=4,tp=2",
        mesh_reason="the model fits one device",
        model="decoder",
        num_parameters=124_439_808,
        per_device_batch=4,
        num_replicas=4,
        accumulation=2,
        tokens_per_row=128,
        precision="bfloat16 compute, float32 parameters",
        notes=["attention: XLA, because this is a CPU"],
    )


def test_header_says_what_the_run_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    monitor = start(tmp_path)
    header(monitor)
    lines = caplog.messages
    assert "devices     8 \u00d7 cpu" in lines
    assert "mesh        dp=4,tp=2" in lines and "            the model fits one device" in lines
    assert "model       decoder, 124.4 M parameters" in lines
    batch = (
        "batch       32 = 4 per device \u00d7 4 replicas \u00d7 2 accumulation; 4,096 tokens a step"
    )
    assert batch in lines
    assert "kernels     attention: XLA, because this is a CPU" in lines
    assert any(line.startswith("MFU         not shown: the peak of 'cpu'") for line in lines)
    (record,) = events(read_records(monitor.run.metrics), "run")
    assert record["global_batch_size"] == 32 and record["num_parameters"] == 124_439_808


def test_step_lines_align_and_say_everything(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    config = MonitoringConfig(tensorboard=False, log_every_steps=1, peak_tflops=1e-6)
    monitor = start(tmp_path, config, total_steps=1000, flops_per_token={"causal": 10.0})
    for step in (1, 2, 999):
        train(monitor, step, learning_rate=3e-4, grad_norm=1.25, accuracy=0.5)
    first, second, third = caplog.messages
    assert second == (
        "step    2/1000  loss   0.5000  lr 3.00e-04  grad    1.25  accuracy 0.5        200 tok/s"
        "     25.00 tok/s/device  MFU  0.0 % causal    500.0 ms  ETA  8m19s"
    )
    assert third.startswith("step  999/1000  loss   0.0010") and third.endswith("ETA   0.5s")
    assert first.index("tok/s") == second.index("tok/s") == third.index("tok/s")


def test_colour_is_beside_the_plain_text_and_never_in_it(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    monitor = start(tmp_path)
    header(monitor)
    train(monitor, 1)
    monitor.eval(1, {"loss": 1.0})
    monitor.event("checkpoint_saved", step=1)
    monitor.summary("finished")
    import re

    for record in caplog.records:
        assert "\033" not in record.getMessage()
        assert re.sub(r"\033\[\d+m", "", record.styled) == record.getMessage()
    assert any("\033" in record.styled for record in caplog.records)


COLOURED = """
import logging, sys
from jaxdist.runtime import setup_logging
setup_logging(0, sys.argv[1]).info("plain", extra={"styled": "\\033[1mplain\\033[0m"})
"""


@pytest.mark.parametrize(
    ("terminal", "no_color", "seen"),
    [(True, "", b"\033[1mplain\033[0m"), (True, "1", b"plain"), (False, "", b"plain")],
)
def test_colour_is_for_terminals_that_want_it(tmp_path, terminal, no_color, seen):
    read_end, write_end = os.openpty() if terminal else os.pipe()
    log_file = tmp_path / "process-0.log"
    subprocess.run(
        [sys.executable, "-c", COLOURED, str(log_file)],
        stdout=write_end,
        env={**os.environ, "NO_COLOR": no_color},
        check=True,
    )
    assert os.read(read_end, 1000).strip() == seen
    os.close(read_end)
    os.close(write_end)
    assert log_file.read_text().endswith(" plain\n")


# -- steps that went wrong -------------------------------------------------------------------------


def test_skipped_steps_are_counted_and_reported(tmp_path, caplog):
    monitor = start(tmp_path)
    for step in range(1, 6):
        skipped = step in (2, 4)
        train(
            monitor, step, finite=jnp.asarray(not skipped), grad_norm=math.inf if skipped else 1.0
        )
    records = read_records(monitor.run.metrics)
    assert [(e["step"], e["skipped_steps"]) for e in events(records, "skipped_step")] == [
        (2, 1),
        (4, 2),
    ]
    assert events(records, "skipped_step")[0]["grad_norm"] == math.inf
    assert "step 4 was skipped (grad_norm is inf); 2 skipped so far" in caplog.messages
    assert monitor.summary("finished")["skipped_steps"] == 2
    resumed = start(tmp_path, start_step=3)  # step 4 and its skip are lost
    assert resumed.summary("finished")["skipped_steps"] == 1


def test_a_loss_that_is_not_finite_is_reported_without_a_skip(tmp_path, caplog):
    monitor = start(tmp_path)
    train(monitor, 1, loss=math.nan)
    (event,) = events(read_records(monitor.run.metrics), "not_finite")
    assert event["step"] == 1 and math.isnan(event["loss"])
    assert "step 1: loss is nan" in caplog.messages
    assert monitor.summary("stopped")["skipped_steps"] == 0


# -- the end ---------------------------------------------------------------------------------------


def test_summary_says_what_came_of_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    clock = Clock()
    config = MonitoringConfig(
        tensorboard=False, peak_tflops=1e-6, price_per_device_hour=2.5, currency="EUR"
    )
    monitor = start(
        tmp_path,
        config,
        total_steps=4,
        flops_per_token={"causal": 1000.0, "full": 1500.0},
        clock=clock,
    )
    for step, loss in ((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)):
        train(monitor, step, loss=loss)
    for step, loss in ((2, 2.5), (3, 1.5), (4, 1.75)):
        monitor.eval(step, {"loss": loss})
    clock.now += 900.0  # a quarter of an hour on eight devices
    returned = monitor.summary("finished", checkpoint=monitor.run.checkpoints / "4")
    written = json.loads(monitor.run.summary.read_text())
    assert written["exit_reason"] == "finished" and written["loss"] == 1.0
    assert written["eval"] == {"step": 4, "loss": 1.75}
    assert written["best_eval"] == {"step": 3, "loss": 1.5}
    assert written["tokens"] == 400 and written["tokens_per_s"] == 200.0
    assert written["device_hours"] == 2.0 and written["cost"] == 5.0
    assert written["currency"] == "EUR" and written["starts"] == 1
    # 25 tokens/s/device × 1000 FLOPs / 1e6 FLOP/s
    assert written["mfu"] == pytest.approx(0.025, rel=1e-12)
    assert written["mfu_full"] == pytest.approx(0.0375, rel=1e-12)
    assert written["mfu_convention"] == "causal" and "peak" in written["mfu_formula"]
    assert written["checkpoint"] == str(returned["checkpoint"])
    closing = "\n".join(caplog.messages)
    assert "ended       finished at step 4/4 after 15m00s" in closing
    assert "loss        1.0000 train, 1.7500 eval at step 4, best 1.5000 at step 3" in closing
    assert "2 device-hours, 5.00 EUR" in closing


def test_device_hours_add_up_over_starts_and_count_lost_work(tmp_path):
    clock = Clock()
    first = start(tmp_path, clock=clock)
    for step in range(1, 8):
        clock.now += 10.0
        train(first, step)
    clock.now += 1000.0  # killed; the machine was idle until somebody restarted the job
    second = start(tmp_path, clock=clock, start_step=5)
    for step in range(6, 11):
        clock.now += 10.0
        train(second, step)
    summary = second.summary("finished")
    assert summary["device_hours"] == pytest.approx(8 * (70 + 50) / 3600, rel=1e-12)
    assert summary["starts"] == 2 and summary["tokens"] == 1000
    assert device_seconds(read_records(second.run.metrics)) == pytest.approx(8 * 120.0)


def test_summary_without_a_price_has_no_cost(tmp_path):
    monitor = start(tmp_path)
    summary = monitor.summary("failed", error="out of memory")
    assert "cost" not in summary and "mfu" not in summary and "tokens_per_s" not in summary
    assert json.loads(monitor.run.summary.read_text())["error"] == "out of memory"


def test_an_exception_leaves_a_summary_that_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no memory"), start(tmp_path) as monitor:
        train(monitor, 1)
        raise RuntimeError("no memory\nand 300 lines more")
    written = json.loads(monitor.run.summary.read_text())
    assert (written["exit_reason"], written["error"]) == ("failed", "RuntimeError: no memory")
    assert events(read_records(monitor.run.metrics), "end")[0]["exit_reason"] == "failed"
    with pytest.raises(KeyboardInterrupt), start(tmp_path, start_step=1) as monitor:
        raise KeyboardInterrupt
    assert json.loads(monitor.run.summary.read_text())["exit_reason"] == "interrupted"


def test_a_summary_already_written_is_not_replaced_by_the_exception(tmp_path):
    with pytest.raises(RuntimeError), start(tmp_path) as monitor:
        monitor.summary("NaN or Inf")
        raise RuntimeError("stop")
    assert json.loads(monitor.run.summary.read_text())["exit_reason"] == "NaN or Inf"


def test_a_summary_that_cannot_be_written_does_not_hide_the_cause(tmp_path, caplog):
    with pytest.raises(RuntimeError, match="the cause"), start(tmp_path) as monitor:
        monitor.run.summary.mkdir()  # os.replace of a file onto a directory fails
        raise RuntimeError("the cause")
    assert "summary.json was not written" in caplog.text


# -- config ----------------------------------------------------------------------------------------


def test_config_names_every_problem():
    bad = MonitoringConfig(
        log_every_steps=0,
        record_every_steps=-1,
        window_steps=1,
        data_wait_warning=0.0,
        peak_tflops=-1.0,
        price_per_device_hour=math.nan,
        currency=" ",
    )
    problems = bad.problems()
    assert len(problems) == 7
    assert problems[0].startswith("monitoring.log_every_steps=0: a whole number of steps ≥ 1. Set")
    assert MonitoringConfig().problems() == []


def test_importing_monitoring_is_light():
    code = (
        "import sys, jaxdist.monitoring\n"
        "print([m for m in ('flax', 'orbax', 'tensorboardX', 'grain') if m in sys.modules])\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:2] == ["[]", "False"]


def test_times_are_seconds_since_1970(tmp_path):
    before = time.time()
    monitor = start(tmp_path)
    train(monitor, 1)
    assert all(before <= r["time"] <= time.time() for r in read_records(monitor.run.metrics))
