"""Optimizers and learning-rate schedules: settings, update directions, and their state's dims.

An optimizer here is everything but the learning rate. It turns gradients into a direction, weight
decay included, and the train step does the rest: `params -= lr(step) * direction`. Gradient
clipping belongs to the step too (its norm spans devices); only its setting lives here.

    adamw, sgd, lion   element by element: may run on local shards inside `shard_map`
    adafactor, muon    see whole matrices: must run on global arrays (`OptimConfig.elementwise`)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxdist.types import Array, Dims, Params, setting

Schedule = Callable[[Array], Array]

_ADAM_RMS = 0.2
"""RMS of an AdamW update in practice, which Muon's is scaled to, so that both take the same
learning rate. Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning rate over the run, and weight decay."""

    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = setting(
        "adamw", "update rule; muon takes stacked matrices and leaves the rest to AdamW"
    )
    peak_lr: float = setting(3e-3, "learning rate at the end of warmup, before lr_scaling")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = setting(
        "cosine", "shape after warmup; wsd = stay at the peak, then decay linearly"
    )
    warmup_steps: int = setting(20, "steps of linear warmup; 0 = start at the peak")
    decay_steps: int = setting(
        0, "steps from peak to min_lr_ratio (cosine, linear); 0 = the rest of the run"
    )
    wsd_decay_ratio: float = setting(0.2, "share of the run's steps that wsd spends decaying")
    min_lr_ratio: float = setting(0.1, "learning rate after the decay, as a share of the peak")
    lr_scaling: Literal["none", "linear", "sqrt"] = setting(
        "none", "multiply peak_lr by global_batch_size / lr_base_batch_size, or its square root"
    )
    lr_base_batch_size: int = setting(256, "rows per step for which peak_lr was chosen")
    beta1: float = setting(0.9, "decay of the first moment (adamw, lion)")
    beta2: float = setting(0.95, "decay of the second moment (adamw), of the momentum (lion)")
    eps: float = setting(1e-8, "added to denominators (adamw, muon)")
    momentum: float = setting(0.9, "decay of the momentum (sgd, muon; 0.95 is usual for muon)")
    nesterov: bool = setting(False, "look ahead along the momentum (sgd; muon always does)")
    factored_decay: float = setting(
        0.8, "c of adafactor's second-moment decay 1 - step^-c (0.8 in the paper)"
    )
    update_clip: float = setting(1.0, "largest RMS of a matrix's update (adafactor)")
    weight_decay: float = setting(
        0.1, "decoupled decay: each step takes lr * weight_decay of a parameter away"
    )
    decay_mask: Literal["matrices", "all"] = setting(
        "matrices", "what decays; matrices = no biases, no norm scales"
    )
    clip_norm: float = setting(1.0, "largest global norm of the gradient; 0 = no clipping")
    moment_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "storage of momentum and first moments; second moments stay float32"
    )

    @property
    def elementwise(self) -> bool:
        """Whether an update of one element depends on that element alone."""
        return self.optimizer in ("adamw", "sgd", "lion")

    @property
    def moment_bytes(self) -> int:
        """Bytes of optimizer state per parameter; rows and columns of adafactor count as none."""
        momentum = {"float32": 4, "bfloat16": 2}[self.moment_dtype]
        # Muon's hidden matrices, nearly all of a model, have a momentum only.
        return {"adamw": momentum + 4, "adafactor": 0}.get(self.optimizer, momentum)

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        return [
            f"optim.{name}={getattr(self, name)} {rule}"
            for name, ok, rule in self._rules()
            if not ok
        ]

    def _rules(self) -> list[tuple[str, bool, str]]:
        def finite(value: float) -> bool:
            return math.isfinite(value)

        share = "must be at least 0 and below 1: it is the share of a moment that is kept. Try {}."
        return [
            (
                "peak_lr",
                finite(self.peak_lr) and self.peak_lr > 0,
                "must be above 0 and finite. Try 1e-3 for a small model, 3e-4 for a billion "
                "parameters.",
            ),
            ("warmup_steps", self.warmup_steps >= 0, "must be 0 or more steps. Use 0 for none."),
            (
                "decay_steps",
                self.decay_steps >= 0,
                "must be 0 or more steps. Use 0 for the rest of the run.",
            ),
            (
                "wsd_decay_ratio",
                0 < self.wsd_decay_ratio <= 1,
                "must be above 0 and at most 1. Try 0.2.",
            ),
            (
                "min_lr_ratio",
                0 <= self.min_lr_ratio <= 1,
                "must lie between 0 and 1: it is a share of peak_lr. Try 0.1.",
            ),
            ("lr_base_batch_size", self.lr_base_batch_size >= 1, "must be at least 1 row."),
            ("beta1", 0 <= self.beta1 < 1, share.format("0.9")),
            ("beta2", 0 <= self.beta2 < 1, share.format("0.95")),
            ("eps", finite(self.eps) and self.eps > 0, "must be above 0. Try 1e-8."),
            ("momentum", 0 <= self.momentum < 1, share.format("0.9")),
            (
                "factored_decay",
                0 < self.factored_decay <= 1,
                "must be above 0 and at most 1. Try 0.8.",
            ),
            (
                "update_clip",
                finite(self.update_clip) and self.update_clip > 0,
                "must be above 0 and finite. Try 1.0.",
            ),
            (
                "weight_decay",
                finite(self.weight_decay) and self.weight_decay >= 0,
                "must be 0 or more. Use 0 for none.",
            ),
            (
                "clip_norm",
                finite(self.clip_norm) and self.clip_norm >= 0,
                "must be 0 or more. Use 0 for no clipping.",
            ),
        ]


def make_schedule(config: OptimConfig, *, total_steps: int, global_batch_size: int) -> Schedule:
    """The learning rate of each step.

    Warmup is linear and never 0: step s of w takes peak * (s + 1) / (w + 1), so that step w is the
    first at the peak. After the decay the rate stays at `min_lr_ratio * peak`.

    Args:
        config: the settings.
        total_steps: steps of the whole run, from 0 and not from a resumed one.
        global_batch_size: rows per optimizer step over all devices and microbatches.

    Returns:
        int32 step (scalar or array, 0-based) -> float32 learning rate. Pure; traceable.

    References:
        cosine: Loshchilov and Hutter, "SGDR", 2017, without restarts.
        wsd: Hu et al., "MiniCPM", 2024, section 4, with a linear decay.
        linear scaling: Goyal et al., "Accurate, Large Minibatch SGD", 2017; square root:
        Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """
    peak = config.peak_lr * _lr_scale(config, global_batch_size)
    floor = peak * config.min_lr_ratio
    warmup = config.warmup_steps
    start, decay = _decay_span(config, total_steps)

    def lr(step: Array) -> Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - start) / decay, 0.0, 1.0)
        if config.schedule == "cosine":
            remaining = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif config.schedule == "constant":
            remaining = jnp.ones_like(progress)
        else:
            remaining = 1.0 - progress
        decayed = floor + (peak - floor) * remaining
        return jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), decayed)

    return lr


def _lr_scale(config: OptimConfig, global_batch_size: int) -> float:
    ratio = global_batch_size / config.lr_base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def _decay_span(config: OptimConfig, total_steps: int) -> tuple[int, int]:
    """First step of the decay and its length in steps (at least 1)."""
    if config.schedule == "wsd":
        decay = max(1, round(total_steps * config.wsd_decay_ratio))
        return max(config.warmup_steps, total_steps - decay), decay
    return config.warmup_steps, max(1, config.decay_steps or total_steps - config.warmup_steps)


def make_optimizer(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """The update direction, weight decay included, without the learning rate.

    Args:
        config: the settings.
        axes: the model's tree of `Dims`. They say which leaves are matrices, which dims are their
            two sides, and which leaves stack one matrix per layer.

    Returns:
        `init(params)` and `update(grads, state, params)`; subtract `lr * updates` from the
        parameters. Gradients are float32. The state holds trees like `params`, found by
        `optax.tree_utils.tree_map_params`, with a scalar 0 at leaves that another rule takes care
        of; `state_axes` names its dims.
    """
    rules = {
        "adamw": _adam,
        "sgd": _sgd,
        "lion": _lion,
        "adafactor": _adafactor,
        "muon": _muon,
    }
    parts = [rules[config.optimizer](config, axes)]
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask(config, axes)))
    return optax.chain(*parts)


def decay_mask(config: OptimConfig, axes: Params) -> Params:
    """Tree of booleans like `axes`: the leaves that weight decay shrinks."""
    if config.decay_mask == "all":
        return jax.tree.map(lambda _: True, axes)
    return jax.tree.map(lambda sides: sides.is_matrix, _sides(axes))


def hidden_matrices(axes: Params) -> Params:
    """Tree of booleans like `axes`: the leaves that Muon updates.

    With stacked layers, the matrices in the stack. Without (a CNN), every matrix or kernel but
    those that touch a vocabulary or the classes.
    """
    has_stack = any("layers" in dims for dims in jax.tree.leaves(axes))

    def is_hidden(dims: Dims, sides: _Sides) -> bool:
        inside = "layers" in dims if has_stack else not {"vocab", "classes"} & set(dims)
        return inside and sides.is_matrix

    return jax.tree.map(is_hidden, axes, _sides(axes))


def state_axes(config: OptimConfig, axes: Params, params: Params) -> Any:
    """The logical dims of the optimizer's state, for its shardings and its checkpoint.

    Args:
        config: the settings.
        axes: the model's tree of `Dims`.
        params: the parameters or their shapes (`jax.ShapeDtypeStruct`).

    Returns:
        A tree like `make_optimizer(config, axes).init(params)` with a `Dims` at each array.
    """
    optimizer = make_optimizer(config, axes)
    state = jax.eval_shape(optimizer.init, params)
    named = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, dims: dims if leaf.ndim else Dims(()),
        state,
        axes,
        transform_non_params=lambda leaf: Dims((None,) * leaf.ndim),
    )
    # Adafactor's row and column moments lack dims of their parameter.
    return jax.tree.map(
        lambda node: _factored_axes(node, axes) if isinstance(node, FactoredState) else node,
        named,
        is_leaf=lambda node: isinstance(node, FactoredState),
    )


@dataclass(frozen=True)
class _Sides:
    """Positions of an array's dims: the sides of its matrix, and what it stacks.

    A vector has rows only.
    """

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return bool(self.columns)


def _sides(axes: Params) -> Params:
    """Tree of `_Sides` like `axes`; leaves named `...bias` or `...scale` are vectors."""

    def of_leaf(path: Any, dims: Dims) -> _Sides:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return _sides_of(dims, is_vector=name.endswith(("bias", "scale")))

    return jax.tree_util.tree_map_with_path(of_leaf, axes)


def _sides_of(dims: Dims, is_vector: bool) -> _Sides:
    """How an array is a matrix or a vector, or a stack of them.

    A row side that begins with `d_model` is that alone, else it is all but the last dim (`head_dim`
    belongs to the dim before it). A dim without a name on the column side holds fused projections
    (query, key, value; gate, up): a matrix of its own for each.
    """
    stacked = [i for i, name in enumerate(dims) if name == "layers"]
    rest = [i for i, name in enumerate(dims) if name != "layers"]
    if is_vector or len(rest) < 2:
        return _Sides(tuple(stacked), tuple(rest), ())
    split = 1 if dims[rest[0]] == "d_model" else len(rest) - 1
    while dims[rest[split]] == "head_dim" and split > 1:
        split -= 1
    columns = [i for i in rest[split:] if dims[i] is not None] or rest[split:]
    stacked += [i for i in rest[split:] if i not in columns]
    return _Sides(tuple(stacked), tuple(rest[:split]), tuple(columns))


def _adam(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2."""
    return optax.scale_by_adam(
        b1=config.beta1, b2=config.beta2, eps=config.eps, mu_dtype=config.moment_dtype
    )


def _sgd(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Momentum as PyTorch counts it: m = momentum * m + g; the update is m."""
    return optax.trace(
        decay=config.momentum, nesterov=config.nesterov, accumulator_dtype=config.moment_dtype
    )


def _lion(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2."""
    return optax.scale_by_lion(b1=config.beta1, b2=config.beta2, mu_dtype=config.moment_dtype)


def _muon(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Muon for hidden matrices, AdamW for embeddings, head, norms and biases.

    Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024. Deviations, both
    optax's: the momentum is debiased as in NAdam before it is orthogonalised; the update is then
    scaled to AdamW's RMS (Liu et al., 2025).
    """
    is_hidden = hidden_matrices(axes)
    others = jax.tree.map(lambda is_hidden: not is_hidden, is_hidden)
    numbers = jax.tree.map(
        lambda sides, is_hidden: _muon_numbers(sides) if is_hidden else optax.MaskedNode(),
        _sides(axes),
        is_hidden,
    )
    muon = optax.chain(
        scale_by_muon(
            beta=config.momentum,
            eps=config.eps,
            mu_dtype=config.moment_dtype,
            weight_dimension_numbers=numbers,
        ),
        _scale_to_adam_rms(numbers),
    )
    both = optax.chain(optax.masked(muon, is_hidden), optax.masked(_adam(config, axes), others))
    return _without_holes(both)


def _without_holes(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same rule with a scalar 0 for each `MaskedNode` of its state: every leaf is an array."""

    def is_hole(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    def fill(state: Any) -> Any:
        return jax.tree.map(lambda x: _absent() if is_hole(x) else x, state, is_leaf=is_hole)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        holes = jax.eval_shape(inner.init, updates)
        state = jax.tree.map(lambda a, x: a if is_hole(a) else x, holes, state, is_leaf=is_hole)
        updates, state = inner.update(updates, state, params)
        return updates, fill(state)

    return optax.GradientTransformation(lambda params: fill(inner.init(params)), update)


def _muon_numbers(sides: _Sides) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(reduction_axis=sides.rows, output_axis=sides.columns)


def _scale_to_adam_rms(numbers: Params) -> optax.GradientTransformation:
    """Multiply an orthogonal update by 0.2 * sqrt(its longer side): then its RMS is AdamW's."""

    def scale(update: Array, matrix: MuonDimensionNumbers) -> Array:
        fan_in = math.prod(update.shape[i] for i in matrix.reduction_axis)
        fan_out = math.prod(update.shape[i] for i in matrix.output_axis)
        return update * (_ADAM_RMS * math.sqrt(max(fan_in, fan_out)))

    return optax.stateless(lambda updates, _: jax.tree.map(scale, updates, numbers))


class FactoredState(NamedTuple):
    """Adafactor's second moments.

    Attributes:
        step: int32 scalar, steps taken.
        rows: for matrices, the mean over the column side: dims [*stacked, *row side].
        columns: for matrices, the mean over the row side: dims [*stacked, *column side].
        full: for vectors, the second moment itself.

    What a leaf does not have is a scalar 0.
    """

    step: Array
    rows: Params
    columns: Params
    full: Params


def _adafactor(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Factored second moments with update clipping, one matrix per layer.

    Shazeer and Stern, "Adafactor", 2018, algorithms 4 and 5, without momentum and without the
    learning rate relative to the parameter's scale: lr(step) alone sets the size of an update.
    Written here because optax's factors the two longest dims of a leaf, which for stacked layers
    and for [d_model, heads, head_dim] are not the sides of its matrices.
    """
    sides = dict(jax.tree_util.tree_leaves_with_path(_sides(axes)))

    def init(params: Params) -> FactoredState:
        def moment(part: str) -> Params:
            return jax.tree_util.tree_map_with_path(
                lambda path, p: _empty_moment(p, sides[path], part), params
            )

        return FactoredState(
            jnp.zeros((), jnp.int32), moment("rows"), moment("columns"), moment("full")
        )

    def update(
        grads: Params, state: FactoredState, params: Params | None = None
    ) -> tuple[Params, FactoredState]:
        step = state.step + 1
        decay = 1.0 - step.astype(jnp.float32) ** -config.factored_decay
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten_with_path(grads)
        moments = zip(*(treedef.flatten_up_to(tree) for tree in state[1:]), strict=True)
        results = [
            _factored_update(grad, moment, sides[path], decay, config.update_clip)
            for (path, grad), moment in zip(leaves, moments, strict=True)
        ]
        trees = [treedef.unflatten(column) for column in zip(*results, strict=True)]
        return trees[0], FactoredState(step, *trees[1:])

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # our own state


def _empty_moment(param: Array, sides: _Sides, part: str) -> Any:
    if (part == "full") == sides.is_matrix:
        return _absent()
    kept = range(param.ndim) if part == "full" else _kept(sides, part)
    return jnp.zeros([param.shape[i] for i in kept], jnp.float32)


def _absent() -> Array:
    """What fills the place of a moment that a leaf does not have."""
    return jnp.zeros((), jnp.float32)


def _kept(sides: _Sides, part: str) -> list[int]:
    """The dims of the parameter that its `rows` or `columns` moment keeps."""
    return sorted(sides.stacked + getattr(sides, part))


def _factored_update(
    grad: Array, moment: tuple[Any, Any, Any], sides: _Sides, decay: Array, clip: float
) -> tuple[Array, Any, Any, Any]:
    """One leaf: (clipped update, rows, columns, full)."""
    rows, columns, full = moment
    square = jnp.square(grad) + 1e-30  # epsilon 1 of the paper: keeps the square roots finite
    if not sides.is_matrix:
        full = decay * full + (1 - decay) * square
        update = grad * jax.lax.rsqrt(full)
    else:
        rows = decay * rows + (1 - decay) * square.mean(sides.columns)
        columns = decay * columns + (1 - decay) * square.mean(sides.rows)
        wide_rows = jnp.expand_dims(rows, sides.columns)
        wide_columns = jnp.expand_dims(columns, sides.rows)
        mean = wide_rows.mean(sides.rows, keepdims=True)
        update = grad * jax.lax.rsqrt(wide_rows / mean) * jax.lax.rsqrt(wide_columns)
    rms = jnp.sqrt(jnp.square(update).mean(sides.rows + sides.columns, keepdims=True))
    return update / jnp.maximum(1.0, rms / clip), rows, columns, full


def _factored_axes(state: FactoredState, axes: Params) -> FactoredState:
    """`state` with the dims of each moment; `state.full` already has them."""

    def kept(part: str) -> Params:
        def dims_of(dims: Dims, sides: _Sides) -> Dims:
            if not sides.is_matrix:
                return Dims(())
            return Dims(dims[i] for i in _kept(sides, part))

        return jax.tree.map(dims_of, axes, _sides(axes))

    return state._replace(rows=kept("rows"), columns=kept("columns"))
