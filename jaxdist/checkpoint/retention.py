"""Which checkpoints to delete: a pure function of what their manifests say and the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxdist.checkpoint.config import CheckpointConfig

_LARGER_IS_BETTER = ("accuracy",)
"""Evaluation metrics whose best value is the largest; of all others it is the smallest."""


class Saved(NamedTuple):
    """What retention goes by: metrics of an evaluation, and whether the save halves an interval."""

    metrics: Mapping[str, float] = {}
    halfway: bool = False


def steps_to_delete(saved: Mapping[int, Saved], config: CheckpointConfig) -> list[int]:
    """Steps that no rule keeps, in increasing order.

    The newest `max_to_keep` are always kept, however bad their metrics: a run resumes from there.
    One saved halfway is not counted among them, and kept as long as it is the newest of all.
    """
    steps = sorted(saved)
    kept = set(steps[-1:])
    kept.update([step for step in steps if not saved[step].halfway][-config.max_to_keep :])
    if config.keep_interval_steps:
        kept.update(step for step in steps if step % config.keep_interval_steps == 0)
    metric, count = config.best
    kept.update(best_steps(saved, metric)[:count])
    return [step for step in steps if step not in kept]


def best_steps(saved: Mapping[int, Saved], metric: str) -> list[int]:
    """Steps that have the metric, best first; of equals the later first; NaN is never best."""
    sign = -1.0 if metric in _LARGER_IS_BETTER else 1.0
    scored = [
        (sign * one.metrics[metric], -step)
        for step, one in saved.items()
        if not math.isnan(one.metrics.get(metric, math.nan))
    ]
    return [-negated for _, negated in sorted(scored)]
