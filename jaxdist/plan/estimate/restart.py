"""Seconds from the end of a process to the next training step, part by part, with a range.

The parts are those of the event `restart` (`jaxdist.runtime.start_times`). Parts independent of the
job's size were measured with a tiny model on two idle cores (`scripts/bench/results/restart.md`).
No restart was timed on GPUs, so each part is a range.

References:
    Jiang et al. 2024, "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs",
    section 3.5: 2,048 GPUs initialize communication in less than 5 s, more than 10,000 GPUs in
    less than 30 s. We assume linear growth.
    Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 5: of 419 interruptions, 35 were
    failures of switches and cables, 7 of network adapters, and 7 timeouts of collectives.
"""

from __future__ import annotations

import dataclasses

from jaxdist.hardware.catalog import HOST_BYTES_PER_S
from jaxdist.plan.estimate.job import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """A likely time and its bounds."""

    low: float
    likely: float
    high: float


_FIXED = {
    "notice": Seconds(low=0.05, likely=0.07, high=0.15),
    # Waiting up to COLLECT_S in the launcher, and killing survivors that hang.
    "relaunch": Seconds(low=0.3, likely=1.06, high=2.6),
    # Fork of a process that has all imports; the upper bound is a new process.
    "imports": Seconds(low=0.04, likely=0.04, high=4.15),
    "setup": Seconds(low=0.5, likely=1.99, high=4.0),
}
_JOIN_S, JOIN_S_PER_GPU = 0.26, 5 / 2048
_START_GPUS_S = 10.0
"""Upper bound for starting drivers and communicators: unmeasured."""
_RESTORE_S, _STEP_S = 1.10, 0.34
"""Measured with a tiny model, whose bytes and FLOPs take negligible time."""
_VERIFIED_BYTES_PER_S = 1.5e9
"""Bytes/s of reading and verifying, per process (`scripts/bench/results/checkpoint.md`)."""
LOCAL_BYTES_PER_S = 3e9
"""Local disk of a node: half of the specification of one PCIe 4.0 NVMe disk."""
_CACHED_S, _CACHED_SHARE = 0.47, 1 / 5
"""Loading the step from the compilation cache: tiny model; share of a compilation."""
_COMPILE_S = 30.0
"""Compile time if it was not measured: XLA:GPU takes seconds to a minute."""
_HANG_SHARE = 49 / 419
"""Share of failures that stop communication, and no process: they are detected as hangs."""
_HANG_STEPS, _UNWATCHED_S = 3, 1800.0
"""Steps after which a step counts as hung (the watchdog's factor); seconds without a watchdog."""
_NEW_HOST_S = 120.0
"""Assumed seconds until another host replaces a failed one. HyperPod states less than 2 minutes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """A restart after one process ended and its host is alive; a dead host takes longer.

    `lost_host_s` and `hang_s` are the seconds until a host counts as lost and a step as hung.
    """

    parts: dict[str, Seconds]
    tier: str
    lost_host_s: float
    hang_s: float

    @property
    def total(self) -> Seconds:
        """Seconds of the restart: sums of the parts' low, likely and high values."""
        names = ("low", "likely", "high")
        return Seconds(
            **{name: sum(getattr(part, name) for part in self.parts.values()) for name in names}
        )

    @property
    def after_failure_s(self) -> float:
        """Mean seconds from a failure to the next step: detection, another host, the restart."""
        detection = (1 - _HANG_SHARE) * self.lost_host_s + _HANG_SHARE * self.hang_s
        return detection + _NEW_HOST_S + self.total.likely


def restart_of(
    job: Job,
    *,
    checkpoint_bytes: float,
    storage_bytes_per_s: float,
    step_s: float,
    compile_s: float | None = None,
) -> Restart:
    """Return the seconds of each part of a job's restart, as estimated ranges.

    `storage_bytes_per_s` is the rate of all nodes together; `compile_s` None = unknown.
    """
    settings, cluster = job.config, job.cluster
    local = bool(settings.checkpoint.local_dir)
    bandwidth = LOCAL_BYTES_PER_S * cluster.num_nodes if local else storage_bytes_per_s
    join = _JOIN_S + JOIN_S_PER_GPU * cluster.num_gpus
    cold = _COMPILE_S if compile_s is None else compile_s
    cached = max(_CACHED_S, _CACHED_SHARE * cold)
    return Restart(
        parts={
            **{name: _FIXED[name] for name in ("notice", "relaunch", "imports")},
            "join": Seconds(low=_JOIN_S, likely=join, high=4 * join + _START_GPUS_S),
            "setup": _FIXED["setup"],
            "restore": restore_seconds(checkpoint_bytes, cluster.num_gpus, bandwidth),
            "compile": Seconds(low=_CACHED_S, likely=cached, high=max(_CACHED_S, cold)),
            "first_step": Seconds(low=step_s, likely=_STEP_S + step_s, high=_STEP_S + 3 * step_s),
        },
        tier="local disks" if local else "run directory",
        lost_host_s=float(settings.runtime.heartbeat_timeout_s),
        hang_s=max(settings.resilience.step_timeout_s or _UNWATCHED_S, _HANG_STEPS * step_s),
    )


def restore_seconds(num_bytes: float, num_gpus: int, bytes_per_s: float) -> Seconds:
    """Return the seconds for reading, verifying and copying a checkpoint to the devices."""
    read = num_bytes / bytes_per_s
    verify = num_bytes / num_gpus / _VERIFIED_BYTES_PER_S
    copy = num_bytes / num_gpus / HOST_BYTES_PER_S
    return Seconds(
        low=_RESTORE_S / 2 + max(read, verify / 2),
        likely=_RESTORE_S + max(read, verify) + copy,
        high=2 * _RESTORE_S + 2 * read + verify + copy,
    )
