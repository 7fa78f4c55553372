"""Which attention kernel runs, and why: a rule on settings, needed before any model is built."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from jaxdist.core.types import ConfigError, Context


def choose_attention(
    wanted: str, context: Context, *, head_dim: int, packed: bool, attention_dropout: float
) -> tuple[Literal["xla", "cudnn"], str]:
    """The attention kernel and the reason, "xla" or "cudnn".

    Raises:
        ConfigError: cuDNN was asked for by name and cannot honour the mask or the shapes.
    """
    obstacles = []
    if context.platform != "gpu":
        obstacles.append(f"cuDNN needs an NVIDIA GPU, this is {context.platform}")
    elif context.compute_capability and float(context.compute_capability) < 8.0:
        obstacles.append(
            f"cuDNN's kernel needs compute capability 8.0, this is {context.compute_capability}"
        )
    if context.dtype not in (jnp.bfloat16, jnp.float16):
        obstacles.append(f"cuDNN needs bfloat16 or float16, compute is {jnp.dtype(context.dtype)}")
    if packed:
        obstacles.append("cuDNN's kernel knows no document boundaries and rows are packed")
    if head_dim % 8 or head_dim > 128:
        obstacles.append(f"cuDNN needs head_dim ≤ 128 and a multiple of 8, this is {head_dim}")
    if attention_dropout:
        obstacles.append("attention dropout must give the same bits on every mesh")
    if wanted == "xla":
        return "xla", "asked for"
    if not obstacles:
        return "cudnn", "fused, and it honours the causal mask and the window"
    if wanted == "cudnn":
        raise ConfigError(
            [
                f"model.attention='cudnn' is impossible here: {'; '.join(obstacles)}. "
                "Use attention='xla' or 'auto'."
            ]
        )
    return "xla", "; ".join(obstacles)
