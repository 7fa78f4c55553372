"""Pipeline training: stages hold layers on different devices; microbatches pass through them.

Any schedule of `schedules.py` runs inside the manual step, as one program for all stages
(`executor.py`). A stage stashes the input of a virtual stage until its backward. The backward
recomputes the forward from this input, then differentiates layer by layer.

Traffic per device and step; B is the size in bytes of one microbatch's activations:
    ring permutes   B per exchange of the schedule (`simulation.Report`), in each direction
    fsdp            all-gather of weights and reduce-scatter of gradients, in every action
                    ("action") or once per step ("step")
    interleaving    parameters are sent to the stage that runs them and gradients back, once per
                    step: 4 bytes per parameter of a stage, in each direction
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.forward import ForwardPass
from jaxdist.core.parallel import fsdp, reduction
from jaxdist.core.parallel.pipeline import virtual_stages
from jaxdist.core.parallel.pipeline.buffers import Instruction, to_arrays
from jaxdist.core.parallel.pipeline.executor import (
    Handler,
    State,
    instructions_of,
    run,
    take,
)
from jaxdist.core.parallel.pipeline.layerwise_backward import LayerwiseBackward
from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule
from jaxdist.core.parallel.pipeline.split_backward import split_layer
from jaxdist.core.parallel.pipeline.stage import Stage, make_stage, of_virtual_stages, zeros
from jaxdist.core.sharding import Layout
from jaxdist.core.types import (
    TRAINED,
    Array,
    Batch,
    Context,
    Params,
    Sums,
    add_sums,
    trained_loss,
)
from jaxdist.core.weights import merged, trained


def make_pipeline_value_and_grad(
    forward: ForwardPass,
    layout: Layout,
    make_schedule: Callable[[int], Schedule],
    *,
    layer: Callable[..., tuple[Array, Sums]],
    policy: Callable[..., bool] | None = None,
    gather: Literal["action", "step"] = "action",
    reduce_dtype: Any = jnp.float32,
) -> Callable[[Params, Batch, Context, Array], tuple[Sums, Params]]:
    """Make the pipelined computation of sums and local gradients, for use inside the manual step.

    `layer` is (block, shards, x, index in the model, aux, context) -> (x, Sums). Backward uses it.
    `policy` selects the residuals that `jax.checkpoint` saves when backward recomputes the forward;
    None saves everything that depends on more than weights. With `gather` = "step",
    `ForwardPass.run_layers` must not gather.

    Returns (local parameters, this replica's batch [rows, ...], context, loss scale float32 []) ->
    (sums, gradients). Sums are on the stages that run the layers and the head. Gradients are
    float32 gradients of the scaled objective, laid out as `Layout.gradient_specs`. The caller must
    still sum them over `Layout.summed_axes`.
    """
    trained_axes = trained(forward.model.axes, forward.model.axes)
    specs = layout.param_specs(trained_axes)
    micro_specs = layout.gradient_specs(trained_axes)
    gathered = layout.gather_specs(trained_axes)
    outer_specs = {name: gathered[name] for name in specs if name != "layers"}
    layer_specs = fsdp.layer_specs(specs["layers"])
    layer_micro_specs = fsdp.layer_specs(micro_specs["layers"])
    axes = layout.summed_axes

    def reduce_layer(grads: Params) -> Params:
        if gather == "step":
            return grads
        return reduction.scatter_gradients(grads, layer_specs, layer_micro_specs, axes)

    def value_and_grad(
        params: Params, batch: Batch, context: Context, scale: Array
    ) -> tuple[Sums, Params]:
        """Return (sums, local gradients) of this replica's batch [rows, ...]; scale float32 []."""
        schedule = make_schedule(jax.tree.leaves(batch)[0].shape[0])
        stage = make_stage(
            forward,
            schedule,
            params,
            batch,
            context,
            layer_specs=layout.gather_specs(forward.model.axes["layers"]),
            gather=gather,
            reduce_dtype=reduce_dtype,
        )
        totals = _Training(stage, layer, policy, reduce_layer, scale).run()
        layer_grads = totals["layers"]
        if gather == "step":
            layer_grads = fsdp.scatter(
                layer_grads, of_virtual_stages(gathered["layers"]), reduce_dtype=reduce_dtype
            )
        outer_grads = fsdp.scatter(totals["outer"], outer_specs, reduce_dtype=reduce_dtype)
        grads = {**outer_grads, "layers": virtual_stages.from_virtual_stages(layer_grads, schedule)}
        for name in grads:
            if name != "layers" or gather == "step":
                grads[name] = reduction.scatter_gradients(
                    grads[name], specs[name], micro_specs[name], axes
                )
        return totals["sums"], {name: grads[name] for name in params}

    return value_and_grad


class _Training:
    """Action handlers of a training schedule on one stage, and their initial state."""

    def __init__(
        self,
        stage: Stage,
        layer: Callable[..., tuple[Array, Sums]],
        policy: Callable[..., bool] | None,
        reduce_layer: Callable[[Params], Params],
        scale: Array,
    ) -> None:
        """Trace shapes; the objective is multiplied by `scale`, float32 []."""
        self.stage, self.scale = stage, scale
        self.schedule = stage.schedule
        # Any instruction gives the shapes: all microbatches and virtual stages have the same.
        self.example = jax.tree.map(lambda column: column[0], instructions_of(self.schedule))
        self.x_kind = jax.eval_shape(stage.embed, stage.outer, self.example)
        self.zero_x = collectives.zeros_like(self.x_kind)
        self.reduce_layer = reduce_layer
        self.layers = self._layerwise(layer, policy)

    def run(self) -> dict[str, Any]:
        """Run the schedule; returns the totals `layers`, `outer` and `sums`."""
        state, kept_kinds = self._first_state()
        handlers: dict[Kind, Handler] = {
            "forward": Handler(self._forward, ("entered", "up")),
            "backward": Handler(self._backward, ("down", "kept", "totals")),
            "weight": Handler(self._weight, ("totals",)),
        }
        zero_x = self.zero_x
        idle = {"entered": zero_x, "up": zero_x, "down": zero_x, "kept": zeros(kept_kinds)}
        return run(self.schedule, handlers, idle, state).totals

    def _forward(self, now: Instruction, state: State) -> dict[str, Any]:
        """Run a virtual stage on x [rows, seq_shard, d_model]; stash x for the backward."""
        stage = self.stage
        x = lax.cond(
            stage.is_first(now),
            lambda: stage.embed(stage.outer, now),
            lambda: take(state.activations, now.activation),
        )
        # The last virtual stage skips its forward: its backward computes the output and the loss.
        y = lax.cond(stage.is_last(now), lambda: self.zero_x, lambda: stage.run(x, now)[0])
        return {"entered": x, "up": y}

    def _backward(self, now: Instruction, state: State) -> dict[str, Any]:
        """Recompute the forward, then compute dx [rows, seq_shard, d_model] from dy or the loss."""
        stage = self.stage
        layers = stage.layers_of(now)
        y, sums, saved = self.layers.forward(layers, take(state.activations, now.activation))
        # Sums are added only here, because the last virtual stage computes nothing in forward.
        totals = {**state.totals, "sums": add_sums(state.totals["sums"], sums)}
        dy, totals["outer"], totals["sums"] = lax.cond(
            stage.is_last(now),
            lambda: self._head_gradient(now, y, totals),
            lambda: (take(state.cotangents, now.cotangent), totals["outer"], totals["sums"]),
        )
        kept: list[Array] = []
        if self.schedule.splits_backward:
            dx, kept = self.layers.input_gradient(layers, saved, dy)
        else:
            dx, totals["layers"] = self.layers.gradient(layers, saved, dy, totals["layers"])
        totals["outer"] = lax.cond(
            stage.is_first(now),
            lambda: _add(totals["outer"], self._embedding_gradient(now, dx)),
            lambda: totals["outer"],
        )
        return {"down": dx, "totals": totals, "kept": kept}

    def _weight(self, now: Instruction, state: State) -> dict[str, Any]:
        """Add the weight gradients, [layers, ...], that an earlier backward deferred."""
        kept = [take(x, now.pending) for x in state.pending]
        layers = self.stage.layers_of(now)
        totals = self.layers.weight_gradient(layers, kept, state.totals["layers"])
        return {"totals": {**state.totals, "layers": totals}}

    def _head_gradient(
        self, now: Instruction, y: Array, totals: dict[str, Any]
    ) -> tuple[Array, Params, Sums]:
        """Return (dy, `outer`, `sums`) of the loss head at y [rows, seq_shard, d_model]."""

        def scaled_loss(outer: Params, y: Array) -> tuple[Array, Sums]:
            sums = self.stage.head(outer, y, now)
            return trained_loss(sums) * self.scale, sums

        gradient = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
        (outer_grads, dy), sums = gradient(self.stage.trained_outer, y)
        return dy, _add(totals["outer"], outer_grads), add_sums(totals["sums"], sums)

    def _embedding_gradient(self, now: Instruction, dx: Array) -> Params:
        """Return the gradients of the outer parameters from dx [rows, seq_shard, d_model]."""
        _, pull = jax.vjp(lambda outer: self.stage.embed(outer, now), self.stage.trained_outer)
        return pull(dx)[0]

    def _layerwise(
        self, layer: Callable[..., tuple[Array, Sums]], policy: Callable[..., bool] | None
    ) -> LayerwiseBackward:
        """Return this stage's layers, which run one by one on x [rows, seq_shard, d_model].

        Split backwards ignore the remat policy, because both parts would recompute the same values.
        """
        stage, splits = self.stage, self.schedule.splits_backward

        def apply(
            shards: Params, x: Array, constants: tuple[tuple[Array, Params], Any]
        ) -> tuple[Array, Array | None, Sums]:
            """Run a layer on x [rows, seq_shard, d_model]; also return its scaled loss."""
            (index, fixed), aux = constants
            whole = merged(shards, fixed)
            y, sums = layer(stage.forward.block, whole, x, index, aux, stage.context)
            loss = trained_loss(sums) * self.scale if sums.keys() & set(TRAINED) else None
            return y, loss, sums

        if policy is not None and not splits:
            # CSE cannot merge forward and backward, because they are separate loops.
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        example = stage.layers_of(self.example)
        one, fixed = jax.tree.map(lambda x: x[0], (example.weights, example.constants))
        # Inputs of a deferred weight gradient stay in memory for long, so keep the smallest form.
        split = split_layer(
            apply, one, self.zero_x, (fixed, example.aux), recompute_enlarged=splits
        )
        return LayerwiseBackward(split, self.reduce_layer)

    def _first_state(self) -> tuple[State, list[Any]]:
        """Return empty buffers with zero totals, and the shapes of deferred inputs (`kept`)."""
        stage, layers = self.stage, self.stage.layers_of(self.example)
        _, sum_kinds, saved_kinds = jax.eval_shape(self.layers.forward, layers, self.zero_x)
        sum_kinds |= jax.eval_shape(lambda: stage.head(stage.outer, self.zero_x, self.example))
        kept_kinds: list[Any] = []
        if self.schedule.splits_backward:
            saved = jax.tree.map(collectives.zeros_like, saved_kinds)
            # Concrete values, because shapes lose their mesh if XLA shards an axis automatically.
            _, kept_kinds = jax.eval_shape(self.layers.input_gradient, layers, saved, self.zero_x)
        one_layer = jax.tree.map(lambda x: x[0], layers.weights)
        layer_kinds = jax.eval_shape(lambda: self.reduce_layer(_float32(one_layer)))
        _, num_slots = to_arrays(self.schedule)
        state = State(
            activations=zeros(self.x_kind, num_slots[0] + 1),
            cotangents=zeros(self.x_kind, num_slots[1] + 1),
            pending=zeros(kept_kinds, num_slots[2] + 1),
            totals={
                "layers": zeros(layer_kinds, *jax.tree.leaves(stage.layers)[0].shape[:2]),
                "outer": zeros(jax.eval_shape(_float32, stage.trained_outer)),
                "sums": zeros(sum_kinds),
            },
        )
        return state, kept_kinds


def _float32(tree: Any) -> Any:
    """Cast a tree of arrays [...] to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _add(total: Any, part: Any) -> Any:
    """Add parts [...] to totals [...], in the dtypes of the totals."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
