"""Rerun steps of two runs until a digest differs; report its step, layer and tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.checksum import checksum, checksums
from jaxdist.core import collectives
from jaxdist.core.state import TrainState
from jaxdist.core.step import make_prepare, make_value_and_grad
from jaxdist.core.types import Array, Batch, Context, Dims, Model, Params, Sums
from jaxdist.core.weights import GROUPS
from jaxdist.data import Loader
from jaxdist.run.data_checks import open_run_data
from jaxdist.run.replay import History, loss_and_norm, read_history, state_before
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts, decide_step
from jaxdist.run.teacher import with_teacher

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerunStep:
    """Digests (in the order of their computation), loss and gradient norm of one rerun step.

    `arrays` describes every array before the step, as in a checkpoint; {} unless requested.
    """

    step: int
    digests: Digests
    numbers: dict[str, float]
    arrays: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """First difference between two reruns, e.g. "params/layers/mlp/up, layer 3".

    `also` is the number of further differences in the same step.
    """

    step: int
    what: str
    also: int


def rerun_steps(
    parts: Parts,
    diagnose: Callable[[TrainState, Batch], Digests],
    state: TrainState,
    batches: Iterable[Batch],
    *,
    limit: Callable[[int], float] = lambda step: math.inf,
    checkpoint: int | None = None,
) -> Iterator[RerunStep]:
    """Yield each rerun step with these batches, from `state`, which is donated.

    `diagnose` is the diagnostic step. `limit` returns the loss above which a step's update is
    skipped. The step after `checkpoint` describes the arrays before it.
    """
    for step, batch in enumerate(batches, start=int(state.step) + 1):
        arrays = {}
        if step - 1 == checkpoint:
            arrays = _describe(parts.in_model_order(parts.without_base(state)))
        digests = diagnose(state, batch)
        state, metrics = parts.in_stage(step - 1).step.train(state, batch, limit(step))
        numbers = loss_and_norm(metrics)
        yield RerunStep(step=step, digests=digests, numbers=numbers, arrays=arrays)


def _describe(state: TrainState) -> dict[str, dict[str, Any]]:
    leaves = pytree.leaves_of(state)
    arrays = [pytree.plain(leaf) for leaf in leaves]
    return pytree.with_checksums(pytree.describe(leaves, arrays), checksums(arrays))


def first_difference(a: RerunStep, b: RerunStep) -> FirstDifference | None:
    """Return the first digest that differs between two reruns of a step; None if none does."""
    names = [*a.digests, *(name for name in b.digests if name not in a.digests)]
    different = [name for name in names if a.digests.get(name) != b.digests.get(name)]
    if not different:
        return None
    return FirstDifference(step=a.step, what=different[0], also=len(different) - 1)


def rerun(
    runs: tuple[RunDirectory, RunDirectory],
    parts: tuple[Parts, Parts],
    start: int,
    last: int,
    *,
    checkpoint: int | None = None,
) -> tuple[FirstDifference | None, list[tuple[RerunStep, RerunStep]]]:
    """Rerun the steps of both runs after `start`, up to `last` or the first difference.

    Both `parts` are on the same devices and mesh. `start` is a step with a checkpoint in both runs;
    0 = new states. The step after `checkpoint` describes the arrays before it. Return the first
    difference or None, and the steps.
    """
    walks, done = [], []
    with contextlib.ExitStack() as stack:
        for run, own in zip(runs, parts, strict=True):
            data = open_run_data(own.config)
            own = with_teacher(own, data[0].fields)
            own, _ = decide_step(own, data[0].fields, own.budget())  # same program as training
            history = read_history(run)
            state, loader, _ = state_before(own, data[0], run, start + 1, history)
            stack.callback(loader.close)
            batches, diagnose = (
                _checked_batches(loader, history, start + 1),
                _diagnose_stages(own),
            )
            walks.append(
                rerun_steps(
                    own, diagnose, state, batches, limit=history.limit, checkpoint=checkpoint
                )
            )
        for step in range(start + 1, last + 1):
            a, b = (next(walk) for walk in walks)
            done.append((a, b))
            if difference := first_difference(a, b):
                return difference, done
            log.info("step %d: all %d digests of both reruns are equal", step, len(a.digests))
    return None, done


def _diagnose_stages(parts: Parts) -> Callable[[TrainState, Batch], Digests]:
    """Return the diagnostic step of a run whose batch may change its shape."""
    made = {id(parts): make_diagnostic_step(parts)}

    def diagnose(state: TrainState, batch: Batch) -> Digests:
        stage = parts.in_stage(int(state.step))
        if id(stage) not in made:
            made[id(stage)] = make_diagnostic_step(stage)
        return made[id(stage)](state, batch)

    return diagnose


def _checked_batches(loader: Loader, history: History, step: int) -> Iterator[Batch]:
    for number, batch in enumerate(loader, start=step):
        history.check(number, loader.first_sample, loader.digest)
        yield batch


Digests = dict[str, Any]
"""Name of a tensor -> digest, in the order in which a step computes them."""

_PROBE = "digests"
_STAGES = ("input", "output", "gradient of the output")
_LANES = 8
"""Numbers per digest. Each is an integer below 256, so a cast to bfloat16 is exact."""


def make_diagnostic_step(parts: Parts) -> Callable[[TrainState, Batch], Digests]:
    """Return (state, batch [global_batch_size, ...]) -> digests of tensors; no state is donated."""
    model = _with_probe(parts.model) if parts.model.num_layers else parts.model
    inputs = parts.layout, parts.plan, parts.step.context
    gradients, prepare = make_value_and_grad(model, *inputs), make_prepare(parts.model, *inputs)

    @jax.jit
    def step(state: TrainState, batch: Batch) -> dict[str, Any]:
        lanes: Array | None = None
        key = jax.random.fold_in(state.key, state.step)
        params, scale = state.params, state.loss_scale.get("scale", jnp.ones((), jnp.float32))
        if model is not parts.model:
            count = parts.plan.layers.num_stored
            zeros = jnp.zeros((count, len(_STAGES) * _LANES), jnp.float32)
            params = {**params, "layers": {**params["layers"], _PROBE: zeros}}
        sums, grads, norm = gradients(params, prepare(state.params, batch), key, scale)
        if model is not parts.model:
            lanes = grads["layers"].pop(_PROBE)
        return {
            **{item: _digests(tree) for item, tree in state.groups.items()},
            "opt_state": _digests(state.opt_state),
            "batch": {name: checksum(values) for name, values in batch.items()},
            "lanes": lanes,
            "sums": {**sums, "grad_norm": norm},
            "grads": _digests(grads),
        }

    positions = parts.plan.layers.positions

    def in_model_order(digests: dict[str, Any]) -> dict[str, Any]:
        """Return digests [layers, ...] reordered from execution order to that of the model."""
        return jax.tree.map(lambda x: x[positions] if np.ndim(x) else x, jax.device_get(digests))

    return lambda state, batch: _in_order(in_model_order(step(state, batch)))


def _digests(tree: Any) -> dict[str, Array]:
    """Return a uint32 digest by leaf name, [layers] for leaves of the stacked layers, else []."""
    digests = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        stacked = "layers" in name.split("/") and leaf.ndim
        digests[name] = jax.vmap(checksum)(leaf) if stacked else checksum(leaf)
    return digests


def _in_order(digests: dict[str, Any]) -> Digests:
    """Return the digests by name, in the order in which a step computes them."""
    ordered: Digests = {}
    lanes = digests["lanes"]
    for part in (*(group.item for group in GROUPS.values()), "opt_state"):
        ordered |= _by_layer(digests.get(part, {}), part)
    ordered |= {f"batch/{name}": int(digest) for name, digest in digests["batch"].items()}
    count = 0 if lanes is None else len(lanes)
    parts = [] if lanes is None else np.split(np.asarray(lanes), len(_STAGES), axis=1)
    for layer in range(count):
        for stage in (0, 1):
            ordered[f"layer {layer}: {_STAGES[stage]}"] = parts[stage][layer].tobytes()
    sums = dict(digests["sums"])
    norm = sums.pop("grad_norm")
    ordered |= {name: np.asarray(value).tobytes() for name, value in sums.items()}
    for layer in reversed(range(count)):
        ordered[f"layer {layer}: {_STAGES[2]}"] = parts[2][layer].tobytes()
    ordered |= _by_layer(digests["grads"], "gradient")
    return ordered | {"grad_norm": np.asarray(norm).tobytes()}


def _by_layer(digests: dict[str, Any], part: str) -> Digests:
    named: Digests = {}
    for name, digest in digests.items():
        if np.ndim(digest):
            named |= {f"{part}/{name}, layer {i}": int(one) for i, one in enumerate(digest)}
        else:
            named[f"{part}/{name}"] = int(digest)
    return named


def _with_probe(model: Model) -> Model:
    """Return the model with an extra leaf of its stacked layers, [layers, stages * lanes]."""
    layers = {**model.axes["layers"], _PROBE: Dims(("layers", None))}
    block: Any = model.block

    def probed(weights: Params, x: Array, aux: Any, context: Context) -> tuple[Array, Sums]:
        """Return results for x [batch, seq_shard, d_model]; `lanes` gets digests as gradient."""
        weights = dict(weights)
        lanes = weights.pop(_PROBE)
        before = x
        x, sums = block(weights, x, aux, context)
        return _observe(x, jax.lax.stop_gradient(before), lanes), sums

    def init(key: Array) -> Params:
        params = model.init(key)
        lanes = jnp.zeros((model.num_layers, len(_STAGES) * _LANES), jnp.float32)
        return {**params, "layers": {**params["layers"], _PROBE: lanes}}

    axes = {**model.axes, "layers": layers}
    return dataclasses.replace(model, block=probed, axes=axes, init=init)


@jax.custom_vjp
def _observe(x: Array, before: Array, lanes: Array) -> Array:
    """Return `x` [batch, seq_shard, d_model]; the gradient of `lanes` is set to digests.

    The digests, [3 · _LANES], are those of `before`, of `x` and of the gradient of `x`.
    """
    return x


def _forward(x: Array, before: Array, lanes: Array) -> tuple[Array, Any]:
    """Return `x` [batch, seq_shard, d_model], and digests of both inputs for `_backward`."""
    return x, (_lanes(before), _lanes(x), before, lanes)


def _backward(saved: Any, gradient: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of x, of `before` (0) and of `lanes` [3 · _LANES] (digests)."""
    digest_before, digest_after, before, lanes = saved
    digests = jnp.concatenate([digest_before, digest_after, _lanes(gradient)])
    axes = collectives.varying_axes(lanes)
    # Devices of the tensor axis hold shards or equal copies of an activation. In both cases the sum
    # over the devices is a digest of the activation.
    digests = collectives.vary(digests, tuple(axes))
    if extra := tuple(collectives.varying_axes(digests) - axes):
        digests = collectives.all_reduce(digests, extra)
    return gradient, collectives.zeros_like(before), digests.astype(lanes.dtype)


_observe.defvjp(_forward, _backward)


def _lanes(x: Array) -> Array:
    """Return a digest of a local array [n, ...]: float32 [_LANES], integers below 256."""
    low = checksum(x)
    high = checksum(x[::-1])
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    words = jnp.concatenate([(low >> shifts) & 0xFF, (high >> shifts) & 0xFF])
    return words.astype(jnp.float32)
