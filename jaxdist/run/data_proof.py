"""Which rows entered which steps of a run, computed from its settings and checked by its ledger."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxdist.config import stored_run
from jaxdist.core.settings import ConfigError
from jaxdist.data import Dataset, open_datasets
from jaxdist.data.ledger import Link, digest_of
from jaxdist.run.metrics_log import Record, current, read_records
from jaxdist.run.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepData:
    """What metrics.jsonl says of the batch of one step.

    Attributes:
        fingerprint: of the data at that time.
        seed: of the order at that time.
    """

    step: int
    link: Link
    fingerprint: str
    seed: int


def recorded_data(records: list[Record]) -> dict[int, StepData]:
    """Step -> its batch, for the steps that led to the newest state; {} without a ledger."""
    found, header = {}, {}
    kept = {id(record) for record in current(records)}
    for record in records:
        if record.get("event") == "run":
            header = record
        if record["kind"] == "train" and id(record) in kept and record.get("data_ledger"):
            link = Link(record["first_sample"], header["global_batch_size"], record["data_ledger"])
            found[record["step"]] = StepData(
                step=record["step"],
                link=link,
                fingerprint=header["data_fingerprint"],
                seed=header["seed"],
            )
    return found


def prove(path: str, first: int = 1, last: int | None = None) -> dict[int, list[int]]:
    """Rows of each step from `first` to `last`, both included, in the order of the batch.

    Args:
        path: a run directory.
        first: first step.
        last: last step; None = the newest.

    Returns:
        Step -> rows of the data.

    Raises:
        ConfigError: the run has no ledger or not these steps, or the rows that its config.toml
            gives are not those that the ledger holds; says from which step on and why.
    """
    run = RunDirectory.existing(path)
    if not run.config.exists():
        raise ConfigError(
            f"run {run.path} has no config.toml, from which its data follow. Restore the file: "
            "each checkpoint keeps a copy of its text (`jaxdist convert inspect RUN`)."
        )
    config = stored_run(run.config)
    steps = recorded_data(read_records(run.metrics))
    if not steps:
        raise ConfigError(
            f"run {run.path} has no data ledger: it did no step, or it trains on a stream, whose "
            "rows have no numbers. Name another run."
        )
    last = max(steps) if last is None else last
    if lacking := [step for step in range(first, last + 1) if step not in steps]:
        raise ConfigError(
            f"steps {first}:{last} of run {run.path}: step {lacking[0]} is not in metrics.jsonl, "
            f"which holds steps {min(steps)} to {max(steps)}. Name steps among them."
        )
    dataset, _ = open_datasets(config.data, seq_len=config.train.seq_len, seed=config.seed)
    assert isinstance(dataset, Dataset)  # a stream has no ledger
    order, fingerprint, rows = dataset.order(config.seed), dataset.fingerprint, {}
    for step in range(first, last + 1):
        told = steps[step]
        found = order.rows(told.link.samples)
        before = steps[step - 1].link.digest if step - 1 in steps else ""
        if told.link.digest != digest_of(before, fingerprint, found):
            raise ConfigError(_why(told, step, {"seed": config.seed, "fingerprint": fingerprint}))
        rows[step] = found.tolist()
    return rows


def _why(told: StepData, step: int, now: dict[str, Any]) -> str:
    """Why the rows computed now are not those of the ledger."""
    changed = [
        f"{name} was {getattr(told, name)} and is {value}"
        for name, value in now.items()
        if getattr(told, name) != value
    ]
    reason = "; ".join(changed) or (
        "data and seed are the same, so this line of metrics.jsonl or the one before was changed, "
        "or another version of jaxdist orders rows in another way"
    )
    return (
        f"data ledger: the rows of step {step} are not those that config.toml gives ({reason}). "
        "Restore the data and settings of that step."
    )
