"""The loop of attempts of a job on this host, and the rules for starting again.

| processes end with | then |
|---|---|
| 0, all of them | the job is done: 0 (an elastic job: when every host's are) |
| 75 | preempted after a committed save: 75, the scheduler starts the job again |
| 75, elastic, this host not being asked | the next round, with the hosts and GPUs there are |
| 2 | bad configuration, which a restart cannot heal: 2 |
| 85 | a device holds wrong bits, which a restart on it would not heal: 85 |
| 130 | interrupted from the keyboard: 130 |
| anything else | all are stopped and started again, up to `--max-restarts` times without progress |
| elastic: too little is there | 75: the same command goes on when more is back |

Progress is a newer checkpoint: it refills the budget, so that a long run survives any number of
lost hosts, while a crash loop ends after a few attempts. What ends an elastic job for good on one
host (2, 85, 130, the budget) ends it on all, spares too.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

from jaxdist import runtime
from jaxdist.runtime.storage import locate
from jaxdist.tools.launch.resources import count_gpus, free_port
from jaxdist.tools.launch.worker_group import Attempt, Outcome, Place

_LOST_DIRECTORY_S = 900.0  # a file server that restarts takes minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How often and how soon processes are started again.

    Attributes:
        max_restarts: attempts after the first without a new checkpoint.
        backoff_s: wait before the first restart; doubled for each further one without progress.
        max_backoff_s: where doubling ends.
        stop_timeout_s: how long processes may save after a request to stop.
    """

    max_restarts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    stop_timeout_s: float = 300.0

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        if self.max_restarts < 0:
            found.append(
                f"--max-restarts {self.max_restarts} is too small. Use a whole number ≥ 0."
            )
        for name in ("backoff_s", "max_backoff_s", "stop_timeout_s"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                found.append(f"--{flag} {getattr(self, name)} is no time. Use seconds ≥ 0.")
        return found


class Places(Protocol):
    """Where the attempts of a job run: the same each time, or what is there."""

    def next(self, stop_signal: Callable[[], int]) -> tuple[int, Place] | int:
        """The next attempt's number and place, or the exit code with which there is none."""

    def watch(self, attempt: Attempt) -> None:
        """Called again and again while it runs."""

    def ended(self, outcome: Outcome) -> None:
        """Called when it has ended."""

    def all_done(self, stop_signal: Callable[[], int]) -> bool:
        """After 0 on this host: whether that is so on all."""

    def goes_on(self) -> bool:
        """After 75 that this host's launcher was not asked for: whether another attempt follows."""

    def close(self, code: int, stop_signal: int) -> None:
        """Called when the launcher ends, with its exit code."""


class FixedPlaces:
    """As many hosts and processes as were asked for, or one process per GPU of this host."""

    def __init__(
        self,
        nproc_per_node: int,
        nnodes: int = 1,
        node_rank: int = 0,
        coordinator_address: str = "",
    ):
        self._nproc_per_node, self._nnodes, self._node_rank = nproc_per_node, nnodes, node_rank
        self._coordinator_address = coordinator_address
        self._last_nproc_per_node = 0
        self._next_index = 0

    def next(self, stop_signal: Callable[[], int]) -> tuple[int, Place] | int:
        """A new port where there is one host alone."""
        index, self._next_index = self._next_index, self._next_index + 1
        return index, Place(
            nproc_per_node=self._num_processes(),
            nnodes=self._nnodes,
            node_rank=self._node_rank,
            coordinator_address=self._coordinator_address or f"127.0.0.1:{free_port()}",
        )

    def watch(self, attempt: Attempt) -> None:
        """Processes watch each other themselves."""

    def ended(self, outcome: Outcome) -> None:
        """There is nobody to tell."""

    def all_done(self, stop_signal: Callable[[], int]) -> bool:
        """Other hosts' launchers judge for themselves."""
        return True

    def goes_on(self) -> bool:
        """The scheduler starts the job again."""
        return False

    def close(self, code: int, stop_signal: int) -> None:
        """There is nobody to tell."""

    def _num_processes(self) -> int:
        """As asked for, or one per GPU that is there now: a lost GPU ends no job."""
        if self._nproc_per_node:
            return self._nproc_per_node
        now = count_gpus() or 1
        if self._last_nproc_per_node and now != self._last_nproc_per_node:
            _say(f"{now} GPUs are there, {self._last_nproc_per_node} were: going on with {now}")
        self._last_nproc_per_node = now
        return now


class Supervisor:
    """Attempts of one command, until one decides.

    Args:
        command: program and arguments of every process.
        places: where they run.
        run_dir: where checkpoints and logs are.
        budget: how often to start again.
    """

    def __init__(self, command: list[str], places: Places, run_dir: Path, budget: Budget):
        self.command, self.places, self.run_dir, self.budget = command, places, run_dir, budget
        self.stop_signal = 0
        self.attempt: Attempt | None = None

    def run(self) -> int:
        """Attempts until one decides; returns the job's exit code."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        (locate(self.run_dir) / "logs").make_directory()
        code = runtime.EXIT_CONFIG  # if an error leaves here, it is one of what was asked for
        try:
            code = self._attempts()
        finally:
            self.places.close(code, self.stop_signal)
        return code

    def newest_checkpoint(self) -> int:
        """Step of the newest committed checkpoint, -1 without one."""
        directory = locate(self.run_dir) / "checkpoints"
        try:  # the manifest is written last: without one a save is not finished
            saved = [n for n in directory.entries() if (directory / n / "manifest.json").exists()]
        except OSError:
            return -1
        return max((int(name) for name in saved if name.isdecimal()), default=-1)

    def _attempts(self) -> int:
        failures, newest = 0, self.newest_checkpoint()
        while True:
            found = self.places.next(lambda: self.stop_signal)
            if isinstance(found, int):
                return found
            outcome = self._one_attempt(*found)
            code = self._decided(outcome)
            if code is not None:
                return code
            if outcome.exit_code in (runtime.EXIT_OK, runtime.EXIT_PREEMPTED):
                continue  # others are not done, or the next round has other hosts: no failure
            print(outcome.report(), file=sys.stderr, flush=True)
            reached = self.newest_checkpoint()
            failures = 1 if reached > newest else failures + 1
            newest = max(newest, reached)
            if failures > self.budget.max_restarts:
                _say(
                    f"giving up: {failures} attempts in a row ended without a new checkpoint. "
                    f"Logs: {self.run_dir / 'logs'}"
                )
                return outcome.exit_code
            if not self._wait_before_restart(failures, newest) or not self._wait_for_run_dir():
                return 128 + self.stop_signal if self.stop_signal else outcome.exit_code

    def _one_attempt(self, index: int, place: Place) -> Outcome:
        self.attempt = Attempt(self.command, place, index, self.run_dir / "logs")
        if self.stop_signal:  # it came while the processes were being started
            self.attempt.ask_to_stop()
        try:
            outcome = self.attempt.run(self.budget.stop_timeout_s, self.places.watch)
        finally:
            self.attempt = None
        self.places.ended(outcome)
        return outcome

    def _decided(self, outcome: Outcome) -> int | None:
        """The job's exit code if this attempt settles it, None to try again."""
        if outcome.exit_code == runtime.EXIT_OK:
            return runtime.EXIT_OK if self.places.all_done(lambda: self.stop_signal) else None
        if outcome.exit_code == runtime.EXIT_PREEMPTED:
            if not self.stop_signal and self.places.goes_on():
                return None
            _say("preempted after a committed save; the same command goes on from there")
            return runtime.EXIT_PREEMPTED
        final = (runtime.EXIT_CONFIG, runtime.EXIT_SDC, runtime.EXIT_INTERRUPTED)
        if outcome.exit_code in final:
            if not outcome.spoken:
                print(outcome.report(), file=sys.stderr, flush=True)
            return outcome.exit_code
        if self.stop_signal:
            print(outcome.report(), file=sys.stderr, flush=True)
            return 128 + self.stop_signal
        return None

    def _wait_before_restart(self, failures: int, newest: int) -> bool:
        """Back off; False when asked to stop meanwhile."""
        budget = self.budget
        seconds = min(budget.max_backoff_s, budget.backoff_s * 2 ** (failures - 1))
        seconds *= 1 + 0.25 * random.random()  # hosts of one job must not come back in step
        point = f"checkpoint {newest}" if newest >= 0 else "the beginning"
        _say(f"restart {failures} of {budget.max_restarts} in {seconds:.1f} s, from {point}")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop_signal:
            time.sleep(min(0.1, seconds))
        return not self.stop_signal

    def _wait_for_run_dir(self) -> bool:
        """Whether the run directory is there; a start without it would begin a new run below it."""
        logs = self.run_dir / "logs"  # made before the first attempt
        if logs.is_dir():
            return True
        _say(
            f"{self.run_dir} is gone: is its file system still mounted? "
            f"Waiting up to {_LOST_DIRECTORY_S:.0f} s for it"
        )
        until = time.monotonic() + _LOST_DIRECTORY_S
        while not self.stop_signal and time.monotonic() < until:
            if logs.is_dir():
                _say(f"{self.run_dir} is back")
                return True
            time.sleep(0.2)
        if not self.stop_signal:
            _say("giving up: it did not come back; nothing was started without it")
        return False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again = self.stop_signal != 0
        self.stop_signal = number
        if self.attempt is None:
            return
        if number == signal.SIGINT and again:
            self.attempt.kill()
        else:
            self.attempt.ask_to_stop()


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
