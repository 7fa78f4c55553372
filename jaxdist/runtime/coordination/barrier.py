"""A barrier that any process can abort, for work that can fail on one process (saving).

At jax's own barrier the others would wait for a failed process until the time-out.
"""

from __future__ import annotations

import time

from jaxdist.runtime.coordination import service
from jaxdist.runtime.coordination.group import Group

_POLL_S = 1.0


class GivenUp(Exception):
    """Another process aborted the barrier; it reports its error by other means."""


class Barrier:
    """Barrier among the processes of a job, reused for successive pieces of work."""

    def __init__(self, name: str) -> None:
        self._group = Group(name)  # for a unique prefix
        self._round = 0
        self._put: list[str] = []

    def begin(self) -> None:
        """Start the next piece of work; call it when all processes have left the previous one."""
        self._round += 1
        for key in self._put:
            service.delete(key)
        self._put.clear()

    def give_up(self) -> None:
        """Abort this piece of work, because this process will not reach its next barrier."""
        if self._group.num_processes > 1:
            self._set(self._abort_key)

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Return when every process has called this; has the signature that Orbax expects."""
        here = f"{self._group.prefix}/barrier/{self._round}/{key}"
        until = time.monotonic() + timeout_ms / 1000
        # Process 0 waits for each process and then releases all: 2n requests instead of n².
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
