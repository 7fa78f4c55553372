"""Which process the others wait for, from numbers that each measures anyway; without a barrier.

In a job that computes together all steps take equally long, whoever is at fault. What differs is
how a process spends its step: waiting for the devices, waiting for data, or working on the host.
While it waits for the devices, what it did before was hidden behind their work, or another process
came later. A step without such a wait is one in which it came last, after the devices had run out
of work: a late step. The process that spends its late steps longer on data or on the host than the
others do is the one that they wait for.

Late steps are counted one by one. A mean over the interval would hide a fault that began in the
middle of it, or behind batches that were prefetched, and a save makes a process wait for the step
before it: waiting in some steps does not undo having come last in others. A few late steps are no
one's fault: cores are shared, files are written. The rarer they are, the more they must cost.

Every process leaves its numbers with the coordinator when an interval ends and goes on; process 0
reads what is there, and again at the next steps until the slow ones have told too. Each leaves its
last two intervals, and the newest that all have told is compared: what is slow for all at once is
then no one's fault.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.runtime import coordination

_LAG = 0.1
"""Share of the time that a process that is always late must lose to be named; more if it is not."""
_AHEAD = 0.05
"""Share of a step spent waiting for the devices from which a process holds nobody up in it."""
_LATE_SHARE, _LATE_STEPS = 1 / 3, 5
"""Late steps of an interval from which they are no accident: this share and this number, or two
thirds of an interval too short for it. Jitter of overloaded cores made 13 of 52 steps late, 3 of 8
and 2 of 4; a slow loader beside saves every five steps three fifths of them."""
_SLOW_CLOCK = 0.85
"""Share of the usual clock of a GPU below which it is named."""
_TOPIC = "monitoring/processes"

READY_SHARE = 0.02
"""Results were there before the host asked when it waited less than this share of the step."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process that the others wait for.

    Attributes:
        process: its index.
        host: where it runs.
        cause: "data", "host" or "gpu clock".
        lost_s: seconds of a step, in the interval's mean, beyond what the others need; 0 for a
            clock.
        text: the sentence for people.
    """

    process: int
    host: str
    cause: str
    lost_s: float
    text: str


class StragglerDetector:
    """Numbers of this process's steps, and at the end of each interval everybody's.

    Args:
        num_processes: of the job.
        interval_steps: steps of an interval, which all processes end at the same step; 0 = never.
    """

    def __init__(self, num_processes: int, interval_steps: int):
        self._num_processes, self._interval_steps = num_processes, interval_steps
        self._steps: list[tuple[float, float, float]] = []
        self._told: list[dict[str, Any]] = []
        self._newest = self._compared = 0  # step at which the interval ended

    def add(self, step_time_s: float, data_wait_s: float, device_wait_s: float) -> None:
        """Count one step."""
        self._steps.append((step_time_s, data_wait_s, device_wait_s))

    def ends(self, step: int) -> bool:
        """Whether an interval that has something to tell ends with `step`."""
        if self._num_processes == 1 or not self._interval_steps or not self._steps:
            return False
        return step % self._interval_steps == 0

    def end_interval(self, step: int, extra: Mapping[str, float]) -> dict[str, Any]:
        """This process's numbers since the last interval, which begin anew; told to process 0.

        Args:
            step: the newest.
            extra: more numbers of this process (its GPUs' clocks).
        """
        own = {"step": step, "host": socket.gethostname(), **summarise(self._steps), **extra}
        self._steps.clear()
        self._newest = step
        self._told = [*self._told[-1:], own]
        coordination.publish(_TOPIC, self._told)
        return own

    @property
    def is_open(self) -> bool:
        """Whether this process has told of an interval that was not yet compared."""
        return self._compared < self._newest

    def everyone(self) -> dict[int, dict[str, Any]]:
        """By process id, the numbers of the newest interval that all have told; {} if seen."""
        told = coordination.published(_TOPIC)
        said = newest_common(told) if len(told) == self._num_processes else {}
        step = next((one["step"] for one in said.values()), 0)
        if step <= self._compared:
            return {}
        self._compared = step
        return said


def summarise(steps: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Means over some steps, and those over the late ones among them (0 without any).

    Args:
        steps: of each its seconds, those waiting for data, and those waiting for the devices.
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


def newest_common(told: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The newest interval that every process has told, by process id; {} when there is none."""
    steps = [{one["step"] for one in intervals} for intervals in told.values()]
    common = set.intersection(*steps) if steps else set()
    if not common:
        return {}
    return {
        process: dict(next(one for one in intervals if one["step"] == max(common)))
        for process, intervals in told.items()
    }


def find_stragglers(said: Mapping[int, Mapping[str, Any]]) -> list[Straggler]:
    """Processes that the others wait for, the worst first.

    Args:
        said: by process id, as `StragglerDetector.end_interval` makes it.
    """
    if len(said) < 2:
        return []
    found = []
    usual_step_s = statistics.median(one["step_time_s"] for one in said.values())
    for process, one in said.items():
        others = [said[i] for i in said if i != process]
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
    cause = "data" if data_s >= host_s else "host"
    doing = {
        "data": f"waits {1e3 * one['late_data_s']:.0f} ms for its data",
        "host": f"works {1e3 * one['late_host_s']:.0f} ms on the host",
    }[cause]
    look = {
        "data": "Look at its disk and network, or at what else reads there.",
        "host": "Look at what else runs on its cores.",
    }[cause]
    text = (
        f"process {process} on {one['host']} holds the others up: in {late} of {steps} steps it "
        f"{doing}, {1e3 * (data_s + host_s):.0f} ms more than they take "
        f"({lost_s / usual_step_s:.0%} of the time). {look}"
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
