"""What a decoder's layers keep for the backward pass and work with, in bytes on one device.

Each figure names the arrays it counts; they were found in the GPU compiler's buffer assignments.
"""

from __future__ import annotations

import dataclasses

from jaxdist.core.parallel.tensor import TENSOR
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
        model = job.decoder
        assert model is not None
        tensor, ways = job.spec[TENSOR], 2 if model.activation == "swiglu" else 1
        return cls(
            stream=model.d_model,
            queries=model.num_heads * model.head_width // tensor,
            keys=model.kv_heads * model.head_width // tensor,
            up=ways * model.mlp_dim // tensor,
            hidden=model.mlp_dim // tensor,
        )


def kept_per_layer(job: Job) -> int:
    """Bytes that one layer keeps from its forward to its backward, by the remat policy."""
    widths, tokens, carry = Widths.of(job), job.tokens, job.stream_tokens
    names = {
        "qkv": tokens * (widths.queries + 2 * widths.keys),
        "attention": tokens * widths.queries,
        # The partial sums before they are reduced: whole rows, however tensor splits the stream.
        "attention_out": tokens * widths.stream,
        "mlp_hidden": tokens * widths.hidden,
        "mlp_out": tokens * widths.stream,
    }
    elements = carry * widths.stream  # every layer's input
    if job.remat.startswith("names:"):
        elements += sum(names[name] for name in job.remat.removeprefix("names:").split(","))
    elif job.remat == "dots":
        elements += names["qkv"] + names["attention"] + names["attention_out"]
        elements += tokens * widths.up
    elif job.remat == "none":
        return _kept_without_recomputation(job)
    return job.compute_bytes * elements


def relaid_per_layer(job: Job) -> int:
    """Bytes of kept values that are copied into another order before the backward loop.

    A reduce-scatter or gather over the sequence wants it as the first dim: with more than one row
    the compiler turns the whole stack around at once.
    """
    turned = job.sequence_parallel and job.micro_rows > 1 and job.remat in ("dots", "none")
    return job.compute_bytes * job.tokens * Widths.of(job).stream if turned else 0


def working(job: Job) -> int:
    """Activations alive while one layer's backward runs, its recomputation included."""
    widths, tokens = Widths.of(job), job.tokens
    mlp = 2 * widths.up + 2 * widths.hidden  # the products' outputs and their gradients
    stream = 5 * widths.stream  # norms, residual and gradients between the branches
    return job.compute_bytes * tokens * (mlp + stream) + attention_scores(job)


def attention_scores(job: Job) -> int:
    """Scores, probabilities and their gradients where no fused kernel avoids them."""
    if job.attention != "xla":
        return 0
    return 3 * WIDE * job.micro_rows * _heads(job) * job.seq_len**2


def attention_workspace(job: Job) -> int:
    """Scratch of cuDNN's attention backward, which the compiler leaves out of its account.

    Measured on the kernels: exact on every shape tried for compute capability 9.0, one for 8.0.
    """
    model = job.decoder
    if model is None or job.attention != "cudnn":
        return 0
    rows = job.micro_rows * _heads(job) * job.seq_len
    width = model.head_width
    if float(job.gpu.compute_capability) < 9.0:
        return WIDE * rows * (3 * width + 1) + 128
    grouped = model.kv_heads != model.num_heads
    return WIDE * rows * (width + 1) + WIDE * rows * width * grouped + 256


def put_off_per_layer(job: Job) -> int:
    """What a layer's weight gradients read, when they are taken apart (zero bubble).

    Of products with split weights the inputs and gradients as they are; of the residual stream
    this device's shards: both norms' outputs, and the gradients of both branches.
    """
    widths, stream = Widths.of(job), job.stream_tokens * Widths.of(job).stream
    split = widths.up + widths.hidden + 2 * widths.queries + 2 * widths.keys
    return job.compute_bytes * (job.tokens * split + 4 * stream)


def _kept_without_recomputation(job: Job) -> int:
    """All that backward reads: norms in float32, inputs of products, the MLP's nonlinearity."""
    widths, tokens, stream = Widths.of(job), job.tokens, job.stream_tokens
    products = 2 * widths.stream + 3 * widths.queries + 2 * widths.keys + 6 * widths.hidden
    wide = 6 * stream * widths.stream
    kept = job.compute_bytes * tokens * products + WIDE * wide
    if job.attention == "xla":  # probabilities, as scores and as multiplied
        kept += (WIDE + job.compute_bytes) * job.micro_rows * _heads(job) * job.seq_len**2
    return kept


def _heads(job: Job) -> int:
    assert job.decoder is not None
    return job.decoder.num_heads // job.spec[TENSOR]
