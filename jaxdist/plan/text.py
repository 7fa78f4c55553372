"""A plan as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from jaxdist.plan.advice import Advice, command
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled
from jaxdist.plan.estimate.memory import GIB
from jaxdist.plan.estimate.search import Choice, why_not
from jaxdist.plan.numbers import duration, in_days, in_gib, in_si, in_usd
from jaxdist.plan.planner import Plan

_WIDTH = 100


def text_of(plan: Plan, advice: Sequence[Advice], *, top: int) -> str:
    """The whole plan."""
    parts = [
        _head(plan),
        _verdict(plan),
        _section("memory of one GPU", _memory(plan)),
        _section("one step", _time(plan)),
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
    params = sum(weight.size for weight in job.weights)
    return (
        f"{plan.base.name}: {plan.base.model.kind}, {in_si(params)} parameters, "
        f"{job.tokens_per_step:,} {_unit(plan)} a step, on {cluster.num_gpus}× {cluster.gpu.name} "
        f"({cluster.num_nodes} × {cluster.gpus_per_node}), "
        f"{in_gib(plan.choice.usable_bytes)} usable of {in_gib(cluster.gpu.memory_bytes)} each"
    )


def _unit(plan: Plan) -> str:
    return "tokens" if plan.choice.job.seq_len > 1 else "images"


def _verdict(plan: Plan) -> str:
    proof = plan.proof is not None and plan.proof.compiled is not None
    known = "compiled" if proof else "estimated"
    does = "FITS" if plan.fits else "DOES NOT FIT"
    time = plan.choice.time
    lines = [
        f"{does}: {in_gib(plan.total_bytes)} of {in_gib(plan.choice.usable_bytes)} ({known}), "
        f"with {command(plan, plan.choice)}"
    ]
    if plan.fits:
        lines.append(
            f"{time.seconds:.3g} s a step, {time.tokens_per_s:,.0f} {_unit(plan)}/s "
            f"({time.tokens_per_s / time.num_gpus:,.0f} per GPU), MFU {time.mfu:.1%} causal "
            "(estimated)"
        )
    return "\n".join(lines)


def _memory(plan: Plan) -> Iterable[str]:
    memory = plan.choice.memory
    for name, size in sorted(memory.parts.items(), key=lambda item: -item[1]):
        yield f"  {name:<28}{in_gib(size):>12}"
    total = f"  {'estimated':<28}{in_gib(memory.total_bytes):>12}  fullest in: {memory.peak}"
    yield total + (" (activations only roughly known)" if memory.is_rough else "")
    if memory.host_bytes:
        yield f"  {'moments in host memory':<28}{in_gib(memory.host_bytes):>12}"
    job = plan.choice.job
    if job.stages is not None:
        stash = " ".join(map(str, job.stages.report.peak_stash))
        yield f"  every stage holds the same program; microbatches stashed by stage: {stash}"


def _time(plan: Plan) -> Iterable[str]:
    time = plan.choice.time
    for name, seconds in sorted(time.parts.items(), key=lambda item: -item[1]):
        if seconds >= 0.002 * time.seconds:
            share = f"{seconds / time.seconds:.1%}"
            yield f"  {name:<28}{duration(seconds):>12}{share:>9}"


def _traffic(plan: Plan) -> Iterable[str]:
    flows = sorted(plan.flows, key=lambda flow: -flow.wire_bytes)
    for flow in flows:
        if flow.wire_bytes < 1e6:
            continue
        where = "between nodes" if flow.crosses_nodes else "inside a node"
        yield (
            f"  {flow.kind:<19}{'+'.join(flow.axes):<14}{flow.purpose:<16}"
            f"{in_gib(flow.wire_bytes):>12}{flow.times:>8}×  {where}"
        )


def _money(plan: Plan) -> Iterable[str]:
    gpu = plan.cluster.gpu
    for name, price, cost in (
        ("on demand", gpu.price_per_hour, plan.on_demand),
        ("spot", gpu.spot_price_per_hour, plan.spot),
    ):
        yield (
            f"  {name:<11}{price:>6.2f} USD per GPU-hour{in_days(cost.days):>16}"
            f"{cost.gpu_hours:>14,.0f} GPU-hours{in_usd(cost.money):>18}"
        )


def _meshes(plan: Plan, top: int) -> Iterable[str]:
    found = plan.found
    best = found.choices[0] if found.choices else None
    for place, choice in enumerate(found.choices[:top], start=1):
        yield from _mesh(plan, place, choice, best)
    rest = found.choices[top:]
    if rest:
        fitting = sum(choice.fits for choice in rest)
        yield f"  and {len(rest)} more legal ones, of which {fitting} fit"
    if found.refused:
        example = found.refused[0]
        yield f"  {len(found.refused)} are refused, e.g. {example.problem.partition(':')[0]}"
    yield f"  ({found.num_tried} settings weighed in {found.seconds:.1f} s)"


def _mesh(plan: Plan, place: int, choice: Choice, best: Choice | None) -> Iterable[str]:
    time, config = choice.time, choice.job.config
    remat = f"remat {choice.job.remat}"
    details = f"{remat}, {choice.job.num_microbatches} microbatches"
    details += f", zero {config.mesh.zero}" if config.mesh.zero else ""
    mark = "*" if choice.job.spec == plan.choice.job.spec else " "
    yield (
        f" {mark}{place:>2}  {choice.job.spec!s:<20}{choice.memory.total_bytes / GIB:>7.1f} GiB"
        f"{time.seconds:>9.3g} s{time.mfu:>7.1%}  {details}"
    )
    why = why_not(choice, best) if best is not None else ""
    if why:
        yield f"      {why}"


def _compiled(plan: Plan) -> Iterable[str]:
    if plan.proof is None:
        yield "  not asked for (--compile=false): memory is estimated, usually within 5 %"
        return
    outcome = plan.proof.outcome
    if isinstance(outcome, NotCompiled):
        yield f"  not compiled: {outcome.reason}. {outcome.fix}"
        yield "  the answer above is estimated, usually within 5 %"
        return
    yield from _step(plan, outcome)


def _step(plan: Plan, step: CompiledStep) -> Iterable[str]:
    memory = step.memory
    for name, size in (
        ("arguments (state, batch)", memory.argument_bytes),
        ("outputs not in their place", memory.output_bytes - memory.alias_bytes),
        ("temporary", memory.temporary_bytes),
        ("attention workspace", memory.workspace_bytes),
    ):
        if size:
            yield f"  {name:<28}{in_gib(size):>12}"
    error = plan.choice.memory.total_bytes / memory.total_bytes - 1
    yield f"  {'all':<28}{in_gib(memory.total_bytes):>12}  (the estimate is {error:+.1%})"
    for buffer in step.buffers[:3]:
        yield f"    {in_gib(buffer.bytes):>10}  {', '.join(buffer.shapes[:3])}  {buffer.op_name}"
    overlapped = sum(c.overlapped for c in step.collectives)
    jaxlib = step.versions.get("jaxlib", "?")
    yield (
        f"  {len(step.collectives)} collectives, {overlapped} with work beside them; attention "
        f"{step.attention or '-'}; compiled in {step.compile_s:.0f} s by jaxlib {jaxlib}"
    )
    for (kind, axes), moved in sorted(step.wire_bytes().items(), key=lambda item: -item[1]):
        if moved >= 1e6:
            yield f"    {kind:<19}{axes:<14}{in_gib(moved):>12} sent"


def _advice(advice: Sequence[Advice]) -> Iterable[str]:
    for item in advice:
        yield textwrap.fill(
            f"{item.topic}: {item.text}",
            _WIDTH,
            initial_indent="  - ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
