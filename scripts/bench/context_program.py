"""Attention over shared rows as XLA:GPU compiles it, without a GPU.

    pip install -e '.[plan]'
    python scripts/bench/context_program.py      # writes results/context_program.md

Two layers of `configs/llama3_8b_128k.toml`, every other shape as it is: one row of 131,072 tokens
on 8 H100. Every exchange: kernels, bytes on the wire beside the planner's, what runs beside the
permutes; then memory against the number of devices that share the row, and under a sliding window.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from jaxdist.config import RunConfig, stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled, compile_step
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.plan.hardware import GPUS, Cluster

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "scripts" / "bench" / "results" / "context_program.md"
CONFIG = REPOSITORY / "configs" / "llama3_8b_128k.toml"
NUM_LAYERS = 2
WINDOW = 4096
TIMEOUT_S = 600.0

EXCHANGES = ("ring", "all_gather", "all_to_all", "hybrid")


def main() -> int:
    """Compile all, write the table."""
    rows = [compiled(exchange, 8) for exchange in EXCHANGES]
    rows.append(compiled("ring", 8, WINDOW))
    sizes = [compiled("ring", size) for size in (2, 4)] + [rows[0]]
    OUTPUT.write_text("\n".join([*head(rows[0].step), *table(rows), *memory(sizes)]))
    print(f"wrote {OUTPUT.relative_to(REPOSITORY)}")
    return 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled program.

    Attributes:
        label: exchange and window.
        job: what the planner estimates from.
        step: what the compiler made.
    """

    label: str
    job: Job
    step: CompiledStep


def compiled(exchange: str, size: int, window: int = 0) -> Row:
    """The step with `size` devices on each row; ends the script where there is none."""
    label = f"{exchange}, window {window:,}" if window else exchange
    mesh, cluster = MeshSpec(context=size), Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=8)
    # A hybrid needs a second node: its groups are those of one.
    nodes = 2 if exchange == "hybrid" else 1
    cluster = dataclasses.replace(cluster, num_nodes=nodes, gpus_per_node=size // nodes)
    config = cut_down(stored_run(CONFIG), exchange, window)
    step = compile_step(config, mesh, cluster, timeout_s=TIMEOUT_S)
    if isinstance(step, NotCompiled):
        raise SystemExit(f"{label}: {step.reason}. {step.fix}\n{step.details}")
    print(f"{label}, cp={size}: {step.compile_s:.1f} s", flush=True)
    return Row(label, Job.of(config, mesh, cluster), step)


def cut_down(config: RunConfig, exchange: str, window: int) -> RunConfig:
    """The config with fewer layers and one row a step."""
    model = dataclasses.replace(config.model, num_layers=NUM_LAYERS, sliding_window=window)
    train = dataclasses.replace(config.train, global_batch_size=1, num_microbatches=1)
    mesh = dataclasses.replace(config.mesh, context_attention=exchange)
    return dataclasses.replace(config, model=model, train=train, mesh=mesh)


def head(step: CompiledStep) -> list[str]:
    """What the page is and how it was made."""
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    return [
        "# Attention over shared rows as XLA:GPU compiles it",
        "",
        "Made by `python scripts/bench/context_program.py` on two CPU cores, without a GPU: two",
        "layers of `configs/llama3_8b_128k.toml` (width 4,096, 32 heads, 8 key/value heads), one",
        "row of 131,072 tokens in bfloat16, full recomputation, H100. Memory is the compiler's",
        "buffer assignment, not a measurement.",
        "",
        f"{versions}.",
        "",
    ]


def table(rows: list[Row]) -> list[str]:
    """Kernels, bytes and overlap of every exchange, over 8 devices."""
    lines = [
        "## Eight devices on a row",
        "",
        "Bytes: what a device sends over `cp` in one step, weights and gradients included, beside",
        "the planner's estimate. Asynchronous: the share of the bytes of keys, values, heads and",
        "their gradients that is started and awaited apart. Beside work: how many of these",
        "collectives have computing instructions between their start and their end.",
        "",
        "| exchange | attention runs on | permutes | asynchronous | beside work | sent GiB | "
        "planned GiB | temporary GiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        moved = [c for c in row.step.collectives if c.axes == ("context",)]
        rings = [c for c in moved if c.kind == "collective-permute"]
        activations = [c for c in moved if c.kind in ("collective-permute", "all-to-all")]
        total = sum(c.count * c.wire_bytes for c in activations)
        ahead = sum(c.count * c.wire_bytes for c in activations if c.overlapped)
        beside = sum(c.overlapped and c.between > 0 for c in activations)
        sent = sum(c.count * c.wire_bytes for c in moved)
        planned = sum(f.wire_bytes for f in flows_of(row.job) if f.axes == ("context",))
        share = f"{ahead / total:.0%}" if total else "-"
        lines.append(
            f"| {row.label} | {row.job.attention} | {len(rings)} | {share} | "
            f"{beside} of {len(activations)} | {gib(sent)} | {gib(planned)} | "
            f"{gib(row.step.memory.temporary_bytes)} |"
        )
    return [*lines, ""]


def memory(rows: list[Row]) -> list[str]:
    """Temporary memory against the devices that share the row."""
    lines = [
        "## Memory of one row of 131,072 tokens, ring",
        "",
        "Per device. Activations are what twice the devices halve; gathered weights and the head's",
        "gradient are not. Were nothing else to change, each drop would be half of the one before.",
        "",
        "| cp | arguments GiB | temporary GiB | less than with half the devices |",
        "|---:|---:|---:|---:|",
    ]
    before = None
    for row in rows:
        size, used = row.job.spec["context"], row.step.memory
        less = "" if before is None else gib(before - used.temporary_bytes)
        lines.append(
            f"| {size} | {gib(used.argument_bytes)} | {gib(used.temporary_bytes)} | {less} |"
        )
        before = used.temporary_bytes
    return [*lines, ""]


def gib(size: float) -> str:
    """Two decimals."""
    return f"{size / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
