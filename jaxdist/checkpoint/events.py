"""Errors, events and log lines of a checkpointer."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.runtime.coordination import Group
from jaxdist.runtime.formatting.numbers import in_bytes, rate
from jaxdist.settings import ConfigError

_MAX_NAMED = 3  # arrays listed in an error message


class CheckpointError(RuntimeError):
    """Raised if a save, a check or a restore fails; the message has the cause."""

    has_traceback = False  # in the closing block of a command


class CorruptCheckpoint(CheckpointError):
    """Raised if files of a checkpoint are damaged; an older checkpoint may be intact."""


class MismatchError(ConfigError):
    """Raised if a checkpoint's arrays do not fit the settings; `document` is its JSON."""

    def __init__(self, step: int, problems: list[str], document: dict[str, Any]):
        self.step, self.document = step, document
        lines = [f"checkpoint {step} does not fit: {line}" for line in problems[:_MAX_NAMED]]
        if len(problems) > _MAX_NAMED:
            lines[-1] += f" There are {len(problems) - _MAX_NAMED} more such problems."
        super().__init__(lines)


def make_group() -> Group:
    """Return a `Group` of all processes, for one thread; all raise an error of process 0."""
    errors = (CorruptCheckpoint, CheckpointError)
    return Group("checkpoint", errors=errors, otherwise=CheckpointError)


Event = dict[str, Any]

_MAX_LENGTH = 600  # characters of an error; paths alone can have hundreds


@dataclasses.dataclass
class Outcome:
    """Result of one save.

    `waited_s` is the wait for the previous save; from then on, `blocked_s` is the time until the
    copy is in host memory, `written_s` until the save is committed. `error` is "" if committed.
    """

    step: int
    halfway: bool = False
    waited_s: float = 0.0
    blocked_s: float = 0.0
    written_s: float = 0.0
    num_bytes: int = 0
    error: str = ""


class EventLog:
    """Collect events on every process; write log lines on process 0."""

    def __init__(self, write_line: Callable[[str], None], leader: bool) -> None:
        self._write_line = write_line
        self._leader = leader
        self._events: collections.deque[Event] = collections.deque()  # two threads append

    def log(self, text: str) -> None:
        """Write a log line, on process 0 only."""
        if self._leader:
            self._write_line(text)

    def event(self, kind: str, **values: Any) -> None:
        """Add an event, a dict of its kind and `values`, to the list for `pop`."""
        self._events.append({"event": kind, **values})

    def pop(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def saved(self, outcome: Outcome) -> None:
        """Add the event and the log line of a committed save."""
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
        waited = f", waited {outcome.waited_s:.2f} s for the previous save" if late else ""
        halfway = "; halfway between two saves" if outcome.halfway else ""
        self.log(
            f"checkpoint {outcome.step} saved: {in_bytes(outcome.num_bytes)} in "
            f"{outcome.written_s:.2f} s ({rate(bytes_per_s)}), training blocked "
            f"{outcome.blocked_s:.2f} s{waited}{halfway}"
        )

    def saved_locally(self, outcome: Outcome) -> None:
        """Add the event and log line of a local save; `bytes` counts this process only."""
        self.event(
            "local_save",
            step=outcome.step,
            blocked_s=outcome.blocked_s,
            written_s=outcome.written_s,
            bytes=outcome.num_bytes,
        )
        self.log(
            f"local save of step {outcome.step}: {in_bytes(outcome.num_bytes)} by process 0, all "
            f"processes finished in {outcome.written_s:.2f} s, training blocked "
            f"{outcome.blocked_s:.2f} s"
        )

    def failed_locally(self, step: int, reason: str) -> None:
        """Add the event and log line of a local save that failed, or whose copy failed."""
        self.event("local_save_failed", step=step, reason=reason)
        self.log(f"LOCAL SAVE FAILED at step {step}: {reason} (earlier local saves are kept)")

    def failed(self, outcome: Outcome, in_a_row: int, allowed: int) -> None:
        """Add event and log line of a failed save; the run stops at `allowed` failures in a row."""
        self.event("save_failed", step=outcome.step, reason=outcome.error, in_a_row=in_a_row)
        self.log(
            f"SAVE FAILED at step {outcome.step}: {outcome.error} ({in_a_row} in a row, the run "
            f"stops at {allowed}; until then the next save tries again; older checkpoints are kept)"
        )


def first_error(errors: Sequence[str]) -> str:
    """Return the first text that is not empty, or ""."""
    return next(filter(None, errors), "")


def one_line(error: BaseException) -> str:
    """Return an error as one line; messages of Orbax have hundreds of lines.

    The message of a `CheckpointError` is returned unchanged. Of nested messages of TensorStore: the
    last path and the text of the system's error.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if number := re.search(r"\[os_error_code='(\d+)'", lines[0]):
        paths = re.findall(r'"(/[^"]+)"', lines[0][: number.start()])
        return ": ".join([*paths[-1:], os.strerror(int(number[1]))])
    return f"{type(error).__name__}: {lines[0][:_MAX_LENGTH]}"
