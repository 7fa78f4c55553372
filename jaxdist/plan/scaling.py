"""Memory fit, speed and price of the same run on other types and numbers of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxdist.config import RunConfig
from jaxdist.core.types import Model
from jaxdist.hardware import GPUS, Cluster, Gpu
from jaxdist.plan.estimate.cost import Limits, RunCost
from jaxdist.plan.estimate.job import with_section
from jaxdist.plan.estimate.search import Candidate, search
from jaxdist.plan.options import PlanConfig
from jaxdist.plan.planner import price_run

_KINDS = ("l4", "a10g", "a100-40", "a100-80", "h100", "h200", "b200")
"""GPU types that are always compared, besides the requested type and the user's own."""

_MOST_GPUS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The fastest candidate that fits a number of GPUs of one type, with the run's cost."""

    cluster: Cluster
    choice: Candidate
    cost: RunCost


def compared(catalog: Mapping[str, Gpu], requested: Gpu) -> dict[str, Gpu]:
    """Return the GPUs to compare by name: usual types, the user's own, the requested type."""
    names = [*_KINDS, *(name for name in catalog if name not in GPUS)]
    return {name: catalog[name] for name in names if name in catalog} | {requested.name: requested}


def size_of(config: PlanConfig, cluster: Cluster, model: Model) -> Size | None:
    """Return the best candidate on a cluster; None if no legal one fits."""
    best = search(config.run, cluster, model, stages=False).best
    if best is None:
        return None
    _, cost = price_run(config, best)
    return Size(cluster=cluster, choice=best, cost=cost)


def smaller_batch(run: RunConfig, cluster: Cluster, model: Model) -> Candidate | None:
    """Halve the batch until it fits on the cluster; return the best candidate, or None."""
    rows = run.train.global_batch_size
    while rows := rows // 2:
        smaller = with_section(run, "train", global_batch_size=rows)
        best = search(smaller, cluster, model, stages=False).best
        if best is not None:
            return best
    return None


def sizes_of(config: PlanConfig, gpu: Gpu, state_bytes: float, model: Model) -> Iterator[Size]:
    """Yield sizes for a GPU type, doubling the number from the smallest that fits."""
    number = 1
    while number <= min(_MOST_GPUS, 16 * config.train.global_batch_size):
        if number * gpu.memory_bytes >= state_bytes:
            size = size_of(config, Cluster.of(gpu, number), model)
            if size is not None:
                yield size
        number *= 2


USUAL_DAYS = 90.0
"""Longest run in days to recommend if there is no deadline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes for several GPU types: all that fit, and the best for each type.

    `best` has, for each type, the smallest size within the limits, or without a deadline the
    fastest.
    """

    best: tuple[Size, ...]
    tried: tuple[Size, ...]


def right_sizes(
    config: PlanConfig, catalog: Mapping[str, Gpu], state_bytes: float, model: Model
) -> Sizes:
    """Return, for each type, the smallest doubled size that meets the deadline or `USUAL_DAYS`."""
    limits = config.limits
    within = dataclasses.replace(limits, days=limits.days or USUAL_DAYS)
    best: list[Size] = []
    tried: list[Size] = []
    fastest: list[Size] = []
    for gpu in catalog.values():
        here: list[Size] = []
        for size in sizes_of(config, gpu, state_bytes, model):
            here.append(size)
            if not within.late(size.cost):  # else try more of them, which are faster
                best.append(size)
                break
        tried += here
        fastest += [min(here, key=lambda size: size.cost.days)] if here else []
    if not best and not limits.days:
        best = fastest
    best = [size for size in best if not limits.dear(size.cost)]
    return Sizes(best=tuple(sorted(best, key=lambda size: size.cost.money)), tried=tuple(tried))


def nearest(sizes: Sizes, limits: Limits) -> tuple[Size | None, Size | None]:
    """Return the cheapest size within the deadline and the fastest within the budget."""
    in_time = [size for size in sizes.tried if not limits.late(size.cost)]
    affordable = [size for size in sizes.tried if not limits.dear(size.cost)]
    return (
        min(in_time, key=lambda size: size.cost.money, default=None),
        min(affordable, key=lambda size: size.cost.days, default=None),
    )
