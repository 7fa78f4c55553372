"""Attention of a job: keys per query, load imbalance, bytes of scores, scratch of cuDNN."""

from __future__ import annotations

import functools

import numpy as np

from jaxdist.core.attention.cudnn import DOCUMENTS
from jaxdist.core.parallel import context
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.hardware import Gpu
from jaxdist.plan.estimate.job import WIDE, Job

_DOCUMENTS_PER_ROW = 16
_EXAMPLE_ROWS, _EXAMPLE_PART = 32, 64  # rows; positions of each of the 2 · cp chunks of a row


def heads(job: Job) -> int:
    """Return the number of query heads on one device; 0 if the model is not a decoder."""
    return job.decoder.num_heads // job.spec[TENSOR] if job.decoder else 0


def keys_by_window(job: Job) -> dict[int, float]:
    """Return window (0 = none) -> its layers' part of the mean number of keys that a query sees."""
    total = {}
    for window, number in job.layers_by_window.items():
        near = min(job.seq_len, window or job.seq_len)
        seen = near - near * near / (2 * job.seq_len)
        total[window] = number / sum(job.layers_by_window.values()) * seen
    return total


def keys_seen(job: Job) -> float:
    """Return the keys computed per query on the busiest device, mean of layers; all with "xla"."""
    if job.attention == "xla":
        return float(job.seq_len)
    return (1 + imbalance(job)) * sum(keys_by_window(job).values())


def imbalance(job: Job) -> float:
    """Return the load imbalance of attention: (keys of the busiest device / mean) − 1."""
    plan = job.plan.exchange
    if plan is None or job.decoder is None:
        return 0.0
    packed = job.config.data.packs_documents
    sizes = job.spec[context.CONTEXT], job.seq_len
    keys = keys_by_window(job)
    weighted = (
        _imbalance(*sizes, window, plan.inner, job.micro_rows, packed=packed) * number
        for window, number in keys.items()
    )
    return sum(weighted) / sum(keys.values())


@functools.lru_cache(maxsize=1024)
def _imbalance(
    size: int, seq_len: int, window: int, inner: int, rows: int, *, packed: bool
) -> float:
    if not packed:
        return context.imbalance(size, seq_len, window, None, inner)
    # The imbalance is the same for shorter rows, which are faster to count.
    length = 2 * size * _EXAMPLE_PART
    rows = min(rows, _EXAMPLE_ROWS)
    random = np.random.default_rng(0).random((_EXAMPLE_ROWS, length))
    index = np.arange(length)
    first = np.where(random < _DOCUMENTS_PER_ROW / length, index, 0)
    positions = index - np.maximum.accumulate(first, axis=1)
    scaled = -(-window * length // seq_len)
    return context.imbalance(size, length, scaled, positions, inner, rows)


def score_bytes(job: Job) -> int:
    """Return the bytes of one layer's float32 scores in the dense kernel; 0 with any other."""
    if job.attention != "xla":
        return 0
    return WIDE * job.micro_rows * heads(job) * job.seq_len**2


def block_bytes(job: Job) -> float:
    """Return the bytes of scores per layer that block-wise attention moves; 0 without it."""
    if job.attention != "blockwise":
        return 0.0
    return 4.0 * WIDE * job.tokens * heads(job) * keys_seen(job)


def workspace(job: Job) -> int:
    """Return scratch bytes of cuDNN's attention backward that the compiler omits; 0 without it."""
    if job.attention != "cudnn" or job.decoder is None:
        return 0
    # Exchanging heads for positions keeps heads × positions constant.
    rows = heads(job) * job.tokens
    if job.config.data.packs_documents:  # cuDNN processes each document as a row
        rows *= DOCUMENTS
    grouped = job.decoder.num_kv_heads != job.decoder.num_heads
    return cudnn_scratch(rows, job.decoder.head_dim, shares_keys=grouped, gpu=job.cluster.gpu)


def cudnn_scratch(rows: int, width: int, *, shares_keys: bool, gpu: Gpu) -> int:
    """Return the scratch bytes that cuDNN's attention backward requests at run time.

    Measured by compiling cuDNN's engines: exact for all tested shapes on Hopper; one measurement on
    Ampere. Blackwell is assumed equal to Hopper, Ada to Ampere. `rows` = batch × query heads ×
    positions. `shares_keys`: several query heads share one key head.
    """
    if float(gpu.compute_capability) < 9.0:
        return WIDE * rows * (3 * width + 1) + 128
    return WIDE * rows * (width * (1 + shares_keys) + 1) + 256
