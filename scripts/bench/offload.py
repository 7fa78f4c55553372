"""Compile an 8B model with rows of a million tokens for 8 H100, with and without host offload.

    pip install -c constraints.txt -e '.[plan]'
    python scripts/bench/offload.py >results/offload_NAME.md    # no GPU needed

For each remat policy, the step of `configs/llama3_8b_1m.toml` is compiled by XLA:GPU. The table has
planned and compiled memory, the estimated step, and the check of the order in which backward reads
the host (`plan/compiled/host_offload.py`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxdist.config import stored_run
from jaxdist.hardware import GPUS, Cluster
from jaxdist.plan.compiled.check import NotCompiled, compile_step
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.plan.estimate.time import estimate_time

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "llama3_8b_1m.toml"
POLICIES = ("full", "offload:layer_input", "offload:layer_input,attention")
GIB = 2**30


def main() -> None:
    """Compile each policy and print the table."""
    config = stored_run(CONFIG)
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=8)
    rows, versions = [], ""
    for policy in POLICIES:
        run = dataclasses.replace(config, train=dataclasses.replace(config.train, remat=policy))
        job = Job.of(run, run.mesh.spec, cluster)
        step = compile_step(run, run.mesh.spec, cluster, timeout_s=3600)
        if isinstance(step, NotCompiled):
            raise SystemExit(f"{policy}: {step.reason}. {step.fix}\n{step.details}")
        memory, seconds = estimate_memory(job), estimate_time(job).seconds
        order = "no offload" if policy == "full" else "wrong" if step.offload else "right"
        rows.append(
            f"| `{policy}` | {memory.total_bytes / GIB:.1f} | {step.memory.total_bytes / GIB:.1f} "
            f"| {memory.host_bytes / GIB:.1f} | {step.memory.host_bytes / GIB:.1f} "
            f"| {seconds:.0f} | {order} |"
        )
        versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    print(
        f"{versions}; 8 H100, `cp=8`, one row of 1,048,576 tokens a step\n\n"
        "| remat | planned GiB | compiled GiB | host planned | host compiled | step s | order |\n"
        "|---|---:|---:|---:|---:|---:|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
