"""Frozen weights in blocks of 64 values that share a scale: NF4 with double quantization, and int8.

A block is 64 consecutive inputs of one output of the global parameter, as in bitsandbytes, which
stores [outputs, inputs] row by row. Blocks do not depend on the mesh, and no shard cuts one. So the
values are the same on every mesh, and an all-gather moves the stored bytes.

    format   code                      scale of a block                           bits per weight
    nf4      4 bits, two in a byte     8 bits, a range per 256 blocks, a mean     4.1 to 4.6
    int8     8 bits                    float32                                    8.5

References:
    Dettmers et al. 2023, "QLoRA", sections 3 and appendix E (NF4, double quantization); Dettmers et
    al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1 (the 8-bit codes).
    bitsandbytes 0.50 on CPUs: codes, scales of scales and nested codes are equal bit for bit; the
    mean of the scales may differ in its last bit, because it is a sum by halves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sized
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Float32

from jaxdist.core.types import Array, Dims, Storage
from jaxdist.core.weights import CompositeWeight, Parameter, SumOver

Format: TypeAlias = Literal["nf4", "int8"]

BLOCK = 64
"""Values that share a scale."""

_NESTED = 256
"""Scales that share a range."""

# Quantiles of the normal distribution, scaled to [-1, 1] (appendix E).
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


@functools.cache
def dynamic_map(is_signed: bool) -> Float32[np.ndarray, "codes=256"]:
    """Return the 256 values of the codes, ascending from about -1 (0 without signs) to 1.

    Decade i of seven, 10^(i - 7) to 10^(i - 6), has the centers of 2^i equal intervals for each
    sign, or 2^(i + 1) without signs (Dettmers et al. 2022, section 1.3).
    """
    values = [0.0, 1.0]
    for i in range(7):
        count = 2 ** (i + (not is_signed))
        # bitsandbytes computes the borders with PyTorch's linspace, which starts at both ends.
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        index = np.arange(count + 1)
        up, down = np.float32(0.1) + step * index, 1 - step * index[::-1]
        borders = np.where(index < (count + 1) // 2, up, down).astype(np.float32)
        centers = np.float32(10.0 ** (i - 6)) * ((borders[:-1] + borders[1:]) / np.float32(2))
        values += [*centers, *(-centers if is_signed else [])]
    return np.sort(np.asarray(values, np.float32))


DYNAMIC = dynamic_map(True)
"""The values of a scale in 8 bits, float32 [256]."""

_GRID = 32767.5  # bitsandbytes on CPUs rounds to 65,536 steps before it looks up a code


def _nearest_dynamic() -> np.ndarray:
    """Return the code of each value i / 32767.5 - 1, uint8 [65536]; values round to this grid."""
    grid = np.arange(65536, dtype=np.float32) / np.float32(_GRID) - np.float32(1)
    middles = (DYNAMIC[:-1] + DYNAMIC[1:]) / np.float32(2)
    return np.searchsorted(middles, grid).astype(np.uint8)


_NEAREST = _nearest_dynamic()


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Layout of the quantized blocks of an array [(layers,) (experts,) *inputs, *outputs].

    Attributes:
        has_experts: each expert is quantized by itself.
        inputs: sizes of its input dims, which hold the blocks in this order.
        parts: number of outputs, along output dim `dim`, of each tensor that is quantized alone.
        is_outer: the tensors' rows are ordered by dim `dim` first, not by the order of the outputs.
    """

    format: Format
    inputs: tuple[int, ...]
    parts: tuple[int, ...]
    dim: int
    is_outer: bool = False
    has_experts: bool = False
    is_stacked: bool = True

    @property
    def per_output(self) -> int:
        """Number of blocks of one output."""
        return max(1, math.prod(self.inputs) // BLOCK)

    @property
    def run(self) -> int:
        """Number of adjacent blocks of an output for which one second-level scale is stored."""
        if _NESTED % self.per_output == 0:
            return self.per_output
        # At most 4, so that many meshes divide the rest.
        return math.gcd(self.per_output, 4)

    @property
    def unit(self) -> int:
        """Number of consecutive inputs that must stay on one device."""
        shares_range = self.format == "nf4" and _NESTED % self.per_output
        return BLOCK * (self.run if shares_range else 1)

    def record(self, dims: Dims) -> BlockWeight:
        """Return a `BlockWeight` of `Parameter` records for a weight of these logical dims."""
        stack = dims[: self.is_stacked + self.has_experts]
        outs = dims[len(stack) + len(self.inputs) :]
        flat = (*dims[: len(stack) + 1], *outs)

        def own(names: tuple[str | None, ...], storage: Storage, count: int = 0) -> Parameter:
            return Parameter(
                names, storage=storage, update="none", keeps_dtype=True, num_weights=count
            )

        if self.format == "int8":
            return self._weight(own(flat, "int8", 1), {"absmax": own(flat, "float32")}, outs)
        ranges = flat if self.run < self.per_output else (*stack, None, *outs)
        scales = {
            "absmax": own(flat, "uint8"),
            "range": own(ranges, "float32"),
            "mean": own((*stack, *[None] * (1 + len(outs))), "float32"),
        }
        return self._weight(own(flat, "uint8", 2), scales, outs)

    def quantize(self, w: Array) -> BlockWeight:
        """Return the `BlockWeight` of w [(layers,) (experts,) *inputs, *outputs], any float."""
        one = self._quantize_layer
        if not self.is_stacked:
            return one(w)
        return jax.lax.map(jax.vmap(one) if self.has_experts else one, w)

    def quantize_on_mesh(self, w: Array, target: BlockWeight) -> BlockWeight:
        """Quantize w [(layers,) (experts,) *inputs, *outputs] with the shardings of `target`."""
        sharding: Any = w.sharding
        run, stages = self.quantize, [*sharding.spec, None][0] if self.is_stacked else None
        if stages is not None:  # a loop over all layers would gather them
            stage: dict[str, Any] = {"mesh": sharding.mesh, "axis_names": {stages}}
            run = jax.shard_map(run, in_specs=P(stages), out_specs=P(stages), **stage)
        shardings = jax.tree.map(lambda x: x.sharding, target)
        return jax.jit(run, out_shardings=shardings)(w)

    def _weight(self, codes: Any, scales: dict[str, Any], outs: Sized) -> BlockWeight:
        return BlockWeight(codes, scales, self.format, self.inputs[1:], len(outs))

    def _quantize_layer(self, w: Array) -> BlockWeight:
        """Return the `BlockWeight` of one layer, from w [*inputs, *outputs]."""
        outs = w.shape[len(self.inputs) :]
        blocks = w.astype(jnp.float32).reshape(self.per_output, BLOCK, *outs)
        absmax = jnp.max(jnp.abs(blocks), 1)
        share = blocks * _inverse(absmax)[:, None]
        if self.format == "int8":
            codes = jnp.round(share * 127).astype(jnp.int8).reshape(-1, *outs)
            return self._weight(codes, {"absmax": absmax}, outs)
        middles = (NF4[:-1] + NF4[1:]) / np.float32(2)
        codes = sum((share > middle).astype(jnp.uint8) for middle in middles)
        pairs = jnp.asarray(codes).reshape(-1, 2, *outs)
        scales = self._quantize_scales(absmax)
        return self._weight(pairs[:, 0] << 4 | pairs[:, 1], scales, outs)

    def _quantize_scales(self, absmax: Array) -> dict[str, Array]:
        """Return a `BlockWeight`'s `scales` in nf4, from float32 scales [blocks, *outputs]."""
        parts, start = [], 0
        for size in self.parts:
            part = jax.lax.slice_in_dim(absmax, start, start + size, axis=1 + self.dim)
            # Rows of the tensor first, then the blocks of a row, as in bitsandbytes.
            part = jnp.moveaxis(part, 1 + self.dim, 1) if self.is_outer else part
            part = jnp.moveaxis(part, 0, -1)
            scales = _quantize_flat(part.reshape(-1))
            rows = {name: jnp.moveaxis(x.reshape(part.shape), -1, 0) for name, x in scales.items()}
            if self.is_outer:
                rows = {name: jnp.moveaxis(x, 1, 1 + self.dim) for name, x in rows.items()}
            index: list[Any] = [slice(0, 1)] * absmax.ndim
            index[1 + self.dim] = slice(None)
            rows["range"], rows["mean"] = rows["range"][:: self.run], rows["mean"][tuple(index)]
            parts.append(rows)
            start += size
        return {
            name: jnp.concatenate([part[name] for part in parts], 1 + self.dim) for name in parts[0]
        }


def _inverse(absmax: Array) -> Array:
    """Return 1 / absmax [blocks, *outputs], and 0 for a block of zeros."""
    return jnp.where(absmax > 0, 1 / jnp.where(absmax > 0, absmax, 1), 0)


def _quantize_flat(absmax: Float[Array, " scales"]) -> dict[str, Array]:
    """Return "absmax" (codes, uint8), "range" and "mean" for each scale of a tensor [scales]."""
    count = absmax.shape[0]
    mean = _sum_by_halves(absmax) / count
    rest = absmax - mean
    blocks = jnp.pad(rest, (0, -count % _NESTED)).reshape(-1, _NESTED)
    ranges = jnp.max(jnp.abs(blocks), 1, keepdims=True)
    grid = jnp.floor((blocks * _inverse(ranges) + 1) * _GRID + 0.5)
    codes = jnp.take(_NEAREST, jnp.clip(grid, 0, 65535).astype(jnp.int32))
    every = lambda x: jnp.broadcast_to(x, blocks.shape).reshape(-1)[:count]
    return {"absmax": every(codes), "range": every(ranges), "mean": jnp.full(count, mean)}


def _sum_by_halves(x: Float[Array, " n"]) -> Array:
    """Return the sum, float32 [], of elementwise additions only: equal for every sharding."""
    x = jnp.pad(x, (0, (1 << (len(x) - 1).bit_length()) - len(x)))
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockWeight(CompositeWeight):
    """A frozen weight in blocks; arrays start with [layers?, experts?].

    Attributes:
        codes: nf4: uint8 [inputs / 2, *outputs], the first of two inputs in the high bits. int8:
            int8 [inputs, *outputs]. Input dims are flattened into the first one.
        scales: int8: "absmax", float32 [blocks, *outputs]. nf4: "absmax", uint8 codes of
            (scale - mean) / range; "range", float32 [blocks / `BlockLayout.run`, *outputs];
            "mean", float32, with size 1 in every dim but the one of fused tensors.
        inner: sizes of the input dims after the first.
        num_outputs: number of output dims.
    """

    codes: Any
    scales: dict[str, Any]
    format: Format = dataclasses.field(metadata={"static": True})
    inner: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    num_outputs: int = dataclasses.field(metadata={"static": True})

    def astype(self, dtype: Any) -> Array:
        """Return the weight [layers?, experts?, *inputs, *outputs] in a floating-point dtype."""
        dim = self.codes.ndim - self.num_outputs - 1
        if self.format == "nf4":
            halves = jnp.stack([self.codes >> 4, self.codes & 15], dim + 1)
            values = jnp.take(NF4, halves.astype(jnp.int32))
        else:
            values = self.codes.astype(jnp.float32) / 127
        scales = self._scales(dim)
        shape = self.codes.shape
        split = (*shape[:dim], scales.shape[dim], BLOCK, *shape[dim + 1 :])
        values = values.reshape(split) * jnp.expand_dims(scales, dim + 1)
        return values.reshape(*shape[:dim], -1, *self.inner, *shape[dim + 1 :]).astype(dtype)

    def _scales(self, dim: int) -> Array:
        """Return a scale per block along `dim`, float32 [layers?, experts?, blocks, *outputs]."""
        absmax = self.scales["absmax"]
        if self.format == "int8":
            return absmax
        ranges, shape = self.scales["range"], absmax.shape
        runs = ranges.shape[dim]
        split = (*shape[:dim], runs, shape[dim] // runs, *shape[dim + 1 :])
        shares = jnp.take(DYNAMIC, absmax.astype(jnp.int32)).reshape(split)
        # A fused multiply-add would round differently from program to program.
        products = jax.lax.reduce_precision(shares * jnp.expand_dims(ranges, dim + 1), 8, 23)
        return products.reshape(shape) + self.scales["mean"]

    def multiply(
        self, dot: Callable[..., Array], dims: str, x: Array, *, out_dtype: Any, sum_over: SumOver
    ) -> Array:
        """Return the product [*dims after the arrow] of x and the weight cast to the dtype of x."""
        del sum_over
        run = lambda x, weight: dot(dims, x, weight.astype(x.dtype), out_dtype=out_dtype)
        return jax.checkpoint(run)(x, self)  # backward saves only the stored arrays

    def dense(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Return shape and sharding of the dequantized weight [*dims], with this dtype."""
        shape, dim = self.codes.shape, self.codes.ndim - self.num_outputs - 1
        spec = [*self.codes.sharding.spec] + [None] * (len(shape) - len(self.codes.sharding.spec))
        inputs = shape[dim] * (2 if self.format == "nf4" else 1) // math.prod(self.inner)
        spec = [*spec[: dim + 1], *[None] * len(self.inner), *spec[dim + 1 :]]
        sharding = self.codes.sharding.update(spec=P(*spec))
        return jax.ShapeDtypeStruct(
            (*shape[:dim], inputs, *self.inner, *shape[dim + 1 :]), dtype, sharding=sharding
        )


def is_quantized(node: Any) -> bool:
    """Return True for a `BlockWeight`; used as `is_leaf` of `jax.tree` functions."""
    return isinstance(node, BlockWeight)


def to_quantize(
    target: Any, blocks: Mapping[str, BlockLayout]
) -> tuple[Any, Callable[[str, Any], Any]]:
    """Return a tree of shapes to load in place of `target`, and a function that quantizes a leaf.

    `target` has shapes and shardings. The result has one dense array per quantized weight, bfloat16
    [(layers,) (experts,) *inputs, *outputs]; weights that are loaded do not change.
    `blocks` maps names to layouts. The function maps (name, loaded leaf) to the one to store.
    """
    quantized: dict[str, tuple[BlockLayout, BlockWeight]] = {}

    def dense(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not is_quantized(leaf) or isinstance(leaf.codes, jax.Array):
            return leaf
        quantized[name] = blocks[name], leaf
        return leaf.dense(jnp.bfloat16)

    def store(name: str, x: Any) -> Any:
        if name not in quantized:
            return x
        own, leaf = quantized[name]
        return own.quantize_on_mesh(x, leaf)

    return jax.tree_util.tree_map_with_path(dense, target, is_leaf=is_quantized), store
