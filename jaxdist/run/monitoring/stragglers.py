"""Which process the others wait for, from numbers that each process measures anyway.

In a job that computes together all steps take equally long, whoever is slow. What differs is how a
process spends its step: waiting for the devices, waiting for data, or working on the host. A
process that waits for the devices holds nobody up: its own work was hidden behind theirs, or
another process came later. In a step without such a wait the devices had run out of work and this
process came last: a late step. The straggler is the process that spends its late steps longer on
data or on the host than the others do.

Late steps are counted one by one. A mean over the interval would hide a fault that began in the
middle of it or behind prefetched batches. It would also hide one during saves, during which a
process waits for its devices: waiting in some steps does not undo having come last in others. A few
late steps are normal, because cores are shared and files are written. The rarer they are, the more
they must cost.

At the end of an interval each process publishes its numbers and goes on, without a barrier. Process
0 reads what is there, and again after each of the next steps until slow processes have published
too. Each publishes its last two intervals, and the newest that all of them have is compared: what
is slow for all at once is then nobody's fault.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.runtime import coordination
from jaxdist.runtime.formatting.numbers import percent

_LAG = 0.1
"""Share of the step time that a process must cost to be named; more if it is not always late."""
_AHEAD = 0.05
"""Share of a step spent waiting for the devices, above which the step is not late."""
_LATE_SHARE, _LATE_STEPS = 1 / 3, 5
"""Late steps of an interval from which a process counts as slow: this share and this number, or two
thirds of an interval too short for it. Jitter of overloaded cores made 13 of 52, 3 of 8 and 2 of 4
steps late; a slow loader with saves every five steps made three fifths late."""
_SLOW_CLOCK = 0.85
"""Share of the median GPU clock below which a GPU is named."""
_TOPIC = "monitoring/processes"

READY_SHARE = 0.02
"""Share of a step below which waiting for results counts as none: they were there already."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process that the others wait for.

    Attributes:
        cause: "data", "host" or "gpu clock".
        lost_s: seconds of a step, in the interval's mean, beyond what the others need; 0 for a
            clock.
    """

    process: int
    host: str
    cause: str
    lost_s: float
    text: str


class StragglerDetector:
    """Collects the step times of this process, and at the end of an interval those of all.

    An interval has as many steps on all processes; with `interval_steps=0` none ends.
    """

    def __init__(self, num_processes: int, interval_steps: int):
        self._num_processes = num_processes
        self._interval_steps = interval_steps if num_processes > 1 else 0
        self._steps: list[tuple[float, float, float]] = []
        self._published: list[dict[str, Any]] = []
        self._newest = self._compared = 0  # step at which the interval ended

    def add(self, step_time_s: float, data_wait_s: float, device_wait_s: float) -> None:
        """Count one step: its seconds, and those of it spent waiting for data and for devices."""
        if self._interval_steps:  # else nothing would ever take them away
            self._steps.append((step_time_s, data_wait_s, device_wait_s))

    def ends(self, step: int) -> bool:
        """Whether an interval ends with `step`."""
        return bool(self._steps) and step % self._interval_steps == 0

    def end_interval(self, step: int, extra: Mapping[str, float]) -> dict[str, Any]:
        """Publish this process's numbers of the interval that ends with `step`; returns them.

        `extra` adds numbers of this process, e.g. the clocks of its GPUs.
        """
        own = {"step": step, "host": socket.gethostname(), **summarise(self._steps), **extra}
        self._steps.clear()
        self._newest = step
        self._published = [*self._published[-1:], own]
        coordination.publish(_TOPIC, self._published)
        return own

    def everyone(self) -> dict[int, dict[str, Any]]:
        """Process id -> its numbers of the newest interval that all have; {} if it was compared."""
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


def summarise(steps: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Means over steps, and over the late ones among them (0 without any).

    Each step is given by its seconds, those waiting for data, and those waiting for devices.
    """
    late = [one for one in steps if one[2] <= _AHEAD * one[0]]
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
    """The newest interval that every process has published, by process id; {} without one."""
    steps = [{one["step"] for one in intervals} for intervals in reports.values()]
    newest = max(set.intersection(*steps), default=None) if steps else None
    return {
        process: dict(one)
        for process, intervals in reports.items()
        for one in intervals
        if one["step"] == newest
    }


def find_stragglers(reports: Mapping[int, Mapping[str, Any]]) -> list[Straggler]:
    """Processes that others wait for, most costly first; from `StragglerDetector.everyone`."""
    if len(reports) < 2:
        return []
    found = []
    usual_step_s = statistics.median(one["step_time_s"] for one in reports.values())
    for process, one in reports.items():
        others = [reports[i] for i in reports if i != process]
        slow = _slow(process, one, others, usual_step_s) or _slow_clock(process, one, others)
        if slow is not None:
            found.append(slow)
    return sorted(found, key=lambda slow: -slow.lost_s)


def _slow(
    process: int, one: Mapping[str, Any], others: list[Mapping[str, Any]], usual_step_s: float
) -> Straggler | None:
    late, steps = one["late_steps"], one["num_steps"]
    if late < max(_LATE_SHARE * steps, min(_LATE_STEPS, 2 / 3 * steps)):
        return None
    data_s = one["late_data_s"] - statistics.median(other["data_wait_s"] for other in others)
    host_s = one["late_host_s"] - statistics.median(other["host_s"] for other in others)
    lost_s = (data_s + host_s) * late / steps
    if lost_s * late <= _LAG * usual_step_s * steps:  # the rarer, the more it must cost
        return None
    if data_s >= host_s:
        cause, doing = "data", f"waits {1e3 * one['late_data_s']:.0f} ms for its data"
        look = "Look at its disk and network, or at what else reads there."
    else:
        cause, doing = "host", f"works {1e3 * one['late_host_s']:.0f} ms on the host"
        look = "Look at what else runs on its cores."
    text = (
        f"process {process} on {one['host']} holds the others up: in {late} of {steps} steps it "
        f"{doing}, {1e3 * (data_s + host_s):.0f} ms more than they take "
        f"({percent(lost_s / usual_step_s, 0)} of the time). {look}"
    )
    return Straggler(process, str(one["host"]), cause, lost_s, text)


def _slow_clock(
    process: int, one: Mapping[str, Any], others: list[Mapping[str, Any]]
) -> Straggler | None:
    clocks = [other["gpu_clock_mhz"] for other in others if "gpu_clock_mhz" in other]
    if not clocks or "gpu_clock_mhz" not in one:
        return None
    usual = statistics.median(clocks)
    if one["gpu_clock_mhz"] >= _SLOW_CLOCK * usual:
        return None
    text = (
        f"a GPU of process {process} on {one['host']} runs at {one['gpu_clock_mhz']:.0f} MHz, "
        f"those of the others at {usual:.0f}"
    )
    for name, words in (("gpu_temperature_c", "{:.0f} °C"), ("gpu_power_w", "{:.0f} W")):
        if name in one:
            text += ", " + words.format(one[name])
    text += ". Every step waits for it: look at its cooling and power limit."
    return Straggler(process, str(one["host"]), "gpu clock", 0.0, text)
