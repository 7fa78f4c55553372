"""Attention: which kernel runs and why, the kernels, and attention over rows that devices share.

kernels           the choice, dense and cuDNN attention, dropout
cudnn             cuDNN's fused kernel by its operations; packed documents on it
tiled             rows of up to 2,047 keys on CPU: tiles of queries, each with the keys it sees
blockwise         block by block in plain JAX: memory that grows with the row, not with its square
context_parallel  a row on several devices: ring, all-gather, all-to-all, hybrid
ring              keys and values that travel between devices while those at hand are multiplied
zigzag            one step of a ring on cuDNN's kernel
"""

from jaxdist.core.attention.kernels import (
    AttentionPlan,
    AttentionRequest,
    choose_kernel,
    keeps_attention,
    make_attend,
    visible,
)
