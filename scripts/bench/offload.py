"""Compile Llama 3 8B for H100 with activations in host memory, and with moments on a disk.

    pip install -c constraints.txt -e '.[plan]'
    python scripts/bench/offload.py >results/offload_NAME.md    # no GPU needed

The step of `configs/llama3_8b_1m.toml` (rows of a million tokens on 8 GPUs) with each remat policy,
and that of `configs/llama3_8b_one_gpu.toml` (moments on a disk), are compiled by XLA:GPU. The table
has planned and compiled memory, the estimated step, and the check of the order in which backward
reads the host (`plan/compiled/host_offload.py`).
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

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CASES = [
    ("llama3_8b_1m", 8, "full"),
    ("llama3_8b_1m", 8, "offload:layer_input"),
    ("llama3_8b_1m", 8, "offload:layer_input,attention"),
    ("llama3_8b_one_gpu", 1, "full"),
]
"""Config, number of H100, remat policy."""

GIB = 2**30


def main() -> None:
    """Compile each case and print the table."""
    rows, versions = [], ""
    for name, num_gpus, policy in CASES:
        config = stored_run(CONFIGS / f"{name}.toml")
        cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=num_gpus)
        run = dataclasses.replace(config, train=dataclasses.replace(config.train, remat=policy))
        job = Job.of(run, run.mesh.spec, cluster)
        step = compile_step(run, run.mesh.spec, cluster, timeout_s=3600)
        if isinstance(step, NotCompiled):
            raise SystemExit(f"{name}, {policy}: {step.reason}. {step.fix}\n{step.details}")
        memory, seconds = estimate_memory(job), estimate_time(job).seconds
        order = "no offload" if policy == "full" else "wrong" if step.offload else "right"
        rows.append(
            f"| {name} | {num_gpus} | `{policy}` "
            f"| {memory.total_bytes / GIB:.1f} | {step.memory.total_bytes / GIB:.1f} "
            f"| {memory.host_bytes / GIB:.1f} | {step.memory.host_bytes / GIB:.1f} "
            f"| {seconds:.0f} | {order} |"
        )
        versions = ", ".join(f"{package} {number}" for package, number in step.versions.items())
    print(
        f"{versions}\n\n"
        "| config | H100 | remat | planned GiB | compiled GiB | host planned | host compiled "
        "| step s | order |\n"
        "|---|---:|---|---:|---:|---:|---:|---:|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
