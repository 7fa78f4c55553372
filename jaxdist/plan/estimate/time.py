"""Seconds of a step: a roofline with overlap, the pipeline's bubble, links and optimizer.

Compute is products, attention and memory-bound kernels in sequence. Products run at the rate
allowed by their shapes and the power limit (`products`), other kernels at a share of the memory
bandwidth (`software`). Collectives are exposed if they take longer than the compute that overlaps
with them, and by a fixed share, because they take multiprocessors and memory bandwidth from it.
`scripts/bench/results/plan_anchors.md` compares with published runs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from jaxdist.core.forward import row_chunks
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.weights import GROUPS
from jaxdist.hardware.catalog import HOST_BYTES_PER_S
from jaxdist.plan.estimate import attention, products, traffic
from jaxdist.plan.estimate.job import WIDE, Job
from jaxdist.plan.estimate.memory import moment_bytes, node_moment_bytes
from jaxdist.plan.estimate.model_costs import ModelCosts, Work, costs_of
from jaxdist.plan.estimate.software import Software, attention_share
from jaxdist.plan.estimate.traffic import Flow

MEASURED = {
    "our step on one H200": (0.81, 0.92, 4),
    "NVIDIA's stack": (0.87, 1.24, 18),
    "other trainers": (0.79, 1.13, 31),
    "long or split rows": (0.90, 1.17, 17),
}
"""Low and high measured / estimated time, and the number of runs, by software stack.

Ours are in `scripts/bench/results/h200.md`. The others, each estimated with constants of its own
software, are rows of `plan_anchors.md` that nothing was fitted to (percentiles 10 and 90)."""

LONG = 16384
"""Tokens of a row from which attention dominates, and estimates are less accurate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the busiest device.

    Attributes:
        parts: cause -> nonzero seconds; exposed collectives by purpose.
        communication: seconds of all collectives, hidden or exposed.
        model_flops: useful FLOPs per step, causal convention.
        peak_flops: of one device in the run's dtype, or in float32 if it does not support it.
        accuracy: measured / estimated time: low of our runs, high of others (`MEASURED`).
    """

    parts: dict[str, float]
    communication: float
    tokens_per_step: int
    num_gpus: int
    model_flops: float
    peak_flops: float
    accuracy: tuple[float, float]

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.parts.values())

    @property
    def likely_seconds(self) -> tuple[float, float]:
        """Bounds of the seconds of a step, by the accuracy of the estimate on measured runs."""
        low, high = self.accuracy
        return low * self.seconds, high * self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens (or images) per second over all devices."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Useful FLOP/s relative to the peak of all devices."""
        return self.model_flops / self.seconds / self.num_gpus / self.peak_flops


def estimate_time(job: Job) -> StepTime:
    """Return the estimated seconds of one step of the job, by cause."""
    rates = _Rates.of(job)
    flows = traffic.flows_of(job)
    compute, waiting, launches = _compute(job, rates)
    products_s, attention_s, memory = rates.parts(compute)
    if job.spec.num_devices > 1:
        launches += rates.software.idle * (products_s + attention_s + memory)
    busy = products_s + attention_s + memory + launches
    is_long = job.seq_len >= LONG or job.plan.exchange is not None
    others = MEASURED["long or split rows" if is_long else "other trainers"]
    work = products.orthogonalization_flops(job)
    peak = job.cluster.gpu.peak_flops["float32"]
    fetched = job.num_microbatches * job.layers_per_stage * costs_of(job).offloaded_per_layer()
    # Copies go both ways at once; all moments of a node are read from its disk and written.
    offload, moments = job.config.train.offload, moment_bytes(job)
    disk = 2 * node_moment_bytes(job) * (offload == "disk")
    # All hops of a ring except the local one overlap with attention.
    exchange = job.plan.exchange
    beside_ring = attention_s * (1 - exchange.inner / job.spec[CONTEXT]) if exchange else 0.0
    chunks, software = row_chunks(job.micro_rows, job.plan.max_row_chunks), rates.software
    beside_rows = software.hidden_in_groups if chunks > 1 else software.hidden_in_tensor
    parts = {
        "products": products_s,
        "attention": attention_s,
        "memory-bound kernels": memory,
        "launch gaps": launches,
        "optimizer": rates.seconds(optimizer_work(job))
        + (work / products.rate(job, peak, "float32") if work else 0.0),
        "moments to and from host memory": moments * (offload == "host") / HOST_BYTES_PER_S,
        # Backward of each layer fetches its own first; copies to the host overlap with forward.
        "activations from host memory": fetched / HOST_BYTES_PER_S,
        "moments to and from the disk": disk / job.cluster.disk_bytes_per_s,
        "pipeline bubble": waiting,
        **_exposed(flows, busy, beside_ring, beside_rows, rates.software),
    }
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        communication=sum(flow.seconds for flow in flows) / rates.software.links,
        tokens_per_step=job.tokens_per_step,
        num_gpus=job.spec.num_devices,
        model_flops=model_flops_per_token(job) * job.tokens_per_step,
        peak_flops=_peak(job),
        accuracy=(MEASURED["our step on one H200"][0], others[1]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rates:
    """FLOP/s and bytes/s; `forward`, `backward`: those under `precision.matmul_dtype`."""

    software: Software
    products: float
    forward: float
    backward: float
    attention: float
    memory: float

    @classmethod
    def of(cls, job: Job) -> _Rates:
        gpu, software = job.cluster.gpu, job.engine.software
        peaks = gpu.peak_flops
        dtype = str(job.dtype) if str(job.dtype) in peaks else "float32"
        wide = job.engine.products_dtype or dtype
        narrow = job.config.precision.matmul_dtype if job.num_narrow_layers else "auto"
        forward, backward = products.NARROW_PEAKS.get(narrow, (wide, wide))
        used = {wide, forward, backward}
        rates = {name: products.rate(job, peaks[name], name) for name in used}
        return cls(
            software=software,
            products=rates[wide],
            forward=rates[forward],
            backward=rates[backward],
            attention=peaks[dtype] * _attention_share(job),
            memory=software.memory * gpu.memory_bandwidth,
        )

    def parts(self, work: Work) -> tuple[float, float, float]:
        return (
            work.products / self.products,
            work.attention / self.attention,
            work.memory_bytes / self.memory,
        )

    def seconds(self, work: Work) -> float:
        return sum(self.parts(work))

    def of_mean_layer(self, job: Job, work: Work, narrow: float) -> Work:
        """Return a layer's mean work; products at the rate `narrow` count as fewer wide ones."""
        if not job.num_narrow_layers:
            return work
        share = job.num_narrow_layers / job.layers_per_stage
        products = work.products * (1 - share + share * self.products / narrow)
        return dataclasses.replace(work, products=products)


def _attention_share(job: Job) -> float:
    if job.decoder is None:
        return 1.0  # attention of a traced model counts as products
    gpu, keys = job.cluster.gpu, attention.keys_seen(job)
    share = attention_share(job.engine.software, gpu.compute_capability, keys, job.decoder.head_dim)
    if job.plan.exchange is not None:
        share *= job.engine.software.ring
    return share * products.clock(gpu, _peak(job), str(job.dtype), share)


def _peak(job: Job) -> float:
    peaks = job.cluster.gpu.peak_flops
    return peaks.get(str(job.dtype)) or peaks["float32"]


_ATTENTION_BACKWARD = 2.5
"""FLOPs of a fused attention backward relative to forward: five products instead of two."""


def model_flops_per_token(job: Job) -> float:
    """Return the useful FLOPs per token or image, forward and backward, as counted in the MFU."""
    if job.model.flops_per_token:
        return float(job.model.flops_per_token.get("causal", 0.0))
    return costs_of(job).flops_per_token()


def layer_backward(job: Job) -> Work:
    """Return the work of one layer's backward, including recomputation."""
    costs = costs_of(job)
    own, own_backward = costs.expert_work()
    forward = costs.forward() + own * -1
    backward = Work(
        products=(1.0 + job.trained_share(job.layers)) * forward.products,
        attention=_ATTENTION_BACKWARD * forward.attention,
        memory_bytes=job.engine.software.backward_passes * forward.memory_bytes,
    )
    return backward + own_backward + costs.recomputed(forward) + _stacked(job, costs)


_STACK_PASSES = 3
"""Passes over a layer's residuals besides its kernels: two to copy them into the stack, about one
to copy half of them out of it. Compiled programs have 2.5 to 4.1."""


def _stacked(job: Job, costs: ModelCosts) -> Work:
    """Return the work of copying one layer's residuals into the stack of all layers, and back."""
    if job.unrolls or not job.engine.stacks_layers:
        return Work()
    return Work(memory_bytes=float(_STACK_PASSES * costs.kept_per_layer()))


def microbatch_extra(job: Job) -> Work:
    """Return the memory traffic per microbatch of casting weights and accumulating gradients."""
    cast = [w for w in job.layers if w.num_gathered_bytes(job.compute_bytes) != w.num_bytes]
    casts = (WIDE + job.compute_bytes) * job.total(cast, "param") * 2
    added = 3 * WIDE * job.total(job.trained, "gradient") * (job.num_microbatches > 1)
    return Work(memory_bytes=casts + added)


def optimizer_work(job: Job) -> Work:
    """Return the memory traffic of the update: gradient norm, moments, parameters, average."""
    elements = job.total(job.trained, "moment")
    moments = job.config.optim.moment_bytes
    per_element = 3 * WIDE + 3 * WIDE + 2 * moments  # norm, scaling; parameter twice, gradient
    moving = [copy for name, copy in job.copies.items() if GROUPS[name].is_average]
    average = sum(2 * n * job.size(weight, "param") for copy in moving for weight, n in copy)
    return Work(memory_bytes=float(per_element * elements + average))


def _compute(job: Job, rates: _Rates) -> tuple[Work, float, float]:
    """Return (work, seconds of the pipeline bubble, seconds of launch gaps) of the busiest GPU."""
    costs = costs_of(job)
    forward = rates.of_mean_layer(job, costs.forward(), rates.forward)
    backward = rates.of_mean_layer(job, layer_backward(job), rates.backward)
    ends = costs.head()
    extra, launch = microbatch_extra(job), rates.software.launch_s
    split, count = job.plan.layers, job.num_microbatches
    layers = max(map(split.of_stage, range(split.num_stages)))
    launches = (3 * launch + costs.expert_launches()) * layers * count
    # Passes that an objective computes first; a third of the work of the ends is forward.
    passes = getattr(job.model.objective, "extra_forwards", 0)
    first = (forward * layers + ends * (1 / 3)) * (passes * count)
    first += forward * (layers * count * job.has_first_pass) + teacher_work(job) * count
    if job.stages is None:
        total = ((forward + backward) * layers + ends + extra) * count + first
        return total, 0.0, launches
    total = (forward + backward) * (layers * count) + ends * count + extra + first
    spent = rates.seconds(total)
    actions = {"forward": rates.seconds(forward), "backward": rates.seconds(backward)}
    duration = sum(actions[kind] * n for kind, n in job.stages.ticks.items())
    duration *= job.layers_per_virtual_stage
    # The last virtual stage has the head, and may have fewer layers than the others.
    spared = (split.slots - split.depths[-1]) * actions["backward"]
    duration += (
        max(0.0, rates.seconds(ends) - spared) * count + rates.seconds(extra) + rates.seconds(first)
    )
    return total, max(0.0, duration - spent), launches


def teacher_work(job: Job) -> Work:
    """Return the work of the teacher's forward pass over a microbatch; zero without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return Work()
    costs = costs_of(teacher)
    # A frozen head counts two products, and prediction has two: one selects the most probable
    # tokens, the other returns their probabilities.
    return costs.forward() * teacher.layers_per_stage + costs.head()


_OVERLAPPED = ("weights", "gradients")
"""Purposes whose collectives overlap with all compute; rings overlap only with attention."""


def _exposed(
    flows: list[Flow], busy: float, beside_ring: float, beside_rows: float, software: Software
) -> dict[str, float]:
    """Return `waiting for PURPOSE` -> seconds of exposed collectives.

    Collectives may overlap with `busy` seconds of compute, of which `beside_ring` seconds overlap
    with a ring of keys and values. `beside_rows` is the hidden share of activations over `tensor`.
    """
    rings = [f for f in flows if f.axes == (CONTEXT.name,) and f.kind == "collective-permute"]
    others = [f for f in flows if f not in rings and f.purpose in _OVERLAPPED]
    seconds: dict[str, float] = defaultdict(float)
    for flow in flows:
        if flow not in rings and flow not in others:
            split = flow.axes == (TENSOR.name,) and flow.purpose == "activations"
            seconds[flow.purpose] += (1 - beside_rows * split) * flow.seconds / software.links
    hidden = 0.0
    for group, room in ((rings, beside_ring), (others, busy)):
        together = sum(flow.seconds for flow in group) / software.links
        late = max(0.0, software.hidden * together - (room - hidden))
        hidden = software.hidden * together - late
        for flow in group:
            own = flow.seconds / software.links
            seconds[flow.purpose] += (1 - software.hidden) * own + late * own / together
    return {f"waiting for {purpose}": spent for purpose, spent in seconds.items()}
