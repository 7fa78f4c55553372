"""Which checkpoints to delete: a pure function of their steps, their metrics and the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxdist.checkpoint.config import CheckpointConfig


def steps_to_delete(
    metrics_of: Mapping[int, Mapping[str, float]], config: CheckpointConfig
) -> list[int]:
    """Steps that no rule keeps, in increasing order.

    The newest `keep_newest` are always kept, however bad their metrics: a run resumes from there.

    Args:
        metrics_of: step -> evaluation metrics, for each complete checkpoint.
        config: `keep_newest`, `keep_every_steps`, `keep_best`, `best_metric`, `best_mode`.
    """
    steps = sorted(metrics_of)
    kept = set(steps[-config.keep_newest :])
    if config.keep_every_steps:
        kept.update(step for step in steps if step % config.keep_every_steps == 0)
    kept.update(best_steps(metrics_of, config)[: config.keep_best])
    return [step for step in steps if step not in kept]


def best_steps(
    metrics_of: Mapping[int, Mapping[str, float]], config: CheckpointConfig
) -> list[int]:
    """Steps that have the metric, best first; of equals the later first; NaN is never best."""
    sign = 1.0 if config.best_mode == "min" else -1.0
    scored = [
        (sign * metrics[config.best_metric], -step)
        for step, metrics in metrics_of.items()
        if not math.isnan(metrics.get(config.best_metric, math.nan))
    ]
    return [-negated for _, negated in sorted(scored)]
