"""The smallest change of settings with which a run fits that does not fit now."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxdist.config import RunConfig
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.plan.estimate.search import Choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change with which a run fits.

    Attributes:
        flags: what to add to the command, e.g. "--train.remat full".
        why: what it does, in a few words.
        choice: the run with it.
        slowdown: of the step, as a share; negative where it is faster.
    """

    flags: str
    why: str
    choice: Choice
    slowdown: float


def smallest_changes(choice: Choice) -> list[Change]:
    """Single changes that make a choice fit on the same mesh and GPUs, least disturbing first."""
    found = []
    for flags, why, config in _changes(choice):
        changed = _changed(choice, config)
        if changed.fits:
            slowdown = changed.time.seconds / choice.time.seconds - 1
            found.append(Change(flags=flags, why=why, choice=changed, slowdown=slowdown))
    return found


def _changed(choice: Choice, config: RunConfig) -> Choice:
    """The choice with other settings, and the same limit."""
    other = Choice.of(dataclasses.replace(choice.job, config=config))
    return dataclasses.replace(other, usable_bytes=choice.usable_bytes)


def _changes(choice: Choice) -> Iterator[tuple[str, str, RunConfig]]:
    job = choice.job
    config, spec = job.config, job.spec
    if config.train.loss_chunk_tokens:
        yield (
            "--train.loss_chunk_tokens 0",
            "fewer logits at once",
            _with(config, "train", loss_chunk_tokens=0),
        )
    yield from _more_microbatches(choice)
    order = ["none", "dots", "full"]
    place = order.index(job.remat) if job.remat in order else 0
    for remat in order[place + 1 :]:
        yield (
            f"--train.remat {remat}",
            "backward recomputes more and keeps less",
            _with(config, "train", remat=remat),
        )
    if any(axis.weights == "replicated" for axis in spec.used) and config.mesh.zero == 0:
        changed = _with(config, "mesh", zero=1)
        if not changed.mesh_problems(spec, job.model):
            yield "--zero 1", "each replica keeps only its share of the optimizer moments", changed
    if spec[PIPELINE] > 1 and config.pipeline.gather == "step":
        yield (
            "--pipeline.gather action",
            "weights are gathered for each action instead of once",
            _with(config, "pipeline", gather="action"),
        )
    if spec[TENSOR] > 1 and not config.mesh.sequence_parallel:
        yield (
            "--mesh.sequence_parallel=true",
            "activations between blocks are split by sequence",
            _with(config, "mesh", sequence_parallel=True),
        )
    if config.optim.moment_dtype == "float32" and config.optim.optimizer != "adafactor":
        yield (
            "--optim.moment_dtype bfloat16",
            "first moments take half the bytes",
            _with(config, "optim", moment_dtype="bfloat16"),
        )


def _more_microbatches(choice: Choice) -> Iterator[tuple[str, str, RunConfig]]:
    job, config = choice.job, choice.job.config
    now = job.num_microbatches
    for count in range(now + 1, job.rows + 1):
        if job.rows % count:
            continue
        changed = _with(config, "train", num_microbatches=count)
        if _changed(choice, changed).fits:
            yield (
                f"--train.num_microbatches {count}",
                "fewer rows at once, the same batch",
                changed,
            )
            return


def _with(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    changed: Any = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: changed})
