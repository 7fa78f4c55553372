"""Settings and meshes that moments on a disk, or activations in host memory, exclude."""

from __future__ import annotations

from typing import Any, TypeAlias

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.types import offloaded_names
from jaxdist.runtime.storage import is_url

RunConfig: TypeAlias = Any
"""`config.run_config.RunConfig`, which would be a circular import here."""

ELEMENTWISE = ("adamw", "sgd", "lion")
"""Optimizers whose update of an element does not depend on other elements."""


def offload_problems(config: RunConfig) -> list[str]:
    """Return an error for each setting that excludes optimizer moments on a disk."""
    if config.train.offload != "disk":
        return []
    optim, none = config.optim, "--train.offload-optimizer none"
    rules = [
        (
            optim.optimizer not in ELEMENTWISE,
            f"optim.optimizer={optim.optimizer!r}: its update of a matrix needs all its elements",
            f"Use adamw, sgd or lion, or {none}.",
        ),
        (
            optim.moment_dtype == "int8",
            "optim.moment_dtype='int8': blocks of 256 values reach across layers",
            f"Use float32 or bfloat16, or {none}.",
        ),
        (
            bool(config.monitoring.layer_statistics_steps),
            f"monitoring.layer_statistics_steps={config.monitoring.layer_statistics_steps}: the "
            "parameters before the update are not kept",
            "Leave it out.",
        ),
        (
            bool(config.checkpoint.local_dir),
            f"checkpoint.local_dir={config.checkpoint.local_dir!r}: local saves have no moments",
            "Leave it out, and use checkpoint.save_interval_minutes.",
        ),
        (
            bool(config.replay),
            f"replay={config.replay!r}: a replay repeats the update from one state",
            f"Use {none} or host; the checkpoints are the same.",
        ),
        (
            is_url(config.named_directory),
            f"run_dir={config.named_directory!r}: moments are copied to checkpoints in a file "
            "system only",
            "Use a local or shared directory.",
        ),
    ]
    name = f"train.offload_optimizer={config.train.offload_optimizer!r} with"
    return [f"{name} {what}. {fix}" for is_broken, what, fix in rules if is_broken]


def offload_mesh_problems(config: RunConfig, spec: MeshSpec) -> list[str]:
    """Return the errors if optimizer moments on disk, or activations on host, exclude a mesh."""
    if spec[PIPELINE] == 1:
        return []
    problems = []
    if offloaded_names(config.train.remat):
        problems.append(
            f"mesh pp={spec[PIPELINE]} with train.remat={config.train.remat!r}: a pipeline keeps "
            "its activations in slots of GPU memory. Use pp=1, or --train.remat full."
        )
    if config.train.offload != "disk":
        return problems
    return [
        *problems,
        f"mesh pp={spec[PIPELINE]} with train.offload_optimizer={config.train.offload_optimizer!r}:"
        " the update walks over all layers in order. Use pp=1; fsdp shards the layers as well.",
    ]


def offload_process_problems(config: RunConfig, num_processes: int) -> list[str]:
    """Return an error if moments are on a disk and the job has several processes, else []."""
    if config.train.offload != "disk" or num_processes == 1:
        return []
    return [
        f"train.offload_optimizer={config.train.offload_optimizer!r} with {num_processes} "
        "processes: one process writes all moments. Start one process for all GPUs of the node, or "
        "use host."
    ]
