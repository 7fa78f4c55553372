"""The tensor axis: what a model's three hooks do when one layer is split over several devices.

Column-parallel products follow `enter`, row-parallel products precede `leave`. With sequence
parallelism the activations between blocks are split by sequence, so the all-reduce after a
row-parallel product becomes a reduce-scatter and its other half, the all-gather, moves to the next
`enter`: the same bytes on the wire, and norms, residuals and dropout on 1/tensor of the tokens.

Sources: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.sharding import Layout
from jaxdist.core.types import Array, Sums

AXIS = "tensor"
SEQUENCE_DIM = 1


def hooks(layout: Layout) -> dict[str, Any]:
    """The `enter`, `leave`, `split` and `tensor_index` of a `Context` on this layout."""
    if layout.sizes[AXIS] == 1 or layout.auto_tensor:
        return {}
    if layout.sequence_parallel:
        return {
            "enter": lambda x: collectives.all_gather(x, AXIS, dim=SEQUENCE_DIM),
            "leave": lambda x: collectives.reduce_scatter(x, AXIS, dim=SEQUENCE_DIM),
            "split": _split_sequence,
            "tensor_index": lambda: collectives.group_index(AXIS),
        }
    return {
        # Forward moves nothing; backward sums the gradients of the column-parallel parts.
        "enter": lambda x: collectives.vary(x, AXIS),
        "leave": lambda x: collectives.all_reduce(x, AXIS),
        "tensor_index": lambda: collectives.group_index(AXIS),
    }


def add_layers(sums: Sums) -> Sums:
    """Sums of several layers, each float32 [layers], added up: scalars equal on all tensor devices.

    One that varies over the axis holds this device's part, of its tokens or heads, and is added
    over the axis too. One that does not vary is the same everywhere and counts once.
    """
    total = {name: jnp.sum(values, axis=0) for name, values in sums.items()}
    return {
        name: collectives.all_reduce(value, AXIS)
        if AXIS in collectives.varying_axes(value)
        else value
        for name, value in total.items()
    }


def _split_sequence(x: Array) -> Array:
    length = x.shape[SEQUENCE_DIM] // lax.axis_size(AXIS)
    start = collectives.group_index(AXIS) * length
    return lax.dynamic_slice_in_dim(x, start, length, axis=SEQUENCE_DIM)
