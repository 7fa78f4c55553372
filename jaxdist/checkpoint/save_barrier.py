"""Where processes wait for each other while a save is written; one that gives up frees the others.

Orbax waits at barriers of jax's coordinator, which a process whose disk is full never reaches: the
others stood there until `checkpoint.timeout_s`, and training with them. This barrier looks every
second whether somebody has given the save up.
"""

from __future__ import annotations

import time
from typing import Any

from jaxdist.checkpoint.coordination import Agreement

_LOOK_MS = 1000


class GivenUp(Exception):
    """Another process could not write its part; it tells all why."""


class SaveBarrier:
    """A barrier among the processes of a job, for one save after the other."""

    def __init__(self) -> None:
        agreement = Agreement()  # for a prefix that no other barrier has
        self._client: Any = agreement.client
        self._process, self._num_processes = agreement.process, agreement.num_processes
        self._prefix = f"{agreement.prefix}/barrier"
        self._save = 0
        self._said: list[str] = []

    def begin(self) -> None:
        """A new save, on every process alike; all have come out of the one before."""
        self._save += 1
        for key in self._said:
            self._client.key_value_delete(key)
        self._said.clear()

    def give_up(self) -> None:
        """Free the others from this save: this process comes to no further barrier of it."""
        if self._client is not None:
            self._set(self._given_up)

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Return when every process is here; Orbax's signature.

        Raises:
            GivenUp: some process is not coming.
            TimeoutError: some process has not come in time.
        """
        here = f"{self._prefix}/{self._save}/{key}"
        until = time.monotonic() + timeout_ms / 1000
        if self._process == 0:
            for process in range(1, self._num_processes):
                self._await(f"{here}/{process}", until)
            self._set(f"{here}/all")
        else:
            self._set(f"{here}/{self._process}")
            self._await(f"{here}/all", until)

    @property
    def _given_up(self) -> str:
        return f"{self._prefix}/{self._save}/given-up"

    def _set(self, key: str) -> None:
        self._client.key_value_set(key, "1", allow_overwrite=True)
        self._said.append(key)

    def _await(self, key: str, until: float) -> None:
        while not self._is_set(key, _LOOK_MS):
            if self._is_set(self._given_up, 1):
                raise GivenUp
            if time.monotonic() > until:
                raise TimeoutError(f"processes are missing in a save: {key}")

    def _is_set(self, key: str, timeout_ms: int) -> bool:
        try:
            self._client.blocking_key_value_get(key, timeout_ms)
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise
        return True
