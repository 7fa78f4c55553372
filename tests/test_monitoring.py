"""Sinks and run directory: exact records, complete lines after a kill, one writer, resume."""

import json
import logging
import math
import os
import random
import shlex
import struct
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from monitored import Clock, events, header, of_kind, scalars, start, train
from refusals import refused

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run.metrics_log import (
    RecordWriter,
    current,
    decode,
    encode,
    read_outline,
    read_records,
    stream_records,
)
from jaxdist.run.monitoring import monitor as monitor_module
from jaxdist.run.monitoring.environment import environment
from jaxdist.run.monitoring.summary import RunSummary
from jaxdist.run.run_directory import RunDirectory, new_run_path

pytestmark = pytest.mark.usefixtures("propagating")


def test_finite_floats_round_trip_bit_identically():
    draw = random.Random(0)
    patterns = [draw.getrandbits(64) for _ in range(2000)] + [1, 1 << 63, 0x7FEFFFFFFFFFFFFF]
    values = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in patterns]
    finite = [value for value in values if math.isfinite(value)]
    assert len(finite) > 1900
    back = decode(encode({"values": finite}))["values"]
    assert [struct.pack("<d", v) for v in back] == [struct.pack("<d", v) for v in finite]


def test_nan_and_infinities_are_valid_json_and_round_trip():
    line = encode({"nan": math.nan, "up": math.inf, "down": -math.inf, "list": [math.nan]})

    def refuse(name):
        pytest.fail(f"{name} is no JSON")

    strict = json.loads(line, parse_constant=refuse)
    assert strict == {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "list": ["NaN"]}
    back = decode(line)
    assert math.isnan(back["nan"]) and back["up"] == math.inf and back["down"] == -math.inf


def test_non_scalars_are_rejected():
    with pytest.raises(TypeError, match="scalars"):
        encode({"x": np.zeros(3)})


def test_train_record_has_exactly_the_contract_fields(tmp_path):
    before, monitor = time.time(), start(tmp_path)
    loss = jnp.float32(0.1)
    monitor.train(
        1,
        {"loss": loss, "grad_norm": 2.5, "learning_rate": np.float32(3e-4)},
        tokens=128,
        step_time_s=0.25,
        data_wait_s=0.01,
    )
    (record,) = of_kind(read_records(monitor.run.metrics), "train")
    assert before <= record.pop("time") <= time.time()  # seconds since 1970
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


def test_torn_last_line_is_removed_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    complete_line = b'{"kind": "train", "step": 1}\n'
    path.write_bytes(complete_line + b'{"kind": "tra')
    assert [r["step"] for r in read_records(path)] == [1]
    writer = RecordWriter(path)
    assert writer.torn == 13
    writer.write({"kind": "train", "step": 2})
    assert path.read_bytes() == complete_line + b'{"kind": "train", "step": 2}\n'


def test_torn_line_longer_than_a_block_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train"}\n' + b"x" * 200_000)
    assert RecordWriter(path).torn == 200_000
    assert path.read_bytes() == b'{"kind": "train"}\n'


def test_broken_line_inside_a_file_is_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event"}\n{"kind" \n{"kind": "event"}\n')
    with refused(path, "line 2 is not JSON"):
        read_records(path)
    for line in ("[1]", '{"kind": "train"}', '{"step": 1}'):
        path.write_text(f"{line}\n")
        with refused(path, "line 1 is not a record"):
            read_records(path)


def test_resume_appends_and_purges_lost_steps(tmp_path):
    config = MonitoringConfig(log_interval_steps=1)
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


def test_tensorboard_hides_the_steps_that_a_rollback_repeats(tmp_path):
    with start(tmp_path, MonitoringConfig(log_interval_steps=1)) as monitor:
        for step in (1, 2, 3):
            train(monitor, step)
        monitor.rewind(1, "")
        train(monitor, 2, loss=jnp.float32(9))
    drawn = [(s, v) for s, tag, v in scalars(monitor.run.tensorboard) if tag == "train/loss"]
    assert drawn == [(1, 1.0), (2, 9.0)]


def test_all_processes_continue_the_count_of_process_0(tmp_path, monkeypatch):
    broadcast_totals = iter([500, 300])  # of process 0: at the start, and after a rollback
    decide = lambda topic, _: {"units": broadcast_totals}[topic].__next__()
    monkeypatch.setattr("jaxdist.runtime.coordination.decide", decide)
    records = []
    second = start(tmp_path, process_id=1, start_step=5, on_record=records.append)
    train(second, 6)
    second.rewind(3, "")
    train(second, 4)
    assert [record["tokens"] for record in records] == [600, 400]


def test_unusable_run_directory_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file", "--run-dir"):
        RunDirectory.open(tmp_path / "file")


def test_a_missing_run_is_rejected(tmp_path):
    with refused(tmp_path / "runn", "not a directory"):
        RunDirectory.existing(tmp_path / "runn")
    with refused(tmp_path, "no metrics.jsonl"):
        RunDirectory.existing(tmp_path)


def test_environment_has_everything_needed_to_rerun(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "2 3"])
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nvidia_nccl_cu99-2.30.7", "jax_cuda99_plugin-0.10.0", "nvidia_cublas-13"):
        (tmp_path / f"{name}.dist-info").mkdir()
    record = environment(["n0"])
    assert record["nvidia"]["nvidia-nccl-cu99"] == "2.30.7"
    assert record["nvidia"]["jax-cuda99-plugin"] == "0.10.0"
    assert "nvidia-cublas" not in record["nvidia"]
    assert record["command"] == f"{shlex.quote(sys.executable)} train.py --steps '2 3'"
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
        return [r for r in environment([])["git"] if os.path.samefile(r["root"], tmp_path)]

    assert [(r["commit"], r["dirty"]) for r in mine()] == [(git("rev-parse", "HEAD"), False)]
    (tmp_path / "a.py").write_text("2")
    assert [r["dirty"] for r in mine()] == [True]


def test_only_process_0_writes(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    config = MonitoringConfig(log_interval_steps=1)
    monitor = start(tmp_path, config, process_id=1)
    header(monitor)
    values = monitor.train(
        1, {"loss": jnp.float32(2.0)}, tokens=1, step_time_s=1.0, data_wait_s=0.0
    )
    assert values == {"loss": 2.0}  # every process has the loss and can act on it
    assert monitor.eval(1, {"loss": 3.0}) == {"loss": 3.0}
    monitor.event("checkpoint_saved", step=1)
    monitor.run.write_config("a = 1")
    monitor.run.write_environment({})
    assert monitor.summary("finished")["loss"] == 2.0
    monitor.close()
    assert [p.name for p in (tmp_path / "run").rglob("*")] == ["logs"]
    assert caplog.records == []


def test_process_0_names_the_run_directory(monkeypatch):
    monkeypatch.setattr("jaxdist.runtime.coordination.decide", lambda topic, clock: 10**9)
    assert str(new_run_path("demo")) == "runs/demo-20010909-014640"


@pytest.mark.parametrize("resumed_at", [0, 3, 6, 8, 9])
def test_outline_continues_a_run_like_the_complete_file(tmp_path, resumed_at):
    path, time = tmp_path / "metrics.jsonl", iter(range(100))
    line = lambda kind, step, **fields: (
        encode({"kind": kind, "time": next(time), "step": step, **fields}) + "\n"
    )
    train = lambda steps: "".join(line("train", s, tokens=10 * s, loss=1.0 / s) for s in steps)
    event = lambda name, step: line("event", step, event=name, num_devices=2)
    text = event("start", 0) + train(range(1, 8)) + event("skipped_step", 7)
    text += line("eval", 7, loss=0.5) + train([8]) + event("start", 3) + train(range(4, 10))
    path.write_text(text + '{"kind": "train", "st')
    complete, outline = read_records(path), read_outline(path, resumed_at)
    assert len(outline) < len(complete)
    assert [r for r, is_current in stream_records(path) if is_current] == current(complete)
    first, second = (
        vars(RunSummary(r, start_step=resumed_at, unit="tokens")) for r in (complete, outline)
    )
    assert first == second


@pytest.mark.parametrize("resumed_at", [9, 22, 31, 45, 58])
@pytest.mark.parametrize("cut", ["", "head", "tail"])
def test_start_continues_from_the_newest_valid_totals(tmp_path, monkeypatch, resumed_at, cut):
    monkeypatch.setattr(monitor_module, "TOTALS_INTERVAL_STEPS", 20)
    clock = Clock()
    for begin, end in ((0, 40), (21, 60)):
        monitor = start(tmp_path, start_step=begin, clock=clock, total_steps=60)
        for step in range(begin + 1, end + 1):
            clock.now += step
            train(monitor, step, applied=step % 11 != 0)
            if step % 7 == 0:
                monitor.eval(step, {"loss": abs(step - 30)})
        monitor.close()
    path = monitor.run.metrics
    lines = path.text().splitlines(keepends=True)
    held = lambda n: n.get("event") == "totals" and n["step"] <= min(21, resumed_at)
    totals = [n for n, line in enumerate(lines) if held(decode(line))]
    if cut == "head" and totals:
        lines = lines[totals[0] :]
    if cut == "tail":
        lines[-1] = lines[-1][:-9]
    path.write("".join(lines))
    outline = read_outline(path, resumed_at)
    path.write("".join(line for line in lines if '"totals"' not in line))
    complete = read_records(path)
    if cut != "head" or not totals:
        a, b = (RunSummary(r, start_step=resumed_at, unit="tokens") for r in (complete, outline))
        assert a.totals(0.0, 8) == b.totals(0.0, 8)
    if resumed_at >= 45:
        assert len(outline) < 25 and len(complete) > 80
    if cut == "head" and totals:
        assert RunSummary(outline, start_step=resumed_at, unit="tokens").units == 100 * resumed_at


def test_loads_of_experts_are_summed_over_an_interval_and_a_collapse_is_reported_once(tmp_path):
    monitor = start(tmp_path, MonitoringConfig(tracker=[], log_interval_steps=2), total_steps=6)
    for step in range(1, 7):
        # Expert 2 of layer 1 has a token in the first two intervals, in one of their steps.
        tokens = [[2.0, 4.0, 6.0], [6.0, 0.0, float(step in (1, 3))]]
        entropy = jnp.array([0.5, 1.0]) * step * 10
        dropped = jnp.array([0.02, 0.3 if step > 2 else 0.08]) * 10
        sums = {"expert_tokens": jnp.array(tokens), "router_entropy": entropy, "dropped": dropped}
        train(monitor, step, weight=jnp.float32(10.0), layer_sums=sums)
    monitor.close()
    records = read_records(monitor.run.metrics)
    reports = events(records, "experts")
    assert [(r["step"], r["num_steps"]) for r in reports] == [(2, 2), (4, 2), (6, 2)]
    assert reports[0]["largest_load"] == pytest.approx([1.5, 12 / 13 * 3])
    assert reports[0]["smallest_load"] == [0.5, 0.0]
    assert [r["unused_experts"] for r in reports] == [[0, 1], [0, 1], [0, 2]]
    assert reports[1]["router_entropy"] == pytest.approx([0.5 * 3.5, 3.5])
    collapses = events(records, "collapsed_experts")
    assert [(r["step"], r["experts"]) for r in collapses] == [(2, [[1, 1]]), (6, [[1, 2]])]
    drops = events(records, "dropped_tokens")
    assert [(r["step"], r["layer"], r["dropped"]) for r in drops] == [(4, 1, pytest.approx(0.3))]
    assert all(r["level"] == "warning" for r in collapses + drops)
    assert not any("layer_sums" in r for r in records)
