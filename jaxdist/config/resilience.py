"""Settings of the guards: hangs, loss anomalies, silent data corruption, preemption."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.settings import setting

MAX_ROLLBACKS = 5
"""Maximum rollbacks per start, of each guard (losses, replicas). Then the run stops."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Time limit of a step, policies for bad losses and corrupt replicas, notices of clouds."""

    step_timeout_s: float = setting(
        300.0,
        "seconds after which a step counts as hung if it also took 3 × the median step time. All "
        "processes then exit with 86, and a launcher restarts them. The limit of starts, "
        "compilations, restores, saves and evaluation batches is an hour. 0 = no watchdog",
        ge=0,
    )
    nonfinite_policy: Literal["skip", "rollback", "stop"] = setting(
        "skip",
        "policy for a NaN or Inf loss or gradient (the update is never applied): skip = continue; "
        f"rollback = return to the newest checkpoint and skip that batch, up to {MAX_ROLLBACKS} "
        "times; stop = exit with 87, without a restart by the launcher",
    )
    max_skipped_steps: int = setting(
        20,
        "consecutive skipped steps that end the run with exit code 87, without a restart by the "
        "launcher. Steps without labels and steps that lower the loss scale do not count",
        ge=1,
    )
    spike_policy: Literal["off", "report", "skip", "rollback", "stop"] = setting(
        "report",
        "policy for loss spikes. All but off write step and rows to anomalies.jsonl. report = only "
        "that; skip = also skip the update; rollback and stop = as for nonfinite_policy; off = do "
        "not detect spikes",
    )
    sdc_check_interval_steps: int = setting(
        100,
        "steps between checks for silent data corruption, which compare hashes of replicas on "
        "the devices, also before each save; 0 = never",
        ge=0,
    )
    sdc_policy: Literal["rollback", "stop"] = setting(
        "stop",
        "policy if replicas differ: rollback = return to the newest checkpoint, up to "
        f"{MAX_ROLLBACKS} times; stop = exit with 85, without a restart by the launcher",
    )
    spot_notices: Literal["", "aws", "google", "azure"] = setting(
        "",
        "cloud whose metadata service is polled every 5 s for a notice that it will take back this "
        "machine. The run then saves and exits with 75. Empty = no polling",
    )
