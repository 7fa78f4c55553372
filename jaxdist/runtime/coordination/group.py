"""Exchange values between all processes, in the same order everywhere.

A decision that depends on a file or a clock must be made by one process: `Group.decide` makes it on
process 0 and returns the result on all processes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.runtime.coordination import service

_WAIT_S = 3600.0
"""Default time-out: one process may verify a large checkpoint while the others wait."""

_MOST_KEPT = 64
"""Calls of `decide` in a row whose results are kept until all processes synchronize."""

_made: Counter[str] = Counter()  # name -> number of groups created; equal in all processes
_topics: dict[str, Group] = {}  # groups of the function `gather`


class Group:
    """Exchanges of values between all processes of a job, under a name.

    Every process must make the same calls on a group in the same order; each thread needs its own
    group. If a name is used again, the n-th groups of all processes match.

    `decide` raises an error of process 0 in all processes. If its class is in `errors` (constructed
    from one text), the others raise the same class, else `otherwise`.
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
        self.process_id, self.num_processes = service.process_id_and_count() if joined else (0, 1)
        _made[name] += 1
        self.prefix = f"{name}/{_made[name]}"
        self.timeout_s = timeout_s
        self._errors = {error.__name__: error for error in errors}
        self._otherwise = otherwise
        self._calls = itertools.count()
        self._put: list[str] = []  # keys that this process has put and not yet deleted
        self._unmet = 0  # calls of `decide` since all processes last synchronized

    @property
    def is_leader(self) -> bool:
        """Return whether this process decides."""
        return self.process_id == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes, by process id; also a barrier.

        Raises `TimeoutError` if a process is late; the key in the message ends in its process id.
        """
        if self.num_processes == 1:
            return [value]
        self._unmet = 0
        key = f"{self.prefix}/{next(self._calls)}"
        put_before = len(self._put)
        self._set(f"{key}/{self.process_id}", value)
        values = [
            service.get(f"{key}/{process}", self.timeout_s) for process in range(self.num_processes)
        ]
        self._delete(put_before)
        return values

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Run `decision` on process 0; return its JSON value, or raise its error, everywhere."""
        if self.num_processes == 1:
            return decision()
        if self._unmet == _MOST_KEPT:
            self.gather(None)
        self._unmet += 1
        return self._decided(decision)

    def decide_from(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Run `decide` with the JSON values of all processes; needs fewer reads than `gather`."""
        if self.num_processes == 1:
            return decision([value])
        self._unmet = 0
        key = f"{self.prefix}/{next(self._calls)}"
        put_before = len(self._put)
        if self.is_leader:
            others = range(1, self.num_processes)

            def read() -> list[Any]:
                values = [service.get(f"{key}/{process}", self.timeout_s) for process in others]
                self._delete(put_before)
                return [value, *values]

            return self._decided(lambda: decision(read()))
        own = f"{key}/{self.process_id}"
        service.put(own, value)
        try:
            return self._decided(lambda: None)  # process 0 runs it
        finally:
            service.delete(own)

    def _decided(self, decision: Callable[[], Any]) -> Any:
        """Return the result of process 0, or raise its error, in every process."""
        key = f"{self.prefix}/{next(self._calls)}"
        if self.is_leader:
            try:
                answer = {"value": decision()}
            except Exception as error:  # the others must not wait for a result
                self._set(key, {"error": type(error).__name__, "text": str(error)})
                raise
            self._set(key, answer)
            return answer["value"]
        answer = service.get(key, self.timeout_s)
        if "error" in answer:
            raise self._rebuilt(answer["error"], answer["text"])
        return answer["value"]

    def _set(self, key: str, value: Any) -> None:
        service.put(key, value)
        self._put.append(key)

    def _delete(self, put_before: int) -> None:
        """Delete this process's oldest keys, which all others have read by now."""
        for key in self._put[:put_before]:
            service.delete(key)
        del self._put[:put_before]

    def _rebuilt(self, kind: str, text: str) -> Exception:
        from jaxdist.settings import ConfigError

        if kind == "ConfigError":
            return ConfigError(text.split("\n"))
        if kind in self._errors:
            return self._errors[kind](text)
        return self._otherwise(f"{kind} on process 0: {text}")


def gather(topic: str, value: Any, timeout_s: float = _WAIT_S) -> list[Any]:
    """Return the JSON values of all processes for `topic`, by process id; [value] if alone.

    It uses no device. The n-th call with a topic matches the n-th call in the other processes.
    Raises `TimeoutError` after `timeout_s`; its key has the process id.
    """
    if not service.is_joined():
        return [value]
    if topic not in _topics:  # kept, because its next call deletes the keys of this call
        _topics[topic] = Group(topic)
    _topics[topic].timeout_s = timeout_s
    return _topics[topic].gather(value)
