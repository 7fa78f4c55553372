"""Tiny models, a batch, and a manual step on one device, with which modules are compared.

The reference shares the models' own functions and nothing else with the package: a Python loop over
layers, a plain softmax, `jax.grad` of the mean loss, Adam from optax. No mesh, no scan, no chunks,
no custom gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.forward import ForwardPass
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.precision import PrecisionConfig, initial_loss_scale
from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState, make_state, state_shardings, without_moments
from jaxdist.core.step import Optimizer, Reports, Step, TrainConfig, make_step
from jaxdist.core.step.grouped_update import Unit, plan_groups
from jaxdist.core.step_plan import Device, StepPlan, StepSettings, plan_step
from jaxdist.core.types import (
    Batch,
    Context,
    Model,
    Objective,
    Params,
    Sums,
    TokenHead,
    add_sums,
    trained_loss,
)
from jaxdist.models import CnnConfig, DecoderConfig, build

SEQ, ROWS, VOCAB = 16, 16, 100
LEARNING_RATE, BETA1, EPS = 1e-2, 0.9, 1e-3

IMAGE_SIZE, CLASSES = 8, 10

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=32, num_layers=2, mlp_dim=64, max_seq_len=SEQ
)


class TinyCnnConfig(CnnConfig):
    """Small images and few channels."""

    image_size = IMAGE_SIZE
    channels = (8, 16)


CONFIGS = {
    # Llama and Qwen parts: grouped queries, rotary, q/k norm, gated MLP, untied.
    "rotary": DecoderConfig(
        num_heads=8, num_kv_heads=4, head_dim=8, qk_norm="head", bias=["qkv"], **_SIZES
    ),
    # GPT-2 parts: learned positions, layer norm, biases everywhere, tied.
    "learned": DecoderConfig(
        **_SIZES,
        num_heads=8,
        head_dim=8,
        positions="learned",
        norm="layer",
        activation="gelu",
        tie_embeddings=True,
        bias=["qkv", "out", "mlp"],
    ),
    # Mistral parts: a window shorter than a row; three key/value heads.
    "windowed": DecoderConfig(num_heads=6, num_kv_heads=3, head_dim=8, sliding_window=5, **_SIZES),
    "four": DecoderConfig(**{**_SIZES, "num_layers": 4}, num_heads=8, num_kv_heads=4, head_dim=8),
    # Mixtral parts: three of eight experts for each token.
    "experts": DecoderConfig(
        **{**_SIZES, "mlp_dim": 32},
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        num_experts=8,
        experts_per_token=3,
        shared_expert_dim=16,
        shared_expert_gate=True,
        router={"balance_loss": 0.1, "z_loss": 0.01},
    ),
    "cnn": TinyCnnConfig(mlp_dim=32),
}
CONFIGS["experts_batch"] = dataclasses.replace(
    CONFIGS["experts"], router={"balance_loss": 0.1, "z_loss": 0.01, "balance_scope": "batch"}
)
CONFIGS["experts_capacity"] = dataclasses.replace(
    CONFIGS["experts"], router={"balance_loss": 0.1, "z_loss": 0.01, "capacity_factor": 0.8}
)
CONFIGS["experts_mixed"] = dataclasses.replace(
    CONFIGS["experts"], num_layers=3, dense_layers=[0], dense_mlp_dim=48
)
# Two blocks of a layer without and two with experts.
CONFIGS["experts_blocks"] = dataclasses.replace(
    CONFIGS["experts_batch"], num_layers=6, dense_layers=[0, 3], dense_mlp_dim=48
)
# gpt-oss: sinks, biases of experts and router, clamped activations, windows in every second layer.
CONFIGS["experts_sinks"] = dataclasses.replace(
    CONFIGS["experts"],
    bias=["qkv", "out", "mlp", "router"],
    activation="clamped_swiglu",
    attention_sinks=True,
    sliding_window=5,
    full_attention_every=2,
)
# DeepSeek-V3's router.
CONFIGS["experts_bias"] = dataclasses.replace(
    CONFIGS["experts"],
    router={
        "scores": "sigmoid", "scale": 2.5, "groups": 4, "groups_per_token": 2, "bias": True,
        "bias_rate": 0.01, "balance_loss": 0.1,
    },
)  # fmt: skip


@functools.cache
def model_of(name: str) -> Model:
    """Return a tiny model by name, with weights larger than usual so that every part matters."""
    config = CONFIGS[name]
    if isinstance(config, DecoderConfig):
        config = dataclasses.replace(config, init_std=0.1)
    return build(config, seq_len=SEQ)


def optimizer() -> optax.GradientTransformation:
    """Return Adam, whose first moment after one step is (1 - BETA1) times the gradient."""
    return optax.scale_by_adam(b1=BETA1, b2=0.95, eps=EPS)


def make_update(rule: optax.GradientTransformation) -> Any:
    """Return `rule.update`, jitted; optax raises floats to int32 counts and mixes two dtypes."""

    def update(grads: Params, opt_state: Any, params: Params) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(grads, opt_state, params)

    return jax.jit(update)


def schedule(step: Any) -> Any:
    return jnp.full((), LEARNING_RATE, jnp.float32)


def text_batch(rows: int = ROWS, *, packed: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random tokens whose weights differ by row and are zero for some.

    Averages of averages, or a normalization per replica, give wrong results on it.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, SEQ + 1)).astype(np.int32)
    weights = rng.uniform(0, 1, (rows, SEQ)) * (rng.uniform(0, 1, (rows, 1)) ** 3)
    weights[3 % rows] = 0
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights.astype(np.float32),
    }
    if packed:
        cuts = rng.integers(1, SEQ, (rows, 1))
        index = np.arange(SEQ)[None]
        batch["segments"] = (1 + (index >= cuts)).astype(np.int32)
        batch["positions"] = np.where(index >= cuts, index - cuts, index).astype(np.int32)
    return batch


def image_batch(rows: int = ROWS, *, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "images": rng.normal(size=(rows, IMAGE_SIZE, IMAGE_SIZE, 3)).astype(np.float32),
        "labels": rng.integers(0, CLASSES, rows).astype(np.int32),
        "weights": rng.choice([0, 0.5, 1], rows).astype(np.float32),
    }


def batch_of(name: str) -> dict[str, np.ndarray]:
    return image_batch() if name == "cnn" else text_batch()


class Trace(NamedTuple):
    """Results of a run, as numpy.

    Attributes:
        losses: mean loss of each step.
        grads: gradients of the first step's mean loss.
        params: parameters after the first step.
        state: the last state.
        norm: global norm of the first gradients.
    """

    losses: list[float]
    grads: Params
    params: Params
    state: Any
    norm: float


@functools.cache
def initial_state(name: str) -> TrainState:
    """Return the state before the first step, as numpy; the key stays a key of one device."""
    state = jax.jit(make_state(model_of(name), optimizer(), {}), static_argnums=0)(0)
    return dataclasses.replace(jax.device_get(dataclasses.replace(state, key=None)), key=state.key)


def every_expert(x: Any, routing: Any, up: Any, down: Any, activate: Any, *biases: Any) -> Any:
    """Run each token through every expert; return the sum of its shares [batch, seq, d_model]."""
    outputs = []
    for i in range(up.shape[0]):
        hidden = jnp.einsum("bsd,dwf->bswf", x, up[i]) + (biases[0][i] if biases else 0)
        hidden = activate(hidden.reshape(-1, *hidden.shape[2:])).reshape(*x.shape[:2], -1)
        share = jnp.sum(jnp.where(routing.experts == i, routing.shares, 0), -1)
        outputs.append(share[..., None] * (hidden @ down[i] + (biases[1][i] if biases else 0)))
    return sum(outputs), None


@functools.cache
def reference(name: str, steps: int = 20) -> Trace:
    return train_by_hand(name, batch_of(name), steps)


def train_by_hand(
    name: str, batch: Batch, steps: int = 20, objective: Objective | None = None
) -> Trace:
    model = model_of(name)

    def run_layers(block: Any, layers: Params, x: Any, aux: Any, context: Context) -> Any:
        total: Sums = {}
        for i in range(model.num_layers):
            own = dataclasses.replace(context, layer=i)
            x, sums = block(jax.tree.map(lambda leaf, i=i: leaf[i], layers), x, aux, own)
            total = add_sums(total, sums)
        return x, total

    def mean_cross_entropy(output: Any, batch: Batch, _: Context) -> Any:
        is_text = isinstance(output, TokenHead)
        logits = (output.x @ output.kernel)[..., : output.vocab_size] if is_text else output
        labels, weights = batch["targets" if is_text else "labels"], batch["weights"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
        return {"loss": -jnp.sum(picked * weights), "weight": jnp.sum(weights)}

    model = dataclasses.replace(model, objective=objective or mean_cross_entropy)
    context = Context(
        attend=make_attend(AttentionPlan("cpu")),
        experts=every_expert,
        # A key means training, in which experts have a capacity; the reference has no dropout.
        dropout_key=jax.random.key(0) if "experts" in model.dims else None,
    )
    forward = ForwardPass(model, run_layers=run_layers)

    def mean_loss(params: Params) -> Any:
        sums = forward.loss(params, batch, context)
        return trained_loss(sums) / sums["weight"], sums["loss"] / sums["weight"]

    @jax.jit
    def step(params: Params, opt_state: Any) -> Any:
        (_, loss), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        directions, opt_state = make_update(optimizer())(grads, opt_state, params)
        params = jax.tree.map(lambda p, d: p - LEARNING_RATE * d, params, directions)
        return params, opt_state, loss, grads

    params, opt_state = initial_state(name).params, initial_state(name).opt_state
    losses, first = [], None
    for _ in range(steps):
        params, opt_state, loss, grads = step(params, opt_state)
        losses.append(float(loss))
        first = first or jax.device_get((grads, params))
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(first[0])))
    return Trace(losses, *first, jax.device_get((params, opt_state)), float(norm))


@dataclasses.dataclass(frozen=True)
class Case:
    """Model, mesh and options of one run."""

    model: str
    mesh: str
    zero: int = 0
    sequence: bool = True
    microbatches: int = 1
    remat: str = "none"
    exchange: str = "auto"
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)

    def __str__(self) -> str:
        sizes = [(a, n) for a, n in MeshSpec.parse(self.mesh).sizes.items() if n > 1]
        parts = [self.model, *(f"{axis}{size}" for axis, size in sizes)]
        parts += [f"zero{self.zero}"] * bool(self.zero)
        parts += ["no_sequence"] * (not self.sequence)
        parts += [f"micro{self.microbatches}"] * (self.microbatches > 1)
        parts += [f"remat_{self.remat}"] * (self.remat != "none")
        parts += [self.exchange] * (self.exchange != "auto")
        return "_".join(parts) if sizes else "_".join([self.model, "one_device", *parts[1:]])


def layout_of(case: Case) -> Layout:
    spec = MeshSpec.parse(case.mesh)
    model = model_of(case.model)
    return Layout(
        mesh=spec.build(jax.devices()[: spec.num_devices]),
        rules=model.rules,
        zero=case.zero,
        sequence_parallel=case.sequence and spec["tensor"] > 1 and model.sequence,
        context_attention=case.exchange,
    )


def train_config(case: Case, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = dict(
        global_batch_size=ROWS,
        seq_len=SEQ,
        num_microbatches=case.microbatches,
        remat=case.remat,
    )
    return TrainConfig(**{**settings, **changes})


def plan_of(
    model: Model,
    layout: Layout,
    train: TrainConfig | None = None,
    precision: PrecisionConfig | None = None,
    pipeline: PipelineConfig | None = None,
    *,
    packed: bool = False,
) -> StepPlan:
    settings = StepSettings(
        train or TrainConfig(), precision or PrecisionConfig(), pipeline or PipelineConfig()
    )
    return plan_step(model, layout, Device.of(layout), packed, settings)


def step_of(
    case: Case,
    *,
    rule: optax.GradientTransformation | None = None,
    precision: PrecisionConfig | None = None,
    max_grad_norm: float = 0.0,
    ema_decay: float = 0.0,
    axes: Params | None = None,
    objective: Objective | None = None,
    layer_statistics_steps: int = 0,
    store: Any = None,
    unit: Unit = "element",
    **changes: Any,
) -> tuple[Step, TrainState]:
    """Return the step of a case and an initial state with its layout.

    Args:
        case: model and mesh.
        rule: optimizer, Adam by default.
        precision: number formats, float32 by default.
        max_grad_norm, ema_decay: as in `Optimizer`.
        layer_statistics_steps: as in `Reports`.
        store: makes the store of optimizer moments from the groups of the step.
        unit: as in `plan_groups`.
        axes: records of the parameters, those of the model by default.
        objective: that of the model by default.
        changes: other fields of `TrainConfig`.
    """
    precision = precision or PrecisionConfig(compute_dtype="float32")
    layout, model, rule = layout_of(case), model_of(case.model), rule or optimizer()
    loss_scale = initial_loss_scale(precision.resolve("cpu"))
    config = train_config(case, **changes)
    model = dataclasses.replace(model, axes=axes or model.axes)
    copies = {"ema": ema_decay} if ema_decay else {}
    plan = plan_of(model, layout, config, precision, case.pipeline)
    made = None
    if store is not None:
        kept = {"loss_scale": loss_scale, "copies": tuple(copies)}
        made = store(plan_groups(model, rule, layout, plan.layers, unit, **kept))
        made.fill_zeros()
    step = make_step(
        model,
        objective or model.objective,
        Optimizer(rule, schedule, max_grad_norm, copies, made),
        layout,
        plan,
        Reports(layer_statistics_steps),
    )
    state = place_state(
        case,
        rule=rule,
        loss_scale=loss_scale,
        offload=store is not None,
        copies=["ema"] * bool(ema_decay),
    )
    return step, state


def place_state(
    case: Case,
    *,
    rule: optax.GradientTransformation | None = None,
    loss_scale: dict[str, Any] | None = None,
    offload: bool = False,
    copies: Sequence[str] = (),
) -> TrainState:
    layout, model, rule = layout_of(case), model_of(case.model), rule or optimizer()
    start, loss_scale = initial_state(case.model), loss_scale or {}
    opt_state = jax.jit(rule.init)(start.params)
    if offload:
        opt_state = without_moments(rule, opt_state, start.params)
    state = dataclasses.replace(
        start,
        opt_state=opt_state,
        loss_scale=loss_scale,
        copies={name: start.params for name in copies},
    )
    shardings = state_shardings(
        model, rule, layout, loss_scale=loss_scale, offload=offload, copies=copies
    )
    # Copies, because the step donates its state and the reference must live on.
    return jax.tree.map(lambda x, s: jax.device_put(_copy(x), s), state, shardings)


def run(case: Case, steps: int = 20, batch: Batch | None = None, **options: Any) -> Trace:
    step, state = step_of(case, **options)
    placed = place_batch(batch or batch_of(case.model), step.batch_sharding)
    losses, first = [], None
    for _ in range(steps):
        state, metrics = step.train(state, placed, np.inf)
        losses.append(float(metrics["loss"]))
        if first is None:
            grads = jax.tree.map(lambda mu: mu / (1 - BETA1), jax.device_get(state.opt_state.mu))
            first = grads, jax.device_get(state.params)
            norm = float(metrics["grad_norm"])
    return Trace(losses, *first, jax.device_get((state.params, state.opt_state)), norm)


def _copy(x: Any) -> Any:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.asarray(jax.random.key_data(x)).copy())
    return np.array(x)


def largest(tree: Any) -> float:
    return max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(tree))


def distance(tree: Any, other: Any) -> float:
    return largest(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), tree, other))
