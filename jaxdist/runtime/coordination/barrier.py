"""A barrier that a process can abort, for work that may fail on one process (saving a checkpoint).

In jax's barrier the others wait for a failed process until the time-out.
"""

from __future__ import annotations

import time

from jaxdist.runtime.coordination import service
from jaxdist.runtime.coordination.group import Group

_POLL_S = 1.0


class GivenUp(Exception):
    """Another process aborted the barrier; it reports its error by other means."""


class Barrier:
    """Barrier among the processes of a job, for one piece of work after the other."""

    def __init__(self, name: str) -> None:
        self._group = Group(name)  # for a unique prefix
        self._round = 0
        self._put: list[str] = []

    def begin(self) -> None:
        """Start the next piece of work on every process, after all have left the previous one."""
        self._round += 1
        for key in self._put:
            service.delete(key)
        self._put.clear()

    def give_up(self) -> None:
        """Abort: this process will not reach any further barrier of this work."""
        if self._group.num_processes > 1:
            self._set(self._abort_key)

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Return when every process is here; has the signature that Orbax expects."""
        here = f"{self._group.prefix}/barrier/{self._round}/{key}"
        until = time.monotonic() + timeout_ms / 1000
        # Process 0 waits for each of the others and then releases all: 2n requests, not n².
        if self._group.process_id == 0:
            for process in range(1, self._group.num_processes):
                self._await(f"{here}/{process}", until)
            self._set(f"{here}/all")
        else:
            self._set(f"{here}/{self._group.process_id}")
            self._await(f"{here}/all", until)

    @property
    def _abort_key(self) -> str:
        return f"{self._group.prefix}/barrier/{self._round}/given-up"

    def _set(self, key: str) -> None:
        service.put(key, True, overwrite=True)
        self._put.append(key)

    def _await(self, key: str, until: float) -> None:
        while not self._is_set(key, _POLL_S):
            if self._is_set(self._abort_key, 0.0):
                raise GivenUp
            if time.monotonic() > until:
                raise TimeoutError(f"a process did not reach the barrier in time: {key}")

    def _is_set(self, key: str, timeout_s: float) -> bool:
        try:
            return service.get(key, timeout_s)
        except TimeoutError:
            return False
