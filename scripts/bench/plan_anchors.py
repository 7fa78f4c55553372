"""Compare the planner's step time with runs that others published; writes a table.

    python scripts/bench/plan_anchors.py [--out scripts/bench/results/plan_anchors.md]

Each row is a published run described in our settings. The estimate uses one set of constants for
all published software (`jaxdist.plan.estimate.software.PUBLISHED`); two of them are fitted on every
second row. What a source does not say is assumed and named in the row. No GPU and no compiler are
needed; takes a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.core.types import Model
from jaxdist.models import DecoderConfig, build
from jaxdist.optim import OptimConfig
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.plan.hardware import Cluster
from jaxdist.runtime.formatting.numbers import percent

sys.path.insert(0, str(Path(__file__).parent))
from published_runs import FITTED, HELD_OUT, LATER, Row

OUT = Path(__file__).parent / "results" / "plan_anchors.md"


def job_of(row: Row) -> Job:
    """The row in our settings."""
    spec = MeshSpec.parse(row.mesh)
    rows = row.micro_rows * row.microbatches * spec.num_replicas
    config = RunConfig(
        model=row.model,
        mesh=MeshConfig(zero=row.zero),  # type: ignore[arg-type]
        train=TrainConfig(
            global_batch_size=rows,
            seq_len=row.seq_len,
            num_microbatches=row.microbatches,
            remat=row.remat,
            loss_chunk_tokens=4096,  # others form logits whole
        ),
        pipeline=PipelineConfig(
            num_virtual_stages=row.chunks,
            gather="step",
        ),
        optim=OptimConfig(moment_dtype=row.moment_dtype),  # type: ignore[arg-type]
        precision=PrecisionConfig(reduce_dtype="bfloat16"),
    )
    per_node = min(8, spec.num_devices)
    cluster = Cluster(
        gpu=row.gpu, num_nodes=max(1, spec.num_devices // per_node), gpus_per_node=per_node
    )
    job = Job.of(config, spec, cluster, built(row.model, row.seq_len))
    return dataclasses.replace(job, engine=row.engine)


_BUILT: dict[str, Model] = {}


def built(model: DecoderConfig, seq_len: int) -> Model:
    """The model of several rows, built once."""
    key = f"{model} {seq_len}"
    if key not in _BUILT:
        _BUILT[key] = build(model, seq_len=seq_len)
    return _BUILT[key]


def tokens_per_gpu(row: Row, job: Job) -> float:
    """What was published, as tokens/s/GPU."""
    if row.step_s:
        return job.tokens_per_step / row.step_s / job.spec.num_devices
    if row.mfu_full:
        flops = job.model.flops_per_token["full"]
        return row.mfu_full * 989.4e12 / flops
    return row.published


def measure(row: Row) -> tuple[float, float, float]:
    """Published and estimated tokens/s/GPU, and the error."""
    job = job_of(row)
    published = tokens_per_gpu(row, job)
    found = estimate_time(job).tokens_per_s / job.spec.num_devices
    return published, found, found / published - 1


METHOD = """
One set of constants for all rows (`jaxdist/plan/estimate/software.py`, `products.py`), most of them
from measurements of single kernels. Two are fitted, on every second row in the order of
`published_runs.py`: what products of full tiles reach, and the share of idle time. The other rows
come first below. They are a check, not a blind test: both halves were known while the form of the
model was chosen and constants without a source of their own were set by judgement (how much of a
result's writing is exposed, attention's rates, the share hidden over `tensor`, products in 8 bits).

Three rows were found later, of small models on A100: 13 to 35 % too slow by the estimate of then,
one of three within 15 %, which was the only blind test. They led to three repairs: an A100's
attention is that of FlashAttention 2 (it was the first version's), a single GPU waits for no
slower one, and the inner dimension of half rate is what writing the result takes on that card (it
was an H100's on all, which keeps its own: that sets how much is exposed). All rows were seen
meanwhile. The two fitted constants stayed as they were. Fitted again on a coarse grid, by the mean
|log error|, idle would be 0.12, and 17 of the 23 rows held out within 15 %; before the repairs too.
"""

MISSES = """
Misses. NVIDIA's own stack in 8 bits (Megatron-Bridge, MaxText) and small models on A100 (GPT-2
124M), where element-wise kernels weigh most, are faster than one profile of typical software says.
llm-foundry's rows of 2023 are slower than it says where rows are long or a GPU has few tokens.
PyTorch's eager pipeline (Llama3-405B) loses more than its bubble.
"""


def table() -> str:
    """The comparison as Markdown."""
    lines = [
        "# Step time: estimated against published",
        "",
        "Written by `python scripts/bench/plan_anchors.py`. Tokens/s/GPU; remat in our words.",
        "",
        METHOD.strip(),
        "",
        "## Rows held out",
        "",
        *_section(HELD_OUT),
        "",
        "## Rows fitted on",
        "",
        *_section(FITTED),
        "",
        "## Rows found later",
        "",
        *_section(LATER),
        MISSES,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(rows: list[Row]) -> list[str]:
    results = [(row, *measure(row)) for row in rows]
    errors = [error for *_, error in results]
    within = sum(abs(error) <= 0.15 for error in errors)
    return [
        f"{within} of {len(errors)} rows within 15 %, median of |error| "
        f"{percent(statistics.median(map(abs, errors)))}, "
        f"largest {percent(max(map(abs, errors)))}.",
        "",
        "| source | run | GPU | mesh | rows × microbatches | remat | published | estimated "
        "| error | assumed |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.source} | {row.what} | {row.gpu.name} | {row.mesh} | {row.micro_rows} × "
            f"{row.microbatches} | {row.remat} | {published:,.0f} | {found:,.0f} | "
            f"{percent(error, sign=True)} | {row.assumed} |"
            for row, published, found, error in results
        ),
    ]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.write_text(table(), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
