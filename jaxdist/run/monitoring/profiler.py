"""Traces of a few steps by jax's profiler, planned by a setting or requested by a signal.

A trace slows steps down and takes megabytes per step, so it is off by default. Process 0 traces
the steps of `monitoring.profile`. A process that receives SIGUSR2 traces its own next steps, e.g.
to examine a straggler.

On GPUs, times are read from the trace. Kernels of collectives are communication, exposed while no
other kernel runs. Traces of CPU devices contain no kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from jaxdist.runtime.formatting.numbers import percent
from jaxdist.runtime.storage import locate

logger = logging.getLogger("jaxdist")


class Profiler:
    """Starts and ends traces of the `planned` steps (first, last), and of requested steps."""

    def __init__(
        self,
        planned: tuple[int, int] | None,
        directory: str | os.PathLike[str],
        *,
        process: int = 0,
        trace_requested: Callable[[], bool] = lambda: False,
        num_steps: int = 3,
    ):
        self._planned = planned
        self._directory, self._process = locate(directory), process
        self._trace_requested, self._num_steps = trace_requested, num_steps
        self._now: tuple[int, int] | None = None  # steps of the current trace
        self._path = self._written = self._directory
        self._annotation: Any = None
        self._newest = 0  # last finished step of the trace
        self.traces: list[dict[str, Any]] = []

    def reaches(self, step: int) -> bool:
        """Return whether a trace starts or ends just before `step`; call it before each step.

        If true, wait for the devices and call `turn`, so that a trace has complete steps only.
        """
        if self._now is not None:
            first, last = self._now
            self._newest = max(self._newest, step - 1)  # a rollback removes no step from the trace
            if first <= step <= last:
                self._annotate(step)
                return False
            return True
        if self._trace_requested():
            self._planned = (step, step + self._num_steps - 1)
        return self._is_planned(step)

    def turn(self, step: int) -> None:
        """End the finished trace, and start the trace that is due before `step`."""
        self.stop()
        if self._planned is not None and self._is_planned(step):
            (_, last), self._planned = self._planned, None
            self._begin(step, last)
            self._annotate(step)

    def _is_planned(self, step: int) -> bool:
        return self._planned is not None and self._planned[0] <= step <= self._planned[1]

    def stop(self, last: int | None = None) -> None:
        """End the current trace, if any; `last` is its last step (None = the newest finished)."""
        if self._now is None:
            return
        import jax

        (first, _), self._now = self._now, None
        last = self._newest if last is None else last
        self._annotate(None)
        try:
            jax.profiler.stop_trace()
            self._upload()
            files = [name for name in self._path.files() if name.endswith(".trace.json.gz")]
        except Exception as failure:  # a full disk must not end the run
            logger.warning("the trace of steps %d to %d was not written: %s", first, last, failure)
            self._delete_copy()
            return
        trace: dict[str, Any] = {"first": first, "last": last, "path": str(self._path)}
        trace |= {"file": str(self._path / files[-1])} if files else {}
        self.traces.append(trace)
        logger.info("wrote the trace of steps %d to %d to %s", first, last, self._path)
        try:
            devices = read_trace(self._written)
        except Exception as failure:  # the trace is written; another machine may be able to read it
            logger.warning("the trace in %s cannot be read: %s", self._path, failure)
            return
        finally:
            self._delete_copy()
        for one in devices:
            logger.info("%s", one)
        trace |= {"devices": [one.record() for one in devices]} if devices else {}

    def _begin(self, first: int, last: int) -> None:
        import jax

        self._path = self._directory / f"step-{first}-process-{self._process}"
        self._written = self._path
        if not self._path.is_local:
            self._written = locate(tempfile.mkdtemp(prefix="jaxdist-trace-"))
        try:
            jax.profiler.start_trace(str(self._written))
        except Exception as failure:  # another profiler is running
            logger.warning("steps %d to %d are not traced: %s", first, last, failure)
            self._delete_copy()
            return
        self._now, self._newest = (first, last), first
        logger.info("tracing steps %d to %d", first, last)

    def _upload(self) -> None:
        if self._written != self._path:
            for name in self._written.files():
                (self._path / name).write((self._written / name).read())

    def _delete_copy(self) -> None:
        if self._written != self._path:
            with contextlib.suppress(OSError):
                self._written.delete_tree()

    def _annotate(self, step: int | None) -> None:
        """Mark the start of `step` in the trace; None = the trace ends."""
        if self._annotation is not None:
            with contextlib.suppress(Exception):
                self._annotation.__exit__(None, None, None)
            self._annotation = None
        if step is not None and self._now is not None:
            import jax

            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()


TimeSpan: TypeAlias = tuple[float, float]
"""Begin and end, nanoseconds."""

_DEVICE = re.compile(r"/device:GPU:(\d+)")
_COLLECTIVE = re.compile(r"nccl|nvshmem|all-?reduce|all-?gather|reduce-?scatter", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Times of one GPU in a trace; `device` is its number in the process.

    `total_s` is the time from the start of its first kernel to the end of its last. During `busy_s`
    any kernel ran, during `communication_s` any collective ran, and during `exposed_s` only
    collectives ran.
    """

    device: int
    total_s: float
    busy_s: float
    communication_s: float
    exposed_s: float

    def record(self) -> dict[str, float]:
        """Return the times in seconds, and shares of `total_s`: idle, communication, exposed."""
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
    """Return each GPU's times in the newest trace of a folder, in GPU order; [] without GPUs."""
    from jax.profiler import ProfileData

    folder = locate(directory)
    files = [name for name in folder.files() if name.endswith(".xplane.pb")]
    return device_times(ProfileData.from_file(str(folder / files[-1]))) if files else []


def device_times(profile: Any) -> list[DeviceTime]:
    """Return the times of each GPU in a `jax.profiler.ProfileData`, in order of GPU number."""
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
    """Return the union of time spans, as sorted spans that do not overlap."""
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
