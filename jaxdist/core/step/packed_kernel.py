"""Whether a run may multiply its packed documents by cuDNN's kernel: decided before its first step.

The kernel is compared (`attention/admission.py`) by every process on one of its devices; one that
refuses it refuses it for all, since all must run the same program. What was not compared is not
used, but where devices are described and not here: there a program is compiled and never run.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.core.attention import admission, choose_kernel
from jaxdist.core.attention.admission import Admission, Shapes
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
    devices = list(layout.mesh.devices.flat)
    shapes = shapes_of(model, layout, config, dtype, windows)
    if devices[0].platform not in ("gpu", "cuda") or shapes is None or is_described(layout):
        return None
    try:
        kernel, _ = choose_kernel(
            wanted,
            platform="gpu",
            compute_capability=str(devices[0].compute_capability),
            dtype=dtype,
            head_dim=shapes.head_dim,
            num_keys=shapes.seq_len,
            packed=True,
            softcap=softcap,
            dropout=dropout,
        )
    except ConfigError:  # the step will say so
        return None
    if kernel != "cudnn":
        return None
    here = jax.local_devices()
    own = [device for device in devices if device in here]
    found = admission.compare_packed(shapes, own[0]) if own else Admission(errors={}, obstacle="")
    refusals = [text for text in coordination.gather("packed_attention", found.obstacle) if text]
    if refusals and not found.obstacle:
        return Admission(errors={}, obstacle=f"in another process {refusals[0]}")
    return found


def shapes_of(
    model: Model, layout: Layout, config: TrainConfig, dtype: Any, windows: tuple[int, ...]
) -> Shapes | None:
    """What one device's attention is asked for; None where it multiplies no whole rows itself."""
    if not model.dims.keys() >= {"heads", "kv_heads", "head_dim"}:
        return None
    if layout.auto_tensor and TENSOR in layout.used:  # XLA cannot split the kernel
        return None
    exchange = exchange_of(model, layout)
    if exchange is not None and exchange.exchange != "all_to_all":
        return None
    sharing = layout.size(CONTEXT) if exchange is not None else 1
    each = layout.size(TENSOR) * sharing
    rows = config.global_batch_size // layout.num_replicas // (config.num_microbatches or 1)
    return Shapes(
        rows=max(1, rows),
        seq_len=config.seq_len,
        heads=max(1, model.dims["heads"] // each),
        kv_heads=max(1, model.dims["kv_heads"] // each),
        head_dim=model.dims["head_dim"],
        windows=windows,
        dtype=dtype,
    )
