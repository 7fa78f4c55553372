"""Reward modeling: learn which of two completions is better.

Source: Ouyang et al. 2022, "Training language models to follow instructions ...", equation 1, the
model of Bradley and Terry, as TRL's RewardTrainer without margin and centering.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxdist.core.types import Array, Batch, Context, Sums
from jaxdist.objectives.classification import real_rows


@dataclasses.dataclass(frozen=True)
class Reward:
    """Objective of a reward model; each pair is two adjacent rows, the chosen one first."""

    unit: ClassVar[str] = "examples"
    rows_per_example: ClassVar[int] = 2

    def __call__(self, output: Float[Array, "batch 1"], batch: Batch, context: Context) -> Sums:
        """Return the loss and the metrics, summed over the pairs of this device's rows."""
        chosen, rejected = output[::2, 0], output[1::2, 0]
        margin = chosen - rejected
        # Padding of the last evaluation batch has no tokens.
        is_real = real_rows(batch, context)[::2]
        total = lambda x: jnp.sum(x * is_real)
        return {
            "loss": total(-jax.nn.log_sigmoid(margin)),
            "weight": total(1.0),
            "correct": total((margin > 0).astype(jnp.float32)),
            "reward_chosen": total(chosen),
            "reward_rejected": total(rejected),
            "reward_margin": total(margin),
        }
