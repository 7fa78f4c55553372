"""How long a step takes: a roofline with overlap, the pipeline's waiting, links and optimizer.

Compute is products, attention and memory-bound kernels one after the other, each at the share of
its peak that such kernels reach (`Reach`). Collectives overlap with it: what is longer than
the compute that can hide it is exposed, and a share of the rest too, since collectives take
multiprocessors and memory bandwidth from compute. One set of constants per kind of GPU; none is
fitted to a row.
`scripts/bench/results/plan_anchors.md` compares with published runs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from jaxdist.core.parallel.context import CONTEXT
from jaxdist.plan.estimate import flops, traffic
from jaxdist.plan.estimate.flops import Work
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import moment_bytes
from jaxdist.plan.estimate.traffic import Flow
from jaxdist.plan.hardware.gpu import HOST_BYTES_PER_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """Shares of a GPU's peaks that training reaches.

    Attributes:
        products: matrix products of unlimited width, of the dense peak.
        half_width: width (d_model) at which products reach half of that.
        float8: the same in 8 bits, of their peak, casts included.
        attention: the fused kernel, of the same peak.
        memory: fused elementwise kernels, of the memory bandwidth.
        links: collectives, of the links' rate.
        hidden: of collectives that overlap with compute, the share that costs nothing.
        launch_s: seconds lost per layer and direction to launches and gaps.
    """

    products: float = 0.79
    half_width: int = 280
    float8: float = 0.64
    attention: float = 0.45
    memory: float = 0.80
    links: float = 0.80
    hidden: float = 0.70
    launch_s: float = 60e-6


# Hopper's products are held back by its power limit, Ampere's and Ada's less; small GPUs without
# room for large tiles reach less. Attention is what cuDNN 9 reports for heads of 128.
_REACH = {
    "7.5": Reach(products=0.45, attention=0.20, memory=0.75),
    "8.0": Reach(products=0.75, attention=0.50, memory=0.82),
    "8.6": Reach(products=0.65, attention=0.40, memory=0.80),
    "8.9": Reach(products=0.60, attention=0.40, memory=0.80),
    "9.0": Reach(),
    "10.0": Reach(products=0.74, attention=0.45),
}


LIKELY = (0.90, 1.35)
"""Four of five published runs took between these shares of their estimate: the rows of
`scripts/bench/results/plan_anchors.md`, most of them other software than ours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the busiest device.

    Attributes:
        parts: cause -> seconds, 0 left out: matrix products, the attention kernel, kernels that
            wait for device memory, gaps between kernels, the optimizer's update, stages that wait
            for others (the pipeline's bubble); by purpose, collectives that are not hidden.
        communication: all collectives, hidden or not.
        model_flops: useful FLOPs of the step, causal convention.
        peak_flops: of one device; in float32 where it has no units for the run's dtype.
    """

    parts: dict[str, float]
    communication: float
    tokens_per_step: int
    num_gpus: int
    model_flops: float
    peak_flops: float

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(self.parts.values())

    @property
    def likely_seconds(self) -> tuple[float, float]:
        """The range in which four of five steps would lie, were they published runs."""
        low, high = LIKELY
        return low * self.seconds, high * self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Useful FLOPs over what all devices could do."""
        return self.model_flops / self.seconds / self.num_gpus / self.peak_flops


def estimate_time(job: Job) -> StepTime:
    """The time of one step of the job."""
    rates = _Rates.of(job)
    flows = traffic.flows_of(job)
    compute, waiting, launches = _compute(job, rates)
    products, attention, memory = rates.parts(compute)
    busy = products + attention + memory + launches
    parts = {
        "products": products,
        "attention": attention,
        "memory-bound kernels": memory,
        "launch gaps": launches,
        "optimizer": rates.seconds(flops.optimizer(job))
        + flops.orthogonalisation(job) / rates.wide_products,
        "moments to and from host memory": _moved_moments(job) / HOST_BYTES_PER_S,
        "pipeline bubble": waiting,
        **_exposed(flows, busy, _beside_ring(job, attention), rates.reach),
    }
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        communication=sum(flow.seconds for flow in flows) / rates.reach.links,
        tokens_per_step=job.tokens_per_step,
        num_gpus=job.spec.num_devices,
        model_flops=flops.model_flops_per_token(job) * job.tokens_per_step,
        peak_flops=_peak(job),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rates:
    """FLOP/s and bytes/s that one device reaches; `fp8` is for products in 8 bits."""

    reach: Reach
    products: float
    fp8: float
    wide_products: float  # in float32, whatever the compute dtype
    attention: float
    memory: float

    @classmethod
    def of(cls, job: Job) -> _Rates:
        reach = _REACH.get(job.cluster.gpu.compute_capability, Reach())
        peaks = job.cluster.gpu.peak_flops
        peak = _peak(job)
        products, fp8 = reach.products * peak, reach.float8 * peaks.get("float8", 0.0)
        if job.engine.products_dtype == "float8":
            products = fp8
        width = job.stream_width
        wide_enough = width / (width + reach.half_width) if width else 1.0
        return cls(
            reach=reach,
            products=products * wide_enough,
            fp8=fp8 * wide_enough,
            wide_products=reach.products * peaks["float32"] * wide_enough,
            attention=reach.attention * peak,
            memory=reach.memory * job.cluster.gpu.memory_bandwidth,
        )

    def parts(self, work: Work) -> tuple[float, float, float]:
        return (
            work.products / self.products,
            work.attention / self.attention,
            work.memory_bytes / self.memory,
        )

    def seconds(self, work: Work) -> float:
        return sum(self.parts(work))

    def of_mean_layer(self, job: Job, work: Work) -> Work:
        """A layer's work; where some layers use 8 bits, with as many FLOPs as take that time."""
        if not job.num_fp8_layers:
            return work
        share = job.num_fp8_layers / job.layers_per_stage
        products = work.products * (1 - share + share * self.products / self.fp8)
        return dataclasses.replace(work, products=products)


def _moved_moments(job: Job) -> float:
    """Bytes between one GPU and its host: moments come for the update, and go back after it."""
    return 2 * moment_bytes(job) if job.config.train.offload_optimizer else 0.0


def _peak(job: Job) -> float:
    peaks = job.cluster.gpu.peak_flops
    return peaks.get(str(job.dtype)) or peaks["float32"]


# --- compute --------------------------------------------------------------------------------------


def _compute(job: Job, rates: _Rates) -> tuple[Work, float, float]:
    """Work of the busiest device, seconds it waits for other stages, seconds of launch gaps."""
    forward = rates.of_mean_layer(job, flops.layer_forward(job))
    backward = rates.of_mean_layer(job, flops.layer_backward(job))
    ends = flops.head(job) + flops.embedding(job)
    extra, launch = flops.microbatch_extra(job), rates.reach.launch_s
    layers, count = job.layers_per_stage, job.num_microbatches
    if job.stages is None:
        total = ((forward + backward) * layers + ends + extra) * count
        return total, 0.0, 3 * launch * layers * count
    # A stage's backward goes forward again first.
    again = forward if job.engine.stage_recomputes else Work()
    total = (forward + backward + again) * (layers * count) + ends * count + extra
    spent = rates.seconds(total)
    launches = 4 * launch * layers * count
    actions = {
        "forward": rates.seconds(forward) * job.layers_per_virtual_stage,
        "backward": rates.seconds(again + backward) * job.layers_per_virtual_stage,
        "weight": 0.0,
    }
    if job.stages.schedule.splits_backward:
        # Taken apart, nothing is recomputed a second time: all is kept.
        kept = flops.recomputed(job, forward)
        actions["weight"] = rates.seconds(
            Work(products=forward.products) * job.layers_per_virtual_stage
        )
        actions["backward"] -= actions["weight"] + rates.seconds(
            kept * job.layers_per_virtual_stage
        )
        total = total + kept * (-layers * count)
        spent = rates.seconds(total)
    duration = sum(actions[kind] * n for kind, n in job.stages.longest.items())
    duration += rates.seconds(ends) * count + rates.seconds(extra)
    return total, max(0.0, duration - spent), launches


# --- communication --------------------------------------------------------------------------------

_OVERLAPPED = ("weights", "gradients")
"""Purposes whose collectives overlap with all other work; a ring's with attention, the rest block
it."""


def _exposed(flows: list[Flow], busy: float, beside_ring: float, reach: Reach) -> dict[str, float]:
    """`waiting for PURPOSE` -> seconds of collectives that are waited for.

    Compute takes `busy` seconds, `beside_ring` of them while keys and values travel.
    """
    rings = [f for f in flows if f.axes == (CONTEXT.name,) and f.kind == "collective-permute"]
    others = [f for f in flows if f not in rings and f.purpose in _OVERLAPPED]
    seconds: dict[str, float] = defaultdict(float)
    for flow in flows:
        if flow not in rings and flow not in others:
            seconds[flow.purpose] += flow.seconds / reach.links
    hidden = 0.0
    for group, room in ((rings, beside_ring), (others, busy)):
        together = sum(flow.seconds for flow in group) / reach.links
        late = max(0.0, reach.hidden * together - (room - hidden))
        hidden = reach.hidden * together - late
        for flow in group:
            own = flow.seconds / reach.links
            seconds[flow.purpose] += (1 - reach.hidden) * own + late * own / together
    return {f"waiting for {purpose}": spent for purpose, spent in seconds.items()}


def _beside_ring(job: Job, attention: float) -> float:
    """Seconds of attention during which keys and values travel: all parts of the row but one."""
    if job.exchange is None:
        return 0.0
    parts = (traffic.window_hops(job) or job.spec[CONTEXT] // job.exchange.inner - 1) + 1
    return attention * (1 - 1 / parts)
