"""Analyze attention over rows shared by devices, as compiled by XLA:GPU, without a GPU.

    pip install -e '.[plan]'
    python scripts/bench/context_program.py      # writes results/context_program.md

The model has two layers and otherwise the shapes of `configs/llama3_8b_128k.toml`: one row of
131,072 tokens on 8 H100. For every exchange the page lists kernels, bytes on the wire (compiled and
planned) and the work that overlaps with permutes. Then it lists memory by devices per row and with
a sliding window, every exchange for a million tokens, and the unchanged configs of long rows.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from roofline import model_times

from jaxdist.config import RunConfig, stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import offloaded_names
from jaxdist.hardware import GPUS, Cluster
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled, compile_step
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory, usable_bytes
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.runtime.formatting.numbers import percent

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "scripts" / "bench" / "results" / "context_program.md"
CONFIGS = {"llama3_8b_128k": 1, "llama3_70b_128k": 16}
"""Config -> nodes of 8 H100."""
NUM_LAYERS = 2
WINDOW = 4096
LENGTHS = (65_536, 131_072)
"""Row lengths; the memory difference between both is activations."""
LOSS_CHUNK = 1024
"""Tokens per logits chunk for these rows: small, so that a layer's backward is the peak."""
TIMEOUT_S = 600.0

EXCHANGES = ("ring", "all_gather", "all_to_all", "hybrid")


def main() -> int:
    """Compile all programs and write the table."""
    rows = [compiled(exchange, 8) for exchange in EXCHANGES]
    rows.append(compiled("ring", 8, packing="documents"))
    rows.append(compiled("ring", 8, window=WINDOW))
    sizes = [[compiled("ring", size, seq_len=seq) for seq in LENGTHS] for size in (2, 4, 8)]
    million = [compiled(exchange, 32, config="llama3_8b_1m") for exchange in EXCHANGES]
    parts = [head(rows[0].step), table(rows), memory(sizes), long(million), complete_programs()]
    OUTPUT.write_text("\n".join(line for part in parts for line in part))
    print(f"wrote {OUTPUT.relative_to(REPOSITORY)}")
    return 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled program.

    Attributes:
        label: exchange and window.
        job: input of the planner.
        step: the compiled step.
    """

    label: str
    job: Job
    step: CompiledStep


def compiled(
    exchange: str,
    size: int,
    *,
    window: int = 0,
    packing: str = "stream",
    seq_len: int = 0,
    config: str = "llama3_8b_128k",
) -> Row:
    """Compile the step with `size` devices per row; exit if it does not compile.

    `seq_len=0` uses the config's. Other lengths compute logits in chunks of `LOSS_CHUNK` tokens.
    """
    label = f"{exchange}, window {window:,}" if window else exchange
    label += ", documents" if packing == "documents" else ""
    mesh, cluster = MeshSpec(context=size), Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=8)
    # A hybrid needs a second node, because a group is one node.
    nodes = 2 if exchange == "hybrid" else 1
    cluster = dataclasses.replace(cluster, num_nodes=nodes, gpus_per_node=size // nodes)
    run = cut_down(stored_run(REPOSITORY / "configs" / f"{config}.toml"), exchange, window)
    data = dataclasses.replace(run.data, packing=packing)
    run = dataclasses.replace(run, data=data)
    if seq_len:
        train = dataclasses.replace(run.train, seq_len=seq_len, loss_chunk_tokens=LOSS_CHUNK)
        run = dataclasses.replace(run, train=train)
    return compiled_row(label, Job.of(run, mesh, cluster))


def compiled_row(label: str, job: Job) -> Row:
    """Compile the step of a job; exit if it does not compile."""
    step = compile_step(job.config, job.spec, job.cluster, timeout_s=TIMEOUT_S)
    if isinstance(step, NotCompiled):
        raise SystemExit(f"{label}: {step.reason}. {step.fix}\n{step.details}")
    print(f"{label}, {job.spec}: {step.compile_s:.1f} s", flush=True)
    return Row(label, job, step)


def cut_down(config: RunConfig, exchange: str, window: int) -> RunConfig:
    """Return the config with fewer layers and one row per step."""
    model = dataclasses.replace(config.model, num_layers=NUM_LAYERS, sliding_window=window)
    remat = "full" if offloaded_names(config.train.remat) else config.train.remat
    train = dataclasses.replace(config.train, global_batch_size=1, num_microbatches=1, remat=remat)
    mesh = dataclasses.replace(config.mesh, context_attention=exchange)
    return dataclasses.replace(config, model=model, train=train, mesh=mesh)


def head(step: CompiledStep) -> list[str]:
    """Return the introduction of the page and the command that made it."""
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    return [
        "# Attention over shared rows as XLA:GPU compiles it",
        "",
        "Made by `python scripts/bench/context_program.py` on two CPU cores, without a GPU: two",
        "layers of `configs/llama3_8b_128k.toml` (width 4,096, 32 heads, 8 key/value heads), one",
        "row of 131,072 tokens in bfloat16, H100. Backward recomputes what the config says. Memory",
        "is the compiler's buffer assignment, not a measurement.",
        "",
        f"{versions}.",
        "",
    ]


def table(rows: list[Row]) -> list[str]:
    """Return kernels, bytes and overlap of every exchange over 8 devices."""
    lines = [
        "## Eight devices on a row",
        "",
        "Bytes: what a device sends over `cp` in one step, weights and gradients included, beside",
        "the planner's estimate. Asynchronous: the share of the bytes of keys, values, heads and",
        "their gradients that is started and awaited apart. Beside work: how many of these",
        "collectives have computing instructions between their start and their end. Beside",
        "products: how many permutes have a product of matrices, cuDNN's or another, or a loop",
        "that holds one. Documents of packed rows travel too, 64 KiB a hop, and are left out of",
        "these.",
        "",
        "Calls: of cuDNN's kernel in each layer. Its output is kept, so these are one forward and,",
        "round a ring, two backward for each part of the row: keys travel beside one, gradients",
        "beside the other. A ring of 8 takes eight steps each way, a hybrid two. Under a",
        "sliding window a ring multiplies block by block.",
        "",
        "| exchange | attention runs on | calls | permutes | beside products | asynchronous | "
        "beside work | sent GiB | planned GiB | temporary GiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        moved = [c for c in row.step.collectives if c.axes == ("context",)]
        rings = [c for c in moved if c.kind == "collective-permute" and c.dtypes != ("s32",)]
        activations = [c for c in moved if c.kind == "all-to-all"] + rings
        total = sum(c.count * c.wire_bytes for c in activations)
        ahead = sum(c.count * c.wire_bytes for c in activations if c.overlapped)
        beside = sum(c.overlapped and c.between > 0 for c in activations)
        products = sum(c.overlapped and c.products > 0 for c in rings)
        sent = sum(c.count * c.wire_bytes for c in moved)
        planned = sum(f.wire_bytes for f in flows_of(row.job) if f.axes == ("context",))
        share = percent(ahead / total, 0) if total else "-"
        times = model_times(row.step.program, row.job.spec.sizes, row.job.cluster)
        calls = times.calls.get("attention", 0) // NUM_LAYERS
        lines.append(
            f"| {row.label} | {row.job.attention} | {calls} | {len(rings)} | {products} | "
            f"{share} | {beside} of {len(activations)} | {gib(sent)} | {gib(planned)} | "
            f"{gib(row.step.memory.temporary_bytes)} |"
        )
    return [*lines, ""]


def memory(sizes: list[list[Row]]) -> list[str]:
    """Return temporary memory of rows of `LENGTHS` by the number of devices per row."""
    short, full = LENGTHS
    lines = [
        f"## Memory of one row of {full:,} tokens, ring",
        "",
        "Temporary memory per device. What a row takes more than one of half its length is its",
        "activations; gathered weights and the head's gradient are the same for both. Logits exist",
        f"in chunks of {LOSS_CHUNK:,} tokens, so that the loss needs less than a layer.",
        "Of half the devices' half: 100 % is what twice the devices halve exactly.",
        "",
        f"| cp | {short:,} tokens GiB | {full:,} tokens GiB | difference GiB | "
        "of half the devices' half |",
        "|---:|---:|---:|---:|---:|",
    ]
    before = 0
    for half, row in sizes:
        used = [each.step.memory.temporary_bytes for each in (half, row)]
        more = used[1] - used[0]
        share = percent(2 * more / before, 0) if before else ""
        cells = " | ".join(map(gib, (*used, more)))
        lines.append(f"| {row.job.spec['context']} | {cells} | {share} |")
        before = more
    return [*lines, ""]


def long(rows: list[Row]) -> list[str]:
    """Return compiled and planned memory of a million tokens by exchange."""
    lines = [
        "## One row of 1,048,576 tokens on 32 devices",
        "",
        "Two layers of `configs/llama3_8b_1m.toml`. After an all-gather every device holds float32",
        "gradients of all keys and values; a ring holds those of one part.",
        "",
        "| exchange | attention runs on | temporary GiB | planned GiB |",
        "|---|---|---:|---:|",
    ]
    for row in rows:
        planned = estimate_memory(row.job).temporary_bytes
        compiled = row.step.memory.temporary_bytes
        lines.append(f"| {row.label} | {row.job.attention} | {gib(compiled)} | {gib(planned)} |")
    return [*lines, ""]


def complete_programs() -> list[str]:
    """Return planned and compiled memory per GPU of the unchanged configs of long rows."""
    lines = [
        "## Configs of long rows",
        "",
        "All layers, mesh and settings of the config; of one GPU, with what cuDNN asks for at run",
        "time.",
        "",
        "| config | GPUs | mesh | planned GiB | compiled GiB | usable GiB |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, nodes in CONFIGS.items():
        cluster = Cluster(gpu=GPUS["h100"], num_nodes=nodes, gpus_per_node=8)
        run = stored_run(REPOSITORY / "configs" / f"{name}.toml")
        row = compiled_row(name, Job.of(run, run.mesh.spec, cluster))
        sizes = (
            estimate_memory(row.job).total_bytes,
            row.step.memory.total_bytes,
            usable_bytes(row.job),
        )
        cells = " | ".join(map(gib, sizes))
        lines.append(f"| `{name}` | {cluster.num_gpus} | `{row.job.spec}` | {cells} |")
    return [*lines, ""]


def gib(size: float) -> str:
    """Format GiB with two decimals."""
    return f"{size / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
