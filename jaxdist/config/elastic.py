"""A run on fewer devices than its mesh names: the mesh, microbatches and evaluation that fit them.

Settings to settings, and nothing else. What a step computes stays the same: the global batch, its
rows and their order. What a device holds of a microbatch never grows, because the rows that came to
it are cut into more microbatches; its share of the state may, and then the reason says so.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxdist.config.parser import headed
from jaxdist.core.mesh import MeshSpec, shrink, shrunk_sizes
from jaxdist.core.types import ConfigError, Model

if TYPE_CHECKING:
    from jaxdist.config.run_config import RunConfig


def fit_devices(config: RunConfig, num_devices: int, model: Model | None = None) -> RunConfig:
    """The settings with which a run goes on with the devices that are there.

    Returned unchanged where `mesh.elastic` is off or no device is missing. Else `mesh.shape` and
    `mesh.reason` are those of the smaller mesh, which may take fewer devices than there are.

    Args:
        config: the run as asked for.
        num_devices: devices of the whole job.
        model: the built model, if it is.

    Raises:
        ConfigError: the mesh asked for is illegal, or none of so few devices is legal.
    """
    if not config.mesh.elastic:
        return config
    asked = MeshSpec.parse(config.mesh.shape)
    if num_devices >= asked.num_devices:
        return config
    config.check_mesh(asked, model)
    spec = shrink(asked, num_devices, lambda spec: _is_legal(config, asked, spec, model))
    if spec is None:
        least = min(legal_sizes(config, model))
        raise ConfigError(
            headed(
                "mesh",
                [
                    f"mesh {asked} is elastic and {num_devices} of its {asked.num_devices} devices "
                    f"are there: pp={asked.pipeline} × tp={asked.tensor} do not shrink, and with "
                    f"this model and batch {least} devices are the fewest. Wait for {least}, or "
                    "ask for smaller pp and tp."
                ],
            )
        )
    return _adapted(config, asked, spec, num_devices)


def legal_sizes(config: RunConfig, model: Model | None = None) -> list[int]:
    """Device counts with which an elastic run leaves no device idle; the mesh asked for is last."""
    asked = MeshSpec.parse(config.mesh.shape)
    fewer = shrunk_sizes(asked, lambda spec: _is_legal(config, asked, spec, model))
    return [*fewer, asked.num_devices]


def _is_legal(config: RunConfig, asked: MeshSpec, spec: MeshSpec, model: Model | None) -> bool:
    rows = (config.train.global_batch_size, _eval_rows(config))
    if any(count % spec.num_replicas for count in rows):
        return False
    return not _with_batches(config, asked, spec).mesh_problems(spec, model)


def _adapted(config: RunConfig, asked: MeshSpec, spec: MeshSpec, num_devices: int) -> RunConfig:
    adapted = _with_batches(config, asked, spec)
    mesh = dataclasses.replace(
        config.mesh, shape=str(spec), reason=_reason(config, adapted, asked, spec, num_devices)
    )
    return dataclasses.replace(adapted, mesh=mesh)


def _with_batches(config: RunConfig, asked: MeshSpec, spec: MeshSpec) -> RunConfig:
    """The batches of training and evaluation, cut so that no device takes more rows at once."""
    batch = config.train.global_batch_size
    microbatch = batch // asked.num_replicas // _num_microbatches(config, asked)
    count = _count(batch // spec.num_replicas, microbatch)
    train, pipeline = config.train, config.pipeline
    if spec.pipeline > 1:
        pipeline = dataclasses.replace(pipeline, num_microbatches=count)
    else:
        train = dataclasses.replace(train, num_microbatches=count)
    # Smaller evaluation batches, and as many more: the same rows are evaluated.
    rows = _eval_rows(config)
    times = _count(rows // spec.num_replicas, -(-rows // asked.num_replicas))
    evaluation = dataclasses.replace(
        config.eval,
        global_batch_size=rows // times,
        max_batches=config.eval.max_batches * times,
        final_max_batches=config.eval.final_max_batches * times,
    )
    return dataclasses.replace(config, train=train, pipeline=pipeline, eval=evaluation)


def _num_microbatches(config: RunConfig, spec: MeshSpec) -> int:
    train = config.train
    if spec.pipeline == 1:
        return train.num_microbatches
    rows = train.global_batch_size // spec.num_replicas
    return config.pipeline.count_microbatches(spec.pipeline, rows, train.num_microbatches)


def _count(rows: int, most: int) -> int:
    """The fewest equal parts of `rows` rows of which none has more than `most`."""
    return next(n for n in range(-(-rows // max(1, most)), rows + 1) if rows % n == 0)


def _eval_rows(config: RunConfig) -> int:
    return config.eval.global_batch_size or config.train.global_batch_size


def _reason(
    config: RunConfig, adapted: RunConfig, asked: MeshSpec, spec: MeshSpec, num_devices: int
) -> str:
    batch = config.train.global_batch_size
    before, now = _num_microbatches(config, asked), _num_microbatches(adapted, spec)
    text = (
        f"elastic: {num_devices} of the {asked.num_devices} devices of {asked} are there; "
        f"{now} microbatches of {batch // spec.num_replicas // now} rows per replica instead of "
        f"{before} of {batch // asked.num_replicas // before}; global batch {batch} and its rows "
        "stay"
    )
    idle = num_devices - spec.num_devices
    if idle:
        text += f"; {idle} idle, with which no mesh is legal"
    if config.mesh.zero:
        shares = asked.num_replicas, spec.num_replicas
    else:
        shares = asked.fsdp, spec.fsdp
    if shares[1] < shares[0]:
        text += f"; sharded state over {shares[1]} devices instead of {shares[0]}: more on each"
    return text
