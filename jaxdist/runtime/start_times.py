"""Where the time of a start goes: seconds of each part, up to the first trained step."""

from __future__ import annotations

import os
import time
from pathlib import Path

FAILED_AT = "JAXDIST_FAILED_AT"
"""When the attempt before failed, in seconds of the monotonic clock that a host's processes share.

The launcher sets it for processes that it starts again.
"""


class StartTimes:
    """Seconds of each part of a start, in the order in which they were first marked.

    | part | until |
    |---|---|
    | `relaunch` | this process runs; counted from the failure that the launcher saw |
    | `imports` | modules are imported, and settings read |
    | `join` | all processes have met, and devices are started |
    | `setup` | data, run directory and step are made |
    | `restore` | the state is on the devices |
    | `compile` | the step is compiled, or read from the compile cache |
    | `first_step` | the first step is done |

    Args:
        begun: when the start began, in seconds of `time.monotonic`; default: now.
        failed_at: when the attempt before failed; 0 = this start follows no failure.
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
        """Of a process that does nothing else: counted from its own start."""
        return cls(_process_start(), float(os.environ.get(FAILED_AT, 0)))

    @property
    def total(self) -> float:
        """Seconds of all parts so far."""
        return sum(self.parts.values())

    def mark(self, part: str) -> None:
        """Count the time since the last mark as time of this part."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def end(self, part: str) -> None:
        """Mark the last part; the start is over."""
        self.mark(part)
        self.done = True


def _process_start() -> float:
    """When this process began, in seconds of `time.monotonic`; now, where no /proc tells."""
    now = time.monotonic()
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:  # macOS
        return now
    ticks = int(after_name[19])  # field 22 of all: after boot
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age
