"""The decisions about one train step: `plan_step` makes all of them without tracing."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxdist.core import matmul
from jaxdist.core.attention import AttentionPlan, AttentionRequest, choose_kernel
from jaxdist.core.attention.context_parallel import ExchangePlan, plan_exchange
from jaxdist.core.attention.kernel_check import KernelCheck
from jaxdist.core.axis import axes_of, divisors_of
from jaxdist.core.matmul import hopper
from jaxdist.core.matmul.grouped import Kernel
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout
from jaxdist.core.types import AttentionCall, Model, offloaded_names
from jaxdist.hardware import GPUS, gpu_of
from jaxdist.settings import ConfigError

if TYPE_CHECKING:
    from jaxdist.core.step.config import TrainConfig

UNROLL_UP_TO = 16
"""Maximum number of layers to unroll on CPUs, which is faster; more compile too slowly."""

UNROLL_ON_GPUS_UP_TO = 32
"""Maximum on GPUs: unrolled, residuals are not copied into stacks."""

_CPU_LOGITS_BYTES = 64 * 2**20
_HEAD_PASSES = 0.15
_LOGITS_SHARE = 1 / 64
_ROW_CHUNKS = 4  # the first and the last chunk overlap their collectives with nothing


class StepSettings(NamedTuple):
    """The sections of the settings that `plan_step` reads."""

    train: TrainConfig
    precision: PrecisionConfig = PrecisionConfig()
    pipeline: PipelineConfig = PipelineConfig()


class Device(NamedTuple):
    """The kind of device for which a step is planned.

    Attributes:
        compute_capability: of an NVIDIA GPU, e.g. "9.0"; "" if unknown.
        kind: `jax.Device.device_kind`, or the name of a GPU in the catalog.
        per_node: number of neighbors along the context axis within one node.
    """

    platform: str
    compute_capability: str = ""
    kind: str = ""
    per_node: int = 1
    is_described: bool = False

    @classmethod
    def of(cls, layout: Layout) -> Device:
        """Return the device kind of a layout, from the first device of its mesh."""
        first = layout.mesh.devices.flat[0]
        here = jax.devices()
        return cls(
            platform=platform_of(first),
            compute_capability=str(getattr(first, "compute_capability", "")),
            kind=first.device_kind,
            per_node=_per_node(layout) if CONTEXT in layout.used else 1,
            is_described=not any(device in here for device in layout.mesh.devices.flat),
        )


def platform_of(device: Any) -> str:
    """Return "gpu" for every GPU, else the name of the platform."""
    return "gpu" if device.platform in ("gpu", "cuda") else device.platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The decisions about one step on one layout.

    Attributes:
        attention: the devices, the context-parallel exchange, the restrictions of cuDNN.
        kernel: attention kernel in training; "" = none, or the configured one cannot run here.
        grouped: implementation of the products of experts (`matmul.grouped.Kernel`).
        compute_dtype, reduce_dtype, microbatch_reduce_dtype: of products and activations; of sums
            over devices of gathered weights' gradients, of one microbatch or, in a pipeline, all.
        matmul_dtype: key of `matmul.FORMATS` for all layers except first and last; "" = none.
        remat: the remat policy, with "auto" resolved.
        gathers_layers: layers all-gather weights when they run.
        layers: number of layers of each virtual stage.
        layers_per_body: layers per iteration of the layer loop.
        num_microbatches: as configured; 0 = one, or chosen by the pipeline from its rows.
        dot: product with a weight: "plain", "cpu" (`matmul.cpu`) or "by_position".
        gradient_barrier: use the gradients of a product's inputs only after both are computed.
        avoids_donation_copies: write averages, parameters and moments one after another.
        skips_idle: idle pipeline stages run no layers; else they repeat a pass, which is dropped.
        memory_bytes: GPU memory for XLA's scheduler; 0 = unknown, or a CPU.
    """

    attention: AttentionPlan
    kernel: str
    grouped: Kernel
    compute_dtype: Any
    reduce_dtype: Any
    microbatch_reduce_dtype: Any
    matmul_dtype: str
    device: Device
    packed: bool
    remat: str
    gathers_layers: bool
    layers: LayerSplit
    layers_per_body: int
    max_row_chunks: int
    loss_chunk: int
    num_microbatches: int
    pipeline: PipelineConfig
    dot: str
    gradient_barrier: bool
    avoids_donation_copies: bool
    orders_collectives: bool
    skips_idle: bool
    memory_bytes: int
    reasons: Mapping[str, str]

    @property
    def platform(self) -> str:
        """Return the platform of the devices, "cpu" or "gpu"."""
        return self.attention.platform

    @property
    def exchange(self) -> ExchangePlan | None:
        """Return the `ExchangePlan` for keys and values; None if no axis splits positions."""
        return self.attention.exchange

    @property
    def accumulation(self) -> int:
        """Return the number of microbatches of a step without pipeline stages."""
        return self.num_microbatches or 1

    @functools.cached_property
    def digest(self) -> str:
        """Return a short hash of all decisions, which is the same in every command."""
        decisions = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("reasons", "device")
        }
        attention = self.attention  # texts are excluded because they may differ between processes
        exchange = attention.exchange[:3] if attention.exchange is not None else None
        decisions["attention"] = (attention.platform, attention.compute_capability, exchange)
        return hashlib.sha256(repr(decisions).encode()).hexdigest()[:12]


def plan_step(
    model: Model,
    layout: Layout,
    device: Device,
    packed: bool,
    settings: StepSettings,
    checks: Sequence[KernelCheck] = (),
    remat: str | None = None,
) -> StepPlan:
    """Return the plan for the step of a model on a layout of real or abstract devices.

    `checks` compare kernels of attention and experts with their references; a kernel without one
    was not compared. `remat` is the choice for "auto" by estimated costs; None = not chosen yet.
    Raises `ConfigError` if the heads or the stages do not allow the configured exchange.
    """
    train, precision, pipeline = settings
    platform, has_stages = device.platform, layout.size(PIPELINE) > 1
    dtype = precision.resolve(platform)
    matmul_dtype = precision.matmul_dtype if precision.matmul_dtype in matmul.FORMATS else ""
    of_experts = next((check for check in checks if check.use == "grouped"), None)
    check = next((check for check in checks if check.use != "grouped"), None)
    use = "" if check is None else check.use
    exchange = exchange_of(model, layout, device.per_node, packed=packed)
    reasons = {} if exchange is None else {"exchange": exchange.reason}
    attention = AttentionPlan(
        platform,
        device.compute_capability,
        exchange,
        packed_rejection=kernel_rejection(layout, device, check if "packed" in use else None),
        ring_rejection=kernel_rejection(layout, device, check if use == "ring" else None),
        plain_rejection=check.rejection_reason if check is not None and use == "plain" else "",
    )
    kernel = ""
    if model.dims.keys() >= {"heads", "kv_heads", "head_dim"}:
        call, head_dim = model.attention_call, model.dims["head_dim"]
        request = request_of(call, head_dim, train.seq_len, dtype, packed=packed)
        try:
            kernel, reasons["kernel"] = choose_kernel(request, attention)
        except ConfigError as error:  # the step raises it
            reasons["kernel"] = str(error)
    remat, reasons["remat"] = _choose_remat(train.remat, remat, platform, has_stages)
    gathers = bool(model.num_layers) and not (has_stages and pipeline.gather == "step")
    layers = set(jax.tree.leaves(model.axes["layers"])) if gathers else ()
    gathers = any(axes_of(layout.gather_spec(dims)) for dims in layers)  # ends at the first
    virtual = max(1, pipeline.num_virtual_stages) if has_stages else 1
    if has_stages:
        virtual = len(layout.stage_depths) // layout.size(PIPELINE) or virtual
        pipeline = dataclasses.replace(pipeline, num_virtual_stages=virtual)
    split = LayerSplit.of(model.num_layers, layout.size(PIPELINE), virtual, layout.stage_depths)
    per_body, reasons["layers_per_body"] = layers_of_a_body(
        model, layout, platform, remat, gathers=gathers, split=split
    )
    chunks, reasons["max_row_chunks"] = row_chunks_of(layout, matmul_dtype, platform)
    if model.step_sums:
        chunks, reasons["max_row_chunks"] = 1, "blocks add up all rows of a microbatch"
    usual = default_loss_chunk(
        model.dims.get("vocab", 0) // layout.size(TENSOR), platform, device.kind
    )
    dot, reasons["dot"] = _choose_dot(layout, platform)
    grouped, reasons["grouped"] = choose_grouped(model, layout, device, dtype, of_experts)
    gpu = gpu_of(device.kind) if platform == "gpu" else None
    on_cpu, on_gpu = platform == "cpu", platform == "gpu"
    in_steps = exchange is not None and exchange.exchange in ("ring", "hybrid")
    reasons["formats"] = (
        "from the settings" if precision.compute_dtype != "auto" else f"the default of {platform}"
    )
    reasons["loss_chunk"] = "from the settings" if train.loss_chunk_tokens else (
        "logits that take little memory" if on_gpu else "logits that fit the caches"
    )  # fmt: skip
    return StepPlan(
        attention=attention,
        kernel=kernel,
        grouped=grouped,
        compute_dtype=dtype,
        reduce_dtype=precision.resolve_reduce(dtype),
        microbatch_reduce_dtype=precision.resolve_reduce("float32"),
        matmul_dtype=matmul_dtype,
        device=device,
        packed=packed,
        remat=remat,
        gathers_layers=gathers,
        layers=split,
        layers_per_body=per_body,
        max_row_chunks=chunks,
        loss_chunk=train.loss_chunk_tokens or usual,
        num_microbatches=train.num_microbatches,
        pipeline=pipeline,
        dot=dot,
        gradient_barrier=on_gpu and in_steps and not has_stages,
        # XLA:CPU writes each leaf of the new state from old leaves. On one core it copies memory
        # that it might overwrite before its last read. With several devices, avoiding the copies
        # would need another collective.
        avoids_donation_copies=on_cpu and layout.mesh.size == 1,
        orders_collectives=on_cpu and layout.mesh.size > 1,
        # Simulated devices share cores. On GPUs, stages wait for each other anyway.
        skips_idle=on_cpu and has_stages,
        memory_bytes=0 if gpu is None else gpu.memory_bytes,
        reasons=reasons,
    )


def request_of(
    call: AttentionCall, head_dim: int, seq_len: int, dtype: Any, *, packed: bool
) -> AttentionRequest:
    """Return the `choose_kernel` request for attention in training."""
    return AttentionRequest(
        dtype,
        head_dim,
        seq_len,
        kernel=call.kernel,
        packed=packed,
        dropout=call.dropout,
        softcap=call.softcap,
        sinks=call.sinks,
        window=call.sliding_window,
    )


def exchange_of(
    model: Model, layout: Layout, per_node: int, *, packed: bool
) -> ExchangePlan | None:
    """Return the plan for the exchange of keys and values; None if no axis splits positions."""
    if CONTEXT not in layout.used or not model.context_parallel:
        return None
    tensor = layout.size(TENSOR)
    return plan_exchange(
        layout.context_attention,
        size=layout.size(CONTEXT),
        # If a model does not name its heads dim, its heads are not exchanged.
        heads=model.dims.get("heads", 1) // tensor or 1,
        kv_heads=model.dims.get("kv_heads", 1) // tensor or 1,
        per_node=per_node,
        has_stages=layout.size(PIPELINE) > 1,
        packed=packed,
    )


def _per_node(layout: Layout) -> int:
    """Return the largest number of neighbors along the context axis that share a host."""
    mesh = layout.mesh
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(CONTEXT.name), -1)
    processes = [device.process_index for device in lines.flat]
    hosts = np.array([str(layout.host_of.get(process, process)) for process in processes])
    groups = lambda size: hosts.reshape(-1, size)
    sizes = divisors_of(layout.size(CONTEXT))
    return max(n for n in sizes if np.all(groups(n) == groups(n)[:, :1]))


def kernel_rejection(layout: Layout, device: Device, check: KernelCheck | None) -> str:
    """Return why cuDNN's operations must not be used directly on this layout; "" = they may."""
    if layout.auto_tensor and TENSOR in layout.used:
        return "XLA splits this model's heads, and cannot split cuDNN's own operations"
    if check is not None:
        return check.rejection_reason
    if device.is_described:
        return ""
    return "cuDNN's kernel for it was not compared with the reference here"


def _choose_remat(
    setting: str, chosen: str | None, platform: str, has_stages: bool
) -> tuple[str, str]:
    if setting != "auto":
        return setting, "from the settings"
    if chosen is not None:
        return chosen, "by the estimates of time and memory"
    if platform == "gpu":
        return "dots", "until costs decide"
    if has_stages:
        return "dots", "the default of CPUs with stages, which copy what a forward pass saves"
    return "none", "the default of CPUs"


def layers_of_a_body(
    model: Model,
    layout: Layout,
    platform: str,
    remat: str,
    *,
    gathers: bool,
    split: LayerSplit,
) -> tuple[int, str]:
    """Choose the number of layers per iteration of the layer loop, with the reason.

    It is all layers or one; in a pipeline, two or one. Unrolling only some layers is slower on
    every platform. In a pipeline, two layers unrolled are faster than a loop, by the roofline
    (Llama 2 13B with five virtual stages: 1,518 instead of 1,550 ms), five are slower. On GPUs,
    collectives in every layer also make compiling slow, and layers that save only their input have
    little to copy. With ZeRO-2, GPT-2 unrolled keeps gradients longer (6.5, not 5.1 GiB).
    """
    if offloaded_names(remat):
        return 1, "unrolled layers would not move their activations to the host"
    if layout.size(PIPELINE) > 1:
        if split.slots == 2 and not split.is_padded:
            return 2, "virtual stages of two layers run faster unrolled"
        return 1, "a loop runs a virtual stage of any number of layers"
    if platform == "cpu":
        # XLA:CPU merges repeated computations of unrolled layers, even across a barrier.
        unrolls = model.num_layers <= UNROLL_UP_TO and remat == "none" and not gathers
    else:
        moves = gathers or TENSOR in layout.used or CONTEXT in layout.used or layout.zero == 2
        unrolls = model.num_layers <= UNROLL_ON_GPUS_UP_TO and remat != "full" and not moves
    if unrolls:
        return model.num_layers, "few layers run faster unrolled"
    return 1, "many layers, recomputation, collectives or ZeRO-2 favor a loop"


def row_chunks_of(layout: Layout, matmul_dtype: str, platform: str) -> tuple[int, str]:
    """Choose the maximum number of row chunks of a microbatch, with the reason.

    More than one if `tensor` splits layers on GPUs. XLA then overlaps collectives of one chunk with
    products of another (Wang et al. 2024, "Domino", section 3). With a ring, which has collectives
    in each hop, chunks gain nothing (`scripts/bench/results/gpu_program.md`). In fp8 each chunk
    would have its own scale and would round differently than without chunks. Others are untested.
    """
    splits = TENSOR in layout.used and not layout.auto_tensor
    if platform != "gpu" or not splits or CONTEXT in layout.used or matmul_dtype:
        return 1, "only `tensor` on GPUs, without `context` and in the compute dtype, uses more"
    return _ROW_CHUNKS, "collectives of `tensor` overlap with another part's products"


def _choose_dot(layout: Layout, platform: str) -> tuple[str, str]:
    """Choose the implementation of products with weights, with the reason.

    If `tensor` splits the sequence on GPUs, positions are the outermost dim in memory. Otherwise
    XLA transposes the activations before and after every product. CPUs use a faster sum for weight
    gradients.
    """
    if platform == "cpu":
        return "cpu", "sums gradients of weights faster on CPU"
    splits = TENSOR in layout.used and not layout.auto_tensor and layout.sequence_parallel
    if platform == "gpu" and splits:
        return "by_position", "positions are gathered and scattered without a transpose"
    return "plain", "no other is faster here"


def choose_grouped(
    model: Model, layout: Layout, device: Device, dtype: Any, check: KernelCheck | None
) -> tuple[Kernel, str]:
    """Choose the implementation of the products of experts, with the reason."""
    if not model.experts_call.per_token:
        return "blocks", "the model has no experts"
    if device.platform != "gpu" or device.compute_capability != hopper.COMPUTE_CAPABILITY:
        return "blocks", "jax's kernels are for Hopper GPUs"
    rejection = hopper.rejection([w for pair in expert_widths(model, layout) for w in pair], dtype)
    if check is not None:
        rejection = rejection or check.rejection_reason
    elif not device.is_described:
        rejection = rejection or "jax's kernels were not compared with the reference here"
    reads = "jax's kernels for Hopper read matrices of experts without a copy"
    return ("blocks", rejection) if rejection else ("mosaic", reads)


def expert_widths(model: Model, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return (in, out) of the matrices of a device's experts: up and down."""
    d_model, mlp = model.dims["d_model"], model.dims["mlp"] // layout.size(TENSOR)
    return (d_model, model.experts_call.ways * mlp), (mlp, d_model)


def default_loss_chunk(vocab_shard: int, platform: str, device_kind: str) -> int:
    """Return the default number of tokens whose logits are in memory at a time; 0 = all.

    Every chunk reads the head's kernel twice in 2 bytes, and reads and writes its gradient in 4: 12
    bytes per element, for 6 FLOPs per token and element. On a GPU, a chunk is just large enough
    that these passes take `_HEAD_PASSES` of the products' time at most, or smaller, so that float32
    logits take `_LOGITS_SHARE` of memory at most. It is a multiple of 128, the tile size of
    products. On a CPU, logits fit in the caches. An unknown GPU counts as the smallest usual one.
    """
    if not vocab_shard:
        return 0
    if platform != "gpu":
        return max(128, _CPU_LOGITS_BYTES // (4 * vocab_shard))
    gpu = gpu_of(device_kind) or GPUS["t4"]
    peak = gpu.peak_flops.get("bfloat16") or gpu.peak_flops["float16"]
    # Products reach 0.72 of the peak, passes over memory 0.85 of the bandwidth.
    passes_per_token = 12 / (0.85 * gpu.memory_bandwidth) / (6 / (0.72 * peak))
    affordable = math.ceil(passes_per_token / _HEAD_PASSES / 128)
    fitting = int(_LOGITS_SHARE * gpu.memory_bytes) // (4 * vocab_shard * 128)
    return 128 * max(1, min(affordable, fitting))
