"""The data axis: replicas of the model; each one processes different rows of the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdist.core import collectives
from jaxdist.core.axis import Axis
from jaxdist.core.types import Batch

DATA = Axis(
    name="data",
    short="dp",
    help="replicas, each with its own rows of the batch",
    moves="gradients, and with ZeRO also weights",
    weights="replicated",
    splits_rows=True,
    sums_gradients="always",
    sums_loss=True,
    shrinks=True,
)


def number_rows(batch: Batch, axes: tuple[str, ...]) -> Batch:
    """Return the batch with `rows`, int32 [local rows]: each row's index in the global batch."""
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    first = collectives.group_index(axes) * num_rows if axes else 0
    return {**batch, "rows": first + jnp.arange(num_rows, dtype=jnp.int32)}


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """Split local rows [rows, ...] into [num_microbatches, rows / num_microbatches, ...]."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % num_microbatches:
        raise ValueError(
            f"train.num_microbatches={num_microbatches} does not divide the {rows} rows that each "
            "device has of a batch. Use a divisor, or another train.global_batch_size."
        )
    return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
