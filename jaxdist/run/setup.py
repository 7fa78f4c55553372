"""Builds the parts of a run from its settings: mesh, model, layout, optimizer, train step.

Training, evaluation, generation and replay all use it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from jaxdist import optim
from jaxdist.checkpoint import Checkpointer, manifest
from jaxdist.checkpoint.checksum import digest_of
from jaxdist.checkpoint.manifest import named_step
from jaxdist.checkpoint.moment_files import MomentFiles
from jaxdist.checkpoint.moment_store import MomentStore
from jaxdist.checkpoint.pytree import OPTIONAL, Weights, in_params, under
from jaxdist.config import (
    RunConfig,
    fit_device_list,
    parse_run,
    replaced_head,
)
from jaxdist.config.elastic import shrink_reason
from jaxdist.core import matmul
from jaxdist.core.attention.kernel_check import KernelCheck
from jaxdist.core.block_weights import is_quantized, to_quantize
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.mesh_choice import Needs
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.virtual_stages import to_execution_order, to_model_order
from jaxdist.core.precision import initial_loss_scale
from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState, abstract_state, init_state
from jaxdist.core.step import Optimizer, Reports, Step, make_step
from jaxdist.core.step.grouped_update import plan_groups
from jaxdist.core.step.kernel_trial import check_grouped, check_kernel
from jaxdist.core.step.shapes import stage_at
from jaxdist.core.step_plan import Device, StepPlan, StepSettings, plan_step, platform_of
from jaxdist.core.types import Array, Batch, Model, Objective, Params, rows_per_example
from jaxdist.core.weights import GROUPS, base_of, frozen, trained
from jaxdist.data import Loader, Position, TrainData
from jaxdist.data.packing import Fields, text_fields
from jaxdist.data.record_rows import record_fields, row_kind
from jaxdist.models.adapted_model import with_adapters
from jaxdist.models.adapters import only_adapters, with_base, with_start
from jaxdist.models.huggingface.directory import folder_of, is_model
from jaxdist.models.huggingface.loading import load_params
from jaxdist.models.weights import num_params
from jaxdist.objectives import regularized
from jaxdist.plan.estimate.memory_check import Budget, allocator_limit
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.start_checks import check_finite
from jaxdist.runtime import coordination
from jaxdist.runtime.storage import is_url
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run.

    Attributes:
        config: the settings; an elastic run adapts them to the available devices.
        is_shrunk: True if an elastic run has fewer devices than its mesh setting.
        optimizer: update direction, without the learning rate.
        schedule: step -> learning rate, float32 [].
        has_own_optimizer, has_own_schedule: a Python program replaces those of the settings.
        loss_scale: initial loss scale of float16, scalars []; {} without.
        num_params: number of parameters, without vocabulary padding (as model cards count).
        packed: True if rows have several documents; guessed from the settings until data is open.
        checks: results of comparing kernels with their references.
        remat: the policy chosen by cost; None = as in the settings.
        base: "digest" of the initial weights, if adapters or preferences refer to them.
        teacher: adds fields to each global batch, see `run/teacher.py`.
    """

    config: RunConfig
    spec: MeshSpec
    mesh_reason: str
    is_shrunk: bool
    layout: Layout
    model: Model
    optimizer: Any
    schedule: Any
    loss_scale: dict[str, Array]
    num_params: int
    packed: bool
    has_own_optimizer: bool = False
    has_own_schedule: bool = False
    checks: tuple[KernelCheck, ...] = ()
    remat: str | None = None
    base: dict[str, str] = dataclasses.field(default_factory=dict)
    teacher: Callable[[Batch], Batch] = lambda batch: batch

    @functools.cached_property
    def plan(self) -> StepPlan:
        """The step plan: kernels, remat, formats and other decisions about the train step."""
        config = self.config
        return plan_step(
            self.model,
            self.layout,
            Device.of(self.layout),
            self.packed,
            StepSettings(config.train, config.precision, config.pipeline),
            self.checks,
            self.remat,
        )

    @functools.cached_property
    def step(self) -> Step:
        """The step, built at its first use."""
        rule = self.config.optim
        optimizer = Optimizer(
            self.optimizer,
            self.schedule,
            max_grad_norm=rule.max_grad_norm,
            copies=rule.copies,
            store=self.moments,
        )
        by_source = self.unit == "tokens" and len(self.config.data.sources) > 1
        step = make_step(
            self.model,
            self.model.objective,
            optimizer,
            self.layout,
            self.plan,
            Reports(
                self.config.monitoring.layer_statistics_steps,
                self.config.train.global_batch_size * by_source,
            ),
        )
        evaluate = lambda params, batch: step.evaluate(params, self.teacher(batch))
        return dataclasses.replace(step, evaluate=evaluate)

    @functools.cached_property
    def moments(self) -> MomentStore | None:
        """The store of offloaded optimizer moments; None if they are on the devices."""
        train, optim = self.config.train, self.config.optim
        if train.offload == "none":
            return None
        groups = plan_groups(
            self.model,
            self.optimizer,
            self.layout,
            self.plan.layers,
            "model" if self.has_own_optimizer else optim.unit,
            **{**self._state_options, "offload": False},
        )
        if train.offload == "host":
            return MomentStore(groups)
        return MomentFiles(groups, train.offload_directory)

    def budget(self, host_of: Mapping[int, str] | None = None) -> Budget | None:
        """Return the estimated memory of one GPU and its limit; None if unknown, as on CPUs."""
        own = None
        if self.has_own_optimizer:
            leaves = jax.tree.leaves(self.abstract_state().opt_state)
            shard = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            own = float(sum(map(shard, leaves)))
        return Budget.of(
            self.config, self.spec, self.devices, self.model, host_of, own_moment_bytes=own
        )

    def in_stage(self, num_steps: int) -> Parts:
        """Return the parts for the step after `num_steps` steps, in its stage of the schedules."""
        train = self.config.train
        stage = stage_at(train.stages, num_steps)
        if stage.shape == (train.global_batch_size, train.seq_len):
            return self
        if stage.shape not in self._in_stages:
            config = dataclasses.replace(self.config, train=train.in_stage(stage))
            model = self.model
            if stage.seq_len != train.seq_len:
                flops = config.build_model().flops_per_token
                model = dataclasses.replace(model, flops_per_token=flops)
            parts = dataclasses.replace(self, config=config, model=model, checks=())
            parts = dataclasses.replace(parts, checks=parts.compared_kernels())
            vars(parts)["moments"] = self.moments
            self._in_stages[stage.shape] = parts
        return self._in_stages[stage.shape]

    def compared_kernels(self) -> tuple[KernelCheck, ...]:
        """Return how the kernels that are eligible compare with their references; collective."""
        inputs = (self.model, self.layout, self.plan, self.config.train, coordination.decide_from)
        checks = (check_kernel(*inputs), check_grouped(*inputs))
        return tuple(check for check in checks if check is not None)

    @functools.cached_property
    def _in_stages(self) -> dict[tuple[int, int], Parts]:
        return {}

    def within(self, budget: Budget) -> Parts:
        """Return the parts with the remat policy of a memory budget; their step is rebuilt."""
        return dataclasses.replace(self, remat=budget.job.remat)

    @property
    def compiled(self) -> dict[str, Any]:
        """Mesh and kind of device as text, and the remat policy chosen by cost (or None)."""
        device = self.devices[0].device_kind
        return {"mesh": str(self.spec), "device": device, "policy": self.remat}

    def as_compiled(self, run: RunDirectory) -> Parts:
        """Return the parts with the remat policy with which the newest start of a run compiled.

        It may save less than the estimated policy, if that one did not fit. Return the parts
        unchanged if mesh or device kind differ, or if the settings name a policy.
        """
        record = next(iter(run.starts()), {}).get("remat") or {}
        is_same = {**record, "policy": self.remat} == self.compiled and self.remat is not None
        return dataclasses.replace(self, remat=record["policy"]) if is_same else self

    @property
    def devices(self) -> list[Any]:
        """Devices of the mesh."""
        return list(self.layout.mesh.devices.flat)

    @property
    def pipeline_schedule(self) -> Schedule | None:
        """The pipeline schedule of one step; None without a pipeline."""
        if self.spec[PIPELINE] == 1:
            return None
        return self.plan.pipeline.make_schedule(
            num_stages=self.spec[PIPELINE],
            rows=self.config.train.global_batch_size // self.spec.num_replicas,
            num_microbatches=self.config.train.num_microbatches,
            rows_per_example=rows_per_example(self.model.objective),
        )

    @property
    def unit(self) -> str:
        """Unit of the step's `weight`: tokens, images, or examples of the objective."""
        return getattr(self.model.objective, "unit", self.model.unit)

    @property
    def flops_per_unit(self) -> dict[str, float]:
        """FLOPs per item that `unit` counts, by convention; see `Model.flops_per_token`."""
        flops, tokens = self.model.flops_per_token, 1
        if self.unit != self.model.unit:  # an example, with its padding
            tokens = self.config.train.seq_len * rows_per_example(self.model.objective)
        return {name: count * tokens for name, count in flops.items()}

    def in_execution_order(self, tree: Any) -> Any:
        """Return a state or parameters with layers on the stages that run them."""
        return to_execution_order(tree, self.plan.layers)

    def in_model_order(self, tree: Any) -> Any:
        """Return a state or parameters with layers in the order of the model."""
        return to_model_order(tree, self.plan.layers)

    def init_state(self) -> TrainState:
        """Return a new train state in execution order: with weights of `init_from`, or random."""
        params = self.start_params() if self.config.init_from else None
        state = init_state(
            self.model,
            self.optimizer,
            self.layout,
            seed=self.config.seed,
            params=params,
            **self._state_options,
        )
        if self.has_adapters:
            self.base["digest"] = digest_of(base_of(frozen(state.params, self.model.axes)))
        if self.moments is not None:
            self.moments.fill_zeros()
        return self.in_execution_order(state)

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state in model order, e.g. for a restore."""
        return abstract_state(self.model, self.optimizer, self.layout, **self._state_options)

    def step_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state of a step, in execution order."""
        return self.in_execution_order(self.abstract_state())

    @property
    def _state_options(self) -> dict[str, Any]:
        return {
            "loss_scale": self.loss_scale,
            "offload": self.config.train.offload != "none",
            "copies": tuple(self.config.optim.copies),
        }

    def restore(
        self, checkpointer: Checkpointer, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any], int]:
        """Return state, meta and step of a checkpoint, by default the newest valid, on this mesh.

        A copy of the parameters that only the settings have starts from them. One that only the
        checkpoint has is dropped. Both cases are logged. Layers are in execution order. Next to
        adapters, the frozen weights are those of `initial_params`.
        """
        target = self.without_base(self.abstract_state())
        state, meta, step = checkpointer.restore(
            target, step=step, optional=OPTIONAL, moments=self.moments
        )
        state = dataclasses.replace(state, params=self._with_base(state.params, meta, step))
        stored, copies = checkpointer.copies(step), dict(state.copies)
        for name in set(stored) - set(copies):
            setting = GROUPS[name].setting
            log.info(
                "the %s weights of checkpoint %d are not loaded: this run does not set %s",
                *(name, step, setting),
            )
        for name in [name for name in copies if name not in stored]:
            log.info("checkpoint %d has no %s weights: copying the model's weights", step, name)
            start = functools.partial(GROUPS[name].start, axes=self.model.axes)
            make = jax.jit(start, out_shardings=_shardings(target.copies[name]))
            copies[name] = make(state.params)
        state = dataclasses.replace(state, copies=copies)
        return self.in_execution_order(state), meta, step

    def load_params(self, checkpointer: Checkpointer, step: int, kind: Weights) -> Params:
        """Return the weights of a checkpoint on this mesh; see `Checkpointer.restore_params`."""
        target = self.without_base(self.abstract_state()).params
        params = checkpointer.restore_params(target, step, weights=kind)
        return self._with_base(params, checkpointer.meta(step), step)

    @property
    def has_adapters(self) -> bool:
        """Return whether the run trains adapters: checkpoints then lack the frozen weights."""
        return bool(self.config.lora.rank)

    def without_base(self, state: TrainState) -> TrainState:
        """Return the part of a state that checkpoints contain: without the base of adapters."""
        if not self.has_adapters:
            return state
        return dataclasses.replace(state, params=trained(state.params, self.model.axes))

    def _with_base(self, params: Params, meta: Mapping[str, Any], step: int) -> Params:
        if self.has_adapters:
            params = with_base(params, self.initial_params())
            self.base["digest"] = digest_of(base_of(frozen(params, self.model.axes)))
        # Imported adapters lack a digest, and other commands may not have loaded the weights.
        if self.base and self.base != meta.get("base", self.base):
            start = self.config.init_from or f"seed {self.config.seed}"
            raise ConfigError(
                f"checkpoint {step} is of a run that started from other weights than {start}. Name "
                "the weights that it was trained with in --init-from."
            )
        return params

    def start_params(self) -> Params:
        """Return the parameters before the first step, in the order of the model."""
        params = self.initial_params()
        if not self.has_adapters:
            return params
        make = lambda seed: only_adapters(trained(self._random_params(seed), self.model.axes))
        adapters = only_adapters(self.without_base(self.abstract_state()).params)
        make = jax.jit(make, static_argnums=0, out_shardings=_shardings(adapters))
        params = with_base(make(self.config.seed), params)
        return jax.jit(with_start, out_shardings=_shardings(params), donate_argnums=0)(params)

    def _random_params(self, seed: int) -> Params:
        init_key, _ = jax.random.split(jax.random.key(seed))  # as in `state.make_state`
        return self.model.init(init_key)

    @property
    def fields(self) -> Fields:
        """Fields of the rows that the model reads, by the settings of records and packing."""
        fields = {name: (row.shape, row.dtype) for name, row in self.model.row.items()}
        data, seq_len = self.config.data, self.config.train.seq_len
        if data.has_single_rows:
            kind = row_kind(data.records, self.config.model.num_labels)
            return record_fields(seq_len, kind, has_reference=self.config.precomputes_reference)
        return fields or text_fields(seq_len, packed=data.packs_documents)

    def abstract_batch(self, fields: Fields | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape [global_batch_size, ...], dtype, sharding by field; None = `self.fields`."""
        config, fields = self.config, dict(self.fields if fields is None else fields)
        fields |= config.objective.added_fields(config.train.seq_len, self.model.vocab_size)
        batch = {
            name: jax.ShapeDtypeStruct((config.train.global_batch_size, *shape), dtype)
            for name, (shape, dtype) in fields.items()
        }
        shardings = self.layout.shardings(self.layout.batch_specs(batch))
        return {name: x.update(sharding=shardings[name]) for name, x in batch.items()}

    def open_loader(self, dataset: TrainData, start: Position, step: int) -> Loader:
        """Return a loader that starts at a position of the data, after `step` steps."""
        return Loader(
            dataset,
            global_batch_size=self.config.train.global_batch_size,
            seed=self.config.seed,
            sharding=self.step.batch_sharding,
            start=dataclasses.replace(start, step=step),
            stages=self.config.train.stages,
            num_workers=self.config.data.num_workers,
            add_fields=self.teacher,
        )

    def initial_params(self) -> Params:
        """Return weights without adapters: of `init_from`, or random (unset, or reinitialized)."""
        path = self.config.init_from
        reinit = [*self.config.reinit_params, *replaced_head(self.config)]
        target = base_of(self.abstract_state().params)
        named, structure = jax.tree_util.tree_flatten_with_path(target, is_leaf=is_quantized)
        names = [f"params/{keystr(path, simple=True, separator='/')}" for path, _ in named]
        is_random = [not path or under(name, in_params(reinit)) for name in names]

        def random_leaves(seed: int) -> list[Array]:
            random = base_of(self._random_params(seed))
            leaves = jax.tree.leaves(random, is_leaf=is_quantized)
            return [leaf for leaf, new in zip(leaves, is_random, strict=True) if new]

        pairs = [(leaf, new) for (_, leaf), new in zip(named, is_random, strict=True)]
        placed = [leaf for leaf, new in pairs if new]
        make = jax.jit(random_leaves, static_argnums=0, out_shardings=_shardings(placed))
        made = iter(make(self.config.seed))
        leaves = [next(made) if new else leaf for leaf, new in pairs]
        target = jax.tree.unflatten(structure, leaves)
        return self.stored_params(path, target, reinit) if path else target

    def stored_params(self, path: str, target: Params, reinit: Collection[str]) -> Params:
        """Return weights of `path` on this mesh, those of a run verified by `checkpoint.verify`.

        `path` is a Hugging Face directory or hub name, a run, or one of its checkpoints. See
        `Checkpointer.restore_params`. Weights of Hugging Face are quantized before the next array
        is read.
        """
        dense, quantize = to_quantize(target, self.config.lora.blocks(self.config.model))
        if is_model(path):
            folder = folder_of(path, weights=True)
            params = load_params(folder, dense, reinit=in_params(reinit), store=quantize)
        elif not (is_url(path) or os.path.exists(path)):
            raise ConfigError(
                f"init_from={path!r} does not exist. If it has moved, change its path in the "
                "run's config.toml."
            )
        else:
            directory, step = named_step(path)
            stored = manifest.stored_config(directory, step)
            if stored and parse_run(stored, path).lora.rank:
                raise ConfigError(
                    f"{path} has adapters, not complete weights. Merge them first: python -m "
                    f"jaxdist.convert merge {path} OUT."
                )
            reader = Checkpointer(directory, self.config.checkpoint, read_only=True)
            params = reader.restore_params(dense, step, reinit=reinit)
            store = lambda at, x: quantize(keystr(at, simple=True, separator="/"), x)
            params = jax.tree_util.tree_map_with_path(store, params, is_leaf=is_quantized)
        check_finite(params, path)
        return params


def assemble(
    config: RunConfig,
    devices: Sequence[Any],
    needs_of: Callable[..., Needs | None] | None = None,
    host_of: Mapping[int, str] | None = None,
    *,
    model: Model | None = None,
    objective: Objective | None = None,
) -> Parts:
    """Return the parts of a run on these devices; nothing is compiled yet.

    `needs_of` estimates memory, which determines the default mesh. `host_of` names the host of each
    process; None = one host per process. `model` replaces that of the settings, and
    `objective` any other.
    """
    if model is None:
        model = config.build_model()
    model = with_adapters(config.lora, config.model, model)
    if objective := objective or config.make_objective():
        model = dataclasses.replace(model, objective=objective)
    original, num_devices = config, len(devices)
    config, devices = fit_device_list(original, devices, model)
    spec, reason = config.choose_mesh(
        len(devices),
        model=model,
        memory_bytes=allocator_limit(devices),
        needs=needs_of(config, devices, model, host_of) if needs_of is not None else None,
    )
    is_shrunk = config is not original
    if is_shrunk:
        reason = shrink_reason(original, config, num_devices, model)
    layout = config.layout(spec.build(devices), model, host_of)
    platform = platform_of(devices[0])
    capability = str(getattr(devices[0], "compute_capability", ""))
    dtype = config.precision.matmul_dtype
    problems = [
        *optim.frozen_problems(config.optim, model.axes),
        *optim.group_problems(config.optim, model.axes),
        *matmul.problems(dtype, model.num_layers, platform, capability),
    ]
    if problems:
        raise ConfigError(problems)
    model = dataclasses.replace(
        model,
        axes=optim.with_frozen(config.optim, model.axes),
        objective=regularized(model.objective, config.train),
    )
    moments = layout.shardings(layout.moment_specs(model.axes))
    optimizer = optim.make_optimizer(config.optim, model.axes, moments)
    schedule = optim.make_lr_schedule(
        config.optim,
        total_steps=config.train.steps,
        global_batch_size=config.train.global_batch_size,
        batches=[(stage.first_step, stage.batch_size) for stage in config.train.stages],
    )
    return Parts(
        config=config,
        spec=spec,
        mesh_reason=reason,
        is_shrunk=is_shrunk,
        layout=layout,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        loss_scale=initial_loss_scale(config.precision.resolve(platform)),
        num_params=num_params(model),
        packed=config.data.packs_documents,
    )


def compare_kernel(parts: Parts, fields: Fields) -> Parts:
    """Return the parts for rows of these fields; kernels are used only if they pass a check."""
    packed = "segments" in fields
    if packed != parts.packed:
        parts = dataclasses.replace(parts, packed=packed)
    checks = parts.compared_kernels()
    return dataclasses.replace(parts, checks=checks) if checks else parts


def decide_step(parts: Parts, fields: Fields, budget: Budget | None) -> tuple[Parts, Budget | None]:
    """Return parts and memory budget, with kernel and remat policy for rows of these fields."""
    parts = compare_kernel(parts, fields)  # first, because the choice of remat "auto" depends on it
    if budget is None:
        return parts, None
    budget = budget.replanned(parts.packed, parts.checks)
    return parts.within(budget), budget


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)
