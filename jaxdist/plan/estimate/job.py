"""What is estimated: one run's settings on one mesh of some GPUs, and the sizes all else counts in.

Everything here is arithmetic on settings. Where arrays lie is asked of the `Layout` that training
uses, on a mesh without devices, so that the two cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxdist.config import RunConfig
from jaxdist.core.attention import choose_kernel
from jaxdist.core.axis import axes_of
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.step import default_loss_chunk
from jaxdist.core.types import Dims, Model
from jaxdist.models.configs import CNN_RULES, CnnConfig, DecoderConfig
from jaxdist.plan.estimate.params import Weight, weights_of
from jaxdist.plan.estimate.schedule_costs import Stages, stages_of
from jaxdist.plan.hardware import Cluster, Gpu

Place = Literal["param", "moment", "gradient", "whole"]
"""Which layout an array of a weight's shape has: the parameter's, its moments', its microbatch
gradient's, or gathered over every axis that shards it (only `tensor` and stages still split)."""

WIDE = 4
"""Bytes of a float32: parameters, accumulated gradients, losses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """Where another trainer's step differs from ours; to compare with what others published.

    Attributes:
        products_dtype: dtype of matrix products where it is not the compute dtype ("float8").
        stage_recomputes: whether a pipeline stage's backward first repeats its forward.
        pieces_travel: whether pieces of the model move to their stages in every step.
    """

    products_dtype: str = ""
    stage_recomputes: bool = True
    pieces_travel: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run on one mesh of one cluster.

    Attributes:
        config: the run's settings; its `mesh.shape` is not looked at.
        spec: the mesh.
        cluster: the GPUs.
        weights: the model's parameters, leaf by leaf.
        model: the built model, for a custom one.
        engine: how the step is run; ours unless said.
    """

    config: RunConfig
    spec: MeshSpec
    cluster: Cluster
    weights: tuple[Weight, ...]
    model: Model | None = None
    engine: Engine = dataclasses.field(default_factory=Engine)

    @classmethod
    def of(
        cls, config: RunConfig, spec: MeshSpec, cluster: Cluster, model: Model | None = None
    ) -> Job:
        """The job of these settings; a custom model must be given built."""
        weights = weights_of(config.model, model)
        return cls(config=config, spec=spec, cluster=cluster, weights=weights, model=model)

    # -- hardware and number formats --------------------------------------------------------------

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU."""
        return self.cluster.gpu

    @functools.cached_property
    def dtype(self) -> Any:
        """Dtype of matrix products."""
        return self.config.precision.resolve("gpu")

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation or a gathered weight's element."""
        return int(self.dtype.itemsize)

    @property
    def reduce_bytes(self) -> int:
        """Bytes in which gradients of sharded weights are summed."""
        return int(jnp.dtype(self.config.precision.reduce_dtype).itemsize)

    # -- rows and tokens ---------------------------------------------------------------------------

    @property
    def decoder(self) -> DecoderConfig | None:
        """The model's sizes where it is a decoder."""
        return self.config.model if isinstance(self.config.model, DecoderConfig) else None

    @property
    def seq_len(self) -> int:
        """Tokens of a row; 1 where the model reads no text."""
        is_text = self.decoder is not None or (self.model is not None and self.model.sequence)
        return self.config.train.seq_len if is_text else 1

    @property
    def rows(self) -> int:
        """Rows of a step on one replica."""
        return self.config.train.global_batch_size // self.spec.num_replicas

    @functools.cached_property
    def stages(self) -> Stages | None:
        """What the stages do and what that costs; None without stages."""
        if self.spec[PIPELINE] == 1:
            return None
        return stages_of(
            self.config.pipeline,
            self.spec[PIPELINE],
            self.rows,
            self.config.train.num_microbatches,
        )

    @property
    def schedule(self) -> Schedule | None:
        """The table of the stages; None without."""
        return None if self.stages is None else self.stages.schedule

    @property
    def num_microbatches(self) -> int:
        """Parts into which a replica's rows are cut."""
        if self.schedule is not None:
            return self.schedule.num_microbatches
        return self.config.train.num_microbatches

    @property
    def micro_rows(self) -> int:
        """Rows of a microbatch on one replica."""
        return max(1, self.rows // self.num_microbatches)

    @property
    def tokens(self) -> int:
        """Tokens (or images) of a microbatch on one replica."""
        return self.micro_rows * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens (or images) of one step over all replicas."""
        return self.config.train.global_batch_size * self.seq_len

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are split over `tensor`."""
        return self.layout.sequence_parallel and self.spec[TENSOR] > 1

    @property
    def stream_tokens(self) -> int:
        """Tokens of a microbatch whose residual stream one device holds."""
        return self.tokens // self.spec[TENSOR] if self.sequence_parallel else self.tokens

    # -- layers and stages -------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Stacked layers of the whole model."""
        return next((w.shape[0] for w in self.weights if w.is_stacked), 0)

    @property
    def layers_per_stage(self) -> int:
        """Layers that one device runs."""
        return self.num_layers // self.spec[PIPELINE]

    @property
    def layers_per_piece(self) -> int:
        """Layers that one action of the pipeline runs; without stages all of them."""
        chunks = self.schedule.num_virtual_stages if self.schedule else 1
        return self.layers_per_stage // chunks

    @property
    def remat(self) -> str:
        """What backward recomputes, "auto" resolved for GPUs."""
        return "dots" if self.config.train.remat == "auto" else self.config.train.remat

    @functools.cached_property
    def attention(self) -> str:
        """The attention kernel: "cudnn", "xla", or "" where nothing attends."""
        if self.decoder is None:
            return ""
        kernel, _ = choose_kernel(
            self.decoder.attention,
            platform="gpu",
            compute_capability=self.gpu.compute_capability,
            dtype=self.dtype,
            head_dim=self.decoder.head_width,
            packed=self.config.data.packs_documents,
            dropout=self.decoder.attention_dropout,
        )
        return kernel

    @property
    def loss_chunk(self) -> int:
        """Tokens whose logits exist at once."""
        if self.decoder is None:
            return 0
        vocab_shard = self.decoder.padded_vocab // self.spec[TENSOR]
        given = self.config.train.loss_chunk_tokens
        return min(self.tokens, given or default_loss_chunk(vocab_shard))

    # -- where weights lie -------------------------------------------------------------------------

    @functools.cached_property
    def layout(self) -> Layout:
        """Where arrays lie, as training would place them."""
        rules: dict[str, str | None] = {}
        if isinstance(self.config.model, CnnConfig):
            rules |= CNN_RULES
        if self.model is not None:
            rules |= self.model.rules
        sequence = self.decoder is not None or bool(self.model and self.model.sequence)
        return Layout(
            mesh=_abstract_mesh(self.spec),
            rules=rules,
            zero=self.config.mesh.zero,
            sequence_parallel=self.config.mesh.sequence_parallel and sequence,
            auto_tensor=bool(self.model and self.model.tensor == "auto"),
        )

    def size(self, weight: Weight, place: Place) -> int:
        """Elements of a weight-shaped array that one device holds."""
        return weight.size // self._placement.ways(weight.dims, place)

    def total(self, weights: Iterable[Weight], place: Place) -> int:
        """Elements of several weight-shaped arrays that one device holds."""
        return sum(self.size(weight, place) for weight in weights)

    @functools.cached_property
    def layers(self) -> tuple[Weight, ...]:
        """The stacked weights."""
        return tuple(w for w in self.weights if w.is_stacked)

    @functools.cached_property
    def outer(self) -> tuple[Weight, ...]:
        """The weights outside the stack: embedding, head, last norm."""
        return tuple(w for w in self.weights if not w.is_stacked)

    def is_gathered(self, weight: Weight) -> bool:
        """Whether a weight is sharded over data or fsdp, and gathered before use."""
        ways = self._placement.ways
        return ways(weight.dims, "param") > ways(weight.dims, "whole")

    def axes(self, weight: Weight, place: Place) -> tuple[str, ...]:
        """Mesh axes that split a weight-shaped array, in mesh order."""
        return self._placement.axes(weight.dims, place)

    @functools.cached_property
    def _placement(self) -> _Placement:
        rules = tuple(sorted(self.layout.rules.items()))
        return _placement(self.spec, self.config.mesh.zero, rules)


class _Placement:
    """Where arrays of given dims lie on a mesh; asked of its `Layout` once for each."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._found: dict[tuple[Dims, Place], tuple[tuple[str, ...], int]] = {}

    def axes(self, dims: Dims, place: Place) -> tuple[str, ...]:
        """Mesh axes that split such an array, in mesh order."""
        return self._of(dims, place)[0]

    def ways(self, dims: Dims, place: Place) -> int:
        """Parts into which it is split."""
        return self._of(dims, place)[1]

    def _of(self, dims: Dims, place: Place) -> tuple[tuple[str, ...], int]:
        found = self._found.get((dims, place))
        if found is None:
            axes = self._look_up(dims, place)
            ways = math.prod(self._layout.spec[axis] for axis in axes)
            found = self._found[dims, place] = axes, ways
        return found

    def _look_up(self, dims: Dims, place: Place) -> tuple[str, ...]:
        layout = self._layout
        if place == "whole":
            gathered = axes_of(layout.gather_spec(dims))
            found = set(axes_of(layout.param_spec(dims))) - set(gathered)
        else:
            by_place = {
                "param": layout.param_spec,
                "moment": layout.moment_spec,
                "gradient": layout.gradient_spec,
            }[place]
            found = set(axes_of(by_place(dims)))
        return tuple(axis for axis in layout.spec.sizes if axis in found)


@functools.lru_cache(maxsize=4096)
def _placement(spec: MeshSpec, zero: int, rules: tuple[tuple[str, str | None], ...]) -> _Placement:
    return _Placement(Layout(mesh=_abstract_mesh(spec), rules=dict(rules), zero=zero))


def _abstract_mesh(spec: MeshSpec) -> Any:
    """The mesh without devices."""
    return AbstractMesh(tuple(spec.sizes.values()), tuple(spec.sizes))
