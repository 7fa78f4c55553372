"""Settings of the guards: hangs, loss anomalies, silent data corruption."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.settings import setting

MAX_SKIPPED_STEPS = 20
"""Consecutive skipped steps that end a run with exit code 87, after which the launcher does not
restart. Steps without labels and those that lower the loss scale do not count."""

MAX_ROLLBACKS = 5
"""Rollbacks of one start after which a run stops: another one would not help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """When a run counts as hung, and what to do about bad losses and corrupt replicas."""

    step_timeout_s: float = setting(
        300.0,
        "seconds after which a step counts as hung, if it also took 3 × the median step time; the "
        "process then exits with 86 and the launcher restarts it; starts, compilations, restores, "
        "saves and single batches of an evaluation have an hour; 0 = no watchdog at all",
        ge=0,
    )
    nonfinite_policy: Literal["skip", "rollback", "stop"] = setting(
        "skip",
        "what to do when the loss or a gradient is NaN or Inf (that update is never applied): "
        "skip = continue, up to 20 steps in a row; rollback = return to the newest checkpoint and "
        "leave that batch out; stop = exit with 87, after which the launcher does not restart",
    )
    spike_policy: Literal["off", "report", "skip", "rollback", "stop"] = setting(
        "report",
        "what to do when the loss is far above the ones before: report = write step and rows to "
        "anomalies.jsonl, as all of these do; skip = also leave the update out; rollback = return "
        "to the newest checkpoint and leave that batch out; stop = end the run; off = do not look",
    )
    sdc_check_interval_steps: int = setting(
        100,
        "steps between checks for silent data corruption, which compare replicas bit by bit on "
        "the devices; one precedes each save; 0 = never",
        ge=0,
    )
    sdc_policy: Literal["rollback", "stop"] = setting(
        "stop",
        "what to do when replicas differ: rollback = return to the newest checkpoint; stop = exit "
        "with 85, after which the launcher does not restart",
    )
