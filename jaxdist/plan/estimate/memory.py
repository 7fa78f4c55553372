"""Memory of one device: the state, plus the phase of the step with the largest need.

A phase lists the arrays that are alive at the same time, as read from the buffer assignments of the
GPU compiler (`scripts/bench/results/plan_memory.md`). The CUDA context, NCCL's buffers and CUDA
graphs are not counted: XLA's memory fraction leaves a share of the GPU to them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step.grouped_update import GROUP_BYTES, IN_FLIGHT
from jaxdist.models.weights import Weight
from jaxdist.optim.int8 import BLOCK, is_eligible, outer_dims
from jaxdist.plan.estimate import attention
from jaxdist.plan.estimate.job import WIDE, Job, Role
from jaxdist.plan.estimate.model_costs import costs_of
from jaxdist.plan.estimate.model_trace import row_of
from jaxdist.plan.estimate.products import matrix_bytes
from jaxdist.runtime.backend import memory_fraction
from jaxdist.runtime.formatting.numbers import in_bytes

Parts = Mapping[str, float]

TEACHER = "teacher"
"""Class of the teacher's weights, which are arguments of a program of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one device.

    Attributes:
        state: persistent arrays, by class.
        phases: for each phase of the step, the arrays alive in addition to the state, by class.
        workspace_bytes: scratch of attention kernels, which the compiler does not count.
        host_bytes: moments and activations in the host's memory, of one device.
        pinned_bytes: activations among them, which XLA pins.
        disk_bytes: moments on a node's disk, each counted once.
        host_moment_bytes: moments in host memory, of all devices, each counted once.
        is_rough: activations are an upper bound from the model's trace.
    """

    state: Parts
    phases: Mapping[str, Parts]
    workspace_bytes: float
    host_bytes: float = 0.0
    pinned_bytes: float = 0.0
    disk_bytes: float = 0.0
    host_moment_bytes: float = 0.0
    is_rough: bool = False

    @functools.cached_property
    def state_bytes(self) -> float:
        """Bytes of all arrays of `state`: arguments of the step, and the weights of a teacher."""
        return sum(self.state.values())

    @functools.cached_property
    def peak(self) -> str:
        """The phase with the largest temporary memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def temporary_bytes(self) -> float:
        """Bytes of temporary arrays in the peak phase."""
        return sum(self.phases[self.peak].values())

    def process_bytes(self, num_devices: int) -> tuple[float, float]:
        """Return the bytes of moments, and of activations, on the host of a process's devices."""
        moments = num_devices * (self.host_bytes - self.pinned_bytes)
        return min(moments, self.host_moment_bytes), num_devices * self.pinned_bytes

    @property
    def total_bytes(self) -> float:
        """Bytes that must fit on one device."""
        return self.state_bytes + self.temporary_bytes + self.workspace_bytes

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by class in the peak phase, including the state."""
        parts = {**self.state, **self.phases[self.peak]}
        if self.workspace_bytes:
            parts["attention workspace"] = self.workspace_bytes
        return {name: size for name, size in parts.items() if size}

    def largest(self, number: int) -> str:
        """Return the largest classes, with their sizes, as text."""
        most = sorted(self.parts.items(), key=lambda part: -part[1])[:number]
        return ", ".join(f"{name} {in_bytes(size)}" for name, size in most)


MARGIN = 0.025
"""Share of a GPU's memory that plans keep free, for prefetched batches, evaluation and
fragmentation. On an H200, a step took at most 2.4 % more than planned (`results/h200.md`)."""


def usable_bytes(job: Job) -> float:
    """Return the bytes of a GPU that a plan may use: XLA's memory fraction less the margin."""
    return (memory_fraction() - MARGIN) * job.cluster.gpu.memory_bytes


def estimate_memory(job: Job) -> MemoryEstimate:
    """Return the estimated memory of one device of the job, by class and phase."""
    moments = moment_bytes(job)
    offload = job.config.train.offload
    row, shards = row_of(job.model, job.seq_len), job.spec[CONTEXT]
    state = {
        "parameters": sum(w.num_bytes * job.size(w, "param") for w in job.weights),
        **{name: sum(n * job.size(w, "param") for w, n in x) for name, x in job.copies.items()},
        "optimizer moments": moments if offload == "none" else 0.0,
        "batch": job.rows * sum(leaf.size * leaf.dtype.itemsize for leaf in row.values()) / shards
        + teacher_field_bytes(job),
        TEACHER: teacher_bytes(job),
    }
    phases = dict(_pipeline_phases(job) if job.stages else _phases(job)) | _teacher_phase(job)
    offloaded = costs_of(job).offloaded_per_layer()
    if offload != "none":
        for name in _updates(job):
            phases[name] = {**phases[name], "fetched moments": _moments_in_flight(job)}
    stored, pinned = stored_moment_bytes(job), offloaded * job.layers_per_stage
    return MemoryEstimate(
        state=state,
        phases=phases,
        workspace_bytes=attention.workspace(job),
        host_bytes=moments * (offload == "host") + pinned,
        pinned_bytes=pinned,
        disk_bytes=node_moment_bytes(job) * (offload == "disk"),
        host_moment_bytes=stored * (offload == "host"),
        is_rough=job.decoder is None,
    )


def moment_bytes(job: Job) -> float:
    """Return the bytes of one device's share of the optimizer's state, also if it is offloaded."""
    if job.own_moment_bytes is not None:
        return job.own_moment_bytes
    if job.config.optim.moment_dtype != "int8" and job.config.optim.optimizer in ("adamw", "lion"):
        return job.total(job.trained, "moment") * job.config.optim.moment_bytes
    total = 0.0
    for weight in job.trained:
        optim = job.config.optim
        if optim.moment_dtype == "int8" and not is_eligible(weight.shape, weight.is_stacked):
            optim = dataclasses.replace(optim, moment_dtype="float32")
        if optim.optimizer == "adafactor":
            total += WIDE * _factored(job, weight)
        elif optim.optimizer == "muon" and not (weight.is_stacked and weight.is_matrix):
            total += job.size(weight, "moment") * (optim.moment_bytes + optim.second_moment_bytes)
        else:
            total += job.size(weight, "moment") * optim.moment_bytes
    return total


def stored_moment_bytes(job: Job) -> float:
    """Return the bytes of the optimizer's state on all devices, each value counted once."""
    sharded = job.total(job.trained, "moment")
    return moment_bytes(job) * sum(w.size for w in job.trained) / sharded if sharded else 0.0


def node_moment_bytes(job: Job) -> float:
    """Return the bytes of the optimizer's state on a node's devices, each value counted once."""
    return min(job.cluster.gpus_per_node * moment_bytes(job), stored_moment_bytes(job))


def _moments_in_flight(job: Job) -> float:
    """Return the device bytes of moments on their way from or to host or disk, or being updated."""
    if job.own_moment_bytes is not None:  # a single group
        return job.own_moment_bytes
    each, depth = job.config.optim.moment_bytes, max(1, job.layers_per_stage)
    layers = job.only_trained(job.layers)
    layer = each * job.total(layers, "moment") / depth
    if job.spec[PIPELINE] > 1:  # stages divide the layers: a group has all of a parameter
        layer = each * max((job.size(weight, "moment") for weight in layers), default=0.0)
        depth = 1
    # Tables whose first dim is sharded are not cut into ranges of rows.
    is_cut = job.spec[TENSOR] == 1 and job.config.optim.unit == "element"
    limit = GROUP_BYTES if is_cut else math.inf
    outer = [each * job.size(w, "moment") for w in job.only_trained(job.outer)]
    largest = max(layer, min(limit, max(outer, default=0.0)))
    return min(IN_FLIGHT * max(largest, min(GROUP_BYTES, layer * depth)), moment_bytes(job))


def _factored(job: Job, weight: Weight) -> int:
    """Return the number of elements of Adafactor's moments of a weight: rows, columns; or all."""
    if not weight.is_matrix or "d_model" not in weight.dims:
        return job.size(weight, "moment")
    # Layers and unnamed dims (query, key, value; gate, up) stack separate matrices.
    sizes = dict(zip(weight.dims, weight.shape, strict=True))
    pairs = zip(weight.dims, weight.shape, strict=True)
    stacked = math.prod(size for name, size in pairs if name in ("layers", "experts", None))
    model_side = sizes["d_model"]
    return stacked * (model_side + weight.size // stacked // model_side)


def teacher_field_bytes(job: Job) -> float:
    """Return the bytes on a device of the predictions that the teacher adds to a batch."""
    fields = job.config.objective.added_fields(job.seq_len, job.model.vocab_size)
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
    return job.rows * sum(sizes) / job.spec[CONTEXT]


def teacher_bytes(job: Job) -> float:
    """Return the bytes of the teacher's weights on a device; 0 without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return 0.0
    return sum(w.num_bytes * teacher.size(w, "param") for w in teacher.weights)


def _teacher_phase(job: Job) -> dict[str, Mapping[str, float]]:
    """Return "teacher" -> name -> bytes alive while it predicts, at most; {} without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return {}
    costs, depth = costs_of(teacher), max(1, teacher.layers_per_stage)
    head = dict(costs.head_parts())
    return {
        "teacher": {
            "gathered weights": teacher.gathered_bytes(teacher.layers) / depth
            + head.get("gathered weights", 0.0),
            "activations": costs.working(),
            "logits": head.get("logits", 0.0),
        }
    }


def _phases(job: Job) -> dict[str, Parts]:
    kept = _kept(job)
    accumulated = _accumulated(job)
    head, relaid = _head(job), _transposed_weights(job)
    middle = job.num_fp8_layers / max(1, job.layers_per_stage) * job.total(job.layers, "param")
    # Gradients of fp8 layers are a separate array until they are merged.
    layers = job.only_trained(job.layers)
    # Without a kernel, gradients of the experts' first matrices are copied to another layout.
    has_kernel = job.plan.grouped == "mosaic"
    moved = [w for w in layers if "experts" in w.dims and None in w.dims and not has_kernel]
    copied = job.total(layers, "param") + job.total(moved, "param")
    layer_grads = {"layer gradients": WIDE * (copied + middle)}
    # Gradient buffers of gathered weights are zeroed before the loss, the others after it.
    gathered = [weight for weight in layers if job.is_gathered(weight)]
    cleared = {"layer gradients": WIDE * job.total(gathered, "param")}
    if middle:
        kept = {**kept, "weights in 8 bits": middle}
    before = {**accumulated, **kept, **relaid, "head gradient": head["head gradient"]}
    waiting = cleared if _transposed(job) else {}
    # With unrolled layers, compiled programs cast all weights in advance, also transposed for
    # backward, and hold the working memory of two layers at once.
    ahead, beside = {}, {}
    tables = job.only_trained(costs_of(job).embedding_tables())
    if job.unrolls:
        floats = [w for w in job.layers if not w.dims.keeps_dtype]
        cast = [w for w in floats if w.num_bytes != job.compute_bytes]
        turned = job.total(floats, "gathered") + job.total(cast, "gathered")
        ahead = {"cast weights": job.compute_bytes * turned}
        beside = {"the next layer's activations": costs_of(job).working()}
    return {
        "loss": {**accumulated, **kept, **relaid, **cleared, **head, **ahead},
        "layout change": {**before, **waiting, "transposed activations": _transposed(job)},
        "layer backward": {**before, **layer_grads, **_layer(job), **beside},
        "embedding backward": {
            **accumulated,
            **layer_grads,
            **relaid,
            "head gradient": WIDE * job.total(job.only_trained(job.outer), "param"),
            "embedding gradient": WIDE * job.total(tables, "gathered"),
        },
        **_updates(job),
    }


def _kept(job: Job) -> Parts:
    costs = costs_of(job)
    in_layers = job.layers_per_virtual_stage * costs.kept_per_layer()
    if job.stages is None:  # pipeline stages save unrounded values
        in_layers -= job.num_fp8_layers * costs.saved_by_fp8()
    else:
        in_layers *= job.stages.report.residual_slots
    # The head of a decoder is in `head_parts`.
    outside = 0.0 if job.decoder else job.micro_rows * job.trace.rest.kept_bytes
    return {"kept activations": in_layers + outside}


def _transposed(job: Job) -> float:
    return job.layers_per_virtual_stage * costs_of(job).transposed_per_layer()


def _accumulated(job: Job) -> Parts:
    """Return name -> bytes of accumulated gradients (untied tables twice); {} if 1 microbatch."""
    if job.num_microbatches == 1:
        return {}
    total = WIDE * job.total(job.trained, "gradient")
    costs = costs_of(job)
    tables = () if costs.is_tied() else job.only_trained(costs.embedding_tables())
    return {"accumulated gradients": total + WIDE * job.total(tables, "param")}


def _transposed_weights(job: Job) -> Parts:
    """Return name -> bytes of copies of layers' matrices that are not gathered along their rows."""
    matrices = [w for w in job.layers if job.is_gathered(w) and w.is_matrix]
    turned = [w for w in matrices if job.gathered_dim(w) > 1]
    return {"transposed weights": sum(w.num_bytes * job.size(w, "param") for w in turned)}


def _head(job: Job) -> Parts:
    """Return name -> bytes of the chunked loss: its arrays, its kernel, and its gradient."""
    parts = dict(costs_of(job).head_parts())
    if table := _transposed_table(job):
        parts["gathered weights"] += table
    return parts


def _layer(job: Job) -> Parts:
    """Return name -> bytes of the arrays in one layer's backward; {} without layers."""
    depth = job.layers_per_stage
    if not depth:
        return {}
    gathered = [w for w in job.only_trained(job.layers) if job.is_gathered(w)]
    one_layer = job.gathered_bytes(job.layers) / depth
    dense = [w.dims.num_weights * job.size(w, "gathered") for w in job.layers if w.is_quantized]

    def gradient(weight: Weight) -> int:  # kernels of experts write it as it is reduced
        is_narrow = "experts" in weight.dims and job.plan.grouped == "mosaic"
        itemsize = job.plan.reduce_dtype.itemsize if is_narrow else WIDE
        return itemsize * job.size(weight, "gathered")

    return {
        "gathered weights": one_layer + _transposed_table(job),
        "dequantized weights": job.compute_bytes * max(dense, default=0) / depth,
        "unreduced gradients": sum(map(gradient, gathered)) / depth,
        "activations": costs_of(job).working(),
        "fetched activations": 2 * costs_of(job).offloaded_per_layer(),  # on their way, and used
    }


def _transposed_table(job: Job) -> float:
    """Return bytes of a tied table, transposed for the head before its cast; else 0."""
    costs = costs_of(job)
    tables = [w for w in costs.embedding_tables() if not job.is_gathered(w)]
    return WIDE * job.total(tables, "gathered") * costs.is_tied()


def _updates(job: Job) -> dict[str, Parts]:
    """Return phase of the update -> name -> bytes: gradients, parameters, Muon's matrices."""
    sharded_finer = [w for w in job.trained if job.size(w, "moment") < job.size(w, "param")]
    reduced = {"reduced gradients": WIDE * job.total(job.trained, "moment")}
    new = {"new parameters": WIDE * job.total(sharded_finer, "param")}
    wide = {"moments in float32": max(map(functools.partial(_wide, job), job.trained), default=0)}
    phases: dict[str, Parts] = {"update": {**reduced, **new, **wide}}
    if size := matrix_bytes(job):
        phases["orthogonalization"] = {**reduced, "complete matrices": size}
    return phases


def _wide(job: Job, weight: Weight) -> int:
    """Return the bytes in float32 while a weight's moments in 8 bits are updated.

    The new moment and the update. Three more arrays, gathered along the dims of a block, if devices
    hold parts of blocks.
    """
    config = job.config
    is_int8 = config.optim.moment_dtype == "int8" and config.train.offload == "none"
    is_wide = is_int8 and job.own_moment_bytes is None
    if not (is_wide and is_eligible(weight.shape, weight.is_stacked)):
        return 0
    outer = outer_dims(weight.shape, weight.is_stacked)
    shards = job.num_shards(weight, "moment", outer)
    is_cut = math.prod(weight.shape[outer:]) // shards % BLOCK > 0
    return WIDE * job.size(weight, "moment") * (2 + 3 * shards * is_cut)


def _pipeline_phases(job: Job) -> dict[str, Parts]:
    common = {**_stage(job), **_transposed_weights(job)}
    kept, head = _kept(job), _head(job)
    turn = {
        "logits": head.get("logits", 0.0),
        "head activations": head.get("head activations", 0.0),
        "head gradient": max(
            WIDE * job.total(job.only_trained(job.outer), "gathered"),
            head.get("head gradient", 0.0),
        ),
    }
    return {
        "loss": {**common, **kept, **turn},
        "layer backward": {**common, **kept, **_layer_of_stage(job)},
        "layout change": {**common, **kept, "transposed activations": _transposed(job)},
        "reduction": _scattering(job),
        **_updates(job),
    }


def _scattering(job: Job) -> Parts:
    """Return name -> bytes at the reduction of accumulated gradients, of which XLA makes copies.

    The copies have the scattered dim first. In XLA's buffer assignments, half of them are alive at
    once if the program has two loops, and all of them if it has more.
    """
    assert job.stages is not None
    once = job.config.pipeline.gather == "step"
    role: Role = "gathered" if once else "gradient"
    layers, outer = job.only_trained(job.layers), job.only_trained(job.outer)
    totals = job.total(layers, role) + job.total(outer, "gathered")
    finer = [w for w in job.trained if job.size(w, "moment") < job.size(w, role)]
    at_once = 0.5 if job.stages.num_loops <= 2 else 1.0
    held = job.gathered_bytes(job.layers) if once else 0
    return {
        "accumulated gradients": WIDE * totals,
        "transposed gradients": WIDE * at_once * job.total(finer, role),
        "gathered weights": held,
    }


def _stage(job: Job) -> dict[str, float]:
    """Return name -> bytes of the arrays that a pipeline stage carries from tick to tick."""
    assert job.stages is not None
    report = job.stages.report
    once = job.config.pipeline.gather == "step"
    stream = job.compute_bytes * job.stream_tokens * job.stream_width
    # Each buffer has a spare slot; outputs of the last virtual stage have two slots in all.
    slots = report.activation_slots + 1 + report.cotangent_slots + 1 + 2
    layers, outer = job.only_trained(job.layers), job.only_trained(job.outer)
    totals = WIDE * job.total(layers, "gathered" if once else "gradient")
    parts: dict[str, float] = {
        "gathered weights": job.gathered_bytes(job.outer),
        "accumulated gradients": totals + WIDE * job.total(outer, "gathered"),
        "values between stages": slots * stream,
    }
    if once:
        parts["gathered weights"] += job.gathered_bytes(job.layers)
    return parts


def _layer_of_stage(job: Job) -> dict[str, float]:
    parts = dict(_layer(job))
    weights = parts.pop("gathered weights")
    if job.config.pipeline.gather == "step":  # the stage holds all its gathered weights anyway
        return {"activations": parts["activations"]}
    return {**parts, "layer's weights": weights}
