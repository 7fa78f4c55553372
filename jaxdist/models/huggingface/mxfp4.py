"""Read weights in MXFP4, the format of gpt-oss's experts, as bfloat16.

32 weights along a product's inputs are 4-bit floats (E2M1, two in a byte, the first in the low
bits) that share a power of two (E8M0). `NAME_blocks` uint8 [experts, outputs, groups, 16] and
`NAME_scales` uint8 [experts, outputs, groups] replace the tensor NAME [experts, inputs, outputs].

Source: Rouhani et al. 2023, "OCP Microscaling Formats (MX) Specification", version 1.0, sections
5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jaxdist.models.huggingface.safetensors import StoredTensor

GROUP = 32
"""Weights that share a scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
_BIAS = 127


def with_unpacked(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a directory, with `Mxfp4Tensor`s for pairs of blocks and scales."""
    names = {name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")}
    names = {name for name in names if f"{name}_scales" in tensors}
    parts = {f"{name}_{part}" for name in names for part in ("blocks", "scales")}
    others = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return others | {
        name: Mxfp4Tensor.of(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]) for name in names
    }


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A tensor [experts, inputs, ...outputs] in bfloat16; `file` and `offset` are the blocks'."""

    scales: StoredTensor

    @classmethod
    def of(cls, blocks: StoredTensor, scales: StoredTensor) -> Mxfp4Tensor:
        """Return the bfloat16 tensor that uint8 blocks and scales represent."""
        experts, outputs, groups = scales.shape
        shape = (experts, groups * GROUP, outputs)
        return cls(blocks.file, blocks.offset, shape, np.dtype(ml_dtypes.bfloat16), scales)

    def rows(self, first: int, count: int) -> StoredTensor:
        """Return the tensor itself: only all rows are ever requested."""
        assert first == 0 and count == self.shape[0], (first, count)
        return self

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read all values, or a block [*lengths of `index`], in bfloat16."""
        experts, inputs, *outputs = self.shape
        index = (*index, *(slice(None) for _ in range(len(self.shape) - len(index))))
        first, last, _ = index[1].indices(inputs)
        groups = slice(first // GROUP, -(-last // GROUP))
        rest = (index[0], *index[2:], groups)
        stored = (experts, *outputs, inputs // GROUP)
        packed = StoredTensor(self.file, self.offset, (*stored, GROUP // 2), np.dtype(np.uint8))
        codes = packed.read(rest)
        pairs = np.stack([_VALUES[codes & 15], _VALUES[codes >> 4]], -1)
        powers = self.scales.reshape(stored).read(rest).astype(np.int32) - _BIAS
        values = np.ldexp(pairs, powers[..., None, None])
        values = values.reshape(*values.shape[:-3], values.shape[-3] * GROUP)
        start = groups.start * GROUP
        return np.moveaxis(values[..., first - start : last - start], -1, 1).astype(self.dtype)
