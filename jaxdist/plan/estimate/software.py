"""Efficiency of the kernels of our compiled step; for others see `scripts/bench`.

References:
    Shah et al. 2024, "FlashAttention-3", figures 5 and 6: forward and backward kernels on one H100.
    Zadouri et al. 2026, "FlashAttention-4": a B200 forward, cuDNN 9.13 about 1,240 TFLOP/s of 2,250
        and Triton 600.
    Dao-AILab/flash-attention#2379: a T4 forward, 0.66 of its peak where PyTorch reaches half of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
    """Efficiency of kernels, and the share of collectives that compute hides.

    Attributes:
        attention: compute capability -> share of the 16-bit peak that attention reaches on long
            rows, counting only unmasked pairs.
        stream_passes: reads and writes of the residual stream per layer in forward.
        query_passes: reads and writes of queries and keys, by rotation and layout changes.
        hidden_passes: reads and writes of half of the MLP's gate, up and hidden arrays together.
        backward_passes: memory traffic of backward's memory-bound kernels, relative to forward.
        hidden: share of overlapping collectives that costs no time; the rest takes multiprocessors
            and memory bandwidth from compute.
        hidden_in_tensor: hidden share of activations over `tensor`.
        hidden_in_groups: hidden share of activations over `tensor` with several row chunks.
        ring: rate of attention on rows split over `context`, relative to that on complete rows.
        launch_s: seconds per layer and direction for kernel launches and gaps.
        idle: share of compute time that a GPU waits for others, mainly for the slowest.
    """

    products: float
    attention: Mapping[str, float] = dataclasses.field(hash=False)
    stream_passes: float
    query_passes: float
    hidden_passes: float
    backward_passes: float
    memory: float
    links: float = 0.80  # NCCL's own tests, large messages
    hidden: float = 0.70
    hidden_in_tensor: float
    hidden_in_groups: float
    ring: float = 0.75
    launch_s: float = 60e-6
    idle: float = 0.0


OURS = Software(
    products=0.85,  # 0.70 of an H100's peak with the power limit
    # cuDNN on an H100: 600 forward and 530 backward of 989, minus a tenth for diagonal tiles.
    # Blackwell: 0.55 forward, less backward. T4: a third forward, and half of that backward
    # (assumed). 12.0 is assumed as 8.9. We have measured none of these.
    attention={
        **{"7.5": 0.20, "8.0": 0.50, "8.6": 0.60, "8.9": 0.60},
        **{"9.0": 0.50, "10.0": 0.45, "10.3": 0.45, "12.0": 0.60},
    },
    # Counted in our compiled programs; their elementwise kernels are listed in
    # scripts/bench/results/gpu_program.md: norms, residuals and casts are not all in one kernel.
    stream_passes=16,
    query_passes=6,
    hidden_passes=3,
    backward_passes=2.5,
    memory=0.80,
    # Exposed share in compiled schedules (gpu_program.md), in one row chunk and in two: 8B with
    # fsdp=4,tp=2 34 % and 4 %; 70B with fsdp=16,tp=8 79 % and 47 %. The larger exposure is used.
    hidden_in_tensor=0.20,
    hidden_in_groups=0.50,
)
"""Our step as XLA compiles it, not fitted to `time.MEASURED`; without waiting for slower GPUs."""

ATTENTION_HALF = 250
"""Keys per query for half of attention's peak rate: 0.6-0.7 at 512, 0.9 at 2,048 (Shah et al.)."""


def attention_share(software: Software, capability: str, keys: float, head_dim: int) -> float:
    """Return the share of the peak that attention reaches; 0.84 of it for heads of 64."""
    long = software.attention.get(capability, software.attention["9.0"])
    narrow = min(1.0, (head_dim / 128) ** 0.25)
    return long * narrow * keys / (keys + ATTENTION_HALF)
