"""Which process the others wait for, from numbers that each measures anyway; without a barrier.

In a job that computes together all steps take equally long, whoever is at fault. What differs is
how a process spends its step: waiting for the devices (it is ahead), waiting for data, or working
on the host. The one that spends most on the latter two, and never waits for the devices, is the
one that the others wait for.

Every process leaves its means with the coordinator when an interval ends and goes on; process 0
reads what is there. Some are not there yet then, so each leaves its last two intervals, and the
newest that all have told is compared: what is slow for all at once is then no one's fault.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist import runtime

_LAG = 0.1
"""Share of a step that a process must lose more than the others to be named."""
_AHEAD = 0.1
"""Share of a step spent waiting for the devices from which a process holds nobody up."""
_SLOW_CLOCK = 0.85
"""Share of the usual clock of a GPU below which it is named."""
_TOPIC = "monitoring/processes"

READY_SHARE = 0.02
"""Results were there before the host asked when it waited less than this share of the step."""


@dataclasses.dataclass(frozen=True)
class Slow:
    """A process that the others wait for.

    Attributes:
        process: its index.
        host: where it runs.
        cause: "data", "host" or "gpu clock".
        lost_s: seconds of a step beyond what the others need; 0 for a clock.
        text: the sentence for people.
    """

    process: int
    host: str
    cause: str
    lost_s: float
    text: str


class ProcessWatch:
    """Means of this process's steps, and at the end of each interval everybody's.

    Args:
        num_processes: of the job.
        interval_steps: steps of an interval, which all processes end at the same step; 0 = never.
    """

    def __init__(self, num_processes: int, interval_steps: int):
        self._num_processes, self._interval_steps = num_processes, interval_steps
        self._steps: list[tuple[float, float, float]] = []
        self._told: list[dict[str, Any]] = []
        self._compared = 0

    def add(self, step_time_s: float, data_wait_s: float, device_wait_s: float) -> None:
        """Count one step."""
        self._steps.append((step_time_s, data_wait_s, device_wait_s))

    def ends(self, step: int) -> bool:
        """Whether an interval that has something to tell ends with `step`."""
        if self._num_processes == 1 or not self._interval_steps or not self._steps:
            return False
        return step % self._interval_steps == 0

    def end_interval(self, step: int, extra: Mapping[str, float]) -> dict[str, Any]:
        """This process's means since the last interval, which begin anew; told to process 0.

        Args:
            step: the newest.
            extra: more numbers of this process (its GPUs' clocks).
        """
        step_time_s, data_wait_s, device_wait_s = (
            statistics.fmean(values) for values in zip(*self._steps, strict=True)
        )
        self._steps.clear()
        own = {
            "step": step,
            "host": socket.gethostname(),
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
            "device_wait_s": device_wait_s,
            "host_s": max(0.0, step_time_s - data_wait_s - device_wait_s),
            **extra,
        }
        self._told = [*self._told[-1:], own]
        runtime.publish(_TOPIC, self._told)
        return own

    def everyone(self) -> dict[int, dict[str, Any]]:
        """By process index, the means of the newest interval that all have told; {} if seen."""
        told = runtime.published(_TOPIC)
        said = newest_common(told) if len(told) == self._num_processes else {}
        step = next((one["step"] for one in said.values()), 0)
        if step <= self._compared:
            return {}
        self._compared = step
        return said


def newest_common(told: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The newest interval that every process has told, by process index; {} when there is none."""
    steps = [{one["step"] for one in intervals} for intervals in told.values()]
    common = set.intersection(*steps) if steps else set()
    if not common:
        return {}
    return {
        process: dict(next(one for one in intervals if one["step"] == max(common)))
        for process, intervals in told.items()
    }


def find_slow(said: Mapping[int, Mapping[str, Any]]) -> list[Slow]:
    """Processes that the others wait for, the worst first.

    Args:
        said: by process index, as `ProcessWatch.end_interval` makes it.
    """
    if len(said) < 2:
        return []
    found = []
    usual_step_s = statistics.median(one["step_time_s"] for one in said.values())
    for process, one in said.items():
        others = [said[i] for i in said if i != process]
        usual_data_s = statistics.median(other["data_wait_s"] for other in others)
        usual_host_s = statistics.median(other["host_s"] for other in others)
        data_s, host_s = one["data_wait_s"] - usual_data_s, one["host_s"] - usual_host_s
        lost_s = data_s + host_s
        ahead = one["device_wait_s"] > _AHEAD * usual_step_s
        if lost_s > _LAG * usual_step_s and not ahead:
            found.append(_slow(process, one, data_s, host_s, usual_step_s))
        elif slow := _slow_clock(process, one, others):
            found.append(slow)
    return sorted(found, key=lambda slow: -slow.lost_s)


def _slow(
    process: int, one: Mapping[str, Any], data_s: float, host_s: float, step_s: float
) -> Slow:
    cause = "data" if data_s >= host_s else "host"
    doing = {
        "data": f"waits {1e3 * one['data_wait_s']:.0f} ms of a step for its data",
        "host": f"works {1e3 * one['host_s']:.0f} ms of a step on the host",
    }[cause]
    look = {
        "data": "Look at its disk and network, or at what else reads there.",
        "host": "Look at what else runs on its cores.",
    }[cause]
    lost_s = data_s + host_s
    text = (
        f"process {process} on {one['host']} holds the others up: it {doing}, "
        f"{1e3 * lost_s:.0f} ms more than they do ({lost_s / step_s:.0%} of the step). {look}"
    )
    return Slow(process, str(one["host"]), cause, lost_s, text)


def _slow_clock(
    process: int, one: Mapping[str, Any], others: list[Mapping[str, Any]]
) -> Slow | None:
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
    return Slow(process, str(one["host"]), "gpu clock", 0.0, text)
