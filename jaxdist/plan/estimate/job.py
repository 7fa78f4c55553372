"""The run to estimate: its settings on one mesh of GPUs, with derived sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh

from jaxdist.config import RunConfig
from jaxdist.config.teacher import teacher_of, teacher_problems
from jaxdist.core.attention import choose_kernel
from jaxdist.core.attention.kernel_check import KernelCheck
from jaxdist.core.axis import axes_of
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import axes as mesh_axes
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.schedule import Kind
from jaxdist.core.parallel.pipeline.simulation import Report
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.step_plan import Device, StepPlan, StepSettings, plan_step, request_of
from jaxdist.core.types import Dims, Model, offloaded_names, rows_per_example
from jaxdist.core.weights import GROUPS
from jaxdist.hardware import Cluster
from jaxdist.models.weights import Weight, weights_of
from jaxdist.optim import is_frozen
from jaxdist.plan.estimate.model_trace import DecoderShape, Trace, decoder_of, trace
from jaxdist.plan.estimate.software import OURS, Software

Role = Literal["param", "moment", "gradient", "gathered"]
"""Role of an array with a weight's shape: its layout differs by role."""

WIDE = 4
"""Bytes of a float32 element: parameters, accumulated gradients, losses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """Properties of our step, or of another trainer's, to compare with published runs.

    Attributes:
        products_dtype: dtype of matrix products, if it differs from the compute dtype ("float8").
        stacks_layers: residuals of layers are copied into stacked arrays, as by a scan.
        fuses_recomputation: backward kernels recompute everything except matrix products.
    """

    products_dtype: str = ""
    software: Software = OURS
    stacks_layers: bool = True
    fuses_recomputation: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The cost of a pipeline schedule: a report as of `simulate`, and the ticks of each kind."""

    num_microbatches: int
    report: Report
    ticks: Mapping[Kind, int]
    num_loops: int


@functools.lru_cache(maxsize=1024)
def stages_of(num_stages: int, num_microbatches: int, num_virtual_stages: int) -> Stages:
    """Return the cost of `one_forward_one_backward` in closed form, for two stages or more."""
    p, m, v = num_stages, num_microbatches, num_virtual_stages
    group, position = divmod(m - 1, p)
    ticks = (group * v + v) * p + position  # of each kind: the last forward is in the last one
    stash = tuple((v - 1) * min(m, p) + min(m, 2 * (p - stage) - 1) for stage in range(p))
    report = Report(
        num_ticks=2 * ticks,
        duration=3.0 * ticks,  # a backward costs two forwards
        bubble=1.0 - m * v / ticks,
        peak_stash=stash,
        activation_slots=1,
        cotangent_slots=1,
        residual_slots=(v - 1) * min(m, p) + min(m + 1, 2 * p - 1),
        messages=2 * m * (p * v - 1),
        forward_permutes=ticks,
        backward_permutes=ticks,
    )
    return Stages(
        num_microbatches=m,
        report=report,
        ticks={"forward": ticks, "backward": ticks},
        num_loops=2 if m == 1 else 3,
    )


_WITHOUT_TRAIN = ("copies", "layers", "layout", "outer", "trained", "_gathered_dims", "_placed")
"""Cached attributes of `Job` that no setting of the section `train` but `seq_len` changes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a mesh of a cluster; `config.mesh.shape` is ignored.

    Attributes:
        packed: whether rows are packed; None = as the settings state.
        checks: those of kernels; a kernel without one is assumed to pass.
        own_moment_bytes: per device, of an optimizer passed from Python; None = none was.
    """

    config: RunConfig
    spec: MeshSpec
    cluster: Cluster
    model: Model
    engine: Engine = dataclasses.field(default_factory=Engine)
    packed: bool | None = None
    checks: tuple[KernelCheck, ...] = ()
    own_moment_bytes: float | None = None

    @classmethod
    def of(
        cls, config: RunConfig, spec: MeshSpec, cluster: Cluster, model: Model | None = None
    ) -> Job:
        """Return the job of these settings; builds the model unless it is passed."""
        return cls(config=config, spec=spec, cluster=cluster, model=model or config.build_model())

    def changed(self, section: str, **changes: Any) -> Job:
        """Return the job with changed settings in one section."""
        job = dataclasses.replace(self, config=with_section(self.config, section, **changes))
        if section == "train" and "seq_len" not in changes:
            vars(job).update({n: vars(self)[n] for n in _WITHOUT_TRAIN if n in vars(self)})
        return job

    def with_microbatches(self, count: int) -> Job:
        """Return the job with another number of microbatches, which shares all other decisions."""
        job = self.changed("train", num_microbatches=count)
        plan = dataclasses.replace(self.plan, num_microbatches=count)
        own = {*vars(job), "plan", "stages", "teacher"}
        shared = {name: value for name, value in vars(self).items() if name not in own}
        vars(job).update(shared, plan=plan)
        return job

    @functools.cached_property
    def teacher(self) -> Job | None:
        """The frozen teacher of distillation on the same mesh; None if there is none."""
        made = teacher_of(self.config, self.model.vocab_size, str(self.dtype))
        if made is None:
            return None
        if problems := made[0].mesh_problems(self.spec, made[1]):
            raise teacher_problems(self.config.objective.teacher, problems)
        return dataclasses.replace(self, config=made[0], model=made[1], checks=())

    @functools.cached_property
    def plan(self) -> StepPlan:
        """The step plan that training would make on these GPUs."""
        gpu, config = self.cluster.gpu, self.config
        device = Device(
            platform="gpu",
            compute_capability=gpu.compute_capability,
            kind=gpu.name,
            per_node=max(1, self.cluster.gpus_per_fabric // self.spec[TENSOR]),
            is_described=True,
        )
        settings = StepSettings(config.train, config.precision, config.pipeline)
        packed = config.data.packs_documents if self.packed is None else self.packed
        return plan_step(self.model, self.layout, device, packed, settings, self.checks)

    @property
    def dtype(self) -> Any:
        """Compute dtype of the step."""
        return self.plan.compute_dtype

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in the compute dtype."""
        return int(self.dtype.itemsize)

    @functools.cached_property
    def decoder(self) -> DecoderShape | None:
        """Sizes of the model if its structure is that of a decoder, else None."""
        return decoder_of(self.model, self.seq_len)

    @property
    def seq_len(self) -> int:
        """Tokens per row; 1 if the model does not read text."""
        return self.config.train.seq_len if self.model.unit == "tokens" else 1

    @property
    def rows(self) -> int:
        """Rows per step on one replica."""
        return self.config.train.global_batch_size // self.spec.num_replicas

    @functools.cached_property
    def stages(self) -> Stages | None:
        """The cost of the pipeline schedule; None without stages."""
        if self.spec[PIPELINE] == 1:
            return None
        pipeline, num_stages = self.plan.pipeline, self.spec[PIPELINE]
        count = self.config.train.num_microbatches or pipeline.choose_microbatches(
            num_stages, self.rows, rows_per_example(self.model.objective)
        )
        return stages_of(num_stages, count, pipeline.num_virtual_stages)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per replica."""
        if self.stages is not None:
            return self.stages.num_microbatches
        return self.config.train.accumulation

    @property
    def has_first_pass(self) -> bool:
        """True if a forward pass computes `Model.step_sums` before the differentiated one."""
        return bool(self.model.step_sums) and (self.stages is not None or self.num_microbatches > 1)

    @property
    def micro_rows(self) -> int:
        """Rows per microbatch on one replica."""
        return max(1, self.rows // self.num_microbatches)

    @property
    def tokens(self) -> int:
        """Tokens (or images) of a microbatch on one device, before `tensor` splits them."""
        return self.micro_rows * self.seq_len // self.spec[CONTEXT]

    @property
    def tokens_per_step(self) -> int:
        """Tokens (or images) per step over all replicas."""
        return self.config.train.global_batch_size * self.seq_len

    @property
    def sequence_parallel(self) -> bool:
        """True if activations between blocks are split over `tensor`."""
        return self.layout.sequence_parallel and self.spec[TENSOR] > 1

    @property
    def stream_tokens(self) -> int:
        """Tokens of a microbatch in the residual stream of one device."""
        return self.tokens // self.spec[TENSOR] if self.sequence_parallel else self.tokens

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The leaves of the model's parameters."""
        return weights_of(self.model)

    @functools.cached_property
    def trained(self) -> tuple[Weight, ...]:
        """Return the parameters that training updates."""
        is_named = lambda weight: is_frozen(self.config.optim, weight.name.replace(".", "/"))
        return tuple(w for w in self.weights if w.dims.update != "none" and not is_named(w))

    @functools.cached_property
    def copies(self) -> dict[str, list[tuple[Weight, int]]]:
        """Name -> (weight, bytes per element) of parameter groups besides the model's, e.g. EMA."""
        held = lambda group: self.trained if group.is_average else self.weights
        groups = {name: GROUPS[name] for name in self.config.optim.copies}
        return {n: [(w, g.element_bytes(w.dims)) for w in held(g)] for n, g in groups.items()}

    def only_trained(self, weights: Iterable[Weight]) -> tuple[Weight, ...]:
        """Return the weights that training updates, which have a gradient."""
        names = {weight.name for weight in self.trained}
        return tuple(weight for weight in weights if weight.name in names)

    def trained_share(self, weights: Sequence[Weight]) -> float:
        """Return the share of the matrices' elements for which training computes a gradient."""
        size = lambda those: sum(w.size for w in those if w.is_matrix)
        return size(self.only_trained(weights)) / max(1, size(weights))

    @property
    def trace(self) -> Trace:
        """Costs of the model's functions with the remat policy of this run."""
        return trace(self.model, self.seq_len, str(self.dtype), self.remat)

    @property
    def everything_kept(self) -> Trace:
        """Costs of the model's functions if remat recomputes nothing."""
        return trace(self.model, self.seq_len, str(self.dtype), "none")

    @property
    def stream_width(self) -> int:
        """Elements of the residual stream per token; 0 if the model has no blocks."""
        if self.decoder is not None:
            return self.decoder.d_model
        return self.trace.stream // self.seq_len

    @property
    def layers_per_stage(self) -> int:
        """Number of layers on one device, including the padding of its virtual stages."""
        return self.plan.layers.num_stored // self.spec[PIPELINE]

    @property
    def num_narrow_layers(self) -> int:
        """Number of layers of one device (with stages, of an end stage) in `matmul_dtype`."""
        if not self.plan.matmul_dtype:
            return 0
        return max(0, self.layers_per_stage - (2 if self.spec[PIPELINE] == 1 else 1))

    @property
    def num_fp8_layers(self) -> int:
        """Number of a device's layers in fp8; without stages, also gathered and saved in it."""
        return self.num_narrow_layers if self.plan.matmul_dtype == "fp8" else 0

    @property
    def layers_per_virtual_stage(self) -> int:
        """Layers that one pipeline action runs; all layers without stages."""
        return self.plan.layers.slots

    @property
    def remat(self) -> str:
        """Remat policy; "auto" counts as "dots" on GPUs until `remat.choose_remat` is called."""
        return self.plan.remat

    @property
    def unrolls(self) -> bool:
        """True if the compiler sees layers and their backward as one sequence."""
        if not self.engine.stacks_layers or self.plan.matmul_dtype or self.stages is not None:
            return False
        return self.plan.layers_per_body > 1

    @functools.cached_property
    def layers_by_window(self) -> dict[int, int]:
        """Number of layers of a decoder by attention window; 0 = no window; {} for other models."""
        if self.decoder is None:
            return {}
        call, layers = self.decoder.call, self.model.num_layers * self.decoder.layers
        full = layers // call.full_every if len(call.windows) > 1 else 0
        counts = zip(call.windows, (layers - full, full), strict=False)
        return {window: number for window, number in counts if number}

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the values of a layer that the remat policy moves to the host."""
        return offloaded_names(self.remat)

    def keeps(self, name: str) -> bool:
        """Return True if remat saves the values with this `checkpoint_name`."""
        if self.remat in ("none", "dots"):
            return True
        marks = self.decoder.marks if self.decoder is not None else ()
        return name in marks and name in self.remat.split(":")[-1].split(",")

    @functools.cached_property
    def attention(self) -> str:
        """Attention kernel: "cudnn", "blockwise", "xla", or "" without attention."""
        if self.decoder is None:
            return ""
        call, head_dim = self.decoder.call, self.decoder.head_dim
        request = request_of(call, head_dim, self.seq_len, self.dtype, packed=self.plan.packed)
        return choose_kernel(request, self.plan.attention)[0]

    @property
    def loss_chunk(self) -> int:
        """Number of tokens whose logits are in memory at a time; 0 if the model is no decoder."""
        if self.decoder is None:
            return 0
        return min(self.tokens, self.plan.loss_chunk)

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout of arrays on the mesh, as in training."""
        return self.config.layout(_abstract_mesh(self.spec), self.model)

    def size(self, weight: Weight, role: Role) -> int:
        """Return the elements per device of an array like a weight, with the padding of stages."""
        num_stored = self.plan.layers.num_stored
        placed, sizes = self._placed
        key = weight.name, weight.shape, role, num_stored
        if key not in sizes:
            size = weight.size
            if weight.is_stacked:
                size = size // weight.shape[0] * num_stored
            sizes[key] = size // placed(weight.dims, role)[1]
        return sizes[key]

    def total(self, weights: Iterable[Weight], role: Role) -> int:
        """Return the number of elements per device of arrays like the weights in this role."""
        return sum(self.size(weight, role) for weight in weights)

    def gathered_bytes(self, weights: Iterable[Weight]) -> int:
        """Return the bytes per device of gathered weights as they arrive, but unrounded in fp8."""
        return sum(
            w.num_gathered_bytes(self.compute_bytes) * self.size(w, "gathered") for w in weights
        )

    @functools.cached_property
    def layers(self) -> tuple[Weight, ...]:
        """The weights of the stacked layers."""
        return tuple(w for w in self.weights if w.is_stacked)

    @functools.cached_property
    def outer(self) -> tuple[Weight, ...]:
        """The weights outside the stacked layers, e.g. embedding, head, last norm."""
        return tuple(w for w in self.weights if not w.is_stacked)

    def is_gathered(self, weight: Weight) -> bool:
        """Return True if devices store shards of a weight that they gather before its use."""
        return self.size(weight, "param") < self.size(weight, "gathered")

    def gathered_dim(self, weight: Weight) -> int:
        """Return the dim along which fsdp and ZeRO shard a weight; -1 if they do not."""
        return next((i for i, dim in enumerate(weight.dims) if dim in self._gathered_dims), -1)

    @functools.cached_property
    def _gathered_dims(self) -> set[str]:
        rules, by_name = {**mesh_axes.rules(), **self.layout.rules}, mesh_axes.by_name()
        return {dim for dim, axis in rules.items() if axis and by_name[axis].weights == "gathered"}

    def axes(self, weight: Weight, role: Role) -> tuple[str, ...]:
        """Return the mesh axes that split an array with a weight's shape, in mesh order."""
        return self._placed[0](weight.dims, role)[0]

    def num_shards(self, weight: Weight, role: Role, first: int) -> int:
        """Return the number of shards along the dims from index `first` on."""
        dims = weight.dims.renamed([*[None] * first, *weight.dims[first:]])
        return self._placed[0](dims, role)[1]

    @functools.cached_property
    def _placed(self) -> tuple[Callable[[Dims, Role], tuple[tuple[str, ...], int]], dict[Any, int]]:
        rules = tuple(sorted(self.layout.rules.items()))
        return _placements(self.spec, self.config.mesh.zero, rules)


def with_section(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    """Return a copy of a run's settings with changes in one section."""
    changed: Any = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: changed})


@functools.lru_cache(maxsize=4096)
def _placements(
    spec: MeshSpec, zero: int, rules: tuple[tuple[str, str | None], ...]
) -> tuple[Callable[[Dims, Role], tuple[tuple[str, ...], int]], dict[Any, int]]:
    """Return (dims, role) -> (axes that split such an array, number of shards); and a cache."""
    layout = Layout(mesh=_abstract_mesh(spec), rules=dict(rules), zero=zero)
    specs = {
        "param": layout.param_specs,
        "moment": layout.moment_specs,
        "gradient": layout.gradient_specs,
    }

    @functools.cache
    def placed(dims: Dims, role: Role) -> tuple[tuple[str, ...], int]:
        if role == "gathered":
            splits = set(axes_of(layout.param_specs(dims))) - set(
                axes_of(layout.gather_specs(dims))
            )
        else:
            splits = set(axes_of(specs[role](dims)))
        axes = tuple(axis for axis in spec.sizes if axis in splits)
        return axes, math.prod(spec[axis] for axis in axes)

    return placed, {}


def _abstract_mesh(spec: MeshSpec) -> Any:
    return AbstractMesh(tuple(spec.sizes.values()), tuple(spec.sizes))
