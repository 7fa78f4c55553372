"""Decide when to save, so that a crash at any moment loses at most one interval.

After a crash during a background write, the previous checkpoint is the newest. It is one interval
old when the write begins, so the steps during the write would be lost too. Therefore background
saving adds one halfway through each interval. A save begins only after the previous one is
committed (`Saver` waits), so a crash loses at most two gaps between saves, which is one interval.

Local saves have their own interval, and are skipped if a save of the run directory is due.
"""

from __future__ import annotations

import time
from typing import Literal, get_args

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.runtime.coordination import Group

Due = Literal["", "local", "halfway", "interval"]
"""Kind of the save that is due: none, local, halfway through an interval of the run directory, or
at its end. If several are due, the last in this list wins."""

_ORDER: tuple[Due, ...] = get_args(Due)

_CLOCK_STEPS = 10  # steps between agreements on the wall clock, each a round trip
_LOCAL_INTERVAL_S = 300.0


class SaveSchedule:
    """Decide after which steps to save; process 0 reads the clock, so all processes agree."""

    def __init__(self, config: CheckpointConfig, group: Group) -> None:
        self._config = config
        self._group = group
        self._last_step: int | None = None
        self._last_time = self._interval_began = self._last_local = time.monotonic()

    def due(self, step: int, now: float | None = None) -> Due:
        """Return the kind of save due after `step`, "" for none; `now` is a `time.monotonic`."""
        if step == self._last_step:
            return ""
        by_steps = self._by_steps(step)
        if by_steps == "interval":
            return by_steps
        return max(self._by_minutes(step, now), by_steps, key=_ORDER.index)

    def saved(self, step: int, due: Due, now: float | None = None) -> None:
        """Record that a save of `step` has begun; `due` = "" for an unscheduled one."""
        read = time.monotonic() if now is None else now
        if due == "local":
            self._last_local = read
            return
        self._last_step = step
        self._last_time = read
        if due != "halfway":
            self._interval_began = self._last_time

    def _by_steps(self, step: int) -> Due:
        config = self._config
        every, local = config.save_interval_steps, config.local_interval_steps
        if every and step % every == 0:
            return "interval"
        if every and config.async_save and step % every == every // 2:
            return "halfway"
        return "local" if config.local_dir and local and step % local == 0 else ""

    def _by_minutes(self, step: int, now: float | None) -> Due:
        interval_s = 60 * self._config.save_interval_minutes
        local_s = _LOCAL_INTERVAL_S if self._config.local_dir else 0.0
        if not (interval_s or local_s) or (self._group.num_processes > 1 and step % _CLOCK_STEPS):
            return ""
        read = time.monotonic() if now is None else now

        def elapsed() -> Due:
            if interval_s and read - self._interval_began >= interval_s:
                return "interval"
            if interval_s and self._config.async_save and read - self._last_time >= interval_s / 2:
                return "halfway"
            return "local" if local_s and read - self._last_local >= local_s else ""

        answer: Due = self._group.decide(elapsed)
        return answer
