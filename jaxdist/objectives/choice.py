"""Regularizers of the settings, added to an objective."""

from __future__ import annotations

import functools
from typing import Any

from jaxdist.core.losses import Regularizers
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.types import Objective
from jaxdist.objectives.classification import classification
from jaxdist.objectives.cross_entropy import cross_entropy


def regularized(config: TrainConfig, objective: Any) -> Objective:
    """Return the objective with `train.z_loss` and `train.label_smoothing`."""
    regularizers = Regularizers(config.z_loss, config.label_smoothing)
    if not any(regularizers):
        return objective
    return functools.partial(objective, regularizers=regularizers)


def regularizer_problems(config: TrainConfig, objective: Objective) -> list[str]:
    """Return why an objective of the user's own cannot have the regularizers of the settings."""
    if objective in (cross_entropy, classification):
        return []
    return [
        f"train.{name}={value:g} applies to cross-entropy, and this run has an objective of its "
        "own. Set it to 0, and add the term to the objective."
        for name, value in (
            ("z_loss", config.z_loss),
            ("label_smoothing", config.label_smoothing),
        )
        if value
    ]
