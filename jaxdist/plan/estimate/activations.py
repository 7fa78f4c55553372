"""What a model's layers keep for the backward pass and work with, in bytes on one device.

Of a decoder each figure names the arrays it counts; they were found in the GPU compiler's buffer
assignments. Of any other model the figures are what its own functions keep (`model_trace`).
"""

from __future__ import annotations

import dataclasses

from jaxdist.core.attention.cudnn import DOCUMENTS
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.hardware import Gpu
from jaxdist.plan.estimate.job import WIDE, Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """Elements that each activation of a layer has per token on one device."""

    stream: int
    queries: int
    keys: int
    up: int
    hidden: int

    @classmethod
    def of(cls, job: Job) -> Widths:
        """The widths of the job's decoder."""
        dims, tensor = job.model.dims, job.spec[TENSOR]
        # Gate and up are one matrix [d_model, 2, mlp], without a gate [d_model, 1, mlp].
        (up,) = (
            w.size // w.shape[0] // w.shape[1]
            for w in job.layers
            if w.is_matrix and w.dims[1] == "d_model" and "mlp" in w.dims
        )
        return cls(
            stream=dims["d_model"],
            queries=dims["heads"] * dims["head_dim"] // tensor,
            keys=dims["kv_heads"] * dims["head_dim"] // tensor,
            up=up // tensor,
            hidden=dims["mlp"] // tensor,
        )


def kept_per_layer(job: Job) -> float:
    """Bytes that one layer keeps from its forward to its backward, by the remat policy."""
    if not job.is_decoder:
        return job.micro_rows * job.trace.layer.kept_bytes
    widths, tokens, carry = Widths.of(job), job.tokens, job.stream_tokens
    names = {
        "qkv": tokens * (widths.queries + 2 * widths.keys),
        "attention": tokens * widths.queries * _attention_outputs(job),
        "attention_out": carry * widths.stream,
        "mlp_hidden": tokens * widths.hidden,
        "mlp_out": carry * widths.stream,
    }
    elements = carry * widths.stream  # every layer's input
    if job.remat.startswith("names:"):
        elements += sum(names[name] for name in job.remat.removeprefix("names:").split(","))
    elif job.remat == "dots" or (job.remat == "none" and job.unrolls):
        elements += names["qkv"] + names["attention"] + names["attention_out"]
        # Without a norm after it the MLP's output only feeds the residual, and is not read again.
        elements += names["mlp_out"] * any("mlp_out_norm" in w.name for w in job.layers)
        elements += tokens * widths.up
        if job.remat == "none":
            # Of one straight line the compiler itself recomputes rotations, RMS norms and the
            # gate's nonlinearity from these; of GPT-2 it keeps layer norms and GELU's tanh.
            layer_norms = sum(w.name.endswith("norm.bias") for w in job.layers)
            elements += names["mlp_hidden"] * (2 if widths.up == widths.hidden else 1)
            elements += layer_norms * carry * widths.stream
    elif job.remat == "none":
        return _kept_without_recomputation(job)
    # With the output of a fused kernel stays the log-sum-exp of its scores.
    fused = job.keeps_attention and job.attention != "xla"
    scores = _kept_scores(job) if job.remat == "none" else 0
    return job.compute_bytes * elements + fused * WIDE * heads(job) * tokens + scores


def saved_by_fp8(job: Job) -> float:
    """Bytes that a layer keeps less when its products are in 8 bits.

    Without recomputation it keeps the products' inputs, for their weights' gradients, rounded: both
    norms' outputs and the MLP's hidden values. Attention's output is kept as it is besides. What is
    recomputed is not kept at all.
    """
    if not job.is_decoder or job.remat != "none":
        return 0.0
    widths = Widths.of(job)
    rounded = 2 * widths.stream + widths.hidden
    return job.tokens * ((job.compute_bytes - 1) * rounded - widths.queries)


def transposed_per_layer(job: Job) -> int:
    """Bytes of kept values that are copied into another order before the backward loop.

    The compiler turns the whole stack around at once of kept queries, keys and values whose heads
    are exchanged for positions.
    """
    if not turns_heads(job):
        return 0
    return job.compute_bytes * job.tokens * (Widths.of(job).queries + 2 * Widths.of(job).keys)


def turns_heads(job: Job) -> bool:
    """Whether queries, keys and values are kept before their heads are exchanged for positions."""
    if job.exchange is None or job.exchange.inner == 1 or not job.is_decoder:
        return False
    return job.remat == "dots" or "qkv" in job.remat.removeprefix("names:").split(",")


def kept_outside(job: Job) -> float:
    """Bytes that a traced model keeps outside its layers; a decoder's head has its own account."""
    return 0.0 if job.is_decoder else job.micro_rows * job.trace.rest.kept_bytes


def working(job: Job) -> float:
    """Activations alive while one layer's backward runs, its recomputation included."""
    if not job.is_decoder:
        return job.micro_rows * job.everything_kept.layer.kept_bytes
    widths, tokens = Widths.of(job), job.tokens
    mlp = 2 * widths.up + 2 * widths.hidden  # the products' outputs and their gradients
    stream = 5 * widths.stream  # norms, residual and gradients between the branches
    # Without a fused kernel also scores, probabilities and their gradients.
    return job.compute_bytes * tokens * (mlp + stream) + 3 * score_bytes(job) + _joined(job)


def _joined(job: Job) -> int:
    """Arrays of attention over shared rows beside those of a layer on whole rows.

    As in the buffer assignments of long rows. Block by block these are float32: partial results as
    they come and as they are joined, outputs and gradients of queries; and gradients of the keys
    and values at hand, which are all of the row's after an all-gather. Of cuDNN's parts no more is
    alive than of the MLP, but with stages, round a ring, sums of gradients in float32; heads that
    are exchanged for positions are copied before and after.
    """
    if job.exchange is None:
        return 0
    widths = Widths.of(job)
    if job.attention == "cudnn":
        copied = 2 * job.compute_bytes * widths.queries * (job.exchange.inner > 1)
        # Without stages the MLP's arrays are gone by the time that a ring goes back.
        beside = job.exchange.exchange != "all_to_all" and job.spec[PIPELINE] > 1
        return job.tokens * (copied + beside * WIDE * (widths.queries + 2 * widths.keys))
    if job.exchange.exchange == "all_gather":
        return 3 * WIDE * job.micro_rows * job.seq_len * widths.keys
    return WIDE * job.tokens * (4 * widths.queries + 4 * widths.keys)


def score_bytes(job: Job) -> int:
    """Of a layer's attention scores in float32; 0 where a fused kernel avoids them."""
    if job.attention != "xla":
        return 0
    return WIDE * job.micro_rows * heads(job) * job.seq_len**2


def attention_workspace(job: Job) -> int:
    """Scratch of cuDNN's attention backward, which the compiler leaves out of its account."""
    if job.attention != "cudnn":
        return 0
    # Heads exchanged for positions: as many of the products.
    dims, rows = job.model.dims, heads(job) * job.tokens
    if job.config.data.packs_documents:  # each document of a call is a row to cuDNN
        rows *= DOCUMENTS
    grouped = dims["kv_heads"] != dims["heads"]
    return cudnn_scratch(rows, dims["head_dim"], shares_keys=grouped, gpu=job.cluster.gpu)


def cudnn_scratch(rows: int, width: int, *, shares_keys: bool, gpu: Gpu) -> int:
    """Bytes that cuDNN's attention backward asks for at run time.

    Measured by compiling cuDNN's own engines: exact on every shape tried on Hopper, one measurement
    on Ampere. Blackwell is taken to be like Hopper, Ada like Ampere. `rows` are batch × query heads
    × positions, `width` is a head's; where it `shares_keys`, several query heads read one key head.
    """
    if float(gpu.compute_capability) < 9.0:
        return WIDE * rows * (3 * width + 1) + 128
    return WIDE * rows * (width * (1 + shares_keys) + 1) + 256


def deferred_per_layer(job: Job) -> float:
    """What a layer's weight gradients read, when they are taken apart (zero bubble).

    Of products with split weights the inputs and gradients as they are; of the residual stream
    this device's shards: both norms' outputs, and the gradients of both branches. Of a model that
    is traced, all that it keeps, and as much in gradients.
    """
    if not job.is_decoder:
        return 2 * job.micro_rows * job.everything_kept.layer.kept_bytes
    widths, stream = Widths.of(job), job.stream_tokens * Widths.of(job).stream
    split = widths.up + widths.hidden + 2 * widths.queries + 2 * widths.keys
    return job.compute_bytes * (job.tokens * split + 4 * stream)


def _kept_without_recomputation(job: Job) -> int:
    """All that backward reads: norms in float32, inputs of products, the MLP's nonlinearity."""
    widths, tokens, stream = Widths.of(job), job.tokens, job.stream_tokens
    queries = (2 + _attention_outputs(job)) * widths.queries
    products = 2 * widths.stream + queries + 2 * widths.keys + 6 * widths.hidden
    norms = sum(w.name.endswith("scale") and w.dims[-1] == "d_model" for w in job.layers)
    wide = 3 * norms * stream * widths.stream
    kept = job.compute_bytes * tokens * products + WIDE * wide
    return kept + _kept_scores(job)


def _kept_scores(job: Job) -> int:
    """Probabilities, as scores and as multiplied, where no fused kernel avoids them."""
    return score_bytes(job) * (WIDE + job.compute_bytes) // WIDE


def _attention_outputs(job: Job) -> int:
    """How often attention's output is kept: of exchanged heads before and after the way back."""
    return 1 if job.exchange is None or job.exchange.inner == 1 else 2


def heads(job: Job) -> int:
    """Query heads of a decoder on one device."""
    return job.model.dims["heads"] // job.spec[TENSOR]
