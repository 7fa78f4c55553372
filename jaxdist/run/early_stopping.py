"""End a run whose evaluation loss no longer falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class EarlyStopping:
    """Count the evaluations since the lowest loss; `patience` 0 = never stop.

    Each process has the same counts, because evaluation losses are equal everywhere.
    """

    def __init__(self, patience: int):
        """Start without evaluations."""
        self._patience, self._lowest, self._num_worse = patience, math.inf, 0

    @property
    def is_over(self) -> bool:
        """Return whether the last `patience` evaluations have not lowered the loss."""
        return 0 < self._patience <= self._num_worse

    def update(self, metrics: Mapping[str, float]) -> None:
        """Add an evaluation; {} = nothing was evaluated."""
        if "loss" in metrics:
            is_better = metrics["loss"] < self._lowest
            self._lowest = metrics["loss"] if is_better else self._lowest
            self._num_worse = 0 if is_better else self._num_worse + 1

    def state(self) -> dict[str, Any]:
        """Return the counts as JSON, for a checkpoint."""
        lowest = None if math.isinf(self._lowest) else self._lowest
        return {"lowest": lowest, "num_worse": self._num_worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the counts of a checkpoint; {} = a new run."""
        lowest = state.get("lowest")
        self._lowest = math.inf if lowest is None else lowest
        self._num_worse = state.get("num_worse", 0)
