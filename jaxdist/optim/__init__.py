"""Optimizers and learning-rate schedules: settings, update directions, and their state's dims.

An optimizer here is everything but the learning rate. It turns gradients into a direction, weight
decay included, and the train step does the rest: `params -= lr(step) * direction`. Gradient
clipping belongs to the step too (its norm spans devices); only its setting lives here.

    adamw, sgd, lion   element by element: may run on local shards inside `shard_map`
    adafactor, muon    see whole matrices: must run on global arrays (`OptimConfig.elementwise`)
"""

from jaxdist.optim.config import OptimConfig
from jaxdist.optim.freeze import frozen_leaves, frozen_problems, is_frozen
from jaxdist.optim.learning_rate import Schedule, make_schedule
from jaxdist.optim.rules import decay_mask, hidden_matrices, make_optimizer, state_axes
