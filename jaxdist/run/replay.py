"""Replay one step of a run, to find out whether its data, its numbers or its devices are at fault.

| verdict | replays | look at |
|---|---|---|
| data | bad each time, good with the next batch instead | the rows of the batch |
| deterministic | bad each time, also with the next batch | learning rate, precision, the code |
| transient | good, or not the same each time | the devices, their memory and links |

Nothing is written into the run directory.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.checkpoint import Checkpointer
from jaxdist.core.state import TrainState
from jaxdist.data import Loader, Position, TrainData, resume_position
from jaxdist.run.metrics_log import read_records
from jaxdist.run.resilience.anomalies import Anomaly, read_anomalies
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts

log = logging.getLogger("jaxdist")

_TIMES = 3


def replay(parts: Parts, dataset: TrainData) -> int:
    """Replay the step that `config.replay` names and log the verdict; returns the exit code."""
    folder, _, number = parts.config.replay.rpartition(":")
    run, step = RunDirectory.existing(folder), int(number)
    recorded = _recorded(run, step)
    anomaly = next((o for o in reversed(read_anomalies(run.anomalies)) if o.step == step), None)
    state, loader = state_before(parts, dataset, run, step, anomaly)
    batch, rows = next(loader), loader.rows(loader.first_sample)
    again = [_once(parts, state, batch) for _ in range(_TIMES)]
    following = _once(parts, state, next(loader))
    loader.close()
    same = lambda values: _text(values) == _text(recorded)  # as text, NaN equals NaN
    is_bad = anomaly.is_bad if anomaly is not None else same
    log.info("rows of step %d: %s", step, ", ".join(map(str, rows)))
    log.info("recorded: %s", _text(recorded))
    for values in again:
        log.info("replayed: %s%s", _text(values), " (the same bits)" * same(values))
    if anomaly is not None:
        log.info("with the next batch in its place: %s", _text(following))
    log.info("verdict: %s", verdict(is_bad, again, following if anomaly is not None else None))
    return 0


def verdict(
    is_bad: Callable[[dict[str, float]], bool],
    again: Sequence[dict[str, float]],
    following: dict[str, float] | None,
) -> str:
    """The verdict, as one line.

    `is_bad` says whether a result is as bad as the recorded one, or for a step without an anomaly
    whether it equals the recorded one. `following` is a replay with the next batch in place; None
    for a step without an anomaly.
    """
    count, times = sum(map(is_bad, again)), len(again)
    if count == 0:
        return (
            f"transient: it does not come back in {times} replays. Look at the devices, their "
            "memory and links (resilience.sdc_check_interval_steps finds a bad one)."
        )
    if count < times:
        return (
            f"transient: it comes back in {count} of {times} replays, so the same inputs do "
            "not always give the same result. Look at the devices and at nondeterministic kernels."
        )
    if following is None:
        return f"deterministic: {times} replays give the recorded bits."
    if is_bad(following):
        return (
            f"deterministic: bad in {times} of {times} replays, and with another batch "
            "too. The parameters are bad already: learning rate, precision, an earlier step."
        )
    return (
        f"data: bad in {times} of {times} replays, and it goes away when the batch is "
        "left out. Look at these rows, or set the policy rollback."
    )


def state_before(
    parts: Parts,
    dataset: TrainData,
    run: RunDirectory,
    step: int,
    anomaly: Anomaly | None = None,
) -> tuple[TrainState, Loader]:
    """The state and the loader as they were before a step, done again from the last checkpoint.

    Nothing is written into the run directory. `anomaly` is what the run recorded of the step.
    """
    config = parts.config
    checkpointer = Checkpointer(run.checkpoints, config.checkpoint, read_only=True)
    earlier = [done for done in checkpointer.steps() if done < step]
    done = next((done for done in reversed(earlier) if not checkpointer.verify(done)), 0)
    position = Position()
    if done:
        state, meta, _ = parts.restore(checkpointer, done)
        position = resume_position(meta["data"], dataset, seed=config.seed)
    else:
        state = parts.init_state()
    checkpointer.close()
    log.info("replaying step %d of %s from step %d", step, run.path, done)
    if anomaly is not None:  # rollbacks after the checkpoint may have left out more
        left_out = tuple((first, end) for first, end in anomaly.left_out)
        position = dataclasses.replace(position, left_out=left_out)
    loader = parts.open_loader(dataset, position)
    for _ in range(done + 1, step):
        state, _ = parts.step.train(state, next(loader), math.inf)
    return state, loader


def _once(parts: Parts, state: TrainState, batch: Any) -> dict[str, float]:
    copy = jax.tree.map(jnp.copy, state)  # the step donates its argument
    _, metrics = parts.step.train(copy, batch, math.inf)
    return {name: float(metrics[name]) for name in ("loss", "grad_norm")}


def _recorded(run: RunDirectory, step: int) -> dict[str, float] | None:
    """Loss and gradient norm that the run recorded the first time it did the step."""
    for record in read_records(run.metrics):
        if record["kind"] == "train" and record["step"] == step:
            return {name: float(record[name]) for name in ("loss", "grad_norm")}
    return None


def _text(values: dict[str, float] | None) -> str:
    if values is None:
        return "nothing"
    return ", ".join(f"{name} {value!r}" for name, value in values.items())
