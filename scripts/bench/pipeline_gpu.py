"""Analyze the pipeline of `configs/pipeline_64gpu.toml` as compiled by XLA:GPU, without a GPU.

    pip install -e '.[plan]'
    python scripts/bench/pipeline_gpu.py          # writes results/pipeline_gpu_compile.md

For every schedule on dp=4,tp=4,pp=4 over 8 nodes of 8 H100, the page lists memory and traffic of
one device, and whether permutes overlap with compute; then memory by number of microbatches.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from jaxdist.config import RunConfig, stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.simulation import RECOMPUTE, Report, simulate
from jaxdist.hardware import GPUS, Cluster
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled, compile_step
from jaxdist.plan.compiled.collectives import Collective
from jaxdist.runtime.formatting.numbers import percent

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "scripts" / "bench" / "results" / "pipeline_gpu_compile.md"
CONFIG = REPOSITORY / "configs" / "pipeline_64gpu.toml"
CLUSTER = Cluster(gpu=GPUS["h100"], num_nodes=8, gpus_per_node=8)
ROWS_OF_A_MICROBATCH = 8
TIMEOUT_S = 600.0

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b_lockstep", 1),
    ("1f1b", 1),
    ("1f1b_lockstep", 2),
    ("zero_bubble", 1),
)


def main() -> int:
    """Compile all schedules and write the table."""
    config = stored_run(CONFIG)
    mesh = MeshSpec.parse(config.mesh.shape)
    schedules = [
        (
            with_schedule(config, name, virtual),
            name + (f" × {virtual} virtual stages" if virtual > 1 else ""),
        )
        for name, virtual in SCHEDULES
    ]
    rows = [(label, given, *compiled(given, mesh, label)) for given, label in schedules]
    growth = []
    for name in ("gpipe", "1f1b_lockstep"):
        for times in (1, 2, 4, 8):
            microbatches = times * mesh["pipeline"]
            given = with_microbatches(with_schedule(config, name, 1), mesh, microbatches)
            step, report = compiled(given, mesh, f"{name}, {microbatches} microbatches")
            growth.append((name, microbatches, step, report))
    OUTPUT.write_text("\n".join([*head(rows[0][2]), *table(rows), *traffic(rows), *grown(growth)]))
    print(f"wrote {OUTPUT.relative_to(REPOSITORY)}")
    return 0


def with_schedule(config: RunConfig, name: str, virtual: int) -> RunConfig:
    """Return the config with another schedule."""
    pipeline = dataclasses.replace(config.pipeline, schedule=name, num_virtual_stages=virtual)
    return dataclasses.replace(config, pipeline=pipeline)


def with_microbatches(config: RunConfig, mesh: MeshSpec, count: int) -> RunConfig:
    """Return the config with this many microbatches of unchanged size."""
    rows = ROWS_OF_A_MICROBATCH * count * mesh.num_replicas
    train = dataclasses.replace(config.train, global_batch_size=rows, num_microbatches=count)
    return dataclasses.replace(config, train=train)


def compiled(config: RunConfig, mesh: MeshSpec, label: str) -> tuple[CompiledStep, Report]:
    """Return the compiled step and the schedule's report; exit if it does not compile."""
    step = compile_step(config, mesh, CLUSTER, timeout_s=TIMEOUT_S)
    if isinstance(step, NotCompiled):
        raise SystemExit(f"{label}: {step.reason}. {step.fix}\n{step.details}")
    schedule = config.pipeline.make_schedule(
        num_stages=mesh["pipeline"],
        rows=config.train.global_batch_size // mesh.num_replicas,
        num_microbatches=config.train.num_microbatches,
    )
    print(f"{label}: {step.compile_s:.1f} s, {gib(step.memory.total_bytes)} GiB", flush=True)
    for remark in step.remarks:
        print(f"    {remark.kind}: {remark.text}", flush=True)
    return step, simulate(schedule, RECOMPUTE)


def head(step: CompiledStep) -> list[str]:
    """Return the introduction of the page and the command that made it."""
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    return [
        "# The 64-GPU pipeline as XLA:GPU compiles it",
        "",
        "Made by `python scripts/bench/pipeline_gpu.py` on two CPU cores, without a GPU: the train",
        "step of `configs/pipeline_64gpu.toml` (Llama 2 13B, dp=4,tp=4,pp=4, 8 nodes of 8 H100, 16",
        "microbatches of 2 rows of 4,096 tokens, full recomputation, ZeRO-1) through the compiler "
        "that a",
        "run uses. Memory is its buffer assignment, not a measurement; kernels are not tuned, and "
        "the CUDA",
        "context and NCCL come on top (about 2 GiB). Seconds are wall time of tracing and "
        "compiling on",
        "cores that other work shared.",
        "",
        f"{versions}.",
        "",
    ]


def table(rows: Iterable[tuple[str, RunConfig, CompiledStep, Report]]) -> list[str]:
    """Return memory, permutes and bubble of every schedule."""
    lines = [
        "## Schedules",
        "",
        "Permutes: instructions in the program, and how often a step runs them. Beside: the fewest",
        "computing instructions that the compiler scheduled between a permute's start and its end.",
        "Where a stage has several virtual stages, weights travel to their stage, and gradients",
        "back in float32, once per step (last column, GiB sent).",
        "",
        "| schedule | compile s | argument GiB | temporary GiB | workspace MiB | total GiB | "
        "permutes | runs × MiB | asynchronous | beside | attention | bubble | peak stash | "
        "weights |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---|---:|---:|---:|",
    ]
    for label, _, step, report in rows:
        permutes = [c for c in exchanges(step) if c.dtypes == ("bf16",)]
        weights = sum(c.count * c.wire_bytes for c in exchanges(step) if c.dtypes == ("f32",))
        runs = sum(c.count for c in permutes)
        expected = report.forward_permutes + report.backward_permutes
        assert {c.in_branch for c in permutes} == {False}
        sizes = sorted({f"{c.bytes / 2**20:.0f}" for c in permutes})
        ahead = sum(c.overlapped for c in permutes)
        extra = "" if runs == expected else f" (the schedule says {expected})"
        lines.append(
            f"| {label} | {step.compile_s:.0f} | {gib(step.memory.argument_bytes)} | "
            f"{gib(step.memory.temporary_bytes)} | {step.memory.workspace_bytes / 2**20:.0f} | "
            f"{gib(step.memory.total_bytes)} | {len(permutes)} | {runs}{extra} × "
            f"{'/'.join(sizes)} | {ahead} of {len(permutes)} | "
            f"{min(c.between for c in permutes)} | {step.attention} | {percent(report.bubble)} | "
            f"{max(report.peak_stash)} | {gib(weights)} |"
        )
    return [*lines, ""]


def exchanges(step: CompiledStep) -> list[Collective]:
    """Return ring permutes: activations and their gradients in bfloat16, weights in float32."""
    return [c for c in step.collectives if c.kind == "collective-permute"]


def traffic(rows: Iterable[tuple[str, RunConfig, CompiledStep, Report]]) -> list[str]:
    """Return bytes on the wire by axis."""
    rows = list(rows)
    axes = ("tensor", "pipeline", "data")
    lines = [
        "## Bytes that a device of the busiest stage sends in one step, GiB",
        "",
        "`tensor` stays inside a node, `pipeline` and `data` cross nodes. Async: the share of the",
        "axis's bytes in collectives that are started and awaited apart.",
        "",
        "| schedule | " + " | ".join(f"{axis} | async" for axis in axes) + " | other |",
        "|---|" + "---:|---:|" * len(axes) + "---:|",
    ]
    for label, _, step, _ in rows:
        cells = []
        for axis in axes:
            own = [c for c in step.collectives if c.axes == (axis,)]
            total = sum(step.runs(c) * c.wire_bytes for c in own)
            ahead = sum(step.runs(c) * c.wire_bytes for c in own if c.overlapped)
            cells += [f"{total / 2**30:.2f}", percent(ahead / total, 0)]
        other = [c for c in step.collectives if len(c.axes) != 1]
        rest = sum(step.runs(c) * c.wire_bytes for c in other)
        lines.append(f"| {label} | {' | '.join(cells)} | {rest / 2**30:.3f} |")
    return [*lines, ""]


def grown(rows: list[tuple[str, int, CompiledStep, Report]]) -> list[str]:
    """Return temporary memory by number of microbatches."""
    counts = sorted({count for _, count, _, _ in rows})
    lines = [
        f"## Temporary GiB against the number of microbatches ({ROWS_OF_A_MICROBATCH} rows each)",
        "",
        "| schedule | " + " | ".join(f"M = {count}" for count in counts) + " | last ÷ first |",
        "|---|" + "---:|" * len(counts) + "---:|",
    ]
    for name in dict.fromkeys(name for name, *_ in rows):
        own = [step.memory.temporary_bytes for label, _, step, _ in rows if label == name]
        stash = [max(report.peak_stash) for label, _, _, report in rows if label == name]
        cells = [f"{gib(size)} ({slots})" for size, slots in zip(own, stash, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} | {own[-1] / own[0]:.3f} |")
    return [*lines, "", "In brackets: microbatches stashed at most by a stage.", ""]


def gib(size: int) -> str:
    """Format GiB with two decimals."""
    return f"{size / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
