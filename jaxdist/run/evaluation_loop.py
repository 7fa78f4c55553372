"""Evaluation on held-out rows: each row once, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxdist.core.step import Step
from jaxdist.core.types import Params
from jaxdist.data import Dataset, eval_batches
from jaxdist.runtime.progress import Progress
from jaxdist.settings import ConfigError


class NoLabels(ConfigError):
    """Raised if no evaluated row has a label."""


def evaluate(
    step: Step,
    params: Params,
    dataset: Dataset,
    *,
    global_batch_size: int,
    unit: str,
    max_batches: int = 0,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the mean loss in nats, perplexity of text, accuracy if counted, and the total weight.

    The last batch may be ragged (its padding has weight 0). `params` are sharded as in training.
    `unit` is the key of the total weight. `max_batches` are spread over the dataset; 0 = every row
    once. Raise `NoLabels` if all weights are 0.
    """
    batches = eval_batches(
        dataset,
        global_batch_size=global_batch_size,
        sharding=step.batch_sharding,
        max_batches=max_batches or None,
    )
    count = -(-dataset.num_rows // global_batch_size)
    totals: dict[str, Any] = {}
    with Progress("evaluating", min(max_batches or count, count), "batches") as progress:
        for batch in batches:
            sums = step.evaluate(params, batch)
            # Python floats: sums over a long evaluation outgrow float32.
            totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
            on_batch()
            progress.advance()
    weight = totals["weight"]
    if not weight:
        raise NoLabels(
            f"none of the {min(max_batches or count, count)} evaluated batches has a label: all "
            "weights are 0. Name other data (data.eval_sources, or --sources of jaxdist evaluate), "
            "or evaluate more batches."
        )
    means = {name: value / weight for name, value in totals.items() if name != "weight"}
    if "correct" in means:
        means["accuracy"] = means.pop("correct")
    if unit == "tokens":
        # exp overflows a float at 709 nats; such a loss has no useful perplexity.
        means["perplexity"] = math.exp(min(means["loss"], 700.0))
    return {**means, unit: weight}
