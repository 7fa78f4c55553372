"""Objectives: (output of a model's head, batch, context) -> Sums; training minimizes the loss.

An objective receives this device's rows of one microbatch. It returns sums over them, never means:
`loss`, `weight` and any metrics (`core.types.Sums`). Custom objectives have the same signature.
"""

from jaxdist.objectives.choice import regularized, regularizer_problems
from jaxdist.objectives.classification import classification
from jaxdist.objectives.cross_entropy import cross_entropy
