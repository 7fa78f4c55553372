"""Update rules by name, the parameters to which each applies, and learning-rate schedules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float32

from jaxdist.core.matrices import Sides, sides_of
from jaxdist.core.types import Array, Dims, Params
from jaxdist.optim.adafactor import absent, adafactor
from jaxdist.optim.config import OptimConfig
from jaxdist.optim.groups import scale_by_groups
from jaxdist.optim.int8 import Moment, in_8_bits
from jaxdist.optim.muon import scale_by_muon


def make_optimizer(
    config: OptimConfig, axes: Params, shardings: Params | None = None
) -> optax.GradientTransformation:
    """Make the rule of the update direction, including weight decay, without the learning rate.

    `axes` is the model's tree of `Dims`. `shardings` are those of the moments; Muon uses them to
    divide its work over devices. None = one device.

    Subtract `lr * updates` from the parameters. Gradients are float32, and None for frozen leaves.
    The state supports `optax.tree_utils.tree_map_params`: a moment is a tree like `params`, with a
    scalar 0 for frozen leaves and those of other rules.
    """
    moving = jax.tree.map(lambda dims: dims.update != "none", axes)
    if all(jax.tree.leaves(moving)):
        return _chain(config, axes, shardings)
    inner = _chain(config, _masked(moving, axes), _masked(moving, shardings))
    return _without_holes(optax.chain(optax.masked(inner, moving)))


def _masked(mask: Params, tree: Any) -> Any:
    """Return `tree` with a `MaskedNode` for each leaf whose `mask` is False; None for None."""
    if tree is None:
        return None
    return jax.tree.map(lambda keeps, x: x if keeps else optax.MaskedNode(), mask, tree)


def _chain(
    config: OptimConfig, axes: Params, shardings: Params | None
) -> optax.GradientTransformation:
    rules: dict[str, Any] = {
        "adamw": _adam,
        "sgd": _sgd,
        "lion": _lion,
        "adafactor": adafactor,
        "muon": functools.partial(_muon, shardings=shardings),
    }
    parts = [rules[config.optimizer](config, axes)]
    mask = decay_mask(axes)
    if config.groups:
        parts.append(scale_by_groups(config, mask))
    elif config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    return optax.chain(*parts)


def decay_mask(axes: Params) -> Params:
    """Return a tree of booleans like `axes`: True for matrices, which decay by default."""
    return jax.tree.map(lambda sides: sides.is_matrix, sides_of(axes))


def hidden_matrices(axes: Params) -> Params:
    """Return a tree of booleans like `axes`: True for leaves that Muon updates.

    They are the matrices of stacked layers; without such layers, all without vocab or classes dim.
    """
    has_stack = any("layers" in dims for dims in jax.tree.leaves(axes))

    def is_hidden(dims: Dims, sides: Sides) -> bool:
        inside = "layers" in dims if has_stack else not {"vocab", "classes"} & set(dims)
        return inside and sides.is_matrix

    return jax.tree.map(is_hidden, axes, sides_of(axes))


def _adam(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Make AdamW, without its decay (Loshchilov and Hutter, "Decoupled Weight Decay ...", 2019)."""
    rule = optax.scale_by_adam(
        b1=config.beta1, b2=config.beta2, eps=config.eps, mu_dtype=config.rule_dtype
    )
    moments = {
        "mu": Moment(config.beta1, 1 - config.beta1),
        "nu": Moment(config.beta2, 1 - config.beta2, is_square=True),
    }
    return _stored(rule, config, axes, moments)


def _sgd(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Make SGD with momentum as in PyTorch: m = momentum * m + g; the update is m."""
    rule = optax.trace(decay=config.momentum, accumulator_dtype=config.rule_dtype)
    return _stored(rule, config, axes, {"trace": Moment(config.momentum)})


def _lion(config: OptimConfig, axes: Params) -> optax.GradientTransformation:
    """Make Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""
    rule = optax.scale_by_lion(b1=config.beta1, b2=config.beta2, mu_dtype=config.rule_dtype)
    return _stored(rule, config, axes, {"mu": Moment(config.beta2, 1 - config.beta2)})


def _muon(
    config: OptimConfig, axes: Params, shardings: Params | None
) -> optax.GradientTransformation:
    """Make Muon for hidden matrices, and AdamW for all other parameters."""
    is_hidden = hidden_matrices(axes)
    others = jax.tree.map(lambda is_hidden: not is_hidden, is_hidden)
    sides = _masked(is_hidden, sides_of(axes))
    muon = scale_by_muon(config, sides, _masked(is_hidden, shardings))
    momentum = {"momentum": Moment(config.momentum, 1 - config.momentum)}
    muon = _stored(muon, config, axes, momentum)
    both = optax.chain(optax.masked(muon, is_hidden), optax.masked(_adam(config, axes), others))
    return _without_holes(both)


def _stored(
    rule: optax.GradientTransformation,
    config: OptimConfig,
    axes: Params,
    moments: Mapping[str, Moment],
) -> optax.GradientTransformation:
    """Return `rule`, with its moments in 8 bits if `optim.moment_dtype` is int8."""
    return in_8_bits(rule, axes, moments) if config.moment_dtype == "int8" else rule


def _without_holes(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a rule with a scalar 0 in place of each `MaskedNode` of the state of `inner`."""

    def is_hole(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    def fill(state: Any) -> Any:
        return jax.tree.map(lambda x: absent() if is_hole(x) else x, state, is_leaf=is_hole)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        holes = jax.eval_shape(inner.init, updates)
        state = jax.tree.map(lambda a, x: a if is_hole(a) else x, holes, state, is_leaf=is_hole)
        updates, state = inner.update(updates, state, params)
        return updates, fill(state)

    return optax.GradientTransformation(lambda params: fill(inner.init(params)), update)


def from_optax(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `rule` with negated updates: we subtract directions, and optax adds updates."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return directions like the gradients [...], and the state."""
        updates, state = rule.update(grads, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformation(rule.init, update)


WSD_DECAY_RATIO = 0.2
"""Share of a run in which wsd decays if `decay_steps` is 0 (Hägele et al. 2024,
"Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations": 10 to 20 %)."""


def make_lr_schedule(
    config: OptimConfig,
    *,
    total_steps: int,
    global_batch_size: int,
    batches: Sequence[tuple[int, int]] = (),
) -> Callable[[Any], Float32[Array, "*steps"]]:
    """Make the function from steps to learning rates.

    Warmup is linear and never 0: step s of w has peak * (s + 1) / (w + 1). After the decay the rate
    stays at `min_lr_ratio * peak`. Steps count from 0 to `total_steps` - 1. The function maps int32
    steps, [] or [steps], to float32 rates. If the batch changes, `batches` are pairs (number of
    steps before it, rows), in order: `lr_scaling` multiplies the rate by a factor of these rows in
    place of `global_batch_size`.

    References:
        cosine: Loshchilov and Hutter, "SGDR", 2017, without restarts.
        wsd: Hu et al., "MiniCPM", 2024, section 4, with a linear decay.
        linear scaling: Goyal et al., "Accurate, Large Minibatch SGD", 2017; square root:
        Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """
    first, *others = batches or [(0, global_batch_size)]
    peak = config.peak_lr * _lr_scale(config, first[1])
    floor = peak * config.min_lr_ratio
    warmup = config.warmup_steps
    start, decay = _decay_span(config, total_steps)

    def lr(step: Any) -> Float32[Array, "*steps"]:
        """Return the learning rate of each step, int32 [*steps]."""
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - start) / decay, 0.0, 1.0)
        if config.schedule == "cosine":
            remaining = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif config.schedule == "constant":
            remaining = jnp.ones_like(progress)
        else:
            remaining = 1.0 - progress
        decayed = floor + (peak - floor) * remaining
        rate = jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), decayed)
        factor = jnp.ones_like(rate)
        for begin, rows in others:
            scale = _lr_scale(config, rows) / _lr_scale(config, first[1])
            factor = jnp.where(step >= begin, scale, factor)
        return rate * factor if others else rate

    return lr


def _lr_scale(config: OptimConfig, global_batch_size: int) -> float:
    kind, _, base = config.lr_scaling.partition(":")
    if kind == "none":
        return 1.0
    ratio = global_batch_size / int(base)
    return ratio if kind == "linear" else math.sqrt(ratio)


def _decay_span(config: OptimConfig, total_steps: int) -> tuple[int, int]:
    """Return the first step of the decay, and the number of its steps (at least 1)."""
    if config.schedule == "wsd":
        decay = config.decay_steps or max(1, round(total_steps * WSD_DECAY_RATIO))
        return max(config.warmup_steps, total_steps - decay), decay
    return config.warmup_steps, max(1, config.decay_steps or total_steps - config.warmup_steps)
