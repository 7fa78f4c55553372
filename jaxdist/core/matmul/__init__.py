"""Products of activations and weights: in fewer bits than the compute dtype, and on CPU.

choice        the formats of the setting, the GPUs that support them, the product of each
fp8           8 bits, one scale for each array
fp8_weights   weights that are gathered in 8 bits
block_scaled  mxfp8 and nvfp4: a scale for each 32 or 16 numbers that are summed
cpu           float32 products with faster gradients of weights on CPU
"""

from jaxdist.core.matmul.choice import FORMATS, Format, make_dot, problems

__all__ = ["FORMATS", "Format", "make_dot", "problems"]
