"""Rerun steps of two runs until a digest differs; report its step, layer and tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.checksum import checksums
from jaxdist.core.state import TrainState
from jaxdist.core.types import Batch
from jaxdist.data import Loader, open_datasets
from jaxdist.run.diagnostic_step import Digests, make_diagnostic_step
from jaxdist.run.replay import History, loss_and_norm, read_history, state_before
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts, decide_step
from jaxdist.run.teacher import with_teacher

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerunStep:
    """Digests (in the order of their computation), loss and gradient norm of one rerun step.

    `arrays` describes every array before the step, as in a checkpoint; {} unless requested.
    """

    step: int
    digests: Digests
    numbers: dict[str, float]
    arrays: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """First difference between two reruns, e.g. "params/layers/mlp/up, layer 3".

    `also` is the number of further differences in the same step.
    """

    step: int
    what: str
    also: int


def rerun_steps(
    parts: Parts,
    diagnose: Callable[[TrainState, Batch], Digests],
    state: TrainState,
    batches: Iterable[Batch],
    *,
    limit: Callable[[int], float] = lambda step: math.inf,
    checkpoint: int | None = None,
) -> Iterator[RerunStep]:
    """Rerun steps with these batches, starting from `state`, which is donated.

    `diagnose` is the run's diagnostic step. `limit` returns the loss above which a step's update is
    skipped. The step after `checkpoint` describes its arrays.
    """
    for step, batch in enumerate(batches, start=int(state.step) + 1):
        arrays = {}
        if step - 1 == checkpoint:
            arrays = _describe(parts.in_model_order(parts.without_base(state)))
        digests = diagnose(state, batch)
        state, metrics = parts.step.train(state, batch, limit(step))
        numbers = loss_and_norm(metrics)
        yield RerunStep(step=step, digests=digests, numbers=numbers, arrays=arrays)


def _describe(state: TrainState) -> dict[str, dict[str, Any]]:
    leaves = pytree.leaves_of(state)
    arrays = [pytree.plain(leaf) for leaf in leaves]
    return pytree.with_checksums(pytree.describe(leaves, arrays), checksums(arrays))


def first_difference(a: RerunStep, b: RerunStep) -> FirstDifference | None:
    """Return the first digest of a step that differs, or None."""
    names = [*a.digests, *(name for name in b.digests if name not in a.digests)]
    different = [name for name in names if a.digests.get(name) != b.digests.get(name)]
    if not different:
        return None
    return FirstDifference(step=a.step, what=different[0], also=len(different) - 1)


def rerun(
    runs: tuple[RunDirectory, RunDirectory],
    parts: tuple[Parts, Parts],
    start: int,
    last: int,
    *,
    checkpoint: int | None = None,
) -> tuple[FirstDifference | None, list[tuple[RerunStep, RerunStep]]]:
    """Rerun the steps of both runs after `start`, up to `last` or the first difference.

    Both `parts` are on the same devices and mesh. `start` is a step with a checkpoint in both runs;
    0 = new states. The step after `checkpoint` describes its arrays. Return the first difference or
    None, and the steps.
    """
    walks, done = [], []
    with contextlib.ExitStack() as stack:
        for run, own in zip(runs, parts, strict=True):
            config = own.config
            data = open_datasets(
                config.data, seq_len=config.train.seq_len, seed=config.seed,
                global_batch_size=config.train.global_batch_size,
            )  # fmt: skip
            own, budget = with_teacher(own, data[0].fields, own.budget())
            own, _ = decide_step(own, data[0].fields, budget)  # same program as training
            history = read_history(run)
            state, loader, _ = state_before(own, data[0], run, start + 1, history)
            stack.callback(loader.close)
            batches, diagnose = (
                _checked_batches(loader, history, start + 1),
                make_diagnostic_step(own),
            )
            walks.append(
                rerun_steps(
                    own, diagnose, state, batches, limit=history.limit, checkpoint=checkpoint
                )
            )
        for step in range(start + 1, last + 1):
            a, b = (next(walk) for walk in walks)
            done.append((a, b))
            if difference := first_difference(a, b):
                return difference, done
            log.info("step %d: %d digests are equal", step, len(a.digests))
    return None, done


def _checked_batches(loader: Loader, history: History, step: int) -> Iterator[Batch]:
    for number, batch in enumerate(loader, start=step):
        history.check(number, loader.first_sample, loader.digest)
        yield batch
