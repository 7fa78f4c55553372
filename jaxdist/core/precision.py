"""Number formats: compute dtype, reduction dtype, and dynamic loss scaling for float16.

Trained parameters, norms, softmax, loss and accumulation are float32.

Source of loss scaling: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from jaxdist.core.types import Array
from jaxdist.settings import setting

INITIAL_LOSS_SCALE = 2.0**16
"""First loss scale of a float16 run; the first steps halve it if it is too large."""

GROWTH_STEPS = 2000
"""Number of finite steps in a row after which the loss scale doubles, as in PyTorch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of compute and reductions."""

    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of matrix products; auto = float32 on CPU, bfloat16 on GPUs"
    )
    matmul_dtype: Literal["auto", "fp8", "mxfp8", "nvfp4"] = setting(
        "auto",
        "dtype of the products with weights in all layers but the first and the last; auto = "
        "compute_dtype; fp8 = 8 bits, on Ada, Hopper or later GPUs; mxfp8 = 8 bits with a scale "
        "for each block, nvfp4 = 4 bits in forward, mxfp8 in backward, both on Blackwell or later; "
        "all emulated on CPU",
    )
    reduce_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "dtype in which devices sum gradients of weights that they gather (fsdp, mesh.zero=3); "
        "auto = bfloat16 if that is the compute dtype, else float32; sums over microbatches are "
        "always float32, and with auto a pipeline's sums over devices that follow them",
    )

    def problems(self) -> list[str]:
        """Return an error message for each violated rule of this section."""
        if self.matmul_dtype != "auto" and self.compute_dtype == "float16":
            return [
                f"precision.matmul_dtype={self.matmul_dtype} with precision.compute_dtype=float16: "
                "the range of narrow numbers and their scales is wider than that of float16. Use "
                "bfloat16 or float32."
            ]
        return []

    def resolve(self, platform: str) -> Any:
        """Return the compute dtype on a platform ("cpu" or "gpu")."""
        if self.compute_dtype != "auto":
            return jnp.dtype(self.compute_dtype)
        return jnp.dtype("bfloat16" if platform == "gpu" else "float32")

    def resolve_reduce(self, compute_dtype: Any) -> Any:
        """Return the dtype in which devices sum gathered weights' gradients in `compute_dtype`."""
        if self.reduce_dtype != "auto":
            return jnp.dtype(self.reduce_dtype)
        # The range of float16 is too narrow for sums.
        narrow = jnp.dtype(compute_dtype) == jnp.bfloat16
        return jnp.dtype("bfloat16" if narrow else "float32")


def initial_loss_scale(compute_dtype: Any) -> dict[str, Array]:
    """Return the `scale` float32 [] and `finite_steps` int32 []; {} unless the dtype is float16."""
    if jnp.dtype(compute_dtype) != jnp.float16:
        return {}
    return {
        "scale": jnp.asarray(INITIAL_LOSS_SCALE, jnp.float32),
        "finite_steps": jnp.zeros((), jnp.int32),
    }


def update_loss_scale(loss_scale: dict[str, Array], finite: Array) -> dict[str, Array]:
    """Return the loss scale after a step: halved after NaN or Inf, but never below 1; {} stays {}.

    It doubles after `GROWTH_STEPS` steps in a row with `finite` loss and gradients, bool [].
    """
    if not loss_scale:
        return {}
    counted = loss_scale["finite_steps"] + 1
    grow = counted >= GROWTH_STEPS
    scale = loss_scale["scale"]
    grown = jnp.where(grow, scale * 2, scale)
    return {
        "scale": jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0)),
        "finite_steps": jnp.where(finite & ~grow, counted, 0),
    }
