"""Open the data of a run, check that they fit its model and objective, count epochs."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
from typing import Any

from jaxdist.config import RunConfig
from jaxdist.core.step.shapes import steps_for
from jaxdist.core.types import rows_per_example
from jaxdist.data import Dataset, TrainData, open_datasets
from jaxdist.run.setup import Parts
from jaxdist.settings import ConfigError


def open_run_data(config: RunConfig, rows: Any = None) -> tuple[TrainData, Dataset | None]:
    """Return `data.open_datasets` of a run; `rows` of a Python program replace its source."""
    return open_datasets(
        config.data,
        seq_len=config.train.seq_len,
        seed=config.seed,
        python_source=rows,
        samples_before=config.train.samples_before,
        num_labels=config.model.num_labels,
    )


def in_examples(parts: Parts, dataset: TrainData) -> Any:
    """Return the dataset with orders that keep an example's rows together; a stream as it is."""
    size = rows_per_example(parts.model.objective)
    return dataset.in_examples(size) if size > 1 and isinstance(dataset, Dataset) else dataset


def check_passes(config: RunConfig, dataset: TrainData) -> None:
    """Reject a run that reads a source more often than `data.mixture_weights` allows."""
    limits, train = config.data.max_passes, config.train
    if not limits or not isinstance(dataset, Dataset):
        return
    order = dataset.order(config.seed)

    def exceeded(steps: int) -> list[tuple[str, float, float]]:
        passes = order.passes(train.samples_before(steps))
        sources = zip(config.data.sources, passes, limits, strict=True)
        return [one for one in sources if one[1] > one[2]]

    if problems := exceeded(train.steps):
        most = bisect.bisect_left(range(train.steps), True, key=lambda n: bool(exceeded(n + 1)))
        raise ConfigError(
            [
                f"{train.steps} steps read data source {source!r} {passes:.4g} times, and passes "
                f"in data.mixture_weights allows {limit:g}. Set train.steps={most} or less, lower "
                "its weight, or raise the limit."
                for source, passes, limit in problems
            ]
        )


def check_data_fits(parts: Parts, dataset: TrainData) -> None:
    """Reject data of another kind or dtype than the model's, or with more tokens or classes."""
    kind = "text" if parts.model.unit == "tokens" else "images"
    if dataset.kind != kind:
        raise ConfigError(
            f"the data is {dataset.kind}, but the model ({parts.model.name}) takes {kind}. Change "
            f"the data (data.sources={parts.config.data.sources} in training) or model.kind."
        )
    name, size = "vocab_size", parts.model.vocab_size
    if kind == "images":
        name, size = "num_classes", parts.model.num_classes
    classes = "targets" if kind == "text" else "labels"
    if not parts.config.model.is_user_model and dataset.fields[classes][1].name != "int32":
        raise ConfigError(
            f"data.sources={parts.config.data.sources} has {classes} of dtype "
            f"{dataset.fields[classes][1]}, but {parts.model.name} takes integers. Convert them to "
            "integers in the function, or use a custom model."
        )
    if size and dataset.vocab_size > size:
        setting = parts.config.model.size_settings.get(name)
        fix = f"{setting}={dataset.vocab_size}"
        if setting is None:
            fix = f"the {name} of {parts.model.name} to {dataset.vocab_size} in its function"
        raise ConfigError(
            f"the data has {dataset.vocab_size} tokens or classes, {parts.model.name} has only "
            f"{name}={size}. Set {fix}."
        )


log = logging.getLogger("jaxdist")


def with_steps(config: RunConfig, data: Any) -> RunConfig:
    """Return the settings with `train.epochs` as steps; raise `ConfigError` for a stream."""
    train = config.train
    if not train.epochs:
        return config
    if not isinstance(data, Dataset) or data.streams:
        raise ConfigError(
            f"train.epochs={train.epochs:g} with data.sources={config.data.sources}, a stream "
            "without a number of rows. Set train.steps."
        )
    steps = max(1, steps_for(train.stages, math.ceil(train.epochs * data.num_rows)))
    log.info(
        "train.epochs=%g takes %d steps of %s%d rows, with %d training rows",
        train.epochs, steps, "up to " * (len(train.stages) > 1), train.global_batch_size,
        data.num_rows,
    )  # fmt: skip
    return dataclasses.replace(config, train=dataclasses.replace(train, steps=steps, epochs=0.0))
