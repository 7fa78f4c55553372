"""Products of activations and weights: in low precision, and on CPUs.

choice        the available formats, the GPUs that support them, the product of each
fp8           8 bits, one scale per array
fp8_weights   weights that are gathered in 8 bits
block_scaled  mxfp8 and nvfp4: one scale per 32 or 16 elements along the contracted dims
cpu           float32 products with faster weight gradients on CPUs
"""

from jaxdist.core.matmul.choice import FORMATS, Format, make_dot, problems

__all__ = ["FORMATS", "Format", "make_dot", "problems"]
