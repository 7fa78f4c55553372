"""Optimizers and learning-rate schedules: settings and update directions.

An optimizer maps gradients to a direction that includes weight decay. The train step applies it:
`params -= lr(step) * direction`. Gradient clipping is part of the step.

    adamw, sgd, lion   element-wise: no communication if state and gradients have the same shards
    adafactor, muon    per matrix: communication for sums over rows and columns
"""

from jaxdist.optim.config import OptimConfig
from jaxdist.optim.groups import frozen_problems, group_problems, is_frozen, with_frozen
from jaxdist.optim.rules import (
    LrSchedule,
    decay_mask,
    from_optax,
    hidden_matrices,
    make_lr_schedule,
    make_optimizer,
)
