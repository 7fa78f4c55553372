"""The same run on other GPUs and other numbers of them: what fits, how fast, at what price."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jaxdist.config import RunConfig
from jaxdist.core.types import Model
from jaxdist.plan.estimate.cost import bill
from jaxdist.plan.estimate.search import Choice, search
from jaxdist.plan.hardware import Cluster, Gpu

KINDS = ("l4", "a10g", "a100-40", "a100-80", "h100", "h200", "b200")
"""Kinds of GPU that right-sizing compares; those of the question and one's own come on top."""

_MOST_GPUS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The best of one number of GPUs of one kind.

    Attributes:
        cluster: the GPUs.
        choice: the fastest that fits.
        days: to the run's tokens.
        money: for them.
    """

    cluster: Cluster
    choice: Choice
    days: float
    money: float

    @property
    def tokens_per_s(self) -> float:
        """Over all GPUs."""
        return self.choice.time.tokens_per_s


def cluster_of(gpu: Gpu, num_gpus: int) -> Cluster:
    """A number of GPUs on as few nodes as hold them."""
    nodes = max(1, num_gpus // gpu.gpus_per_node)
    return Cluster(gpu=gpu, num_nodes=nodes, gpus_per_node=num_gpus // nodes)


def size_of(
    config: RunConfig, gpu: Gpu, num_gpus: int, tokens: float, model: Model | None = None
) -> Size | None:
    """The best of that many, or None where nothing is legal or fits."""
    cluster = cluster_of(gpu, num_gpus)
    best = search(config, cluster, model, stages=False).best
    if best is None:
        return None
    cost = bill(
        tokens=tokens,
        tokens_per_s=best.time.tokens_per_s,
        num_gpus=num_gpus,
        price=gpu.price_per_hour,
    )
    return Size(cluster=cluster, choice=best, days=cost.days, money=cost.money)


def smallest(
    config: RunConfig, gpu: Gpu, tokens: float, state_bytes: float, model: Model | None = None
) -> Size | None:
    """The fewest GPUs of a kind that hold the run, by doubling.

    Args:
        config: the run.
        gpu: the kind.
        tokens: of the whole run.
        state_bytes: parameters and moments, whole: fewer GPUs than hold them are not tried.
        model: the built model, for a custom one.
    """
    number = 1
    while number * gpu.memory_bytes < state_bytes:
        number *= 2
    while number <= min(_MOST_GPUS, 64 * max(1, number)):
        found = size_of(config, gpu, number, tokens, model)
        if found is not None:
            return found
        if number > config.train.global_batch_size * 8:
            return None
        number *= 2
    return None


def sweep(
    config: RunConfig,
    gpu: Gpu,
    counts: Iterable[int],
    tokens: float,
    model: Model | None = None,
) -> list[Size]:
    """The best of several numbers of GPUs; those that cannot hold the run are left out."""
    sizes = [size_of(config, gpu, count, tokens, model) for count in counts]
    return [size for size in sizes if size is not None]


def right_sizes(
    config: RunConfig,
    known: Mapping[str, Gpu],
    tokens: float,
    state_bytes: float,
    model: Model | None = None,
) -> list[Size]:
    """The fewest GPUs of each kind that hold the run, cheapest first."""
    found = [
        smallest(config, known[name], tokens, state_bytes, model) for name in KINDS if name in known
    ]
    return sorted((size for size in found if size is not None), key=lambda size: size.money)
