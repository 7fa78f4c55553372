"""A compiled step that computes digests of what a train step holds: per tensor and per layer.

The gradient of an extra leaf of the stacked layers carries the digests of activations: what a layer
takes in, what it gives out, and the gradient that comes back to it. So they are summed over
devices, microbatches and stages as every gradient is, on any mesh and schedule.

Digests of two runs can be compared where mesh, model and batch shape are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint.checksum import checksum
from jaxdist.core import collectives
from jaxdist.core.state import TrainState
from jaxdist.core.step import make_context, make_value_and_grad
from jaxdist.core.types import Array, Batch, Context, Dims, Model, Params, Sums
from jaxdist.run.setup import Parts

Digests = dict[str, Any]
"""What was looked at -> digest, in the order in which a step computes it."""

_PROBE = "digests"
_STAGES = ("input", "output", "gradient of the output")
_LANES = 8
"""Numbers below 256 of each digest: bfloat16 holds them exactly, where a layer's weights are cast
to it."""


def make_diagnostic_step(parts: Parts) -> Callable[[TrainState, Batch], Digests]:
    """The diagnostic step of a run; compiled at its first call.

    Returns:
        (state, batch [global_batch_size, ...]) -> digests; the state is not donated.
    """
    model = _with_probe(parts.model) if parts.model.num_layers else parts.model
    gradients = make_value_and_grad(
        model,
        parts.layout,
        parts.plan,
        make_context(model, parts.layout, parts.plan),
    )

    @jax.jit
    def step(state: TrainState, batch: Batch) -> dict[str, Any]:
        lanes: Array | None = None
        key = jax.random.fold_in(state.key, state.step)
        params, scale = state.params, state.loss_scale.get("scale", jnp.ones((), jnp.float32))
        if model is not parts.model:
            zeros = jnp.zeros((model.num_layers, len(_STAGES) * _LANES), jnp.float32)
            params = {**params, "layers": {**params["layers"], _PROBE: zeros}}
        sums, grads, norm = gradients(params, batch, key, scale)
        if model is not parts.model:
            lanes = grads["layers"].pop(_PROBE)
        return {
            "params": _digests(state.params),
            "ema_params": _digests(state.ema_params),
            "opt_state": _digests(state.opt_state),
            "batch": {name: checksum(values) for name, values in batch.items()},
            "lanes": lanes,
            "sums": {**sums, "grad_norm": norm},
            "grads": _digests(grads),
        }

    return lambda state, batch: _in_order(jax.device_get(step(state, batch)))


def _digests(tree: Any) -> dict[str, Array]:
    """Name of each leaf -> uint32 digest, [layers] for leaves of the stacked layers, else []."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        stacked = "layers" in name.split("/") and leaf.ndim
        found[name] = jax.vmap(checksum)(leaf) if stacked else checksum(leaf)
    return found


def _in_order(found: dict[str, Any]) -> Digests:
    """Digests by name, in the order in which a step computes them."""
    ordered: Digests = {}
    lanes = found["lanes"]
    for part in ("params", "ema_params", "opt_state"):
        ordered |= _by_layer(found[part], part)
    ordered |= {f"batch/{name}": int(digest) for name, digest in found["batch"].items()}
    count = 0 if lanes is None else len(lanes)
    parts = [] if lanes is None else np.split(np.asarray(lanes), len(_STAGES), axis=1)
    for layer in range(count):
        for stage in (0, 1):
            ordered[f"layer {layer}: {_STAGES[stage]}"] = parts[stage][layer].tobytes()
    sums = dict(found["sums"])
    norm = sums.pop("grad_norm")
    ordered |= {name: np.asarray(value).tobytes() for name, value in sums.items()}
    for layer in reversed(range(count)):
        ordered[f"layer {layer}: {_STAGES[2]}"] = parts[2][layer].tobytes()
    ordered |= _by_layer(found["grads"], "gradient")
    return ordered | {"grad_norm": np.asarray(norm).tobytes()}


def _by_layer(found: dict[str, Any], part: str) -> Digests:
    named: Digests = {}
    for name, digest in found.items():
        if np.ndim(digest):
            named |= {f"{part}/{name}, layer {i}": int(one) for i, one in enumerate(digest)}
        else:
            named[f"{part}/{name}"] = int(digest)
    return named


def _with_probe(model: Model) -> Model:
    """The same model, whose stacked layers have one leaf more, [layers, stages * lanes]."""
    layers = {**model.axes["layers"], _PROBE: Dims(("layers", None))}
    block: Any = model.block

    def probed(weights: Params, x: Array, aux: Any, context: Context) -> tuple[Array, Sums]:
        """The block on x [batch, seq_shard, d_model], its digests in `lanes` [3 · _LANES]."""
        weights = dict(weights)
        lanes = weights.pop(_PROBE)
        entered = x
        x, sums = block(weights, x, aux, context)
        return _observe(x, jax.lax.stop_gradient(entered), lanes), sums

    def init(key: Array) -> Params:
        params = model.init(key)
        lanes = jnp.zeros((model.num_layers, len(_STAGES) * _LANES), jnp.float32)
        return {**params, "layers": {**params["layers"], _PROBE: lanes}}

    axes = {**model.axes, "layers": layers}
    return dataclasses.replace(model, block=probed, axes=axes, init=init)


@jax.custom_vjp
def _observe(x: Array, entered: Array, lanes: Array) -> Array:
    """`x` [batch, seq_shard, d_model] as it is, and digests as the gradient of `lanes`.

    They are those of `entered`, `x` and x's gradient, [3 · _LANES] in the dtype of `lanes`.
    """
    return x


def _forward(x: Array, entered: Array, lanes: Array) -> tuple[Array, Any]:
    """`_observe` [batch, seq_shard, d_model]; backward needs the digests of both inputs."""
    return x, (_lanes(entered), _lanes(x), entered, lanes)


def _backward(kept: Any, gradient: Array) -> tuple[Array, Array, Array]:
    """Gradients of x (the one given), of `entered` (0) and of `lanes` [3 · _LANES] (digests)."""
    before, after, entered, lanes = kept
    found = jnp.concatenate([before, after, _lanes(gradient)])
    wanted = collectives.varying_axes(lanes)
    # Devices of the tensor axis hold parts of an activation or the same one: either way their sum
    # is a digest of it.
    found = collectives.vary(found, tuple(wanted))
    if extra := tuple(collectives.varying_axes(found) - wanted):
        found = collectives.all_reduce(found, extra)
    return gradient, collectives.zeros_like(entered), found.astype(lanes.dtype)


_observe.defvjp(_forward, _backward)


def _lanes(x: Array) -> Array:
    """Digest of a local array of any shape: float32 [_LANES], integers below 256."""
    low = checksum(x)
    high = checksum(x[::-1])
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    words = jnp.concatenate([(low >> shifts) & 0xFF, (high >> shifts) & 0xFF])
    return words.astype(jnp.float32)
