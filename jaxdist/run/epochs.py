"""Convert `train.epochs` to steps, which depend on the data."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from jaxdist.config import RunConfig
from jaxdist.data import Dataset
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


def with_steps(config: RunConfig, data: Any) -> RunConfig:
    """Return the settings with `train.steps` instead of `train.epochs`, if that is set.

    `data` are the training data. Raises `ConfigError` for a stream, which has no end.
    """
    train = config.train
    if not train.epochs:
        return config
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"train.epochs={train.epochs:g} with data.sources={config.data.sources}, a stream "
            "without a number of rows. Set train.steps."
        )
    steps = max(1, math.ceil(train.epochs * data.num_rows / train.global_batch_size))
    log.info(
        "train.epochs=%g: %d steps of %d rows are as many passes over %d training rows",
        train.epochs, steps, train.global_batch_size, data.num_rows,
    )  # fmt: skip
    return dataclasses.replace(config, train=dataclasses.replace(train, steps=steps, epochs=0.0))
