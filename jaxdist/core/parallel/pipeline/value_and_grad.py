"""The pipeline axis: stages of layers on their own devices, microbatches flowing between them.

`make_value_and_grad` runs any table of `schedules.py` inside the fully manual step, as one program
that all stages share: a few loops over ticks, in each tick a switch on this stage's own action, and
a ring permute where neighbours exchange. Idle stages compute nothing, the embedding runs on the
first stage only and the loss head on the last. A stage keeps the input of a piece until its
backward, which recomputes the piece from it (then by the remat policy, layer by layer).

A switch whose predicate differs between stages may hold collectives over data, fsdp and tensor,
because all members of such a group are on one stage and take the same branch.

What moves, per device and step, B being the bytes of one microbatch's activations:
    ring permutes   B for each exchange of the schedule (`simulation.Report`), each way
    fsdp            every action gathers its piece's weights layer by layer, backward scatters their
                    gradients ("action"); or once per step, which holds the whole stage ("step")
    chunks > 1      parameters lie contiguously on stages, so pieces travel to their stage and their
                    gradients back once per step: 4 bytes per parameter of a stage, each way
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.parallel import data, fsdp, reduction
from jaxdist.core.parallel.pipeline import virtual_stages
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.buffers import tabulate
from jaxdist.core.parallel.pipeline.executor import Action, Row, State, rows_of, run, take
from jaxdist.core.parallel.pipeline.layerwise_backward import Layers, Layerwise
from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule
from jaxdist.core.parallel.pipeline.split_backward import take_apart
from jaxdist.core.sharding import Layout
from jaxdist.core.types import (
    OBJECTIVE,
    Array,
    Batch,
    Context,
    Model,
    Params,
    Sums,
    add_sums,
    objective,
)


def make_value_and_grad(
    model: Model,
    layout: Layout,
    make_schedule: Callable[[int], Schedule],
    *,
    layer: Callable[..., tuple[Array, Sums]],
    policy: Callable[..., bool] | None = None,
    gather: Literal["action", "step"] = "action",
    reduce_dtype: Any = jnp.float32,
) -> Callable[[Params, Batch, Context, Array], tuple[Sums, Params]]:
    """Summed loss and local gradients by a pipeline, for use inside the manual step.

    Args:
        model: a model with stacked layers.
        layout: mesh and rules.
        make_schedule: rows of a replica -> the table to run.
        layer: (block, shards, x, index in the model, aux, context) -> (x, Sums), for the backward.
        policy: what `jax.checkpoint` may keep of a layer between the forward that its backward
            repeats and that backward; None = everything that does not follow from its weights.
        gather: when fsdp weights are gathered; for "step", `Context.run_layers` must not gather.
        reduce_dtype: dtype in which gradients of gathered weights are summed.

    Returns:
        (local parameters, this replica's rows, context, loss scale) -> (sums, gradients). The sums
        are this replica's: those of the head on the last stage, those of the layers on the stage
        that holds them. The gradients are float32, of the
        scaled objective, laid out as `Layout.gradient_specs`, and local: still to be summed over
        `Layout.summed_axes`.
    """
    specs = layout.param_specs(model.axes)
    micro_specs = layout.gradient_specs(model.axes)
    gathered = layout.gather_specs(model.axes)
    outer_specs = {name: gathered[name] for name in specs if name != "layers"}
    layer_specs = fsdp.layer_specs(specs["layers"])
    layer_micro_specs = fsdp.layer_specs(micro_specs["layers"])
    axes = layout.summed_axes

    def value_and_grad(
        params: Params, batch: Batch, context: Context, scale: Array
    ) -> tuple[Sums, Params]:
        schedule = make_schedule(jax.tree.leaves(batch)[0].shape[0])
        stage = _make_stage(
            model,
            schedule,
            params,
            batch,
            context,
            layer_specs=gathered["layers"],
            gather=gather,
            reduce_dtype=reduce_dtype,
        )

        def reduce_layer(grads: Params) -> Params:
            if gather == "step":
                return grads
            return reduction.scatter_gradients(grads, layer_specs, layer_micro_specs, axes)

        totals = _train(stage, layer, policy, reduce_layer, scale)
        layer_grads = totals["layers"]
        if gather == "step":
            layer_grads = fsdp.scatter(
                layer_grads, _chunked(gathered["layers"]), reduce_dtype=reduce_dtype
            )
        outer_grads = fsdp.scatter(totals["outer"], outer_specs, reduce_dtype=reduce_dtype)
        grads = {**outer_grads, "layers": virtual_stages.from_pieces(layer_grads, schedule)}
        for name in grads:
            if name != "layers" or gather == "step":
                grads[name] = reduction.scatter_gradients(
                    grads[name], specs[name], micro_specs[name], axes
                )
        return totals["sums"], {name: grads[name] for name in params}

    return value_and_grad


def make_evaluate(
    model: Model,
    layout: Layout,
    make_schedule: Callable[[int], Schedule],
    *,
    gather: Literal["action", "step"] = "action",
    reduce_dtype: Any = jnp.float32,
) -> Callable[[Params, Batch, Context], Sums]:
    """Summed loss by a forward pipeline; arguments as for `make_value_and_grad`.

    `make_schedule` gives `schedules.forward_only` tables.

    Returns:
        (local parameters, this replica's rows, context) -> this replica's sums, as there.
    """
    gathered = layout.gather_specs(model.axes)["layers"]

    def evaluate(params: Params, batch: Batch, context: Context) -> Sums:
        schedule = make_schedule(jax.tree.leaves(batch)[0].shape[0])
        stage = _make_stage(
            model,
            schedule,
            params,
            batch,
            context,
            layer_specs=gathered,
            gather=gather,
            reduce_dtype=reduce_dtype,
        )
        return _evaluate(stage)

    return evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
    """What this device computes with; lives inside the manual step.

    Attributes:
        model: the model.
        schedule: the table being run.
        context: what the model is told; its key is the step's.
        layers: this stage's parameters, [chunks, layers of a piece, ...].
        outer: the parameters outside the layers, whole, in the compute dtype.
        parts: [microbatches, rows of one, ...].
        index: this stage's place on the ring.
    """

    model: Model
    schedule: Schedule
    context: Context
    layers: Params
    outer: Params
    parts: Batch
    index: Array

    def piece(self, row: Row) -> Array:
        """Which piece of the model the row names."""
        return row.chunk * self.schedule.num_stages + self.index

    def is_first(self, row: Row) -> Array:
        """Whether the row's piece begins with the embedding."""
        return self.piece(row) == 0

    def is_last(self, row: Row) -> Array:
        """Whether the row's piece ends in the loss head."""
        return self.piece(row) == self.schedule.num_pieces - 1

    def microbatch(self, row: Row) -> Batch:
        """The rows of the row's microbatch."""
        return jax.tree.map(lambda x: take(x, row.microbatch), self.parts)

    def chunk(self, row: Row) -> Params:
        """Parameters of the row's piece, [layers of a piece, ...]."""
        return jax.tree.map(lambda x: take(x, row.chunk), self.layers)

    def embed(self, outer: Params, row: Row) -> Array:
        """Input of the first piece."""
        return self.model.embed(outer, self.microbatch(row), self.context)  # type: ignore[misc]

    def aux(self, row: Row) -> Any:
        """What every block needs beside its input."""
        batch, prepare = self.microbatch(row), self.model.prepare
        return batch if prepare is None else prepare(batch, self.context)

    def layer_indices(self, row: Row) -> Array:
        """Index in the model of each layer of the row's piece; random bits depend on it."""
        count = jax.tree.leaves(self.layers)[0].shape[1]
        return self.piece(row) * count + jnp.arange(count)

    def run(self, layers: Params, x: Array, row: Row) -> tuple[Array, Sums]:
        """The row's piece applied to its input, and the sums of its layers."""
        first = self.layer_indices(row)[0]
        return self.context.run_layers(
            self.model.block, layers, x, self.aux(row), self.context, first=first
        )

    def layers_of(self, row: Row) -> Layers:
        """The layers of the row's piece."""
        return Layers(self.chunk(row), self.layer_indices(row), self.aux(row), row.chunk)

    def head(self, outer: Params, x: Array, row: Row) -> Sums:
        """Loss of the last piece's output."""
        return self.model.head_loss(outer, x, self.microbatch(row), self.context)


def _make_stage(
    model: Model,
    schedule: Schedule,
    params: Params,
    batch: Batch,
    context: Context,
    *,
    layer_specs: Any,
    gather: str,
    reduce_dtype: Any,
) -> _Stage:
    """This device's stage: its pieces where they run, what is gathered once, the microbatches."""
    layers = virtual_stages.to_pieces(params["layers"], schedule)
    if gather == "step":
        layers = fsdp.gather(
            layers, _chunked(layer_specs), dtype=context.dtype, reduce_dtype=reduce_dtype
        )
    outer = {name: tree for name, tree in params.items() if name != "layers"}
    return _Stage(
        model=model,
        schedule=schedule,
        context=context,
        layers=layers,
        outer=context.gather(outer),
        parts=data.split_microbatches(batch, schedule.num_microbatches),
        index=collectives.group_index(PIPELINE.name),
    )


def _train(
    stage: _Stage,
    layer: Callable[..., tuple[Array, Sums]],
    policy: Callable[..., bool] | None,
    reduce_layer: Callable[[Params], Params],
    scale: Array,
) -> Any:
    """Run a training table; returns the totals."""
    schedule, tables = stage.schedule, tabulate(stage.schedule)
    probe = jax.tree.map(lambda column: column[0], rows_of(schedule))
    x_kind = jax.eval_shape(stage.embed, stage.outer, probe)
    zero_x = collectives.zeros_like(x_kind)
    layerwise = _layerwise(stage, layer, policy, scale, reduce_layer, probe, zero_x)

    def forward(row: Row, state: State) -> dict[str, Any]:
        x = lax.cond(
            stage.is_first(row),
            lambda: stage.embed(stage.outer, row),
            lambda: take(state.activations, row.activation),
        )
        # The last piece's output has no reader: its backward recomputes it.
        y = lax.cond(
            stage.is_last(row), lambda: zero_x, lambda: stage.run(stage.chunk(row), x, row)[0]
        )
        return {"entered": x, "up": y}

    def backward(row: Row, state: State) -> dict[str, Any]:
        layers = stage.layers_of(row)
        y, sums, saved = layerwise.forward(layers, take(state.activations, row.activation))
        # Counted here and not in the forward action, which the last piece skips.
        totals = {**state.totals, "sums": add_sums(state.totals["sums"], sums)}
        dy, totals["outer"], totals["sums"] = lax.cond(
            stage.is_last(row),
            lambda: _turn(stage, row, y, totals, scale),
            lambda: (take(state.cotangents, row.cotangent), totals["outer"], totals["sums"]),
        )
        kept: list[Array] = []
        if schedule.splits_backward:
            dx, kept = layerwise.input_gradient(layers, saved, dy)
        else:
            dx, totals["layers"] = layerwise.gradient(layers, saved, dy, totals["layers"])
        totals["outer"] = lax.cond(
            stage.is_first(row),
            lambda: _add(totals["outer"], _embed_grads(stage, row, dx)),
            lambda: totals["outer"],
        )
        return {"down": dx, "totals": totals, "kept": kept}

    def weight(row: Row, state: State) -> dict[str, Any]:
        kept = [take(x, row.pending) for x in state.pending]
        totals = layerwise.weight_gradient(stage.layers_of(row), kept, state.totals["layers"])
        return {"totals": {**state.totals, "layers": totals}}

    _, sum_kinds, saved_kinds = jax.eval_shape(layerwise.forward, stage.layers_of(probe), zero_x)
    kept_kinds: list[Any] = []
    if schedule.splits_backward:
        saved = jax.tree.map(collectives.zeros_like, saved_kinds)
        _, kept_kinds = jax.eval_shape(
            layerwise.input_gradient, stage.layers_of(probe), saved, zero_x
        )
    sum_kinds |= jax.eval_shape(lambda: stage.head(stage.outer, zero_x, probe))
    layer_kinds = jax.eval_shape(
        lambda: reduce_layer(_float32(jax.tree.map(lambda x: x[0], stage.chunk(probe))))
    )
    outer_kinds = jax.eval_shape(_float32, stage.outer)
    state = State(
        activations=_zeros(x_kind, tables.num_slots[0] + 1),
        cotangents=_zeros(x_kind, tables.num_slots[1] + 1),
        pending=_zeros(kept_kinds, tables.num_slots[2] + 1),
        totals={
            "layers": _zeros(layer_kinds, *jax.tree.leaves(stage.layers)[0].shape[:2]),
            "outer": _zeros(outer_kinds),
            "sums": _zeros(sum_kinds),
        },
    )
    idle = {"entered": zero_x, "up": zero_x, "down": zero_x, "kept": _zeros(kept_kinds)}
    actions: dict[Kind, Action] = {
        "forward": Action(forward, ("entered", "up")),
        "backward": Action(backward, ("down", "kept", "totals")),
        "weight": Action(weight, ("totals",)),
    }
    return run(schedule, actions, idle, state).totals


def _layerwise(
    stage: _Stage,
    layer: Callable[..., tuple[Array, Sums]],
    policy: Callable[..., bool] | None,
    scale: Array,
    reduce_layer: Callable[[Params], Params],
    probe: Row,
    zero_x: Array,
) -> Layerwise:
    """The stage's layers, to be run forward and backward one by one.

    Without a policy everything that a layer's backward reads is kept from its forward, but what
    follows from its weights. Schedules that take the backward apart have no policy: what they keep
    would be computed again for either half.
    """

    def apply(
        shards: Params, x: Array, constants: tuple[Array, Any]
    ) -> tuple[Array, Array | None, Sums]:
        y, sums = layer(stage.model.block, shards, x, *constants, stage.context)
        loss = objective(sums) * scale if sums.keys() & set(OBJECTIVE) else None
        return y, loss, sums

    if policy is not None and not stage.schedule.splits_backward:
        # Forward and backward are two loops, which the compiler cannot merge.
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
    one = jax.tree.map(lambda x: x[0], stage.chunk(probe))
    constants = (stage.layer_indices(probe)[0], stage.aux(probe))
    # What waits for a weight gradient waits long; what a whole backward reads is read at once.
    apart = take_apart(apply, one, zero_x, constants, enlarge_again=stage.schedule.splits_backward)
    return Layerwise(apart, reduce_layer)


def _turn(
    stage: _Stage, row: Row, y: Array, totals: dict[str, Any], scale: Array
) -> tuple[Array, Params, Sums]:
    """Loss head of the last piece: gradient of its output, and both totals it adds to."""

    def scaled_loss(outer: Params, y: Array) -> tuple[Array, Sums]:
        sums = stage.head(outer, y, row)
        return objective(sums) * scale, sums

    (outer_grads, dy), sums = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)(stage.outer, y)
    return dy, _add(totals["outer"], outer_grads), add_sums(totals["sums"], sums)


def _embed_grads(stage: _Stage, row: Row, dx: Array) -> Params:
    """Gradients of the parameters outside the layers from that of the first piece's input."""
    _, pull = jax.vjp(lambda outer: stage.embed(outer, row), stage.outer)
    return pull(dx)[0]


def _evaluate(stage: _Stage) -> Sums:
    """Run a forward table; returns the sums."""
    schedule, tables = stage.schedule, tabulate(stage.schedule)
    probe = jax.tree.map(lambda column: column[0], rows_of(schedule))
    x_kind = jax.eval_shape(stage.embed, stage.outer, probe)
    zero_x = collectives.zeros_like(x_kind)

    def forward(row: Row, state: State) -> dict[str, Any]:
        x = lax.cond(
            stage.is_first(row),
            lambda: stage.embed(stage.outer, row),
            lambda: take(state.activations, row.activation),
        )
        y, sums = stage.run(stage.chunk(row), x, row)
        totals = add_sums(state.totals, sums)
        totals = lax.cond(
            stage.is_last(row),
            lambda: add_sums(totals, stage.head(stage.outer, y, row)),
            lambda: totals,
        )
        return {"entered": zero_x, "up": y, "totals": totals}

    _, sum_kinds = jax.eval_shape(lambda: stage.run(stage.chunk(probe), zero_x, probe))
    sum_kinds |= jax.eval_shape(lambda: stage.head(stage.outer, zero_x, probe))
    state = State(
        activations=_zeros(x_kind, tables.num_slots[0] + 1),
        cotangents=_zeros(x_kind, 0),
        pending=[],
        totals=_zeros(sum_kinds),
    )
    idle = {"entered": zero_x, "up": zero_x}
    actions: dict[Kind, Action] = {"forward": Action(forward, ("entered", "up", "totals"))}
    return run(schedule, actions, idle, state).totals


def _zeros(kinds: Any, *lead: int) -> Any:
    """Zeros like each leaf of a tree of shapes, with leading dims if given."""
    return jax.tree.map(
        lambda x: collectives.vary(
            jnp.zeros((*lead, *x.shape), x.dtype), tuple(collectives.varying_axes(x))
        ),
        kinds,
    )


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


def _chunked(specs: Any) -> Any:
    """Specs of [chunks, layers, ...] from those of the stacked leaves."""
    return jax.tree.map(lambda spec: P(None, *spec), specs, is_leaf=lambda x: isinstance(x, P))
