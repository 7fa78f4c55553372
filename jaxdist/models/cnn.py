"""The image classifier of common CIFAR-10 tutorials: two conv blocks, two dense layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.core.types import Array, Batch, Context, Model, Params, Sums
from jaxdist.models import layers
from jaxdist.models.configs import IMAGE_CHANNELS, KERNEL_SIZE, CnnConfig, ResnetConfig
from jaxdist.objectives import classification


def build_cnn(config: CnnConfig) -> Model:
    """Return the `Model` of the classifier; see `image_classifier`."""
    area, pixels, (first, second) = KERNEL_SIZE**2, config.image_size**2, config.channels
    macs = pixels * area * IMAGE_CHANNELS * first + pixels // 4 * area * first * second
    macs += config.flat_size * config.mlp_dim + config.mlp_dim * config.num_classes
    return image_classifier(config, "cnn", lambda rngs: Cnn(config, rngs), macs)


def image_classifier(
    config: CnnConfig | ResnetConfig, name: str, make: Callable[[nnx.Rngs], nnx.Module], macs: int
) -> Model:
    """Return the `Model` of a module that maps images and a context to logits.

    Batches have `images` float32 [batch, size, size, channels], `labels` and `weights` [batch].
    `macs` are the multiplications of one image's forward pass.
    """
    init, axes, bind = layers.functional(make)
    image = (config.image_size, config.image_size, IMAGE_CHANNELS)

    def head(params: Params, _: None, batch: Batch, context: Context) -> tuple[Array, Sums]:
        """Return logits [batch, classes], and batch statistics or {}."""
        network = bind(params)
        logits = network(batch["images"].astype(context.dtype), context)
        return logits, layers.batch_statistics(network, context)

    return Model(
        name=name,
        init=init,
        axes=axes,
        dims=config.dims,
        head=head,
        objective=classification,
        flops_per_token={"causal": 6.0 * macs, "full": 6.0 * macs},
        unit="images",
        rules=config.rules,
        num_classes=config.num_classes,
        row={
            "images": jax.ShapeDtypeStruct(image, jnp.float32),
            "labels": jax.ShapeDtypeStruct((), jnp.int32),
            "weights": jax.ShapeDtypeStruct((), jnp.float32),
        },
    )


class Cnn(nnx.Module):
    """Conv, relu, pool; conv, relu, pool; dense, relu; dense."""

    def __init__(self, config: CnnConfig, rngs: nnx.Rngs):
        kernel, (first, second) = (KERNEL_SIZE, KERNEL_SIZE), config.channels
        self.conv_1 = Affine(rngs, (*kernel, IMAGE_CHANNELS, first), None, "channels_1")
        self.conv_2 = Affine(rngs, (*kernel, first, second), "channels_1", "channels_2")
        self.dense_1 = Affine(rngs, (config.flat_size, config.mlp_dim), "flat", "hidden")
        self.dense_2 = Affine(rngs, (config.mlp_dim, config.num_classes), "hidden", None)

    def __call__(self, images: Array, context: Context) -> Array:
        """Map images [batch, height, width, channels] to logits [batch, classes]."""
        with jax.named_scope("conv_1"):
            x = layers.conv(context.enter(images), self.conv_1.kernel[...])
            x = halve(jax.nn.relu(self.conv_1.add_bias(x)))
        with jax.named_scope("conv_2"):
            x = context.leave(layers.conv(x, self.conv_2.kernel[...]))
            x = halve(jax.nn.relu(self.conv_2.add_bias(x)))
        with jax.named_scope("dense_1"):
            x = context.enter(x.reshape(x.shape[0], -1))
            product = context.dot(
                "batch flat, flat hidden -> batch hidden", x, self.dense_1.kernel[...]
            )
            x = jax.nn.relu(self.dense_1.add_bias(product))
        with jax.named_scope("dense_2"):
            dims = "batch hidden, hidden classes -> batch classes"
            product = context.dot(dims, x, self.dense_2.kernel[...])
            return self.dense_2.add_bias(context.leave(product))


class Affine(nnx.Module):
    """A kernel and a bias; the bias is added after the sum of a row-parallel product.

    Both are drawn from U(−1/√fan_in, 1/√fan_in), PyTorch's default (He et al. 2015 with a = √5).
    """

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: str | None, out: str | None):
        bound = 1 / math.sqrt(math.prod(shape[:-1]))
        area = (None,) * (len(shape) - 2)
        self.kernel = layers.uniform(rngs, shape, bound, *area, fan_in, out)
        self.bias = layers.uniform(rngs, shape[-1:], bound, out)

    def add_bias(self, x: Array) -> Array:
        """Add the bias to x [..., out]."""
        return x + self.bias[...].astype(x.dtype)


def halve(x: Array) -> Array:
    """Max-pool x [batch, height, width, channels], 2 × 2; on CPUs faster than `reduce_window`."""
    batch, height, width, channels = x.shape
    return jnp.max(x.reshape(batch, height // 2, 2, width // 2, 2, channels), axis=(2, 4))
