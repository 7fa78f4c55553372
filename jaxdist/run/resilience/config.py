"""What a run may choose about its guards. Importing this starts nothing."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.core.types import setting

MAX_ROLLBACKS = 5
"""Rollbacks of one start after which a run stops instead: what comes back so often stays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """When a run counts as stuck, and what is done about it."""

    step_timeout_s: float = setting(
        300.0,
        "seconds after which a step has hung, if it also took three times the median; the process "
        "then ends with exit code 86 and is restarted; 0 = never, for any phase",
    )
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

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        if not self.step_timeout_s >= 0.0:
            found.append(
                f"resilience.step_timeout_s={self.step_timeout_s} must be 0 or more seconds. Use 0 "
                "to watch nothing."
            )
        if not self.phase_timeout_s > 0.0:
            found.append(
                f"resilience.phase_timeout_s={self.phase_timeout_s} is no waiting time. Use "
                "seconds above 0, or resilience.step_timeout_s=0 to watch nothing."
            )
        if self.sdc_check_interval_steps < 0:
            found.append(
                f"resilience.sdc_check_interval_steps={self.sdc_check_interval_steps} is no "
                "number of steps. Use 1 or more, or 0 for never."
            )
        return found
