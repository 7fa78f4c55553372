"""The plan of a run on one cluster: settings, compiler check, cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from jaxdist.checkpoint.local.copies import FailureDomain, Survivable, holders, survivable
from jaxdist.config import RunConfig
from jaxdist.core import matmul
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import axes
from jaxdist.core.parallel.data import DATA
from jaxdist.core.step.shapes import BatchStage
from jaxdist.core.types import Model, rows_per_example
from jaxdist.hardware import GPUS, Cluster, Gpu
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled, compile_step
from jaxdist.plan.estimate.cost import (
    FAILURES_PER_1000_GPU_DAYS,
    CheckpointCost,
    Limits,
    Restart,
    RunCost,
    checkpoint_bytes,
    checkpoint_cost,
    restart_of,
    run_cost,
    storage_rate,
)
from jaxdist.plan.estimate.job import Job, with_section
from jaxdist.plan.estimate.memory import TEACHER, estimate_memory, usable_bytes
from jaxdist.plan.estimate.products import NARROW_PEAKS
from jaxdist.plan.estimate.remat import TOLERANCE, choose_remat, policies_of
from jaxdist.plan.estimate.search import Candidate, SearchResult, search
from jaxdist.plan.estimate.traffic import Flow, flows_of
from jaxdist.plan.options import PlanConfig
from jaxdist.settings import ConfigError

_MOST_COMPILATIONS = 3
"""Maximum number of candidates to compile until one fits."""

Rejected = tuple[tuple[Candidate, CompiledStep], ...]
"""Other candidates that did not fit when compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run planned on a cluster.

    Attributes:
        choice: the candidate to run, on the user's mesh if one is named.
        outcome: result of the compiler for `choice`; None if disabled.
        checkpoints: cost with hardware failures; `spot_checkpoints`: also with preemptions.
    """

    base: RunConfig
    cluster: Cluster
    choice: Candidate
    mesh_is_fixed: bool
    search: SearchResult
    flows: tuple[Flow, ...]
    outcome: CompiledStep | NotCompiled | None
    rejected: Rejected
    restart: Restart
    checkpoints: CheckpointCost
    on_demand: RunCost
    spot: RunCost
    spot_checkpoints: CheckpointCost
    limits: Limits

    @property
    def compiled(self) -> CompiledStep | None:
        """The compiled step; None if the step was not compiled."""
        return self.outcome if isinstance(self.outcome, CompiledStep) else None

    @property
    def total_bytes(self) -> float:
        """Bytes per device: if compiled, of the step plus a teacher's weights; else estimated."""
        compiled = self.compiled
        return _needed(self.choice, compiled) if compiled else self.choice.memory.total_bytes

    @functools.cached_property
    def largest_batch(self) -> Candidate | None:
        """The `largest_batch` of this run on the same mesh; None if none fits."""
        return largest_batch(self.choice.job, self.base.train.remat)

    @property
    def fits(self) -> bool:
        """True if `total_bytes`, and estimates of earlier stages of schedules, fit on a GPU."""
        fits = self.total_bytes <= self.choice.usable_bytes
        return fits and all(stage.fits for _, stage in stages_of(self.choice)[:-1])


def narrow_problems(matmul_dtype: str, num_layers: int, gpu: Gpu) -> list[str]:
    """Return why a model on a GPU cannot use a format, or that its rate is unknown; [] = it can."""
    problems = matmul.problems(matmul_dtype, num_layers, "gpu", gpu.compute_capability)
    unknown = [dtype for dtype in NARROW_PEAKS.get(matmul_dtype, ()) if dtype not in gpu.peak_flops]
    if unknown and not problems:
        problems.append(
            f"precision.matmul_dtype={matmul_dtype} on GPU {gpu.name!r}, whose peak_tflops lack "
            f"{' and '.join(unknown)}. Add it in a file for --hardware."
        )
    return problems


def make_plan(config: PlanConfig, cluster: Cluster, mesh: str) -> Plan:
    """Return the plan of a run on a cluster, on the mesh named `mesh`; "" = on the best one."""
    run, model = config.run, config.run.build_model()
    problems = narrow_problems(run.precision.matmul_dtype, model.num_layers, cluster.gpu)
    if problems:
        raise ConfigError(problems)
    result = search(run, cluster, model)
    if mesh:
        spec = MeshSpec.parse(mesh, cluster.num_gpus)
        run.check_mesh(spec, model, cluster.num_gpus)
        job = Job.of(run, spec, cluster, model)
        remat = choose_remat(job, usable_bytes(job))
        candidates = [Candidate.of(job if remat is None else remat.job)]
    else:
        candidates = list(result.choices)
        if not candidates:
            # No mesh is legal: this check raises with the reason and a fix.
            run.check_mesh(MeshSpec.over(DATA, cluster.num_gpus), model, cluster.num_gpus)
    choice, outcome, rejected = _check_candidates(candidates, config, mesh_is_fixed=bool(mesh))
    checkpoints, on_demand = price_run(config, choice)
    spot_checkpoints, spot = price_run(config, choice, spot=True)
    compile_s = outcome.compile_s if isinstance(outcome, CompiledStep) else None
    return Plan(
        base=run,
        cluster=cluster,
        choice=choice,
        mesh_is_fixed=bool(mesh),
        search=result,
        flows=tuple(flows_of(choice.job)),
        outcome=outcome,
        rejected=rejected,
        restart=_restart(config, choice, compile_s),
        checkpoints=checkpoints,
        on_demand=on_demand,
        spot=spot,
        spot_checkpoints=spot_checkpoints,
        limits=config.limits,
    )


def _check_candidates(
    candidates: list[Candidate], config: PlanConfig, *, mesh_is_fixed: bool
) -> tuple[Candidate, CompiledStep | NotCompiled | None, Rejected]:
    """Return the first candidate that fits when compiled, else the first; result; and `Rejected`.

    The result is None if `config.compile` is off. A failure to compile counts as a fit.
    """
    if not config.compile:
        return candidates[0], None, ()
    rejected: list[tuple[Candidate, CompiledStep]] = []
    for choice in candidates[: 1 if mesh_is_fixed else _MOST_COMPILATIONS]:
        if rejected and not choice.fits:
            break
        job = choice.job
        outcome = compile_step(
            job.config, job.spec, job.cluster, timeout_s=config.compile_timeout_s
        )
        if isinstance(outcome, NotCompiled) or _needed(choice, outcome) <= choice.usable_bytes:
            return choice, outcome, tuple(rejected)
        rejected.append((choice, outcome))
    return *rejected[0], tuple(rejected[1:])


def _needed(choice: Candidate, compiled: CompiledStep) -> float:
    return compiled.memory.total_bytes + choice.memory.state.get(TEACHER, 0.0)


def _restart(config: PlanConfig, choice: Candidate, compile_s: float | None = None) -> Restart:
    job = choice.job
    return restart_of(
        job,
        checkpoint_bytes=checkpoint_bytes(job),
        storage_bytes_per_s=storage_rate(config.storage_gb_per_s * 1e9, job.cluster),
        step_s=choice.time.seconds,
        compile_s=compile_s,
    )


def price_run(
    config: PlanConfig, choice: Candidate, *, spot: bool = False
) -> tuple[CheckpointCost, RunCost]:
    """Return (cost of checkpoints, cost of the run): on demand, or `spot` with preemptions too."""
    job, cluster = choice.job, choice.job.cluster
    failures = config.failures_per_day
    if failures < 0:
        failures = FAILURES_PER_1000_GPU_DAYS * cluster.num_gpus / 1000
    restart_s = config.restart_s
    checkpoints = checkpoint_cost(
        job,
        failures_per_day=failures + (config.preemptions_per_day if spot else 0.0),
        storage_bytes_per_s=storage_rate(config.storage_gb_per_s * 1e9, cluster),
        restart_s=_restart(config, choice).after_failure_s if restart_s < 0 else restart_s,
    )
    gpu, train = cluster.gpu, config.train
    tokens = config.tokens or float(train.samples_before(train.steps) * job.seq_len)
    cost = run_cost(
        tokens=tokens,
        tokens_per_s=tokens / _seconds(choice, tokens),
        num_gpus=cluster.num_gpus,
        price=gpu.spot_price_per_hour if spot else gpu.price_per_hour,
        lost=checkpoints.lost,
    )
    return checkpoints, cost


def stages_of(choice: Candidate) -> list[tuple[BatchStage, Candidate]]:
    """Return each stage of the run's schedules, and the run in it; the last one is `choice`."""
    train, job = choice.job.config.train, choice.job
    stages = []
    for stage in train.stages[:-1]:
        config = dataclasses.replace(job.config, train=train.in_stage(stage))
        stages.append((stage, Candidate.of(dataclasses.replace(job, config=config))))
    return [*stages, (train.stages[-1], choice)]


def _seconds(choice: Candidate, tokens: float) -> float:
    """Return the seconds of a run of `tokens` without failures."""
    stages, seconds = stages_of(choice), 0.0
    ends = [stage.first_sample * choice.job.seq_len for stage, _ in stages[1:]]
    for (stage, run), end in zip(stages, [*ends, math.inf], strict=True):
        done = min(tokens, end) - stage.first_sample * choice.job.seq_len
        seconds += max(0.0, done) / run.time.tokens_per_s
    return seconds


def survivable_losses(
    spec: MeshSpec, num_nodes: int, neighbours: int, *, zero: int = 0
) -> Survivable:
    """Return the node losses that local saves survive, assuming unknown racks.

    Nodes take the mesh's devices in order. Two nodes store the same shards if their devices have
    the same indices along all axes that shard the state. In practice more losses may be survivable.
    """
    sharding = {axis.name for axis in axes.AXES if axis.weights != "replicated"}
    sharding |= set(axes.joining_fsdp(zero))
    sizes = spec.sizes
    indices = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    rows = [row for name, row in zip(sizes, indices, strict=True) if name in sharding]
    by_node = np.stack(rows).reshape(len(rows), num_nodes, -1)
    shards = [str(sorted(set(zip(*by_node[:, n].tolist(), strict=True)))) for n in range(num_nodes)]
    domains = [FailureDomain("", f"node{n:0{len(str(num_nodes - 1))}}") for n in range(num_nodes)]
    return survivable(holders(domains, shards, neighbours), domains)


_MOST_ROWS = 1 << 16
"""Examples of a microbatch from which on the search ends: a toy model fits with any."""


def largest_batch(job: Job, remat: str) -> Candidate | None:
    """Return the run with most rows that fits at once; None if none, or with a batch schedule.

    Only runs with pipeline stages keep their microbatches. `remat` is the policy, or "auto" for the
    fastest that fits, as in training. The estimate must fit with its error, `TOLERANCE`.
    """
    limit = usable_bytes(job)
    count = 1 if job.stages is None else job.num_microbatches
    unit = rows_per_example(job.model.objective)

    def with_rows(examples: int) -> Job:
        rows = examples * unit * count * job.spec.num_replicas
        return job.changed("train", global_batch_size=rows, num_microbatches=count, remat=remat)

    def fits(examples: int) -> bool:
        tried = with_rows(examples)
        policies = policies_of(tried)[::-1] if remat == "auto" else [remat]  # least memory first
        jobs = (tried.changed("train", remat=policy) for policy in policies)
        return any(estimate_memory(one).total_bytes * (1 + TOLERANCE) <= limit for one in jobs)

    if job.config.train.batch_schedule or not fits(1):
        return None
    low, high = 1, 2
    while high <= _MOST_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and low < _MOST_ROWS:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    largest = with_rows(low)
    choice = choose_remat(largest, limit)
    return Candidate.of(largest if choice is None else choice.job)


_KINDS = ("l4", "a10g", "a100-40", "a100-80", "h100", "h200", "b200")
"""GPU types that are always compared, besides the requested type and the user's own."""

_MOST_GPUS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The best candidate without a pipeline on a number of GPUs of one type, and the run's cost."""

    cluster: Cluster
    choice: Candidate
    cost: RunCost


def compared(catalog: Mapping[str, Gpu], requested: Gpu) -> dict[str, Gpu]:
    """Return name -> GPU of the types to compare: usual ones, the user's own, the requested one."""
    names = [*_KINDS, *(name for name in catalog if name not in GPUS)]
    return {name: catalog[name] for name in names if name in catalog} | {requested.name: requested}


def size_of(config: PlanConfig, cluster: Cluster, model: Model) -> Size | None:
    """Return the best candidate without a pipeline, and its cost; None if no legal one fits."""
    if narrow_problems(config.precision.matmul_dtype, model.num_layers, cluster.gpu):
        return None
    best = search(config.run, cluster, model, stages=False).best
    if best is None:
        return None
    _, cost = price_run(config, best)
    return Size(cluster=cluster, choice=best, cost=cost)


def smaller_batch(run: RunConfig, cluster: Cluster, model: Model) -> Candidate | None:
    """Return the best candidate without stages and schedule, the batch halved until one fits."""
    rows = 0 if run.train.batch_schedule else run.train.global_batch_size
    while rows := rows // 2:
        smaller = with_section(run, "train", global_batch_size=rows)
        best = search(smaller, cluster, model, stages=False).best
        if best is not None:
            return best
    return None


USUAL_DAYS = 90.0
"""Longest run in days of an advised size if there is no deadline, unless all take longer."""


def right_sizes(
    config: PlanConfig, catalog: Mapping[str, Gpu], state_bytes: float, model: Model
) -> list[Size]:
    """Return the smallest of 1, 2, 4, ... GPUs of each type that meet the limits, cheapest first.

    Without a deadline the limit is `USUAL_DAYS`; if no type meets it, the fastest sizes are best.
    """
    limits = config.limits
    within = dataclasses.replace(limits, days=limits.days or USUAL_DAYS)
    in_time: list[Size] = []
    fastest: list[Size] = []
    for gpu in catalog.values():
        tried: list[Size] = []
        number = 1
        while number <= min(_MOST_GPUS, 16 * config.train.global_batch_size):
            may_fit = number * gpu.memory_bytes >= state_bytes
            size = size_of(config, Cluster.of(gpu, number), model) if may_fit else None
            tried += [size] if size is not None else []
            if size is not None and not within.late(size.cost):
                in_time.append(size)
                break
            number *= 2  # more are faster
        fastest += sorted(tried, key=lambda size: size.cost.days)[:1]
    best = in_time or ([] if limits.days else fastest)
    affordable = [size for size in best if not limits.dear(size.cost)]
    return sorted(affordable, key=lambda size: size.cost.money)
