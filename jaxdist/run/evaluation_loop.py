"""Evaluation on held-out rows, and early stopping by its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.step import Step
from jaxdist.core.types import Params
from jaxdist.data import Dataset, eval_batches
from jaxdist.runtime.progress import Progress
from jaxdist.settings import ConfigError


class NoLabels(ConfigError):
    """Raised if no evaluated row of a set has a label."""


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
    """Return the mean loss (cross-entropy in nats) and other metrics, by name.

    `unit` is the key of the total weight. With named sets, `NAME/loss` ... are the metrics of each
    set, and those without a name are the metrics of the first set. `params` are in execution
    order. `max_batches` of each set are spread over it; 0 = every row once. Each batch is
    followed by a call of `on_batch`. Raise `NoLabels` if all evaluated weights of a set are 0.
    """
    results: dict[str, float] = {}
    for name, rows in dataset.sets().items():
        sums = _sums(
            step, params, rows, global_batch_size, max_batches,
            sizes=rows.token_bytes if unit == "tokens" else None, on_batch=on_batch,
        )  # fmt: skip
        means = _means(sums, unit, name)
        results = results or dict(means)
        if name:
            results |= {f"{name}/{metric}": value for metric, value in means.items()}
    return results


def _sums(
    step: Step,
    params: Params,
    dataset: Dataset,
    global_batch_size: int,
    max_batches: int,
    *,
    sizes: Any,
    on_batch: Callable[[], None],
) -> dict[str, float]:
    """Return the sums of `Step.evaluate`; also "bytes", if `sizes`, float32 [vocab], are set."""
    sharding = step.batch_sharding
    batches = eval_batches(
        dataset,
        global_batch_size=global_batch_size,
        sharding=sharding,
        max_batches=max_batches or None,
    )
    if sizes is not None:
        sizes = jax.device_put(sizes, NamedSharding(sharding.mesh, PartitionSpec()))
    count = -(-dataset.num_rows // global_batch_size)
    totals: dict[str, float] = {}
    with Progress("evaluating", min(max_batches or count, count), "batches") as progress:
        for batch in batches:
            sums = step.evaluate(params, batch)
            if sizes is not None:
                sums = {**sums, "bytes": _count_bytes(sizes, batch["targets"], batch["weights"])}
            # Python floats: sums over a long evaluation outgrow float32.
            totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
            on_batch()
            progress.advance()
    return totals


@jax.jit
def _count_bytes(sizes: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the sum of bytes (`sizes` [vocab]) × weight over targets [batch, seq]; float32 []."""
    return jnp.sum(sizes[targets] * weights)


def _means(sums: dict[str, float], unit: str, name: str) -> dict[str, float]:
    weight, num_bytes = sums.pop("weight"), sums.pop("bytes", 0.0)
    if not weight:
        raise NoLabels(
            f"the evaluated batches{name and f' of set {name!r}'} have no label: all weights are "
            "0. Name other data (data.eval_sources, or --sources of jaxdist evaluate), or evaluate "
            "more batches."
        )
    means = {metric: value / weight for metric, value in sums.items()}
    if "correct" in means:
        means["accuracy"] = means.pop("correct")
    if unit == "tokens" and "agreement" not in means:  # a divergence has no perplexity
        # exp overflows a float at 709 nats; such a loss has no useful perplexity.
        means["perplexity"] = math.exp(min(means["loss"], 700.0))
        if num_bytes:
            means["bits_per_byte"] = sums["loss"] / math.log(2) / num_bytes
    return {**means, unit: weight}


class EarlyStopping:
    """Count the evaluations since the lowest loss; `patience` 0 = never stop.

    Each process has the same counts, because evaluation losses are equal everywhere.
    """

    def __init__(self, patience: int):
        self._patience, self._lowest, self._num_worse = patience, math.inf, 0

    @property
    def is_over(self) -> bool:
        """Return whether the last `patience` evaluations did not improve on the lowest loss."""
        return 0 < self._patience <= self._num_worse

    def update(self, metrics: Mapping[str, float]) -> None:
        """Count one evaluation by its loss in `metrics`; without a loss, change nothing."""
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
