"""Memory and work of the teacher of distillation, which predicts before each step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxdist.core.parallel.context import CONTEXT
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.model_costs import Work, costs_of


def field_bytes(job: Job) -> float:
    """Return the bytes on a device of the predictions that the teacher adds to a batch."""
    fields = job.config.objective.added_fields(job.seq_len, job.model.vocab_size)
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
    return job.rows * sum(sizes) / job.spec[CONTEXT]


def state_bytes(job: Job) -> float:
    """Return the bytes of the teacher's weights on a device; 0 without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return 0.0
    return sum(w.num_bytes * teacher.size(w, "param") for w in teacher.weights)


def phase(job: Job) -> dict[str, Mapping[str, float]]:
    """Return "teacher" -> name -> bytes alive while it predicts, at most; {} without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return {}
    costs, depth = costs_of(teacher), max(1, teacher.layers_per_stage)
    head = dict(costs.head_parts())
    return {
        "teacher": {
            "gathered weights": teacher.gathered_bytes(teacher.layers) / depth
            + head.get("gathered weights", 0.0),
            "activations": costs.working(),
            "logits": head.get("logits", 0.0),
        }
    }


def work(job: Job) -> Work:
    """Return the work of the teacher's forward pass over a microbatch; zero without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return Work()
    costs = costs_of(teacher)
    # A frozen head counts two products, and prediction has two: one selects the most probable
    # tokens, the other returns their probabilities.
    return costs.forward() * teacher.layers_per_stage + costs.head()
