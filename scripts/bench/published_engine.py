"""Constants of the planner for the efficiency of typical published trainers.

Fitted constants use the rows that `results/plan_anchors.md` marks. The other rows test them.

References:
    Dao 2023, "FlashAttention-2", section 1 and figures 4 to 6: kernels of both versions on an A100.
    Shah et al. 2024, "FlashAttention-3", figures 5 and 6: kernels on an H100.
    Sinha et al. 2022, "Not All GPUs Are Created Equal": cards of one kind in one cluster differ in
        speed by 8 % on average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxdist.plan.estimate.job import Engine
from jaxdist.plan.estimate.software import OURS, Software

PUBLISHED = Software(
    products=0.77,  # fitted; with the power limit 0.66 to 0.69 of an H100's peak
    # A100 and H100: between FlashAttention 1 and 2, because published runs use both and rarely
    # name one. GPUs with half-rate tensor cores wait less for the softmax. Blackwell: between
    # Triton and cuDNN.
    attention={"7.5": 0.20, "8.0": 0.42, "8.6": 0.75, "8.9": 0.75, "9.0": 0.26, "10.0": 0.30},
    # Each read or write of a value counts once. Two fused norms read one and write one each. Two
    # residuals read two and write one each. Rotation and the kernel's layout read and write one.
    # SwiGLU reads gate and up and writes the hidden values.
    stream_passes=10,
    query_passes=4,
    hidden_passes=2,
    backward_passes=2.0,
    memory=0.85,
    hidden_in_tensor=0.6,  # Megatron splits products to overlap them with their collectives
    hidden_in_groups=0.6,
    ring=0.65,  # fitted
    idle=0.08,  # fitted; about the spread between GPUs of one type (Sinha et al.)
)
"""Typical trainers (Megatron-LM, torchtitan, MaxText, NeMo, FSDP in PyTorch), 2023 to 2025."""

NVIDIA: Mapping[str, float] = {"products": 0.90, "idle": 0.0, "ring": 0.75}  # fitted
"""Constants of NVIDIA's own stack (Megatron-LM, NeMo, its MaxText), other than `PUBLISHED`'s."""


KERNELS: Mapping[str, Mapping[str, float]] = {
    # A100: 0.25 to 0.40 of peak; the best, less 10 % for diagonal tiles. H100: as far behind flash2
    # as on an A100, because neither version uses the new instructions.
    "flash1": {"8.0": 0.36, "9.0": 0.22},
    # H100: 370 TFLOP/s forward and 325 backward of 989, less 10 % for diagonal tiles. A100: 0.57,
    # less 10 %.
    "flash2": {"8.0": 0.50, "9.0": 0.31},
    "cudnn": {"9.0": OURS.attention["9.0"], "10.0": OURS.attention["10.0"]},
}
"""Known attention kernel of a trainer -> `Software.attention` on measured GPUs: FlashAttention 1
and 2, and cuDNN (NVIDIA's own stack)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedEngine(Engine):
    """The engine of other trainers; `attention` is one of `KERNELS`, or "" if unknown."""

    attention: str = ""


def published_engine(products_dtype: str = "", attention: str = "") -> PublishedEngine:
    """Return the engine of typical published trainers.

    Args:
        products_dtype: dtype of matrix products if it is not the compute dtype.
        attention: one of `KERNELS`; "" if it is not known.
    """
    kernel = KERNELS[attention] if attention else {}
    tuned = NVIDIA if attention == "cudnn" else {}
    return PublishedEngine(
        attention=attention,
        products_dtype=products_dtype,
        software=dataclasses.replace(
            PUBLISHED, attention={**PUBLISHED.attention, **kernel}, **tuned
        ),
        stacks_layers=False,
        fuses_recomputation=False,
    )
