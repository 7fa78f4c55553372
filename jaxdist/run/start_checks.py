"""Checks of devices at the start of a run, and of weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxdist.core.step_plan import platform_of
from jaxdist.core.trials import wrong_operations
from jaxdist.core.types import Params
from jaxdist.runtime import coordination
from jaxdist.runtime.formatting.tables import few
from jaxdist.settings import ConfigError


@jax.jit
def _finite(params: Params) -> Params:
    """Return bool [] for each leaf [...]: all its values are finite."""
    return jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), params)


def nonfinite_names(params: Params) -> list[str]:
    """Return the names of the parameters that contain NaN or infinity; collective."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(params)))
    return [keystr(path, simple=True, separator="/") for path, is_finite in leaves if not is_finite]


def check_finite(params: Params, path: str) -> None:
    """Raise ConfigError if weights contain NaN or infinity; collective."""
    if names := nonfinite_names(params):
        raise ConfigError(
            f"weights of {path}: {few(names, 8)} contain NaN or Inf. Use earlier weights, or name "
            "these in --reinit-params."
        )


def check_operations(kind: str = "operations") -> None:
    """Raise ConfigError if operations are wrong on a process's first GPU; collective."""
    device = jax.local_devices()[0]
    wrong = wrong_operations(device, kind) if platform_of(device) == "gpu" else []
    fix = "Use --train.remat full, or install " if kind == "offload" else "Install "

    def compare(everyone: list[str]) -> None:
        problems = [
            f"process {process}, {device.device_kind}, jax {jax.__version__}: {line}. {fix}"
            "another version of jax or of the driver, or leave the GPU out; override=operations "
            "starts anyway."
            for process, text in enumerate(everyone)
            for line in text.splitlines()
        ]
        if problems:
            raise ConfigError(problems)

    coordination.decide_from(kind, "\n".join(wrong), compare)
