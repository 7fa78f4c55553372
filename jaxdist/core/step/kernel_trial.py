"""Checks of cuDNN's attention kernel and of the kernels of experts before the first step.

A process with devices of the mesh tries the kernel on one of them (`trials.py`). If one process
rejects it, all do, because all must run the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax

from jaxdist.core import trials
from jaxdist.core.attention import choose_kernel
from jaxdist.core.attention.kernel_check import KernelCheck, Shapes, Use
from jaxdist.core.forward import row_chunks
from jaxdist.core.matmul.grouped_check import GroupedShapes
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.expert import EXPERT, capacity
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.sharding import Layout
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.step_plan import StepPlan, choose_grouped, expert_widths, request_of
from jaxdist.core.types import Model
from jaxdist.settings import ConfigError

Agree: TypeAlias = Callable[[str, str, Callable[[list[str]], str]], str]


def check_kernel(
    model: Model, layout: Layout, plan: StepPlan, config: TrainConfig, agree: Agree
) -> KernelCheck | None:
    """Return how cuDNN's kernel compares with the reference on the shapes of a plan; collective.

    The result is None if the kernel is not used, or if the devices are only described. `agree` maps
    (name, text of this process, decision) to the decision about the texts of all processes.
    """
    shapes = shapes_of(model, layout, plan, config)
    exchange, call = plan.exchange, model.attention_call
    in_parts = exchange is not None and exchange.exchange != "all_to_all"
    if shapes is None or plan.device.is_described:
        return None
    request = request_of(
        call, model.dims["head_dim"], config.seq_len, plan.compute_dtype, packed=plan.packed
    )
    # The kernel is needed if any layer has no window.
    request = request._replace(window=min(shapes.windows))
    untested = plan.attention._replace(packed_rejection="", ring_rejection="", plain_rejection="")
    try:
        kernel, _ = choose_kernel(request, untested)
    except ConfigError:  # the step reports it
        return None
    if kernel != "cudnn":
        return None
    use: Use = "ring" if in_parts else "plain"
    if plan.packed:
        use = "packed_ring" if in_parts else "packed"
    return _agreed(shapes, layout, use, agree)


def check_grouped(
    model: Model, layout: Layout, plan: StepPlan, config: TrainConfig, agree: Agree
) -> KernelCheck | None:
    """Return how the kernels of experts compare with the reference; collective.

    The result is None if they cannot be used, or if the devices are only described.
    """
    untested = KernelCheck(errors={}, rejection_reason="", use="grouped")
    if plan.device.is_described or not model.experts_call.per_token:
        return None
    kernel, _ = choose_grouped(model, layout, plan.device, plan.compute_dtype, untested)
    if kernel == "blocks":
        return None
    ep, per_token = layout.size(EXPERT), model.experts_call.per_token
    rows = config.global_batch_size // layout.num_replicas // plan.accumulation
    rows //= row_chunks(max(1, rows), plan.max_row_chunks)
    rows = per_token * max(1, rows) * config.seq_len // layout.size(CONTEXT)
    shapes = GroupedShapes(
        rows=rows if ep == 1 else capacity(rows, ep) * ep,
        groups=model.dims["experts"] // ep,
        widths=expert_widths(model, layout),
        dtype=plan.compute_dtype,
    )
    return _agreed(shapes, layout, "grouped", agree)


def _agreed(shapes: Shapes | GroupedShapes, layout: Layout, use: Use, agree: Agree) -> KernelCheck:
    """Return this process's check result, or a rejection by another process; collective."""
    here = jax.local_devices()
    own = [device for device in layout.mesh.devices.flat if device in here]
    check = KernelCheck(errors={}, rejection_reason="", use=use)
    if own:
        check = trials.try_kernel(use, shapes, own[0])
    first = lambda texts: next(filter(None, texts), "")
    name = "grouped products" if use == "grouped" else f"{use}_attention"
    rejection = agree(name, check.rejection_reason, first)
    if rejection and not check.rejection_reason:
        reason = f"in another process {rejection}"
        return KernelCheck(errors={}, rejection_reason=reason, use=use)
    return check


def shapes_of(model: Model, layout: Layout, plan: StepPlan, config: TrainConfig) -> Shapes | None:
    """Return the attention shapes of one device; None if unknown, or if XLA splits attention."""
    if not model.dims.keys() >= {"heads", "kv_heads", "head_dim"}:
        return None
    if layout.auto_tensor and TENSOR in layout.used:  # XLA cannot split the kernel
        return None
    inner = 1 if plan.exchange is None else plan.exchange.inner
    groups = 1 if plan.exchange is None else layout.size(CONTEXT) // inner
    each = layout.size(TENSOR) * inner
    rows = config.global_batch_size // layout.num_replicas // plan.accumulation
    windows = model.attention_call.windows
    return Shapes(
        rows=max(1, rows),
        seq_len=config.seq_len // groups,
        heads=max(1, model.dims["heads"] // each),
        kv_heads=max(1, model.dims["kv_heads"] // each),
        head_dim=model.dims["head_dim"],
        windows=tuple(window if window < config.seq_len else 0 for window in windows),
        dtype=plan.compute_dtype,
    )
