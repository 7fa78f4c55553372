"""Exchange values between all processes, in the same order everywhere.

A decision that depends on a file or a clock must be made by one process: `Group.decide` makes it on
process 0 and returns the result on all processes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.runtime.coordination import service

_WAIT_S = 3600.0
"""Default time-out: one process may verify a large checkpoint while the others wait."""

_MOST_KEPT = 64
"""Calls of `decide` in a row whose results are kept until all processes synchronize."""

_LEADER_S = 10.0
"""Longer wait of the others than of process 0, whose time-out error names the late process."""

_made: Counter[str] = Counter()  # name -> number of groups created; equal in all processes
_topics: dict[str, Group] = {}  # groups of the functions below


class LateProcess(TimeoutError):
    """Raised if a process did not take part in an exchange in time; the text has its id."""


class Group:
    """Exchanges of values between all processes of a job, under a name.

    Every process must make the same calls on a group in the same order; each thread needs its own
    group. If a name is used again, the n-th groups of all processes match.

    `decide` raises an error of process 0 in all processes. If its class is `ConfigError`,
    `LateProcess` or in `errors` (constructed from one text), the others raise the same class, else
    `otherwise`.
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
        _made[name] += joined
        self.prefix = f"{name}/{_made[name]}"
        self.timeout_s = timeout_s
        self._errors = {error.__name__: error for error in errors}
        self._otherwise = otherwise
        self._calls = itertools.count()
        self._put: list[str] = []  # keys of process 0 that others may still read
        self._unmet = 0  # calls of `decide` since all processes last synchronized

    @property
    def is_leader(self) -> bool:
        """Return whether this is process 0, which runs the decisions."""
        return self.process_id == 0

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Run `decision` on process 0; return its JSON value, or raise its error, everywhere."""
        if self.num_processes == 1:
            return decision()
        if self._unmet == _MOST_KEPT:
            self.synchronize()
        self._unmet += 1
        return self._decided(decision)

    def decide_from(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Run `decision` on process 0 with all processes' JSON values, by id; return its result.

        Also a barrier. Process 0 reads from all processes, the others only the result, which should
        be small. After `timeout_s`, raises `LateProcess`, or `TimeoutError` if process 0 is late.
        """
        if self.num_processes == 1:
            return decision([value])
        self._unmet = 0
        key = f"{self.prefix}/{next(self._calls)}"
        if self.is_leader:
            return self._decided(lambda: decision([value, *self._collect(key)]))
        service.put(f"{key}/{self.process_id}", value)
        return self._decided(lambda: None, _LEADER_S)  # process 0 runs it

    def collect(self, value: Any) -> list[Any]:
        """Return all processes' JSON values, by id, in process 0, and [] elsewhere; a barrier."""
        everyone: list[Any] = []
        self.decide_from(value, everyone.extend)
        return everyone

    def synchronize(self) -> None:
        """Return when every process has called this."""
        self.decide_from(None, lambda values: None)

    def scatter(self, decision: Callable[[], Sequence[Any]]) -> Any:
        """Like `decide`, but return in each process only JSON value number `process_id`."""
        if self.num_processes == 1:
            return decision()[0]
        key = f"{self.prefix}/{next(self._calls)}"
        values: list[Any] = []
        self.decide(lambda: values.extend(decision()))  # all get its error
        if not self.is_leader:
            return service.get(f"{key}/{self.process_id}", self.timeout_s)
        self._put.append(f"{key}/")
        for process, value in enumerate(values[1:], start=1):
            service.put(f"{key}/{process}", value)
        return values[0]

    def _collect(self, key: str) -> list[Any]:
        """Return the values of processes 1, 2, … below a key, and delete all that were read."""
        until = time.monotonic() + self.timeout_s
        values: list[Any] = []
        read_before, self._put = self._put, []
        for process in range(1, self.num_processes):
            try:
                left_s = max(0.0, until - time.monotonic())
                values.append(service.get(f"{key}/{process}", left_s))
            except TimeoutError:
                raise LateProcess(
                    f"process {process} of {self.num_processes} has not set {key}/{process} within "
                    f"{self.timeout_s:g} s"
                ) from None
        # Each process has now read all earlier results.
        for old in (*read_before, f"{key}/"):
            service.delete(old)
        return values

    def _decided(self, decision: Callable[[], Any], later_s: float = 0.0) -> Any:
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
        answer = service.get(key, self.timeout_s + later_s)
        if "error" in answer:
            raise self._rebuilt(answer["error"], answer["text"])
        return answer["value"]

    def _set(self, key: str, value: Any) -> None:
        service.put(key, value)
        self._put.append(key)

    def _rebuilt(self, kind: str, text: str) -> Exception:
        from jaxdist.settings import ConfigError

        if kind == "ConfigError":
            return ConfigError(text.split("\n"))
        if kind == LateProcess.__name__:
            return LateProcess(text)
        if kind in self._errors:
            return self._errors[kind](text)
        return self._otherwise(f"{kind} on process 0: {text}")


def decide(topic: str, decision: Callable[[], Any]) -> Any:
    """Call `Group.decide`; the n-th call with a topic matches the n-th one of other processes."""
    return _group(topic).decide(decision)


def decide_from(
    topic: str, value: Any, decision: Callable[[list[Any]], Any], timeout_s: float = _WAIT_S
) -> Any:
    """Call `Group.decide_from`; see `decide`."""
    return _group(topic, timeout_s).decide_from(value, decision)


def collect(topic: str, value: Any, timeout_s: float = _WAIT_S) -> list[Any]:
    """Call `Group.collect`; see `decide`."""
    return _group(topic, timeout_s).collect(value)


def scatter(topic: str, decision: Callable[[], Sequence[Any]]) -> Any:
    """Call `Group.scatter`; see `decide`."""
    return _group(topic).scatter(decision)


def _group(topic: str, timeout_s: float = _WAIT_S) -> Group:
    if not service.is_joined():
        return Group(topic)
    if topic not in _topics:  # kept, because its next call deletes the keys of this call
        _topics[topic] = Group(topic)
    _topics[topic].timeout_s = timeout_s
    return _topics[topic]


_POLL_S = 1.0


class GivenUp(Exception):
    """Raised if another process aborted the barrier; it reports its error by other means."""


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
        """Return when all processes have called this, or raise `GivenUp` or `TimeoutError`."""
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
