"""The teacher of distillation: another model that adds its predictions to each batch.

Its weights are frozen, sharded over the run's mesh by the same rules, and not part of checkpoints.
A program of its own computes the predictions for each batch of training and evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import jax

from jaxdist.config.teacher import teacher_of, teacher_problems
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step import make_context
from jaxdist.core.step.row_logps import make_token_values
from jaxdist.core.token_logps import top_tokens
from jaxdist.core.types import TEACHER_LOGPS, TEACHER_TOKENS, Array, Batch, Context, Params
from jaxdist.data.packing import Fields
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.objectives.distillation import NUM_TOKENS
from jaxdist.run.setup import Parts, assemble, compare_kernel
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher's parts, and the objective that reads its predictions."""

    parts: Parts
    objective: ObjectiveConfig

    def __call__(self, batch: Batch) -> Batch:
        """Return a global batch [rows, ...] with the teacher's predictions as further fields."""
        return {**batch, **self._predict(self._params, batch)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the teacher's weights on one device."""
        shards = jax.tree.leaves(self.parts.abstract_state().params)
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shards)

    @functools.cached_property
    def _params(self) -> Params:
        """The weights, in execution order; loaded at the first use."""
        params = self.parts.in_execution_order(self.parts.initial_params())
        path, size = self.objective.teacher, in_bytes(self.num_bytes)
        log.info("teacher: weights from %s use %s of memory on each device", path, size)
        return params

    @functools.cached_property
    def _predict(self) -> Any:
        """The jitted function (params, batch [rows, ...]) -> the teacher's fields."""
        parts, objective = self.parts, self.objective
        model, layout, plan = parts.model, parts.layout, parts.plan
        axis = TENSOR.name if TENSOR in layout.used else None
        count = min(NUM_TOKENS, model.vocab_size)

        def values(output: Any, rows: Batch, context: Context) -> dict[str, Array]:
            """Return the fields of this device's rows, [batch, seq, ...] each."""
            tokens = top_tokens(output, count, axis, plan.loss_chunk)
            logps = context.token_logps(output, tokens, temperature=1 / objective.strength).logps
            return {TEACHER_TOKENS: tokens, TEACHER_LOGPS: logps}

        compute = make_token_values(model, layout, plan, make_context(model, layout, plan), values)
        return jax.jit(compute)


def with_teacher(parts: Parts, fields: Fields) -> Parts:
    """Return the parts of a run with its teacher, if it has one, for rows of these fields.

    Raise ConfigError if the teacher does not fit the student or the mesh.
    """
    config = parts.config
    made = teacher_of(config, parts.model.vocab_size, str(parts.plan.compute_dtype))
    if made is None:
        return parts
    mesh = dataclasses.replace(config.mesh, shape=str(parts.spec), elastic=False)
    settings = dataclasses.replace(made[0], mesh=mesh)
    try:
        own = assemble(settings, parts.devices, None, parts.layout.host_of, model=made[1])
        own = compare_kernel(own, fields)
    except ConfigError as error:
        raise teacher_problems(config.objective.teacher, error.problems) from None
    return dataclasses.replace(parts, teacher=Teacher(own, config.objective))
