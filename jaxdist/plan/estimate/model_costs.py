"""Costs of a model on one device: work of layers and head, and bytes of their activations.

`ModelCosts` has FLOPs and residuals of any model's trace, an upper bound. The formulas of
`DecoderCosts` count the arrays in buffer assignments of the GPU compiler. A layer here is one block
of the stack, which may have several.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxdist.core.matmul import hopper
from jaxdist.core.matmul.grouped import batches_of, block_rows, num_blocks
from jaxdist.core.parallel.expert import EXPERT, FACTOR
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.types import LAYER_INPUT
from jaxdist.models.weights import Weight
from jaxdist.plan.estimate import attention
from jaxdist.plan.estimate.job import WIDE, Job
from jaxdist.plan.estimate.model_trace import Cost, DecoderShape

Shape = tuple[int, int, int]
"""(m, n, k) of a matrix product: rows and columns of the result, and contracted dim."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device: FLOPs of products and of attention, bytes of memory traffic."""

    products: float = 0.0
    attention: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.memory_bytes + other.memory_bytes,
        )

    def __mul__(self, times: float) -> Work:
        return Work(self.products * times, self.attention * times, self.memory_bytes * times)


def costs_of(job: Job) -> ModelCosts:
    """Return the costs of a job's model: from formulas for a decoder, else from its trace."""
    return ModelCosts(job) if job.decoder is None else DecoderCosts(job, job.decoder)


class ModelCosts:
    """Costs of any model, from its trace; for one microbatch on one device."""

    def __init__(self, job: Job):
        self.job = job

    def flops_per_token(self) -> float:
        """Return the useful FLOPs of one token or image, forward and backward."""
        cost = self.job.everything_kept
        total = self.job.model.num_layers * cost.layer.flops + cost.rest.flops
        return 3 * total / self.job.seq_len

    def forward(self) -> Work:
        """Return the forward work of a layer: products, and a write and a read of saved values."""
        return self._work(self.job.everything_kept.layer)

    def expert_work(self) -> tuple[Work, Work]:
        """Return a layer's forward and backward work of experts beyond an MLP's; none here."""
        return Work(), Work()

    def recomputed(self, forward: Work) -> Work:
        """Return the forward work that backward of one layer recomputes: 0 without remat."""
        return Work() if self.job.remat == "none" else forward

    def head(self) -> Work:
        """Return the forward and backward work of everything outside the layers."""
        forward = self._work(self.job.everything_kept.rest)
        return Work(products=3 * forward.products, memory_bytes=3 * forward.memory_bytes)

    def expert_launches(self) -> float:
        """Return the seconds to start the kernels of one layer's experts, forward and backward."""
        return 0.0

    def product_shapes(self) -> list[tuple[Shape, int]]:
        """Return one large product, [((m, n, k), 1)]: those of a traced model are unknown."""
        wide = 8192
        return [((wide, wide, self.job.stream_width or wide), 1)]

    def _work(self, cost: Cost) -> Work:
        rows, tensor = self.job.micro_rows, self.job.spec[TENSOR]
        return Work(products=rows * cost.flops / tensor, memory_bytes=2 * rows * cost.kept_bytes)

    def offloaded_per_layer(self) -> float:
        """Return the bytes of one layer's residuals in host memory; a traced model has none."""
        return 0.0

    def kept_per_layer(self) -> float:
        """Return the bytes of residuals of one layer under the remat policy."""
        return self.job.micro_rows * self.job.trace.layer.kept_bytes

    def saved_by_fp8(self) -> float:
        """Return the bytes by which fp8 products reduce the residuals of one layer."""
        return 0.0

    def transposed_per_layer(self) -> int:
        """Return the bytes of a layer's residuals that backward first copies to another layout."""
        return 0

    def working(self) -> float:
        """Return the bytes alive during one layer's backward, including recomputation."""
        return self.job.micro_rows * self.job.everything_kept.layer.kept_bytes

    def head_parts(self) -> Mapping[str, float]:
        """Return the bytes alive during the loss, by class."""
        outer = self.job.only_trained(self.job.outer)
        return {"head gradient": WIDE * self.job.total(outer, "param")}

    def embedding_tables(self) -> tuple[Weight, ...]:
        """Return the token embedding tables; () for a traced model, in which they are unknown."""
        return ()

    def is_tied(self) -> bool:
        """Return False: it is unknown if the head of a traced model is tied."""
        return False


_RECOMPUTED_UNROLLED = 0.75
"""Memory traffic of recomputation in unrolled layers, as a share of forward's, from the compiled
1.7B model: "dots" takes 12 ms more than "none"."""


_KERNELS_PER_BATCH, _KERNEL_S = 4, 4e-6
"""Kernels that copy and multiply one batch of blocks of experts, and the time to start one."""


class DecoderCosts(ModelCosts):
    """Costs of a decoder; widths are elements per token on one device."""

    def __init__(self, job: Job, shape: DecoderShape):
        super().__init__(job)
        tensor = job.spec[TENSOR]
        self.shape = shape
        self.d_model = shape.d_model
        self.queries = shape.num_heads * shape.head_dim // tensor
        self.keys = shape.num_kv_heads * shape.head_dim // tensor
        self.up = shape.up // tensor
        self.hidden = shape.hidden // tensor
        # Scores have few columns, and are not split.
        self.columns = shape.columns // tensor if shape.columns == shape.vocab else shape.columns

    def flops_per_token(self) -> float:
        """Return the useful FLOPs of one token, with causal attention and the unpadded head."""
        job, shape = self.job, self.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        layer = shape.d_model * (2 * queries + 2 * keys + shape.up + shape.hidden)
        columns = min(shape.columns, job.model.vocab_size) * (shape.columns == shape.vocab)
        num_layers = sum(job.layers_by_window.values())
        products = num_layers * layer + columns * shape.d_model
        seen = num_layers * sum(attention.keys_by_window(job).values())
        return 6.0 * products + 12.0 * queries * seen

    def forward(self) -> Work:
        """Return the forward work of one layer, with its experts."""
        job, passes = self.job, self.job.engine.software
        weights = self.d_model * (2 * self.queries + 2 * self.keys + self.up + self.hidden)
        elements = passes.query_passes * (self.queries + self.keys)
        elements += passes.hidden_passes * (self.up + self.hidden) / 2
        stream = passes.stream_passes * self.d_model * job.stream_tokens
        scores = attention.keys_seen(job) * self.queries
        return (
            Work(
                products=2.0 * job.tokens * weights,
                attention=4.0 * job.tokens * scores,
                memory_bytes=job.compute_bytes * (job.tokens * elements + stream)
                + 4 * attention.score_bytes(job)
                + attention.block_bytes(job),
            )
            * float(self.shape.layers)
            + self.expert_work()[0]
        )

    def expert_work(self) -> tuple[Work, Work]:
        """Return a layer's forward (in `forward`) and backward work of experts beyond an MLP's.

        Counted are the arrays of `core/experts.py`, `parallel/expert.py` and `matmul/grouped.py`,
        and products of unused rows. With remat, backward computes outputs of experts again, because
        the gradients of a token's shares read them.
        """
        job, parts, d = self.job, self.shape.experts_per_token, self.d_model
        if not parts:
            return Work(), Work()
        moves, chosen, rows = (3 if job.spec[EXPERT] > 1 else 1), job.tokens * parts, self._rows
        # Rows move to their expert and back by gathers, and a token's outputs are added in float32.
        forward = 2.0 * moves * rows * d + chosen * d + 3 * job.tokens * d
        # Gradients of outputs (float32) and shares; rows move back; those of a token are added.
        backward = (2.0 * moves + 1) * rows * d + 2 * chosen * d + 3 * job.tokens * d
        layers, num_bytes, groups = self.shape.sparse_layers, job.compute_bytes, self.local_experts
        gathered = any(job.is_gathered(w) for w in job.layers if "experts" in w.dims)
        unused = again = 0.0
        for width_in, width_out in ((d, self.up // parts), (self.hidden // parts, d)):
            both, size = width_in + width_out, width_in * width_out
            computed = rows + hopper.MULTIPLE * (groups - 1)  # a part of a tile each
            # Gathered matrices, and gradients to scatter, are put in order, because d_model is
            # not their outermost dim.
            forward += 2 * gathered * groups * size
            backward += 2 * gathered * groups * size
            if blocks := math.prod(batches_of(self._expert_blocks, size)):
                computed = blocks * block_rows(rows, groups, "gpu")
                blocks *= groups > 1  # a single matrix is not copied
                # Rows are read into blocks and written, matrices copied, results put in order.
                forward += rows * (both + width_out) + computed * width_in + 2 * blocks * size
                backward += rows * (both + width_in) + computed * width_out + 2 * blocks * size
                # In float32, the sum of a group is copied, that of a block is added and written
                # back (5 passes); at the end all are cast.
                backward += 2 * computed * both + 5 * WIDE / num_bytes * blocks * size
                backward += (1 + WIDE / num_bytes) * groups * size
            unused += 2.0 * size * (computed - chosen)
            again = 2.0 * size * chosen
        own = Work(unused, memory_bytes=num_bytes * forward)
        back = own * (1 + job.trained_share(job.layers))
        back = dataclasses.replace(back, memory_bytes=num_bytes * backward)
        if job.remat != "none":
            back += own + Work(again)
        return own * layers, back * layers

    def recomputed(self, forward: Work) -> Work:
        """Return the work that backward of one layer recomputes, for values that remat drops."""
        job = self.job
        if job.remat == "none":
            return Work()
        per_token = {
            "qkv": self.d_model * (self.queries + 2 * self.keys),
            "attention_out": self.d_model * self.queries,
            "mlp_hidden": self.d_model * self.up,
        }
        again = sum(size for name, size in per_token.items() if not job.keeps(name))
        # In a scan, recomputation is fused into the backward kernels that use it.
        share = 0.0 if job.engine.fuses_recomputation else 1.0
        return Work(
            products=2.0 * job.tokens * again * self.shape.layers,
            attention=0.0 if job.keeps("attention") else forward.attention,
            memory_bytes=(_RECOMPUTED_UNROLLED if job.unrolls else share) * forward.memory_bytes,
        )

    def head(self) -> Work:
        """Return the work of the loss, the embedding and the layers outside the stack."""
        job, columns = self.job, self.columns
        logit_passes = 5 * WIDE + 2 * job.compute_bytes
        trains = job.trained_share(job.outer) > 0
        kernel_passes = 2 * WIDE * self.d_model * columns * job.tokens / max(1, job.loss_chunk)
        loss = Work(
            products=(4.0 + 2.0 * trains) * job.tokens * self.d_model * columns,
            memory_bytes=logit_passes * job.tokens * columns + trains * kernel_passes,
        )
        # The gradient of the lookup is scattered into a zeroed table.
        table = trains * WIDE * self.shape.vocab * self.d_model / job.spec[TENSOR]
        # Layers outside the stack (`first_layers`): forward twice, and two products backward.
        first = [w for w in job.outer if w.name.startswith("first_layers") and w.is_matrix]
        return loss + Work(
            products=8.0 * job.tokens * job.total(first, "gathered"),
            memory_bytes=table + 4 * job.compute_bytes * job.tokens * self.d_model,
        )

    def product_shapes(self) -> list[tuple[Shape, int]]:
        """Return (m, n, k) of the forward products of a microbatch, and the number of each."""
        job = self.job
        tokens, layers = max(1, job.tokens), max(1, job.layers_per_stage) * self.shape.layers
        chunk = max(1, job.loss_chunk)
        # The experts of a device share the rows; each has a part of `up` and `hidden`.
        experts = self.local_experts
        parts = max(1, self.shape.experts_per_token)
        rows = max(1, tokens * parts // experts)
        return [
            ((tokens, self.queries + 2 * self.keys, self.d_model), layers),
            ((tokens, self.d_model, self.queries), layers),
            ((rows, self.up // parts, self.d_model), layers * experts),
            ((rows, self.d_model, self.hidden // parts), layers * experts),
            ((chunk, self.columns, self.d_model), max(1, tokens // chunk)),
        ]

    def kept_per_layer(self) -> float:
        """Return the bytes of residuals of one layer under the remat policy."""
        job, tokens = self.job, self.job.tokens
        stream, names = job.stream_tokens * self.d_model, self._named_elements()
        elements = names[LAYER_INPUT] * (LAYER_INPUT not in job.offloaded)
        if job.remat.startswith("names:"):
            listed = job.remat.removeprefix("names:").split(",")
            elements += sum(names[name] for name in listed if name in self.shape.marks)
        elif job.remat == "dots" or (job.remat == "none" and job.unrolls):
            elements += self.expert_rows * (job.remat == "none")
            elements += names["qkv"] + names["attention"] + names["attention_out"]
            # Without a norm after the MLP, its output is only added to the residual and not needed.
            elements += names["mlp_out"] * self.shape.norms_mlp_output
            elements += tokens * self.up
            if job.remat == "dots" and any(w.is_quantized for w in job.weights):
                # A product that dequantizes its weight again in backward keeps its input.
                elements += stream + names["mlp_hidden"]
            if job.remat == "none":
                # In unrolled layers the compiler recomputes rotations, RMS norms and the gate's
                # nonlinearity. For GPT-2 it saves layer norms and GELU's tanh.
                elements += names["mlp_hidden"] * (2 if self.up == self.hidden else 1)
                elements += self.shape.num_layer_norms * stream
                if job.config.lora.rank and any("mlp" in w.dims for w in job.trained):
                    # Adapters of the MLP read its inputs in backward. Compiled programs then keep
                    # these and the nonlinearity's inputs a second time.
                    elements += 2 * stream + names["mlp_hidden"] + tokens * self.up
        elif job.remat == "none":
            return self._kept_without_recomputation()
        # A fused kernel saves its output and the log-sum-exp of its scores.
        scores = self._kept_scores() if job.remat == "none" else 0
        lse = self._lse_bytes() * (job.keeps("attention") and not job.offloaded)
        return (job.compute_bytes * elements + lse + scores) * self.shape.layers

    def offloaded_per_layer(self) -> float:
        """Return the bytes of one layer's residuals that the remat policy moves to the host."""
        names, offloaded = self._named_elements(), self.job.offloaded
        elements = sum(
            names[name] for name in offloaded if name in {*self.shape.marks, LAYER_INPUT}
        )
        lse = self._lse_bytes() * ("attention" in offloaded)
        return (self.job.compute_bytes * elements + lse) * self.shape.layers

    def _named_elements(self) -> dict[str, int]:
        """Return name -> number of elements of a layer's values that a remat policy can name."""
        job, tokens = self.job, self.job.tokens
        stream = job.stream_tokens * self.d_model
        return {
            LAYER_INPUT: stream // self.shape.layers,  # only that of each block
            "qkv": tokens * (self.queries + 2 * self.keys),
            "attention": tokens * self.queries * self._attention_outputs(),
            "attention_out": stream,
            "mlp_hidden": tokens * self.hidden,
            "mlp_out": stream,
        }

    def _lse_bytes(self) -> int:
        """Return the bytes of the log-sum-exp of one layer's scores that a fused kernel saves."""
        job = self.job
        return (job.attention != "xla") * WIDE * attention.heads(job) * job.tokens

    def _kept_without_recomputation(self) -> int:
        """Return the bytes that one layer saves for backward without remat."""
        job = self.job
        queries = (2 + self._attention_outputs()) * self.queries
        products = 2 * self.d_model + queries + 2 * self.keys + 6 * self.hidden
        norms = 3 * self.shape.num_norms * job.stream_tokens * self.d_model
        products += self.expert_rows // job.tokens
        each = job.compute_bytes * job.tokens * products + WIDE * norms + self._kept_scores()
        return each * self.shape.layers

    def expert_launches(self) -> float:
        """Return the seconds to start the kernels of one layer's experts, forward and backward."""
        if not self.shape.experts_per_token:
            return 0.0
        batches = sum(batches_of(self._expert_blocks, size)[0] for size in self._expert_matrices)
        passes = 3 + (not self.job.keeps("mlp_hidden"))  # forward, two products of backward
        return passes * batches * _KERNELS_PER_BATCH * _KERNEL_S * self.shape.sparse_layers

    @property
    def _expert_blocks(self) -> int:
        """Number of blocks of a layer's products; 0 for an MLP, or with a kernel."""
        if not self.shape.experts_per_token or self.job.plan.grouped == "mosaic":
            return 0
        rows, groups = self._rows, self.local_experts
        return num_blocks(rows, groups, block_rows(rows, groups, "gpu"))

    @property
    def _rows(self) -> int:
        """Number of rows that a layer with experts sorts by expert, unused ones included."""
        each = 2 * self.d_model * self.shape.sparse_layers
        return self.expert_rows * self.shape.layers // each

    @property
    def _expert_matrices(self) -> tuple[int, int]:
        parts = max(1, self.shape.experts_per_token)
        return self.d_model * self.up // parts, self.d_model * self.hidden // parts

    @property
    def local_experts(self) -> int:
        """Number of experts on a device; 1 for an MLP."""
        return max(1, self.shape.num_experts // self.job.spec[EXPERT])

    @property
    def expert_rows(self) -> int:
        """Mean number of elements that experts read and write in a layer, with unused rows."""
        job, per_token = self.job, self.shape.experts_per_token
        used = FACTOR if job.spec[EXPERT] > 1 else 1.0
        used *= self.shape.sparse_layers / self.shape.layers
        return int(2 * used * per_token * job.tokens * self.d_model)

    def _kept_scores(self) -> int:
        """Return the bytes of a layer's saved attention probabilities; 0 with a fused kernel."""
        return attention.score_bytes(self.job) * (WIDE + self.job.compute_bytes) // WIDE

    def _attention_outputs(self) -> int:
        """Return the number of saved copies of attention's output: before and after an exchange."""
        exchange = self.job.plan.exchange
        return 1 if exchange is None or exchange.inner == 1 else 2

    def saved_by_fp8(self) -> float:
        """Return the bytes by which fp8 products reduce the residuals of one layer.

        Without remat the inputs of products are saved rounded: outputs of both norms and the MLP's
        hidden values. Attention's output is saved both rounded and unrounded.
        """
        if self.job.remat != "none":
            return 0.0
        rounded = 2 * self.d_model + self.hidden
        return self.job.tokens * ((self.job.compute_bytes - 1) * rounded - self.queries)

    def transposed_per_layer(self) -> int:
        """Return the bytes of queries, keys, values saved before an all-to-all of heads; else 0."""
        job, exchange = self.job, self.job.plan.exchange
        if exchange is None or exchange.inner == 1 or job.remat == "none" or not job.keeps("qkv"):
            return 0
        elements = job.tokens * (self.queries + 2 * self.keys)
        return job.compute_bytes * elements * self.shape.layers

    def working(self) -> float:
        """Return the bytes alive during one layer's backward, including recomputation."""
        job = self.job
        mlp = 2 * self.up + 2 * self.hidden  # outputs of the products, and their gradients
        stream = 5 * self.d_model  # norms, residual, gradients between attention and MLP
        # Scores, probabilities and their gradients, without a fused kernel.
        scores = 3 * attention.score_bytes(job) * self.shape.layers
        # The first exchange of experts and the loop over further rounds have separate buffers.
        loops = 1 + (job.spec[EXPERT] > 1)
        # Backward of a block computes all its layers again.
        elements = (job.tokens * (mlp + stream) + loops * 2 * self.expert_rows) * self.shape.layers
        size = max(self._expert_matrices)
        matrices = size * batches_of(self._expert_blocks, size)[1]
        copied = loops * (job.compute_bytes + WIDE) * matrices
        return job.compute_bytes * elements + copied + scores + self._context_extra()

    def _context_extra(self) -> int:
        """Return the bytes that context-parallel attention adds to a layer on complete rows.

        From buffer assignments. Block-wise attention holds float32 partial results, outputs and
        query gradients. It also holds gradients of the local keys and values, or after an
        all-gather of those of the complete row. cuDNN's chunks exceed the MLP only in a ring with
        stages, by float32 gradient sums. Exchanged heads are copied before and after.
        """
        job, exchange = self.job, self.job.plan.exchange
        if exchange is None:
            return 0
        if job.attention == "cudnn":
            copied = 2 * job.compute_bytes * self.queries * (exchange.inner > 1)
            # Without stages, the MLP's arrays are freed before the ring's backward starts.
            in_ring = exchange.exchange != "all_to_all" and job.spec[PIPELINE] > 1
            return job.tokens * (copied + in_ring * WIDE * (self.queries + 2 * self.keys))
        if exchange.exchange == "all_gather":
            return 3 * WIDE * job.micro_rows * job.seq_len * self.keys
        return WIDE * job.tokens * (4 * self.queries + 4 * self.keys)

    def head_parts(self) -> Mapping[str, float]:
        """Return the bytes alive during the loss, by class."""
        job = self.job
        kernel, logits = self.d_model * self.columns, job.loss_chunk * self.columns
        trains = job.trained_share(job.outer) > 0
        tables = [w for w in job.only_trained(job.outer) if self.shape.vocab_dim in w.dims]
        # Trained rows (`lora.token_ids`) are written to a copy of the frozen kernel.
        copies = 1 + (trains and not tables and self.shape.columns == self.shape.vocab)
        return {
            "head gradient": WIDE * kernel * trains,
            "gathered weights": job.compute_bytes * kernel * copies,
            "logits": (WIDE + job.compute_bytes) * logits,
            "head activations": 3 * job.compute_bytes * job.tokens * self.d_model,
        }

    def embedding_tables(self) -> tuple[Weight, ...]:
        """Return the token embedding tables."""
        return tuple(w for w in self.job.outer if w.dims[:1] == (self.shape.vocab_dim,))

    def is_tied(self) -> bool:
        """Return True if the head's kernel is the embedding table (tied)."""
        has_logits = self.shape.columns == self.shape.vocab
        return has_logits and sum(self.shape.vocab_dim in w.dims for w in self.job.outer) == 1
