"""The watchdog: a run that makes no progress ends, says which process is behind, and is restarted.

One thread per process. It works while the main thread is stuck in a collective, because that waits
without Python's lock, and it ends the process with `os._exit`, because nothing that is stuck can be
asked to leave. What happens when a limit has passed:

    1. every process whose limit has passed goes on beating and reads all heartbeats twice
    2. the first process that is alive (process 0, unless it is the one that stands still) logs one
       line and writes it to `abort.json`
    3. each process that sees that file writes the stacks of all its threads and leaves with 86

A launcher writes the same file for a process that was killed without a word, so that hosts which
have lost a peer learn it within a second or two and not from the heartbeat.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import logging
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxdist import runtime
from jaxdist.run.resilience import heartbeat
from jaxdist.run.resilience.config import ResilienceConfig
from jaxdist.runtime.coordination.failure_broadcast import ALARM, FOLLOWED, leave_error, raise_alarm
from jaxdist.runtime.storage import locate

log = logging.getLogger("jaxdist")

_BEAT_S = 1.0
_READINGS_APART = 4  # beats between two readings: a busy host may miss one or two
_PATIENCE = 20  # beats that a process waits for another one's diagnosis before it leaves without
_MEDIAN_OF = 50
_HANG_FACTOR = 3.0  # a step has hung after so many times the median: a slow one takes less
_SHORT = ("step", "data")  # phases that the limit of a step holds for


class Watchdog:
    """Watches this process from its making to `close`.

    Args:
        config: limits; with `step_timeout_s=0` nothing is watched and every call does nothing.
        folder: of the heartbeats, the stacks and `abort.json`; shared by all processes.
        process: index of this process.
        num_processes: in the job.
        beat_s: seconds between two looks.
        leave: ends the process; `os._exit`.
    """

    def __init__(
        self,
        config: ResilienceConfig,
        folder: str | os.PathLike[str],
        *,
        process: int = 0,
        num_processes: int = 1,
        beat_s: float = _BEAT_S,
        leave: Callable[[int], Any] = os._exit,
    ):
        self.config = config
        self.process, self.num_processes = process, num_processes
        self._folder, self._beat_s, self._leave = locate(folder), beat_s, leave
        self._alarm = self._folder / ALARM
        self._old_alarm = self._alarm.version()  # of an earlier start
        self._host = socket.gethostname()
        self._step, self._beat = 0, 0
        self._phase, self._since = "start", time.monotonic()
        self._warm = False  # a step has been finished
        self._step_times: collections.deque[float] = collections.deque(maxlen=_MEDIAN_OF)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxdist-watchdog", daemon=True)
        if config.step_timeout_s:
            self._thread.start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """From now on this is what the process does; the clock starts anew."""
        self._step = self._step if step is None else step
        self._phase, self._since = phase, time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Do something else for a while: save, evaluate, restore."""
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def alive(self) -> None:
        """A part of a long phase is done: a batch of an evaluation."""
        self._since = time.monotonic()

    def finished(self, step: int, step_time_s: float) -> None:
        """The devices have finished a step. The first one, which compiles, counts in no median."""
        if self._phase != "compile":
            self._step_times.append(step_time_s)
        self._warm = True
        self.enter("step", step)

    def limit_s(self) -> float:
        """Seconds without progress that the present phase is given."""
        if self._phase not in _SHORT or not self._warm:
            return self.config.phase_timeout_s
        median = statistics.median(self._step_times) if self._step_times else 0.0
        return max(_HANG_FACTOR * median, self.config.step_timeout_s)

    def close(self) -> None:
        """Watch no longer: the process leaves by itself."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5 * self._beat_s)

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(self._beat_s):
            now = time.monotonic()
            if now - looked > _READINGS_APART * self._beat_s:
                self._since += now - looked  # the whole process stood still (Ctrl-Z, a frozen host)
            looked = now
            self._say()
            if self._alarmed():
                self._follow()
                return
            if now - self._since > self.limit_s():
                self._raise_alarm()
                looked = time.monotonic()

    def _say(self) -> None:
        self._beat += 1
        heartbeat.write(
            self._folder,
            heartbeat.Heartbeat(
                process=self.process,
                host=self._host,
                pid=os.getpid(),
                phase=self._phase,
                step=self._step,
                beat=self._beat,
            ),
        )

    def _raise_alarm(self) -> None:
        stuck_at = (self._phase, self._since)
        before = heartbeat.read(self._folder, self.num_processes)
        if not self._go_on(_READINGS_APART):
            return
        after = heartbeat.read(self._folder, self.num_processes)
        quiet = heartbeat.silent(before, after)
        alive = [there for i, there in enumerate(after) if there is not None and i not in quiet]
        limit_s = self.limit_s()
        if any(there.phase not in _SHORT for there in alive):  # it may well take its time
            limit_s = max(limit_s, self.config.phase_timeout_s)
        first = min([self.process, *(there.process for there in alive)])
        if time.monotonic() - self._since <= limit_s or not (
            self.process == first or self._go_on(_PATIENCE)
        ):
            return
        if stuck_at != (self._phase, self._since):
            return  # it moved after all
        self._dump()
        line = (
            f"watchdog: {time.monotonic() - self._since:.0f} s without progress in phase "
            f"{self._phase} (limit {limit_s:.0f} s). {heartbeat.diagnose(before, after)}. "
            f"Stacks: {self._folder}/process-*.stacks.txt"
        )
        if self._announce(line):
            self._go_on(2)  # the coordinator lives in process 0: the others first
            self._leave(runtime.EXIT_HANG)
        elif self._go_on(_PATIENCE):  # whoever was first has not finished its line
            self._leave(runtime.EXIT_HANG)

    def _go_on(self, beats: int) -> bool:
        """Beat on; False as soon as another process has raised the alarm, or all is over."""
        for _ in range(beats):
            if self._closed.wait(self._beat_s):
                return False
            self._say()
            if self._alarmed():
                return False
        return True

    def _alarmed(self) -> bool:
        """Whether there is a new alarm; a directory that is away for a while tells of none."""
        return self._alarm.version() not in (0, self._old_alarm)

    def _announce(self, line: str) -> bool:
        """Say why the job ends, unless another process was first."""
        # A name of its own for each alarm, which only one process can make.
        try:
            if not (self._folder / f".abort-after-{self._old_alarm}").create():
                return False
        except OSError:  # a full disk: two lines are better than none
            pass
        log.error("%s", line)
        advice = "see the stacks; the launcher starts the job again from the newest checkpoint"
        leave_error(runtime.EXIT_HANG, line, advice)
        raise_alarm(self._folder, self.process, line)
        self._old_alarm = self._alarm.version()
        return True

    def _follow(self) -> None:
        self._dump()
        try:
            said = self._alarm.json()
        except (OSError, ValueError):
            said = {"process": 0, "line": ""}
        text = (
            f"process {self.process} on {self._host} {FOLLOWED} {said['process']}: {said['line']}"
        )
        leave_error(runtime.EXIT_HANG, text, "")
        self._leave(runtime.EXIT_HANG)

    def _dump(self) -> None:
        """Stacks of all threads, into the run directory."""
        path = self._folder / f"process-{self.process}.stacks.txt"
        with contextlib.suppress(OSError), os.fdopen(path.append_descriptor(), "a") as file:
            file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} phase {self._phase}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
