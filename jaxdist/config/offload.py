"""Settings and meshes that moments or activations outside of the devices exclude."""

from __future__ import annotations

from typing import Any, TypeAlias

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.types import offloaded_names
from jaxdist.runtime.storage import is_url

RunConfig: TypeAlias = Any
"""`config.run_config.RunConfig`, which would be a circular import here."""


def offload_problems(config: RunConfig) -> list[str]:
    """Return an error for each setting that excludes moments in host memory or on a disk."""
    if config.train.offload == "none":
        return []
    rules = [
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
            "Use --train.offload-optimizer none; the checkpoints are the same.",
        ),
        (
            is_url(config.named_directory),
            f"run_dir={config.named_directory!r}: moments are copied to checkpoints in a file "
            "system only",
            "Use a local or shared directory, or --train.offload-optimizer none.",
        ),
    ]
    name = f"train.offload_optimizer={config.train.offload_optimizer!r} with"
    return [f"{name} {what}. {fix}" for is_broken, what, fix in rules if is_broken]


def offload_mesh_problems(config: RunConfig, spec: MeshSpec) -> list[str]:
    """Return an error if activations in host memory exclude a mesh, else []."""
    if spec[PIPELINE] == 1 or not offloaded_names(config.train.remat):
        return []
    return [
        f"mesh pp={spec[PIPELINE]} with train.remat={config.train.remat!r}: a pipeline keeps its "
        "activations in slots of GPU memory. Use pp=1, or --train.remat full."
    ]
