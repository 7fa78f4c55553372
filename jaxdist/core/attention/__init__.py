"""Attention: choice of the kernel, the kernels, and attention over context-parallel rows.

kernels           public API: choice of the kernel with its reason; dense attention; dropout
tiled             plain JAX for up to 2,047 keys on CPUs, in tiles of queries
blockwise         plain JAX in blocks: memory is linear in the row length
cudnn             the only module that uses jax's private operations of cuDNN; packed documents
kernel_check      numeric check of cuDNN on the user's device
context_parallel  rows split over devices: ring, all-gather, all-to-all, hybrid
ring              keys and values are sent around the devices, overlapped with attention
zigzag            one hop of a ring on cuDNN's kernel
"""

from jaxdist.core.attention.cudnn import keeps_attention
from jaxdist.core.attention.kernels import (
    AttentionPlan,
    AttentionRequest,
    choose_kernel,
    make_attend,
    visible,
)
