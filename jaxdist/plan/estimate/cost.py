"""Days and money of a run from the seconds of a step, with failures, preemptions and restarts.

The parts of a restart are those of the event `restart` (`jaxdist.runtime.start_times`). Parts
independent of the job's size were measured with a tiny model on two idle cores
(`scripts/bench/results/restart.md`). No restart was timed on GPUs, so each part is a range.

References:
    Young 1974, "A first order approximation to the optimum checkpoint interval": if a checkpoint
    stalls the run for C and the mean time between failures is M, save every √(2·C·M).
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37, which also holds if C is not small compared to M.
    Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.4: 419 unexpected
    interruptions of 16,384 GPUs in 54 days. Section 3.3.1: its storage sustains 2 TB/s. Table 5: 35
    were failures of switches and cables, 7 of network adapters, and 7 timeouts of collectives.
    Jiang et al. 2024, "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs",
    section 3.5: 2,048 GPUs initialize communication in less than 5 s, more than 10,000 GPUs in
    less than 30 s. We assume linear growth.
"""

from __future__ import annotations

import dataclasses
import math

from jaxdist.hardware.catalog import HOST_BYTES_PER_S, Cluster
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import stored_moment_bytes

HOUR_S, DAY_S = 3600.0, 86400.0

FAILURES_PER_1000_GPU_DAYS = 419 / 54 / 16.384
"""Failures per day of GPUs, hosts and network that stop a job of 1,000 GPUs (0.47)."""

STORAGE_BYTES_PER_S = 2e12
"""Most bytes/s of a storage system, however many nodes write: that of Llama 3's training."""
_SAVE_S = 0.1
"""Fixed seconds for which a save delays training (`scripts/bench/results/checkpoint.md`)."""
_WRITE_SHARE = 0.1
"""Assumed share of the time of a background write by which it delays training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """Checkpoint cost of a job.

    Attributes:
        copy_s: the copy to host memory, for which training waits.
        write_s: seconds of a background write to storage, and of its commit by all processes.
        stall_s: seconds by which a save delays training.
        interval_s: seconds between checkpoints, by Daly, but at least one write.
        lost: share of time lost to checkpoints, repeated steps and restarts.
    """

    bytes: float
    copy_s: float
    write_s: float
    stall_s: float
    restart_s: float
    mean_time_to_failure_s: float
    interval_s: float
    lost: float


def checkpoint_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint: saved weights, averages and moments, each once."""
    saved = job.trained if job.config.lora.rank else job.weights
    params = sum(weight.num_bytes * weight.size for weight in saved)
    params += sum(n * weight.size for copy in job.copies.values() for weight, n in copy)
    return params + stored_moment_bytes(job)


def storage_rate(bytes_per_s: float, cluster: Cluster) -> float:
    """Return the bytes/s of all nodes: `bytes_per_s` each, at most the limit of the storage."""
    return min(bytes_per_s * cluster.num_nodes, STORAGE_BYTES_PER_S)


def checkpoint_cost(
    job: Job, *, failures_per_day: float, storage_bytes_per_s: float, restart_s: float
) -> CheckpointCost:
    """Return the cost of checkpoints at the best interval."""
    size = checkpoint_bytes(job)
    copy = size / job.spec.num_devices / HOST_BYTES_PER_S
    # All processes agree before a checkpoint is complete; assumed as slow as joining.
    write = size / storage_bytes_per_s + _JOIN_S_PER_GPU * job.cluster.num_gpus
    stall = copy + _SAVE_S + _WRITE_SHARE * write
    mean = DAY_S / failures_per_day if failures_per_day else math.inf
    interval = max(daly(stall, mean), write)
    return CheckpointCost(
        bytes=size,
        copy_s=copy,
        write_s=write,
        stall_s=stall,
        restart_s=restart_s,
        mean_time_to_failure_s=mean,
        interval_s=interval,
        lost=lost_share(stall, interval, mean, restart_s),
    )


def daly(cost_s: float, mean_s: float) -> float:
    """Return the optimal seconds between checkpoints; `mean_s` between failures may be infinite."""
    if math.isinf(mean_s):
        return math.inf
    if cost_s >= 2 * mean_s:
        return mean_s
    ratio = math.sqrt(cost_s / (2 * mean_s))
    first_order = math.sqrt(2 * cost_s * mean_s)
    return first_order * (1 + ratio / 3 + ratio**2 / 9) - cost_s


def lost_share(cost_s: float, interval_s: float, mean_s: float, restart_s: float) -> float:
    """Return the share of time without progress, at most 0.99: saves, repeated work, restarts."""
    if math.isinf(interval_s):
        return 0.0
    saving = cost_s / (interval_s + cost_s)
    failing = (interval_s / 2 + restart_s) / mean_s if not math.isinf(mean_s) else 0.0
    return min(0.99, saving + failing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of a complete run: days including lost time, GPU hours, money (USD)."""

    tokens: float
    days: float
    gpu_hours: float
    money: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on days and money (USD) of a run; 0 = no limit."""

    days: float = 0.0
    money: float = 0.0

    def late(self, cost: RunCost) -> bool:
        """Return True if a run takes longer than the limit."""
        return 0 < self.days < cost.days

    def dear(self, cost: RunCost) -> bool:
        """Return True if a run costs more than the limit."""
        return 0 < self.money < cost.money


def run_cost(
    *, tokens: float, tokens_per_s: float, num_gpus: int, price: float, lost: float = 0.0
) -> RunCost:
    """Return the cost of training on `tokens`; `lost` is the share of time without progress."""
    seconds = tokens / tokens_per_s / (1 - lost)
    hours = seconds / HOUR_S * num_gpus
    return RunCost(tokens=tokens, days=seconds / DAY_S, gpu_hours=hours, money=hours * price)


def break_even(saving: CheckpointCost, *, price_share: float) -> float:
    """Return the interruptions per day above which GPUs at `price_share` of the price cost more."""
    affordable = 1 - price_share * (1 - saving.lost)
    low, high = 0.0, 10_000.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = DAY_S / middle
        interval = max(daly(saving.stall_s, mean), saving.write_s)
        lost = lost_share(saving.stall_s, interval, mean, saving.restart_s)
        low, high = (middle, high) if lost < affordable else (low, middle)
    return low


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
_JOIN_S, _JOIN_S_PER_GPU = 0.26, 5 / 2048
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
    join = _JOIN_S + _JOIN_S_PER_GPU * cluster.num_gpus
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
