"""The compiled train step: the only `jax.jit` of training, and the evaluation step beside it.

One step, read from the outside in:

    jit, state donated
      shard_map over every mesh axis: the collectives are written, not guessed
        for each microbatch (a scan or a pipeline): model -> summed loss -> local gradients
        one reduction of the gradients over the data axes; sums over every replica
      divide once by the global weight -> clip by global norm -> optimizer -> keep or skip
    -> new state with the same shardings, metrics still on the devices
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist import collectives, losses
from jaxdist.ordering import in_order
from jaxdist.parallel import data, fsdp, pipeline, tensor
from jaxdist.parallel.microbatches import PipelineConfig
from jaxdist.precision import PrecisionConfig, update_loss_scale
from jaxdist.sharding import Layout
from jaxdist.state import TrainState, opt_shardings, state_shardings
from jaxdist.types import Array, Batch, Context, Model, Params, Sums, setting

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run's length and the shape of one step."""

    steps: int = setting(160, "optimizer steps of the whole run")
    global_batch_size: int = setting(32, "rows of one optimizer step over all devices")
    seq_len: int = setting(128, "tokens of a row (text only)")
    num_microbatches: int = setting(
        1,
        "parts into which a device's rows are cut; their gradients are accumulated (with pp > 1 "
        "they flow through the stages, and pipeline.num_microbatches comes first)",
    )
    remat: str = setting(
        "auto",
        "what backward recomputes: none, dots (keep products), full (keep only block inputs), "
        "names:A,B (keep only these: qkv, attention, attention_out, mlp_hidden, mlp_out); "
        "auto = none on CPU, dots on GPUs",
    )
    unroll_layers: int = setting(
        0,
        "layers per iteration of the layer scan; 0 = on CPU all up to 16 where backward recomputes "
        "nothing, else 1",
    )
    loss_chunk_tokens: int = setting(
        0, "tokens whose logits exist at once; 0 = as many as fit 64 MiB of float32 logits"
    )
    nan_policy: Literal["skip", "rollback", "stop"] = setting(
        "skip",
        "on NaN or Inf in loss or gradients, whose update is never applied: skip = go on; rollback "
        "= go back to the newest checkpoint and leave that batch out; stop = end the run",
    )
    offload_optimizer: bool = setting(False, "keep optimizer moments in host memory")
    replica_norms: bool = setting(
        False,
        "for debugging: measure the gradient norm of every data replica before gradients are "
        "reduced, and report one that is more than 10 % off the median (with zero 0 or 1)",
    )

    def problems(self) -> list[str]:
        """Every violated rule of this section."""
        problems = []
        for name in ("steps", "global_batch_size", "seq_len", "num_microbatches"):
            value = getattr(self, name)
            if value < 1:
                problems.append(f"train.{name}={value} must be a whole number. Use 1 or more.")
        for name in ("unroll_layers", "loss_chunk_tokens"):
            value = getattr(self, name)
            if value < 0:
                problems.append(f"train.{name}={value} must be ≥ 0 (0 has the meaning in --help).")
        kind, _, names = self.remat.partition(":")
        if kind not in ("auto", "none", "dots", "full", "names") or (kind == "names") != bool(
            names
        ):
            problems.append(
                f"train.remat={self.remat!r} is unknown. Use auto, none, dots, full or names:A,B."
            )
        elif unknown := [n for n in names.split(",") if n and n not in REMAT_NAMES]:
            problems.append(
                f"train.remat names {', '.join(unknown)}, which no model marks. "
                f"Use names from {', '.join(REMAT_NAMES)}."
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When the run evaluates, and on how much."""

    interval_steps: int = setting(100, "steps between evaluations; 0 = only after the last step")
    max_batches: int = setting(
        20, "batches of an evaluation during the run, spread over the data; 0 = every row once"
    )
    final_max_batches: int = setting(0, "the same for the evaluation after the last step")
    global_batch_size: int = setting(0, "rows of an evaluation batch; 0 = train.global_batch_size")

    def problems(self) -> list[str]:
        """Every violated rule of this section."""
        return [
            f"eval.{field.name}={getattr(self, field.name)} must be ≥ 0 (0: see --help)."
            for field in dataclasses.fields(self)
            if getattr(self, field.name) < 0
        ]


REMAT_NAMES = ("qkv", "attention", "attention_out", "mlp_hidden", "mlp_out")
"""What models mark with `checkpoint_name` for `remat = "names:..."`."""

REPLICA_NORMS = "replica_norms"
"""Metric [data]: gradient norm of each data replica, where `replica_norms` asks for it."""

_LOGITS_BYTES = 64 * 2**20
_UNROLL_UP_TO = 16


@dataclasses.dataclass(frozen=True)
class Step:
    """The compiled functions of a run.

    Attributes:
        train: (state, batch) -> (state, metrics); jitted, `state` donated.
        train_below: (state, batch, limit) -> (state, metrics); the same, but a step whose loss is
            above the limit is not applied either; `applied` in its metrics says so.
        evaluate: (params, batch) -> Sums over the global batch; jitted.
        context: what the model is told (kernels, dtypes), for logs.
        batch_sharding: where a batch's leaves must lie.
    """

    train: Any
    train_below: Any
    evaluate: Any
    context: Context
    batch_sharding: Any


def make_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Array], Array],
    layout: Layout,
    config: TrainConfig,
    precision: PrecisionConfig,
    *,
    clip_norm: float = 0.0,
    loss_scale: dict[str, Array] | None = None,
    pipeline_config: PipelineConfig | None = None,
    frozen: Params | None = None,
) -> Step:
    """Build the step of one model on one layout; compiles nothing yet.

    Args:
        model: the model record.
        optimizer: update direction, without the learning rate.
        schedule: step -> learning rate, float32.
        layout: mesh and rules.
        config: shape of the step.
        precision: number formats.
        clip_norm: largest global gradient norm; 0 = no clipping.
        loss_scale: initial loss scale (for its structure only), {} without.
        pipeline_config: how microbatches flow where the mesh has stages.
        frozen: tree of booleans, the leaves that `optimizer` leaves alone; None = no leaf.
    """
    stages = pipeline_config or PipelineConfig()
    context = make_context(model, layout, config, precision, stages)
    shardings = state_shardings(
        model, optimizer, layout, loss_scale=loss_scale or {}, offload=config.offload_optimizer
    )
    gradients = make_value_and_grad(
        model, layout, config, context, precision=precision, stages=stages, frozen=frozen
    )
    update = make_update(model, optimizer, layout, clip_norm)
    on_device = opt_shardings(model, optimizer, layout)

    def train(
        state: TrainState, batch: Batch, limit: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        if config.offload_optimizer:
            fetched = jax.device_put(state.opt_state, on_device)
            state = dataclasses.replace(state, opt_state=fetched)
        scale = state.loss_scale.get("scale", jnp.ones((), jnp.float32))
        key = jax.random.fold_in(state.key, state.step)
        sums, grads, norm = gradients(state.params, batch, key, scale)
        learning_rate = schedule(state.step)
        params, opt_state = update(state, grads, norm, learning_rate)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        means = _means(sums)
        applied = finite if limit is None else finite & (means["loss"] <= limit)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)
        new_state = TrainState(
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            loss_scale=update_loss_scale(state.loss_scale, finite, precision),
            key=state.key,
        )
        metrics = means | {
            **{name: sums[name] for name in (REPLICA_NORMS,) if name in sums},
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "finite": finite,
            **({} if limit is None else {"applied": applied}),
            **{f"loss_{name}": value for name, value in state.loss_scale.items()},
        }
        return new_state, metrics

    batch_sharding = layout.sharding(layout.batch_spec())
    whole = layout.sharding(P())
    return Step(
        train=jax.jit(
            train,
            donate_argnums=0,
            in_shardings=(shardings, batch_sharding),
            out_shardings=(shardings, whole),
        ),
        train_below=jax.jit(  # compiled only where a run asks for it
            train,
            donate_argnums=0,
            in_shardings=(shardings, batch_sharding, whole),
            out_shardings=(shardings, whole),
        ),
        evaluate=jax.jit(
            make_evaluate(model, layout, context, stages),
            in_shardings=(shardings.params, batch_sharding),
            out_shardings=whole,
        ),
        context=context,
        batch_sharding=batch_sharding,
    )


def make_context(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    precision: PrecisionConfig,
    stages: PipelineConfig | None = None,
) -> Context:
    """What the model is told inside the step on this layout."""
    device = layout.mesh.devices.flat[0]
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    dtype = precision.resolve(platform)
    split_vocabulary = layout.sizes["tensor"] > 1 and not layout.auto_tensor
    chunk = config.loss_chunk_tokens or default_loss_chunk(
        model.dims.get("vocab", 0) // layout.sizes["tensor"]
    )

    def token_loss(
        x: Array, kernel: Array, targets: Array, weights: Array, vocab_size: int
    ) -> Sums:
        vocabulary = losses.Vocabulary(vocab_size, "tensor" if split_vocabulary else None, chunk)
        return losses.token_cross_entropy(x, kernel, targets, weights, vocabulary)

    return Context(
        dtype=dtype,
        token_loss=token_loss,
        label_loss=losses.label_cross_entropy,
        run_layers=make_run_layers(
            model, layout, config, precision, platform, gather=not _gathers_once(layout, stages)
        ),
        platform=platform,
        compute_capability=str(getattr(device, "compute_capability", "")),
        gather=make_gather(layout, model, dtype, precision),
        **tensor.hooks(layout),
    )


def make_gather(layout: Layout, model: Model, dtype: Any, precision: PrecisionConfig) -> Any:
    """A function that makes all but the stacked layers whole, in the compute dtype."""
    specs = layout.param_specs(model.axes)

    def gather(params: Params) -> Params:
        outer = {name: tree for name, tree in params.items() if name != "layers"}
        outer_specs = {name: specs[name] for name in outer}
        whole = fsdp.gather(
            outer, outer_specs, dtype=dtype, reduce_dtype=jnp.dtype(precision.reduce_dtype)
        )
        return {**params, **whole}

    return gather


def _gathers_once(layout: Layout, stages: PipelineConfig | None) -> bool:
    """Whether the pipeline gathers a stage's weights itself, before the first tick."""
    return layout.sizes["pipeline"] > 1 and stages is not None and stages.gather == "step"


def make_run_layers(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    precision: PrecisionConfig,
    platform: str,
    *,
    gather: bool = True,
) -> Callable[..., Array]:
    """The layer runner: a scan over stacked layers that gathers each layer's weights as it goes.

    The runner takes `first`, the index in the model of the first layer it is given; random bits
    depend on it.
    """
    if not model.num_layers:
        return Context().run_layers
    layer = make_layer(model, layout, precision, platform, gather=gather)
    specs = fsdp.layer_specs(layout.param_specs(model.axes)["layers"])
    remat = _remat(config, platform)
    recomputes = remat != "none" or (gather and fsdp.is_sharded(specs))
    # A pipeline holds its layers in several loop bodies: unrolled, they would take long to compile.
    few = 1 if layout.sizes["pipeline"] > 1 else model.num_layers
    unroll = config.unroll_layers or min(few, _default_unroll(few, platform, recomputes))

    def run_layers(
        block: Any, layers: Params, x: Array, aux: Any, context: Context, first: Any = 0
    ) -> Array:
        def body(x: Array, index_and_shards: tuple[Array, Params]) -> tuple[Array, None]:
            index, shards = index_and_shards
            return layer(block, shards, x, index, aux, context), None

        count = jax.tree.leaves(layers)[0].shape[0]
        # Forward and backward are two loops, over which the compiler cannot merge what is computed
        # twice on purpose. Unrolled they are one straight line, in which it would.
        if recomputes or context.dtype != jnp.float32:  # casts of weights are not kept either
            # Elsewhere it would only pin every kept value with a reduce-precision.
            body = jax.checkpoint(
                body,
                policy=remat_policy(remat, layers),
                prevent_cse=recomputes and unroll >= count,
            )
        x, _ = lax.scan(body, x, (first + jnp.arange(count), layers), unroll=min(unroll, count))
        return x

    return run_layers


def _remat(config: TrainConfig, platform: str) -> str:
    """The remat policy's name, `auto` resolved."""
    if config.remat == "auto":
        return "dots" if platform == "gpu" else "none"
    return config.remat


def make_layer(
    model: Model, layout: Layout, precision: PrecisionConfig, platform: str, *, gather: bool = True
) -> Callable[..., Array]:
    """(block, shards, x, index in the model, aux, context) -> x: one layer, its weights gathered.

    Without `gather` the weights are whole already and only cast.
    """
    specs = fsdp.layer_specs(layout.param_specs(model.axes)["layers"])
    if not gather:
        specs = jax.tree.map(lambda _: P(), specs, is_leaf=lambda x: isinstance(x, P))
    dtype = precision.resolve(platform)
    reduce_dtype = jnp.dtype(precision.reduce_dtype)

    def layer(
        block: Any, shards: Params, x: Array, index: Array, aux: Any, context: Context
    ) -> Array:
        weights = fsdp.gather(shards, specs, dtype=dtype, reduce_dtype=reduce_dtype)
        key = context.dropout_key
        layer_key = None if key is None else jax.random.fold_in(key, index)
        return block(weights, x, aux, dataclasses.replace(context, dropout_key=layer_key))

    return layer


def remat_policy(remat: str, layers: Params) -> Callable[..., bool]:
    """What `jax.checkpoint` may keep for the backward pass; gathered weights never.

    Args:
        remat: none, dots, full or names:A,B.
        layers: local shards of the stacked layers.

    Raises:
        ValueError: an unknown policy (`TrainConfig.problems` reports it first).
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return fsdp.keep_all_but_weights(layers)
    if remat == "dots":
        return policies.save_from_both_policies(
            policies.checkpoint_dots_with_no_batch_dims,
            policies.save_only_these_names("attention"),
        )
    if remat == "full":
        return policies.nothing_saveable
    if remat.startswith("names:"):
        return policies.save_only_these_names(*remat.removeprefix("names:").split(","))
    raise ValueError(f"remat={remat!r} is unknown. Use none, dots, full or names:A,B.")


def make_value_and_grad(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    context: Context,
    *,
    precision: PrecisionConfig | None = None,
    stages: PipelineConfig | None = None,
    frozen: Params | None = None,
) -> Callable[..., tuple[Sums, Params, Array]]:
    """(params, batch, key, loss scale) -> (global sums, gradients of the mean loss, their norm).

    The gradients are sharded like the moments where ZeRO says so, else like the parameters.
    `precision` and `stages` matter where the mesh has stages. Those of `frozen` leaves are 0, and
    nothing that only they need is computed or moved.
    """
    precision, stages = precision or PrecisionConfig(), stages or PipelineConfig()
    param_specs = layout.param_specs(model.axes)
    micro_specs = layout.gradient_specs(model.axes)
    grad_specs = layout.moment_specs(model.axes)
    axes = data.summed_axes(layout)
    num_stages = layout.sizes["pipeline"]
    if num_stages > 1:
        remat = _remat(config, context.platform)
        value_and_grad = pipeline.make_value_and_grad(
            model,
            layout,
            lambda rows: stages.make_schedule(
                num_stages=num_stages, rows=rows, accumulation=config.num_microbatches
            ),
            layer=make_layer(
                model, layout, precision, context.platform, gather=stages.gather == "action"
            ),
            policy=None if remat == "none" else remat_policy(remat, {}),
            gather=stages.gather,
            reduce_dtype=jnp.dtype(precision.reduce_dtype),
        )
    else:
        value_and_grad = _make_accumulation(model, layout, config.num_microbatches)

    def local(params: Params, batch: Batch, key: Array, scale: Array) -> Any:
        batch = data.number_rows(batch, layout)
        local_params = data.localise(params, layout)
        step_context = dataclasses.replace(context, dropout_key=key)
        sums, grads = value_and_grad(local_params, batch, step_context, scale)
        norms = {}
        if config.replica_norms and data.has_replica_norms(layout):
            found = data.replica_norms(grads, micro_specs, sums["weight"], layout) / scale
            norms = {REPLICA_NORMS: found}
        sums = _sum_over_devices(sums, layout) | norms
        grads = data.reduce_gradients(grads, micro_specs, grad_specs, layout, axes)
        inverse = 1.0 / (_divisor(sums["weight"]) * scale)
        grads = jax.tree.map(lambda g: g * inverse, grads)
        if frozen is not None:
            zero = lambda is_frozen, g: collectives.zeros_like(g) if is_frozen else g
            grads = jax.tree.map(zero, frozen, grads)
        norm = jnp.sqrt(data.squared_norm(grads, grad_specs, layout))
        return sums, grads, norm

    return _manual(
        local, layout, (param_specs, layout.batch_spec(), P(), P()), (P(), grad_specs, P())
    )


def _make_accumulation(
    model: Model, layout: Layout, num_microbatches: int
) -> Callable[[Params, Batch, Context, Array], tuple[Sums, Params]]:
    """(local params, rows, context, scale) -> sums and local gradients, one microbatch a time."""
    param_specs = layout.param_specs(model.axes)
    micro_specs = layout.gradient_specs(model.axes)
    axes = data.summed_axes(layout)

    def value_and_grad(
        params: Params, batch: Batch, context: Context, scale: Array
    ) -> tuple[Sums, Params]:
        def scaled_loss(params: Params, micro: Batch) -> tuple[Array, Sums]:
            sums = model.loss(context.gather(params), micro, context)
            return sums["loss"] * scale, sums

        def microbatch(micro: Batch) -> tuple[Sums, Params]:
            grads, sums = jax.grad(scaled_loss, has_aux=True)(params, micro)
            # ZeRO-2 shards each microbatch's gradient at once; the rest is reduced once a step.
            return sums, data.scatter_gradients(grads, param_specs, micro_specs, axes)

        return _accumulate(microbatch, batch, num_microbatches)

    return value_and_grad


def _sum_over_devices(sums: Sums, layout: Layout) -> Sums:
    """Sums over replicas, and from the last stage to all."""
    stages = ("pipeline",) if layout.sizes["pipeline"] > 1 else ()
    axes = (*stages, *layout.batch_axes)
    if not axes:
        return sums
    return {name: collectives.all_reduce(s, axes) for name, s in sums.items()}


def make_evaluate(
    model: Model, layout: Layout, context: Context, stages: PipelineConfig | None = None
) -> Callable[..., Sums]:
    """(params, batch) -> sums over the global batch, nothing dropped.

    Where the mesh has stages, a forward pipeline.
    """
    stages = stages or PipelineConfig()
    num_stages = layout.sizes["pipeline"]
    if num_stages > 1:
        evaluate = pipeline.make_evaluate(
            model,
            layout,
            lambda rows: stages.make_evaluation_schedule(num_stages=num_stages, rows=rows),
            gather=stages.gather,
        )
    else:
        evaluate = lambda params, batch, context: model.loss(context.gather(params), batch, context)

    def local(params: Params, batch: Batch) -> Sums:
        batch = data.number_rows(batch, layout)
        return _sum_over_devices(evaluate(params, batch, context), layout)

    return _manual(local, layout, (layout.param_specs(model.axes), layout.batch_spec()), P())


def make_update(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    clip_norm: float,
) -> Callable[..., tuple[Params, Any]]:
    """(state, grads, norm, learning rate) -> (params, opt_state), laid out as they came.

    Partitioned automatically: moments, gradients and the slice of the parameters they update share
    one layout, so an elementwise optimizer moves nothing but, under ZeRO, the new parameters.
    """
    param_specs = layout.param_specs(model.axes)
    moment_specs = layout.moment_specs(model.axes)

    def update(state: TrainState, grads: Params, norm: Array, learning_rate: Array) -> Any:
        if clip_norm:
            factor = jnp.minimum(1.0, clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * factor, grads)
        params = layout.constrain(state.params, moment_specs)
        directions, opt_state = optimizer.update(grads, state.opt_state, params)
        params = jax.tree.map(
            lambda p, d: p - learning_rate * d.astype(p.dtype), params, directions
        )
        params = layout.constrain(layout.constrain(params, moment_specs), param_specs)
        return params, opt_state

    return update


def _accumulate(
    microbatch: Callable[[Batch], tuple[Sums, Params]], batch: Batch, num_microbatches: int
) -> tuple[Sums, Params]:
    """Sums and gradients added up over microbatches, in float32."""
    if num_microbatches == 1:
        return microbatch(batch)
    parts = data.split_microbatches(batch, num_microbatches)

    def add(total: Any, micro: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, microbatch(micro)), None

    kinds = jax.eval_shape(microbatch, jax.tree.map(lambda x: x[0], parts))
    total, _ = lax.scan(add, jax.tree.map(collectives.zeros_like, kinds), parts)
    return total


def _manual(function: Any, layout: Layout, in_specs: Any, out_specs: Any) -> Any:
    if layout.auto_tensor:
        in_specs, out_specs = _without_tensor(in_specs), _without_tensor(out_specs)
    if layout.mesh.size > 1 and layout.mesh.devices.flat[0].platform == "cpu":
        function = in_order(function, hidden=layout.auto_tensor)
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        axis_names=set(layout.manual_axes),
        in_specs=in_specs,
        out_specs=out_specs,
    )


def _without_tensor(specs: Any) -> Any:
    def strip(spec: P) -> P:
        kept = []
        for entry in spec:
            names = entry if isinstance(entry, tuple) else (entry,)
            names = tuple(n for n in names if n not in (None, "tensor"))
            kept.append(names if len(names) > 1 else names[0] if names else None)
        return P(*kept)

    return jax.tree.map(strip, specs, is_leaf=lambda x: isinstance(x, P))


def _means(sums: Sums) -> Metrics:
    """Global means from global sums; `accuracy` where hits were counted."""
    weight = _divisor(sums["weight"])
    means = {"loss": sums["loss"] / weight, "weight": sums["weight"]}
    if "correct" in sums:
        means["accuracy"] = sums["correct"] / weight
    return means


def _divisor(weight: Array) -> Array:
    """The global weight, or 1 where nothing counts: a batch without weight has gradient 0."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))


def default_loss_chunk(vocab_shard: int) -> int:
    """Tokens whose logits exist at once where the settings leave it open; 0 = all."""
    return max(128, _LOGITS_BYTES // (4 * vocab_shard)) if vocab_shard else 0


def _default_unroll(num_layers: int, platform: str, recomputes: bool) -> int:
    # XLA:CPU merges what unrolled layers compute twice, with or without a barrier.
    fits = platform == "cpu" and not recomputes and num_layers <= _UNROLL_UP_TO
    return num_layers if fits else 1
