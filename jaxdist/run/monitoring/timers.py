"""Timers of the training loop: step time, data wait, device wait and compilations."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since the epoch that ignores changes of the host clock."""
    ahead = time.time() - time.monotonic()
    return lambda: ahead + time.monotonic()


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compilation of a tracked function, its `count`-th; a healthy run has one.

    `seconds` covers tracing, lowering and compiling. `from_cache`: the executable came from the
    persistent compilation cache.
    """

    function: str
    count: int
    seconds: float
    from_cache: bool


class CompileTracker:
    """Calls a jitted function and reports each compilation that a call causes.

    A call counts if the function's cache grew and XLA compiled. Either alone is not enough: a numpy
    array instead of a jax array only grows the cache, and tracing may compile small programs.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        """Track `function`; store its compilations until `report_to`."""
        self.name = name
        self.count = 0
        self.seconds = 0.0
        self._function: Any = function
        self._unreported: list[Compilation] = []
        self._report: Callable[[Compilation], None] = self._unreported.append

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and return its result."""
        before = self._function._cache_size()
        with self._reported(lambda: self._function._cache_size() > before):
            return self._function(*args, **kwargs)

    def report_to(self, report: Callable[[Compilation], None]) -> None:
        """Report earlier compilations now, and each later one as it happens."""
        self._report = report
        while self._unreported:
            report(self._unreported.pop(0))

    def compile(self, *args: Any) -> Any:
        """Return the executable for these arguments, compiled but not run; later calls reuse it."""
        with self._reported(lambda: True):
            return self._function.lower(*args).compile()

    @contextlib.contextmanager
    def _reported(self, is_new: Callable[[], bool]) -> Iterator[None]:
        begin = time.perf_counter()
        with _compile_events() as events:
            yield
        if any(_IS_COMPILE in event for event in events) and is_new():
            seconds = time.perf_counter() - begin
            self.count += 1
            self.seconds += seconds
            cached = any(_IS_CACHE_HIT in event for event in events)
            self._report(Compilation(self.name, self.count, seconds, cached))


_IS_COMPILE = "backend_compile_duration"
_IS_CACHE_HIT = "compilation_cache/cache_hits"


@contextlib.contextmanager
def _compile_events() -> Iterator[list[str]]:
    """Yield a list that receives the names of JAX's events on this thread during the block."""
    from jax import monitoring

    events: list[str] = []
    thread = threading.get_ident()

    def listen(event: str, *_: float, **__: Any) -> None:
        if threading.get_ident() == thread:
            events.append(event)

    monitoring.register_event_listener(listen)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        monitoring.unregister_event_listener(listen)
        monitoring.unregister_event_duration_listener(listen)


WINDOW_STEPS = 20
"""Steps of the window for rates (median) and for waiting for data (share)."""

DATA_WAIT_WARNING = 0.1
"""Share of a window spent waiting for data above which the loader is reported as too slow."""


class DataWaitTracker:
    """Detects when waiting for data takes too large a share of the time, once per episode.

    An episode starts if waiting took more than `threshold` of a full window, and ends if it took
    less than half of that. A share near the threshold therefore warns once.
    """

    def __init__(self, *, threshold: float, window_steps: int):
        self.threshold = threshold
        self.in_episode = False
        self._waits: collections.deque[float] = collections.deque(maxlen=window_steps)
        self._times: collections.deque[float] = collections.deque(maxlen=window_steps)

    @property
    def share(self) -> float:
        """Share of the window's time spent waiting, in [0, 1]; 0 before the first step."""
        return sum(self._waits) / (sum(self._times) or 1.0)

    def add(self, data_wait_s: float, step_time_s: float) -> bool:
        """Count one step (its time includes the wait); return whether an episode starts."""
        self._waits.append(data_wait_s)
        self._times.append(step_time_s)
        if len(self._times) < (self._times.maxlen or 0):
            return False
        if self.in_episode:
            self.in_episode = self.share >= self.threshold / 2
            return False
        self.in_episode = self.share > self.threshold
        return self.in_episode


class StepTimer:
    """Times a training loop: the duration of a step, and the waits for data and for the devices.

    Call `lap` once per step. Laps follow the pace of the devices, because reading the metrics of
    step n−1 blocks until they exist. With `blocking_dispatch` (jax on CPU devices) a dispatch waits
    for the previous step, and counts as waiting for the devices. `device_wait_s` covers the last
    lap; near 0 means that the devices were idle until the next dispatch.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, blocking_dispatch: bool = False
    ):
        self._clock = clock
        self._dispatch = "device" if blocking_dispatch else "host"
        self._begin = clock()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self.device_wait_s = 0.0

    def fetch(self, get: Callable[[], T]) -> T:
        """Return `get()`, counting its time as waiting for data."""
        with self._timed("data"):
            return get()

    def read(self, get: Callable[[], T]) -> T:
        """Return `get()`, counting its time as waiting for the devices."""
        with self._timed("device"):
            return get()

    def dispatch(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function that dispatches work to the devices; return its result."""
        with self._timed(self._dispatch):
            return function(*arguments, **named)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that excludes its time, such as that of a save, from the step times."""
        return self._timed("paused")

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last lap (without pauses), and the data wait in them."""
        now, seconds = self._clock(), self._seconds
        times = (now - self._begin - seconds["paused"], seconds["data"])
        self.device_wait_s = seconds["device"]
        self._begin, self._seconds = now, collections.defaultdict(float)
        return times

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[kind] += self._clock() - begin
