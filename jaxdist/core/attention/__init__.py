"""Attention: the choice of the kernel, the kernels, attention over rows that devices share.

kernels           public API: the choice of the kernel and its reason; dense attention; dropout
tiled             plain JAX for rows of up to 2,047 keys on CPU: tiles of queries
blockwise         plain JAX in blocks: memory is linear in the length of the row
cudnn             the only module that binds cuDNN's private operations; packed documents on it
kernel_check      numeric check of cuDNN on the user's device
context_parallel  rows split over devices: ring, all-gather, all-to-all, hybrid
ring              keys and values travel around the devices, overlapped with attention
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
