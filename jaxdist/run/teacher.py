"""The teacher of distillation: another model that adds its predictions to each batch.

Its weights are frozen, sharded over the run's mesh by the same rules, and not part of checkpoints.
A program of their own computes the predictions before each train step.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import jax

from jaxdist.checkpoint.manifest import named_step
from jaxdist.config import settings_of_run
from jaxdist.core.outcome_logps import top_tokens
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step import make_context
from jaxdist.core.step.row_logps import make_token_values
from jaxdist.core.types import TEACHER_LOGPS, TEACHER_TOKENS, Array, Batch, Context, Params
from jaxdist.core.weights import Parameter
from jaxdist.data.packing import Fields
from jaxdist.models import ModelConfig, build
from jaxdist.models.adapters import LoraConfig
from jaxdist.models.huggingface.directory import folder_of, is_model, read_model
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.objectives.distillation import NUM_TOKENS
from jaxdist.optim import OptimConfig
from jaxdist.plan.estimate.memory_check import Budget
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
        """Return a global batch [rows, ...] with the fields of the teacher."""
        return {**batch, **self._predict(self._params, batch)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on a device."""
        shards = jax.tree.leaves(self.parts.abstract_state().params)
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shards)

    @functools.cached_property
    def _params(self) -> Params:
        """The weights, in execution order; loaded at the first use."""
        params = self.parts.in_execution_order(self.parts.initial_params())
        path, size = self.objective.teacher, in_bytes(self.num_bytes)
        log.info("teacher: weights from %s, %s of each device", path, size)
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


def with_teacher(
    parts: Parts, fields: Fields, budget: Budget | None = None
) -> tuple[Parts, Budget | None]:
    """Return the parts of a run with its teacher, if it has one, for rows of these fields.

    The memory of the teacher is subtracted from the budget. Raise ConfigError if the teacher does
    not fit the student or the mesh.
    """
    path = parts.config.objective.teacher
    if not path:
        return parts, budget
    try:
        teacher = compare_kernel(_teacher_parts(parts, _model_at(path)), fields)
    except ConfigError as error:
        problems = [f"objective.teacher={path!r}: {line}" for line in error.problems]
        raise ConfigError(problems) from None
    added = Teacher(teacher, parts.config.objective)
    if budget is not None:
        budget = dataclasses.replace(budget, limit_bytes=budget.limit_bytes - added.num_bytes)
    return dataclasses.replace(parts, teacher=added), budget


def _model_at(path: str) -> ModelConfig:
    """Return the model settings of a Hugging Face directory or a run."""
    if is_model(path):
        return read_model(folder_of(path))
    directory, step = named_step(path)
    return settings_of_run(directory.parent, step).model


def _teacher_parts(student: Parts, settings: ModelConfig) -> Parts:
    """Return the parts of a frozen model on the student's mesh, stored in the compute dtype."""
    config, of_student = student.config, student.model.vocab_size
    model = build(settings, seq_len=config.train.seq_len)
    problems = settings.run_problems(
        seq_len=config.train.seq_len, num_tokens=0, tokenizer="", simulate=config.simulate,
        objective="cross_entropy", matmul_dtype="auto",
    )  # fmt: skip
    if model.vocab_size != of_student or not of_student:
        problems.append(
            f"its vocabulary has {model.vocab_size} tokens, and that of the student {of_student}. "
            "Use a teacher with the student's tokenizer, or change model.vocab_size."
        )
    if problems:
        raise ConfigError(problems)
    config = dataclasses.replace(
        config,
        init_from=config.objective.teacher,
        reinit_params=[],
        model=settings,
        lora=LoraConfig(),
        mesh=dataclasses.replace(config.mesh, shape=str(student.spec), elastic=False),
        objective=ObjectiveConfig(),
        optim=OptimConfig(),
        precision=dataclasses.replace(config.precision, matmul_dtype="auto"),
    )
    init = model.init
    storage: Any = "bfloat16" if student.plan.compute_dtype == "bfloat16" else "float32"
    frozen = lambda dims: Parameter(dims, **{**vars(dims), "storage": storage, "update": "none"})
    model = dataclasses.replace(
        model,
        init=lambda key: jax.tree.map(lambda x: x.astype(storage), init(key)),
        axes=jax.tree.map(frozen, model.axes),
    )
    return assemble(config, student.devices, None, student.layout.host_of, model=model)
