"""`train.remat = auto` on GPUs: the policy with the shortest estimated step that fits in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax

from jaxdist.core.types import LAYER_INPUT
from jaxdist.hardware import GIB
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.runtime.formatting.numbers import in_bytes

POLICIES = (
    "none",
    "dots",
    "names:qkv,attention,attention_out",  # recomputes only the MLP's first product
    "names:attention,attention_out",
    "names:attention",
    "offload:layer_input,attention",
    "full",
    "offload:layer_input",
)
"""Candidates for "auto", from most to least saved in GPU memory, nearly."""

NESTED_POLICIES = tuple(policy for policy in POLICIES if not policy.startswith("offload:"))
"""Each keeps at least as many bytes on the GPU as the next."""

WRONG_OFFLOAD = ("0.10.2", "0.11.0")
"""Versions of jax that read offloaded activations in the wrong order (openxla/xla#46231)."""

TOLERANCE = 0.05
"""Assumed relative error of the memory estimate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematChoice:
    """The policy that "auto" resolves to, and the estimated cost of each policy.

    `limit_bytes` is rounded down to GiB, so that all hosts agree. `rejected` did not fit, compiled.
    """

    job: Job
    seconds: dict[str, float]
    bytes: dict[str, float]
    limit_bytes: float
    rejected: tuple[str, ...] = ()

    def line(self) -> str:
        """Return one line for the startup log: the policy, and the cost of each candidate."""
        chosen = self.job.remat
        why = "the fastest that fits" if self.fits(chosen) else "the smallest, but it exceeds"
        costs = ", ".join(
            f"{name} {1e3 * self.seconds[name]:.0f} ms {in_bytes(self.bytes[name])}"
            for name in self.seconds
        )
        why += f" {in_bytes(self.limit_bytes)} by the estimate"
        if self.rejected:
            why = f"the compiled step with {' and with '.join(self.rejected)} did not fit"
        return f"remat {chosen}: {why} ({costs})"

    def fits(self, policy: str) -> bool:
        """Return whether a policy fits even if the estimate is too low by `TOLERANCE`."""
        return self.bytes[policy] * (1 + TOLERANCE) <= self.limit_bytes

    def smaller(self, limit_bytes: float) -> RematChoice | None:
        """Return the fastest smaller policy within the limit, else the smallest; or None."""
        now = self.job.remat
        less = [name for name in self.bytes if self.bytes[name] < self.bytes[now]]
        fitting = [name for name in less if self.bytes[name] <= limit_bytes]
        if not less:
            return None
        job = self.job.changed("train", remat=self._best(fitting, less))
        return dataclasses.replace(self, job=job, rejected=(*self.rejected, now))

    def _best(self, fitting: list[str], others: Iterable[str]) -> str:
        if fitting:
            return min(fitting, key=self.seconds.__getitem__)
        return min(others, key=self.bytes.__getitem__)


def policies_of(job: Job) -> list[str]:
    """Return the remat policies that suit a job: all names they save exist, offload is possible."""
    marks = job.decoder.marks if job.decoder is not None else frozenset()
    can_offload = bool(job.decoder) and job.stages is None and jax.__version__ not in WRONG_OFFLOAD
    usable = {*marks, LAYER_INPUT} if can_offload else marks
    names = lambda policy: policy.partition(":")[2].split(",")
    return [p for p in POLICIES if ":" not in p or usable.issuperset(names(p))]


def choose_remat(job: Job, limit_bytes: float) -> RematChoice | None:
    """Return the fastest remat policy that fits, else the smallest; None unless it is "auto"."""
    if job.config.train.remat != "auto":
        return None
    jobs = {policy: job.changed("train", remat=policy) for policy in policies_of(job)}
    choice = RematChoice(
        job=job,
        seconds={policy: estimate_time(one).seconds for policy, one in jobs.items()},
        bytes={policy: estimate_memory(one).total_bytes for policy, one in jobs.items()},
        limit_bytes=math.floor(limit_bytes / GIB) * GIB,
    )
    fitting = [policy for policy in jobs if choice.fits(policy)]
    return dataclasses.replace(choice, job=jobs[choice._best(fitting, jobs)])
