"""What the model is told inside the step: kernels, dtypes, losses, how to run its layers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdist.core import attention, losses
from jaxdist.core.attention.admission import Admission
from jaxdist.core.attention.context_parallel import ExchangePlan, plan_exchange
from jaxdist.core.axis import divisors_of
from jaxdist.core.matmul import cpu
from jaxdist.core.parallel import fsdp, tensor
from jaxdist.core.parallel.context import CONTEXT, imbalance
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.settings import ConfigError
from jaxdist.core.sharding import Layout
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.step.layer_scan import make_run_layers
from jaxdist.core.types import Context, Model, Params, RunningDims
from jaxdist.plan.hardware import GPUS, gpu_of
from jaxdist.runtime.formatting.numbers import percent

_CPU_LOGITS_BYTES = 64 * 2**20
_HEAD_PASSES = 0.15
_LOGITS_SHARE = 1 / 64
_ROW_GROUPS = 4  # of which one at either end of a layer has nothing beside its collectives
_UNEVEN = 0.05  # work that devices may differ by before the log names what differs less
_BETTER = 0.8  # share of that which an exchange must stay below to be named


def make_context(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    precision: PrecisionConfig,
    stages: PipelineConfig | None = None,
    packed_kernel: Admission | None = None,
    ring_kernel: Admission | None = None,
) -> Context:
    """What the model is told inside the step on this layout.

    The first device of the mesh says the platform; `stages` is None without a pipeline;
    `packed_kernel` is what comparing cuDNN's kernel for packed documents found, `ring_kernel` what
    comparing it for a ring's parts did. Without a comparison, it is not used on devices that are
    here.
    """
    device = layout.mesh.devices.flat[0]
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    dtype = precision.resolve(platform)
    vocabulary_axis = TENSOR.name if TENSOR in layout.used else None
    chunk = config.loss_chunk_tokens or default_loss_chunk(
        model.dims.get("vocab", 0) // layout.size(TENSOR), platform, device.device_kind
    )

    # Then the pipeline gathers a stage's weights itself, before the first tick.
    once = layout.size(PIPELINE) > 1 and stages is not None and stages.gather == "step"
    capability = str(getattr(device, "compute_capability", ""))
    hooks = _hooks(layout)
    head_shard = {key: hooks[key] for key in ("tensor_index",) if key in hooks}
    packed_obstacle = obstacle_of(layout, packed_kernel)
    exchange = exchange_of(model, layout)
    if exchange is not None:
        exchange = exchange._replace(cudnn_obstacle=obstacle_of(layout, ring_kernel))
    attend = attention.make_attend(
        platform=platform,
        compute_capability=capability,
        packed_obstacle=packed_obstacle,
        exchange=exchange,
        **head_shard,
    )
    hooks = {"attend": attend, **hooks}
    if platform == "gpu" and exchange is not None and _in_steps(layout, exchange):
        hooks["settle"] = settle
    hooks |= products_of(layout, platform)
    return Context(
        dtype=dtype,
        token_loss=losses.make_token_loss(
            vocabulary_axis,
            chunk,
            **({"weight_gradient": cpu.weight_gradient} if platform == "cpu" else {}),
        ),
        label_loss=losses.label_cross_entropy,
        run_layers=make_run_layers(model, layout, config, precision, platform, gather=not once),
        platform=platform,
        compute_capability=capability,
        packed_obstacle=packed_obstacle,
        exchange=exchange,
        packed_rows=layout.packed_rows,
        row_groups=row_groups_of(layout, precision, platform),
        gather=make_gather(layout, model, dtype, precision),
        **hooks,
    )


def row_groups_of(layout: Layout, precision: PrecisionConfig, platform: str) -> int:
    """The most parts in which the rows of a microbatch go through the layers.

    More than one where `tensor` splits layers on GPUs: XLA then runs one's collectives beside
    another's products (Wang et al. 2024, "Domino", section 3). Beside a ring, whose steps have
    collectives of their own, they gain nothing (`scripts/bench/results/gpu_program.md`). In fp8
    each part would have a scale of its own, and round otherwise than on a mesh without parts;
    block-scaled formats were not tried.
    """
    splits = TENSOR in layout.used and not layout.auto_tensor
    rings = CONTEXT in layout.used
    if platform != "gpu" or not splits or rings or precision.matmul_dtype != "auto":
        return 1
    return _ROW_GROUPS


def products_of(layout: Layout, platform: str) -> dict[str, Any]:
    """`Context.dot` where the plain one does not do.

    On GPUs where `tensor` gathers and scatters positions, these stand outermost in memory: XLA
    would turn whole activations around before and behind every product. On CPU gradients of weights
    are summed the faster way; stages put these off, and tell them from others by their form.
    """
    if platform == "cpu" and PIPELINE not in layout.used:
        return {"dot": cpu.dot}
    splits = TENSOR in layout.used and not layout.auto_tensor and layout.sequence_parallel
    return {"dot": tensor.dot_by_position} if platform == "gpu" and splits else {}


def _in_steps(layout: Layout, exchange: ExchangePlan) -> bool:
    """Whether attention goes back in a ring's steps, with no stages that defer gradients."""
    return exchange.exchange in ("ring", "hybrid") and layout.size(PIPELINE) == 1


@jax.custom_vjp
def settle(tree: Any) -> Any:
    """The same tree of arrays; no gradient of them is used before all are known.

    XLA:GPU would put off gradients of weights until a ring has gone back, to have work beside its
    last permutes, and keep what they read: two arrays of the MLP's hidden width.
    """
    return tree


def _settle_forward(tree: Any) -> tuple[Any, None]:
    return tree, None


def _settle_backward(_: None, cotangent: Any) -> tuple[Any]:
    return (jax.lax.optimization_barrier(cotangent),)


settle.defvjp(_settle_forward, _settle_backward)


def obstacle_of(layout: Layout, found: Admission | None) -> str:
    """Why cuDNN's operations may not be bound one by one on this layout; "" = they may.

    Packed documents and the parts of a ring need that. `found` is what the comparison of that use
    found, None without one.
    """
    if layout.auto_tensor and TENSOR in layout.used:
        return "XLA splits this model's heads, and cannot split cuDNN's own operations"
    if found is not None:
        return found.obstacle
    if is_described(layout):
        return ""
    return "cuDNN's kernel for it was not compared with the reference here"


def is_described(layout: Layout) -> bool:
    """Whether the devices are a description, and none of them is this job's."""
    here = jax.devices()
    return not any(device in here for device in layout.mesh.devices.flat)


def exchange_of(model: Model, layout: Layout, per_node: int = 0) -> ExchangePlan | None:
    """How devices that share rows exchange keys and values; None where none do.

    `per_node` neighbours along the context axis share a node; 0 = ask the mesh's devices.

    Raises:
        ConfigError: the model's heads do not allow what the settings ask for.
    """
    if CONTEXT not in layout.used or not model.context_parallel:
        return None
    tensor = layout.size(TENSOR)
    return plan_exchange(
        layout.context_attention,
        size=layout.size(CONTEXT),
        # A model that does not name its heads keeps them together.
        heads=model.dims.get("heads", 1) // tensor or 1,
        kv_heads=model.dims.get("kv_heads", 1) // tensor or 1,
        per_node=per_node or _on_one_node(layout),
        has_stages=layout.size(PIPELINE) > 1,
        packed=layout.packed_rows,
    )


def describe_exchange(
    model: Model,
    layout: Layout,
    seq_len: int,
    windows: tuple[int, ...] = (0,),
    *,
    packed: bool = False,
    places: np.ndarray | None = None,
    rows: int = 1,
) -> list[str]:
    """How devices share rows, for the start of a run; nothing where none do.

    `windows` are the newest keys that a query sees in each kind of layer, 0 = all. Where rows hold
    several documents they are `packed`, and `places`, int [num_rows, seq_len], are the places of
    some rows' tokens in their documents, if these can be read. A microbatch has `rows`.
    """
    plan, size = exchange_of(model, layout), layout.size(CONTEXT)
    if plan is None:
        return []
    groups = f" in groups of {plan.inner}" if 1 < plan.inner < size else ""
    # Of kinds of layers that differ, the one whose work differs most.
    uneven_by = lambda inner: max(
        imbalance(size, seq_len, window, places, inner, rows) for window in windows
    )
    uneven = percent(uneven_by(plan.inner))
    if packed:
        known = f"mean of {len(places)} rows" if places is not None else "were a row one document"
        uneven += f" ({known})"
    uneven += _more_even(model, layout, plan, uneven_by)
    return [
        f"context attention: {plan.exchange} over {size} devices{groups} ({plan.reason}); "
        f"{seq_len // size} positions of a row on each, its work uneven by {uneven}"
    ]


def _more_even(
    model: Model, layout: Layout, used: ExchangePlan, uneven_by: Callable[[int], float]
) -> str:
    """Which exchanges would give the devices more equal work, where it is uneven by much.

    `uneven_by` says by how much with so many neighbours that exchange heads.
    """
    if (found := uneven_by(used.inner)) <= _UNEVEN:
        return ""
    others = {}
    for name in ("all_to_all", "hybrid"):
        with contextlib.suppress(ConfigError):
            plan = exchange_of(model, dataclasses.replace(layout, context_attention=name))
            assert plan is not None
            others[name] = uneven_by(plan.inner)
    named = [
        f"{name} ({percent(share)})" for name, share in others.items() if share < _BETTER * found
    ]
    if named:
        return f"; more even with --mesh.context-attention {' or '.join(named)}"
    return "; a cp that divides the query and key/value heads allows all_to_all, which is even"


def _on_one_node(layout: Layout) -> int:
    """The largest groups of neighbours along the context axis of which each is on one host."""
    mesh = layout.mesh
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(CONTEXT.name), -1)
    processes = [device.process_index for device in lines.flat]
    hosts = np.array([str(layout.host_of.get(process, process)) for process in processes])
    groups = lambda size: hosts.reshape(-1, size)
    sizes = divisors_of(layout.size(CONTEXT))
    return max(n for n in sizes if np.all(groups(n) == groups(n)[:, :1]))


def _hooks(layout: Layout) -> dict[str, Any]:
    """What the axes in use give a model to call."""
    return {
        name: hook
        for axis in layout.used
        for name, hook in axis.hooks(layout.sequence_parallel).items()
    }


def make_gather(layout: Layout, model: Model, dtype: Any, precision: PrecisionConfig) -> Any:
    """A function that makes all but the stacked layers whole, in the compute dtype.

    Running averages are whole and stay float32.
    """
    specs = layout.gather_specs(model.axes)
    kept = lambda dims, stored, cast: stored if isinstance(dims, RunningDims) else cast

    def gather(params: Params) -> Params:
        outer = {name: tree for name, tree in params.items() if name != "layers"}
        outer_specs = {name: specs[name] for name in outer}
        whole = fsdp.gather(
            outer, outer_specs, dtype=dtype, reduce_dtype=precision.resolve_reduce(dtype)
        )
        outer_axes = {name: model.axes[name] for name in outer}
        return {**params, **jax.tree.map(kept, outer_axes, outer, whole)}

    return gather


def default_loss_chunk(vocab_shard: int, platform: str, device_kind: str) -> int:
    """Tokens whose logits exist at once where the settings leave it open; 0 = all.

    Every chunk reads the head's kernel twice in 2 bytes, and reads and writes its gradient in 4:
    12 bytes an element, for 6 FLOPs a token and element. A GPU takes as many tokens as keep these
    passes below `_HEAD_PASSES` of the products' time, while float32 logits stay below
    `_LOGITS_SHARE` of its memory, in multiples of 128, the tile of a product. A CPU takes what its
    caches like.

    Args:
        vocab_shard: columns of the head on one device.
        platform: "cpu" or "gpu".
        device_kind: `jax.Device.device_kind`; of an unknown GPU the smallest usual one is assumed.
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
