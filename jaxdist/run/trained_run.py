"""A run directory opened for reading: its settings and weights on this machine's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxdist import runtime
from jaxdist.checkpoint import Checkpointer
from jaxdist.config import stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import ConfigError, Params
from jaxdist.run.setup import Parts, assemble
from jaxdist.runtime.storage import Location, locate


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run opened for reading: its directory, and its parts on this machine's devices."""

    path: Location
    parts: Parts

    def params(self, step: int | None = None) -> tuple[Params, int]:
        """Parameters of a checkpoint, sharded as in training, and its step; None: the newest valid.

        Raises:
            ConfigError: there is no such checkpoint, or it holds another model.
        """
        checkpointer = Checkpointer(
            self.path / "checkpoints", self.parts.config.checkpoint, read_only=True
        )
        chosen = checkpointer.choose() if step is None else step
        steps = checkpointer.steps()
        if not steps:
            raise ConfigError(
                f"run {self.path} has no checkpoint: it was not trained far enough to save one. "
                f"Continue it: python -m jaxdist.train --resume {self.path}."
            )
        if chosen not in steps:
            there = ", ".join(map(str, steps))
            raise ConfigError(
                f"run {self.path} has no valid checkpoint {'' if step is None else step}, it has: "
                f"{there}. Name one of these, or leave --step out for the newest."
            )
        target = self.parts.abstract_state().params
        return checkpointer.restore_params(target, chosen), chosen


def open_run(
    path: str, *, mesh: str = "auto", simulate: int = 0, train: Mapping[str, Any] | None = None
) -> TrainedRun:
    """Open a run for evaluation or generation on another mesh, device count or machine.

    `path` may be a checkpoint inside the run; mesh "auto" is one device; `simulate=0` means the
    machine's own devices; `train` replaces settings of that section.

    Raises:
        ConfigError: no run is there, its settings cannot be read, or the mesh is not legal.
    """
    run = _run_of(locate(path))
    config = stored_run(run / "config.toml")
    if simulate:
        runtime.simulate(simulate)
    runtime.setup_compilation_cache(config.runtime.compilation_cache_dir)
    devices = list(jax.devices())
    spec = None if mesh == "auto" else MeshSpec.parse(mesh, len(devices))
    devices = devices[: spec.num_devices if spec is not None else 1]
    config = dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, shape=str(spec) if spec else "dp=1", reason=""),
        train=dataclasses.replace(config.train, num_microbatches=0, **(train or {})),
    )
    return TrainedRun(path=run, parts=assemble(config, devices))


def _run_of(path: Location) -> Location:
    for candidate in (path, path.parent, path.parent.parent):
        if (candidate / "config.toml").exists():
            return candidate
    raise ConfigError(
        f"run {str(path)!r} holds no config.toml. Name a run directory as training printed it, "
        "e.g. runs/default-20260101-120000."
    )
