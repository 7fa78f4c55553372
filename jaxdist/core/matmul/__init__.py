"""Products of activations and weights: in fewer bits than the compute dtype, and on CPU.

choice        the formats that can be asked for, where they run, the product of each
fp8           8 bits, one scale for a whole array
fp8_weights   weights that travel in 8 bits
block_scaled  mxfp8 and nvfp4: a scale for each 32 or 16 numbers that are summed
cpu           products of float32 whose weights' gradients XLA:CPU sums faster
"""

from jaxdist.core.matmul.choice import FORMATS, Format, make_dot, problems

__all__ = ["FORMATS", "Format", "make_dot", "problems"]
