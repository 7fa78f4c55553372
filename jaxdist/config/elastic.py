"""A run on fewer devices than in its mesh: adapted mesh, microbatches and evaluation batches.

A step's result changes by rounding only: the global batch, its rows and their order stay. The batch
is split into more microbatches, so a device never processes more rows at a time. A device may
store a larger part of the state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxdist.core.mesh import MeshSpec, in_devices, shrink, shrunk_sizes
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.types import Model
from jaxdist.settings import ConfigError

RunConfig: TypeAlias = Any
"""`config.run_config.RunConfig`, which would be a circular import here."""


def fit_devices(config: RunConfig, num_devices: int, model: Model | None = None) -> RunConfig:
    """Return settings with which a run continues on the available devices.

    They are unchanged if `mesh.elastic` is off, `mesh.shape` is auto or no device is missing.
    Otherwise `mesh.shape` is the smaller mesh, which may leave devices idle; see `shrink_reason`.
    """
    full = config.mesh.spec
    if not config.mesh.elastic or full is None or num_devices >= full.num_devices:
        return config
    config.check_mesh(full, model)
    spec = shrink(full, num_devices, lambda spec: _is_legal(config, full, spec, model))
    if spec is None:
        least = min(legal_sizes(config, model))
        fixed = [axis for axis in full.used if not axis.shrinks]
        kept = " × ".join(f"{axis.short}={full[axis]}" for axis in fixed)
        smaller = f", or use smaller {' and '.join(axis.short for axis in fixed)}"
        raise ConfigError(
            f"mesh {full} is elastic and {num_devices} of its {full.num_devices} devices are "
            f"available. {f'{kept} cannot shrink. ' if fixed else ''}This model and batch need at "
            f"least {in_devices(least)}. Wait for {least}{smaller if fixed else ''}.",
            heading="mesh",
        )
    adapted = _with_batches(config, full, spec, model)
    mesh = dataclasses.replace(config.mesh, shape=str(spec))
    return dataclasses.replace(adapted, mesh=mesh)


def fit_device_list(
    config: RunConfig, devices: Sequence[Any], model: Model
) -> tuple[RunConfig, Sequence[Any]]:
    """Return the settings and the devices with which a run continues; see `fit_devices`."""
    fitted = fit_devices(config, len(devices), model)
    if fitted is config:
        return config, devices
    assert fitted.mesh.spec is not None
    used = fitted.mesh.spec.num_devices
    num_processes = len({device.process_index for device in devices})
    if used < len(devices) and num_processes > 1:  # a process without a device cannot participate
        each = len(devices) // num_processes
        legal = legal_sizes(config, model)
        count = max((n for n in range(1, num_processes) if n * each in legal), default=1)
        raise ConfigError(
            f"mesh {config.mesh.shape} is elastic and legal with {used} of the {len(devices)} "
            f"devices of {num_processes} processes, but a job of several processes needs all its "
            f"devices. Start {count} processes, or let jaxdist.launch choose: --nproc-per-node "
            "MIN:MAX."
        )
    return fitted, devices[:used]


def legal_sizes(config: RunConfig, model: Model | None = None) -> list[int]:
    """Return the device counts at which an elastic run leaves no device idle, the full one last."""
    full = config.mesh.spec
    if full is None:
        raise ConfigError("mesh.shape=auto has no sizes to shrink from. Give each axis a size.")
    fewer = shrunk_sizes(full, lambda spec: _is_legal(config, full, spec, model))
    return [*fewer, full.num_devices]


def _is_legal(config: RunConfig, full: MeshSpec, spec: MeshSpec, model: Model | None) -> bool:
    rows = (config.train.global_batch_size, _eval_rows(config))
    if any(count % (spec.num_replicas * config.rows_per_example(model)) for count in rows):
        return False
    return not _with_batches(config, full, spec, model).mesh_problems(spec, model)


def _with_batches(
    config: RunConfig, full: MeshSpec, spec: MeshSpec, model: Model | None
) -> RunConfig:
    """Return settings with more microbatches and evaluation batches, no larger on a device."""
    batch, size = config.train.global_batch_size, config.rows_per_example(model)
    microbatch = batch // full.num_replicas // _num_microbatches(config, full, size)
    count = _count(batch // spec.num_replicas // size, microbatch // size)
    train = dataclasses.replace(config.train, num_microbatches=count)
    # Use smaller but more evaluation batches, so that the same rows are evaluated.
    rows = _eval_rows(config)
    times = _count(rows // spec.num_replicas // size, -(-rows // (full.num_replicas * size)))
    evaluation = dataclasses.replace(
        config.eval,
        global_batch_size=rows // times,
        max_batches=config.eval.max_batches * times,
        final_max_batches=config.eval.final_max_batches * times,
    )
    return dataclasses.replace(config, train=train, eval=evaluation)


def _num_microbatches(config: RunConfig, spec: MeshSpec, size: int) -> int:
    train = config.train
    if spec[PIPELINE] == 1:
        return train.accumulation
    rows = train.global_batch_size // spec.num_replicas
    choose = config.pipeline.choose_microbatches
    return train.num_microbatches or choose(spec[PIPELINE], rows, size)


def _count(examples: int, most: int) -> int:
    """Return the smallest number of equal parts of `examples` whose size is at most `most`."""
    first = -(-examples // max(1, most))
    return next(n for n in range(first, examples + 1) if examples % n == 0)


def _eval_rows(config: RunConfig) -> int:
    return config.eval.global_batch_size or config.train.global_batch_size


def shrink_reason(
    config: RunConfig, adapted: RunConfig, num_devices: int, model: Model | None = None
) -> str:
    """Return one line about the smaller mesh that `fit_devices` chose for `num_devices`."""
    full, spec = config.mesh.spec, adapted.mesh.spec
    size = config.rows_per_example(model)
    batch = config.train.global_batch_size
    before, now = _num_microbatches(config, full, size), _num_microbatches(adapted, spec, size)
    text = (
        f"elastic: {num_devices} of the {full.num_devices} devices of {full} are available; "
        f"{now} microbatches of {batch // spec.num_replicas // now} rows per replica instead of "
        f"{before} of {batch // full.num_replicas // before}; global batch {batch} and its rows "
        "stay"
    )
    idle = num_devices - spec.num_devices
    if idle:
        text += f"; {idle} idle, because no larger mesh is legal"
    return text
