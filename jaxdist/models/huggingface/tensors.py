"""Map Hugging Face's tensors to our arrays and back, without arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxdist.checkpoint.blocks import Index, relative
from jaxdist.models.configs import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Source:
    """A Hugging Face tensor that fills a block of one of our pieces, with dims split and reordered.

    Attributes:
        view: shape of the used rows, with some dims split.
        order: dim i of our piece is dim `order[i]` of the view.
        corner: index in our piece of the block's first element; () = the first of the piece.
        first_row: row of the tensor at which the view begins (Phi-3: fused query, key, value).
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    corner: tuple[int, ...] = ()
    first_row: int = 0

    @property
    def num_rows(self) -> int:
        """Number of the tensor's rows in the view."""
        return math.prod(self.view) // math.prod(self.shape[1:])

    @property
    def block(self) -> Index:
        """Index of the tensor's block in our piece."""
        corner = self.corner or (0,) * len(self.order)
        sizes = (self.view[dim] for dim in self.order)
        return tuple(slice(at, at + size) for at, size in zip(corner, sizes, strict=True))

    def of_view(self, index: Index) -> Index:
        """Convert an index in our piece, inside `block`, to an index in the view."""
        own = relative(index, self.block)
        return tuple(own[self.order.index(dim)] for dim in range(len(self.view)))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of our array `name`, e.g. `params/layers/attention/qkv`, and its tensors.

    `layer` is its index in the stacked dim, if there is one. Entries without a tensor are zero.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(source.name for source in self.sources)

    @property
    def stored_order(self) -> tuple[int, ...]:
        """Our dims in the tensors' storage order, slowest first."""
        order = self.sources[0].order
        return tuple(order.index(dim) for dim in range(len(order)))

    def read(
        self, index: Index, fetch: Callable[[Source, Index], np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """Return a block [*lengths of `index`]; `fetch` maps (tensor, index in view) to values."""
        shape = tuple(s.stop - s.start for s in index)
        out: np.ndarray | None = None
        for source in self.sources:
            both = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(index, source.block, strict=True)
            ]
            if any(s.start >= s.stop for s in both):
                continue
            values = fetch(source, source.of_view(tuple(both))).transpose(source.order)
            if values.shape == shape:
                return values.astype(dtype, copy=False)
            out = np.zeros(shape, dtype) if out is None else out
            inside = (
                slice(s.start - i.start, s.stop - i.start) for s, i in zip(both, index, strict=True)
            )
            out[tuple(inside)] = values
        return np.zeros(shape, dtype) if out is None else out

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """Return our part [*shape] from the tensors of `sources`, in the dtype of the first."""
        views = {
            source: x[source.first_row : source.first_row + source.num_rows].reshape(source.view)
            for source, x in zip(self.sources, tensors, strict=True)
        }
        everything = tuple(slice(0, size) for size in self.shape)
        return self.read(everything, lambda source, index: views[source][index], tensors[0].dtype)

    def split(self, part: np.ndarray) -> list[np.ndarray]:
        """Return the tensors of `sources`, in their order and shapes, from our part [*shape]."""
        return [
            part[source.block].transpose(np.argsort(source.order)).reshape(source.shape)
            for source in self.sources
        ]


_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""`norm_placement` -> name of our norm in a layer -> name in Hugging Face."""


def pieces(config: DecoderConfig, family: str) -> Iterator[Piece]:
    """Yield every part of each of our arrays, ordered by array and layer."""
    return _gpt2_pieces(config) if family == "gpt2" else _llama_pieces(config, family)


def _llama_pieces(config: DecoderConfig, family: str) -> Iterator[Piece]:
    d, mlp, heads, width = config.d_model, config.mlp_dim, config.num_heads, config.head_width
    is_fused = family == "phi3"

    first, block = config.stack
    # Index of a layer in the model, its part of the parameters, its index in the stack.
    positions: list[tuple[int, str, int | None]] = [
        (i, f"first_layers/{i}", None) for i in range(first)
    ]
    for j in range(len(block)):
        part = f"layers/{j}" if len(block) > 1 else "layers"
        stacked = range(first + j, config.num_layers, len(block))
        positions += [(layer, part, index) for index, layer in enumerate(stacked)]

    def of_layer(
        ours: str, shape: tuple[int, ...], *sources: Source, kind: str = ""
    ) -> Iterator[Piece]:
        """Yield the piece of each layer, of each "dense" or "sparse" one if `kind` is set."""
        for layer, part, index in positions:
            if kind in ("", "dense" if layer in config.dense_layers else "sparse"):
                tensors = (
                    dataclasses.replace(s, name=f"model.layers.{layer}.{s.name}") for s in sources
                )
                yield Piece(f"params/{part}/{ours}", index, shape, tuple(tensors))

    yield _table(config, "model.embed_tokens.weight")
    yield Piece("params/head/norm/scale", None, (d,), (_same("model.norm.weight", d),))
    yield from _head(config)
    for norm, hf_name in _NORMS[config.norm_placement].items():
        yield from of_layer(f"{norm}/scale", (d,), _same(f"{hf_name}.weight", d))
    qkv, *sources = _qkv(config, "weight")
    yield from of_layer("attention/qkv", qkv, *(_fused_qkv(sources) if is_fused else sources))
    if "qkv" in config.bias:
        yield from of_layer("attention/qkv_bias", *_qkv(config, "bias"))
    if config.qk_norm != "none":
        for ours, hf_name, count in (
            ("query_norm", "q_norm", heads),
            ("key_norm", "k_norm", config.kv_heads),
        ):
            shape = (width,) if config.qk_norm == "head" else (count, width)
            stored, order = (math.prod(shape),), tuple(range(len(shape)))
            scale = Source(f"self_attn.{hf_name}.weight", stored, shape, order)
            yield from of_layer(f"attention/{ours}/scale", shape, scale)
    out = Source("self_attn.o_proj.weight", (d, heads * width), (d, heads, width), (1, 2, 0))
    yield from of_layer("attention/out", (heads, width, d), out)
    if "out" in config.bias:
        yield from of_layer("attention/out_bias", (d,), _same("self_attn.o_proj.bias", d))
    if config.attention_sinks:
        yield from of_layer("attention/sinks", (heads,), _same("self_attn.sinks", heads))
    if config.num_experts:
        for array, sizes, tensors in _experts(config, family):
            yield from of_layer(array, sizes, *tensors, kind="sparse")
        if not config.dense_layers:
            return
        mlp = config.dense_mlp_dim
    kind = "dense" if config.num_experts else ""
    if is_fused:
        gates = [Source("mlp.gate_up_proj.weight", (2 * mlp, d), (2, mlp, d), (2, 0, 1))]
    else:
        gates = _gates("mlp", ("gate_proj", "up_proj"), mlp, d)
    yield from of_layer("mlp/up", (d, 2, mlp), *gates, kind=kind)
    yield from of_layer("mlp/down", (mlp, d), _turned("mlp.down_proj.weight", d, mlp), kind=kind)
    if "mlp" in config.bias:
        biases = (
            Source(f"mlp.{name}_proj.bias", (mlp,), (1, mlp), (0, 1), (way, 0))
            for way, name in enumerate(("gate", "up"))
        )
        yield from of_layer("mlp/up_bias", (2, mlp), *biases)
        yield from of_layer("mlp/down_bias", (d,), _same("mlp.down_proj.bias", d))


def _experts(
    config: DecoderConfig, family: str
) -> Iterator[tuple[str, tuple[int, ...], list[Source]]]:
    """Yield the router and the experts of a layer: our array, its shape, and its tensors."""
    d, mlp, experts = config.d_model, config.mlp_dim, range(config.num_experts)
    if family == "gpt_oss":
        yield from _gpt_oss_experts(d, mlp, config.num_experts)
        return
    module, gate, up, down = _EXPERT_NAMES[family]
    router = _turned(f"{module}.gate.weight", config.num_experts, d)
    yield "mlp/router", (d, config.num_experts), [router]
    if config.routing.bias:
        bias = _same(f"{module}.gate.e_score_correction_bias", config.num_experts)
        yield "mlp/selection_bias", (config.num_experts,), [bias]
    ups = [
        Source(
            f"{module}.experts.{i}.{name}.weight",
            (mlp, d),
            (mlp, d, 1, 1),
            (3, 1, 2, 0),
            (i, 0, way, 0),
        )
        for i in experts
        for way, name in enumerate((gate, up))
    ]
    yield "mlp/up", (config.num_experts, d, 2, mlp), ups
    downs = [
        Source(f"{module}.experts.{i}.{down}.weight", (d, mlp), (d, mlp, 1), (2, 1, 0), (i, 0, 0))
        for i in experts
    ]
    yield "mlp/down", (config.num_experts, mlp, d), downs
    if width := config.shared_expert_dim:
        shared = f"{module}.shared_experts" if family == "dots1" else f"{module}.shared_expert"
        yield "shared/up", (d, 2, width), _gates(shared, (gate, up), width, d)
        last = _turned(f"{shared}.{down}.weight", d, width)
        yield "shared/down", (width, d), [last]
    if config.shared_expert_gate:
        yield "shared_gate", (d, 1), [_turned(f"{module}.shared_expert_gate.weight", 1, d)]


def _gates(module: str, names: Sequence[str], width: int, d: int) -> list[Source]:
    """Return the sources of [d, 2, width]: the products `names` of an MLP, gate and up."""
    return [
        Source(f"{module}.{name}.weight", (width, d), (width, d, 1), (1, 2, 0), (0, way, 0))
        for way, name in enumerate(names)
    ]


def _gpt_oss_experts(
    d: int, mlp: int, count: int
) -> Iterator[tuple[str, tuple[int, ...], list[Source]]]:
    """Yield router and experts of a layer, as `_experts`: gate and up are interleaved columns."""

    def fused(name: str, *inputs: int) -> list[Source]:
        """Return the source of [count, *inputs, 2, mlp]."""
        dims, order = (count, *inputs), tuple(range(1 + len(inputs)))
        last = len(dims)
        view = (*dims, mlp, 2)
        return [Source(f"mlp.experts.{name}", (*dims, 2 * mlp), view, (*order, last + 1, last))]

    yield "mlp/router", (d, count), [_turned("mlp.router.weight", count, d)]
    yield "mlp/router_bias", (count,), [_same("mlp.router.bias", count)]
    yield "mlp/up", (count, d, 2, mlp), fused("gate_up_proj", d)
    yield "mlp/up_bias", (count, 2, mlp), fused("gate_up_proj_bias")
    yield "mlp/down", (count, mlp, d), [_same("mlp.experts.down_proj", count, mlp, d)]
    yield "mlp/down_bias", (count, d), [_same("mlp.experts.down_proj_bias", count, d)]


_PROJECTIONS = ("mlp", "gate_proj", "up_proj", "down_proj")
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": _PROJECTIONS,
    "qwen3_moe": _PROJECTIONS,
    "olmoe": _PROJECTIONS,
    "dots1": _PROJECTIONS,
}
"""Family -> names of the module, and of the gate, up and down products of its experts."""


def _gpt2_pieces(config: DecoderConfig) -> Iterator[Piece]:
    d, mlp, heads, width = config.d_model, config.mlp_dim, config.num_heads, config.head_width
    inner = heads * width

    def of_layer(
        ours: str, shape: tuple[int, ...], hf_name: str, *views: tuple[int, ...]
    ) -> Iterator[Piece]:
        """Yield a piece per layer; `views`: the tensor's shape, shape with split dims, order."""
        stored, view, order = views or (shape, shape, tuple(range(len(shape))))
        for layer in range(config.num_layers):
            source = Source(f"transformer.h.{layer}.{hf_name}", stored, view, order)
            yield Piece(f"params/layers/{ours}", layer, shape, (source,))

    yield _table(config, "transformer.wte.weight")
    yield from _head(config)
    positions = _same("transformer.wpe.weight", config.max_seq_len, d)
    yield Piece("params/embed/positions", None, positions.shape, (positions,))
    for leaf, hf_name in (("scale", "weight"), ("bias", "bias")):
        norm = _same(f"transformer.ln_f.{hf_name}", d)
        yield Piece(f"params/head/norm/{leaf}", None, (d,), (norm,))
        yield from of_layer(f"attention_norm/{leaf}", (d,), f"ln_1.{hf_name}")
        yield from of_layer(f"mlp_norm/{leaf}", (d,), f"ln_2.{hf_name}")
    # The tensor has queries, then keys, then values.
    qkv, split, order = (d, heads, 3, width), (d, 3, heads, width), (0, 2, 1, 3)
    yield from of_layer("attention/qkv", qkv, "attn.c_attn.weight", (d, 3 * inner), split, order)
    yield from of_layer(
        "attention/qkv_bias", qkv[1:], "attn.c_attn.bias", (3 * inner,), split[1:], (1, 0, 2)
    )
    out = (heads, width, d)
    yield from of_layer("attention/out", out, "attn.c_proj.weight", (inner, d), out, (0, 1, 2))
    yield from of_layer("attention/out_bias", (d,), "attn.c_proj.bias")
    up = (d, 1, mlp)
    yield from of_layer("mlp/up", up, "mlp.c_fc.weight", (d, mlp), up, (0, 1, 2))
    yield from of_layer("mlp/up_bias", (1, mlp), "mlp.c_fc.bias", (mlp,), (1, mlp), (0, 1))
    yield from of_layer("mlp/down", (mlp, d), "mlp.c_proj.weight")
    yield from of_layer("mlp/down_bias", (d,), "mlp.c_proj.bias")


def _same(name: str, *shape: int) -> Source:
    return Source(name, shape, shape, tuple(range(len(shape))))


def _turned(name: str, rows: int, columns: int) -> Source:
    return Source(name, (rows, columns), (rows, columns), (1, 0))


def _table(config: DecoderConfig, name: str) -> Piece:
    source = _same(name, config.vocab_size, config.d_model)
    return Piece("params/embed/table", None, (config.padded_vocab, config.d_model), (source,))


def _head(config: DecoderConfig) -> Iterator[Piece]:
    """Yield the kernel of scores, or of logits unless it is the embedding table."""
    d, labels = config.d_model, config.num_labels
    if labels:
        yield Piece("params/head/score", None, (d, labels), (_turned("score.weight", labels, d),))
    elif not config.tie_embeddings:
        source = _turned("lm_head.weight", config.vocab_size, d)
        yield Piece("params/head/kernel", None, (d, config.padded_vocab), (source,))


def _fused_qkv(sources: Sequence[Source]) -> Iterator[Source]:
    """Yield the sources as row ranges of one tensor that stacks query, key and value."""
    rows = sum(source.num_rows for source in sources)
    first = 0
    for source in sources:
        yield dataclasses.replace(
            source,
            name="self_attn.qkv_proj.weight",
            shape=(rows, *source.shape[1:]),
            first_row=first,
        )
        first += source.num_rows


def _qkv(config: DecoderConfig, leaf: str) -> tuple[Any, ...]:
    """Return the shape [d_model,] kv_heads, group + 2, width, and the sources query, key, value."""
    kv, width = config.kv_heads, config.head_width
    group = config.num_heads // kv
    inputs = (config.d_model,) if leaf == "weight" else ()
    order = (3, 0, 1, 2) if inputs else (0, 1, 2)
    sources = [
        Source(
            f"self_attn.{name}_proj.{leaf}",
            (kv * count * width, *inputs),
            (kv, count, width, *inputs),
            order,
            (*(0 for _ in inputs), 0, start, 0),
        )
        for name, count, start in (("q", group, 0), ("k", 1, group), ("v", 1, group + 1))
    ]
    return (*inputs, kv, group + 2, width), *sources
