"""The plan of a run on one cluster: settings, compiler check, cost."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxdist.checkpoint.local.copies import FailureDomain, Survivable, holders, survivable
from jaxdist.config import RunConfig
from jaxdist.core import matmul
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import axes
from jaxdist.core.parallel.data import DATA
from jaxdist.hardware import Cluster, Gpu
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled, compile_step
from jaxdist.plan.estimate.cost import (
    FAILURES_PER_1000_GPU_DAYS,
    Bill,
    Limits,
    Saving,
    bill,
    saving_of,
)
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import usable_bytes
from jaxdist.plan.estimate.products import NARROW_PEAKS
from jaxdist.plan.estimate.remat import choose_remat
from jaxdist.plan.estimate.restart import Restart, restart_of
from jaxdist.plan.estimate.search import Choice, Found, search
from jaxdist.plan.estimate.traffic import Flow, flows_of
from jaxdist.plan.options import PlanConfig
from jaxdist.settings import ConfigError

_MOST_COMPILATIONS = 3
"""How many candidates are compiled until one fits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of compiling a choice.

    Attributes:
        refuted: faster choices that were estimated to fit, but do not once compiled.
    """

    outcome: CompiledStep | NotCompiled
    refuted: tuple[tuple[Choice, CompiledStep], ...] = ()

    @property
    def compiled(self) -> CompiledStep | None:
        """The compiled step, if there is one."""
        return self.outcome if isinstance(self.outcome, CompiledStep) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on a cluster.

    Attributes:
        base: the user's settings.
        choice: the planned settings: the user's mesh, or the best one.
        asked: the user named the mesh.
        flows: traffic of one device in one step.
        proof: result of the compiler; None if it was disabled.
        restart: from the end of a process to the next trained step.
        saving: checkpoints, with hardware failures only; `spot_saving`: preemptions too.
        on_demand: the run at the list price; `spot`: at the spot price, with preemptions.
        limits: days and money that the run may take.
    """

    base: RunConfig
    cluster: Cluster
    choice: Choice
    asked: bool
    found: Found
    flows: tuple[Flow, ...]
    proof: Proof | None
    restart: Restart
    saving: Saving
    on_demand: Bill
    spot: Bill
    spot_saving: Saving
    limits: Limits

    @property
    def total_bytes(self) -> float:
        """Bytes of one device: compiled if possible, else estimated."""
        compiled = self.proof.compiled if self.proof else None
        return compiled.memory.total_bytes if compiled else self.choice.memory.total_bytes

    @property
    def fits(self) -> bool:
        """The verdict."""
        return self.total_bytes <= self.choice.usable_bytes


def narrow_problems(matmul_dtype: str, num_layers: int, gpu: Gpu) -> list[str]:
    """Return why GPUs cannot multiply in a format, or why its rate is unknown."""
    problems = matmul.problems(matmul_dtype, num_layers, "gpu", gpu.compute_capability)
    unknown = [dtype for dtype in NARROW_PEAKS.get(matmul_dtype, ()) if dtype not in gpu.peak_flops]
    if unknown and not problems:
        problems.append(
            f"precision.matmul_dtype={matmul_dtype} on GPU {gpu.name!r}, whose peak_tflops lack "
            f"{' and '.join(unknown)}. Add it to the file of --hardware."
        )
    return problems


def make_plan(config: PlanConfig, cluster: Cluster, mesh: str) -> Plan:
    """Plan a run on one cluster, on a mesh; "" = on the best.

    Raises:
        ConfigError: the mesh is not legal there, or the GPUs do not support the dtype.
    """
    run, model = config.run, config.run.build_model()
    problems = narrow_problems(run.precision.matmul_dtype, model.num_layers, cluster.gpu)
    if problems:
        raise ConfigError(problems)
    found = search(run, cluster, model)
    if mesh:
        spec = MeshSpec.parse(mesh, cluster.num_gpus)
        run.check_mesh(spec, model, cluster.num_gpus)
        job = Job.of(run, spec, cluster, model)
        remat = choose_remat(job, usable_bytes(job))
        candidates = [Choice.of(job if remat is None else remat.job)]
    else:
        candidates = list(found.choices)
        if not candidates:
            # No mesh is legal: the check says why, and what to change.
            run.check_mesh(MeshSpec.over(DATA, cluster.num_gpus), model, cluster.num_gpus)
    choice, proof = _prove(candidates, config, asked=bool(mesh))
    return _priced(config, cluster, choice, bool(mesh), found, proof)


def _prove(
    candidates: list[Choice], config: PlanConfig, *, asked: bool
) -> tuple[Choice, Proof | None]:
    """Return the first candidate that fits once compiled, or the first of all."""
    if not config.compile:
        return candidates[0], None
    refuted: list[tuple[Choice, CompiledStep]] = []
    for choice in candidates[: 1 if asked else _MOST_COMPILATIONS]:
        if refuted and not choice.fits:
            break
        job = choice.job
        outcome = compile_step(
            job.config, job.spec, job.cluster, timeout_s=config.compile_timeout_s
        )
        if isinstance(outcome, NotCompiled) or outcome.memory.total_bytes <= choice.usable_bytes:
            return choice, Proof(outcome=outcome, refuted=tuple(refuted))
        refuted.append((choice, outcome))
    choice, compiled = refuted[0]
    return choice, Proof(outcome=compiled, refuted=tuple(refuted[1:]))


def _priced(
    config: PlanConfig,
    cluster: Cluster,
    choice: Choice,
    asked: bool,
    found: Found,
    proof: Proof | None,
) -> Plan:
    saving, on_demand = costs_of(config, choice)
    spot_saving, spot = costs_of(config, choice, spot=True)
    compiled = proof.compiled if proof else None
    return Plan(
        base=config.run,
        cluster=cluster,
        choice=choice,
        asked=asked,
        found=found,
        flows=tuple(flows_of(choice.job)),
        proof=proof,
        restart=restart_of(
            choice.job,
            checkpoint_bytes=saving.bytes,
            storage_bytes_per_s=config.storage_gb_per_s * 1e9 * cluster.num_nodes,
            step_s=choice.time.seconds,
            compile_s=compiled.compile_s if compiled else None,
        ),
        saving=saving,
        on_demand=on_demand,
        spot=spot,
        spot_saving=spot_saving,
        limits=config.limits,
    )


def costs_of(config: PlanConfig, choice: Choice, *, spot: bool = False) -> tuple[Saving, Bill]:
    """Return checkpoints, time and money of a complete run, lost time included.

    At the price on demand with hardware failures, or at that of `spot` with preemptions too.
    """
    job, cluster = choice.job, choice.job.cluster
    failures = config.failures_per_day
    if failures < 0:
        failures = FAILURES_PER_1000_GPU_DAYS * cluster.num_gpus / 1000
    saving = saving_of(
        job,
        failures_per_day=failures + (config.preemptions_per_day if spot else 0.0),
        storage_bytes_per_s=config.storage_gb_per_s * 1e9 * cluster.num_nodes,
        restart_s=config.restart_s,
    )
    gpu = cluster.gpu
    cost = bill(
        tokens=config.tokens or float(config.train.steps * job.tokens_per_step),
        tokens_per_s=choice.time.tokens_per_s,
        num_gpus=cluster.num_gpus,
        price=gpu.spot_price_per_hour if spot else gpu.price_per_hour,
        lost=saving.lost,
    )
    return saving, cost


def survivable_on(
    spec: MeshSpec,
    num_nodes: int,
    neighbours: int,
    *,
    zero: int = 0,
) -> Survivable:
    """Return the node losses that local saves survive, with racks unknown.

    Nodes take the mesh's devices in order. Two nodes hold the same shards if their devices have the
    same indices along every axis that shards parameters or moments. An array that such an axis does
    not divide is replicated, so a run may survive more.
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
