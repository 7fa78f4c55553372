"""Replay one step of a run, to tell bad data, bad numerics and bad devices apart.

| verdict | replays of a bad step | check |
|---|---|---|
| data | bad each time, good with the next batch | the rows of the batch |
| deterministic | bad each time, also with the next batch | learning rate, precision, the code |
| transient | good at least once | the devices, their memory and links |

Of other steps, "bad" means the recorded bits, and no next batch is tried. The run directory is not
changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.checkpoint import Checkpointer
from jaxdist.core.state import TrainState
from jaxdist.data import Loader, Position, TrainData, resume_position
from jaxdist.run.metrics_log import Record, current, stream_records
from jaxdist.run.resilience.anomalies import Anomaly, read_anomalies
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

_TIMES = 3

_FIELDS = ("kind", "event", "step", "first_sample", "data_ledger", "weight", "loss", "grad_norm")
"""Fields of a record that are kept in memory."""


def replay(parts: Parts, dataset: TrainData) -> int:
    """Replay the step that `config.replay` names; log the verdict; return 0."""
    folder, _, number = parts.config.replay.rpartition(":")
    run, step = RunDirectory.existing(folder), int(number)
    history = read_history(run, step)
    recorded, anomaly = loss_and_norm(history.recorded[step]), history.anomalies.get(step)
    parts = parts.as_compiled(run)
    state, loader, _ = state_before(parts, dataset, run, step, history)
    with contextlib.closing(loader):
        batch = next(loader)
        history.check(step, loader.first_sample, loader.digest)
        rows = loader.rows(loader.first_sample)
        again = [_once(parts.in_stage(step - 1), state, batch) for _ in range(_TIMES)]
        later = (_once(parts.in_stage(n), state, batch) for n, batch in enumerate(loader, step))
        following = next(filter(None, later)) if anomaly is not None else None
    log.info("step plan %s", parts.plan.digest)
    same = lambda values: _text(values) == _text(recorded)  # as text, NaN equals NaN
    is_bad = anomaly.is_bad if anomaly is not None else same
    log.info("rows of step %d in the data: %s", step, ", ".join(map(str, rows)))
    log.info("loss and gradient norm that the run recorded: %s", _text(recorded))
    for values in again:
        log.info(
            "loss and gradient norm of the replayed step: %s%s",
            _text(values),
            " (the same bits as recorded)" * same(values),
        )
    if following is not None:
        log.info(
            "loss and gradient norm with the next batch, to tell bad rows from bad parameters: %s",
            _text(following),
        )
    log.info("verdict: %s", verdict(is_bad, again, following))
    return 0


def verdict(
    is_bad: Callable[[dict[str, float]], bool],
    again: Sequence[dict[str, float]],
    following: dict[str, float] | None,
) -> str:
    """Return whether data, arithmetic or devices caused the step's result, in one line.

    `is_bad` returns whether a result is bad, and `following` is a replay with the next batch that
    has labels. For a step without an anomaly: whether it equals the recorded one, and None.
    """
    count, times = sum(map(is_bad, again)), len(again)
    if count == 0:
        return (
            f"transient: not reproduced in {times} replays. Check the devices, their memory and "
            "links (resilience.sdc_check_interval_steps detects a bad device)."
        )
    if count < times:
        return (
            f"transient: reproduced in {count} of {times} replays, so equal inputs do not always "
            "give equal results. Check the devices and nondeterministic kernels."
        )
    if following is None:
        return f"deterministic: {times} replays give the recorded bits."
    if is_bad(following):
        return (
            f"deterministic: bad in {times} of {times} replays, and with another batch "
            "too. The parameters are already bad: check learning rate, precision, earlier steps."
        )
    return (
        f"data: bad in {times} of {times} replays, good with the next batch. Check these rows, "
        "or set the policy rollback."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """Train records and anomalies of a run by step, and the sample ranges [first, end) skipped."""

    run: str
    recorded: dict[int, Record]
    anomalies: dict[int, Anomaly]
    left_out: tuple[tuple[int, int], ...]

    def limit(self, step: int) -> float:
        """Return the limit by which a loss spike skipped a step's update; inf for other steps."""
        anomaly = self.anomalies.get(step)
        return anomaly.limit if anomaly is not None and anomaly.action == "skip" else math.inf

    def check(self, step: int, first_sample: int, digest: str) -> None:
        """Raise ConfigError if the run recorded another first sample or data digest for a step."""
        record = self.recorded.get(step, {})
        if record.get("data_ledger", digest) != digest:
            raise ConfigError(
                f"the rows up to step {step} of {self.run} have digest {record['data_ledger']}, "
                f"those of the replay {digest}: the data or settings differ from those of that "
                "step. Set data.sources, data.mixture_weights and seed as they were then."
            )
        began = record.get("first_sample", first_sample)
        if began != first_sample:
            raise ConfigError(
                f"the batch of step {step} of {self.run} starts with sample {began}, its replay "
                f"with {first_sample}: the settings differ from those of that step, or "
                "anomalies.jsonl lacks a rollback. Set train.global_batch_size as it was then."
            )


def read_history(run: RunDirectory, step: int | None = None) -> History:
    """Return the records of a run up to `step`; None = its newest.

    If `step` ran more than once, its last run with an anomaly counts, otherwise its last run.
    """
    anomalies = read_anomalies(run.anomalies)
    records = [
        {name: record[name] for name in _FIELDS if name in record}
        for record, _ in stream_records(run.metrics)
        if record["kind"] == "train" or record.get("event") in ("start", "rollback")
    ]
    if step is not None:
        records = records[: _index_of(records, anomalies, step, run) + 1]
    recorded = {r["step"]: r for r in current(records) if r["kind"] == "train"}
    begun = {record.get("first_sample") for record in recorded.values()}
    rollbacks = [a.all_left_out[-1] for a in anomalies if a.action == "rollback"]
    return History(
        run=str(run.path),
        recorded=recorded,
        anomalies={a.step: a for a in anomalies if _is_of(a, recorded.get(a.step))},
        # A run that resumed from a checkpoint before a rollback uses the batch again.
        left_out=tuple(part for part in rollbacks if begun.isdisjoint(range(*part))),
    )


def _index_of(records: list[Record], anomalies: list[Anomaly], step: int, run: RunDirectory) -> int:
    """Return the index in `records` of the train record that a replay of `step` reproduces."""
    trained = [(n, r) for n, r in enumerate(records) if r["kind"] == "train"]
    indices = [n for n, record in trained if record["step"] == step]
    if not indices:
        existing = sorted({record["step"] for _, record in trained})
        steps = f"steps {existing[0]} to {existing[-1]}" if existing else "no step"
        raise ConfigError(
            f"metrics.jsonl of {run.path} has no train record of step {step}. It has {steps}: name "
            "one of these."
        )
    marked = [n for n in indices if any(_is_of(anomaly, records[n]) for anomaly in anomalies)]
    return (marked or indices)[-1]


def _is_of(anomaly: Anomaly, record: Record | None) -> bool:
    batch = (anomaly.step, anomaly.first_sample)
    return record is not None and batch == (record["step"], record.get("first_sample"))


def state_before(
    parts: Parts, dataset: TrainData, run: RunDirectory, step: int, history: History
) -> tuple[TrainState, Loader, int]:
    """Return the state and the loader before a step, and the step of the checkpoint in use.

    Steps after the newest valid checkpoint before `step` are repeated. 0 = none: a new state.
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
    log.info("replaying step %d of %s from the state after step %d", step, run.path, done)
    left_out = dict.fromkeys((*position.left_out, *history.left_out))
    position = dataclasses.replace(position, left_out=tuple(left_out))
    loader = parts.open_loader(dataset, position, done)
    with contextlib.ExitStack() as stack:
        stack.callback(loader.close)
        for past in range(done + 1, step):
            batch = next(loader)
            history.check(past, loader.first_sample, loader.digest)
            state, _ = parts.in_stage(past - 1).step.train(state, batch, history.limit(past))
        stack.pop_all()
    return state, loader, done


def _once(parts: Parts, state: TrainState, batch: Any) -> dict[str, float]:
    copy = jax.tree.map(jnp.copy, state)  # the step donates its argument
    _, metrics = parts.step.train(copy, batch, math.inf)
    return loss_and_norm(metrics)


def loss_and_norm(record: Mapping[str, Any]) -> dict[str, float]:
    """Return loss and gradient norm of a step; {} for a step whose rows have no labels."""
    if record.get("weight") == 0:
        return {}
    return {name: float(record[name]) for name in ("loss", "grad_norm")}


def _text(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in values.items()) or "no labels"
