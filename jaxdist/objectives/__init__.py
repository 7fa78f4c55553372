"""Objectives: (output of a model's head, batch, context) -> Sums; the loss that training minimizes.

An objective reads this device's rows of one microbatch and returns sums over them, never means:
`loss`, `weight` and any metric (`core.types.Sums`). Write your own as a function like these two.
"""

from jaxdist.objectives.classification import classification
from jaxdist.objectives.cross_entropy import cross_entropy
