"""Output for people: the console during a run, long waits, bad steps, numbers and tables."""

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from monitored import Clock, events, header, start, train
from refusals import missing

from jaxdist.config import RunConfig
from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.hardware import GPUS
from jaxdist.run.metrics_log import device_seconds, read_records
from jaxdist.run.monitoring import monitor as monitor_module
from jaxdist.run.monitoring.console import eval_line, plain, step_line
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.session import CompileTimes
from jaxdist.run.setup import assemble
from jaxdist.runtime import progress
from jaxdist.runtime.formatting import numbers, tables

pytestmark = pytest.mark.usefixtures("propagating")


@pytest.mark.parametrize(
    ("metrics", "printed"),
    [
        ({"loss": 2.0, "task/sums/acc": 0.5}, ["loss", "task/sums/acc"]),
        ({"web/loss": 2.0, "web/tokens": 8, "task/sums/acc": 0.5}, ["web/loss", "task/sums/acc"]),
    ],
)
def test_evaluations_print_metrics_of_tasks(metrics, printed):
    line = plain(eval_line({"step": 5, **metrics}, total_steps=10))
    assert [word for word in line.split()[2:] if word in metrics] == printed


def test_header_describes_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    monitor = start(tmp_path)
    header(monitor)
    lines = caplog.messages
    assert "devices     8 \u00d7 cpu" in lines
    assert "mesh        dp=4,tp=2" in lines
    assert "model       decoder, 124M parameters" in lines
    batch = "batch       32 = 4 rows \u00d7 4 replicas \u00d7 2 accumulation; 4,096 tokens a step"
    assert batch in lines
    (kernels,) = (line for line in lines if line.startswith("kernels "))
    (mfu,) = (line for line in lines if line.startswith("MFU "))
    assert missing(kernels, "attention: XLA", "CPU") == missing(mfu, "unavailable", "'cpu'") == []
    (record,) = events(read_records(monitor.run.metrics), "run")
    assert record["global_batch_size"] == 32 and record["num_parameters"] == 124_439_808


def test_step_lines_align_and_are_complete(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    config = MonitoringConfig(tracker=[], log_interval_steps=1, peak_tflops=1e-6)
    monitor = start(tmp_path, config, total_steps=1000, flops_per_token={"causal": 10.0})
    for step in (1, 2, 999):
        train(monitor, step, learning_rate=3e-4, grad_norm=1.25, accuracy=0.5)
    first, second, third = caplog.messages
    assert second == (
        "step    2/1000  loss  0.5000  lr 3.00e-04  grad 1.25  accuracy 0.5    200 tok/s"
        "     25/s/device  MFU 0.0 %  ETA 8m19s"
    )
    assert third.startswith("step  999/1000  loss  0.0010") and third.endswith("ETA 0.5s")
    assert first.index("tok/s") == second.index("tok/s") == third.index("tok/s")


def test_step_lines_fit_a_terminal_and_repeat_no_rate():
    names = ("loss", "accuracy", "grad_norm", "learning_rate", "mfu", "memory_bytes")
    names += ("tokens_per_s", "tokens_per_s_per_device", "step_time_s")
    for value in (0.0123456, 12.3456, 123456.7, 9.87654e10):
        record = {"step": 123_456, **dict.fromkeys(names, value)}
        options = dict(total_steps=1_000_000, unit="tokens", eta_s=1e6, metrics=["accuracy"])
        one, many = (
            plain(step_line(record, num_devices=number, **options)).rstrip() for number in (1, 512)
        )
        assert len(one) <= 80 and len(many) <= 120, (one, many)
        assert "loss" in one and one.count("tok/s") == 1 and "ETA" in one
        assert many.count("/s") == 2
    without = plain(step_line({"step": 1, "loss": 1.0}, num_devices=1, **options))
    assert without.split() == ["step", "1/1000000", "loss", "1.0000", "ETA", "11d13h"]


def test_color_is_separate_from_the_plain_text(tmp_path, caplog):
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
def test_color_follows_terminal_and_no_color(tmp_path, terminal, no_color, seen):
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


def test_skipped_steps_are_counted_and_reported(tmp_path, caplog):
    monitor = start(tmp_path)
    for step in range(1, 6):
        skipped = step in (2, 4)
        train(
            monitor, step, applied=jnp.asarray(not skipped), grad_norm=math.inf if skipped else 1.0
        )
    records = read_records(monitor.run.metrics)
    assert [(e["step"], e["skipped_steps"]) for e in events(records, "skipped_step")] == [
        (2, 1),
        (4, 2),
    ]
    assert events(records, "skipped_step")[0]["grad_norm"] == math.inf
    assert any(
        missing(line, "step 4", "grad_norm", "inf", "2 skipped") == [] for line in caplog.messages
    )
    assert monitor.summary("finished")["skipped_steps"] == 2
    resumed = start(tmp_path, start_step=3)  # step 4 and its skip are lost
    assert resumed.summary("finished")["skipped_steps"] == 1


def test_summary_describes_the_result_of_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    clock = Clock()
    config = MonitoringConfig(tracker=[], peak_tflops=1e-6)
    monitor = start(
        tmp_path,
        config,
        total_steps=4,
        flops_per_token={"causal": 1000.0, "full": 1500.0},
        clock=clock,
    )
    monitor.device_kind = "Tesla T4"
    for step, loss in ((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)):
        train(monitor, step, loss=loss)
    for step, loss in ((2, 2.5), (3, 1.5), (4, 1.75)):
        monitor.eval(step, {"loss": loss})
    clock.now += 900.0  # a quarter of an hour on eight devices
    returned = monitor.summary("finished", checkpoint=monitor.run.checkpoints / "4")
    written = json.loads(monitor.run.summary.text())
    assert written["exit_reason"] == "finished" and written["loss"] == 1.0
    assert written["eval"] == {"step": 4, "loss": 1.75}
    assert written["best_eval"] == {"step": 3, "loss": 1.5}
    assert written["tokens"] == 400 and written["tokens_per_s"] == 200.0
    assert written["device_hours"] == 2.0 and written["cost"] == 2 * GPUS["t4"].price_per_hour
    assert written["starts"] == 1
    # 25 tokens/s/device × 1000 FLOPs / 1e6 FLOP/s
    assert written["mfu"] == pytest.approx(0.025, rel=1e-12)
    assert written["mfu_full"] == pytest.approx(0.0375, rel=1e-12)
    assert written["mfu_convention"] == "causal" and "peak" in written["mfu_formula"]
    assert written["checkpoint"] == str(returned["checkpoint"])
    closing = {line[:12].strip(): line[12:] for line in "\n".join(caplog.messages).splitlines()}
    assert missing(closing["ended"], "finished", "step 4/4", "15m00s") == []
    facts = "1.0000 train", "1.7500 eval at step 4", "best 1.5000 at step 3"
    assert missing(closing["loss"], *facts) == []
    assert any("2 device-hours, cost 1.05" in value for value in closing.values())


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
    summary = monitor.summary("error", error="no_memory")
    assert "cost" not in summary and "mfu" not in summary and "tokens_per_s" not in summary
    assert json.loads(monitor.run.summary.text())["error"] == "no_memory"


def test_an_exception_writes_a_summary_with_the_reason(tmp_path):
    with pytest.raises(RuntimeError, match="no memory"), start(tmp_path) as monitor:
        train(monitor, 1)
        raise RuntimeError("no memory\nand 300 lines more")
    written = json.loads(monitor.run.summary.text())
    assert (written["exit_reason"], written["error"]) == ("error", "RuntimeError: no memory")
    assert events(read_records(monitor.run.metrics), "end")[0]["exit_reason"] == "error"


def test_a_summary_already_written_is_not_replaced_by_the_exception(tmp_path):
    with pytest.raises(RuntimeError), start(tmp_path) as monitor:
        monitor.summary("nonfinite_loss")
        raise RuntimeError("stop")
    assert json.loads(monitor.run.summary.text())["exit_reason"] == "nonfinite_loss"


def test_a_hanging_write_of_the_summary_ends_the_run(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(monitor_module, "SUMMARY_S", 0.1)
    monkeypatch.setattr(RunDirectory, "write_summary", lambda *_: hangs.wait(60))
    with start(tmp_path) as monitor, pytest.raises(TimeoutError) as late:
        monitor.summary("finished")
    hangs.set()
    assert late.value.filename == str(monitor.run.summary)


def test_a_summary_that_cannot_be_written_does_not_hide_the_cause(tmp_path, caplog):
    with pytest.raises(RuntimeError, match="the cause"), start(tmp_path) as monitor:
        monitor.run.summary.make_directory()  # os.replace of a file onto a directory fails
        raise RuntimeError("the cause")
    assert missing(caplog.text, "summary.json", "not written") == []


@pytest.fixture
def lines(monkeypatch, caplog, propagating):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    monkeypatch.setattr(progress, "SHORT_S", 0.05)
    monkeypatch.setattr(logging.getLogger("jaxdist"), "handlers", [logging.NullHandler()])
    caplog.set_level(logging.INFO, logger="jaxdist")
    return lambda: caplog.messages


def test_progress_logs_share_rate_and_time_left_periodically(lines):
    with progress.Progress("reading", 4000, "B") as work:
        for _ in range(4):
            work.advance(1000)
            time.sleep(0.03)
    assert 1 <= len(lines()) <= 3
    assert all(line.startswith("reading: ") and "of 4k B" in line for line in lines())
    assert "B/s" in lines()[0] and "left" in lines()[0]


def test_wait_is_logged_at_start_and_while_it_lasts(lines):
    with progress.waiting("short"):
        pass
    with progress.waiting("compiling"):
        time.sleep(0.3)
    seen = len(lines())
    assert seen >= 3 and lines()[0] == "compiling ..." and "so far" in lines()[1]
    time.sleep(0.1)
    assert len(lines()) == seen


def test_compile_times_are_stored_for_each_program(tmp_path, monkeypatch):
    parts = assemble(RunConfig(), jax.devices()[:1])
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert CompileTimes(parts).last() == 0
        CompileTimes(parts).store(7.9)
        longer = dataclasses.replace(parts.config.train, steps=7)
        wider = dataclasses.replace(parts.config.train, global_batch_size=8)
        with_train = lambda train: dataclasses.replace(
            parts, config=dataclasses.replace(parts.config, train=train)
        )
        assert CompileTimes(with_train(longer)).last() == 7.9
        assert CompileTimes(with_train(wider)).last() == 0
        zero = dataclasses.replace(parts.config.mesh, zero=1)
        other = dataclasses.replace(parts, config=dataclasses.replace(parts.config, mesh=zero))
        assert CompileTimes(other).last() == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("show", "value", "expected"),
    [
        (numbers.in_bytes, 80 * 2**30, "80.0 GiB"),
        (numbers.in_bytes, 2**30 - 1, "1,024.0 MiB"),
        (numbers.in_bytes, 0, "0 B"),
        (numbers.in_si, 8_030_261_248, "8.03B"),
        (numbers.in_si, 124_439_808, "124M"),
        (numbers.in_si, 999_600, "1M"),
        (numbers.count, 1234.4, "1,234"),
        (numbers.duration, 0.0123, "12.3ms"),
        (numbers.duration, 59.96, "1m00s"),
        (numbers.duration, 7500, "2h05m"),
        (numbers.duration, 3 * 86400 + 4 * 3600, "3d04h"),
        (numbers.duration, float("inf"), "?"),
        (numbers.money, 0.0533, "0.0533"),
        (numbers.money, 9250.4, "9,250"),
        (numbers.percent, 0.4321, "43.2 %"),
        (lambda share: numbers.percent(share, 0, sign=True), 0.4321, "+43 %"),
        (lambda share: numbers.percent(share, 2, sign=True), -0.004321, "-0.43 %"),
        (numbers.rate, 3.35e12, "3.35 TB/s"),
        (numbers.rate, 850e6, "850 MB/s"),
        (numbers.rate, 12, "12.0 B/s"),
        (lambda ratio: numbers.relative_speed(ratio, 1.0), 1.09, "9 % slower"),
        (lambda ratio: numbers.relative_speed(1.0, ratio), 10.6, "10.6 times as fast"),
    ],
)
def test_numbers_are_formatted(show, value, expected):
    assert show(value) == expected


def test_labels_align_left_and_numbers_right():
    assert tables.columns([("a", "1", "22"), ("bbb", "333", "4")]) == [
        "a      1  22",
        "bbb  333   4",
    ]


def test_wrapped_lines_are_indented_below_their_label():
    lines = tables.wrap("one two --a.long-flag", 12, head="- ")
    assert lines == ["- one two", "  --a.long-flag"]
    assert tables.wrap("") == [""]
