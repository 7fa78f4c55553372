"""The context axis: splits the sequence of every row over devices, for rows too long for one.

Only attention reads positions of other devices (`attention/context_parallel.py`). A row is cut into
2n chunks for n devices, and device i holds chunks i and 2n−1−i (zig-zag). With only a causal mask,
every device then attends to the same number of keys.

Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers"; Grattafiori et al.
2024, "The Llama 3 Herd of Models", section 3.3.2 (context parallelism, the 2n chunks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.axis import ActivationSizes, Axis, Traffic, Workload, axes_of
from jaxdist.core.types import Array, Batch


def chunk_order(size: int) -> np.ndarray:
    """Return the chunk indices of a row in device order on `size` devices, int [2 · size]."""
    return np.array([chunk for i in range(size) for chunk in (i, 2 * size - 1 - i)])


def device_order(seq_len: int, size: int) -> np.ndarray:
    """Return the positions of a row in device order on `size` devices, int64 [seq_len]."""
    if size == 1:
        return np.arange(seq_len)
    return np.arange(seq_len).reshape(2 * size, -1)[chunk_order(size)].reshape(-1)


def place_batch(batch: Mapping[str, Any], sharding: NamedSharding) -> Batch:
    """Shard rows [rows, seq, ...], in sequence order and equal in all processes, for the step."""
    size = num_position_shards(sharding)

    def shard(x: Any) -> Array:
        if x.ndim > 1 and size > 1:
            x = np.asarray(x)[:, device_order(x.shape[1], size)]
        return jax.device_put(x, NamedSharding(sharding.mesh, P(*sharding.spec[: x.ndim])))

    return {name: shard(x) for name, x in batch.items()}


def num_position_shards(sharding: NamedSharding) -> int:
    """Return the number of devices that share each row of a batch of this sharding."""
    return math.prod(sharding.mesh.shape[name] for name in axes_of(P(*sharding.spec[1:2])))


def local_position_ids(length: int) -> Array:
    """Return the index of each local position in its row, int32 [length]."""
    size = collectives.group_size(CONTEXT.name)
    return position_ids_of(collectives.group_index(CONTEXT.name), length, size)


def position_ids_of(device: Any, length: int, size: int) -> Array:
    """Return the position ids of a device (an index, maybe traced) of `size`, int32 [length]."""
    chunk = length // 2
    inside = jnp.arange(chunk, dtype=jnp.int32)
    return jnp.concatenate([device * chunk + inside, (2 * size - 1 - device) * chunk + inside])


def imbalance(
    size: int,
    seq_len: int,
    window: int = 0,
    position_ids: np.ndarray | None = None,
    inner: int = 1,
    rows: int = 1,
) -> float:
    """Return attention's load imbalance, max / mean − 1 of keys per device, mean of microbatches.

    Attention is causal and limited to the newest `window` keys (0 = all). `position_ids`, int
    [num_rows, seq_len], are positions inside documents. Groups of `inner` neighbors exchange heads
    and share their work equally. The work of the `rows` of a microbatch is summed.
    """
    seen = 1 + (np.arange(seq_len)[None] if position_ids is None else position_ids.astype(np.int64))
    chunks = np.minimum(seen, window or seq_len).reshape(len(seen), 2 * size, -1).sum(axis=2)
    each = chunks[:, :size] + chunks[:, : size - 1 : -1]
    rows = min(rows, len(seen))
    full = each[: len(seen) // rows * rows]
    work = full.reshape(-1, rows, size // inner, inner).sum(axis=(1, 3))
    return float(np.mean(work.max(axis=1) / work.mean(axis=1)) - 1)


def _problems(size: int, workload: Workload) -> list[str]:
    if workload.context_len is None:
        return [
            f"mesh cp={size}: this model's rows cannot be split by sequence: "
            "Model.context_parallel is false, as for images and for models of your own that do not "
            "set it. Use cp=1 and give the devices to another axis."
        ]
    problems = []
    if workload.context_len % (2 * size):
        nearest = -(-workload.context_len // (2 * size)) * 2 * size
        problems.append(
            f"mesh cp={size} does not divide train.seq_len={workload.context_len}: each device "
            f"holds two of {2 * size} equal chunks of a row. Use train.seq_len={nearest}, or a cp "
            "of which twice divides it."
        )
    if workload.attention_dropout:
        problems.append(dropout_problem(size, workload.attention_dropout))
    return problems


def dropout_problem(size: int, rate: float) -> str:
    """Return why attention dropout is impossible if `size` devices share a row."""
    return (
        f"mesh cp={size} with model.attention_dropout={rate}: dropped probabilities would need the "
        "complete row on one device. Use cp=1, or model.attention_dropout=0."
    )


def _traffic(sizes: ActivationSizes) -> list[Traffic]:
    layers = sizes.num_layers * sizes.num_microbatches
    forwards = layers * (sizes.num_forwards + sizes.repeats_attention)
    keys, wide = sizes.key_value_bytes, sizes.widening * sizes.key_value_bytes
    held = keys + sizes.segment_bytes
    if sizes.exchange == "all_gather":
        devices = sizes.context_size
        return [
            Traffic("all-gather", "keys and values", devices * held, forwards + layers),
            Traffic("reduce-scatter", "keys and values", devices * wide, layers),
        ]
    moved = []
    if sizes.exchanged_heads > 1:
        # Forward exchanges queries, keys, values and outputs; backward exchanges their gradients.
        both = 2 * sizes.query_bytes + keys
        # If only attention's output was saved, backward exchanges its inputs again.
        again = sizes.recomputes and not sizes.repeats_attention
        group = sizes.exchanged_heads
        documents, of_documents = (
            group * sizes.segment_bytes,
            forwards if sizes.segment_bytes else 0,
        )
        moved = [
            Traffic("all-to-all", "heads", both, forwards + layers, group),
            Traffic("all-to-all", "heads", sizes.query_bytes + keys, layers if again else 0, group),
            Traffic("all-to-all", "documents", documents, of_documents, group),
        ]
    steps = sizes.context_size // sizes.exchanged_heads
    if steps > 1:
        # Backward and the forward that it repeats start alike: local keys are sent once for both.
        sends = (steps - 1) * (forwards + layers) - layers * sizes.repeats_attention
        moved += [
            Traffic("collective-permute", "keys and values", held, sends),
            Traffic("collective-permute", "gradients of keys", wide, (steps - 1) * layers),
        ]
    return moved


CONTEXT = Axis(
    name="context",
    short="cp",
    help="devices that share the sequence of every row",
    moves="keys and values, or heads, in every layer",
    weights="replicated",
    joins_fsdp=True,
    splits_positions=True,
    # The KV cache of generation.
    dims=("cache",),
    sums_gradients="always",
    sums_loss=True,
    proposed=False,
    complexity=2,
    problems=_problems,
    traffic=_traffic,
    hooks=lambda sequence_parallel: {"position_ids": local_position_ids},
)
