"""The teacher of distillation: settings and model of a frozen network on the mesh of the run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax

from jaxdist.config.command_line import model_at
from jaxdist.config.run_config import RunConfig
from jaxdist.core.types import Model
from jaxdist.core.weights import Parameter
from jaxdist.models import ModelConfig, build
from jaxdist.models.adapters import LoraConfig
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.optim import OptimConfig
from jaxdist.settings import ConfigError

Storage = Literal["bfloat16", "float32"]


def teacher_of(
    config: RunConfig, vocab_size: int, compute_dtype: str
) -> tuple[RunConfig, Model] | None:
    """Return settings and model of the run's teacher, or None.

    Its weights are bfloat16 if `compute_dtype` is, else float32. Raise `ConfigError` if it does not
    fit a student with `vocab_size` tokens.
    """
    path = config.objective.teacher
    if not path:
        return None
    storage: Storage = "bfloat16" if compute_dtype == "bfloat16" else "float32"
    try:
        settings, model = _open(path, config.train.seq_len, storage)
    except ConfigError as error:
        raise teacher_problems(path, error.problems) from None
    problems = settings.run_problems(
        seq_len=config.train.seq_len, num_tokens=0, tokenizer="", simulate=config.simulate,
        matmul_dtype="auto",
    )  # fmt: skip
    if settings.num_labels:
        problems.append("it has a score head. Use a model that predicts tokens.")
    if model.vocab_size != vocab_size or not vocab_size:
        problems.append(
            f"its vocabulary has {model.vocab_size} tokens, and that of the student {vocab_size}. "
            "Use a teacher with the student's tokenizer, or change model.vocab_size."
        )
    if problems:
        raise teacher_problems(path, problems)
    changed = dataclasses.replace(
        config,
        init_from=path,
        reinit_params=[],
        model=settings,
        lora=LoraConfig(),
        objective=ObjectiveConfig(),
        optim=OptimConfig(),
        precision=dataclasses.replace(config.precision, matmul_dtype="auto"),
    )
    return changed, model


def teacher_problems(path: str, problems: list[str]) -> ConfigError:
    """Return the error with these problems of the teacher at `path`."""
    return ConfigError([f"objective.teacher={path!r}: {problem}" for problem in problems])


@functools.lru_cache(maxsize=8)  # a search of meshes builds many jobs
def _open(path: str, seq_len: int, storage: Storage) -> tuple[ModelConfig, Model]:
    settings = model_at(path)
    model = build(settings, seq_len=seq_len)
    init = model.init
    frozen = lambda dims: Parameter(dims, **{**vars(dims), "storage": storage, "update": "none"})
    return settings, dataclasses.replace(
        model,
        init=lambda key: jax.tree.map(lambda x: x.astype(storage), init(key)),
        axes=jax.tree.map(frozen, model.axes),
    )
