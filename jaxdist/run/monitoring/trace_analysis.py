"""GPU time of a trace: shares of computation, communication and idle time.

A collective that overlaps with computation costs little. Communication that does not overlap is
exposed: it lengthens the step. The kernels of each device are merged into time spans, separately
for NCCL and for the others. Time that only NCCL kernels cover is exposed.

Traces of CPU devices contain no kernels, so nothing is reported for them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from jaxdist.runtime.formatting.numbers import percent
from jaxdist.runtime.storage import locate

TimeSpan: TypeAlias = tuple[float, float]
"""Begin and end, nanoseconds."""

_DEVICE = re.compile(r"/device:GPU:(\d+)")
_COLLECTIVE = re.compile(r"nccl|nvshmem|all-?reduce|all-?gather|reduce-?scatter", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Times of one GPU in a trace.

    Attributes:
        device: its number in the trace's process.
        total_s: from its first kernel to the end of its last.
        busy_s: in which any kernel ran.
        communication_s: in which a collective ran.
        exposed_s: in which a collective ran and no other kernel.
    """

    device: int
    total_s: float
    busy_s: float
    communication_s: float
    exposed_s: float

    def record(self) -> dict[str, float]:
        """Return the seconds, and the shares of the total time."""
        return {
            **dataclasses.asdict(self),
            "communication_share": self.communication_s / self.total_s,
            "exposed_share": self.exposed_s / self.total_s,
            "idle_share": 1.0 - self.busy_s / self.total_s,
        }

    def __str__(self) -> str:
        record = self.record()
        return (
            f"GPU {self.device}: communication {percent(record['communication_share'])} of the "
            f"time, {percent(record['exposed_share'])} not overlapped with computation; "
            f"idle {percent(record['idle_share'])}"
        )


def read_trace(directory: str | os.PathLike[str]) -> list[DeviceTime]:
    """Return the GPUs of the newest trace in a profile directory, by number; [] without one."""
    from jax.profiler import ProfileData

    folder = locate(directory)
    files = [name for name in folder.files() if name.endswith(".xplane.pb")]
    return device_times(ProfileData.from_file(str(folder / files[-1]))) if files else []


def device_times(profile: Any) -> list[DeviceTime]:
    """Return the GPUs of a `jax.profiler.ProfileData`, by number."""
    devices = []
    for plane in profile.planes:
        device = _DEVICE.match(plane.name)
        spans: dict[bool, list[TimeSpan]] = {True: [], False: []}
        for line in plane.lines if device else ():
            if not line.name.startswith("Stream"):
                continue  # the other lines of a device repeat its kernels, grouped by operation
            for event in line.events:
                begin, end = event.start_ns, event.start_ns + event.duration_ns
                if end > begin and "Memcpy" not in event.name and "Memset" not in event.name:
                    spans[bool(_COLLECTIVE.search(event.name))].append((begin, end))
        if device and any(spans.values()):
            devices.append(_device_time(int(device[1]), merged(spans[True]), merged(spans[False])))
    return sorted(devices, key=lambda one: one.device)


def merged(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    """Merge overlapping time spans; the result is sorted."""
    joined: list[TimeSpan] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _device_time(device: int, collectives: list[TimeSpan], others: list[TimeSpan]) -> DeviceTime:
    either = merged([*collectives, *others])
    busy, computing = _length(either), _length(others)
    return DeviceTime(
        device=device,
        total_s=(either[-1][1] - either[0][0]) / 1e9,
        busy_s=busy / 1e9,
        communication_s=_length(collectives) / 1e9,
        exposed_s=(busy - computing) / 1e9,
    )


def _length(spans: Iterable[TimeSpan]) -> float:
    return sum(end - begin for begin, end in spans)
