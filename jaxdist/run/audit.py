"""The audits of a run's step: the traced program, and a comparison with one device.

`audit_parts` and `check_mesh` follow the collectives of the traced step (`jaxdist.plan.audit`). The
deep audit (`check_model`, `differences`) runs one step of a small copy of the run in float32, on
the mesh and on one device, and compares the loss and every gradient. It detects a wrong
formula around a correct collective, which the trace does not show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step import make_prepare, make_value_and_grad
from jaxdist.core.types import Model, Objective, rows_per_example
from jaxdist.data.packing import Fields, text_fields
from jaxdist.plan.audit import Audit, audit_program
from jaxdist.run.setup import Parts, assemble
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

TOLERANCE = 1e-4
"""Allowed difference of a value, relative to its peak. Another summation order causes up to 1e-5,
a missing or doubled sum 1e-1."""

_FLOOR = 1e-2
"""Minimum peak of a gradient to divide by, relative to the largest: tiny ones are only rounding."""

MAX_OPERATIONS = 1e12
"""Maximum FLOPs (6 per parameter and row element) of a step that is compared when a run starts: at
most a minute on two CPU cores."""

_ROWS_EACH, _SEQ, _MAX_LINES = 2, 32, 8

MakeModel: TypeAlias = Callable[[int], Model]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshDifference:
    """A value of the step (gradient, sum, gradient norm) that depends on the mesh.

    `relative` is the largest difference, relative to the peak on one device; inf if not finite.
    Each axis in `axes` causes a difference on its own; () if none does, or none is legal alone.
    """

    value: str
    relative: float
    axes: tuple[str, ...]

    def __str__(self) -> str:
        named = f"over {' and '.join(self.axes)}" if self.axes else "for several axes together"
        return f"{self.value} differs from one device's by {self.relative:.1e} of its peak, {named}"


def audit_parts(parts: Parts, fields: Fields | None = None) -> Audit:
    """Return the audit of the traced train step for rows of `fields`; None = of the settings."""
    reduce_dtype = parts.plan.reduce_dtype
    # The same arguments as in training, so that jax caches the trace.
    traced = parts.step.train.trace(parts.step_state(), parts.abstract_batch(fields), math.inf)
    try:
        return audit_program(
            traced.jaxpr.jaxpr,
            parts.model,
            parts.layout,
            sum_dtypes=(parts.plan.compute_dtype, reduce_dtype),
            gradient_dtype=reduce_dtype,
        )
    except Exception as error:
        log.debug("the mesh audit failed", exc_info=True)
        raise ConfigError(
            f"the mesh audit failed on the step of model {parts.model.name!r} on mesh {parts.spec} "
            f"({type(error).__name__}: {error}), so missing sums would not be detected. This is a "
            "bug of the audit: please report it. --override=audit trains without the audit."
        ) from error


def check_mesh(parts: Parts, fields: Fields | None = None) -> Audit:
    """Return the audit of a run's step (`audit_parts`); raise `ConfigError` for violations."""
    audit = audit_parts(parts, fields)
    if not audit.is_clean:
        raise ConfigError(
            [
                *map(str, audit.violations),
                "the mesh audit refuses this step. Fix the model, or use --override=audit to train "
                "anyway.",
            ]
        )
    return audit


def check_model(parts: Parts, fields: Fields, make_model: MakeModel | None) -> str:
    """Compare one step of a small copy of the run on its mesh with one device.

    Return the mesh if both agree; "" (and log why) if nothing was compared. Raise `ConfigError`
    if they differ. `make_model`, seq_len -> model, replaces the model of the settings.
    """
    config, data = _on(parts.config, parts.spec), parts.config.data
    text = text_fields(parts.config.train.seq_len, packed=data.packs_documents)
    is_text = fields == text and not parts.model.row  # such rows can be shortened
    objective = parts.model.objective
    small = shrunken(config, parts.spec, rows_per_example(objective))
    kinds = text_fields(small.train.seq_len, packed=True) if is_text else fields
    elements = small.train.global_batch_size * max(math.prod(shape) for shape, _ in kinds.values())
    obstacle = "the job has several processes" if jax.process_count() > 1 else ""
    if 6 * parts.num_params * elements > MAX_OPERATIONS:
        obstacle = f"{parts.num_params} parameters and {elements} elements of rows are too many"
    start, differing = time.perf_counter(), []
    try:
        if not obstacle:
            others = None if is_text else fields
            differing = differences(config, parts.devices, make_model, others, objective)
    except Exception as error:  # the model may not accept random or short rows
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle:
        log.warning(
            "deep audit not run (%s): a mean or max instead of a sum would go undetected. "
            "Run python -m jaxdist.audit --deep with the settings of this run.",
            obstacle,
        )
        return ""
    if differing:
        raise ConfigError(
            [
                *map(str, differing[:_MAX_LINES]),
                f"the deep audit rejects model {parts.model.name!r} on mesh {parts.spec}: "
                f"{len(differing)} values of one step differ from one device's. Look for a mean or "
                "max instead of a sum (Context.leave, Context.sum), and for loss terms that are a "
                "mean over the rows of one device. --override=audit trains without the audit.",
            ]
        )
    seconds = time.perf_counter() - start
    line = "deep audit: one step of a small copy on %s agrees with that on one device (%.1f s)"
    log.info(line, parts.spec, seconds)
    return str(parts.spec)


def differences(
    config: RunConfig,
    devices: Sequence[Any],
    make_model: MakeModel | None = None,
    fields: Fields | None = None,
    objective: Objective | None = None,
) -> list[MeshDifference]:
    """Compare one step of a small copy on the mesh with one device; return values that differ.

    The mesh of `config` sets the size of every axis and matches the number of `devices`.
    `make_model` (seq_len -> model) and `objective` override the run's own. `fields` describes
    rows that cannot be shortened; None = the fields of the model, or short text.
    """
    spec = config.mesh.spec
    assert spec is not None
    small = shrunken(config, spec, rows_per_example(objective))
    if fields is not None:
        train = dataclasses.replace(small.train, seq_len=config.train.seq_len)
        small = dataclasses.replace(small, train=train)

    def parts_on(spec: MeshSpec) -> Parts:
        model = make_model(small.train.seq_len) if make_model else None
        return assemble(
            _on(small, spec), devices[: spec.num_devices], model=model, objective=objective
        )

    expected = _step(parts_on(MeshSpec()), fields)
    differing = _unequal(_step(parts_on(spec), fields), expected)
    if not differing:
        return []
    alone: dict[str, Collection[str]] = {}
    for axis in spec.used:
        with contextlib.suppress(ConfigError):  # not every mesh is legal with one axis alone
            parts = parts_on(MeshSpec.over(axis, spec[axis]))
            alone[axis.name] = _wrong_on(parts, fields, expected)
    return [
        MeshDifference(
            value=name,
            relative=relative,
            axes=tuple(axis for axis, wrong in alone.items() if name in wrong),
        )
        for name, relative in differing.items()
    ]


def _wrong_on(
    parts: Parts, fields: Fields | None, expected: dict[str, np.ndarray]
) -> Collection[str]:
    """Return the names of values of one step, [...] each, that differ from the expected ones.

    If the step cannot be traced on this mesh, return all names: on a single axis, jax's types
    reject errors that a second axis hides, e.g. a collective over the wrong axis in a loop.
    """
    try:
        return _unequal(_step(parts, fields), expected)
    except (TypeError, ValueError):
        return expected


def shrunken(config: RunConfig, spec: MeshSpec, rows_per_example: int = 1) -> RunConfig:
    """Return settings with few rows and a small float32 model (if built-in), legal on the mesh."""
    total = spec[PIPELINE] * max(1, config.pipeline.num_virtual_stages)
    layers = 2 * total - (config.model.dims.get("layers", 0) % total > 0)
    multiple = math.prod(spec.sizes.values())
    seq_len = min(config.train.seq_len, _SEQ * spec[TENSOR])
    rows = (
        _ROWS_EACH
        * rows_per_example
        * spec.num_replicas
        * max(config.train.num_microbatches, 4 * spec[PIPELINE])
    )
    return dataclasses.replace(
        config,
        model=config.model.shrunken(num_layers=layers, multiple=multiple),
        lora=dataclasses.replace(config.lora, base_format="float32"),  # too small for blocks
        pipeline=dataclasses.replace(config.pipeline, layers_per_stage="auto"),
        train=dataclasses.replace(config.train, global_batch_size=rows, seq_len=seq_len),
        precision=dataclasses.replace(
            config.precision, compute_dtype="float32", reduce_dtype="float32"
        ),
    )


def _on(config: RunConfig, spec: MeshSpec) -> RunConfig:
    return dataclasses.replace(
        config, mesh=dataclasses.replace(config.mesh, shape=str(spec), elastic=False)
    )


def _step(parts: Parts, fields: Fields | None) -> dict[str, np.ndarray]:
    """Return sums, gradients and gradient norm of one step by name, each an unsharded [...]."""
    inputs = parts.model, parts.layout, parts.plan, parts.step.context
    gradients, prepare = make_value_and_grad(*inputs), make_prepare(*inputs)
    function = lambda params, batch, *rest: gradients(params, prepare(params, batch), *rest)
    shardings = jax.tree.map(lambda x: x.sharding, parts.abstract_state().params)
    params = jax.jit(parts.model.init)(jax.random.key(parts.config.seed))
    params = parts.in_execution_order(jax.device_put(params, shardings))
    batch = place_batch(_batch(parts, fields), parts.step.batch_sharding)
    with jax.default_matmul_precision("highest"):  # GPUs round float32 products to 10 bits
        sums, grads, norm = jax.jit(function)(params, batch, jax.random.key(1), jnp.float32(1))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(parts.in_model_order(grads)))
    values = {
        f"the gradient of {keystr(path, simple=True, separator='/')}": value
        for path, value in leaves
    }
    return (
        values
        | {f"the sum {name!r}": np.asarray(s) for name, s in sums.items()}
        | {"the gradient norm": np.asarray(norm)}
    )


def _batch(parts: Parts, fields: Fields | None) -> dict[str, np.ndarray]:
    """Return rows [global_batch_size, ...] of `fields`, mostly random; about 1 float in 5 is 0."""
    draw = np.random.default_rng(0)
    most = {"labels": 2, "segments": 1}
    rows = {}
    for name, kind in parts.abstract_batch(fields).items():
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


def _unequal(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference by name of the values that differ beyond the tolerance."""
    wrong = {}
    peaks = {name: float(np.max(np.abs(value))) for name, value in expected.items()}
    largest = max((peak for name, peak in peaks.items() if "gradient of" in name), default=0.0)
    for name, value in expected.items():
        floor = _FLOOR * largest if "gradient of" in name else 0.0
        peak = max(peaks[name], floor) or 1.0
        relative = float(np.max(np.abs(actual[name] - value)) / peak)
        if not relative <= TOLERANCE:
            wrong[name] = relative if math.isfinite(relative) else math.inf
    return wrong
