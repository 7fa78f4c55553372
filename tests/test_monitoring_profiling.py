"""Traces of steps: when they are taken, and their shares of communication in synthetic profiles."""

import gzip
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import Fork, tiny
from jax.profiler import ProfileData
from refusals import missing

from jaxdist.config.monitoring import MonitoringConfig, parse_profile_steps
from jaxdist.run.monitoring.profiler import Profiler, device_times, merged, read_trace
from jaxdist.runtime import TraceRequests
from jaxdist.runtime.storage import Location


def steps_in(trace: dict) -> list[int]:
    """Return the step numbers that jax wrote into a trace, read from the Perfetto file."""
    events = json.loads(gzip.decompress(Path(trace["file"]).read_bytes()))["traceEvents"]
    numbers = [e["args"]["step_num"] for e in events if e.get("name") == "train"]
    return sorted(int(number) for number in numbers)


def walk(profiler: Profiler, steps) -> None:
    f = jax.jit(lambda x: x * 2)
    for step in steps:
        if profiler.reaches(step):
            profiler.turn(step)
        f(jnp.ones(4)).block_until_ready()
    profiler.stop(step)  # as the report of the last step does


@pytest.mark.parametrize(("text", "steps"), [("10:13", (10, 13)), (" 7 ", (7, 7)), ("1:1", (1, 1))])
def test_step_range_is_parsed(text, steps):
    assert parse_profile_steps(text) == steps


@pytest.mark.parametrize("text", ["13:10", "0:3", "a:b", "10:", "1:2:3", "-1"])
def test_other_step_ranges_are_rejected_with_an_example(text):
    (problem,) = MonitoringConfig(profile=text).problems()
    assert text in problem and "10:13" in problem


def test_trace_contains_exactly_the_planned_steps(tmp_path):
    profiler = Profiler((3, 5), tmp_path)
    walk(profiler, range(1, 9))
    (trace,) = profiler.traces
    assert (trace["first"], trace["last"]) == (3, 5)
    assert steps_in(trace) == [3, 4, 5]
    assert Path(trace["path"]) == tmp_path / "step-3-process-0"
    assert list(Path(trace["path"]).rglob("*.xplane.pb"))


def test_requested_trace_covers_the_next_steps_and_can_be_repeated(tmp_path):
    requests = iter([False, False, True, False, True])
    profiler = Profiler(
        None, tmp_path, process=4, trace_requested=lambda: next(requests), num_steps=2
    )
    walk(profiler, range(1, 9))
    assert [steps_in(trace) for trace in profiler.traces] == [[3, 4], [7, 8]]
    assert Path(profiler.traces[1]["path"]).name == "step-7-process-4"


def test_run_resumed_inside_the_range_traces_the_rest(tmp_path):
    profiler = Profiler((3, 5), tmp_path)
    walk(profiler, range(5, 8))
    assert [steps_in(trace) for trace in profiler.traces] == [[5]]


def test_rollback_ends_the_trace_and_takes_it_once(tmp_path):
    profiler = Profiler((3, 5), tmp_path)
    walk(profiler, [1, 2, 3, 4, 1, 2, 3, 4, 5, 6])
    assert [steps_in(trace) for trace in profiler.traces] == [[3, 4]]


@pytest.mark.parametrize(("steps", "last"), [([3, 4, 5, 6], 5), ([3, 4, 5, 1], 4)])
def test_trace_is_named_after_the_last_completed_step(monkeypatch, tmp_path, steps, last):
    """The run ended before step 6, or rolled back while step 5 was running."""
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *path: None)
    (tmp_path / "step-3-process-0").mkdir()
    profiler = Profiler((3, 9), tmp_path)
    for step in steps:
        if profiler.reaches(step):
            profiler.turn(step)
    profiler.stop()
    assert [(trace["first"], trace["last"]) for trace in profiler.traces] == [(3, last)]


def test_end_of_run_ends_the_trace(tmp_path):
    profiler = Profiler((3, 50), tmp_path)
    walk(profiler, range(1, 5))
    assert [(t["first"], t["last"]) for t in profiler.traces] == [(3, 4)]


def test_busy_profiler_is_a_warning_and_the_run_continues(tmp_path):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        profiler = Profiler((2, 3), tmp_path)
        walk(profiler, range(1, 5))
        assert profiler.traces == []
    finally:
        jax.profiler.stop_trace()


@pytest.mark.parametrize("fails", ["start_trace", "files"])
def test_unavailable_store_for_a_trace_does_not_end_the_run(tmp_path, monkeypatch, fails):
    class Away(Location):
        is_local = False

        def files(self):
            raise OSError("away")

    def fail(path):
        raise RuntimeError("taken")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jax.profiler, "start_trace", fail if fails == "start_trace" else Path)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    profiler = Profiler((2, 3), Away("traces"))
    walk(profiler, range(1, 5))
    assert profiler.traces == [] and list(tmp_path.iterdir()) == []


def test_signal_requests_one_trace():
    before = signal.getsignal(signal.SIGUSR2)
    try:
        requests = TraceRequests()
        assert not requests.take()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.take() and not requests.take()
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow
def test_planned_steps_and_those_after_sigusr2_are_traced(tmp_path):
    flags = tiny("--steps=400", "--simulate=2", "--profile", "2:3")
    process = Fork("jaxdist.train", *flags, "--run-dir", tmp_path / "run", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if metrics.exists() and '"step": 4' in metrics.read_text():
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGUSR2)
    output = process.communicate(timeout=200)
    assert process.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "finished"
    planned, trace = summary["profiles"]
    assert steps_in(planned) == [2, 3]
    assert Path(trace["file"]).is_relative_to(tmp_path / "run" / "profile")
    assert "ui.perfetto.dev" in output[0] and f"xprof --logdir {trace['path']}" in output[0]
    numbers = steps_in(trace)
    assert numbers[0] >= 4 and numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_NNT"


def line(name: str, events: list[tuple[str, int, int]], names: list[str]) -> str:
    rows = "".join(
        f"events {{ metadata_id: {names.index(kind) + 1} offset_ps: {1000 * begin} "
        f"duration_ps: {1000 * (end - begin)} }}"
        for kind, begin, end in events
    )
    return f'lines {{ name: "{name}" timestamp_ns: 0 {rows} }}'


def plane(name: str, lines: dict[str, list[tuple[str, int, int]]]) -> str:
    """Return streams or other lines -> (kernel, begin, end) in nanoseconds as an XSpace's text."""
    names = sorted({kind for events in lines.values() for kind, _, _ in events})
    event_names = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{kind}" }} }}'
        for i, kind in enumerate(names, start=1)
    )
    rows = "".join(line(name, events, names) for name, events in lines.items())
    return f'planes {{ name: "{name}" {rows} {event_names} }}'


def times(*planes: str):
    return device_times(ProfileData.from_text_proto(" ".join(planes)))


def test_a_collective_is_exposed_only_while_nothing_else_runs():
    lines = {
        "Stream #7(Compute)": [(GEMM, 0, 40), (GEMM, 60, 100)],
        "Stream #12(Compute)": [(ALL_REDUCE, 30, 70)],
    }
    (shares,) = times(plane("/device:GPU:3", lines))
    assert shares.device == 3 and shares.total_s == pytest.approx(100e-9)
    assert shares.record()["communication_share"] == pytest.approx(0.4)
    assert shares.record()["exposed_share"] == pytest.approx(0.2)
    assert shares.record()["idle_share"] == pytest.approx(0.0)
    assert "40.0 %" in str(shares) and "20.0 %" in str(shares)


def test_lines_that_repeat_kernels_and_copies_are_skipped():
    lines = {
        "Stream #7(Compute)": [(GEMM, 0, 40), ("MemcpyD2H", 40, 90), (GEMM, 90, 100)],
        "XLA Ops": [("all-reduce.7", 0, 100)],
    }
    (shares,) = times(plane("/device:GPU:0", lines), plane("/host:CPU", {"Stream": [(GEMM, 0, 9)]}))
    assert shares.communication_s == shares.exposed_s == 0.0
    assert shares.record()["idle_share"] == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_random_kernels_equal_a_count_of_nanoseconds(seed):
    chance = np.random.default_rng(seed)
    busy = {GEMM: np.zeros(1000, bool), ALL_REDUCE: np.zeros(1000, bool)}
    streams: dict[str, list[tuple[str, int, int]]] = {}
    for i in range(40):
        kind = [GEMM, ALL_REDUCE][i % 2]
        begin = int(chance.integers(0, 980))
        end = begin + int(chance.integers(1, 20))
        busy[kind][begin:end] = True
        streams.setdefault(f"Stream #{i % 3}", []).append((kind, begin, end))
    (shares,) = times(plane("/device:GPU:0", streams))
    either = np.flatnonzero(busy[GEMM] | busy[ALL_REDUCE])
    assert shares.total_s == pytest.approx(1e-9 * (either[-1] + 1 - either[0]))
    assert shares.busy_s == pytest.approx(1e-9 * len(either))
    assert shares.communication_s == pytest.approx(1e-9 * busy[ALL_REDUCE].sum())
    assert shares.exposed_s == pytest.approx(1e-9 * (busy[ALL_REDUCE] & ~busy[GEMM]).sum())


def test_adjacent_spans_are_merged():
    assert merged([(5, 6), (0, 2), (2, 4), (1, 3)]) == [(0, 4), (5, 6)]


def test_a_trace_ends_with_the_shares_of_its_gpus(tmp_path, monkeypatch, propagating, caplog):
    """The synthetic profile of a GPU is written next to the trace of this CPU."""
    profiler = Profiler((1, 1), tmp_path)
    assert profiler.reaches(1)
    profiler.turn(1)
    text = plane("/device:GPU:0", {"Stream #7": [(GEMM, 0, 60), (ALL_REDUCE, 60, 100)]})
    newest = tmp_path / "step-1-process-0" / "plugins" / "profile" / "9999"
    newest.mkdir(parents=True)
    (newest / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    with caplog.at_level("INFO", logger="jaxdist"):
        profiler.stop(1)
    assert missing(caplog.text, "GPU 0", "communication 40.0 %") == []
    (device,) = profiler.traces[0]["devices"]
    assert device["exposed_share"] == pytest.approx(0.4)


def test_a_trace_without_gpus_reports_no_shares(tmp_path):
    profiler = Profiler((1, 1), tmp_path)
    profiler.turn(1)
    profiler.stop(1)
    assert "devices" not in profiler.traces[0]
    assert read_trace(tmp_path) == []
