"""Shares of communication against a count of single nanoseconds, in synthetic profiles.

There is no GPU here: the profiles have the format of jax's profiler for GPUs (a plane per device, a
line per stream, NCCL's kernels by name). No trace of a real GPU has confirmed the format.
"""

import numpy as np
import pytest
from jax.profiler import ProfileData
from refusals import missing

from jaxdist.run.monitoring.profiler import Profiler, device_times, merged, read_trace

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
