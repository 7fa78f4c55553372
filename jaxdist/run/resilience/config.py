"""What a run may choose about its guards. Importing this starts nothing."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.core.types import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """When a run counts as stuck, and what is done about it."""

    watchdog: bool = setting(
        True, "end a process that makes no progress with exit code 86, so that it is restarted"
    )
    hang_factor: float = setting(
        3.0, "a step has hung after this many times the median step time, but not before"
    )
    step_timeout_s: float = setting(300.0, "... this many seconds")
    phase_timeout_s: float = setting(
        3600.0,
        "seconds after which a start, a compilation, a restore, a save or one batch of an "
        "evaluation has hung",
    )
    nonfinite_policy: Literal["skip", "rollback", "stop"] = setting(
        "skip",
        "what to do when the loss or a gradient is NaN or Inf (that update is never applied): "
        "skip = go on; rollback = go back to the newest checkpoint and leave that batch out; "
        "stop = end the run",
    )
    spike_policy: Literal["off", "report", "skip", "rollback", "stop"] = setting(
        "report",
        "on a loss far above the ones before: report = write step and rows to anomalies.jsonl; "
        "skip = and leave the update out; rollback = and go back to the newest checkpoint, then on "
        "without that batch; stop = and end the run",
    )
    spike_deviations: float = setting(
        10.0,
        "a spike is a loss this many standard deviations (of 1.48 × the median deviation, at least "
        "2 % of the median) above the median of the window",
    )
    spike_window_steps: int = setting(64, "steps whose losses are looked at; at least 16")
    sdc_check_interval_steps: int = setting(
        100,
        "steps between comparisons of what is replicated over the data axes, bit by bit on the "
        "devices; each save is preceded by one; 0 = never",
    )
    sdc_policy: Literal["rollback", "stop"] = setting(
        "stop",
        "on replicas that differ: rollback = go back to the newest checkpoint, or stop with exit "
        "code 85, after which the launcher does not start again",
    )
    max_rollbacks: int = setting(5, "rollbacks of one start after which the run stops instead")

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        if not self.hang_factor >= 1.0:
            found.append(
                f"resilience.hang_factor={self.hang_factor} would end a run for a step of usual "
                "length. Use 1 or more, e.g. 3."
            )
        for name in ("step_timeout_s", "phase_timeout_s"):
            if not getattr(self, name) > 0.0:
                found.append(
                    f"resilience.{name}={getattr(self, name)} is no waiting time. Use seconds "
                    "above 0, or resilience.watchdog=false."
                )
        if not self.spike_deviations > 0.0:
            found.append(
                f"resilience.spike_deviations={self.spike_deviations} would make every second loss "
                "a spike. Use a number above 0, e.g. 10."
            )
        if self.spike_window_steps < 16:
            found.append(
                f"resilience.spike_window_steps={self.spike_window_steps} is too short for a "
                "median. Use 16 or more, or resilience.spike_policy=off."
            )
        if self.sdc_check_interval_steps < 0:
            found.append(
                f"resilience.sdc_check_interval_steps={self.sdc_check_interval_steps} is no "
                "number of steps. Use 1 or more, or 0 for never."
            )
        if self.max_rollbacks < 1:
            found.append(
                f"resilience.max_rollbacks={self.max_rollbacks} allows none. Use 1 or more, or "
                "the policy stop."
            )
        return found
