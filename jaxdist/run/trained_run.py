"""A run opened for reading: its settings and weights on the devices of this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxdist import runtime
from jaxdist.checkpoint import Checkpointer
from jaxdist.checkpoint.manifest import named_step, steps_in
from jaxdist.checkpoint.pytree import Weights
from jaxdist.config import settings_of_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import Model, Objective, Params
from jaxdist.data import Dataset
from jaxdist.data.config import settings_of_tokens
from jaxdist.data.packing import Fields
from jaxdist.run.data_checks import check_data_fits, in_examples, open_run_data
from jaxdist.run.evaluation_loop import evaluate
from jaxdist.run.reference import with_reference
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts, assemble, decide_step
from jaxdist.run.teacher import with_teacher
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.storage import Location, locate
from jaxdist.settings import ConfigError


class LoadedWeights(NamedTuple):
    """Loaded weights: a tree of arrays, the step of their checkpoint, "ema" or "raw"."""

    params: Params
    step: int
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run opened for reading: its directory, and its parts on the devices of this machine.

    `step` is the step of the checkpoint if its path was opened, else None. `rows` replace the
    function in `data.sources`.
    """

    path: Location
    parts: Parts
    step: int | None = None
    rows: Any = None
    _parts_of: dict[bool, Parts] = dataclasses.field(default_factory=dict, init=False)

    def weights(self, step: int | None = None, kind: Weights = "auto") -> LoadedWeights:
        """Return the weights of a checkpoint in model order, sharded over the run's mesh.

        The default is the opened checkpoint, or the newest valid one. `kind` is as in
        `Checkpointer.restore_params`. Raise ConfigError if the checkpoint does not exist, has
        another model or no average, or is not the opened one.
        """
        if None not in (step, self.step) and step != self.step:
            raise other_step(step, self.step, self.path)
        step = self.step if step is None else step
        checkpointer = Checkpointer(
            self.path / "checkpoints", self.parts.config.checkpoint, read_only=True
        )
        chosen = checkpointer.choose() if step is None else step
        steps = checkpointer.steps()
        if not steps:
            raise ConfigError(
                f"run {self.path} has no checkpoint: it was not trained far enough to save one. "
                f"Continue it: {shell_python()} -m jaxdist.train --resume {self.path}."
            )
        if chosen not in steps:
            existing = ", ".join(map(str, steps))
            raise ConfigError(
                f"run {self.path} has no checkpoint {chosen}. It has {existing}: name one of "
                "these, or omit --step for the newest valid one."
            )
        own = self.parts.config
        if step is None and chosen != steps[-1]:  # a damaged checkpoint is newer
            stored = settings_of_run(self.path, chosen)
            if (stored.model, stored.data) != (own.model, own.data):
                raise ConfigError(
                    f"checkpoint {chosen} of {self.path} has other model or data settings than the "
                    f"damaged checkpoint {steps[-1]}. Add --step {chosen} to use it."
                )
        stored_kind = checkpointer.weights_kind(chosen, kind)
        params = self.parts.load_params(checkpointer, chosen, kind)
        return LoadedWeights(params, chosen, stored_kind)

    def open_held_out(self, sources: list[str] | None = None) -> Dataset:
        """Return all rows of `sources`; None or [] = the run's held-out rows.

        A run imported without a tokenizer uses the tokenizer of a token folder.
        """
        config = self.parts.config
        data = dataclasses.replace(config.data, eval_sources=sources or config.data.eval_sources)
        is_imported = data.tokenizer.endswith("tokenizer.json")  # written at import, if missing
        named = [source for _, source in data.eval_sets] if sources else []
        made = settings_of_tokens(named[0]) if named and is_imported else None
        if made and not locate(data.tokenizer).exists():
            data = dataclasses.replace(data, sources=named, **made[0])
        _, held_out = open_run_data(dataclasses.replace(config, data=data), self.rows)
        if held_out is None:
            raise ConfigError(
                "the run has no held-out rows (data.eval_fraction=0 and no eval_sources). "
                "Name data with --sources=PATH."
            )
        check_data_fits(self.parts, held_out)
        parts = self.parts_for(held_out.fields)
        return with_reference(parts, in_examples(parts, held_out))[0]

    def evaluate(
        self, params: Params, dataset: Dataset, *, max_batches: int = 0
    ) -> dict[str, float]:
        """Return loss and other metrics of parameters; see `evaluation_loop.evaluate`."""
        parts = with_teacher(self.parts_for(dataset.fields), dataset.fields)
        return evaluate(
            parts.step,
            parts.in_execution_order(params),
            dataset,
            global_batch_size=self.parts.config.train.global_batch_size,
            unit=self.parts.unit,
            max_batches=max_batches,
        )

    def parts_for(self, fields: Fields | None = None) -> Parts:
        """Return the parts for rows of these fields (None = of the settings), as in training."""
        fields = self.parts.fields if fields is None else fields
        packed = "segments" in fields
        if packed not in self._parts_of:
            parts, _ = decide_step(self.parts, fields, self.parts.budget())
            run = RunDirectory(self.path, is_writer=False, resumed=True)
            self._parts_of[packed] = parts.as_compiled(run)
        return self._parts_of[packed]


def open_run(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    mesh: str = "auto",
    simulate: int = 0,
    train: Mapping[str, Any] | None = None,
    model: Callable[[int], Model] | None = None,
    objective: Objective | None = None,
    rows: Any = None,
    repeats_steps: bool = False,
) -> TrainedRun:
    """Return a run, opened to evaluate or generate on any mesh, device count or machine.

    `path` may be a checkpoint inside the run. The settings are those of the newest intact
    checkpoint up to it or `step`, else of config.toml. Mesh "auto" is one device; `simulate=0`
    uses the real devices; `train` replaces settings of that section; `repeats_steps` keeps the
    schedules of batches, which may be illegal on another mesh. The others are as in `Program`.
    """
    run, named = run_at(path)
    config = settings_of_run(run, step if named is None else named)
    if simulate:
        runtime.simulate(simulate)
    runtime.setup_compilation_cache()
    devices = list(jax.devices())
    spec = None if mesh == "auto" else MeshSpec.parse(mesh, len(devices))
    devices = devices[: spec.num_devices if spec is not None else 1]
    # Evaluation has no microbatches; the training value may be illegal on another mesh.
    is_same = spec is not None and spec == config.mesh.spec and not train
    changes = {**(train or {}), **({} if is_same else {"num_microbatches": 0})}
    changes |= {} if repeats_steps else {"batch_schedule": [], "seq_schedule": []}
    config = dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, shape=str(spec) if spec else "dp=1"),
        train=dataclasses.replace(config.train, **changes),
    )
    built = model(config.train.seq_len) if model is not None else None
    parts = assemble(config, devices, model=built, objective=objective)
    return TrainedRun(path=run, parts=parts, step=named, rows=rows)


def other_step(step: int | None, named: int | None, run: Location) -> ConfigError:
    """Return the error for `--step` that is not the step of the opened checkpoint."""
    return ConfigError(
        f"step={step}, but the path is checkpoint {named} of {run}. Omit the step, or name the run."
    )


def run_at(path: str | os.PathLike[str]) -> tuple[Location, int | None]:
    """Return the run that contains a path, and the step if the path is a checkpoint, else None."""
    inner = locate(path)
    for candidate in (inner, inner.parent, inner.parent.parent):
        if (candidate / "config.toml").exists() or steps_in(candidate / "checkpoints"):
            return candidate, None if candidate == inner else named_step(str(inner))[1]
    raise ConfigError(
        f"run {str(inner)!r} has no config.toml. Name a run directory as training printed it, "
        "e.g. runs/default-20260101-120000."
    )
