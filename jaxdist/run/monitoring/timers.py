"""What a healthy run does not do: compile twice, or wait for its data."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compilation of a watched function.

    Attributes:
        function: its name.
        count: 1 for the first, which every run needs.
        seconds: trace, lowering and compilation; the call that met it blocked this long.
        from_cache: the executable came from the persistent compilation cache.
        changes: arguments that differ from the previous compilation's, one line each.
    """

    function: str
    count: int
    seconds: float
    from_cache: bool
    changes: tuple[str, ...]


class CompileTracker:
    """Calls a jitted function and reports each compilation that a call causes.

    The function's own cache says that a call was new to it, and JAX's compile events say that XLA
    was at work for it: a numpy array where a jax array was is new to the former alone, and a
    small program compiled while tracing is one of the latter alone. A call that compiles nothing
    costs a few microseconds more.

    Args:
        function: made by `jax.jit`.
        report: called with each `Compilation`.
        name: for the report; the function's own by default.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        report: Callable[[Compilation], None],
        name: str | None = None,
    ):
        if not hasattr(function, "_cache_size"):
            raise TypeError(f"only a function made by jax.jit can be watched, not {function!r}")
        self.name = str(name or getattr(function, "__name__", "function"))
        self.count = 0
        self.seconds = 0.0
        self._function: Any = function
        self._report = report
        self._signature: dict[str, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; report if that compiled it."""
        before = self._function._cache_size()
        begin = time.perf_counter()
        with _compile_events() as events:
            result = self._function(*args, **kwargs)
        if self._function._cache_size() > before and any(_IS_COMPILE in event for event in events):
            self._compiled(time.perf_counter() - begin, events, (args, kwargs))
        return result

    def compile(self, *args: Any) -> Any:
        """Compile for these arguments without a call; returns the `jax.stages.Compiled`.

        jax keeps the executable: a call with the like compiles nothing more.
        """
        begin = time.perf_counter()
        with _compile_events() as events:
            executable = self._function.lower(*args).compile()
        if any(_IS_COMPILE in event for event in events):
            self._compiled(time.perf_counter() - begin, events, (args, {}))
        return executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)  # lower, trace, eval_shape, ... of the function

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
    """Names of JAX's events while the block runs."""
    from jax import monitoring

    events: list[str] = []

    def on_event(event: str, **_: Any) -> None:
        events.append(event)

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        events.append(event)

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield events
    finally:
        monitoring.unregister_event_listener(on_event)
        monitoring.unregister_event_duration_listener(on_duration)


def _signature_of(arguments: Any) -> dict[str, str]:
    """Path of each leaf -> what compilation depends on: shape, dtype, weak type, sharding."""
    import jax
    import numpy as np

    signature = {"arguments": str(jax.tree.structure(arguments))}
    args, kwargs = arguments
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(enumerate(args)) | kwargs):
        name = "arg" + jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array):
            shape = ",".join(map(str, leaf.shape))
            weak = " weak" if getattr(leaf, "weak_type", False) else ""
            signature[name] = f"{leaf.dtype}[{shape}]{weak} {_place(leaf.sharding)}"
        elif isinstance(leaf, np.ndarray | np.generic):
            signature[name] = f"{leaf.dtype}[{','.join(map(str, np.shape(leaf)))}] on the host"
        else:
            signature[name] = f"{type(leaf).__name__} {leaf!r}"[:80]
    return signature


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
    lines = []
    for name in new:
        if name == "arguments":
            continue
        if name not in old:
            lines.append(f"{name}: new, {new[name]}")
        elif old[name] != new[name]:
            lines.append(f"{name}: {old[name]} -> {new[name]}")
    lines += [f"{name}: gone, was {old[name]}" for name in old if name not in new]
    if not lines and old.get("arguments") != new.get("arguments"):
        lines.append("the containers of the arguments have another structure")
    return tuple(lines)


WINDOW_STEPS = 20
"""Steps over which rates (their median) and waiting for data (its share) are taken."""

DATA_WAIT_WARNING = 0.1
"""Share of a window spent waiting for data above which the loader is reported as too slow."""


class DataWaitTracker:
    """Tells when waiting for data takes a stated share of the time: once per episode.

    An episode begins when, over a full window, waiting took more than `threshold` of the time, and
    ends when it took less than half of that, so that a share near the threshold warns once.
    """

    def __init__(self, *, threshold: float, window_steps: int):
        self.threshold = threshold
        self.in_episode = False
        self._window: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=window_steps
        )

    @property
    def share(self) -> float:
        """Share of the window's time spent waiting, in [0, 1]; 0 before the first step."""
        total = sum(step_time for _, step_time in self._window)
        return sum(wait for wait, _ in self._window) / total if total > 0 else 0.0

    def add(self, data_wait_s: float, step_time_s: float) -> bool:
        """Count one step (its time includes the wait); True when an episode begins with it."""
        self._window.append((data_wait_s, step_time_s))
        if len(self._window) < (self._window.maxlen or 0):
            return False
        if self.in_episode:
            self.in_episode = self.share >= self.threshold / 2
            return False
        self.in_episode = self.share > self.threshold
        return self.in_episode


class StepTimer:
    """Times a training loop: how long a step took, and how long of it the loop waited for data.

    `lap` once per step; with steps dispatched ahead of the device, laps still follow the device's
    pace, because reading the metrics of step n−1 blocks until the device has done them.

    Args:
        clock: seconds.
        blocking_dispatch: a dispatch waits until the step before is done (jax on several CPU
            devices), so that its time is waiting for the device too.

    Attributes:
        device_wait_s: seconds of the last lap that reading blocked. Near 0, the device had done its
            work before the host asked, and had none until the next dispatch.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, blocking_dispatch: bool = False
    ):
        self._clock = clock
        self._blocking_dispatch = blocking_dispatch
        self._begin = clock()
        self._wait = 0.0
        self._paused = 0.0
        self._device_wait = 0.0
        self.device_wait_s = 0.0

    def fetch(self, get: Callable[[], T]) -> T:
        """Return `get()`, counting its time as waiting for data."""
        begin = self._clock()
        value = get()
        self._wait += self._clock() - begin
        return value

    def dispatch(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return `function(*arguments, **named)`, which hands work to the device."""
        begin = self._clock()
        value = function(*arguments, **named)
        if self._blocking_dispatch:
            self._device_wait += self._clock() - begin
        return value

    def read(self, get: Callable[[], T]) -> T:
        """Return `get()`, counting its time as waiting for the device."""
        begin = self._clock()
        value = get()
        self._device_wait += self._clock() - begin
        return value

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a save out of the steps."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def lap(self) -> tuple[float, float]:
        """(step_time_s, data_wait_s) since the last lap, pauses left out."""
        now = self._clock()
        times = (now - self._begin - self._paused, self._wait)
        self.device_wait_s = self._device_wait
        self._begin, self._wait, self._paused, self._device_wait = now, 0.0, 0.0, 0.0
        return times
