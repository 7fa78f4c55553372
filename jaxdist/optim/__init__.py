"""Optimizers and learning-rate schedules: settings and update directions.

An optimizer here is everything but the learning rate. It turns gradients into a direction, weight
decay included, and the train step does the rest: `params -= lr(step) * direction`. Gradient
clipping belongs to the step too (its norm spans devices); only its setting lives here.

    adamw, sgd, lion   element by element: moves nothing where state and gradients are sharded alike
    adafactor, muon    see whole matrices: moves what its sums over rows and columns need
"""

from jaxdist.optim.config import OptimConfig
from jaxdist.optim.freeze import frozen_leaves, frozen_problems, is_frozen
from jaxdist.optim.learning_rate import LrSchedule, make_lr_schedule
from jaxdist.optim.rules import decay_mask, hidden_matrices, make_optimizer
