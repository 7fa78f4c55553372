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
from jaxdist.core.state import TrainState
from jaxdist.core.step import make_context, make_value_and_grad
from jaxdist.core.types import Array, Batch
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


def make_diagnostic_step(parts: Parts) -> Callable[[TrainState, Batch], Digests]:
    """Return (state, batch [global_batch_size, ...]) -> digests of tensors; no state is donated."""
    model, layout, plan = parts.model, parts.layout, parts.plan
    gradients = make_value_and_grad(model, layout, plan, make_context(model, layout, plan))

    @jax.jit
    def step(state: TrainState, batch: Batch) -> dict[str, Any]:
        key = jax.random.fold_in(state.key, state.step)
        scale = state.loss_scale.get("scale", jnp.ones((), jnp.float32))
        sums, grads, norm = gradients(state.params, batch, key, scale)
        return {
            **{item: _digests(tree) for item, tree in state.groups.items()},
            "opt_state": _digests(state.opt_state),
            "batch": {name: checksum(values) for name, values in batch.items()},
            "sums": {**sums, "grad_norm": norm},
            "gradient": _digests(grads),
        }

    positions = plan.layers.positions

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
    sums = {name: np.asarray(value).tobytes() for name, value in digests["sums"].items()}
    norm = sums.pop("grad_norm")
    for part in (*(group.item for group in GROUPS.values()), "opt_state", "batch"):
        ordered |= _by_layer(digests.get(part, {}), part)
    return ordered | sums | _by_layer(digests["gradient"], "gradient") | {"grad_norm": norm}


def _by_layer(digests: dict[str, Any], part: str) -> Digests:
    named: Digests = {}
    for name, digest in digests.items():
        if np.ndim(digest):
            named |= {f"{part}/{name}, layer {i}": int(one) for i, one in enumerate(digest)}
        else:
            named[f"{part}/{name}"] = int(digest)
    return named
