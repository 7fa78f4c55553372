"""Whether a run may bind cuDNN's operations one by one: decided before its first step.

Packed documents and the parts that travel round a ring need them. The kernel is compared for that
(`attention/admission.py`) by every process on one of its devices; one that refuses it refuses it
for all, since all must run the same program. What was not compared is not used, but where devices
are described and not here: there a program is compiled and never run.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.core.attention import admission, choose_kernel
from jaxdist.core.attention.admission import Admission, Shapes, Use
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.settings import ConfigError
from jaxdist.core.sharding import Layout
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.step.model_context import exchange_of, is_described
from jaxdist.core.types import Model
from jaxdist.runtime import coordination


def admit_packed_kernel(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    dtype: Any,
    *,
    wanted: str,
    windows: tuple[int, ...],
    softcap: float,
    dropout: float,
) -> Admission | None:
    """What the comparison found; None where the kernel is not used, or the GPUs are not here.

    `dtype` is the compute dtype, `wanted` is "auto", "xla" or "cudnn" as the settings ask.
    `windows` are the newest keys that a query sees, itself included, of each kind of layer; 0 =
    all. `softcap` bounds scores, `dropout` is the probability to drop one.
    """
    exchange = exchange_of(model, layout)
    shapes = shapes_of(model, layout, config, dtype, windows)
    if shapes is None:
        return None
    asked: dict[str, Any] = dict(packed=True, softcap=softcap, dropout=dropout)
    use: Use = "packed"
    if exchange is not None and exchange.exchange != "all_to_all":
        # One kind of layer without a window is enough to need the kernel.
        asked |= {"exchange": exchange, "window": min(shapes.windows)}
        use = "packed_ring"
    if not _is_chosen(shapes, layout, wanted, asked, config.seq_len):
        return None
    return _agreed(shapes, layout, use)


def admit_ring_kernel(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    dtype: Any,
    *,
    wanted: str,
    windows: tuple[int, ...],
    softcap: float,
    dropout: float,
) -> Admission | None:
    """As `admit_packed_kernel`, for rows of one document whose parts travel round a ring."""
    exchange = exchange_of(model, layout)
    if exchange is None or exchange.exchange not in ("ring", "hybrid"):
        return None
    shapes = shapes_of(model, layout, config, dtype, windows)
    if shapes is None:
        return None
    asked: dict[str, Any] = dict(packed=False, softcap=softcap, dropout=dropout)
    asked |= {"exchange": exchange, "window": min(shapes.windows)}
    if not _is_chosen(shapes, layout, wanted, asked, config.seq_len):
        return None
    return _agreed(shapes, layout, "ring")


def _is_chosen(
    shapes: Shapes, layout: Layout, wanted: str, asked: dict[str, Any], num_keys: int
) -> bool:
    """Whether GPUs that are here would use the kernel for what is asked of `choose_kernel`."""
    device = layout.mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda") or is_described(layout):
        return False
    try:
        kernel, _ = choose_kernel(
            wanted,
            platform="gpu",
            compute_capability=str(device.compute_capability),
            dtype=shapes.dtype,
            head_dim=shapes.head_dim,
            num_keys=num_keys,
            **asked,
        )
    except ConfigError:  # the step will say so
        return False
    return kernel == "cudnn"


def _agreed(shapes: Shapes, layout: Layout, use: Use) -> Admission:
    """What this process's comparison found, or a refusal of another's; collective."""
    compare = {
        "packed": admission.compare_packed,
        "ring": admission.compare_ring,
        "packed_ring": admission.compare_packed_ring,
    }[use]
    here = jax.local_devices()
    own = [device for device in layout.mesh.devices.flat if device in here]
    found = compare(shapes, own[0]) if own else Admission(errors={}, obstacle="", use=use)
    refusals = [text for text in coordination.gather(f"{use}_attention", found.obstacle) if text]
    if refusals and not found.obstacle:
        return Admission(errors={}, obstacle=f"in another process {refusals[0]}", use=use)
    return found


def shapes_of(
    model: Model, layout: Layout, config: TrainConfig, dtype: Any, windows: tuple[int, ...]
) -> Shapes | None:
    """What one device's attention is asked for; None where that is not known, or XLA splits it."""
    if not model.dims.keys() >= {"heads", "kv_heads", "head_dim"}:
        return None
    if layout.auto_tensor and TENSOR in layout.used:  # XLA cannot split the kernel
        return None
    exchange = exchange_of(model, layout)
    inner = 1 if exchange is None else exchange.inner
    groups = layout.size(CONTEXT) // inner if exchange is not None else 1
    each = layout.size(TENSOR) * inner
    rows = config.global_batch_size // layout.num_replicas // (config.num_microbatches or 1)
    return Shapes(
        rows=max(1, rows),
        seq_len=config.seq_len // groups,
        heads=max(1, model.dims["heads"] // each),
        kv_heads=max(1, model.dims["kv_heads"] // each),
        head_dim=model.dims["head_dim"],
        windows=tuple(window if window < config.seq_len else 0 for window in windows),
        dtype=dtype,
    )
