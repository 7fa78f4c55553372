"""The tensor axis: splits each layer over several devices. Contains the hooks that models call.

`enter` precedes column-parallel products, `leave` follows row-parallel ones and is an all-reduce.
With sequence parallelism `leave` is a reduce-scatter, and the next `enter` an all-gather.

Sources: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives, types
from jaxdist.core.axis import ActivationSizes, Axis, Traffic
from jaxdist.core.types import Array, Sums

_SEQUENCE_DIM = 1


def _traffic(sizes: ActivationSizes) -> list[Traffic]:
    """Return traffic of all layers' activations, and three float32 per token of the split loss."""
    # One at the embedding and one at the head, each in forward and backward.
    ends = 2
    # Two in each forward and two in backward.
    per_layer = 2 * sizes.num_forwards + 2
    # With remat, product inputs are gathered again, but only attention's output is reduced again.
    gathers, reductions = (
        sizes.num_microbatches * ((per_layer + again) * sizes.num_layers + ends)
        for again in (2 * sizes.recomputes, sizes.reduces_again)
    )
    scalars = Traffic("all-reduce", "loss", 3.0 * 4 * sizes.num_tokens, sizes.num_microbatches)
    if not sizes.sequence_parallel:
        return [Traffic("all-reduce", "activations", sizes.stream_bytes, reductions), scalars]
    return [
        Traffic("all-gather", "activations", sizes.stream_bytes, gathers),
        Traffic("reduce-scatter", "activations", sizes.stream_bytes, reductions),
        scalars,
    ]


def _hooks(sequence_parallel: bool) -> dict[str, Any]:
    """Return `enter`, `leave`, `tensor_index`; with sequence parallelism also `split`.

    Then `enter` maps [batch, seq_shard, ...] to [batch, seq, ...], seq_shard = seq / tp. `leave` is
    the reverse with a sum, and `split` the reverse without. Otherwise shapes do not change.
    """
    index = {"tensor_index": lambda: collectives.group_index(TENSOR.name)}
    if not sequence_parallel:
        return {
            # No communication in forward; backward sums the gradients of the column-parallel parts.
            "enter": lambda x: collectives.vary(x, TENSOR.name),
            "leave": lambda x: collectives.all_reduce(x, TENSOR.name),
            **index,
        }
    return {
        "enter": lambda x: collectives.all_gather(x, TENSOR.name, dim=_SEQUENCE_DIM),
        "leave": lambda x: collectives.reduce_scatter(x, TENSOR.name, dim=_SEQUENCE_DIM),
        "split": lambda x: _split_sequence(x),
        **index,
    }


def add_layers(sums: Sums) -> Sums:
    """Add up `Sums` [layers, ...] of layers, also over the tensor axis if they vary over it."""
    total = {name: jnp.sum(values, axis=0) for name, values in sums.items()}
    return {
        name: collectives.all_reduce(value, TENSOR.name)
        if TENSOR.name in collectives.varying_axes(value)
        else value
        for name, value in total.items()
    }


def dot_by_position(dims: str, x: Array, w: Array, *, out_dtype: Any = None) -> Array:
    """Compute `types.dot` of x [batch, seq, ...] in the order [seq, batch, ...]; same result."""
    inputs, _, out = dims.partition("->")
    left, right = inputs.split(",")
    if left.split()[:2] != ["batch", "seq"] or out.split()[:2] != ["batch", "seq"]:
        return types.dot(dims, x, w, out_dtype=out_dtype)
    swap = lambda names: " ".join(["seq", "batch", *names.split()[2:]])
    product = types.dot(
        f"{swap(left)},{right}->{swap(out)}", x.swapaxes(0, 1), w, out_dtype=out_dtype
    )
    return product.swapaxes(0, 1)


def _split_sequence(x: Array) -> Array:
    """Return this device's [batch, seq_shard, ...] of [batch, seq, ...]; no communication."""
    length = x.shape[_SEQUENCE_DIM] // lax.axis_size(TENSOR.name)
    start = collectives.group_index(TENSOR.name) * length
    return lax.dynamic_slice_in_dim(x, start, length, axis=_SEQUENCE_DIM)


TENSOR = Axis(
    name="tensor",
    short="tp",
    help="devices that share the heads, hidden units and vocabulary of each layer",
    moves="activations, in every layer",
    weights="split",
    dims=("vocab", "heads", "kv_heads", "mlp"),
    # With sequence parallelism devices hold different tokens; without it, the same tokens.
    sums_gradients="sequence_parallel",
    complexity=2,
    divides="each device computes an equal part of it",
    traffic=_traffic,
    hooks=_hooks,
)
