"""Rates and warnings: MFU, time left, slow loaders, recompilation, device memory."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import missing

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.hardware import peak_flops
from jaxdist.run.metrics_log import read_records
from jaxdist.run.monitoring import alerts
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.monitoring.summary import Throughput, device_memory
from jaxdist.run.monitoring.timers import Compilation, CompileTracker, DataWaitTracker, StepTimer
from jaxdist.run.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("propagating")


def test_mfu_equals_a_published_row():
    """Llama2-7B at 4096 on 8 H100: 11,361 tokens/s/GPU are 49.2 % causal and 52.9 % full."""
    layers, d_model, mlp, vocab, seq_len = 32, 4096, 11008, 32000, 4096
    matrices = layers * (4 * d_model**2 + 3 * d_model * mlp) + vocab * d_model
    attention = 12 * layers * d_model * seq_len  # forward and backward, all of S²
    flops = {"causal": 6 * matrices + attention / 2, "full": 6 * matrices + attention}
    throughput = Throughput(
        num_devices=8,
        flops_per_token=flops,
        peak_flops=peak_flops("NVIDIA H100 80GB HBM3", "bfloat16"),
    )
    throughput.add(8 * 11_361 * 2.0, 2.0)
    assert throughput.tokens_per_s == 8 * 11_361
    fields = throughput.mfu_fields(throughput.tokens_per_s)
    assert throughput.convention == "causal"
    only_full = Throughput(num_devices=4, flops_per_token={"full": 2e9}, peak_flops=100e12)
    assert only_full.mfu_fields(40_000.0) == {"mfu": pytest.approx(0.2, rel=1e-12)}
    assert fields["mfu"] == pytest.approx(0.492, abs=6e-4)  # published to 0.1 %
    assert fields["mfu_full"] == pytest.approx(0.529, abs=6e-4)


@pytest.mark.parametrize(
    "kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40G", "NVIDIA A16", "Tesla T40"]
)
def test_unknown_hardware_has_no_mfu(kind):
    assert peak_flops(kind, "bfloat16") is None
    throughput = Throughput(
        num_devices=1, flops_per_token={"causal": 1.0}, peak_flops=peak_flops(kind, "bfloat16")
    )
    throughput.add(1, 1.0)
    assert throughput.convention is None
    assert throughput.mfu_fields(1.0) == {}


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756.5, 378.0),
        ("NVIDIA H100 NVL", 835.5, 417.5),
        ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA H200 NVL", 835.5, 417.5),
        ("NVIDIA B200", 2250.0, 1125.0),
        ("NVIDIA GB200", 2500.0, 1250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 156.0),
        ("NVIDIA A100-PCIE-40GB", 312.0, 156.0),
        ("NVIDIA A100 80GB PCIe", 312.0, 156.0),
        ("NVIDIA A10G", 70.0, 35.0),
        ("NVIDIA L4", 121.0, 60.0),
        ("Tesla T4", None, 8.1),  # Turing has no bfloat16
    ],
)
def test_peaks_are_dense(kind, bfloat16, float32):
    flops = peak_flops(kind, "bfloat16")
    assert flops == (None if bfloat16 is None else pytest.approx(bfloat16 * 1e12, rel=1e-12))
    assert peak_flops(kind, "float32") == pytest.approx(float32 * 1e12, rel=1e-12)


def make_monitor(tmp_path, **settings) -> Monitor:
    total_steps = settings.pop("total_steps", 100)
    flops = settings.pop("flops_per_token", None)
    config = MonitoringConfig(tracker=[], **settings)
    run = RunDirectory.open(tmp_path / "run")
    return Monitor(config, run, total_steps=total_steps, flops_per_token=flops)


def events(monitor: Monitor, name: str):
    return [r for r in read_records(monitor.run.metrics) if r.get("event") == name]


def test_window_rate_drops_old_steps_and_run_rate_keeps_them():
    throughput = Throughput(num_devices=1, window_steps=3)
    for seconds in (1.0,) * 7 + (2.0,) * 3:
        throughput.add(100, seconds)
    assert throughput.tokens_per_s == 50.0
    assert throughput.run_tokens_per_s == 100.0 and throughput.run_step_time_s == 1.0


def test_time_left_is_remaining_steps_times_the_median_step():
    throughput = Throughput(num_devices=1, window_steps=5)
    assert throughput.eta_s(10) is None and throughput.eta_s(0) == 0.0
    for seconds in (0.5, 9.0, 0.25, 0.5, 0.75):
        throughput.add(1, seconds)
    assert throughput.eta_s(90) == 45.0


def test_compiling_step_is_excluded_from_rates(tmp_path):
    monitor = make_monitor(tmp_path)
    monitor.train(1, {"loss": 1.0}, tokens=100, step_time_s=60.0, data_wait_s=30.0)
    for step in (2, 3):
        monitor.train(step, {"loss": 1.0}, tokens=100, step_time_s=1.0, data_wait_s=0.0)
    summary = monitor.summary("finished")
    assert summary["tokens_per_s"] == 100.0 and summary["data_wait_share"] == 0.0


def warned_at(watch: DataWaitTracker, waits) -> list[int]:
    return [step for step, wait in enumerate(waits, start=1) if watch.add(wait, 1.0)]


@pytest.mark.parametrize(
    ("waits", "warned"),
    [
        # Window shares from step 5 on: 0.125, 0.25 (not above), 0.375 (above: step 7), 0.5 ...
        ([0.0] * 4 + [0.5] * 6, [7]),
        ([0.9] * 4, [4]),  # not before the window is full
        ([0.5] * 4 + [0.2] * 8 + [0.3] * 8, [4]),  # near the threshold: one episode
        ([0.5] * 4 + [0.0] * 4 + [0.5] * 4, [4, 11]),
    ],
)
def test_slow_loader_warns_once_per_episode(waits, warned):
    watch = DataWaitTracker(threshold=0.25, window_steps=4)
    assert warned_at(watch, waits) == warned


def test_monitor_reports_the_slow_loader_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(alerts, "WINDOW_STEPS", 3)
    monkeypatch.setattr(alerts, "DATA_WAIT_WARNING", 0.5)
    monitor = make_monitor(tmp_path)
    for step in range(1, 11):
        wait = 0.8 if step > 5 else 0.1
        monitor.train(step, {"loss": 1.0}, tokens=1, step_time_s=1.0, data_wait_s=wait)
    # Windows of steps 2-4, ..., 5-7: (0.1 + 0.8 + 0.8) / 3 = 0.567 is the first above 0.5.
    (event,) = events(monitor, "slow_loader")
    assert event["step"] == 7 and event["data_wait_share"] == pytest.approx(1.7 / 3)
    assert missing(caplog.text, "data loader", "56.7 %", "3 steps") == []


def test_step_timer_counts_waits_and_excludes_pauses():
    now = 0.0

    def clock():
        return now

    def advance(seconds, value=None):
        nonlocal now
        now += seconds
        return value

    timer = StepTimer(clock)
    assert timer.fetch(lambda: advance(2.0, "batch")) == "batch"
    advance(3.0)
    assert timer.lap() == (5.0, 2.0)
    with timer.paused():
        advance(100.0)
    timer.fetch(lambda: advance(0.5))
    advance(1.0)
    assert timer.lap() == (1.5, 0.5)


def watched(function, **kwargs):
    reports: list[Compilation] = []
    tracker = CompileTracker(jax.jit(function, **kwargs), function.__name__)
    tracker.report_to(reports.append)
    return tracker, reports


def test_the_first_compilation_is_counted_and_timed():
    def step(x):
        return x * 2

    watch, reports = watched(step)
    for _ in range(3):
        watch(jnp.ones(4))
    assert [(r.function, r.count) for r in reports] == [("step", 1)]
    assert reports[0].seconds == watch.seconds > 0


def test_host_array_instead_of_a_device_array_is_no_compilation():
    watch, reports = watched(lambda x: x + 1)
    watch(jnp.ones(4))
    watch(np.ones(4, np.float32))
    assert watch._function._cache_size() == 2  # new to jit's call cache, but not to XLA
    assert len(reports) == 1


@pytest.mark.parametrize("in_thread", [False, True])
def test_other_programs_compiled_meanwhile_do_not_count(in_thread):
    step = jax.jit(lambda x: x + 1)
    step(jnp.ones(4))

    class Busy:
        """A step during which another program compiles (an evaluation, a save)."""

        _cache_size = staticmethod(step._cache_size)

        def __call__(self, x):
            compile_another = lambda: jax.jit(lambda y: y - 2)(jnp.zeros(3))
            other = threading.Thread(target=compile_another)
            other.start() if in_thread else compile_another()
            if in_thread:
                other.join()
            return step(x)

    reports: list[Compilation] = []
    watch = CompileTracker(Busy(), "busy")
    watch.report_to(reports.append)
    # An array on the host is new to jit's call cache, but not to XLA.
    watch(np.ones(4, np.float32) if in_thread else jnp.ones(4))
    assert reports == []
    watch(jnp.ones(5))
    assert len(reports) == 1


def test_monitor_warns_of_the_second_compilation(tmp_path, caplog):
    monitor = make_monitor(tmp_path)
    step = monitor.track_compiles(CompileTracker(jax.jit(lambda x: x + 1), "train_step"))
    step(jnp.ones(4))
    assert events(monitor, "recompile") == []
    step(jnp.ones(5))
    (first,) = events(monitor, "compile")
    assert first["function"] == "train_step" and first["seconds"] > 0
    (second,) = events(monitor, "recompile")
    assert second["level"] == "warning"
    assert missing(caplog.text, "train_step", "compilation 2") == []
    summary = monitor.summary("finished")
    assert summary["recompilations"] == 1 and summary["warnings"] == 1
    assert summary["compile_s"] == step.seconds


class FakeDevice:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_memory_is_the_maximum_over_devices():
    devices = [
        FakeDevice({"bytes_in_use": 5, "peak_bytes_in_use": 9, "bytes_limit": 100}),
        FakeDevice({"bytes_in_use": 7, "peak_bytes_in_use": 8, "bytes_limit": 100}),
    ]
    assert device_memory(devices) == {
        "memory_bytes": 7,
        "memory_peak_bytes": 9,
        "memory_limit_bytes": 100,
    }


def test_backend_without_memory_stats_has_no_memory_fields():
    assert device_memory(jax.devices()) == {}
    assert device_memory([FakeDevice(None), FakeDevice({"num_allocs": 3})]) == {}
