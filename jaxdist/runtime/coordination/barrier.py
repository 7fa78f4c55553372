"""A barrier that can be given up, for work that may fail on one process (writing a checkpoint).

The barrier of jax's own service has no such way out. A process whose disk is full never reaches it,
so the others stand there until the timeout, and training with them. This barrier looks every second
whether some process has given up.
"""

from __future__ import annotations

import time

from jaxdist.runtime.coordination import service
from jaxdist.runtime.coordination.group import Group

_LOOK_S = 1.0


class GivenUp(Exception):
    """Another process could not do its part; it tells all why by other means."""


class Barrier:
    """A barrier among the processes of a job, for one piece of such work after the other."""

    def __init__(self, name: str) -> None:
        self._group = Group(name)  # for a prefix that no other barrier has
        self._round = 0
        self._put: list[str] = []

    def begin(self) -> None:
        """Start the next piece of work, on every process, once all have left the one before."""
        self._round += 1
        for key in self._put:
            service.delete(key)
        self._put.clear()

    def give_up(self) -> None:
        """Free the others from this work: this process comes to no further barrier of it."""
        if self._group.num_processes > 1:
            self._set(self._given_up)

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Return when every process is here; Orbax's signature.

        Raises:
            GivenUp: some process is not coming.
            TimeoutError: some process has not come in time.
        """
        here = f"{self._group.prefix}/barrier/{self._round}/{key}"
        until = time.monotonic() + timeout_ms / 1000
        # Process 0 waits for each of the others and then frees them all, so that a job of n
        # processes makes 2n requests and not n².
        if self._group.process_id == 0:
            for process in range(1, self._group.num_processes):
                self._await(f"{here}/{process}", until)
            self._set(f"{here}/all")
        else:
            self._set(f"{here}/{self._group.process_id}")
            self._await(f"{here}/all", until)

    @property
    def _given_up(self) -> str:
        return f"{self._group.prefix}/barrier/{self._round}/given-up"

    def _set(self, key: str) -> None:
        service.put(key, True, overwrite=True)
        self._put.append(key)

    def _await(self, key: str, until: float) -> None:
        while not self._is_set(key, _LOOK_S):
            if self._is_set(self._given_up, 0.0):
                raise GivenUp
            if time.monotonic() > until:
                raise TimeoutError(f"a process did not reach the barrier in time: {key}")

    def _is_set(self, key: str, timeout_s: float) -> bool:
        try:
            return service.get(key, timeout_s)
        except TimeoutError:
            return False
