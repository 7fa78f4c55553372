"""The largest batch that fits, by the memory estimate."""

from __future__ import annotations

from jaxdist.core.types import rows_per_example
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory, usable_bytes
from jaxdist.plan.estimate.remat import TOLERANCE, choose_remat, policies_of
from jaxdist.plan.estimate.search import Candidate

_MOST_ROWS = 1 << 16
"""Rows of a microbatch from which on the search ends: a toy model fits with any."""


def largest_batch(job: Job, remat: str) -> Candidate | None:
    """Return the run with most rows that fits without accumulation of gradients; None if none does.

    Mesh and other settings are those of `job`, which keeps its number of microbatches only with
    pipeline stages. `remat` is the policy, or "auto" for the fastest that fits, as in training. The
    estimate must fit with its error, `TOLERANCE`.
    """
    limit = usable_bytes(job)
    count = 1 if job.stages is None else job.num_microbatches
    unit = rows_per_example(job.model.objective)

    def with_rows(examples: int) -> Job:
        rows = examples * unit * count * job.spec.num_replicas
        return job.changed("train", global_batch_size=rows, num_microbatches=count, remat=remat)

    def fits(examples: int) -> bool:
        tried = with_rows(examples)
        policies = policies_of(tried)[::-1] if remat == "auto" else [remat]  # least memory first
        jobs = (tried.changed("train", remat=policy) for policy in policies)
        return any(estimate_memory(one).total_bytes * (1 + TOLERANCE) <= limit for one in jobs)

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= _MOST_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and low < _MOST_ROWS:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    largest = with_rows(low)
    choice = choose_remat(largest, limit)
    return Candidate.of(largest if choice is None else choice.job)
