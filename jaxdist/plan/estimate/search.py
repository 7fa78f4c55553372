"""Search the best mesh and settings for a run on a cluster, with reasons against other meshes.

On each mesh that passes the rules of training, the search varies remat, the ZeRO stage,
microbatches, the pipeline's gathers and virtual stages, and the context-parallel exchange. It never
changes the global batch, the model or the optimizer. Short rows are not split over `context`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any, get_args

from jaxdist.config import RunConfig
from jaxdist.core.attention.context_parallel import Exchange
from jaxdist.core.axis import divisors_of
from jaxdist.core.mesh import MeshSpec, factorisations
from jaxdist.core.parallel.axes import AXES
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.virtual_stages import MOST
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.types import Model, offloaded_names, rows_per_example
from jaxdist.hardware import Cluster
from jaxdist.plan.estimate.job import Job, with_section
from jaxdist.plan.estimate.memory import MemoryEstimate, estimate_memory, usable_bytes
from jaxdist.plan.estimate.remat import NESTED_POLICIES, policies_of
from jaxdist.plan.estimate.time import StepTime, estimate_time
from jaxdist.runtime.formatting.numbers import in_bytes, percent, relative_speed
from jaxdist.settings import ConfigError
from jaxdist.settings.schema import flag_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings on a mesh, with estimated memory and memory limit per device, and step time."""

    job: Job
    memory: MemoryEstimate
    time: StepTime
    usable_bytes: float

    @classmethod
    def of(cls, job: Job, memory: MemoryEstimate | None = None) -> Candidate:
        """Return the candidate of a job; pass `memory` to avoid estimating it again."""
        return cls(
            job=job,
            memory=memory or estimate_memory(job),
            time=estimate_time(job),
            usable_bytes=usable_bytes(job),
        )

    @property
    def fits(self) -> bool:
        """Return True if the memory fits on one device."""
        return self.memory.total_bytes <= self.usable_bytes

    def flags(self, base: RunConfig) -> dict[str, str]:
        """Return flag -> value of the mesh, and of the other settings that differ from `base`."""
        spec = self.job.spec
        before, after = _settings(base, spec), _settings(self.job.config, spec)
        changed = {name: value for name, value in after.items() if value != before[name]}
        texts = {n: str(v).lower() if isinstance(v, bool) else str(v) for n, v in changed.items()}
        return {"mesh": str(spec)} | texts

    def command(self, base: RunConfig) -> str:
        """Return `flags` as text, to append to the user's command."""
        return " ".join(f"{flag_of(n)} {value}" for n, value in self.flags(base).items())


_MAY_CHANGE = (
    *("train.remat", "train.num_microbatches", "train.loss_chunk_tokens"),
    *("train.global_batch_size", "train.offload_optimizer", "optim.moment_dtype"),
    "precision.compute_dtype",
)
"""Settings in which candidates may differ, besides those of mesh and pipeline."""


def _settings(config: RunConfig, spec: MeshSpec) -> dict[str, object]:
    """Return flag -> value of the settings in which candidates may differ."""
    settings = {name: operator.attrgetter(name)(config) for name in _MAY_CHANGE}
    pipeline = dataclasses.asdict(config.pipeline) if spec[PIPELINE] > 1 else {}
    exchange = {"mesh.context_attention": config.mesh.context_attention}
    return {
        "zero": config.mesh.zero,
        **(exchange if spec[CONTEXT] > 1 else {}),
        **settings,
        **{f"pipeline.{name}": value for name, value in pipeline.items()},
    }


CONTEXT_FROM = 16_384
"""Minimum `seq_len` for which meshes with a context axis are searched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Best candidate of each legal mesh: those that fit, by `_rank`; then the others, by memory.

    `refused` maps each illegal mesh to the first rule that it violates.
    """

    choices: tuple[Candidate, ...]
    refused: dict[MeshSpec, str]

    @property
    def best(self) -> Candidate | None:
        """The first candidate; None if it does not fit, and so none does."""
        return self.choices[0] if self.choices and self.choices[0].fits else None


def search(
    config: RunConfig, cluster: Cluster, model: Model | None = None, *, stages: bool = True
) -> SearchResult:
    """Return the best settings on each legal mesh of a cluster; `stages=False` = no pipelines."""
    model = model or config.build_model()
    refused: dict[MeshSpec, str] = {}
    choices = []
    left_out = [] if stages else [PIPELINE]
    left_out += [] if config.train.seq_len >= CONTEXT_FROM else [CONTEXT]
    special = [axis for axis in AXES if axis.weights == "split" and not axis.proposed]
    left_out += [axis for axis in special if not model.dims.keys() & axis.dims]
    for spec in factorisations(cluster.num_gpus, without=left_out):
        problems = _mesh_problems(config, spec, model)
        if problems:
            refused[spec] = problems[0]
            continue
        try:
            choice = _on_mesh(Job.of(config, spec, cluster, model))
        except ConfigError as error:  # no exchange on this mesh supports the attention kernel
            refused[spec] = error.problems[0]
            continue
        if choice is not None:
            choices.append(choice)
    return SearchResult(
        choices=tuple(sorted(choices, key=_rank)),
        refused=refused,
    )


def why_not(choice: Candidate, best: Candidate) -> str:
    """Return why a candidate is worse than the best one; "" for the best itself."""
    if choice.job.spec == best.job.spec and choice.job.config == best.job.config:
        return ""
    if not choice.fits:
        return (
            f"does not fit: {in_bytes(choice.memory.total_bytes)} of "
            f"{in_bytes(choice.usable_bytes)} usable ({choice.memory.largest(2)})"
        )
    if choice.time.seconds < 1.005 * best.time.seconds:
        is_faster = choice.time.seconds < 0.995 * best.time.seconds
        speed = relative_speed(choice.time.seconds, best.time.seconds) if is_faster else "as fast"
        is_complex = _complexity(choice.job) > _complexity(best.job)
        return f"{speed}, " + ("but a more complex mesh" if is_complex else "within the error")
    losing, winning = choice.time.parts, best.time.parts
    more = {name: s - winning.get(name, 0.0) for name, s in losing.items()}
    cause = max(more, key=lambda name: more[name])
    why = _CAUSES.get(cause, cause)
    if cause == "memory-bound kernels" and choice.job.spec[TENSOR] >= best.job.spec[TENSOR]:
        why = "weights are cast and gradients accumulated more often"
        if (choice.job.attention, best.job.attention) == ("blockwise", "cudnn"):
            why = "attention runs block by block, and its scores pass through memory"
    part = percent(more[cause] / best.time.seconds, 0, sign=True)
    return f"{relative_speed(choice.time.seconds, best.time.seconds)}: {why} ({part})"


_CAUSES = {
    "products": "more recomputation, or smaller products",
    "attention": "more recomputation, or uneven load",
    "memory-bound kernels": "norms and residuals are not split over tensor",
    "launch gaps": "more and smaller microbatches",
    "optimizer": "each GPU updates more parameters",
    "pipeline bubble": "stages wait for each other",
    "waiting for weights": "gathering weights is not hidden behind compute",
    "waiting for gradients": "reducing gradients is not hidden behind compute",
    "waiting for new parameters": "ZeRO gathers the new parameters after each step",
    "waiting for activations": "tensor parallelism reduces activations in every layer",
    "waiting for heads": "devices that share rows exchange heads in every layer",
    "waiting for keys and values": "keys and values travel between devices that share rows",
    "waiting for gradients of keys": "gradients of keys travel between devices that share rows",
    "waiting for stages": "activations move between stages",
}


def _rank(choice: Candidate) -> tuple[bool, float, int]:
    if not choice.fits:
        return True, *_bytes_rank(choice.job, choice.memory)
    return False, *_weighted_time(choice.job, choice.time)


def _bytes_rank(job: Job, memory: MemoryEstimate) -> tuple[float, int]:
    return memory.total_bytes, _complexity(job)


def _weighted_time(job: Job, step: StepTime) -> tuple[float, int]:
    split = _complexity(job)
    return step.seconds * (1 + _COMPLEXITY_COST * split), split


def _complexity(job: Job) -> int:
    return sum(axis.complexity for axis in job.spec.used) + job.config.mesh.zero


_COMPLEXITY_COST = 0.05
"""Speedup that justifies one more degree of mesh complexity: the error of the estimate."""


def _mesh_problems(config: RunConfig, spec: MeshSpec, model: Model) -> list[str]:
    # The search chooses microbatches, remat and exchange: only check that a legal choice exists.
    config = with_section(config, "train", num_microbatches=0, remat="full")
    return with_section(config, "mesh", context_attention="auto").mesh_problems(spec, model)


def _on_mesh(job: Job) -> Candidate | None:
    """Return the best settings on a mesh; None if none is legal."""
    limit = usable_bytes(job)
    best: Candidate | None = None
    smallest: tuple[Job, MemoryEstimate] | None = None
    too_large: set[tuple[Any, Any]] = set()
    for variant in _variants(job):
        is_nested = variant.config.train.remat in NESTED_POLICIES
        key = variant.config.mesh, variant.config.pipeline
        if is_nested and key in too_large:  # a policy that keeps less does not fit either
            continue
        examples = variant.rows // rows_per_example(variant.model.objective)
        counts = [n for n in range(1, examples + 1) if examples % n == 0]
        if variant.spec[PIPELINE] > 1:
            # Enough to keep stages busy; more reduce the bubble without enlarging the stash.
            counts = [n for n in counts if n >= 4 * variant.spec[PIPELINE]] or counts[-1:]
        if best is not None and variant.spec[PIPELINE] == 1:
            # More microbatches are slower still: the memory of a slower one does not matter.
            first = variant.with_microbatches(counts[0])
            if _rank(best) <= (False, *_weighted_time(first, estimate_time(first))):
                continue
        least = _least_memory(variant, counts, limit)
        if least[1].total_bytes <= limit:
            best = min(filter(None, (best, Candidate.of(*least))), key=_rank)
            continue
        if is_nested:
            too_large.add(key)
        if smallest is None or _bytes_rank(*least) < _bytes_rank(*smallest):
            smallest = least
    return best or (Candidate.of(*smallest) if smallest else None)


def _least_memory(job: Job, counts: list[int], limit: float) -> tuple[Job, MemoryEstimate]:
    """Return the job with the first microbatch count that fits, else with that of least memory."""
    tried: dict[int, tuple[Job, MemoryEstimate]] = {}

    def fits(index: int) -> bool:
        changed = job.with_microbatches(counts[index])
        tried[index] = changed, estimate_memory(changed)
        return tried[index][1].total_bytes <= limit

    last = len(counts) - 1
    # More microbatches need less memory from the second count on.
    if not fits(0) and last and fits(last):
        bisect.bisect_left(range(1, last), True, key=fits)
        return tried[min(i for i, (_, memory) in tried.items() if memory.total_bytes <= limit)]
    return min(tried.values(), key=lambda each: each[1].total_bytes)


def _variants(job: Job) -> Iterator[Job]:
    zeros = _zeros(job.config.mesh.zero, job.spec)
    # From least to most memory, after one of the user's own.
    current, remats = job.config.train.remat, policies_of(job)[::-1]
    cannot_offload = job.spec[PIPELINE] > 1 and offloaded_names(current)
    if not cannot_offload and current not in (*remats, "auto"):
        remats = [current, *remats]
    for exchange, zero in itertools.product(_best_exchanges(job), zeros):
        on_mesh = job.changed("mesh", zero=zero, context_attention=exchange)
        pipelines = [on_mesh.changed("pipeline", **changes) for changes in _pipelines(job)]
        legal = [one for one in pipelines if not _mesh_problems(one.config, one.spec, one.model)]
        for remat in remats:
            for one in legal:
                yield one.changed("train", remat=remat)


def exchanges(job: Job) -> list[str]:
    """Return the values of `mesh.context_attention` that are possible; if none, the job's own."""
    names = []
    for name in get_args(Exchange):
        with contextlib.suppress(ConfigError):
            changed = job.changed("mesh", context_attention=name)
            _ = changed.attention  # raises if the named kernel does not support it
            if changed.plan.exchange is not None:
                names.append(name)
    return names or [job.config.mesh.context_attention]


def _best_exchanges(job: Job) -> list[str]:
    """Return the exchanges that are not worse than another in both time and memory."""
    names = exchanges(job)
    if len(names) == 1:
        return names
    costs = {}
    for name in names:
        changed = job.changed("mesh", context_attention=name)
        costs[name] = (estimate_time(changed).seconds, estimate_memory(changed).total_bytes)
    beats = lambda one, other: one != other and one[0] <= other[0] and one[1] <= other[1]
    return [name for name in names if not any(beats(c, costs[name]) for c in costs.values())]


def _zeros(current: int, spec: MeshSpec) -> list[int]:
    if not any(axis.weights == "replicated" for axis in spec.used):
        return [0]
    return sorted({0, 1, current})


def _pipelines(job: Job) -> list[dict[str, Any]]:
    current, stages = job.config.pipeline, job.spec[PIPELINE]
    if stages == 1:
        return [{}]
    most = -(-job.model.num_layers // stages)
    own_count = current.num_virtual_stages or len(current.depths) // stages
    counts = {own_count, *(v for v in divisors_of(most) if v <= MOST)} - {0}
    gathers = ["action", "step"]
    if not any(axis.weights == "gathered" for axis in job.spec.used):
        gathers = [current.gather]
    own = {own_count: current.layers_per_stage}
    return [
        {"num_virtual_stages": v, "gather": g, "layers_per_stage": own.get(v, "auto")}
        for v in sorted(counts)
        for g in gathers
    ]


_SMALL_CHUNK = 256
"""Suggested number of tokens whose logits are in memory at a time."""


def smallest_changes(choice: Candidate) -> list[tuple[str, str, Candidate]]:
    """Return (flags, effect, changed candidate) of single changes that make a candidate fit.

    The mesh stays; the least disruptive change is first.
    """
    changes = [(flags, why, _costs(choice, job)) for flags, why, job in _changes(choice)]
    return [change for change in changes if change[-1].fits]


def _costs(choice: Candidate, job: Job) -> Candidate:
    return dataclasses.replace(Candidate.of(job), usable_bytes=choice.usable_bytes)


def _changes(choice: Candidate) -> Iterator[tuple[str, str, Job]]:
    """Yield (flags, effect, changed job) of each possible change."""
    job = choice.job
    config, spec = job.config, job.spec
    if job.loss_chunk > _SMALL_CHUNK:
        changed = job.changed("train", loss_chunk_tokens=_SMALL_CHUNK)
        yield f"--train.loss-chunk-tokens {_SMALL_CHUNK}", "fewer logits at once", changed
    for count in range(job.num_microbatches + 1, job.rows + 1):
        changed = job.changed("train", num_microbatches=count)
        if job.rows % count == 0 and _costs(choice, changed).fits:
            flag = f"--train.num-microbatches {count}"
            yield flag, "fewer rows at once, the same batch", changed
            break
    order = policies_of(job)
    index = order.index(job.remat) if job.remat in order else 0
    for remat in order[index + 1 :]:
        changed = job.changed("train", remat=remat)
        yield f"--train.remat {remat}", "backward recomputes more and keeps less", changed
    if any(axis.weights == "replicated" for axis in spec.used) and config.mesh.zero == 0:
        changed = job.changed("mesh", zero=1)
        if not changed.config.mesh_problems(spec, job.model):
            yield "--zero 1", "each replica keeps only its share of the optimizer moments", changed
    if spec[PIPELINE] > 1 and config.pipeline.gather == "step":
        changed = job.changed("pipeline", gather="action")
        why = "weights are gathered for each action instead of once"
        yield "--pipeline.gather action", why, changed
    if config.optim.moment_dtype == "float32" and config.optim.optimizer != "adafactor":
        changed = job.changed("optim", moment_dtype="bfloat16")
        yield "--optim.moment-dtype bfloat16", "first moments take half the bytes", changed
    if config.optim.moment_dtype != "int8" and config.optim.optimizer != "adafactor":
        changed = job.changed("optim", moment_dtype="int8")
        why = "each moment takes one byte and a scale per 256 parameters"
        yield "--optim.moment-dtype int8", why, changed
    rows = 0 if spec[PIPELINE] > 1 or config.train.batch_schedule else job.rows
    while rows := rows // 2:
        batch = rows * spec.num_replicas
        changed = job.changed("train", global_batch_size=batch, num_microbatches=1)
        if _costs(choice, changed).fits:
            flags = f"--train.global-batch-size {batch} --train.num-microbatches 1"
            why = "a smaller batch, whose gradients are not accumulated; lower optim.peak_lr too"
            yield flags, why, changed
            break
