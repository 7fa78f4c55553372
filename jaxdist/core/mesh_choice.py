"""Check meshes against a model and a batch, and choose the default mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from jaxdist.core.attention.context_parallel import plan_exchange
from jaxdist.core.axis import Workload, allowed_sizes
from jaxdist.core.mesh import MeshSpec, factorisations, nearest
from jaxdist.core.parallel import axes
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.data import DATA
from jaxdist.core.parallel.fsdp import FSDP
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.runtime.formatting.numbers import in_bytes, percent
from jaxdist.settings import ConfigError


def mesh_problems(spec: MeshSpec, workload: Workload) -> list[str]:
    """Return error messages if the sizes of model or batch violate the rules of a mesh."""
    return [
        *_dim_problems(spec, workload),
        *(p for axis in spec.used for p in axis.problems(spec[axis], workload)),
        *_exchange_problems(spec, workload),
        *_batch_problems(spec, workload),
    ]


def _dim_problems(spec: MeshSpec, workload: Workload) -> Iterable[str]:
    rules, by_name = {**axes.rules(), **workload.rules}, axes.by_name()
    for dim, size in workload.dims.items():
        name = rules.get(dim)
        if name is None:
            continue
        if name not in by_name:
            yield (
                f"Model.rules splits dim {dim!r} over {name!r}, which is no mesh axis. "
                f"Use {', '.join(axes.names())}, or None to leave it unsplit."
            )
            continue
        axis = by_name[name]
        ways, label, fix = spec[axis], f"{axis.short}={spec[axis]}", f"{axis.short}="
        joining = axes.joining_fsdp(workload.zero)
        shared = [by_name[other] for other in joining if spec[other] > 1]
        if axis.weights == "gathered" and shared:
            for other in shared:
                ways *= spec[other]
            used = [other for other in (axis, *shared) if spec[other] > 1]
            parts = " × ".join(f"{other.short}={spec[other]}" for other in used)
            stage = f" (zero={workload.zero})" if workload.zero else ""
            label = f"{parts}{stage}"
            fix = "a product of " if len(used) > 1 else f"{used[0].short}="
        unit = workload.units.get(dim, 1)
        if axis.divides and size % (ways * unit):
            of = f" into multiples of {unit}, which are quantized together" if unit > 1 else ""
            sizes = f"{fix}{allowed_sizes(size // unit)}" if size >= unit else f"at least {unit}"
            yield (
                f"mesh {label} does not divide {workload.named(dim)}{of}: {axis.divides}. "
                f"Use {sizes}."
            )


def _exchange_problems(spec: MeshSpec, workload: Workload) -> list[str]:
    """Return error messages if heads or stages do not allow the exchange of keys and values."""
    heads, kv_heads = workload.dims.get("heads", 0), workload.dims.get("kv_heads", 0)
    tensor = spec[TENSOR]
    if spec[CONTEXT] == 1 or heads % tensor or kv_heads % tensor or not kv_heads:
        return []
    try:
        plan_exchange(
            workload.context_attention,
            size=spec[CONTEXT],
            heads=heads // tensor,
            kv_heads=kv_heads // tensor,
            per_node=spec[CONTEXT],
            has_stages=spec[PIPELINE] > 1,
        )
    except ConfigError as error:
        return error.problems
    return []


def _batch_problems(spec: MeshSpec, workload: Workload) -> Iterable[str]:
    batch = workload.global_batch_size
    rows = spec.num_replicas * workload.num_microbatches * workload.rows_per_example
    if batch is None or batch % rows == 0:
        return
    down, up = batch // rows * rows, -(-batch // rows) * rows
    splits_rows = (axis for axis in axes.AXES if axis.splits_rows)
    replicas = [axis for axis in splits_rows if axis.weights != "split" or spec[axis] > 1]
    sizes = " × ".join(f"{axis.short}={spec[axis]}" for axis in replicas)
    size, unit = workload.rows_per_example, "rows"
    if size > 1:
        sizes, unit = f"{sizes} × rows_per_example={size} of the objective", "complete examples"
    fix = f"{f'{down} or ' if down else ''}{up}"
    most, rest = divmod(batch, rows // workload.num_microbatches)
    counts = [c for c in range(spec[PIPELINE], most + 1, spec[PIPELINE]) if most % c == 0]
    if counts and not rest:
        count = min(counts, key=lambda c: abs(c - workload.num_microbatches))
        fix = f"--train.num-microbatches {count}, a batch of {fix}"
    yield (
        f"train.global_batch_size={batch} is not a multiple of {rows} ({sizes} × "
        f"microbatches={workload.num_microbatches}): every device takes the same number of {unit}. "
        f"Use {fix}, or a smaller "
        f"{' × '.join(axis.short for axis in replicas)}."
    )


def legal_meshes(
    requested: MeshSpec,
    num_devices: int,
    problems_of: Callable[[MeshSpec], list[str]],
) -> Sequence[MeshSpec]:
    """Return up to three meshes of `num_devices` without problems, nearest to `requested`.

    They use the axes that are not `proposed` only if `requested` does.
    """
    without = [axis for axis in axes.AXES if not axis.proposed and requested[axis] == 1]
    candidates = factorisations(num_devices, without=without)
    legal = [spec for spec in candidates if not problems_of(spec)]
    return nearest(requested, legal)


def default_mesh(
    num_devices: int,
    state_bytes: int,
    memory_bytes: int | None,
    needs: Needs | None = None,
) -> tuple[MeshSpec, str]:
    """Return the mesh for settings that name none, and the reason.

    `state_bytes` is the size of parameters, gradients and moments. `memory_bytes` per device is
    None if unknown. Both matter only without `needs`, the estimate of a mesh.
    """
    if num_devices == 1:
        return MeshSpec(), "one device: nothing to split"
    replicas, shards = MeshSpec.over(DATA, num_devices), MeshSpec.over(FSDP, num_devices)
    if needs is not None:
        needed, limit = needs(replicas)
        takes = f"{in_bytes(needed)} of {in_bytes(limit)}"
        if needed <= limit:
            return replicas, f"a replica takes {takes}, so data parallelism alone moves least"
        return shards, (
            f"a replica would take {takes}; sharded over all devices it takes "
            f"{in_bytes(needs(shards)[0])}"
        )
    state = in_bytes(state_bytes)
    if memory_bytes is None:
        return replicas, (
            f"data parallelism alone moves least; the memory of a device is unknown, so it may not "
            f"hold the state ({state})"
        )
    if state_bytes <= memory_bytes * _STATE_SHARE:
        return replicas, (
            f"the state ({state}) fits one device, so data parallelism alone moves least"
        )
    return shards, (
        f"the state ({state}) does not fit one device ({in_bytes(memory_bytes)}, of which "
        f"{percent(_STATE_SHARE, 0)} may hold state), so it is sharded over all"
    )


Needs: TypeAlias = Callable[[MeshSpec], tuple[float, float]]
"""Mesh -> (bytes needed per device, bytes that a run may use per device)."""


# The rest is for activations, the loss head and communication buffers.
_STATE_SHARE = 0.5
