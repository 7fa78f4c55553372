"""The residual network for CIFAR-10 of He et al. 2015, section 4.2: ResNet-20 to ResNet-110.

It has 6 n + 2 layers: a 3 × 3 convolution, three stages of n residual blocks (1, 2 and 4 times the
channels at full, half and quarter image size), the mean over pixels, one dense layer. Shortcuts
have no weights (option A of the paper). Images are channels-last. Tensor parallelism splits the
first convolution of a block along its outputs, and the second along its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.core.types import Array, Context, Model
from jaxdist.models import layers
from jaxdist.models.cnn import image_classifier
from jaxdist.models.configs import IMAGE_CHANNELS, KERNEL_SIZE, ResnetConfig

_NUM_STAGES = 3


def build_resnet(config: ResnetConfig) -> Model:
    """Return the `Model` of the classifier; see `image_classifier`."""
    area, side = KERNEL_SIZE**2, config.image_size
    macs = side**2 * area * IMAGE_CHANNELS * config.width
    for _, width, out in _blocks(config):
        side //= out // width
        macs += side**2 * area * (width + out) * out
    macs += config.width * 2 ** (_NUM_STAGES - 1) * config.num_classes
    name = f"resnet-{config.depth}"
    return image_classifier(config, name, lambda rngs: Resnet(config, rngs), macs)


def _blocks(config: ResnetConfig) -> Iterator[tuple[str, int, int]]:
    width = config.width
    for stage in range(_NUM_STAGES):
        for block in range(config.blocks_per_stage):
            yield f"stage_{stage + 1}_block_{block + 1}", width, config.width * 2**stage
            width = config.width * 2**stage


class Resnet(nnx.Module):
    """Convolution, residual blocks, mean over pixels, dense."""

    def __init__(self, config: ResnetConfig, rngs: nnx.Rngs):
        self.conv = _conv_kernel(rngs, IMAGE_CHANNELS, config.width, None, "channels")
        self.norm = layers.BatchNorm(config.width, "channels")
        self.names = [name for name, _, _ in _blocks(config)]
        for name, width, out in _blocks(config):
            setattr(self, name, Block(width, out, rngs))
        width = config.width * 2 ** (_NUM_STAGES - 1)
        bound = 1 / math.sqrt(width)
        self.head = layers.uniform(rngs, (width, config.num_classes), bound, "channels", None)
        self.head_bias = layers.filled(0.0, (config.num_classes,), None)

    def __call__(self, images: Array, context: Context) -> Array:
        """Map images [batch, height, width, channels] to logits [batch, classes]."""
        with jax.named_scope("conv"):
            x = jax.nn.relu(self.norm(layers.conv(images, self.conv[...]), context))
        for name in self.names:
            with jax.named_scope(name):
                x = getattr(self, name)(x, context)
        with jax.named_scope("head"):
            x = jnp.mean(x.astype(jnp.float32), (1, 2)).astype(x.dtype)
            dims = "batch channels, channels classes -> batch classes"
            logits = context.dot(dims, x, self.head[...])
            return logits + self.head_bias[...].astype(x.dtype)


class Block(nnx.Module):
    """A residual block of two convolutions; it halves height and width if the channels double."""

    def __init__(self, width: int, out: int, rngs: nnx.Rngs):
        self.conv_1 = _conv_kernel(rngs, width, out, "channels", "hidden")
        self.norm_1 = layers.BatchNorm(out, "hidden")
        self.conv_2 = _conv_kernel(rngs, out, out, "hidden", "channels")
        self.norm_2 = layers.BatchNorm(out, "channels")
        self.stride, self.added = out // width, out - width

    def __call__(self, x: Array, context: Context) -> Array:
        """Map [batch, height, width, in] to [batch, height / stride, width / stride, out]."""
        y = layers.conv(context.enter(x), self.conv_1[...], self.stride)
        y = jax.nn.relu(self.norm_1(y, context))
        y = self.norm_2(context.leave(layers.conv(y, self.conv_2[...])), context)
        shortcut = x[:, :: self.stride, :: self.stride]
        shortcut = jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, self.added)))
        return jax.nn.relu(y + shortcut)


def _conv_kernel(
    rngs: nnx.Rngs, width: int, out: int, in_dim: str | None, out_dim: str | None
) -> nnx.Param:
    """Return a kernel [3, 3, width, out] from N(0, 2 / fan-in) (He et al. 2015a)."""
    std = math.sqrt(2 / (KERNEL_SIZE**2 * width))
    shape = (KERNEL_SIZE, KERNEL_SIZE, width, out)
    return layers.weight(rngs, shape, std, None, None, in_dim, out_dim)
