"""Stragglers, causes of idle devices, and GPU sensors."""

import json
import logging
import pickle
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from monitored import Clock
from refusals import missing

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run.metrics_log import read_records
from jaxdist.run.monitoring import environment as sensors_module
from jaxdist.run.monitoring import monitor as monitor_module
from jaxdist.run.monitoring.console import idle_lines
from jaxdist.run.monitoring.environment import GpuStats
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.monitoring.stragglers import (
    MAX_LISTED,
    StragglerDetector,
    find_stragglers,
    newest_common,
    summarize,
    table,
)
from jaxdist.run.monitoring.summary import RunSummary, Throughput
from jaxdist.run.monitoring.timers import StepTimer
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.step_report import StepReporter
from jaxdist.runtime import coordination

pytestmark = pytest.mark.usefixtures("propagating")


@pytest.mark.parametrize(("blocking", "expected"), [(False, 0.5), (True, 0.75)])
def test_device_wait_is_timed_and_includes_a_blocking_dispatch(blocking, expected):
    clock = Clock()
    timer = StepTimer(clock, blocking_dispatch=blocking)
    for _ in range(2):  # the second lap starts at 0 again
        assert timer.dispatch(clock.advance, 0.25) == "value"
        assert timer.read(lambda: clock.advance(0.5)) == "value"
        clock.advance(0.125)
        assert timer.lap() == (0.875, 0.0)
        assert timer.device_wait_s == expected


@pytest.mark.parametrize(("blocking", "expected"), [(False, 0.75), (True, 1.25)])
def test_replica_comparison_counts_as_device_wait(blocking, expected):
    clock = Clock()
    timer = StepTimer(clock, blocking_dispatch=blocking)
    replicas = types.SimpleNamespace(
        start=lambda step, state, *, force: clock.advance(0.5),
        result=lambda: clock.advance(0.25) and None,
    )
    none = dict.fromkeys(("monitor", "watchdog", "guard", "checkpointer", "start_times", "parts"))
    reporter = StepReporter(timer=timer, sdc_check=replicas, **none)
    reporter._check_replicas()  # of the previous step
    reporter.start_check(7, None, force=True)
    timer.read(lambda: clock.advance(0.5))
    assert timer.lap() == (1.25, 0.0)
    assert timer.device_wait_s == expected


def test_devices_that_were_never_idle_count_as_busy():
    totals = RunSummary([], start_step=0, unit="tokens")
    for _ in range(10):
        totals.add_times(1.0, 0.5, 0.3)  # data took half of the step, yet the results arrived later
    summary = totals.summary(Throughput(num_devices=1), [], 10.0)
    assert summary["busy_share"] == 1.0 and "dry_data_share" not in summary


def test_idle_steps_are_split_into_data_and_host_time():
    totals = RunSummary([], start_step=0, unit="tokens")
    for _ in range(6):
        totals.add_times(1.0, 0.1, 0.8)
    for _ in range(4):
        totals.add_times(1.5, 1.2, 0.0)
    summary = totals.summary(Throughput(num_devices=1), [], 12.0)
    assert summary["busy_share"] == pytest.approx(0.5)
    assert summary["dry_data_share"] == pytest.approx(4.8 / 12)
    assert summary["dry_host_share"] == pytest.approx(1.2 / 12)


def test_only_low_utilization_is_explained():
    dry = {"busy_share": 0.5, "dry_data_share": 0.4, "dry_host_share": 0.1, "wall_s": 10.0}
    text = " ".join(idle_lines(dry))
    assert missing(text, "50.0 %", "40.0 % waiting", "10.0 % work", "tokenize") == []
    assert idle_lines({**dry, "busy_share": 0.8}) == []
    short = {"steps_s": 60.0, "wall_s": 100.0, "compile_s": 25.0}
    assert missing(" ".join(idle_lines(short)), "compilation 25.0 %", "saves 15.0 %") == []
    assert idle_lines({**short, "steps_s": 80.0}) == []


def make_report(host: str, steps: list[tuple[float, float, float]], **extra) -> dict:
    """Return the report of an interval, from (data, host, device) seconds of its steps."""
    times = [(data_s + host_s + device_s, data_s, device_s) for data_s, host_s, device_s in steps]
    return {"step": 50, "host": host, **summarize(times), **extra}


def make_even_report(host: str, data_s: float, host_s: float, device_s: float, **extra) -> dict:
    """Return the report of twelve equal steps."""
    return make_report(host, 12 * [(data_s, host_s, device_s)], **extra)


def test_equal_processes_have_no_straggler():
    assert find_stragglers({i: make_even_report(f"n{i}", 0.01, 0.02, 0.97) for i in range(4)}) == []
    assert find_stragglers({0: make_even_report("n0", 0.9, 0.1, 0.0)}) == []  # a single process
    every = {i: make_even_report(f"n{i}", 0.9, 0.1, 0.0) for i in range(4)}
    assert find_stragglers(every) == []  # all wait for data: slow_loader reports it
    assert find_stragglers({**every, 2: make_even_report("n2", 0.0, 0.1, 0.9)}) == []  # the fastest
    every = {i: make_even_report(f"n{i}", 0.05, 0.05, 0.9) for i in range(4)}
    overlapped = make_even_report("n2", 0.6, 0.05, 0.35)  # the devices worked meanwhile
    assert find_stragglers({**every, 2: overlapped}) == []


@pytest.mark.parametrize(("data_s", "host_s", "cause"), [(0.9, 0.1, "data"), (0.1, 0.9, "host")])
def test_process_that_never_waits_for_devices_is_the_straggler(data_s, host_s, cause):
    reports = {i: make_even_report(f"n{i}", 0.05, 0.05, 0.9) for i in range(4)}
    reports[2] = make_even_report("n2", data_s, host_s, 0.0)
    (slow,) = find_stragglers(reports)
    assert (slow.process, slow.host, slow.cause) == (2, "n2", cause)
    assert slow.lost_s == pytest.approx(0.9)
    assert missing(slow.text, "process 2 on n2", "12 of 12 steps", "900 ms") == []


def test_two_alternating_stragglers_are_both_named():
    last, first = (0.9, 0.1, 0.0), (0.4, 0.1, 0.5)
    reports = {i: make_even_report(f"n{i}", 0.05, 0.1, 0.85) for i in range(4)}
    reports[1], reports[3] = (
        make_report("n1", 6 * [last, first]),
        make_report("n3", 6 * [first, last]),
    )
    assert [slow.process for slow in find_stragglers(reports)] == [1, 3]


# A loader of 60 ms from step 24 on, two prefetched batches, and process 0 that waits for it.
WAITS, PREFETCHED, SLOW = (0.0, 0.003, 0.037), (0.0, 0.004, 0.036), (0.052, 0.006, 0.002)


@pytest.mark.parametrize(
    ("before", "after"),
    [(24, 25), (2, 6), (0, 8), (32, 17)],
    ids=["interval50", "interval8", "whole", "a_third"],
)
def test_loader_that_turns_slow_within_an_interval_is_named(before, after):
    reports = {
        0: make_report("n0", before * [WAITS] + after * [(0.0, 0.003, 0.057)]),
        1: make_report("n1", before * [PREFETCHED] + after * [SLOW]),
    }
    (slow,) = find_stragglers(reports)
    assert (slow.process, slow.cause) == (1, "data")
    assert missing(slow.text, f"{after} of {before + after} steps", "52 ms") == []
    assert slow.lost_s == pytest.approx((0.058 - 0.003) * after / (before + after))


def test_few_late_steps_are_ignored():
    reports = {
        0: make_report("n0", 49 * [(0.0, 0.003, 0.057)]),
        1: make_report("n1", 33 * [PREFETCHED] + 16 * [SLOW]),
    }
    assert find_stragglers(reports) == []


@pytest.mark.parametrize(("late", "is_named"), [(13, False), (20, False), (40, True)])
def test_rare_late_steps_need_a_higher_cost(late, is_named):
    steps = late * [(0.0, 0.035, 0.001)] + (52 - late) * [(0.0, 0.015, 0.035)]
    reports = {0: make_report("n0", 52 * [(0.0, 0.015, 0.035)]), 1: make_report("n1", steps)}
    assert bool(find_stragglers(reports)) == is_named


# Process 0 on two cores that three other programs shared: (step, device) milliseconds of the worst
# 24 of 3,200 clean steps. It came last in six of them, because its core was busy.
JITTER = [
    *((13.9, 0.3), (18.8, 18.4), (14.1, 13.6), (9.3, 8.8), (37.5, 0.8), (6.8, 0.4), (13.0, 0.4)),
    *((32.4, 18.3), (12.3, 6.4), (16.2, 2.4), (8.1, 2.1), (23.9, 16.3), (11.8, 11.4), (8.1, 6.5)),
    *((29.0, 13.6), (17.2, 16.7), (13.2, 0.6), (18.6, 17.3), (8.4, 7.9), (22.2, 4.6), (10.1, 0.8)),
    *((8.6, 7.4), (10.7, 5.1), (6.7, 6.2)),
]


@pytest.mark.parametrize("length", [4, 8, 16, 24])
def test_jitter_of_shared_cores_is_no_straggler(length):
    for first in range(len(JITTER) - length + 1):
        part = JITTER[first : first + length]
        steps = [(0.0, (step - device) / 1e3, device / 1e3) for step, device in part]
        calm = [(0.0, 0.0015, step / 1e3 - 0.0015) for step, _ in part]
        assert find_stragglers({0: make_report("n0", steps), 1: make_report("n1", calm)}) == []


def test_a_throttled_gpu_is_named():
    reports = {
        i: make_even_report(f"n{i}", 0.0, 0.1, 0.9, gpu_clock_mhz=1980.0, gpu_temperature_c=60.0)
        for i in range(4)
    }
    reports[1] |= {"gpu_clock_mhz": 1200.0, "gpu_temperature_c": 91.0}
    (slow,) = find_stragglers(reports)
    assert (slow.process, slow.cause) == (1, "gpu clock")
    assert missing(slow.text, "1200 MHz", "1980", "91 °C") == []


class Counted(dict):
    """A report that counts how often its numbers are read, in any report."""

    reads = 0

    def __getitem__(self, name):
        Counted.reads += 1
        return super().__getitem__(name)


def random_reports(count: int) -> dict[int, Counted]:
    """Return reports of processes with ties, slow loaders, slow hosts and throttled GPUs."""
    numbers, reports = np.random.default_rng(count), {}
    for i in range(count):
        data_s, host_s = numbers.choice([0.01, 0.05, 0.4], 2, p=[0.6, 0.3, 0.1])
        late = (float(data_s), float(host_s), 0.0)
        other = (0.01, 0.01, float(data_s + host_s))
        extra = {"gpu_clock_mhz": float(numbers.choice([1980, 1950, 1500]))} if i % 3 else {}
        num_late = int(numbers.integers(0, 13))
        steps = num_late * [late] + (12 - num_late) * [other]
        reports[i] = Counted(make_report(f"n{i}", steps, **extra))
    return reports


def test_every_process_is_compared_with_the_median_of_the_others():
    for count in (2, 3, 4, 7, 40, 41):
        reports = random_reports(count)
        expected = {}
        for i, one in reports.items():
            others = [other for j, other in reports.items() if j != i]
            median = lambda name, others=others: np.median([x[name] for x in others if name in x])
            late = one["late_steps"] / 12
            data_s = one["late_data_s"] - median("data_wait_s")
            lost_s = late * (data_s + one["late_host_s"] - median("host_s"))
            step_s = np.median([x["step_time_s"] for x in reports.values()])
            if one["late_steps"] >= 5 and lost_s * late > 0.1 * step_s:
                expected[i] = "data" if 2 * data_s * late >= lost_s else "host"
            elif one.get("gpu_clock_mhz", np.inf) < 0.85 * median("gpu_clock_mhz"):
                expected[i] = "gpu clock"
        slow = {one.process: one.cause for one in find_stragglers(reports)}
        assert slow == expected and (count < 40 or len(set(slow.values())) == 3)


def test_comparing_and_listing_processes_reads_each_report_a_few_times():
    for count in (64, 4096):
        reports, Counted.reads = random_reports(count), 0
        table(reports, find_stragglers(reports))
        assert Counted.reads < 40 * count


def test_times_of_a_large_job_are_summarized_with_its_stragglers():
    reports = {i: make_even_report(f"n{i}", 0.01, i / 1000, 1 - i / 1000) for i in range(201)}
    reports[33] = make_even_report("n33", 1.5, 0.1, 0.0)
    reports = {i: {**one, "gpu_clock_mhz": 1000 if i == 7 else 1980} for i, one in reports.items()}
    record = table(reports, find_stragglers(reports))
    assert len(json.dumps(record)) < 12_000
    assert len(record["of"]) == MAX_LISTED and record["num_processes"] == 201
    assert record["of"] == [7, 33, *range(139, 201)]  # 7 is slow, the others waited least
    row = record["of"].index(33)
    assert (record["hosts"][row], record["means"]["data_wait_s"][row]) == ("n33", 1.5)
    every = [one["host_s"] for one in reports.values()]
    assert record["quantiles"]["host_s"] == list(np.quantile(every, [0, 0.1, 0.5, 0.9, 1]))
    small = table({i: reports[i] for i in range(MAX_LISTED)}, [])
    assert small["of"] == list(range(MAX_LISTED)) and "quantiles" not in small


def test_processes_are_compared_over_the_same_interval():
    of = lambda *steps: [{"step": step, "host": f"h{step}"} for step in steps]
    common = {0: {"step": 50, "host": "h50"}, 1: {"step": 50, "host": "h50"}}
    assert newest_common({0: of(50, 100), 1: of(50)}) == common  # 1 has not reported 100 yet
    assert newest_common({0: of(50, 100), 1: of(50, 100)})[1]["step"] == 100
    assert newest_common({0: of(100, 150), 1: of(50)}) == newest_common({}) == {}


def test_interval_ends_only_with_steps_and_other_processes():
    watch = StragglerDetector(2, 4)
    assert not watch.ends(4)  # no step was timed
    watch.add(1.0, 0.25, 0.5)
    assert watch.ends(4) and not watch.ends(5)
    assert watch.end_interval(4, {})["host_s"] == 0.25
    assert not watch.ends(8)
    for alone in (StragglerDetector(1, 4), StragglerDetector(2, 0)):
        size = len(pickle.dumps(alone))
        alone.add(1.0, 0.25, 0.5)
        assert not alone.ends(4)
        assert len(pickle.dumps(alone)) == size  # a long run must not keep them all


def test_interval_stays_open_until_the_last_process_has_reported(monkeypatch):
    published = {}
    monkeypatch.setattr(coordination, "publish", lambda topic, value: published.update({0: value}))
    monkeypatch.setattr(coordination, "published", lambda topic: published)
    watch = StragglerDetector(2, 4)
    watch.add(1.0, 0.25, 0.5)
    watch.end_interval(4, {})
    assert watch.everyone() == {}
    published[1] = published[0]  # a step later
    assert set(watch.everyone()) == {0, 1}
    assert watch.everyone() == {}


def finish(tmp_path, steps, **config) -> dict:
    run = RunDirectory.open(tmp_path / "run")
    settings = MonitoringConfig(tracker=[], **config)
    monitor = Monitor(settings, run, total_steps=len(steps) + 1, clock=Clock())
    for i, (step_s, data_s, device_s) in enumerate([steps[0], *steps], start=1):
        monitor.train(
            i,
            {"loss": jnp.float32(1)},
            tokens=10,
            step_time_s=step_s,
            data_wait_s=data_s,
            device_wait_s=device_s,
        )
    summary = monitor.summary("finished")
    monitor.close()
    return summary


def test_summary_explains_idle_devices(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxdist")
    summary = finish(tmp_path, [(1.0, 0.9, 0.0)] * 4)
    assert summary["busy_share"] == 0.0
    assert summary["device_wait_share"] == 0.0
    assert summary["dry_data_share"] == pytest.approx(0.9)
    assert missing(caplog.text, *idle_lines(summary)) == [] and idle_lines(summary)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["busy_share"] == 0.0


class NVMLError(Exception):
    pass


def fake_nvml(**broken) -> types.SimpleNamespace:
    """Install a fake NVML with three GPUs; GPU i has a clock of 1000 + i MHz and 50 + i × 10 °C."""
    utilisation = {0: 90, 1: 50, 2: 10}

    def refuse(*_):
        raise NVMLError("Not Supported")

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        open=0,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}[uuid],
        nvmlDeviceGetUtilizationRates=lambda h: types.SimpleNamespace(gpu=utilisation[h]),
        nvmlDeviceGetPowerUsage=lambda h: 100_000 * (h + 1),
        nvmlDeviceGetTemperature=lambda h, _: 50 + 10 * h,
        nvmlDeviceGetClockInfo=lambda h, _: 1000 + h,
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(used=h << 30),
    )
    module.nvmlInit = lambda: setattr(module, "open", module.open + 1)
    module.nvmlShutdown = lambda: setattr(module, "open", module.open - 1)
    for name in broken:
        setattr(module, name, refuse)
    return module


def gpus(*numbers: int) -> list:
    return [types.SimpleNamespace(platform="gpu", local_hardware_id=n, id=n + 100) for n in numbers]


@pytest.mark.parametrize(
    ("environ", "numbers", "expected"),
    [
        ({}, (0, 1, 2), (0.5, 200.0, 70.0, 1000.0, 2 << 30)),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, (0,), (0.1, 300.0, 70.0, 1002.0, 2 << 30)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, (0,), (0.5, 200.0, 60.0, 1001.0, 1 << 30)),
    ],
    ids=["all", "by_number", "by_uuid"],
)
def test_sensors_read_the_gpus_of_this_process(monkeypatch, environ, numbers, expected):
    module = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    sensors = GpuStats(gpus(*numbers), environ)
    names = ("utilization", "power_w", "temperature_c", "clock_mhz", "memory_used_bytes")
    assert sensors.read() == pytest.approx(
        {f"gpu_{name}": value for name, value in zip(names, expected, strict=True)}
    )
    sensors.close()
    sensors.close()
    assert module.open == 0


def test_unsupported_gpu_readings_are_omitted(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetUtilizationRates=True))
    summary = GpuStats(gpus(0), {}).read()
    assert "gpu_utilization" not in summary and summary["gpu_power_w"] == 100.0


@pytest.mark.parametrize(
    ("module", "platform", "message"),
    [
        (None, "gpu", "nvidia-ml-py"),
        (fake_nvml(nvmlInit=True), "gpu", "Not Supported"),
        (None, "cpu", ""),
    ],
)
def test_without_nvml_nothing_is_read_and_gpus_cause_one_line(
    monkeypatch, module, platform, message
):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    messages = []
    devices = [types.SimpleNamespace(platform=platform, local_hardware_id=0, id=0)]
    assert GpuStats(devices, {}, messages.append).read() == {}
    assert len(messages) == bool(message) and message in "".join(messages)


def test_readings_are_in_records_and_summary(tmp_path, monkeypatch):
    class Warmer(GpuStats):
        celsius = 60.0

        def read(self):
            self.celsius += 1
            return {"gpu_temperature_c": self.celsius, "gpu_power_w": 2 * self.celsius}

    monkeypatch.setattr(monitor_module, "GpuStats", Warmer)
    summary = finish(tmp_path, [(1.0, 0.0, 1.0)] * 3, log_interval_steps=1)
    assert (summary["gpu_temperature_c"], summary["gpu_power_w"]) == (64.0, 125.0)
    trained = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["gpu_temperature_c"] for r in trained] == [61.0, 62.0, 63.0, 64.0]
    assert sensors_module.GpuStats is not Warmer
