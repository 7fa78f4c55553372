"""What a checkpointer reports: lines for people, events for metrics."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxdist.checkpoint.errors import CheckpointError
from jaxdist.runtime.formatting.numbers import in_bytes, rate

Event = dict[str, Any]


@dataclasses.dataclass
class Outcome:
    """One save, measured by the training loop and by the background thread.

    Attributes:
        halfway: it halves an interval, and is kept until the next save is committed.
        waited_s: seconds the loop waited for the save before.
        blocked_s: seconds the loop waited for the copy to the host.
        written_s: seconds from the start until the manifest was durable.
        error: one line; "" when it is committed.
    """

    step: int
    halfway: bool = False
    waited_s: float = 0.0
    blocked_s: float = 0.0
    written_s: float = 0.0
    num_bytes: int = 0
    error: str = ""


class EventLog:
    """Collects events on every process and writes lines on process 0."""

    def __init__(self, write_line: Callable[[str], None], leader: bool) -> None:
        self._write_line = write_line
        self._leader = leader
        self._events: collections.deque[Event] = collections.deque()  # two threads append

    def log(self, text: str) -> None:
        """One line for people."""
        if self._leader:
            self._write_line(text)

    def event(self, kind: str, **values: Any) -> None:
        """One record for metrics."""
        self._events.append({"event": kind, **values})

    def pop(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def saved(self, outcome: Outcome) -> None:
        """A committed save."""
        bytes_per_s = outcome.num_bytes / max(outcome.written_s, 1e-9)
        self.event(
            "save",
            step=outcome.step,
            halfway=outcome.halfway,
            blocked_s=outcome.blocked_s,
            waited_s=outcome.waited_s,
            written_s=outcome.written_s,
            bytes=outcome.num_bytes,
            gb_per_s=bytes_per_s / 1e9,
        )
        late = outcome.waited_s > 0.01
        waited = f", waited {outcome.waited_s:.2f} s for the save before" if late else ""
        halfway = "; halfway, kept until the next" if outcome.halfway else ""
        self.log(
            f"checkpoint {outcome.step} saved: {in_bytes(outcome.num_bytes)} in "
            f"{outcome.written_s:.2f} s ({rate(bytes_per_s)}), training blocked "
            f"{outcome.blocked_s:.2f} s{waited}{halfway}"
        )

    def saved_locally(self, outcome: Outcome) -> None:
        """A local save with its copies; `bytes` are those of this process."""
        self.event(
            "local_save",
            step=outcome.step,
            blocked_s=outcome.blocked_s,
            written_s=outcome.written_s,
            bytes=outcome.num_bytes,
        )
        self.log(
            f"local save of step {outcome.step}: {in_bytes(outcome.num_bytes)} a process in "
            f"{outcome.written_s:.2f} s, copies included, training blocked "
            f"{outcome.blocked_s:.2f} s"
        )

    def failed_locally(self, step: int, reason: str) -> None:
        """A local save that does not count: it or a copy of it is not whole."""
        self.event("local_save_failed", step=step, reason=reason)
        self.log(f"LOCAL SAVE FAILED at step {step}: {reason} (the local saves before are kept)")

    def failed(self, outcome: Outcome, in_a_row: int, allowed: int) -> None:
        """A save that did not happen, with how many more may fail."""
        self.event("save_failed", step=outcome.step, reason=outcome.error, in_a_row=in_a_row)
        self.log(
            f"SAVE FAILED at step {outcome.step}: {outcome.error} ({in_a_row} in a row, the run "
            f"stops at {allowed}; older checkpoints are untouched, the next interval tries again)"
        )


def one_line(error: BaseException) -> str:
    """Return an error as one line: ours are written to be one, Orbax's run to hundreds."""
    if isinstance(error, CheckpointError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
