"""Steps of two runs done again, until a digest differs: which step, which layer, which tensor."""

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

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone:
    """One step done again.

    Attributes:
        digests: of what it held, in the order in which it computes them.
        numbers: its loss and gradient norm.
        arrays: description of every array before the step, as a checkpoint stores it; {} where
            none was asked for.
    """

    step: int
    digests: Digests
    numbers: dict[str, float]
    arrays: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first thing that differs between two runs done again.

    Attributes:
        what: the tensor, with its layer where it has one; e.g. "params/layers/mlp/up, layer 3".
        also: how many things more differ in the same step.
    """

    step: int
    what: str
    also: int


def steps_again(
    parts: Parts,
    diagnose: Callable[[TrainState, Batch], Digests],
    state: TrainState,
    batches: Iterable[Batch],
    *,
    limit: Callable[[int], float] = lambda step: math.inf,
    checkpoint: int | None = None,
) -> Iterator[StepDone]:
    """Do steps of a run again, with these batches, from this state on; it is donated.

    `diagnose` is the run's diagnostic step. `limit` gives the loss above which the update of a step
    is left out. The step after `checkpoint` describes its arrays.
    """
    for step, batch in enumerate(batches, start=int(state.step) + 1):
        arrays = _described(state) if step - 1 == checkpoint else {}
        digests = diagnose(state, batch)
        state, metrics = parts.step.train(state, batch, limit(step))
        numbers = loss_and_norm(metrics)
        yield StepDone(step=step, digests=digests, numbers=numbers, arrays=arrays)


def _described(state: TrainState) -> dict[str, dict[str, Any]]:
    """Shape, dtype and checksum of every array of a state, by name."""
    leaves = pytree.leaves_of(state)
    arrays = [pytree.plain(leaf) for leaf in leaves]
    return pytree.with_checksums(pytree.describe(leaves, arrays), checksums(arrays))


def first_difference(a: StepDone, b: StepDone) -> FirstDifference | None:
    """The first digest of a step that differs between two runs; None if all are equal."""
    names = [*a.digests, *(name for name in b.digests if name not in a.digests)]
    found = [name for name in names if a.digests.get(name) != b.digests.get(name)]
    if not found:
        return None
    return FirstDifference(step=a.step, what=found[0], also=len(found) - 1)


def rerun(
    runs: tuple[RunDirectory, RunDirectory],
    parts: tuple[Parts, Parts],
    start: int,
    last: int,
    *,
    checkpoint: int | None = None,
) -> tuple[FirstDifference | None, list[tuple[StepDone, StepDone]]]:
    """Do the steps after `start` again with both runs, up to `last` or the first difference.

    Args:
        runs: to read from; nothing is written there.
        parts: of both runs, on the same devices and mesh.
        start: a step of which both have a checkpoint; 0 = from new states.
        last: last step to do.
        checkpoint: the step after it describes its arrays.

    Returns:
        The first difference, None if there is none; the steps done.
    """
    walks, done = [], []
    with contextlib.ExitStack() as stack:
        for run, own in zip(runs, parts, strict=True):
            config = own.config
            data = open_datasets(config.data, seq_len=config.train.seq_len, seed=config.seed)
            own, _ = decide_step(own, data[0].fields, own.budget())  # the program of training
            history = read_history(run)
            state, loader = state_before(own, data[0], run, start + 1, history)
            stack.callback(loader.close)
            batches, diagnose = _recorded(loader, history, start + 1), make_diagnostic_step(own)
            walks.append(
                steps_again(
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


def _recorded(loader: Loader, history: History, step: int) -> Iterator[Batch]:
    """Batches from `step` on; one that the run did not record for its step is refused."""
    for number, batch in enumerate(loader, start=step):
        history.check(number, loader.first_sample)
        yield batch
