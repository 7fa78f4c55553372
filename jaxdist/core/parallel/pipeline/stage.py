"""One stage of a pipeline: applies the model to the layers and microbatches of this device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.forward import ForwardPass
from jaxdist.core.parallel import data, fsdp
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.buffers import Instruction
from jaxdist.core.parallel.pipeline.executor import take
from jaxdist.core.parallel.pipeline.layerwise_backward import Layers
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit
from jaxdist.core.sharding import Layout
from jaxdist.core.step_plan import StepPlan
from jaxdist.core.types import Array, Batch, Context, Params, Sums
from jaxdist.core.weights import frozen, gathered_dtypes, merged, trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """The parameters and microbatches of this device; an `Instruction` selects among them.

    Attributes:
        layers: this stage's parameters, [virtual_stages, layers per virtual stage, ...].
        outer: complete parameters outside the layers.
        microbatches: [num_microbatches, rows per microbatch, ...].
        index: int32 [], index of this stage on the ring.
        skips_idle: an idle stage runs no layers. Optional parts are branches, else loops.
    """

    forward: ForwardPass
    schedule: Schedule
    split: LayerSplit
    context: Context
    layers: Params
    outer: Params
    microbatches: Batch
    index: Array
    skips_idle: bool

    def virtual_stage(self, now: Instruction) -> Array:
        """Return the index of the virtual stage in the model, int32 []."""
        return now.virtual * self.schedule.num_stages + self.index

    def is_first(self, now: Instruction) -> Array:
        """Return whether the stage is active with the virtual stage that embeds, bool []."""
        return now.is_active & (self.virtual_stage(now) == 0)

    def is_last(self, now: Instruction) -> Array:
        """Return whether the stage is active with the virtual stage of the loss head, bool []."""
        last = self.schedule.total_virtual_stages - 1
        return now.is_active & (self.virtual_stage(now) == last)

    def microbatch(self, now: Instruction) -> Batch:
        """Return the rows of the microbatch, [rows, ...]."""
        return jax.tree.map(lambda x: take(x, now.microbatch), self.microbatches)

    def embed(self, outer: Params, now: Instruction) -> Array:
        """Return the input of the first virtual stage, [rows, seq_shard, d_model]."""
        embed = self.forward.model.embed
        assert embed is not None
        return embed(merged(outer, self.outer), self.microbatch(now), self.context)

    def input(self, now: Instruction, received: Array) -> Array:
        """Return the virtual stage's input [rows, seq_shard, d_model]: embedding or `received`."""
        embed = jax.named_scope("pipeline_embed")(self.embed)
        return lax.cond(self.is_first(now), lambda: embed(self.outer, now), lambda: received)

    def aux(self, now: Instruction) -> tuple[Any, ...]:
        """Return the `aux` inputs of all blocks, [rows, ...] for each row chunk of a microbatch."""
        return self.forward.prepare(self.microbatch(now), self.context)

    def layers_of(self, now: Instruction) -> Layers:
        """Return the layers and their inputs for the virtual stage that `now` names."""
        axes, split, index = self.forward.model.axes["layers"], self.split, self.virtual_stage(now)
        depth, skips = take(jnp.asarray(split.depths), index), self.skips_idle
        return Layers(
            trained(self.layers, axes),
            frozen(self.layers, axes),
            now.virtual,
            take(jnp.asarray(split.starts), index) + jnp.arange(split.slots),  # of padding: unused
            self.aux(now),
            jnp.where(now.is_active, depth, 0) if skips else depth,
            0 if skips else min(split.depths),
            not skips,
        )

    @property
    def trained_outer(self) -> Params:
        """Return the parameters outside the layers; None in place of frozen ones."""
        return trained(self.outer, {name: self.forward.model.axes[name] for name in self.outer})

    def head(self, outer: Params, x: Array, now: Instruction) -> Sums:
        """Return the loss and metrics (`Sums`) of x [rows, seq_shard, d_model] after the layers."""
        sums = self.forward.head(merged(outer, self.outer), x, self.microbatch(now), self.context)
        return collectives.vary(sums, PIPELINE.name)  # also constants: other stages have no head


def make_stage(
    forward: ForwardPass,
    layout: Layout,
    plan: StepPlan,
    schedule: Schedule,
    params: Params,
    batch: Batch,
    context: Context,
) -> Stage:
    """Build this device's stage from shards in execution order and its batch [rows, ...]."""
    layers = jax.tree.map(
        lambda x: x.reshape(schedule.num_virtual_stages, -1, *x.shape[1:]), params["layers"]
    )
    if plan.pipeline.gather == "step":
        axes = forward.model.axes["layers"]
        specs = of_virtual_stages(layout.gather_specs(axes))
        dtypes = gathered_dtypes(axes, context.dtype)
        layers = fsdp.gather(layers, specs, dtypes, reduce_dtype=plan.microbatch_reduce_dtype)
    outer = {name: tree for name, tree in params.items() if name != "layers"}
    return Stage(
        forward=forward,
        schedule=schedule,
        split=plan.layers,
        context=context,
        layers=layers,
        outer=forward.gather(outer),
        microbatches=data.split_microbatches(batch, schedule.num_microbatches),
        index=collectives.group_index(PIPELINE.name),
        skips_idle=plan.skips_idle,
    )


def of_virtual_stages(specs: Any) -> Any:
    """Return specs of [virtual_stages, layers, ...] from specs of [layers, ...]."""
    return jax.tree.map(lambda spec: P(None, *spec), specs)


def zeros(kinds: Any, *lead: int) -> Any:
    """Return zeros [*lead, ...] for every leaf of a tree of shapes."""
    return jax.tree.map(lambda x: collectives.zeros_like(x, *lead), kinds)
