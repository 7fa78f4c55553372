"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float32

from jaxdist.core.types import Array
from jaxdist.optim.config import OptimConfig

LrSchedule = Callable[[Array], Array]

WSD_DECAY_RATIO = 0.2
"""Share of a run in which wsd decays if `decay_steps` is 0 (Hägele et al. 2024,
"Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations": 10 to 20 %)."""


def make_lr_schedule(
    config: OptimConfig, *, total_steps: int, global_batch_size: int
) -> LrSchedule:
    """Make the function from steps to learning rates.

    Warmup is linear and never 0: step s of w has peak * (s + 1) / (w + 1). After the decay the rate
    stays at `min_lr_ratio * peak`. Steps count from 0 to `total_steps` - 1. The function maps int32
    steps, scalar or array, to float32 rates.

    References:
        cosine: Loshchilov and Hutter, "SGDR", 2017, without restarts.
        wsd: Hu et al., "MiniCPM", 2024, section 4, with a linear decay.
        linear scaling: Goyal et al., "Accurate, Large Minibatch SGD", 2017; square root:
        Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """
    peak = config.peak_lr * _lr_scale(config, global_batch_size)
    floor = peak * config.min_lr_ratio
    warmup = config.warmup_steps
    start, decay = _decay_span(config, total_steps)

    def lr(step: Any) -> Float32[Array, "*steps"]:
        """Return the learning rate of each step, int32 [*steps]."""
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - start) / decay, 0.0, 1.0)
        if config.schedule == "cosine":
            remaining = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif config.schedule == "constant":
            remaining = jnp.ones_like(progress)
        else:
            remaining = 1.0 - progress
        decayed = floor + (peak - floor) * remaining
        return jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), decayed)

    return lr


def _lr_scale(config: OptimConfig, global_batch_size: int) -> float:
    kind, _, base = config.lr_scaling.partition(":")
    if kind == "none":
        return 1.0
    ratio = global_batch_size / int(base)
    return ratio if kind == "linear" else math.sqrt(ratio)


def _decay_span(config: OptimConfig, total_steps: int) -> tuple[int, int]:
    """Return the first step of the decay, and the number of its steps (at least 1)."""
    if config.schedule == "wsd":
        decay = config.decay_steps or max(1, round(total_steps * WSD_DECAY_RATIO))
        return max(config.warmup_steps, total_steps - decay), decay
    return config.warmup_steps, max(1, config.decay_steps or total_steps - config.warmup_steps)
