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

from jaxdist.models.configs import DecoderConfig
from jaxdist.types import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""`model_type` of the configs that can be read and written."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one of our arrays.

    Attributes:
        name: our array, e.g. `params/layers/attention/qkv`.
        layer: index in the stacked dim, or None for an array that is not stacked.
        theirs: names of the Hugging Face tensors that it is made of.
        join: their tensors -> our part.
        split: our part -> their tensors, in the same order.
    """

    name: str
    layer: int | None
    theirs: tuple[str, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]


def read_config(theirs: Mapping[str, Any]) -> DecoderConfig:
    """Our sizes from a Hugging Face `config.json`.

    Raises:
        ConfigError: the family, or something it asks for, is not supported.
    """
    family = theirs.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            [f"model_type={family!r} is not supported. Supported are {', '.join(FAMILIES)}."]
        )
    config = _read_gpt2(theirs) if family == "gpt2" else _read_llama(theirs, family)
    problems = _unsupported(theirs, family) + config.problems()
    if problems:
        raise ConfigError(problems)
    return config


def family_of(config: DecoderConfig) -> str:
    """The family whose tensors can hold a model of ours.

    Raises:
        ConfigError: none can.
    """
    rotary = (config.positions, config.norm, config.activation) == ("rotary", "rms", "swiglu")
    plain = not (config.out_bias or config.mlp_bias)
    if rotary and plain:
        if config.qk_norm and not config.qkv_bias and not config.sliding_window:
            return "qwen3"
        if config.qkv_bias and not config.qk_norm and not config.sliding_window:
            return "qwen2"
        if not config.qk_norm and not config.qkv_bias:
            return "mistral" if config.sliding_window else "llama"
    learned = (config.positions, config.norm, config.activation) == ("learned", "layer", "gelu")
    biases = config.qkv_bias and config.out_bias and config.mlp_bias
    square = config.kv_heads == config.num_heads and not config.head_dim and not config.qk_norm
    if learned and biases and square and config.tie_embeddings:
        return "gpt2"
    raise ConfigError(
        [
            "this combination of model settings is none of the families "
            f"{', '.join(FAMILIES)}, so Hugging Face has no model for it. See configs/ for theirs."
        ]
    )


def write_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """A Hugging Face `config.json` for a model of ours, stored in `dtype`."""
    family = family_of(config)
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if family == "gpt2":
        return {
            **common,
            "n_positions": config.max_seq_len,
            "n_embd": config.d_model,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.mlp_dim,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    sizes = {
        **common,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if config.rope_scaling == "llama3":
        sizes["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_len,
        }
    if family == "mistral":
        sizes["sliding_window"] = config.sliding_window
    return sizes


def pieces(config: DecoderConfig, family: str) -> Iterator[Piece]:
    """Every part of every array of ours, array by array, layer by layer."""
    if family == "gpt2":
        return _gpt2_pieces(config)
    return _llama_pieces(config)


def _read_llama(theirs: Mapping[str, Any], family: str) -> DecoderConfig:
    heads = theirs["num_attention_heads"]
    kv_heads = theirs.get("num_key_value_heads") or heads
    rope = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    stretched = {}
    if rope.get("rope_type", rope.get("type")) == "llama3":
        stretched = {
            "rope_scaling": "llama3",
            "rope_factor": float(rope["factor"]),
            "rope_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_original_len": rope["original_max_position_embeddings"],
        }
    width = theirs.get("head_dim") or theirs["hidden_size"] // heads
    return DecoderConfig(
        vocab_size=theirs["vocab_size"],
        d_model=theirs["hidden_size"],
        num_layers=theirs["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=0 if kv_heads == heads else kv_heads,
        head_dim=0 if width * heads == theirs["hidden_size"] else width,
        mlp_dim=theirs["intermediate_size"],
        max_seq_len=theirs["max_position_embeddings"],
        norm_eps=theirs["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta", theirs.get("rope_theta", 10000.0))),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        tie_embeddings=bool(theirs.get("tie_word_embeddings", False)),
        sliding_window=(theirs.get("sliding_window") or 0) if family == "mistral" else 0,
        **stretched,
    )


def _read_gpt2(theirs: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=theirs["vocab_size"],
        d_model=theirs["n_embd"],
        num_layers=theirs["n_layer"],
        num_heads=theirs["n_head"],
        mlp_dim=theirs.get("n_inner") or 4 * theirs["n_embd"],
        max_seq_len=theirs["n_positions"],
        norm="layer",
        norm_eps=theirs["layer_norm_epsilon"],
        positions="learned",
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    )


def _unsupported(theirs: Mapping[str, Any], family: str) -> list[str]:
    """What a config asks for that our decoder would silently not do."""
    activation = theirs.get("activation_function" if family == "gpt2" else "hidden_act")
    allowed = {"gpt2": ("gelu_new", "gelu_pytorch_tanh")}.get(family, ("silu", "swish"))
    found = []
    if activation is not None and activation not in allowed:
        found.append(f"activation {activation!r}: only {', '.join(allowed)} is supported.")
    rope = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        found.append(f"rope_type={kind!r}: only default and llama3 are supported.")
    wrong = {
        "attention_bias": (family != "gpt2", "biases of the attention products"),
        "mlp_bias": (True, "biases of the MLP products"),
        "use_sliding_window": (family in ("qwen2", "qwen3"), "a sliding window in some layers"),
        "scale_attn_by_inverse_layer_idx": (family == "gpt2", "scaling by layer"),
        "add_cross_attention": (family == "gpt2", "cross attention"),
    }
    found += [
        f"{key}=true ({what}) is not supported for {family}."
        for key, (matters, what) in wrong.items()
        if matters and theirs.get(key)
    ]
    if family == "gpt2" and not theirs.get("tie_word_embeddings", True):
        found.append("tie_word_embeddings=false is not supported for gpt2.")
    return found


def _llama_pieces(config: DecoderConfig) -> Iterator[Piece]:
    def of_layer(
        ours: str, *theirs: str, join: Any = _only, split: Any = _alone
    ) -> Iterator[Piece]:
        for layer in range(config.num_layers):
            names = tuple(f"model.layers.{layer}.{name}" for name in theirs)
            yield Piece(f"params/layers/{ours}", layer, names, join, split)

    fuse, unfuse = _fusing(config)
    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    heads = (config.num_heads, config.head_width, config.d_model)
    yield _table(config, "model.embed_tokens.weight")
    yield Piece("params/head/norm/scale", None, ("model.norm.weight",), _only, _alone)
    if not config.tie_embeddings:
        yield Piece(
            "params/head/kernel",
            None,
            ("lm_head.weight",),
            lambda x: _padded(config, x[0]).T,
            lambda x: [x.T[: config.vocab_size]],
        )
    yield from of_layer("attention_norm/scale", "input_layernorm.weight")
    yield from of_layer("attention/qkv", *(f"{n}.weight" for n in qkv), join=fuse, split=unfuse)
    if config.qkv_bias:
        yield from of_layer(
            "attention/qkv_bias", *(f"{n}.bias" for n in qkv), join=fuse, split=unfuse
        )
    if config.qk_norm:
        yield from of_layer("attention/query_norm/scale", "self_attn.q_norm.weight")
        yield from of_layer("attention/key_norm/scale", "self_attn.k_norm.weight")
    yield from of_layer(
        "attention/out",
        "self_attn.o_proj.weight",
        join=lambda x: x[0].T.reshape(heads),
        split=lambda x: [x.reshape(-1, config.d_model).T],
    )
    yield from of_layer("mlp_norm/scale", "post_attention_layernorm.weight")
    yield from of_layer(
        "mlp/up",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        join=lambda x: np.stack([part.T for part in x], axis=1),
        split=lambda x: [x[:, 0].T, x[:, 1].T],
    )
    yield from of_layer(
        "mlp/down", "mlp.down_proj.weight", join=lambda x: x[0].T, split=lambda x: [x.T]
    )


def _gpt2_pieces(config: DecoderConfig) -> Iterator[Piece]:
    def of_layer(ours: str, theirs: str, join: Any = _only, split: Any = _alone) -> Iterator[Piece]:
        for layer in range(config.num_layers):
            name = f"transformer.h.{layer}.{theirs}"
            yield Piece(f"params/layers/{ours}", layer, (name,), join, split)

    fuse, unfuse = _fusing(config)
    heads = (config.num_heads, config.head_width, config.d_model)
    whole = lambda x: np.concatenate(unfuse(x)).T  # theirs: [d_model, q then k then v]
    yield _table(config, "transformer.wte.weight")
    yield Piece("params/embed/positions", None, ("transformer.wpe.weight",), _only, _alone)
    for leaf, theirs in (("scale", "weight"), ("bias", "bias")):
        name = f"transformer.ln_f.{theirs}"
        yield Piece(f"params/head/norm/{leaf}", None, (name,), _only, _alone)
        yield from of_layer(f"attention_norm/{leaf}", f"ln_1.{theirs}")
        yield from of_layer(f"mlp_norm/{leaf}", f"ln_2.{theirs}")
    for ours, theirs in (("qkv", "weight"), ("qkv_bias", "bias")):
        yield from of_layer(
            f"attention/{ours}",
            f"attn.c_attn.{theirs}",
            join=lambda x: fuse(np.split(x[0].T, 3)),
            split=lambda x: [whole(x)],
        )
    yield from of_layer(
        "attention/out",
        "attn.c_proj.weight",
        join=lambda x: x[0].reshape(heads),
        split=lambda x: [x.reshape(-1, config.d_model)],
    )
    yield from of_layer("attention/out_bias", "attn.c_proj.bias")
    yield from of_layer(
        "mlp/up", "mlp.c_fc.weight", join=lambda x: x[0][:, None], split=lambda x: [x[:, 0]]
    )
    yield from of_layer(
        "mlp/up_bias", "mlp.c_fc.bias", join=lambda x: x[0][None], split=lambda x: [x[0]]
    )
    yield from of_layer("mlp/down", "mlp.c_proj.weight")
    yield from of_layer("mlp/down_bias", "mlp.c_proj.bias")


def _only(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return tensors[0]


def _alone(part: np.ndarray) -> list[np.ndarray]:
    return [part]


def _table(config: DecoderConfig, theirs: str) -> Piece:
    """The embedding table, whose rows of padding exist only on our side."""
    return Piece(
        "params/embed/table",
        None,
        (theirs,),
        lambda x: _padded(config, x[0]),
        lambda x: [x[: config.vocab_size]],
    )


def _padded(config: DecoderConfig, rows: np.ndarray) -> np.ndarray:
    return np.pad(rows, ((0, config.padded_vocab - config.vocab_size), (0, 0)))


def _fusing(config: DecoderConfig) -> tuple[Any, Any]:
    """Query, key and value [heads·width, ...] <-> [..., kv_heads, group + 2, width]."""
    kv, width = config.kv_heads, config.head_width
    group = config.num_heads // kv

    def fuse(tensors: Sequence[np.ndarray]) -> np.ndarray:
        parts = [x.reshape(kv, -1, width, *x.shape[1:]) for x in tensors]
        return np.moveaxis(np.concatenate(parts, axis=1), (0, 1, 2), (-3, -2, -1))

    def unfuse(part: np.ndarray) -> list[np.ndarray]:
        parts = np.split(np.moveaxis(part, (-3, -2, -1), (0, 1, 2)), [group, group + 1], axis=1)
        return [x.reshape(-1, *x.shape[3:]) for x in parts]

    return fuse, unfuse
