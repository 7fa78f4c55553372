"""Collectives of one step: mesh axes, bytes and links.

The rules are those of the step (`core/parallel`); a test compares them with compiled programs.
Bytes are of complete arrays (before a reduce-scatter, after an all-gather).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxdist.core.axis import ActivationSizes, Kind, Traffic
from jaxdist.core.parallel import axes as mesh_axes
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.models.weights import Weight
from jaxdist.plan.estimate.job import WIDE, Job
from jaxdist.plan.estimate.model_trace import DecoderShape
from jaxdist.plan.estimate.products import orthogonalized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """Collectives of one kind and purpose, over the same axes.

    Attributes:
        bytes: size of the complete (gathered or reduced) arrays of one group, summed over a step.
        times: number of executions per step.
        wire_bytes: bytes that one device sends per step (ring algorithm).
        seconds: time per step at full link rates without other traffic, including latency.
    """

    kind: Kind
    axes: tuple[str, ...]
    purpose: str
    bytes: float
    times: int
    wire_bytes: float
    seconds: float
    crosses_nodes: bool


def flows_of(job: Job) -> list[Flow]:
    """Return a device's collectives per step, but a teacher's; of stages, those of the busiest."""
    moved = list(_weights(job))
    for weights, extra in _groups(job, sharded=False):  # vectors
        vectors = Traffic("all-reduce", "gradients", WIDE * job.total(weights, "param"), 1)
        moved.append(((*extra, *_summed(job, "replicated", "gathered")), vectors))
    for share in orthogonalized(job):
        matrices = Traffic("all-to-all", "matrices", float(WIDE * share.size), 2)
        moved.append((share.axes, matrices))
    moved += [*_activations(job), *_stages(job)]
    return [
        _flow(job, axes, traffic)
        for axes, traffic in moved
        if traffic.num_bytes and math.prod(job.spec[axis] for axis in axes) > 1
    ]


Moved = tuple[tuple[str, ...], Traffic]
"""Mesh axes of a group, and its collectives."""


def _weights(job: Job) -> Iterator[Moved]:
    """Yield the collectives of weights and of matrix gradients, over shards and replicas."""
    groups: dict[tuple[str, ...], list[Weight]] = {}
    for weight in job.weights:
        if job.is_gathered(weight):
            split = job.axes(weight, "gathered")
            over = tuple(a for a in job.axes(weight, "param") if a not in split)
            groups.setdefault(over, []).append(weight)
    for shard, weights in sorted(groups.items(), reverse=True):
        yield from _gathered(job, shard, weights)
    yield from _replicas(job)


def _gathered(job: Job, shard: tuple[str, ...], weights: list[Weight]) -> Iterator[Moved]:
    """Yield the collectives of weights gathered over the axes `shard`, and of their gradients."""
    once = job.stages is not None and job.config.pipeline.gather == "step"
    depth = max(1, job.layers_per_stage)
    passes = 1 if once else _passes(job) * job.num_microbatches
    scatters = depth * (1 if once else job.num_microbatches)
    layers = tuple(w for w in weights if w.is_stacked)
    outer = tuple(w for w in weights if not w.is_stacked)
    in_layer, outside = job.total(layers, "gathered") // depth, job.gathered_bytes(outer)
    layer_bytes = job.gathered_bytes(layers) / depth
    layers, outer = job.only_trained(layers), job.only_trained(outer)
    layer_grads, outer_grads = job.total(layers, "gathered") // depth, job.total(outer, "gathered")
    r = job.plan.reduce_dtype.itemsize
    # Pipeline stages gather weights unrounded. Vectors are not gathered.
    fp8 = 0 if job.stages is not None else job.num_fp8_layers
    yield shard, Traffic("all-gather", "weights", layer_bytes, (depth - fp8) * passes)
    yield shard, Traffic("all-gather", "weights", in_layer, fp8 * passes)
    yield shard, Traffic("all-gather", "weights", outside, 1)
    yield shard, Traffic("reduce-scatter", "gradients", r * layer_grads, scatters)
    times = 1 if job.stages else job.num_microbatches
    yield shard, Traffic("reduce-scatter", "gradients", r * outer_grads, times)


def _passes(job: Job) -> int:
    return 2 + job.has_first_pass


def _replicas(job: Job) -> Iterator[Moved]:
    """Yield reductions of matrix gradients over replicas, and gathers of ZeRO 1 and 2."""
    zero = job.config.mesh.zero
    shard = {axis for w in job.weights for axis in job.axes(w, "param")}
    replicas = tuple(axis for axis in _summed(job, "replicated") if axis not in shard or zero == 3)
    for weights, extra in _groups(job, sharded=True):
        local = WIDE * job.total(weights, "param")
        if zero in (0, 3):
            summed = (*extra, *(replicas if zero == 0 else ()))
            yield summed, Traffic("all-reduce", "gradients", local, 1)
            continue
        times = job.num_microbatches if zero == 2 and PIPELINE.name not in extra else 1
        yield replicas, Traffic("reduce-scatter", "gradients", local, times)
        yield replicas, Traffic("all-gather", "new parameters", local, 1)
        yield extra, Traffic("all-reduce", "gradients", WIDE * job.total(weights, "moment"), 1)


def _groups(job: Job, *, sharded: bool) -> Iterator[tuple[list[Weight], tuple[str, ...]]]:
    """Yield (weights, mesh axes that reduce their gradients besides those of fsdp and ZeRO)."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Weight]] = {}
    for weight in job.trained:
        is_matrix = len(weight.dims) - weight.is_stacked > 1
        if (is_matrix and job.gathered_dim(weight) >= 0) == sharded:
            groups.setdefault((weight.is_stacked, job.axes(weight, "param")), []).append(weight)
    for (_, splits), weights in sorted(groups.items(), reverse=True):
        yield weights, tuple(axis for axis in _summed(job, "split") if axis not in splits)


def _summed(job: Job, *kinds: str) -> tuple[str, ...]:
    used = job.layout.summed_axes
    return tuple(a.name for a in mesh_axes.AXES if a.name in used and a.weights in kinds)


def _activations(job: Job) -> Iterator[Moved]:
    """Yield the communication of activations, except between pipeline stages."""
    if job.decoder is None:
        yield from _traced_sums(job)
        return
    sizes = ActivationSizes(
        stream_bytes=float(job.compute_bytes * job.tokens * job.stream_width),
        num_tokens=job.tokens,
        num_layers=job.layers_per_stage * job.decoder.layers,
        num_microbatches=job.num_microbatches,
        num_forwards=_passes(job) - 1,
        recomputes=job.remat != "none",
        reduces_again=not job.keeps("attention_out"),
        sequence_parallel=job.sequence_parallel,
        experts_per_token=job.decoder.experts_per_token,
        sparse_layers=job.layers_per_stage * job.decoder.sparse_layers,
        **_attention(job, job.decoder),
    )
    for axis in job.spec.used:
        yield from (((axis.name,), traffic) for traffic in axis.traffic(sizes))


def _attention(job: Job, shape: DecoderShape) -> dict[str, Any]:
    """Return keyword arguments of `ActivationSizes` for context-parallel attention; {} without."""
    plan, tensor = job.plan.exchange, job.spec[TENSOR]
    if plan is None:
        return {}
    each = float(job.compute_bytes * job.tokens)
    # If there are fewer key/value heads than devices in the exchange, they are repeated first.
    repeats = max(1, plan.inner * tensor // shape.num_kv_heads)
    return {
        "query_bytes": each * (shape.num_heads * shape.head_dim // tensor),
        "key_value_bytes": each * 2 * (shape.num_kv_heads * shape.head_dim // tensor) * repeats,
        "segment_bytes": 4.0 * job.tokens if job.config.data.packs_documents else 0.0,
        "widening": WIDE / job.compute_bytes,
        "repeats_attention": not job.keeps("attention"),
        "exchange": plan.exchange,
        "context_size": job.spec[CONTEXT],
        "exchanged_heads": plan.inner,
    }


def _traced_sums(job: Job) -> Iterator[Moved]:
    """Yield sums over `tensor` that a model requests; sums inserted by XLA are unknown."""
    if job.spec[TENSOR] == 1:
        return
    cost, rows = job.everything_kept, job.compute_bytes * job.micro_rows
    times, axes = job.num_microbatches, (TENSOR.name,)
    layers = job.layers_per_stage * times
    yield axes, Traffic("all-reduce", "activations", rows * cost.layer.reduced, layers)
    yield axes, Traffic("all-reduce", "activations", rows * cost.rest.reduced, times)


def _stages(job: Job) -> Iterator[Moved]:
    if job.stages is None:
        return
    report = job.stages.report
    each = float(job.compute_bytes * job.stream_tokens * job.stream_width)
    permutes = report.forward_permutes + report.backward_permutes
    yield (PIPELINE.name,), Traffic("collective-permute", "stages", each, permutes)


def _flow(job: Job, axes: tuple[str, ...], traffic: Traffic) -> Flow:
    axes = tuple(a.name for a in job.spec.used if a.name in axes)
    kind, each, times = traffic.kind, traffic.num_bytes, traffic.times
    group = traffic.neighbors or math.prod(job.spec[axis] for axis in axes)
    inside = min(group, members_per_fabric(job, axes))
    nodes = group // inside
    fast, slow = job.cluster.gpu.link_bandwidth, job.cluster.gpu.network_bandwidth
    start = _start_seconds(kind, group, nodes)
    wire = wire_bytes(kind, each, group)
    if kind == "collective-permute":
        seconds = each / (slow if nodes > 1 else fast)
    else:
        # Each node receives the missing data once, through the network adapters of its members.
        seconds = max(wire / fast, wire_bytes(kind, each, nodes) / (inside * slow))
    return Flow(
        kind=kind,
        axes=axes,
        purpose=traffic.purpose,
        bytes=each * times,
        times=times,
        wire_bytes=wire * times,
        seconds=(seconds + start) * times,
        crosses_nodes=nodes > 1,
    )


def wire_bytes(kind: str, total: float, size: int) -> float:
    """Return the bytes that one device sends with ring algorithms, as in `core.collectives`."""
    if kind in ("collective-permute", "collective-broadcast"):
        return total
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * total * (size - 1) / size


_START_S = 8.4e-6
_RING_HOP_S, _RING_NODE_HOP_S = 3.4e-6, 9.6e-6
_TREE_HOP_S, _TREE_NODE_HOP_S = 1.2e-6, 8.5e-6
"""Seconds of a launch, of a hop inside a node and of a hop between nodes, for rings of long
messages and for trees: the constants of NCCL (src/graph/tuning.cc)."""


def _start_seconds(kind: Kind, group: int, nodes: int) -> float:
    """Return the latency of a collective in seconds: of a ring for a gather or reduce-scatter.

    Source: NVIDIA/nccl#1473. An all-reduce: twice the lower of a ring and a tree. Others: one hop.
    """
    if kind in ("all-gather", "reduce-scatter", "all-reduce"):
        ring = (group - nodes) * _RING_HOP_S + (nodes - 1) * _RING_NODE_HOP_S
        if kind != "all-reduce":
            return _START_S + ring
        tree = (group / nodes - 1) * _TREE_HOP_S + math.log2(nodes) * _TREE_NODE_HOP_S
        return _START_S + 2 * min(ring, tree)
    return _START_S + (_RING_NODE_HOP_S if nodes > 1 else _RING_HOP_S)


def members_per_fabric(job: Job, axes: tuple[str, ...]) -> int:
    """Return how many devices of a group over `axes` fast links connect."""
    stride, members = 1, 1
    for axis, size in reversed(job.spec.sizes.items()):
        if axis in axes:
            members *= min(size, max(1, job.cluster.gpus_per_fabric // stride))
        stride *= size
    return members
