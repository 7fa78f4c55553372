"""What one device computes in a step: floating point operations of products, bytes of the rest.

Products (matrix units), attention (its own kernel) and everything else, which waits for memory:
norms, rotations, activations, residuals, casts, the loss and the optimizer. Backward costs twice
the products of forward; what the remat policy recomputes comes on top. A product whose result only
feeds a residual is never recomputed: the compiler drops it.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxdist.core.parallel import context
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.plan.estimate.activations import Widths, heads, kept_per_layer, score_bytes
from jaxdist.plan.estimate.job import WIDE, Job
from jaxdist.plan.estimate.model_trace import Cost
from jaxdist.plan.estimate.muon import orthogonalised


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does for something.

    Attributes:
        products: FLOPs of matrix products.
        attention: FLOPs of attention, the masked half left out.
        memory_bytes: read and written by everything else.
    """

    products: float = 0.0
    attention: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both."""
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.memory_bytes + other.memory_bytes,
        )

    def __mul__(self, times: float) -> Work:
        """The same several times."""
        return Work(self.products * times, self.attention * times, self.memory_bytes * times)


_DOCUMENTS_OF_A_ROW = 16
_EXAMPLE_ROWS, _EXAMPLE_PART = 32, 64  # rows; positions of each of a row's 2 · cp parts

_ATTENTION_BACKWARD = 2.5
"""FLOPs of a fused attention backward in forwards: five products instead of two."""


def model_flops_per_token(job: Job, convention: str = "causal") -> float:
    """Useful FLOPs of one token or image, forward and backward, as the MFU counts them.

    A model that does not say is traced; backward counts as twice the forward, attention as whole.
    """
    if job.model.flops_per_token:
        return float(job.model.flops_per_token.get(convention, 0.0))
    cost = job.everything_kept
    return 3 * (job.model.num_layers * cost.layer.flops + cost.rest.flops) / job.seq_len


def layer_forward(job: Job) -> Work:
    """One layer's forward of one microbatch on one device."""
    if not job.is_decoder:
        return _traced(job, job.everything_kept.layer)
    widths = Widths.of(job)
    queries, keys = widths.queries, widths.keys
    weights = widths.stream * (2 * queries + 2 * keys + widths.up + widths.hidden)
    passes = job.engine.software
    elements = passes.query_passes * (queries + keys)
    elements += passes.hidden_passes * (widths.up + widths.hidden) / 2
    stream = passes.stream_passes * widths.stream * job.stream_tokens
    scores = keys_seen(job) * queries
    return Work(
        products=2.0 * job.tokens * weights,
        attention=4.0 * job.tokens * scores,
        memory_bytes=job.compute_bytes * (job.tokens * elements + stream)
        + 4 * score_bytes(job)
        + _block_bytes(job),
    )


def _traced(job: Job, cost: Cost) -> Work:
    """Forward of a traced part: its products, and what it keeps written once and read once."""
    rows, tensor = job.micro_rows, job.spec[TENSOR]
    return Work(products=rows * cost.flops / tensor, memory_bytes=2 * rows * cost.kept_bytes)


def layer_backward(job: Job) -> Work:
    """One layer's backward, with what the remat policy recomputes."""
    forward = layer_forward(job)
    backward = Work(
        products=2.0 * forward.products,
        attention=_ATTENTION_BACKWARD * forward.attention,
        memory_bytes=job.engine.software.backward_passes * forward.memory_bytes,
    )
    return backward + recomputed(job, forward) + _stacked(job)


_STACK_PASSES = 3
"""How often what a layer keeps passes through memory besides its kernels: a copy into the layers'
stack reads and writes it, and a copy out of it does again for about half, what products and
attention read; other kernels read a slice where it lies. Between remat policies the compiled
programs of GPT-2, 1.7B and 8B differ by 2.5 to 4.1 passes over what one keeps and the other not."""


_RECOMPUTED_UNROLLED = 0.75
"""Of forward's bytes besides products, what recomputing them moves in layers that are unrolled: the
compiled 1.7B takes 12 ms more with dots than with none, which recomputes nothing."""


def _stacked(job: Job) -> Work:
    """What one layer keeps, written into the stack of all layers and read back."""
    if job.unrolls or not job.engine.stacks_layers:
        return Work()
    return Work(memory_bytes=float(_STACK_PASSES * kept_per_layer(job)))


def recomputed(job: Job, forward: Work) -> Work:
    """What backward does again."""
    if job.remat == "none":
        return Work()
    if not job.is_decoder:  # what of the block is kept is not told apart: all of it runs again
        return forward
    widths = Widths.of(job)
    per_token = {
        "qkv": widths.stream * (widths.queries + 2 * widths.keys),
        "attention_out": widths.stream * widths.queries,
        "mlp_hidden": widths.stream * widths.up,
    }
    kept: set[str] = set()
    if job.remat == "dots":
        kept = set(per_token)
    elif job.remat.startswith("names:"):
        kept = set(job.remat.removeprefix("names:").split(","))
    again = sum(size for name, size in per_token.items() if name not in kept)
    # In a loop, fused into the kernels of backward that read it, it passes through memory no more
    # often than what is kept instead passes through stacks.
    share = 0.0 if job.engine.fuses_recomputation else 1.0
    return Work(
        products=2.0 * job.tokens * again,
        attention=0.0 if job.keeps_attention else forward.attention,
        memory_bytes=(_RECOMPUTED_UNROLLED if job.unrolls else share) * forward.memory_bytes,
    )


def head(job: Job) -> Work:
    """Loss and its gradients: three products, logits written and read in float32 by chunks.

    Of a traced model everything outside its layers.
    """
    if not job.is_decoder:
        forward = _traced(job, job.everything_kept.rest)
        return Work(products=3 * forward.products, memory_bytes=3 * forward.memory_bytes)
    d_model = job.model.dims["d_model"]
    columns = job.model.dims["vocab"] / job.spec[TENSOR]
    logit_passes = 5 * WIDE + 2 * job.compute_bytes
    kernel_passes = 2 * WIDE * d_model * columns * job.tokens / max(1, job.loss_chunk)
    return Work(
        products=6.0 * job.tokens * d_model * columns,
        memory_bytes=logit_passes * job.tokens * columns + kernel_passes,
    )


def embedding(job: Job) -> Work:
    """The lookup and its gradient's scatter, whose table is cleared first."""
    if not job.is_decoder:
        return Work()
    d_model = job.model.dims["d_model"]
    table = WIDE * job.model.dims["vocab"] * d_model / job.spec[TENSOR]
    rows = 4 * job.compute_bytes * job.tokens * d_model
    return Work(memory_bytes=table + rows)


def microbatch_extra(job: Job) -> Work:
    """Per microbatch: weights cast, and gradients added to those before."""
    casts = (WIDE + job.compute_bytes) * job.total(job.layers, "param") * 2
    added = 3 * WIDE * job.total(job.weights, "gradient") * (job.num_microbatches > 1)
    return Work(memory_bytes=casts + added)


def optimizer(job: Job) -> Work:
    """Once a step: the gradients' norm; moments, parameters, their average read and written."""
    elements = job.total(job.weights, "moment")
    moments = job.config.optim.moment_bytes
    per_element = 3 * WIDE + 3 * WIDE + 2 * moments  # norm, scaling; parameter twice, gradient
    average = 2 * job.config.optim.ema_bytes * job.total(job.weights, "param")
    return Work(memory_bytes=float(per_element * elements + average))


def orthogonalisation(job: Job) -> float:
    """FLOPs, in float32, of five Newton-Schulz steps on a device's share of Muon's matrices."""
    total = 0.0
    for share in orthogonalised(job):
        low, high = sorted((share.rows, share.columns))
        total += share.matrices * 5 * (4 * low * low * high + 2 * low**3)
    return total


def imbalance(job: Job) -> float:
    """How many more keys the busiest device's queries see than those of the mean device, minus 1.

    The planner reads no data: packed rows are documents of random lengths, `_DOCUMENTS_OF_A_ROW` in
    each on average.
    """
    plan = job.exchange
    if plan is None or job.attention_call is None:
        return 0.0
    packed = job.config.data.packs_documents
    sizes = job.spec[context.CONTEXT], job.seq_len
    seen = keys_by_window(job)
    uneven = {
        window: _imbalance(*sizes, window, plan.inner, job.micro_rows, packed=packed)
        for window in seen
    }
    return sum(uneven[window] * keys for window, keys in seen.items()) / sum(seen.values())


@functools.lru_cache(maxsize=1024)
def _imbalance(
    size: int, seq_len: int, window: int, inner: int, rows: int, *, packed: bool
) -> float:
    if not packed:
        return context.imbalance(size, seq_len, window, None, inner)
    # Shares of a row: they are the same in a short one, which is quick to weigh.
    length = 2 * size * _EXAMPLE_PART
    rows = min(rows, _EXAMPLE_ROWS)
    random = np.random.default_rng(0).random((_EXAMPLE_ROWS, length))
    index = np.arange(length)
    first = np.where(random < _DOCUMENTS_OF_A_ROW / length, index, 0)
    places = index - np.maximum.accumulate(first, axis=1)
    scaled = -(-window * length // seq_len)
    return context.imbalance(size, length, scaled, places, inner, rows)


def keys_seen(job: Job) -> float:
    """Mean number of keys that a query of the busiest device sees, over all layers."""
    if job.attention == "xla":
        return float(job.seq_len)
    return (1 + imbalance(job)) * sum(keys_by_window(job).values())


def keys_by_window(job: Job) -> dict[int, float]:
    """What each window's layers add to the mean number of keys that a query sees in a layer."""
    total = {}
    for window, number in job.layers_by_window.items():
        near = min(job.seq_len, window or job.seq_len)
        seen = near - near * near / (2 * job.seq_len)
        total[window] = number / job.model.num_layers * seen
    return total


def _block_bytes(job: Job) -> float:
    """Scores of blocks written and read, where attention runs block by block."""
    if job.attention != "blockwise":
        return 0.0
    return 4.0 * WIDE * job.tokens * heads(job) * keys_seen(job)
