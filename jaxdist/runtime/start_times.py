"""Measure the duration of each part of a start, up to the first training step."""

from __future__ import annotations

import os
import time
from pathlib import Path

FAILED_AT = "JAXDIST_FAILED_AT"
"""Variable set by the launcher: monotonic time at which the previous attempt failed."""


class StartTimes:
    """Seconds of each part of a start, in the order of their first marks.

    | part | ends when |
    |---|---|
    | `relaunch` | this process runs; begins when the launcher detected the failure |
    | `imports` | modules are imported, and settings read |
    | `join` | all processes have joined, and devices are started |
    | `setup` | data, run directory and step are set up |
    | `restore` | the state is on the devices |
    | `compile` | the step is compiled, or read from the compile cache |
    | `first_step` | the first step is done |

    In seconds of `time.monotonic`: `begun`, and `failed_at` of the previous attempt (0 = none).
    """

    def __init__(self, begun: float | None = None, failed_at: float = 0.0) -> None:
        self.follows_failure = failed_at > 0
        self.parts: dict[str, float] = {}
        self.done = False
        self._last = time.monotonic() if begun is None else begun
        if self.follows_failure:
            self.parts["relaunch"] = max(0.0, self._last - failed_at)

    @classmethod
    def of_process(cls) -> StartTimes:
        """Return times that begin at the start of this process."""
        return cls(_process_start(), float(os.environ.get(FAILED_AT, 0)))

    @property
    def total(self) -> float:
        """Seconds of all parts so far."""
        return sum(self.parts.values())

    def mark(self, part: str) -> None:
        """Add the time since the previous mark to `part`."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def end(self, part: str) -> None:
        """Mark the last part; the start is complete."""
        self.mark(part)
        self.done = True


def _process_start() -> float:
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])  # field 22: start after boot
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age
