"""A plan as text for a terminal, and drawings of pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from jaxdist.core.parallel.pipeline.schedules import SCHEDULES, make_schedule
from jaxdist.core.parallel.pipeline.simulation import draw
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.hardware.catalog import HOST_BYTES_PER_S
from jaxdist.models.weights import num_params
from jaxdist.plan.advice import Advice
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled
from jaxdist.plan.estimate.cost import DAY_S
from jaxdist.plan.estimate.memory import moment_bytes
from jaxdist.plan.estimate.remat import WRONG_OFFLOAD
from jaxdist.plan.estimate.search import Candidate, why_not
from jaxdist.plan.estimate.time import MEASURED
from jaxdist.plan.planner import Plan, stages_of
from jaxdist.runtime.backend import PINNED_LIMIT_GIB, pinned_limit_bytes
from jaxdist.runtime.formatting.numbers import (
    TIMES,
    count,
    duration,
    in_bytes,
    in_si,
    money,
    percent,
)
from jaxdist.runtime.formatting.tables import columns, wrap


def text_of(plan: Plan, advice: Sequence[Advice], *, top: int) -> str:
    """Return the plan and its advice as text, with at most `top` meshes."""
    parts = [
        _head(plan),
        _verdict(plan),
        _section("memory of one GPU", _memory(plan)),
        _section("one step", _time(plan)),
        _section("stages of train.batch_schedule and train.seq_schedule", _stages(plan)),
        _section("traffic of one GPU in a step", _traffic(plan)),
        _section(f"the run: {in_si(plan.on_demand.tokens)} {_unit(plan)}", _money(plan)),
        _section("meshes", _meshes(plan, top)),
        _section("compiled", _compiled(plan)),
        _section("advice", _advice(advice)),
    ]
    return "\n\n".join(part for part in parts if part)


def _section(title: str, lines: Iterable[str]) -> str:
    body = list(lines)
    return "\n".join([title, *body]) if body else ""


def _head(plan: Plan) -> str:
    job, cluster = plan.choice.job, plan.cluster
    count, share = in_si(num_params(job.model)), plan.base.model.active_experts
    active = f" ({in_si(num_params(job.model, share))} active)" if share < 1 else ""
    return (
        f"{plan.base.name}: {plan.base.model.kind}, {count} parameters{active}, "
        f"{job.tokens_per_step:,} {_unit(plan)} a step, on {cluster.num_gpus}× {cluster.gpu.name} "
        f"({cluster.num_nodes} × {cluster.gpus_per_node}), "
        f"{in_bytes(plan.choice.usable_bytes)} usable of {in_bytes(cluster.gpu.memory_bytes)} each"
    )


def _unit(plan: Plan) -> str:
    return plan.choice.job.model.unit


def _verdict(plan: Plan) -> str:
    source = "compiled" if plan.compiled else "estimated"
    does = "FITS" if plan.fits else "DOES NOT FIT"
    time = plan.choice.time
    lines = [
        f"{does}: {in_bytes(plan.total_bytes)} of {in_bytes(plan.choice.usable_bytes)} ({source}), "
        f"with {plan.choice.command(plan.base)}",
        f"step plan {plan.choice.job.plan.digest}",
    ]
    if plan.fits:
        lines.append(
            f"{time.seconds:.3g} s a step, {count(time.tokens_per_s)} {_unit(plan)}/s "
            f"({count(time.tokens_per_s / time.num_gpus)} per GPU), MFU {percent(time.mfu)} causal "
            "(estimated)"
        )
        low, high = time.likely_seconds
        runs = [f"{name} {a:.2f} to {b:.2f} ({n})" for name, (a, b, n) in MEASURED.items()]
        lines.append(f"likely {low:.3g} to {high:.3g} s a step")
        lines += wrap(f"measured / estimated time (runs): {', '.join(runs)}", head="  ")
        lines += _limits(plan)
    return "\n".join(lines)


def _limits(plan: Plan) -> Iterable[str]:
    limits, cost = plan.limits, plan.on_demand
    if limits.days:
        does = "TOO LATE" if limits.late(cost) else "IN TIME"
        yield f"{does}: {duration(DAY_S * cost.days)} of {duration(DAY_S * limits.days)}"
    if limits.money:
        does = "TOO EXPENSIVE" if limits.dear(cost) else "WITHIN BUDGET"
        yield f"{does}: {money(cost.money, 'USD')} of {money(limits.money, 'USD')} (on demand)"


def _memory(plan: Plan) -> Iterable[str]:
    memory = plan.choice.memory
    parts = sorted(memory.parts.items(), key=lambda item: -item[1])
    rows = [(f"  {name}", in_bytes(size), "") for name, size in parts]
    rows.append(("  estimated", in_bytes(memory.total_bytes), f"peak: {memory.peak}"))
    if memory.host_bytes:
        moments, pinned = memory.process_bytes(plan.cluster.gpus_per_node)
        kinds = [f"{in_bytes(pinned)} of pinned memory"] * bool(pinned)
        kinds += [f"{in_bytes(moments)} of moments, twice during a save,"] * bool(moments)
        remark = f"{' and '.join(kinds)} on each node"
        if pinned > pinned_limit_bytes():
            allowed = in_bytes(pinned_limit_bytes())
            remark += f"; {PINNED_LIMIT_GIB} allows a process only {allowed}: unset it"
        if plan.choice.job.offloaded and jax.__version__ in WRONG_OFFLOAD:
            remark += f"; jax {jax.__version__} offloads activations in the wrong order: use 0.11.1"
        rows.append(("  in host memory", in_bytes(memory.host_bytes), remark))
    if memory.disk_bytes:
        moved = 2 * memory.disk_bytes / plan.cluster.disk_bytes_per_s
        remark = f"read and written in {duration(moved)} a step at --disk-gb-per-s "
        remark += f"{plan.cluster.disk_bytes_per_s / 1e9:g}; twice the bytes during a save"
        rows.append(("  moments on a node's disk", in_bytes(memory.disk_bytes), remark))
    yield from _aligned(rows)
    if memory.disk_bytes:
        time, job = plan.choice.time, plan.choice.job
        fast = moment_bytes(job) / HOST_BYTES_PER_S
        tokens = moved / (time.seconds - moved) * time.tokens_per_step
        yield from wrap(
            f"the disk takes {percent(moved / time.seconds)} of a step, and half of a step with "
            f"{tokens:,.0f} tokens. --train.offload-optimizer=host takes {duration(fast)} if the "
            f"host has {in_bytes(memory.disk_bytes)} for the moments",
            head="  ",
        )
    if memory.is_rough:
        yield "  activations are an upper bound, traced from the model before any compiler fuses"
    job = plan.choice.job
    if job.stages is not None:
        stash = " ".join(map(str, job.stages.report.peak_stash))
        yield f"  all stages allocate the same; microbatches stashed on each stage: {stash}"


def _time(plan: Plan) -> Iterable[str]:
    time = plan.choice.time
    parts = sorted(time.parts.items(), key=lambda item: -item[1])
    yield from _aligned(
        (f"  {name}", duration(seconds), f"{percent(seconds / time.seconds):>7}")
        for name, seconds in parts
        if seconds >= 0.002 * time.seconds
    )


def _stages(plan: Plan) -> Iterable[str]:
    stages = stages_of(plan.choice)
    for stage, run in stages if len(stages) > 1 else ():
        train = run.job.config.train
        does = "" if run.fits else ", DOES NOT FIT"
        yield (
            f"  after step {stage.first_step:,}: {train.global_batch_size:,} rows of "
            f"{train.seq_len:,} tokens, {run.job.num_microbatches} microbatches, "
            f"{in_bytes(run.memory.total_bytes)}, {run.time.seconds:.3g} s a step{does}"
        )


def _traffic(plan: Plan) -> Iterable[str]:
    job = plan.choice.job
    yield from _aligned(
        (
            f"  {flow.kind:<19}{'+'.join(flow.axes):<14}{flow.purpose:<16}",
            in_bytes(flow.wire_bytes),
            f"{flow.times:>6}{TIMES}  {'between nodes' if flow.crosses_nodes else 'inside a node'}",
        )
        for flow in sorted(plan.flows, key=lambda flow: -flow.wire_bytes)
        if flow.wire_bytes >= 1e6
    )
    if job.model.tensor == "auto" and job.spec[TENSOR] > 1:
        yield "  over tensor: unknown, XLA's partitioner places the collectives of this model"


def _money(plan: Plan) -> Iterable[str]:
    gpu = plan.cluster.gpu
    bills = (
        ("on demand", gpu.price_per_hour, plan.on_demand),
        ("spot", gpu.spot_price_per_hour, plan.spot),
    )
    rows = [
        (
            f"  {name}",
            f"{price:.2f} USD per GPU-hour",
            duration(DAY_S * cost.days),
            f"{cost.gpu_hours:,.0f} GPU-hours",
            money(cost.money, "USD"),
        )
        for name, price, cost in bills
    ]
    yield from columns(rows, gap="   ")
    days, cost, accuracy = plan.on_demand.days, plan.on_demand.money, plan.choice.time.accuracy
    (first, last), (least, most) = ([share * x for share in accuracy] for x in (days, cost))
    yield (
        f"  likely      {duration(DAY_S * first)} to {duration(DAY_S * last)}, "
        f"{money(least, 'USD')} to {money(most, 'USD')} on demand"
    )


def _aligned(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f"{label:<30}{amount:>12}  {remark}".rstrip() for label, amount, remark in rows]


def _meshes(plan: Plan, top: int) -> Iterable[str]:
    result = plan.search
    best = result.choices[0] if result.choices else None
    for rank, choice in enumerate(result.choices[:top], start=1):
        yield from _mesh(plan, rank, choice, best)
    rest = result.choices[top:]
    if rest:
        fitting = sum(choice.fits for choice in rest)
        yield f"  and {len(rest)} more legal ones, of which {fitting} fit"
    if result.refused:
        example = next(iter(result.refused.values())).partition(":")[0]
        verb = "is" if len(result.refused) == 1 else "are"
        yield f"  {len(result.refused)} {verb} refused, e.g. {example}"


def _mesh(plan: Plan, rank: int, choice: Candidate, best: Candidate | None) -> Iterable[str]:
    time, config = choice.time, choice.job.config
    details = f"remat {choice.job.remat}, {choice.job.num_microbatches} microbatches"
    details += f", zero {config.mesh.zero}" if config.mesh.zero else ""
    details += f", {choice.job.plan.exchange.exchange}" if choice.job.plan.exchange else ""
    mark = "*" if choice.job.spec == plan.choice.job.spec else " "
    yield (
        f" {mark}{rank:>2}  {choice.job.spec!s:<20}{in_bytes(choice.memory.total_bytes):>11}"
        f"{time.seconds:>9.3g} s{percent(time.mfu):>8}  {details}"
    )
    why = why_not(choice, best) if best is not None else ""
    if why:
        yield f"      {why}"


def _compiled(plan: Plan) -> Iterable[str]:
    if plan.compiled is not None:
        yield from _step(plan, plan.compiled)
        return
    accuracy = "an estimate, usually within 5 %"
    if plan.choice.memory.is_rough:
        accuracy = "an estimate, and an upper bound for a model that is not a decoder"
    if plan.outcome is None:
        yield f"  disabled (--compile=false): memory is {accuracy}"
    elif isinstance(plan.outcome, NotCompiled):
        yield f"  not compiled: {plan.outcome.reason}. {plan.outcome.fix}"
        yield f"  the memory above is {accuracy}"


def _step(plan: Plan, step: CompiledStep) -> Iterable[str]:
    memory = step.memory
    parts = (
        ("arguments (state, batch)", memory.argument_bytes),
        ("outputs without an alias", memory.output_bytes - memory.alias_bytes),
        ("temporary", memory.temporary_bytes),
        ("attention workspace", memory.workspace_bytes),
    )
    yield from _aligned((f"  {name}", in_bytes(size), "") for name, size in parts if size)
    error = plan.choice.memory.total_bytes / plan.total_bytes - 1
    yield from _aligned(
        [("  all", in_bytes(memory.total_bytes), f"(estimate: {percent(error, sign=True)})")]
    )
    for buffer in step.buffers[:3]:
        yield f"    {in_bytes(buffer.bytes):>10}  {', '.join(buffer.shapes[:3])}  {buffer.op_name}"
    overlapped = sum(c.overlapped for c in step.collectives)
    jaxlib = step.versions.get("jaxlib", "?")
    yield (
        f"  {len(step.collectives)} collectives, {overlapped} overlapped with compute; attention "
        f"{step.attention or '-'}; compiled in {step.compile_s:.0f} s by jaxlib {jaxlib}"
    )
    for (kind, axes), moved in sorted(step.wire_bytes().items(), key=lambda item: -item[1]):
        if moved >= 1e6:
            yield f"    {kind:<19}{axes:<14}{in_bytes(moved):>12} sent"


def _advice(advice: Sequence[Advice]) -> Iterable[str]:
    for item in advice:
        yield from wrap(f"{item.topic}: {item.text}", head="  - ")


def drawings(num_stages: int, num_microbatches: int, num_virtual_stages: int) -> str:
    """Return a diagram of each pipeline schedule for these sizes."""
    tables = [make_schedule(name, num_stages, num_microbatches) for name in SCHEDULES]
    if num_virtual_stages > 1:
        tables.append(make_schedule("1f1b", num_stages, num_microbatches, num_virtual_stages))
    return "\n\n".join(map(draw, tables))
