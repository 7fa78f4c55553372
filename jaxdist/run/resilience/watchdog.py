"""The watchdog: ends a run that makes no progress, and names the process that is behind.

Each process has one watchdog thread. It runs while the main thread is stuck in a collective, which
waits without holding Python's lock. It ends the process with `os._exit`, because a stuck main
thread cannot exit by itself. When a limit has passed:

    1. each process past its limit keeps writing its heartbeat, and reads all heartbeats twice
    2. the first process with new heartbeats logs one line and writes it to `abort.json`
    3. each process that reads that file writes the stacks of its threads and exits with code 86

The launcher writes the same file for a process that was killed. The other hosts then stop within
two heartbeats. Heartbeats are files of the run directory, because the key-value store of the job
runs in process 0, which may be the stuck one. They are read only if a process makes no progress.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxdist import runtime
from jaxdist.config.resilience import ResilienceConfig
from jaxdist.runtime.coordination.failure_broadcast import (
    ABORT_FILE,
    FOLLOWED,
    request_abort,
    write_error_file,
)
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, flush_appended, locate

log = logging.getLogger("jaxdist")

_BEAT_S = 1.0
_REMOTE_BEAT_S = 10.0  # on an object store, where each beat is two billed requests
_READINGS_APART = 4  # heartbeats between two readings: a busy host may miss one or two
_PATIENCE = 20  # heartbeats to wait for the diagnosis of another process
_FLUSH_S = 10.0  # limit for the last log lines if the run directory is on an object store
_MEDIAN_STEPS = 50
_HANG_FACTOR = 3.0  # × the median step time: slow steps that make progress take less
PHASE_TIMEOUT_S = 3600.0  # limit of other phases, and of each batch in an evaluation
_STEP_PHASES = ("step", "data")  # limited by the step timeout after the first step


class Watchdog:
    """Watches this process until `close`. `step_timeout_s=0` turns it off.

    All processes share the folder of heartbeats, stacks and `abort.json`. `leave` ends the process.
    """

    def __init__(
        self,
        config: ResilienceConfig,
        folder: str | os.PathLike[str],
        *,
        process: int = 0,
        num_processes: int = 1,
        beat_s: float | None = None,
        leave: Callable[[int], Any] = os._exit,
    ):
        self.config = config
        self.process, self.num_processes = process, num_processes
        self._folder, self._leave = locate(folder), leave
        self._beat_s = beat_s or (_BEAT_S if self._folder.is_local else _REMOTE_BEAT_S)
        self._abort_file = self._folder / ABORT_FILE
        self._old_abort = self._abort_file.version()  # from an earlier start
        self._host = socket.gethostname()
        self._step, self._beat = 0, 0
        self._phase, self._since = "start", time.monotonic()
        self.is_held = False  # write no heartbeat, unless this process counts as hung
        self._warm = False  # a step has finished
        self._step_times: collections.deque[float] = collections.deque(maxlen=_MEDIAN_STEPS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxdist-watchdog", daemon=True)
        if config.step_timeout_s:
            self._thread.start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Start a phase and its timer; `step` is the last finished step (None = unchanged)."""
        self._step = self._step if step is None else step
        self._phase, self._since = phase, time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block as another phase."""
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def alive(self) -> None:
        """Report progress within a long phase, such as one batch of an evaluation."""
        self._since = time.monotonic()

    def finished(self, step: int, step_time_s: float) -> None:
        """Record a finished step; one in the phase compile does not count for the median."""
        if self._phase != "compile":
            self._step_times.append(step_time_s)
        self._warm = True
        self.enter("step", step)

    def limit_s(self) -> float:
        """Return the seconds without progress after which the current phase counts as hung."""
        if self._phase not in _STEP_PHASES or not self._warm:
            return PHASE_TIMEOUT_S
        median = statistics.median(self._step_times) if self._step_times else 0.0
        return max(_HANG_FACTOR * median, self.config.step_timeout_s)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5 * min(self._beat_s, _BEAT_S))

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._beat_s):
            now = time.monotonic()
            if now - last > _READINGS_APART * self._beat_s:
                self._since += now - last  # the process was suspended (Ctrl-Z, frozen host)
            if not self.is_held:
                self._beat_once()
            if self._abort_requested():
                self._abort()
                return
            last = time.monotonic()  # an unreachable object store may have blocked for minutes
            if now - self._since > self.limit_s():
                self._check_progress()
                last = time.monotonic()

    def _beat_once(self) -> None:
        self._beat += 1
        beat = {"process": self.process, "host": self._host, "pid": os.getpid()}
        beat |= {"phase": self._phase, "step": self._step, "beat": self._beat}
        with contextlib.suppress(OSError):  # such as a full disk
            _heartbeat_file(self._folder, self.process).write(json.dumps(beat), durable=False)

    def _check_progress(self) -> None:
        """End the job, unless another process does it or this one has made progress."""
        stuck_at = (self._phase, self._since)
        before = read_heartbeats(self._folder, self.num_processes)
        if not self._keep_beating(_READINGS_APART):
            return
        after = read_heartbeats(self._folder, self.num_processes)
        silent = silent_processes(before, after)
        alive = [beat for i, beat in enumerate(after) if beat is not None and i not in silent]
        limit_s = self.limit_s()
        if any(beat.phase not in _STEP_PHASES for beat in alive):
            # This process waits in a step for a process that saves or evaluates.
            limit_s = max(limit_s, PHASE_TIMEOUT_S)
        first = min([self.process, *(beat.process for beat in alive)])
        if time.monotonic() - self._since <= limit_s or not (
            self.process == first or self._keep_beating(_PATIENCE)
        ):
            return
        if stuck_at != (self._phase, self._since):
            return  # this process has made progress
        self._dump_stacks()
        line = (
            f"watchdog: {time.monotonic() - self._since:.0f} s without progress in phase "
            f"{self._phase} (limit {limit_s:.0f} s). {diagnose(before, after)}. "
            f"Stacks: {self._folder}/process-*.stacks.txt"
        )
        if self._request_abort(line):
            self._keep_beating(2)  # process 0 runs the coordinator, so the others exit first
            self._leave(runtime.EXIT_HANG)
        elif self._keep_beating(_PATIENCE):  # the other process died before it wrote the file
            self._leave(runtime.EXIT_HANG)

    def _keep_beating(self, beats: int) -> bool:
        """Write `beats` heartbeats; return False if another process aborts or `close` is called."""
        for _ in range(beats):
            if self._closed.wait(self._beat_s):
                return False
            self._beat_once()
            if self._abort_requested():
                return False
        return True

    def _abort_requested(self) -> bool:
        return self._abort_file.version() not in (0, self._old_abort)

    def _request_abort(self, line: str) -> bool:
        """Write `abort.json` with the reason; return False if another process already has."""
        # Each abort has its own lock file, which only one process can create.
        try:
            if not (self._folder / f".abort-after-{self._old_abort}").create():
                return False
        except OSError:  # full disk: two processes may then report
            pass
        log.error("%s", line)
        flush_appended(_FLUSH_S)
        advice = "see the stacks; the launcher starts the job again from the newest checkpoint"
        write_error_file(runtime.EXIT_HANG, line, advice)
        request_abort(self._folder, self.process, line)
        self._old_abort = self._abort_file.version()
        return True

    def _abort(self) -> None:
        self._dump_stacks()
        request = {"process": 0, "line": ""}
        with contextlib.suppress(OSError, ValueError):
            request = self._abort_file.json()
        cause = f"{FOLLOWED} {request['process']}: {request['line']}"
        text = f"process {self.process} on {self._host} {cause}"
        write_error_file(runtime.EXIT_HANG, text, "")
        self._leave(runtime.EXIT_HANG)

    def _dump_stacks(self) -> None:
        path = self._folder / f"process-{self.process}.stacks.txt"
        with contextlib.suppress(OSError), os.fdopen(path.append_descriptor(), "a") as file:
            file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} phase {self._phase}\n{_stacks()}")
        flush_appended(_FLUSH_S)


def _stacks() -> str:
    """Return the stack of each thread, innermost call first; the main thread comes first.

    `faulthandler` writes only the 100 newest threads, without names. No source line is read,
    because the file system may be the cause of the hang.
    """
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main, lines = threading.main_thread().ident, []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        lines.append(f"\nThread {ident} {threads.get(ident, 'not of Python')}:\n")
        for at, line_number in traceback.walk_stack(frame):
            code = at.f_code
            lines.append(f'  File "{code.co_filename}", line {line_number} in {code.co_name}\n')
    return "".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last report of a process; `beat` increases while the process can run Python."""

    process: int
    host: str
    pid: int
    phase: str
    step: int
    beat: int

    def __str__(self) -> str:
        return (
            f"process {self.process} on {self.host} (pid {self.pid}), "
            f"last step {self.step}, phase {self.phase}"
        )


def _heartbeat_file(folder: Location, process: int) -> Location:
    return folder / f"process-{process}.progress.json"


def read_heartbeats(folder: Location, num_processes: int) -> list[Heartbeat | None]:
    """Return the heartbeats by process; None for a process without one."""
    heartbeats: list[Heartbeat | None] = [None] * num_processes
    for process in range(num_processes):
        with contextlib.suppress(OSError, ValueError, TypeError):
            heartbeats[process] = Heartbeat(**_heartbeat_file(folder, process).json())
    return heartbeats


def silent_processes(
    before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]
) -> list[int]:
    """Return the processes that wrote nothing between two readings (stopped, dead, host dead)."""
    return [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old == new]


def diagnose(before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]) -> str:
    """Return one line that names the process that is behind, from heartbeats some beats apart.

    Report the first that exists: processes without a new heartbeat; processes that finished fewer
    steps; processes in another phase than the others. Otherwise none is behind.
    """
    if stopped := silent_processes(before, after):
        who = [str(after[i] or f"process {i}, which never reported") for i in stopped]
        return f"{few(who, 4, '; ')}: no sign of life (stopped, dead, or its host is)"
    heartbeats = [heartbeat for heartbeat in after if heartbeat is not None]
    if len(heartbeats) == 1:
        return f"{heartbeats[0]}: no progress"
    first = max(heartbeat.step for heartbeat in heartbeats)
    late = [str(heartbeat) for heartbeat in heartbeats if heartbeat.step < first]
    if late:
        return f"{few(late, 4, '; ')}: behind the others, who have finished step {first}"
    phases = Counter(heartbeat.phase for heartbeat in heartbeats)
    if len(phases) > 1:
        waiting = "step" if "step" in phases else phases.most_common(1)[0][0]
        others = [str(heartbeat) for heartbeat in heartbeats if heartbeat.phase != waiting]
        return f"{few(others, 4, '; ')}: the others wait for it in phase {waiting}"
    return (
        f"no process is behind: all {len(heartbeats)} have finished step {first} and are in phase "
        f"{heartbeats[0].phase}, so a device or the network between them hangs"
    )
