"""Exchanges in which every process takes part, in the same order everywhere.

Whatever depends on a file or a clock must be decided once. A process that decided alone (to fall
back to an older checkpoint, to skip a failed save) would leave the others waiting in a collective
for ever. `Group.decide` runs such a decision on process 0 and gives all processes its answer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.runtime.coordination import service

_WAIT_S = 3600.0
"""Reading back the checksums of a large checkpoint may keep one process busy this long."""

_made: Counter[str] = Counter()  # groups by name: all processes make the same ones in order


class Group:
    """All processes of the job, exchanging values under a name; trivial for a single process.

    Every process must make the same calls on a group in the same order. Threads that exchange
    at the same time need a group each, or their calls would be counted together. The n-th group of
    a name belongs to the n-th of that name in the other processes.

    `decide` raises the classes `errors` alike in all processes, each made from one text; any other
    error of process 0 is one of class `otherwise` in the others.
    """

    def __init__(
        self,
        name: str,
        *,
        errors: Sequence[type[Exception]] = (),
        otherwise: type[Exception] = RuntimeError,
        timeout_s: float = _WAIT_S,
    ) -> None:
        joined = service.is_joined()
        self.process_id, self.num_processes = service.process_place() if joined else (0, 1)
        _made[name] += 1
        self.prefix = f"{name}/{_made[name]}"
        self.timeout_s = timeout_s
        self._errors = {error.__name__: error for error in errors}
        self._otherwise = otherwise
        self._calls = itertools.count()
        self._put: list[str] = []  # keys that this process has put and not yet deleted

    @property
    def is_leader(self) -> bool:
        """Whether this is the process that decides."""
        return self.process_id == 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by process id. It is a barrier too.

        Raises:
            TimeoutError: a process has not come in time; its key names it.
        """
        if self.num_processes == 1:
            return [value]
        key = f"{self.prefix}/{next(self._calls)}"
        put_before, self._put = self._put, []
        self._set(f"{key}/{self.process_id}", value)
        values = [
            service.get(f"{key}/{process}", self.timeout_s) for process in range(self.num_processes)
        ]
        # All processes have come this far, so all have read what was put before. Deleting it keeps
        # the file lists of many saves out of process 0's memory.
        for read in put_before:
            service.delete(read)
        return values

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Run `decision` on process 0 only; its JSON value, or its error, reaches every process."""
        if self.num_processes == 1:
            return decision()
        key = f"{self.prefix}/{next(self._calls)}"
        if self.is_leader:
            try:
                answer = {"value": decision()}
            except Exception as error:  # whatever it is, the others must not wait for an answer
                self._set(key, {"error": type(error).__name__, "text": str(error)})
                raise
            self._set(key, answer)
            return answer["value"]
        answer = service.get(key, self.timeout_s)
        if "error" in answer:
            raise self._rebuilt(answer["error"], answer["text"])
        return answer["value"]

    def decide_from(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """`decide`, where process 0 is given the JSON values of all processes, by process id.

        Cheaper than `gather` for many processes, because only process 0 reads all values.
        """
        if self.num_processes == 1:
            return decision([value])
        key = f"{self.prefix}/{next(self._calls)}"
        if self.is_leader:
            others = range(1, self.num_processes)
            hear = lambda: [
                value,
                *(service.get(f"{key}/{process}", self.timeout_s) for process in others),
            ]
            return self.decide(lambda: decision(hear()))
        own = f"{key}/{self.process_id}"
        service.put(own, value)
        try:
            return self.decide(lambda: None)  # process 0's
        finally:
            service.delete(own)

    def _set(self, key: str, value: Any) -> None:
        service.put(key, value)
        self._put.append(key)

    def _rebuilt(self, kind: str, text: str) -> Exception:
        from jaxdist.core.settings import ConfigError

        if kind == "ConfigError":
            return ConfigError(text.split("\n"))
        if kind in self._errors:
            return self._errors[kind](text)
        return self._otherwise(f"{kind} on process 0: {text}")


def gather(topic: str, value: Any, timeout_s: float = _WAIT_S) -> list[Any]:
    """The JSON values of all processes about `topic`, by process id; [value] when alone.

    No device takes part, so it works before devices start and while they compute. The n-th call
    with a topic meets the n-th call with it in the other processes.

    Raises:
        TimeoutError: a process has not come within `timeout_s` seconds; its key names it.
    """
    return Group(topic, timeout_s=timeout_s).gather(value)
