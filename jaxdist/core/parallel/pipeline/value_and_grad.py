"""Pipeline training: stages hold layers on different devices; microbatches pass through them.

The forward of a virtual stage saves, layer by layer, the residuals that its backward reads.

Each exchange of the schedule (`simulation.Report`) sends one microbatch's activations, or their
gradients. fsdp gathers layers and reduces their gradients in every action, or once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.core import collectives
from jaxdist.core.forward import ForwardPass
from jaxdist.core.parallel import fsdp, reduction
from jaxdist.core.parallel.pipeline.buffers import Instruction, to_arrays
from jaxdist.core.parallel.pipeline.executor import (
    Handler,
    State,
    if_active,
    instructions_of,
    run,
    run_if,
    store,
    take,
)
from jaxdist.core.parallel.pipeline.layer_vjp import layer_vjp
from jaxdist.core.parallel.pipeline.layerwise_backward import LayerwiseBackward
from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule
from jaxdist.core.parallel.pipeline.stage import Stage, make_stage, of_virtual_stages, zeros
from jaxdist.core.sharding import Layout
from jaxdist.core.step_plan import StepPlan
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
    plan: StepPlan,
    make_schedule: Callable[[int], Schedule],
    layer: Callable[..., tuple[Array, Sums]],
    policy: Callable[..., bool] | None,
) -> Callable[[Params, Batch, Context, Array], tuple[Sums, Params]]:
    """Make the pipelined computation of sums and local gradients, for use inside the manual step.

    `layer` is (block, shards, x, index in the model, aux, context) -> (x, Sums); it does not gather
    if weights are gathered once per step. `policy` selects the residuals of a layer, as in
    `jax.checkpoint`; None = those of `layer_vjp.py`.

    Returns (local parameters, this replica's batch [rows, ...], context, loss scale float32 []) ->
    (sums, gradients). Layers are in execution order (`virtual_stages.py`). Sums are on the stages
    that run the layers and the head. Gradients are float32 gradients of the scaled objective, laid
    out as `Layout.gradient_specs`. The caller must still sum them over the other
    `Layout.summed_axes`.
    """
    trained_axes = trained(forward.model.axes, forward.model.axes)
    specs = layout.param_specs(trained_axes)
    micro_specs = layout.gradient_specs(trained_axes)
    gathered = layout.gather_specs(trained_axes)
    outer_specs = {name: gathered[name] for name in specs if name != "layers"}
    layer_specs = fsdp.layer_specs(specs["layers"])
    layer_micro_specs = fsdp.layer_specs(micro_specs["layers"])
    axes = layout.summed_axes
    gather, reduce_dtype = plan.pipeline.gather, plan.microbatch_reduce_dtype

    def reduce_layer(grads: Params) -> Params:
        if gather == "step":
            return grads
        return reduction.scatter_gradients(grads, layer_specs, layer_micro_specs, axes)

    def value_and_grad(
        params: Params, batch: Batch, context: Context, scale: Array
    ) -> tuple[Sums, Params]:
        """Return (sums, local gradients) of this replica's batch [rows, ...]; scale float32 []."""
        schedule = make_schedule(jax.tree.leaves(batch)[0].shape[0])
        stage = make_stage(forward, layout, plan, schedule, params, batch, context)
        state = _Training(stage, layer, policy, plan.layers_per_body, reduce_layer, scale).run()
        layer_grads = state.gradients["layers"]
        if gather == "step":
            layer_grads = fsdp.scatter(
                layer_grads, of_virtual_stages(gathered["layers"]), reduce_dtype=reduce_dtype
            )
        outer_grads = fsdp.scatter(state.gradients["outer"], outer_specs, reduce_dtype=reduce_dtype)
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layer_grads)
        grads = {**outer_grads, "layers": joined}
        for name in grads:
            if name != "layers" or gather == "step":
                grads[name] = reduction.scatter_gradients(
                    grads[name], specs[name], micro_specs[name], axes
                )
        return state.sums, {name: grads[name] for name in params}

    return value_and_grad


class _Training:
    """Action handlers of a training schedule on one stage, and their initial state."""

    def __init__(
        self,
        stage: Stage,
        layer: Callable[..., tuple[Array, Sums]],
        policy: Callable[..., bool] | None,
        unroll: int,
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
        self.layers = self._layerwise(layer, policy, unroll)

    def run(self) -> State:
        handlers: dict[Kind, Handler] = {"forward": self._forward, "backward": self._backward}
        return run(self.schedule, handlers, self._first_state())

    def _forward(self, now: Instruction, state: State) -> tuple[Array, State]:
        """Run a virtual stage; return y [rows, seq_shard, d_model] and state with residuals."""
        stage = self.stage
        x = stage.input(now, take(state.activations, now.activation))
        y, sums, residuals = self.layers.forward(
            stage.layers_of(now), x, state.residuals, now.residual
        )
        return y, state._replace(
            residuals=residuals,
            outputs=store(state.outputs, y, now.output),
            sums=add_sums(state.sums, if_active(now, sums)),
        )

    def _backward(self, now: Instruction, state: State) -> tuple[Array, State]:
        """Return dx [rows, seq_shard, d_model] from dy or the loss; add gradients to state."""
        stage, outer = self.stage, state.gradients["outer"]
        dy, outer, sums = run_if(
            stage.is_last(now),
            lambda value: self._head_gradient(now, state, *value[1:]),
            (take(state.cotangents, now.cotangent), outer, state.sums),
            not stage.skips_idle,
        )
        dx, layer_totals = self.layers.gradient(
            stage.layers_of(now),
            state.residuals,
            now.residual,
            dy,
            state.gradients["layers"],
            mask=partial(if_active, now),
        )
        add = partial(self._add_embedding_gradient, now, dx)
        outer = run_if(stage.is_first(now), add, outer, not stage.skips_idle)
        gradients = {"layers": layer_totals, "outer": outer}
        return dx, state._replace(gradients=gradients, sums=sums)

    @jax.named_scope("pipeline_head")
    def _head_gradient(
        self, now: Instruction, state: State, outer: Params, sums: Sums
    ) -> tuple[Array, Params, Sums]:
        """Return dy [rows, seq_shard, d_model] of the loss, and the new `outer` and `sums`."""

        def scaled_loss(outer: Params, y: Array) -> tuple[Array, Sums]:
            own = self.stage.head(outer, y, now)
            return trained_loss(own) * self.scale, own

        gradient = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
        y = take(state.outputs, now.output)
        (grads, dy), own = gradient(self.stage.trained_outer, y)
        return dy, _add(outer, grads), add_sums(sums, own)

    @jax.named_scope("pipeline_embed_gradient")
    def _add_embedding_gradient(self, now: Instruction, dx: Array, total: Params) -> Params:
        """Return `total` plus gradients of outer parameters from dx [rows, seq_shard, d_model]."""
        _, pull = jax.vjp(lambda outer: self.stage.embed(outer, now), self.stage.trained_outer)
        return _add(total, pull(dx)[0])

    def _layerwise(
        self,
        layer: Callable[..., tuple[Array, Sums]],
        policy: Callable[..., bool] | None,
        unroll: int,
    ) -> LayerwiseBackward:
        """Return this stage's layers, which run one by one on x [rows, seq_shard, d_model]."""
        stage = self.stage

        def apply(
            shards: Params, x: Array, constants: tuple[tuple[Array, Params], Any]
        ) -> tuple[Array, Array | None, Sums]:
            """Run a layer on x [rows, seq_shard, d_model]; also return its scaled loss."""
            (index, fixed), aux = constants
            whole = merged(shards, fixed)
            y, sums = layer(stage.forward.block, whole, x, index, aux, stage.context)
            loss = trained_loss(sums) * self.scale if sums.keys() & set(TRAINED) else None
            return y, loss, sums

        if policy is not None:
            # CSE cannot merge forward and backward, because they are separate loops.
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        weights, constants = stage.layers_of(self.example).one(0)
        vjp = layer_vjp(apply, weights, self.zero_x, constants)
        return LayerwiseBackward(vjp, self.reduce_layer, unroll)

    def _first_state(self) -> State:
        stage, layers = self.stage, self.stage.layers_of(self.example)
        _, slots = to_arrays(self.schedule)
        count = layers.indices.shape[0]
        saved = jax.eval_shape(lambda: self.layers.residuals_of_layer(layers, self.zero_x))
        residuals = zeros(saved, slots[2], count)
        forward = lambda: self.layers.forward(layers, self.zero_x, residuals, layers.virtual)[1]
        sum_kinds = jax.eval_shape(forward)
        sum_kinds |= jax.eval_shape(lambda: stage.head(stage.outer, self.zero_x, self.example))
        layer_kinds = jax.eval_shape(lambda: self.reduce_layer(_float32(layers.one(0)[0])))
        return State(
            activations=zeros(self.x_kind, slots[0] + 1),
            cotangents=zeros(self.x_kind, slots[1] + 1),
            residuals=residuals,
            outputs=zeros(self.x_kind, slots[3] + 1),
            gradients={
                "layers": zeros(layer_kinds, self.schedule.num_virtual_stages, count),
                "outer": zeros(jax.eval_shape(_float32, stage.trained_outer)),
            },
            sums=zeros(sum_kinds),
        )


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
