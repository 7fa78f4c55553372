"""Optimizers and learning-rate schedules: settings and update directions.

An optimizer maps gradients to a direction that includes weight decay. The train step applies it:
`params -= lr(step) * direction`. Gradient clipping is part of the step.

    adamw, sgd, lion   element-wise: no communication, except for moments in 8 bits (`int8.py`)
    adafactor, muon    per matrix: communication if devices shard a matrix
"""

from jaxdist.optim.config import OptimConfig
from jaxdist.optim.groups import frozen_problems, group_problems, is_frozen, with_frozen
from jaxdist.optim.rules import (
    decay_mask,
    from_optax,
    hidden_matrices,
    make_lr_schedule,
    make_optimizer,
)
