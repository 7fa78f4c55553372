"""Days and money of a run from the seconds of a step, with failures and preemptions.

References:
    Young 1974, "A first order approximation to the optimum checkpoint interval": if a checkpoint
    stalls the run for C and the mean time between failures is M, save every √(2·C·M).
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37, which also holds if C is not small compared to M.
    Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.4: 419 unexpected
    interruptions of 16,384 GPUs in 54 days. Section 3.3.1: its storage sustains 2 TB/s.
"""

from __future__ import annotations

import dataclasses
import math

from jaxdist.hardware.catalog import HOST_BYTES_PER_S, Cluster
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import stored_moment_bytes
from jaxdist.plan.estimate.restart import JOIN_S_PER_GPU

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
    write = size / storage_bytes_per_s + JOIN_S_PER_GPU * job.cluster.num_gpus
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
