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
    """Seconds since the epoch that go on evenly from now, also when the host's clock is set."""
    ahead = time.time() - time.monotonic()
    return lambda: ahead + time.monotonic()


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compilation of a tracked function.

    Attributes:
        count: number of compilations so far; a healthy run has one.
        seconds: tracing, lowering and compiling, during which the call blocked.
        from_cache: whether the executable came from the persistent compilation cache.
        changes: what changed in the arguments since the last compilation, one line each.
    """

    function: str
    count: int
    seconds: float
    from_cache: bool
    changes: tuple[str, ...]


class CompileTracker:
    """Calls a jitted function and reports each compilation that a call causes.

    A call counts as a compilation when the function's cache grew and XLA compiled. Either alone is
    not enough: a numpy array in place of a jax array grows the cache without a compilation, and
    tracing may compile small programs of its own. A call that compiles nothing costs a few
    microseconds more.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        report: Callable[[Compilation], None] | None = None,
        name: str | None = None,
    ):
        """Without `report`, compilations are kept for `report_to`."""
        self.name = str(name or getattr(function, "__name__", "function"))
        self.count = 0
        self.seconds = 0.0
        self._function: Any = function
        self._unreported: list[Compilation] = []
        self._report = report or self._unreported.append
        self._signature: dict[str, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; report if that compiled it."""
        before = self._function._cache_size()
        with self._reported((args, kwargs), lambda: self._function._cache_size() > before):
            return self._function(*args, **kwargs)

    def report_to(self, report: Callable[[Compilation], None]) -> None:
        """Report compilations from now on, and those before at once."""
        self._report = report
        while self._unreported:
            report(self._unreported.pop(0))

    def compile(self, *args: Any) -> Any:
        """Compile for these arguments without a call; returns the `jax.stages.Compiled`.

        jax keeps the executable, so that a later call with such arguments does not compile.
        """
        with self._reported((args, {}), lambda: True):
            return self._function.lower(*args).compile()

    @contextlib.contextmanager
    def _reported(self, arguments: Any, is_new: Callable[[], bool]) -> Iterator[None]:
        begin = time.perf_counter()
        with _compile_events() as events:
            yield
        if any(_IS_COMPILE in event for event in events) and is_new():
            self._compiled(time.perf_counter() - begin, events, arguments)

    def _compiled(self, seconds: float, events: list[str], arguments: Any) -> None:
        self.count += 1
        self.seconds += seconds
        # The call has donated some of the arrays, yet they still know shape, dtype and sharding.
        signature = _signature_of(arguments)
        changes = _changes(self._signature, signature) if self.count > 1 else ()
        self._signature = signature
        cached = any(_IS_CACHE_HIT in event for event in events)
        self._report(Compilation(self.name, self.count, seconds, cached, changes))


_IS_COMPILE = "backend_compile_duration"
_IS_CACHE_HIT = "compilation_cache/cache_hits"


@contextlib.contextmanager
def _compile_events() -> Iterator[list[str]]:
    """Names of JAX's events on this thread while the block runs."""
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


def _signature_of(arguments: Any) -> dict[str, str]:
    """Path of each leaf -> what compilation depends on: shape, dtype, weak type, sharding."""
    import jax
    import numpy as np

    signature = {"arguments": str(jax.tree.structure(arguments))}
    args, kwargs = arguments
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(enumerate(args)) | kwargs):
        name = "arg" + jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array):
            weak = " weak" if getattr(leaf, "weak_type", False) else ""
            signature[name] = f"{_shape(leaf)}{weak} {_place(leaf.sharding)}"
        elif isinstance(leaf, np.ndarray | np.generic):
            signature[name] = f"{_shape(leaf)} on the host"
        else:
            signature[name] = f"{type(leaf).__name__} {leaf!r}"[:80]
    return signature


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _place(sharding: Any) -> str:
    """`P("data",) over 8 devices`, `on cpu:0`, with the memory kind where it is unusual."""
    spec = getattr(sharding, "spec", None)
    devices = sorted(map(str, sharding.device_set))
    if spec is not None:
        place = f"{spec} over {len(devices)} devices"
    else:
        place = "on " + (devices[0] if len(devices) == 1 else f"{len(devices)} devices")
    return place if sharding.memory_kind in (None, "device") else f"{place}, {sharding.memory_kind}"


def _changes(old: dict[str, str], new: dict[str, str]) -> tuple[str, ...]:
    lines = [
        f"{name}: {old[name]} -> {value}" if name in old else f"{name}: new, {value}"
        for name, value in new.items()
        if name != "arguments" and old.get(name) != value
    ]
    lines += [f"{name}: gone, was {old[name]}" for name in old if name not in new]
    if not lines and old.get("arguments") != new.get("arguments"):
        lines.append("the containers of the arguments have another structure")
    return tuple(lines)


WINDOW_STEPS = 20
"""Steps over which rates (their median) and waiting for data (its share) are taken."""

DATA_WAIT_WARNING = 0.1
"""Share of a window spent waiting for data above which the loader is reported as too slow."""


class DataWaitTracker:
    """Says when waiting for data takes too large a share of the time, once per episode.

    An episode begins when waiting took more than `threshold` of a full window, and ends when it
    took less than half of that. A share near the threshold therefore warns once.
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
        """Count one step (its time includes the wait); True when an episode begins with it."""
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
    """Times a training loop: how long a step took, and how long the loop waited for data.

    Call `lap` once per step. Steps are dispatched ahead of the devices, yet laps follow the pace of
    the devices, because reading the metrics of step n−1 blocks until they exist. Where a dispatch
    waits for the step before (`blocking_dispatch`: jax on several CPU devices), its time counts as
    waiting for the devices.

    Attributes:
        device_wait_s: seconds of the last lap spent waiting for the devices. Near 0 means that they
            had finished before the host asked, and were idle until the next dispatch.
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
        """Return `function(*arguments, **named)`, which hands work to the devices."""
        with self._timed(self._dispatch):
            return function(*arguments, **named)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Leave the time of the block, such as a save, out of the step times."""
        return self._timed("paused")

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap without pauses, and those of them spent waiting for data."""
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
