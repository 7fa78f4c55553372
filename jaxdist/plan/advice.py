"""Advice on a plan: sentences with numbers, and flags to copy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.core import matmul
from jaxdist.core.axis import Axis
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import axes
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.data import DATA
from jaxdist.hardware import Gpu
from jaxdist.plan.estimate.attention import imbalance
from jaxdist.plan.estimate.cost import (
    DAY_S,
    CheckpointCost,
    Limits,
    RunCost,
    break_even,
    checkpoint_bytes,
)
from jaxdist.plan.estimate.job import Job, with_section
from jaxdist.plan.estimate.search import CONTEXT_FROM, Candidate, exchanges, smallest_changes
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.plan.options import PlanConfig
from jaxdist.plan.planner import (
    USUAL_DAYS,
    Plan,
    Size,
    compared,
    narrow_problems,
    right_sizes,
    size_of,
    smaller_batch,
    survivable_losses,
)
from jaxdist.runtime.formatting.numbers import duration, in_bytes, money, percent, relative_speed
from jaxdist.settings.schema import join_choices

_WORTH_NARROW = 0.95
"""Suggest a narrow `matmul_dtype` if the step then takes less than this share of its time."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """One recommendation: a short topic, and sentences."""

    topic: str
    text: str


def advise(plan: Plan, config: PlanConfig, catalog: Mapping[str, Gpu]) -> list[Advice]:
    """Return all advice on a plan, on its fit first."""
    return [
        *_fit(plan),
        *_dtype(plan),
        *_mesh(plan),
        *_exchange(plan),
        *_size(plan, config, catalog),
        *_batch(plan),
        *_checkpoints(plan),
        *_local_saves(plan),
        *_restart(plan),
        *_spot(plan, config),
        *_compiler(plan),
    ]


def _fit(plan: Plan) -> Iterator[Advice]:
    choice, best = plan.choice, plan.search.best
    other = best.command(plan.base) if plan.mesh_is_fixed and best is not None else ""
    if plan.fits:
        if other and best is not None and choice.time.seconds > 1.05 * best.time.seconds:
            speed = relative_speed(best.time.seconds, choice.time.seconds)
            yield Advice("faster", f"{other} is estimated {speed} on the same GPUs.")
        return
    changes = smallest_changes(choice)
    for flags, why, changed in changes[:3]:
        slowdown = choice.time.tokens_per_s / changed.time.tokens_per_s - 1
        is_slower = abs(slowdown) >= 0.005
        cost = percent(slowdown, 0, sign=True) + " time" if is_slower else "no slower"
        size = in_bytes(changed.memory.total_bytes)
        yield Advice("make it fit", f"{flags}: {why}; {size}, {cost}.")
    if best is None and not changes:
        smaller = smaller_batch(plan.base, plan.cluster, choice.job.model)
        if smaller is not None:
            size = in_bytes(smaller.memory.total_bytes)
            text = f"{smaller.command(plan.base)}: a smaller batch; {size}. {_lr_scaling(plan)}"
            yield Advice("make it fit", f"{text} adapts optim.peak_lr.")
        text = (
            "no mesh of these GPUs fits: see `other GPUs`. If the optimizer's moments are the "
            "largest part, add --train.offload-optimizer=host, or disk:/DIR without enough host "
            "memory."
        )
        yield Advice("make it fit", text)
    elif best is not None and other:
        size = in_bytes(best.memory.total_bytes)
        yield Advice("make it fit", f"{other} fits on these GPUs ({size}).")


def _dtype(plan: Plan) -> Iterator[Advice]:
    job = plan.choice.job
    if str(job.dtype) not in job.cluster.gpu.peak_flops:
        yield Advice(
            "number format",
            f"{job.cluster.gpu.name} has no {job.dtype} matrix units: add "
            "--precision.compute-dtype float16 (with loss scaling, which is automatic).",
        )
    if job.config.precision.matmul_dtype != "auto" or not str(job.dtype).startswith("bfloat16"):
        return
    faster = [
        f"{name} {percent(1 - seconds / plan.choice.time.seconds, 0)}"
        for name in matmul.FORMATS
        if (seconds := _step_s(plan, name)) < _WORTH_NARROW * plan.choice.time.seconds
    ]
    if faster:
        yield Advice(
            "number format",
            f"--precision.matmul-dtype would shorten a step by an estimated {', '.join(faster)}"
            ", with a loss that must be compared over a few hundred steps first.",
        )


def _step_s(plan: Plan, matmul_dtype: Any) -> float:
    job = plan.choice.job
    narrow = narrow_problems(matmul_dtype, job.model.num_layers, job.cluster.gpu)
    if "experts" in job.model.dims or narrow:
        return math.inf
    config = with_section(job.config, "precision", matmul_dtype=matmul_dtype)
    return estimate_time(Job.of(config, job.spec, job.cluster, job.model)).seconds


def _mesh(plan: Plan) -> Iterator[Advice]:
    choice, spec = plan.choice, plan.choice.job.spec
    if plan.cluster.num_gpus == 1:
        yield Advice("mesh", "one GPU: nothing to split.")
        return
    reasons = [_on_data(plan)]
    by_complexity = sorted(axes.AXES, key=lambda axis: axis.complexity)
    reasons += [_on_axis(plan, axis) for axis in by_complexity if axis is not DATA]
    if choice.job.config.mesh.zero:
        reasons.append(
            f"ZeRO-{choice.job.config.mesh.zero} keeps only a share of the moments on each of the "
            f"{spec[DATA]} replicas."
        )
    yield Advice("mesh", " ".join(filter(None, reasons)))


def _on_data(plan: Plan) -> str:
    spec = MeshSpec.over(DATA, plan.cluster.num_gpus)
    alone = next((c for c in plan.search.choices if c.job.spec == spec), None)
    if alone is None:
        return "Data parallelism alone is not legal for this run."
    size, limit = in_bytes(alone.memory.total_bytes), in_bytes(alone.usable_bytes)
    if not alone.fits:
        state = in_bytes(alone.memory.state_bytes)
        return (
            f"Data parallelism alone does not fit: it needs {size} of {limit}, {state} of that for "
            "parameters, moments and other state."
        )
    if plan.choice.job.spec == alone.job.spec:
        return f"Data parallelism alone is enough: a replica takes {size} of {limit}."
    speed = _compared(alone, plan.choice)
    return f"Data parallelism alone also fits ({size}) and is {speed}."


def _on_axis(plan: Plan, axis: Axis) -> str:
    """Return why the mesh uses an axis, or its effect on speed, as text; "" if unknown."""
    used = plan.choice.job.spec[axis]
    others = [c for c in plan.search.choices if (c.job.spec[axis] > 1) != (used > 1)]
    fitting = [c for c in others if c.fits]
    short, what = axis.short, f"({axis.help})"
    if used > 1 and not others:
        return f"{short}={used} {what}: no mesh without it is legal."
    if used > 1 and not fitting:
        least = min(others, key=lambda c: c.memory.total_bytes)
        size = in_bytes(least.memory.total_bytes)
        return (
            f"{short}={used} {what}: nothing fits without it; the least, {least.job.spec}, needs "
            f"{size}."
        )
    if axis is CONTEXT and not others and plan.choice.job.model.context_parallel:
        return (
            f"Use {short} {what} when rows have {CONTEXT_FROM:,} tokens or more, or when one row "
            "does not fit."
        )
    if not fitting:
        return ""
    other = min(fitting, key=lambda c: c.time.seconds)
    speed = _compared(other, plan.choice)
    if used > 1:
        return f"{short}={used} {what}: the fastest mesh without it ({other.job.spec}) is {speed}."
    return f"No {short}: the fastest mesh with it ({other.job.spec}) is {speed}."


def _compared(other: Candidate, choice: Candidate) -> str:
    other_s, chosen_s = other.time.seconds, choice.time.seconds
    if abs(other_s / chosen_s - 1) < 0.02:
        return "as fast, within the accuracy of the estimate"
    return relative_speed(other_s, chosen_s)


def _exchange(plan: Plan) -> Iterator[Advice]:
    choice = plan.choice
    job, used = choice.job, choice.job.plan.exchange
    if used is None:
        return
    sentences = [f"{used.exchange}: {_EXCHANGES[used.exchange]}."]
    allowed = exchanges(job)
    for name in allowed:
        if name != used.exchange:
            other = Candidate.of(job.changed("mesh", context_attention=name))
            size = in_bytes(other.memory.total_bytes)
            fits = "" if other.fits else f" and does not fit ({size})"
            sentences.append(f"{name} is {_compared(other, choice)}{fits}.")
    if imbalance(job) > _UNEVEN:
        packed = job.config.data.packs_documents
        rows = "rows of 16 documents of random lengths" if packed else "this window"
        shares = [
            f"{name} {percent(imbalance(job.changed('mesh', context_attention=name)), 0)}"
            for name in allowed
        ]
        sentences.append(
            f"With {rows} the busiest device attends to more keys than the average, which the "
            f"times include: {', '.join(shares)}."
        )
    missing = [name for name in _EXCHANGES if name not in allowed]
    if missing:
        sentences.append(f"Heads, nodes or the kernel do not allow {join_choices(missing)}.")
    yield Advice("context attention", " ".join(sentences))


_UNEVEN = 0.05  # do not mention a smaller load imbalance
_EXCHANGES = {
    "ring": "keys and values travel from device to device while the local ones are multiplied",
    "all_gather": "every device gets all keys and values",
    "all_to_all": "an all-to-all gives each device complete rows of some heads",
    "hybrid": "an all-to-all between neighbors, and a ring of keys and values between groups",
}


def _size(plan: Plan, config: PlanConfig, catalog: Mapping[str, Gpu]) -> Iterator[Advice]:
    model, state_bytes = plan.choice.job.model, checkpoint_bytes(plan.choice.job)
    sizes = right_sizes(config, compared(catalog, plan.cluster.gpu), state_bytes, model)
    batch = plan.base.train.global_batch_size
    if sizes:
        within = f"within {USUAL_DAYS:.0f} days if possible"
        within = "within the deadline and budget" if plan.limits != Limits() else within
        text = f"Of 1, 2, 4, ... GPUs of a type, the fewest that fit and end {within}, cheapest "
        text += f"first: {'; '.join(_offer(size) for size in sizes[:4])}."
    else:
        text = (
            "Impossible: no mesh without a pipeline of 1, 2, 4, ... GPUs of any type fits the run, "
            f"is legal for a batch of {batch} rows, and meets --deadline and --budget. Raise them, "
            "or use a smaller model, a shorter train.seq_len or a larger batch, which more GPUs "
            "can share."
        )
    yield Advice("other GPUs", text)
    if plan.fits:
        yield Advice("more GPUs", _scaling(plan, config))


def _offer(size: Size) -> str:
    return (
        f"{size.cluster.num_gpus}× {size.cluster.gpu.name} ({size.choice.job.spec}): "
        f"{duration(DAY_S * size.cost.days)}, {money(size.cost.money, 'USD')}"
    )


def _scaling(plan: Plan, config: PlanConfig) -> str:
    best, gpu, number = plan.search.best or plan.choice, plan.cluster.gpu, 2 * plan.cluster.num_gpus
    cluster, model = plan.cluster.resized(number), plan.choice.job.model
    double = size_of(config, cluster, model)
    if double is None:
        return (
            f"{number} {gpu.name} do not help: no mesh of them without a pipeline is legal for "
            f"train.global_batch_size={plan.base.train.global_batch_size} and fits. Use a larger "
            "batch."
        )
    time = double.choice.time
    gain = time.tokens_per_s / best.time.tokens_per_s
    verdict = "worth it if time matters" if gain > _WORTH_IT else "not worth it"
    compute = ("products", "attention", "memory-bound kernels")
    seconds, rest = max((s, name) for name, s in time.parts.items() if name not in compute)
    return (
        f"{number} {gpu.name} are {gain:.2f} times as fast for {2 / gain:.2f} times the money "
        f"({_offer(double)}): {verdict}. {percent(seconds / time.seconds, 0)} of a step is then "
        f"{rest}."
    )


_WORTH_IT = 1.6  # minimum speedup to recommend twice the GPUs


def _batch(plan: Plan) -> Iterator[Advice]:
    job, optim, rows = plan.choice.job, plan.base.optim, plan.base.train.global_batch_size
    text = (
        f"One step is {rows} rows, {job.tokens_per_step:,} {job.model.unit}, on any number of "
        f"GPUs, so optim.peak_lr={optim.peak_lr:g} remains valid. If you change "
        f"train.global_batch_size, {_lr_scaling(plan)} adapts the rate."
    )
    if job.rows == job.num_microbatches and job.spec.num_replicas > 1:
        text += (
            f" Each of the {job.spec.num_replicas} replicas has one row at a time: more replicas "
            "need a larger batch or fewer microbatches."
        )
    if (largest := plan.largest_batch) is not None:
        text += (
            f" The largest batch that fits at once, by the estimate: {largest.job.rows} rows on "
            f"each replica, {largest.command(plan.base)}."
        )
    warmup = optim.warmup_steps / max(1, plan.base.train.steps)
    if warmup > 0.2:
        text += f" Warmup is {percent(warmup, 0)} of the run; a few percent is usual."
    yield Advice("batch and learning rate", text)


def _lr_scaling(plan: Plan) -> str:
    optim = plan.base.optim
    if optim.lr_scaling != "none":
        return f"optim.lr_scaling={optim.lr_scaling}"
    rule = "linear" if optim.optimizer == "sgd" else "sqrt"
    return f"--optim.lr-scaling {rule}:{plan.base.train.global_batch_size}"


def _checkpoints(plan: Plan) -> Iterator[Advice]:
    cost = plan.checkpoints
    text = (
        f"A checkpoint is {in_bytes(cost.bytes)}. Training waits {duration(cost.copy_s)} for "
        f"the copy to host memory; writing takes {duration(cost.write_s)} in the background. A "
        f"save delays training by {duration(cost.stall_s)} in all. "
    )
    if math.isinf(cost.interval_s):
        yield Advice("checkpoints", text + "No failures are assumed.")
        return
    apart = f"one failure every {duration(cost.mean_time_to_failure_s)}"
    best = f"{duration(cost.interval_s)} (Daly 2006)"
    if cost.interval_s >= plan.on_demand.days * DAY_S:
        text += f"With {apart} the best interval, {best}, is longer than the run: save at its end."
    else:
        text += (
            f"With {apart}, save every {best}: {_save_flag(plan, cost)}. Saving, repeated work "
            f"and restarts then take {percent(cost.lost)} of the time."
        )
    yield Advice("checkpoints", text)


def _local_saves(plan: Plan) -> Iterator[Advice]:
    settings, job = plan.choice.job.config.checkpoint, plan.choice.job
    if not settings.local_dir:
        return
    zero = job.config.mesh.zero
    line = survivable_losses(
        job.spec, plan.cluster.num_nodes, settings.neighbours, zero=zero
    ).line()
    yield Advice("local saves", f"{line[0].upper()}{line[1:]}.")


def _restart(plan: Plan) -> Iterator[Advice]:
    restart, total = plan.restart, plan.restart.total
    slowest = sorted(restart.parts, key=lambda name: -restart.parts[name].likely)[:3]
    shares = [
        f"{name.replace('_', ' ')} {duration(restart.parts[name].likely)}"
        + f" from the {restart.tier}" * (name == "restore")
        for name in slowest
    ]
    text = (
        f"From the end of a process to the next trained step: about {duration(total.likely)} "
        f"({duration(total.low)} to {duration(total.high)}), mostly {', '.join(shares)}. A lost "
        f"host adds up to {duration(restart.lost_host_s)} until it counts as lost, and the start "
        f"of another; a hang is detected after {duration(restart.hang_s)}. The costs assume "
        f"--restart-s {plan.checkpoints.restart_s:.0f}. Timed on CPUs only."
    )
    yield Advice("restart", text)


def _save_flag(plan: Plan, cost: CheckpointCost) -> str:
    steps = plan.on_demand.tokens / plan.choice.job.tokens_per_step
    interval = min(cost.interval_s / plan.choice.time.seconds, steps)
    return f"--checkpoint.save-interval-steps {max(1, round(interval))}"


def _spot(plan: Plan, config: PlanConfig) -> Iterator[Advice]:
    gpu = plan.cluster.gpu
    if gpu.price_per_hour <= 0:
        return
    share = gpu.spot_price_per_hour / gpu.price_per_hour
    even = break_even(plan.checkpoints, price_share=share)
    cheaper = plan.spot.money < plan.on_demand.money
    yield Advice(
        "spot",
        f"At {gpu.spot_price_per_hour:.2f} USD a GPU-hour and "
        f"{config.preemptions_per_day:g} preemptions a day the run costs {_cost(plan.spot)}; on "
        f"demand {_cost(plan.on_demand)}. Spot is {'cheaper' if cheaper else 'not cheaper'}, with "
        f"{_save_flag(plan, plan.spot_checkpoints)}; the two cost the same at {even:.0f} "
        "interruptions a day.",
    )


def _cost(cost: RunCost) -> str:
    return f"{money(cost.money, 'USD')} and takes {duration(DAY_S * cost.days)}"


def _compiler(plan: Plan) -> Iterator[Advice]:
    for choice, step in plan.rejected:
        yield Advice(
            "refuted",
            f"{choice.job.spec} ({choice.command(plan.base)}) was estimated to fit, but compiled "
            f"it takes {in_bytes(step.memory.total_bytes)} of {in_bytes(choice.usable_bytes)}.",
        )
    for remark in plan.compiled.remarks if plan.compiled else ():
        text = remark.text
        if remark.kind == "memory" and plan.fits:
            text = (
                "XLA tried to stay below 80 % of the GPU's memory by recomputing and could not. "
                "The step still fits."
            )
        yield Advice(f"compiler: {remark.kind}", text)
