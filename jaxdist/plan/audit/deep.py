"""The deep audit: one step on a mesh against one device, loss and every gradient, and which axis.

It finds what the traced step alone does not show: a wrong formula behind the right collective. The
run's model is made small; its kind, mesh, schedule and layout stay. Everything computes in float32,
the widest that the step's own casts leave.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step import make_value_and_grad
from jaxdist.run.setup import Parts, assemble

TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to its peak: sums in another order reach 1e-5, a sum
that is missing or taken twice 1e-1."""

_ROWS_EACH, _SEQ = 2, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshDifference:
    """A value of the step that depends on the mesh.

    Attributes:
        value: a gradient by its parameter, or a sum.
        relative: largest difference, relative to the peak on one device; inf where not finite.
        axes: mesh axes that alone make it differ; () where only several together do.
    """

    value: str
    relative: float
    axes: tuple[str, ...]

    def __str__(self) -> str:
        named = f"over {' and '.join(self.axes)}" if self.axes else "where the axes meet"
        return f"{self.value} differs from one device's by {self.relative:.1e} of its peak, {named}"


def differences(config: RunConfig, devices: Sequence[Any]) -> list[MeshDifference]:
    """What of one step differs between the run's mesh and one device, with the axes at fault.

    Args:
        config: the run; its mesh has a size for every axis.
        devices: as many as the mesh takes.
    """
    spec = config.mesh.spec
    assert spec is not None
    small = shrunken(config, spec)
    expected = _step(_on(small, MeshSpec()), devices)
    found = _unequal(_step(_on(small, spec), devices), expected)
    if not found:
        return []
    alone = {
        axis.name: _wrong_on(_on(small, MeshSpec.over(axis, spec[axis])), devices, expected)
        for axis in spec.used
    }
    return [
        MeshDifference(
            value=name,
            relative=relative,
            axes=tuple(axis for axis, wrong in alone.items() if name in wrong),
        )
        for name, relative in found.items()
    ]


def _wrong_on(
    config: RunConfig, devices: Sequence[Any], expected: dict[str, np.ndarray]
) -> Collection[str]:
    """Names of the values, [...] each, that the run's mesh makes differ from those expected.

    All of them where the step cannot be traced there.
    On one axis alone jax's types find what they cannot see beside a second one: a collective over
    the wrong axis, say, leaves a type there that a loop or branch does not give back.
    """
    try:
        return _unequal(_step(config, devices), expected)
    except (TypeError, ValueError):
        return expected


def shrunken(config: RunConfig, spec: MeshSpec) -> RunConfig:
    """The same run with a small model and few rows, in float32, legal on the mesh."""
    layers = 2 * spec[PIPELINE] * config.pipeline.num_virtual_stages
    multiple = math.prod(spec.sizes.values())
    num_microbatches = config.train.num_microbatches
    seq_len = min(config.train.seq_len, _SEQ * spec[TENSOR])
    rows = _ROWS_EACH * spec.num_replicas * max(num_microbatches, 4 * spec[PIPELINE])
    return dataclasses.replace(
        config,
        model=config.model.shrunken(num_layers=layers, multiple=multiple),
        train=dataclasses.replace(config.train, global_batch_size=rows, seq_len=seq_len),
        precision=dataclasses.replace(
            config.precision, compute_dtype="float32", reduce_dtype="float32"
        ),
    )


def _on(config: RunConfig, spec: MeshSpec) -> RunConfig:
    return dataclasses.replace(
        config, mesh=dataclasses.replace(config.mesh, shape=str(spec), elastic=False)
    )


def _step(config: RunConfig, devices: Sequence[Any]) -> dict[str, np.ndarray]:
    """Sums and gradients of one step by name, whole: [...] each, as the step makes them."""
    spec = config.mesh.spec
    assert spec is not None
    parts = assemble(config, devices[: spec.num_devices])
    function = make_value_and_grad(
        parts.model,
        parts.layout,
        parts.config.train,
        parts.step.context,
        precision=parts.config.precision,
        stages=parts.config.pipeline,
    )
    specs = parts.layout.shardings(parts.layout.param_specs(parts.model.axes))
    params = jax.device_put(jax.jit(parts.model.init)(jax.random.key(config.seed)), specs)
    batch = place_batch(_batch(parts), parts.step.batch_sharding)
    sums, grads, norm = jax.jit(function)(params, batch, jax.random.key(1), jnp.float32(1))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(grads))
    values = {
        f"the gradient of {keystr(path, simple=True, separator='/')}": value
        for path, value in leaves
    }
    return (
        values
        | {f"the sum {name!r}": np.asarray(s) for name, s in sums.items()}
        | {"the gradient norm": np.asarray(norm)}
    )


def _batch(parts: Parts) -> dict[str, np.ndarray]:
    """Random rows [global_batch_size, ...] of the run's fields and dtypes.

    Weights differ from row to row, and vanish for some.
    """
    draw = np.random.default_rng(0)
    most = {"labels": 2, "segments": 1}
    rows = {}
    for name, kind in parts.abstract_batch().items():
        if np.issubdtype(kind.dtype, np.floating):
            values = draw.uniform(0, 1, kind.shape)
            rows[name] = np.where(values > 0.2, values, 0).astype(kind.dtype)
        elif name == "positions":
            rows[name] = np.broadcast_to(np.arange(kind.shape[1], dtype=kind.dtype), kind.shape)
        elif name == "segments":
            rows[name] = np.ones(kind.shape, kind.dtype)
        else:
            size = most.get(name, parts.model.vocab_size or 2)
            rows[name] = draw.integers(0, size, kind.shape).astype(kind.dtype)
    return rows


def _unequal(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Name -> relative difference, of the values that differ by more than the tolerance."""
    wrong = {}
    for name, value in expected.items():
        peak = np.max(np.abs(value)) or 1.0
        relative = float(np.max(np.abs(found[name] - value)) / peak)
        if not relative <= TOLERANCE:
            wrong[name] = relative if math.isfinite(relative) else math.inf
    return wrong
