"""Hugging Face's decoders and ours: the same model under other names and in other shapes.

`read_config` and `write_config` translate the sizes; `pieces` lists, for each of our arrays (one
layer at a time where layers are stacked), the Hugging Face tensors it is made of and how. Both
directions move values without arithmetic, so that a round trip is exact.

References:
    The `config.json` and tensor names of Hugging Face transformers' GPT2, Llama, Mistral, Qwen2 and
    Qwen3 models, as their saved checkpoints have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist.core.settings import ConfigError, problems_of
from jaxdist.models.configs import ROPE_SCALING, DecoderConfig
from jaxdist.models.huggingface.config_keys import key_problems, rope_of

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

FAMILIES = tuple(_ARCHITECTURES)
"""`model_type` of the configs that can be read and written."""


_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "max_seq_len",
    "n_embd": "d_model",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "mlp_dim",
    "layer_norm_epsilon": "norm_eps",
}
_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}
# Key of config.json -> our setting, of the families of GPT-2 and of all others.

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A Hugging Face tensor as a block of a part of ours: its dims split and put in our order.

    Attributes:
        view: the same with some dims split in two or more.
        order: dim i of our part is dim `order[i]` of the view.
        dim: dim of our part along which several tensors lie side by side.
        start: where this one begins along it.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    dim: int = 0
    start: int = 0

    @property
    def block(self) -> Index:
        """The place of the tensor in our part."""
        index = [slice(0, self.view[dim]) for dim in self.order]
        index[self.dim] = slice(self.start, self.start + self.view[self.order[self.dim]])
        return tuple(index)

    def of_view(self, index: Index) -> Index:
        """The place in the view of a place in our part that lies inside `block`."""
        inside: list[slice] = [slice(0)] * len(self.view)
        for ours, theirs in enumerate(self.order):
            shift = self.start if ours == self.dim else 0
            inside[theirs] = slice(index[ours].start - shift, index[ours].stop - shift)
        return tuple(inside)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one of our arrays, and the Hugging Face tensors that it is made of.

    Attributes:
        name: our array, e.g. `params/layers/attention/qkv`.
        layer: index in the stacked dim, or None for an array that is not stacked.
        shape: of the part; what no tensor covers is padding and holds zeros.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def theirs(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(source.name for source in self.sources)

    @property
    def stored_order(self) -> tuple[int, ...]:
        """Our dims in the order in which the tensor stores them, slowest first."""
        order = self.sources[0].order
        return tuple(order.index(dim) for dim in range(len(order)))

    def read(
        self, index: Index, fetch: Callable[[Source, Index], np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """A block of our part, from no more of their tensors than it is made of.

        The index has start and stop in every dim; `fetch` gives (tensor, place in its view) -> the
        values there.

        Returns:
            The values, [*lengths of `index`].
        """
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
            place = (
                slice(s.start - i.start, s.stop - i.start) for s, i in zip(both, index, strict=True)
            )
            out[tuple(place)] = values
        return np.zeros(shape, dtype) if out is None else out

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """Our part [*shape] from their tensors, in the order of `sources`; their dtype."""
        views = {s.name: x.reshape(s.view) for s, x in zip(self.sources, tensors, strict=True)}
        whole = tuple(slice(0, size) for size in self.shape)
        return self.read(whole, lambda source, index: views[source.name][index], tensors[0].dtype)

    def split(self, part: np.ndarray) -> list[np.ndarray]:
        """Their tensors, in the order and shapes of `sources`, from our part [*shape].

        Views where possible.
        """
        return [
            part[source.block].transpose(np.argsort(source.order)).reshape(source.shape)
            for source in self.sources
        ]


def read_config(theirs: Any) -> DecoderConfig:
    """Our sizes from what a Hugging Face `config.json` holds.

    Raises:
        ConfigError: the family, or something it asks for, is not supported or not known.
    """
    if not isinstance(theirs, Mapping):
        raise ConfigError([f"config.json holds no object but {type(theirs).__name__}."])
    family = theirs.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type={family!r} is not supported. Supported are {', '.join(FAMILIES)}."
        )
    problems = key_problems(theirs, family)
    if not problems:
        config = _read_gpt2(theirs) if family == "gpt2" else _read_llama(theirs, family)
        problems = problems_of(config, "model")
    if problems:
        raise ConfigError([f"config.json: {problem}" for problem in problems])
    return config


def left_out(theirs: Mapping[str, Any]) -> list[str]:
    """What a Hugging Face `config.json` asks for in training that is not taken over, a line each.

    Its dropout: published models keep what they were trained with, and fine-tuning rarely wants it.
    """
    named = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout")
    rates = {name: theirs[name] for name in named if theirs.get(name)}
    if not rates:
        return []
    told = ", ".join(f"{name}={rate}" for name, rate in rates.items())
    return [
        f"config.json has {told}: not taken over, dropout is 0. Set model.dropout and "
        "model.attention_dropout if training should drop."
    ]


def family_of(config: DecoderConfig) -> str:
    """The family whose tensors can hold a model of ours.

    Raises:
        ConfigError: none can.
    """
    rotary = (config.positions, config.norm, config.activation) == ("rotary", "rms", "swiglu")
    biases = set(config.bias)
    if rotary and not config.sliding_window:
        if config.qk_norm and not biases:
            return "qwen3"
        if biases == {"qkv"} and not config.qk_norm:
            return "qwen2"
        # Llama has biases on all four products of attention, or on none.
        if not config.qk_norm and biases & {"qkv", "out"} in (set(), {"qkv", "out"}):
            return "llama"
    if rotary and config.sliding_window and not config.qk_norm and not biases:
        return "mistral"
    learned = (config.positions, config.norm, config.activation) == ("learned", "layer", "gelu")
    square = config.kv_heads == config.num_heads and not config.head_dim and not config.qk_norm
    if learned and biases == {"qkv", "out", "mlp"} and square and not config.sliding_window:
        return "gpt2"
    raise ConfigError(
        "this combination of model settings is none of the families "
        f"{', '.join(FAMILIES)}, so Hugging Face has no model for it. See configs/ for theirs."
    )


def write_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """A Hugging Face `config.json` for a model of ours, stored in `dtype`."""
    family = family_of(config)
    sizes = _GPT2_SIZES if family == "gpt2" else _LLAMA_SIZES
    theirs: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in sizes.items()},
    }
    if family == "gpt2":
        return theirs | {
            "activation_function": "gelu_new",
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    theirs |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": "out" in config.bias,
    }
    if family == "llama":
        theirs["mlp_bias"] = "mlp" in config.bias
    if config.rope_scaling:
        numbers = {name: value for name, value in config.rope_scaling.items() if name != "type"}
        theirs["rope_scaling"] = {"rope_type": config.rope_scaling["type"], **numbers}
    if family == "mistral":
        theirs["sliding_window"] = config.sliding_window
    return theirs


def pieces(config: DecoderConfig, family: str) -> Iterator[Piece]:
    """Every part of every array of ours, array by array, layer by layer."""
    return _gpt2_pieces(config) if family == "gpt2" else _llama_pieces(config)


def _read_llama(theirs: Mapping[str, Any], family: str) -> DecoderConfig:
    heads = theirs["num_attention_heads"]
    kv_heads = theirs.get("num_key_value_heads") or heads
    rope = rope_of(theirs)
    kind = rope["rope_type"]
    scaling: dict[str, Any] = {}
    if kind in ROPE_SCALING:
        known = {name: rope[name] for name in ROPE_SCALING[kind] if rope.get(name) is not None}
        scaling = {"type": kind, **known}
    if kind == "yarn":  # as transformers reads a config without it
        scaling.setdefault("original_max_position_embeddings", theirs["max_position_embeddings"])
    width = theirs.get("head_dim") or theirs["hidden_size"] // heads
    biases: list[Any] = ["qkv"] if family == "qwen2" else []
    if family == "llama":
        biases += ["qkv", "out"] if theirs.get("attention_bias") else []
        biases += ["mlp"] if theirs.get("mlp_bias") else []
    return DecoderConfig(
        **{ours: theirs[name] for name, ours in _LLAMA_SIZES.items()},
        num_kv_heads=0 if kv_heads == heads else kv_heads,
        head_dim=0 if width * heads == theirs["hidden_size"] else width,
        rope_theta=float(rope["rope_theta"]),
        qk_norm=family == "qwen3",
        bias=biases,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", False)),
        sliding_window=(theirs.get("sliding_window") or 0) if family == "mistral" else 0,
        rope_scaling=scaling,
    )


def _read_gpt2(theirs: Mapping[str, Any]) -> DecoderConfig:
    theirs = {**theirs, "n_inner": theirs.get("n_inner") or 4 * theirs["n_embd"]}
    return DecoderConfig(
        **{ours: theirs[name] for name, ours in _GPT2_SIZES.items()},
        norm="layer",
        positions="learned",
        activation="gelu",
        bias=["qkv", "out", "mlp"],
        tie_embeddings=bool(theirs.get("tie_word_embeddings", True)),
    )


def _llama_pieces(config: DecoderConfig) -> Iterator[Piece]:
    d, mlp, heads, width = config.d_model, config.mlp_dim, config.num_heads, config.head_width

    def of_layer(ours: str, shape: tuple[int, ...], *sources: Source) -> Iterator[Piece]:
        for layer in range(config.num_layers):
            named = (dataclasses.replace(s, name=f"model.layers.{layer}.{s.name}") for s in sources)
            yield Piece(f"params/layers/{ours}", layer, shape, tuple(named))

    yield _table(config, "model.embed_tokens.weight")
    yield Piece("params/head/norm/scale", None, (d,), (_same("model.norm.weight", d),))
    if not config.tie_embeddings:
        yield _head(config)
    yield from of_layer("attention_norm/scale", (d,), _same("input_layernorm.weight", d))
    yield from of_layer("attention/qkv", *_qkv(config, "weight"))
    if "qkv" in config.bias:
        yield from of_layer("attention/qkv_bias", *_qkv(config, "bias"))
    if config.qk_norm:
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            scale = _same(f"self_attn.{theirs}.weight", width)
            yield from of_layer(f"attention/{ours}/scale", (width,), scale)
    out = Source("self_attn.o_proj.weight", (d, heads * width), (d, heads, width), (1, 2, 0))
    yield from of_layer("attention/out", (heads, width, d), out)
    if "out" in config.bias:
        yield from of_layer("attention/out_bias", (d,), _same("self_attn.o_proj.bias", d))
    yield from of_layer("mlp_norm/scale", (d,), _same("post_attention_layernorm.weight", d))
    gates = (
        Source(f"mlp.{name}_proj.weight", (mlp, d), (mlp, d, 1), (1, 2, 0), dim=1, start=start)
        for start, name in enumerate(("gate", "up"))
    )
    yield from of_layer("mlp/up", (d, 2, mlp), *gates)
    yield from of_layer("mlp/down", (mlp, d), _turned("mlp.down_proj.weight", d, mlp))
    if "mlp" in config.bias:
        biases = (
            Source(f"mlp.{name}_proj.bias", (mlp,), (1, mlp), (0, 1), start=start)
            for start, name in enumerate(("gate", "up"))
        )
        yield from of_layer("mlp/up_bias", (2, mlp), *biases)
        yield from of_layer("mlp/down_bias", (d,), _same("mlp.down_proj.bias", d))


def _gpt2_pieces(config: DecoderConfig) -> Iterator[Piece]:
    d, mlp, heads, width = config.d_model, config.mlp_dim, config.num_heads, config.head_width
    inner = heads * width

    def of_layer(
        ours: str, shape: tuple[int, ...], theirs: str, *views: tuple[int, ...]
    ) -> Iterator[Piece]:
        """One tensor of each layer; `views`: its shape, its dims split, their order."""
        stored, view, order = views or (shape, shape, tuple(range(len(shape))))
        for layer in range(config.num_layers):
            source = Source(f"transformer.h.{layer}.{theirs}", stored, view, order)
            yield Piece(f"params/layers/{ours}", layer, shape, (source,))

    yield _table(config, "transformer.wte.weight")
    if not config.tie_embeddings:
        yield _head(config)
    positions = _same("transformer.wpe.weight", config.max_seq_len, d)
    yield Piece("params/embed/positions", None, positions.shape, (positions,))
    for leaf, theirs in (("scale", "weight"), ("bias", "bias")):
        norm = _same(f"transformer.ln_f.{theirs}", d)
        yield Piece(f"params/head/norm/{leaf}", None, (d,), (norm,))
        yield from of_layer(f"attention_norm/{leaf}", (d,), f"ln_1.{theirs}")
        yield from of_layer(f"mlp_norm/{leaf}", (d,), f"ln_2.{theirs}")
    # Theirs has queries, then keys, then values.
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
    """A tensor that is ours as it stands."""
    return Source(name, shape, shape, tuple(range(len(shape))))


def _turned(name: str, rows: int, columns: int) -> Source:
    """A matrix that is ours with its dims swapped."""
    return Source(name, (rows, columns), (rows, columns), (1, 0))


def _table(config: DecoderConfig, name: str) -> Piece:
    """The embedding table, whose rows of padding exist only on our side."""
    source = _same(name, config.vocab_size, config.d_model)
    return Piece("params/embed/table", None, (config.padded_vocab, config.d_model), (source,))


def _head(config: DecoderConfig) -> Piece:
    """The output kernel of a model whose head is not the embedding table."""
    source = _turned("lm_head.weight", config.vocab_size, config.d_model)
    return Piece("params/head/kernel", None, (config.d_model, config.padded_vocab), (source,))


def _qkv(config: DecoderConfig, leaf: str) -> tuple[Any, ...]:
    """Shape of ours, [d_model,] kv_heads, group + 2, width, and theirs: query, key and value."""
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
            dim=len(inputs) + 1,
            start=start,
        )
        for name, count, start in (("q", group, 0), ("k", 1, group), ("v", 1, group + 1))
    ]
    return (*inputs, kv, group + 2, width), *sources
