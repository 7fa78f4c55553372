"""Straggler detection: find the process that the others wait for.

Collectives synchronize a job, so all processes measure the same step time. A process that waits for
its devices delays nobody. If a process did not wait, its devices had run out of work: the step is
late. The straggler spends more time on data or on the host in its late steps than the others do.

Late steps are counted one by one, because a mean over the interval would hide a fault that starts
in the middle of it. Jitter makes a few steps late. The fewer late steps there are, the more time
they must cost.

At the end of an interval each process publishes its last two intervals, without a barrier. Process
0 compares the newest interval that all processes have, so a slowdown of all processes at once is
attributed to none.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import socket
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdist.runtime import coordination
from jaxdist.runtime.formatting.numbers import percent

_MIN_COST = 0.1
"""Minimum cost of a straggler as a share of the step time; higher if it is not always late."""
_MIN_DEVICE_WAIT = 0.05
"""Share of a step spent waiting for the devices, above which the step is not late."""
_LATE_SHARE, _LATE_STEPS = 1 / 3, 5
"""A process counts as slow from this share and this number of late steps per interval, or two
thirds of a shorter interval. Jitter of overloaded cores made 13 of 52, 3 of 8 and 2 of 4 steps
late. A slow loader with saves every five steps made three fifths late."""
_SLOW_CLOCK = 0.85
"""Share of the median GPU clock below which a GPU is reported."""
_COMPARED = ("data_wait_s", "host_s", "gpu_clock_mhz")
"""Numbers of a process that are compared with the median of the others."""
MAX_LISTED = 64
"""Processes listed one by one in metrics.jsonl; larger jobs are summarized."""
_TOPIC = "monitoring/processes"

READY_SHARE = 0.02
"""A wait for results below this share of a step is treated as no wait."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process that the others wait for; `cause` is "data", "host" or "gpu clock".

    `lost_s` is the mean extra time per step relative to the others, in seconds; 0 for a clock.
    """

    process: int
    host: str
    cause: str
    lost_s: float
    text: str


class StragglerDetector:
    """Collects step times; exchanges their means every `interval_steps` steps (0 = never)."""

    def __init__(self, num_processes: int, interval_steps: int):
        self._num_processes = num_processes
        self._interval_steps = interval_steps if num_processes > 1 else 0
        self._steps: list[tuple[float, float, float]] = []
        self._published: list[dict[str, Any]] = []
        self._newest = self._compared = 0  # step at which the interval ended

    def add(self, step_time_s: float, data_wait_s: float, device_wait_s: float) -> None:
        """Record one step: its seconds, and the seconds spent waiting for data and for devices."""
        if self._interval_steps:  # otherwise the list would grow without limit
            self._steps.append((step_time_s, data_wait_s, device_wait_s))

    def ends(self, step: int) -> bool:
        """Return whether `step` ends an interval of recorded steps; False if none are recorded."""
        return bool(self._steps) and step % self._interval_steps == 0

    def end_interval(self, step: int, extra: Mapping[str, float]) -> dict[str, Any]:
        """Publish and return this process's mean times in the interval that ends with `step`."""
        own = {"step": step, "host": socket.gethostname(), **summarize(self._steps), **extra}
        self._steps.clear()
        self._newest = step
        self._published = [*self._published[-1:], own]
        coordination.publish(_TOPIC, self._published)
        return own

    def everyone(self) -> dict[int, dict[str, Any]]:
        """Return, by process, the newest interval that all have published; {} if it is not new."""
        if self._compared >= self._newest:
            return {}
        reports = coordination.published(_TOPIC)
        if len(reports) < self._num_processes:
            return {}
        newest = newest_common(reports)
        step = next((one["step"] for one in newest.values()), 0)
        if step <= self._compared:
            return {}
        self._compared = step
        return newest


def summarize(steps: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Return means over all steps, and over the late steps (0 if no step is late).

    In a late step the process hardly waited for its devices, whatever the duration of the step.
    Each step is (seconds, seconds waiting for data, seconds waiting for devices).
    """
    late = [one for one in steps if one[2] <= _MIN_DEVICE_WAIT * one[0]]
    step_time_s, data_wait_s, device_wait_s = _means(steps)
    late_step_s, late_data_s, late_device_s = _means(late) if late else (0.0, 0.0, 0.0)
    return {
        "num_steps": len(steps),
        "step_time_s": step_time_s,
        "data_wait_s": data_wait_s,
        "device_wait_s": device_wait_s,
        "host_s": max(0.0, step_time_s - data_wait_s - device_wait_s),
        "late_steps": len(late),
        "late_data_s": late_data_s,
        "late_host_s": max(0.0, late_step_s - late_data_s - late_device_s),
    }


def _means(steps: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    step_s, data_s, device_s = zip(*steps, strict=True)
    return statistics.fmean(step_s), statistics.fmean(data_s), statistics.fmean(device_s)


def newest_common(reports: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Return process -> its report of the newest interval that all have published; {} if none."""
    steps = [{one["step"] for one in intervals} for intervals in reports.values()]
    newest = max(set.intersection(*steps), default=None) if steps else None
    return {
        process: dict(one)
        for process, intervals in reports.items()
        for one in intervals
        if one["step"] == newest
    }


def find_stragglers(reports: Mapping[int, Mapping[str, Any]]) -> list[Straggler]:
    """Return the stragglers by the reports of `StragglerDetector.everyone`, the slowest first."""
    if len(reports) < 2:
        return []
    stragglers = []
    median_step_s = statistics.median(one["step_time_s"] for one in reports.values())
    others = {name: _Others(reports.values(), name) for name in _COMPARED}
    for process, one in reports.items():
        slow = _slow(process, one, others, median_step_s) or _slow_clock(process, one, others)
        if slow is not None:
            stragglers.append(slow)
    return sorted(stragglers, key=lambda slow: -slow.lost_s)


def table(
    reports: Mapping[int, Mapping[str, Any]], stragglers: Sequence[Straggler]
) -> dict[str, Any]:
    """Return the fields of the event `process_times`: process numbers `of`, and their mean times.

    Above `MAX_LISTED` processes, `of` has the stragglers and the processes that waited least for
    their devices, and `quantiles` describes all: name -> minimum, 10 %, median, 90 %, maximum.
    """
    names = ("step_time_s", "data_wait_s", "device_wait_s", "host_s")
    listed, summary = list(reports), {}
    if len(reports) > MAX_LISTED:
        named = dict.fromkeys(slow.process for slow in stragglers)
        by_wait = heapq.nsmallest(MAX_LISTED, reports, lambda i: reports[i]["device_wait_s"])
        listed = sorted(list(dict.fromkeys([*named, *by_wait]))[:MAX_LISTED])
        quantiles = {}
        for name in names:
            ordered = sorted(one[name] for one in reports.values())
            last = len(ordered) - 1
            quantiles[name] = [ordered[round(share * last)] for share in (0, 0.1, 0.5, 0.9, 1)]
        summary = {"num_processes": len(reports), "quantiles": quantiles}
    means = {name: [reports[i][name] for i in listed] for name in names}
    return {"of": listed, "hosts": [reports[i]["host"] for i in listed], "means": means, **summary}


class _Others:
    """Medians over all processes but one of the number `name`, which some reports may lack."""

    def __init__(self, reports: Iterable[Mapping[str, Any]], name: str):
        self._name = name
        self._ordered = sorted(one[name] for one in reports if name in one)

    def median_without(self, one: Mapping[str, Any]) -> float | None:
        """Return the median over processes other than that of report `one`; None without others."""
        left_out = bisect.bisect_left(self._ordered, one[self._name])
        at = lambda i: self._ordered[i + (i >= left_out)]
        middle, is_odd = divmod(len(self._ordered) - 1, 2)
        if middle + is_odd == 0:
            return None
        return at(middle) if is_odd else (at(middle - 1) + at(middle)) / 2


def _slow(
    process: int, one: Mapping[str, Any], others: Mapping[str, _Others], median_step_s: float
) -> Straggler | None:
    late, steps = one["late_steps"], one["num_steps"]
    if late < max(_LATE_SHARE * steps, min(_LATE_STEPS, 2 / 3 * steps)):
        return None
    data_s = one["late_data_s"] - (others["data_wait_s"].median_without(one) or 0.0)
    host_s = one["late_host_s"] - (others["host_s"].median_without(one) or 0.0)
    lost_s = (data_s + host_s) * late / steps
    if lost_s * late <= _MIN_COST * median_step_s * steps:  # fewer late steps must cost more
        return None
    if data_s >= host_s:
        cause, activity = "data", f"waits {1e3 * one['late_data_s']:.0f} ms for its data"
        fix = "Check its disk and network, and other programs that use them."
    else:
        cause, activity = "host", f"works {1e3 * one['late_host_s']:.0f} ms on the host"
        fix = "Check for other programs on its cores."
    text = (
        f"process {process} on {one['host']} delays the others: in {late} of {steps} steps it "
        f"{activity}, and is {1e3 * (data_s + host_s):.0f} ms slower than they are "
        f"({percent(lost_s / median_step_s, 0)} of the time). {fix}"
    )
    return Straggler(process, str(one["host"]), cause, lost_s, text)


def _slow_clock(
    process: int, one: Mapping[str, Any], others: Mapping[str, _Others]
) -> Straggler | None:
    if "gpu_clock_mhz" not in one:
        return None
    median = others["gpu_clock_mhz"].median_without(one)
    if median is None or one["gpu_clock_mhz"] >= _SLOW_CLOCK * median:
        return None
    text = (
        f"a GPU of process {process} on {one['host']} runs at {one['gpu_clock_mhz']:.0f} MHz, "
        f"the median of the others is {median:.0f}"
    )
    for name, words in (("gpu_temperature_c", "{:.0f} °C"), ("gpu_power_w", "{:.0f} W")):
        if name in one:
            text += ", " + words.format(one[name])
    text += ". Every step waits for it: check its cooling and power limit."
    return Straggler(process, str(one["host"]), "gpu clock", 0.0, text)
