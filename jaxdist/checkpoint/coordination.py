"""One decision for all processes: process 0 decides, the others learn it from the job's store.

A process that fell back alone (to an older checkpoint, past a failed save) would leave the others
waiting in a collective for ever; so whatever depends on files or clocks is decided here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from jaxdist.checkpoint.errors import CheckpointError, Damaged
from jaxdist.core.types import ConfigError

_WAIT_S = 3600  # reading back the CRCs of a large checkpoint may keep one process this long
_instances = itertools.count()  # all processes build the same agreements in the same order


class Agreement:
    """Named exchanges between the processes of a job; trivial when there is one process.

    Every process must make the same calls in the same order.

    Attributes:
        process: index of this process.
        num_processes: in the job.
        client: of the job's key-value store; None where there is one process.
        prefix: of this agreement's keys.
    """

    def __init__(self) -> None:
        # The key-value store has no public name in JAX; this is the only place that uses it.
        from jax._src.distributed import global_state

        self.process = global_state.process_id or 0
        self.num_processes = global_state.num_processes or 1
        self.client: Any = global_state.client if self.num_processes > 1 else None
        self.prefix = f"jaxdist/checkpoint/{next(_instances)}"
        self._calls = itertools.count()
        self._said: list[str] = []  # keys that this process has set and not deleted

    @property
    def leader(self) -> bool:
        """Whether this is the process that decides, writes manifests and logs."""
        return self.process == 0

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Run `decision` on process 0 only; its JSON value, or its error, reaches every process."""
        if self.client is None:
            return decision()
        key = f"{self.prefix}/{next(self._calls)}"
        if self.leader:
            try:
                answer = {"value": decision()}
            except Exception as error:  # whatever it is, the others must not wait for an answer
                self._set(key, {"error": type(error).__name__, "text": str(error)})
                raise
            self._set(key, answer)
            return answer["value"]
        answer = self._get(key)
        if "error" in answer:
            raise _rebuilt(answer["error"], answer["text"])
        return answer["value"]

    def decide_from(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """`decide` on process 0, which is given the JSON values of all processes, in their order.

        Cheaper than `gather` for many processes: only one reads what all say.
        """
        if self.client is None:
            return decision([value])
        key = f"{self.prefix}/{next(self._calls)}"
        if self.leader:
            others = range(1, self.num_processes)
            hear = lambda: [value, *(self._get(f"{key}/{process}") for process in others)]
            return self.decide(lambda: decision(hear()))
        own = f"{key}/{self.process}"
        self.client.key_value_set(own, json.dumps(value))
        try:
            return self.decide(lambda: None)  # process 0's
        finally:
            self.client.key_value_delete(own)

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in order of process."""
        if self.client is None:
            return [value]
        key = f"{self.prefix}/{next(self._calls)}"
        said_before, self._said = self._said, []
        self._set(f"{key}/{self.process}", value)
        values = [self._get(f"{key}/{process}") for process in range(self.num_processes)]
        # All have come this far, so all have read what was said before: file lists, over many saves
        # too much to keep in the coordinator's memory.
        for read in said_before:
            self.client.key_value_delete(read)
        return values

    def _set(self, key: str, value: Any) -> None:
        self.client.key_value_set(key, json.dumps(value))
        self._said.append(key)

    def _get(self, key: str) -> Any:
        return json.loads(self.client.blocking_key_value_get(key, _WAIT_S * 1000))


def _rebuilt(kind: str, text: str) -> Exception:
    if kind == "ConfigError":
        return ConfigError(text.split("\n"))
    kinds = {"Damaged": Damaged, "CheckpointError": CheckpointError}
    return kinds[kind](text) if kind in kinds else CheckpointError(f"{kind} on process 0: {text}")
