"""Objectives: (output of a model's head, batch, context) -> Sums; training minimizes the loss.

An objective receives this device's rows of one microbatch. It returns sums over them, never means:
`loss`, `weight` and any metrics (`core.types.Sums`). Custom objectives have the same signature.
"""

import dataclasses
import functools

from jaxdist.core.losses import Regularizers
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.types import Objective
from jaxdist.objectives.cross_entropy import TextClassification, classification, cross_entropy
from jaxdist.settings import ConfigError


def regularized(objective: Objective, config: TrainConfig) -> Objective:
    """Return the objective with z-loss and label smoothing; unchanged if both are 0.

    Raises `ConfigError` for objectives other than cross-entropy.
    """
    if not any(regularizers := Regularizers(config.z_loss, config.label_smoothing)):
        return objective
    if isinstance(objective, TextClassification):
        return dataclasses.replace(objective, regularizers=regularizers)
    if objective not in (cross_entropy, classification):
        raise ConfigError(
            f"train.z_loss={config.z_loss} and train.label_smoothing={config.label_smoothing} are "
            "for cross-entropy, and this run has another objective. Set both to 0."
        )
    return functools.partial(objective, regularizers=regularizers)  # type: ignore[call-arg]
