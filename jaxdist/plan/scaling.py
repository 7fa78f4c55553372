"""The same run on other GPUs and other numbers of them: what fits, how fast, at what price."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxdist.core.types import Model
from jaxdist.plan.estimate.cost import Bill
from jaxdist.plan.estimate.search import Choice, search
from jaxdist.plan.hardware import GPUS, Cluster, Gpu
from jaxdist.plan.options import PlanConfig
from jaxdist.plan.planner import costs_of

_KINDS = ("l4", "a10g", "a100-40", "a100-80", "h100", "h200", "b200")
"""Known kinds of GPU that are compared; that of the question and one's own come on top."""

_MOST_GPUS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The fastest that fits of one number of GPUs of one kind, and its cost to the run's tokens."""

    cluster: Cluster
    choice: Choice
    cost: Bill


def compared(known: Mapping[str, Gpu], asked: Gpu) -> dict[str, Gpu]:
    """GPUs worth comparing, by name: usual ones, one's own, and those asked for at their price."""
    names = [*_KINDS, *(name for name in known if name not in GPUS)]
    return {name: known[name] for name in names if name in known} | {asked.name: asked}


def size_of(config: PlanConfig, cluster: Cluster, model: Model) -> Size | None:
    """The best of a cluster, or None where nothing is legal or fits."""
    best = search(config.run, cluster, model, stages=False).best
    if best is None:
        return None
    _, cost = costs_of(config, best)
    return Size(cluster=cluster, choice=best, cost=cost)


def sizes_of(config: PlanConfig, gpu: Gpu, state_bytes: float, model: Model) -> Iterator[Size]:
    """More and more GPUs of a kind, each time twice as many, from the fewest that hold the run."""
    number = 1
    while number <= min(_MOST_GPUS, 16 * config.train.global_batch_size):
        if number * gpu.memory_bytes >= state_bytes:
            found = size_of(config, Cluster.of(gpu, number), model)
            if found is not None:
                yield found
        number *= 2


def right_sizes(
    config: PlanConfig, known: Mapping[str, Gpu], state_bytes: float, model: Model
) -> tuple[list[Size], bool]:
    """The first GPUs of each kind, by doubling, that hold the run within its limits.

    Returns:
        One size of each kind that has one, cheapest first; whether any holds the run at all.
    """
    found, any_holds = [], False
    for gpu in known.values():
        for size in sizes_of(config, gpu, state_bytes, model):
            any_holds = True
            if not config.limits.late(size.cost):  # else more of them, which are faster
                found.append(size)
                break
    found = [size for size in found if not config.limits.dear(size.cost)]
    return sorted(found, key=lambda size: size.cost.money), any_holds
