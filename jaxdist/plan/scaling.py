"""The same run on other GPUs and other numbers of them: what fits, how fast, at what price."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxdist.config import RunConfig
from jaxdist.core.types import Model
from jaxdist.plan.estimate.cost import Bill, bill
from jaxdist.plan.estimate.search import Choice, search
from jaxdist.plan.hardware import Cluster, Gpu

KINDS = ("l4", "a10g", "a100-40", "a100-80", "h100", "h200", "b200")
"""Kinds of GPU that right-sizing compares; those of the question and one's own come on top."""

_MOST_GPUS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The fastest that fits of one number of GPUs of one kind, and its cost to the run's tokens."""

    cluster: Cluster
    choice: Choice
    cost: Bill


def size_of(config: RunConfig, gpu: Gpu, num_gpus: int, tokens: float, model: Model) -> Size | None:
    """The best of that many, or None where nothing is legal or fits."""
    cluster = Cluster.of(gpu, num_gpus)
    best = search(config, cluster, model, stages=False).best
    if best is None:
        return None
    cost = bill(
        tokens=tokens,
        tokens_per_s=best.time.tokens_per_s,
        num_gpus=num_gpus,
        price=gpu.price_per_hour,
    )
    return Size(cluster=cluster, choice=best, cost=cost)


def smallest(
    config: RunConfig, gpu: Gpu, tokens: float, state_bytes: float, model: Model
) -> Size | None:
    """The fewest GPUs of a kind that hold the run, by doubling; at least its whole state."""
    number = 1
    while number <= min(_MOST_GPUS, 16 * config.train.global_batch_size):
        if number * gpu.memory_bytes >= state_bytes:
            found = size_of(config, gpu, number, tokens, model)
            if found is not None:
                return found
        number *= 2
    return None


def right_sizes(
    config: RunConfig, known: Mapping[str, Gpu], tokens: float, state_bytes: float, model: Model
) -> list[Size]:
    """The fewest GPUs of each kind that hold the run, cheapest first."""
    found = [
        smallest(config, known[name], tokens, state_bytes, model) for name in KINDS if name in known
    ]
    return sorted((size for size in found if size is not None), key=lambda size: size.cost.money)
