"""The smallest change of settings that makes a run fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.remat import policies_of
from jaxdist.plan.estimate.search import Candidate

_SMALL_CHUNK = 256
"""Suggested number of tokens whose logits are in memory at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change that makes a run fit: flags, effect, relative slowdown of training."""

    flags: str
    why: str
    choice: Candidate
    slowdown: float


def smallest_changes(choice: Candidate) -> list[Change]:
    """Return single changes that make a candidate fit on its mesh, least disruptive first."""
    changes = []
    for flags, why, job in _changes(choice):
        changed = _costs(choice, job)
        if changed.fits:
            slowdown = choice.time.tokens_per_s / changed.time.tokens_per_s - 1
            changes.append(Change(flags=flags, why=why, choice=changed, slowdown=slowdown))
    return changes


def _costs(choice: Candidate, job: Job) -> Candidate:
    return dataclasses.replace(Candidate.of(job), usable_bytes=choice.usable_bytes)


def _changes(choice: Candidate) -> Iterator[tuple[str, str, Job]]:
    """Yield (flags, effect, changed job) of each possible change."""
    job = choice.job
    config, spec = job.config, job.spec
    if job.loss_chunk > _SMALL_CHUNK:
        changed = job.changed("train", loss_chunk_tokens=_SMALL_CHUNK)
        yield f"--train.loss-chunk-tokens {_SMALL_CHUNK}", "fewer logits at once", changed
    for count in range(job.num_microbatches + 1, job.rows + 1):
        changed = job.changed("train", num_microbatches=count)
        if job.rows % count == 0 and _costs(choice, changed).fits:
            flag = f"--train.num-microbatches {count}"
            yield flag, "fewer rows at once, the same batch", changed
            break
    order = policies_of(job)
    index = order.index(job.remat) if job.remat in order else 0
    for remat in order[index + 1 :]:
        changed = job.changed("train", remat=remat)
        yield f"--train.remat {remat}", "backward recomputes more and keeps less", changed
    if any(axis.weights == "replicated" for axis in spec.used) and config.mesh.zero == 0:
        changed = job.changed("mesh", zero=1)
        if not changed.config.mesh_problems(spec, job.model):
            yield "--zero 1", "each replica keeps only its share of the optimizer moments", changed
    if spec[PIPELINE] > 1 and config.pipeline.gather == "step":
        changed = job.changed("pipeline", gather="action")
        why = "weights are gathered for each action instead of once"
        yield "--pipeline.gather action", why, changed
    if config.optim.moment_dtype == "float32" and config.optim.optimizer != "adafactor":
        changed = job.changed("optim", moment_dtype="bfloat16")
        yield "--optim.moment-dtype bfloat16", "first moments take half the bytes", changed
    if config.optim.moment_dtype != "int8" and config.optim.optimizer != "adafactor":
        changed = job.changed("optim", moment_dtype="int8")
        why = "each moment takes one byte and a scale per 256 parameters"
        yield "--optim.moment-dtype int8", why, changed
    rows = 0 if spec[PIPELINE] > 1 else job.rows
    while rows := rows // 2:
        batch = rows * spec.num_replicas
        changed = job.changed("train", global_batch_size=batch, num_microbatches=1)
        if _costs(choice, changed).fits:
            flags = f"--train.global-batch-size {batch} --train.num-microbatches 1"
            why = "a smaller batch, whose gradients are not accumulated; lower optim.peak_lr too"
            yield flags, why, changed
            break
