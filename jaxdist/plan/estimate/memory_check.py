"""Memory check of a run on its GPUs: by the estimate, and then by the compiled step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxdist.config import RunConfig
from jaxdist.core.attention.kernel_check import KernelCheck
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import Model
from jaxdist.hardware import GPUS, Cluster, Gpu, gpu_of
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import TEACHER, MemoryEstimate, estimate_memory
from jaxdist.plan.estimate.remat import TOLERANCE, RematChoice, choose_remat
from jaxdist.plan.estimate.search import Candidate, search, smallest_changes
from jaxdist.runtime import coordination
from jaxdist.runtime.backend import PINNED_LIMIT_GIB, host_memory_bytes, pinned_limit_bytes
from jaxdist.runtime.formatting.numbers import in_bytes, percent
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

_MAX_RETRIES = 2  # a compilation takes minutes
_NEGLIGIBLE = 0.01
"""Share of the limit below which a wrong estimate is not worth a warning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Estimated memory of a GPU, and its allocator's limit; `own_gpus`: those of this process."""

    job: Job
    memory: MemoryEstimate
    limit_bytes: float
    remat: RematChoice | None
    own_gpus: int = 1

    @classmethod
    def of(
        cls,
        config: RunConfig,
        spec: MeshSpec,
        devices: Sequence[Any],
        model: Model | None,
        host_of: Mapping[int, str] | None = None,
        *,
        own_moment_bytes: float | None = None,
    ) -> Budget | None:
        """Return the budget of a run on its devices; None unless they are GPUs of known limit."""
        cluster_and_limit = _cluster_of(config, devices, host_of or {})
        if cluster_and_limit is None:
            return None
        cluster, limit = cluster_and_limit
        if gpu_of(cluster.gpu.name) is None and not config.monitoring.peak_tflops:
            log.warning(
                "GPU %r is not in the catalog: choices such as remat assume the rates of an H100, "
                "and MFU and cost are not reported. Set --monitoring.peak-tflops to its dense "
                "TFLOP/s in %s; jaxdist plan reads all data of a GPU from --hardware",
                *(cluster.gpu.name, config.precision.resolve("gpu")),
            )
        own = sum(device.process_index == jax.process_index() for device in devices)
        job = dataclasses.replace(
            Job.of(config, spec, cluster, model), own_moment_bytes=own_moment_bytes
        )
        return cls._of_job(job, limit, own)

    @classmethod
    def _of_job(cls, job: Job, limit: float, own_gpus: int) -> Budget:
        remat = choose_remat(job, limit)
        job = job if remat is None else remat.job
        memory = estimate_memory(job)
        return cls(job=job, memory=memory, limit_bytes=limit, remat=remat, own_gpus=own_gpus)

    def replanned(self, packed: bool, checks: tuple[KernelCheck, ...]) -> Budget:
        """Return the budget, estimated again for packed or unpacked rows and checks of kernels."""
        job = self.job if self.remat is None else self.job.changed("train", remat="auto")
        return Budget._of_job(
            dataclasses.replace(job, packed=packed, checks=checks), self.limit_bytes, self.own_gpus
        )

    def line(self) -> str:
        """Return the startup log's line: estimated bytes of one GPU, limit, and largest parts."""
        rough = "; activations are an upper bound" if self.memory.is_rough else ""
        return (
            f"memory estimate: {in_bytes(self.memory.total_bytes)} of each GPU, "
            f"{in_bytes(self.limit_bytes)} may be used ({self.memory.largest(3)}{rough})"
        )

    def check(self) -> None:
        """Raise `ConfigError` if the run surely exceeds the limit, or exceeds host memory."""
        self._check_host()
        sure = self.memory.state_bytes if self.memory.is_rough else self.memory.total_bytes
        if sure * (1 - TOLERANCE) > self.limit_bytes:
            self._refuse("this run needs", self.memory.total_bytes, self.limit_bytes)

    def _check_host(self) -> None:
        """Raise `ConfigError` if activations exceed `PINNED_LIMIT_GIB`, or all arrays host memory.

        Moments count twice: those of a step that is being saved, and those of the next step.
        """
        moments, pinned = self.memory.process_bytes(self.own_gpus)
        on_host = self.job.cluster.gpus_per_node
        all_bytes = on_host / max(1, self.own_gpus) * (2 * moments + pinned)
        limits = (
            (self.own_gpus, pinned, pinned_limit_bytes(), f"{PINNED_LIMIT_GIB} allows a process"),
            (on_host, all_bytes, host_memory_bytes(), "the host has"),
        )
        for gpus, needed, limit, what in limits:
            if needed > limit:
                twice = " (moments twice during a save)" if moments and needed > pinned else ""
                raise ConfigError(
                    f"memory: {gpus} GPUs move {in_bytes(needed)}{twice} to host memory, but "
                    f"{what} {in_bytes(limit)}. Use --train.offload-optimizer=none or disk:/DIR, "
                    "--train.remat=full, more GPUs, or a higher limit."
                )

    def compare(self, stats: Any) -> str:
        """Return a warning if the step's `memory_analysis()` is not as estimated, else ""."""
        needed = executable_bytes(stats) + self.memory.state.get(TEACHER, 0.0)
        error = self.memory.total_bytes / needed - 1
        # Of a small step, even a large error says nothing about whether the run fits.
        is_small = abs(error) * needed <= _NEGLIGIBLE * self.limit_bytes
        if self.memory.is_rough or abs(error) <= TOLERANCE or is_small:
            return ""
        return (
            f"memory: the compiled step takes {in_bytes(needed)} of each GPU; the estimate was "
            f"{in_bytes(self.memory.total_bytes)} ({percent(error, 0, sign=True)}), so plans for "
            "this run are off by as much"
        )

    def fit(
        self,
        compile_with: Callable[[Budget], Any],
        agree: Callable[..., Any] = coordination.decide_from,
    ) -> None:
        """Compile the step; if it needs too much memory, try remat policies that save less.

        Only remat "auto" is changed, at most twice. `compile_with` compiles the step of a budget
        and returns its `memory_analysis()`. `agree` decides from the values of all processes.
        Raises `ConfigError` if the step needs more than the allocator may use.
        """
        budget = self
        for tries in range(_MAX_RETRIES + 1):
            stats = compile_with(budget)
            teacher = budget.memory.state.get(TEACHER, 0.0)
            own = [executable_bytes(stats) + teacher, budget.limit_bytes]
            merge = lambda values: [max(n for n, _ in values), min(limit for _, limit in values)]
            needed, limit = agree("compiled_memory", own, merge)
            if needed <= limit:
                return
            # Target of the estimate, if its relative error stays the same.
            target = limit * budget.memory.total_bytes / needed
            remat = None if budget.remat is None else budget.remat.smaller(target)
            if remat is None or tries == _MAX_RETRIES:
                budget = dataclasses.replace(budget, limit_bytes=limit)
                budget._refuse("the compiled step takes", needed, target)
            log.warning(
                "memory: the compiled step with remat %s (auto) takes %s of each GPU, but %s may "
                "be used. Using remat %s instead",
                *(budget.job.remat, in_bytes(needed), in_bytes(limit), remat.job.remat),
            )
            memory = estimate_memory(remat.job)
            budget = dataclasses.replace(budget, job=remat.job, memory=memory, remat=remat)

    def _refuse(self, what: str, needed: float, target: float) -> NoReturn:
        raise ConfigError(
            f"memory: {what} {in_bytes(needed)} of each GPU, but {in_bytes(self.limit_bytes)} "
            f"may be used. {self._fix(target)} Use --override=memory to try anyway."
        )

    def _fix(self, usable: float) -> str:
        """Return how to reduce the estimate to `usable` bytes: a change, or else another mesh."""
        choice = dataclasses.replace(Candidate.of(self.job), usable_bytes=usable)
        for flags, why, _ in smallest_changes(choice):
            return f"Add {flags}: {why}."
        best = search(self.job.config, self.job.cluster, self.job.model).best
        if best is not None:
            return f"Use {best.command(self.job.config)}."
        return (
            "It fits no mesh of these GPUs. Run `jaxdist plan` to find how many it needs, or use a "
            "smaller model or shorter rows."
        )


def executable_bytes(stats: Any) -> int:
    """Return the bytes per device that an executable needs, from `memory_analysis()`."""
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    return int(arguments + outputs - stats.alias_size_in_bytes + stats.temp_size_in_bytes)


def needs_of(
    config: RunConfig,
    devices: Sequence[Any],
    model: Model | None,
    host_of: Mapping[int, str] | None = None,
) -> Callable[[MeshSpec], tuple[float, float]] | None:
    """Return mesh -> (bytes needed on one GPU, usable bytes); None without GPUs of known limit."""
    cluster_and_limit = _cluster_of(config, devices, host_of or {})
    if cluster_and_limit is None:
        return None
    cluster, limit = cluster_and_limit

    def needs(spec: MeshSpec) -> tuple[float, float]:
        return estimate_memory(Job.of(config, spec, cluster, model)).total_bytes, limit

    return needs


def allocator_limit(devices: Sequence[Any]) -> int | None:
    """Return the bytes that jax may use of one of this process's devices; None if unknown."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    try:
        stats = local[0].memory_stats() if local else None
    except jax.errors.JaxRuntimeError:  # devices of a topology description have no memory stats
        stats = None
    return (stats or {}).get("bytes_limit")


def _cluster_of(
    config: RunConfig, devices: Sequence[Any], host_of: Mapping[int, str]
) -> tuple[Cluster, float] | None:
    """Return the devices as a cluster, and one's allocator limit; None on CPUs or if unknown."""
    first = devices[0]
    if first.platform not in ("gpu", "cuda"):
        return None
    limit = allocator_limit(devices)
    if not limit:
        return None
    processes = {device.process_index for device in devices}
    nodes = len({host_of.get(process, str(process)) for process in processes})
    gpu = gpu_of(first.device_kind) or _unknown_gpu(first, limit, config.monitoring.peak_tflops)
    return Cluster(gpu=gpu, num_nodes=nodes, gpus_per_node=len(devices) // nodes), float(limit)


def _unknown_gpu(device: Any, limit: float, peak_tflops: float) -> Gpu:
    """Return an H100 with the memory of `device`, and its rates scaled to `peak_tflops` if set."""
    h100 = GPUS["h100"]
    scale = peak_tflops * 1e12 / h100.peak_flops["bfloat16"] if peak_tflops else 1.0
    return dataclasses.replace(
        h100,
        name=device.device_kind,
        compute_capability=str(getattr(device, "compute_capability", "9.0")),
        memory_bytes=int(limit),
        peak_flops={dtype: scale * peak for dtype, peak in h100.peak_flops.items()},
        memory_bandwidth=scale * h100.memory_bandwidth,
        power_w=scale * h100.power_w,
    )
