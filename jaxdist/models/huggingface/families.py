"""Translate the settings of saved Hugging Face decoders (`FAMILIES`) to ours and back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxdist.models.configs import ROPE_SCALING, DecoderConfig, ModelConfig
from jaxdist.models.huggingface.config_keys import (
    DEFAULTS,
    DROPOUT,
    GEMMAS,
    GPT2_SIZES,
    LLAMA_SIZES,
    MIXED,
    full_every,
    key_problems,
    local_rope_of,
    rope_of,
)
from jaxdist.settings import ConfigError, problems_of

_ARCHITECTURES = {
    "dots1": "Dots1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

FAMILIES = (*_ARCHITECTURES, "phi3")
"""Supported `model_type`s. Phi-3 is exported as Llama, or as Mistral if it has a window."""

_LATENT = "multi-head latent attention (MLA)"
_DELTA = "layers with a gated delta net"
_LLAMA4 = "chunked attention, layers without positions and experts whose inputs the router scales"
_MISSING = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe": "rotary positions of a part of each head",
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "qwen3_5_moe": _DELTA,
    "qwen3_next": _DELTA,
}
"""Well-known `model_type`s that are not supported -> what they need."""

_QK_NORMS: Mapping[str, Any] = {
    "dots1": "head",
    "qwen3": "head",
    "qwen3_moe": "head",
    "olmo2": "all",
    "olmoe": "all",
    "gemma3_text": "head",
}
_WINDOWED = ("mistral", "mixtral", "phi3", *MIXED)


def read_config(hf: Any) -> DecoderConfig:
    """Return the settings of a `config.json`; optional keys default as in transformers."""
    if not isinstance(hf, Mapping):
        raise ConfigError([f"config.json is not an object but {type(hf).__name__}."])
    family = hf.get("model_type")
    if family not in FAMILIES:
        lacks = f": it needs {_MISSING[str(family)]}" if str(family) in _MISSING else ""
        raise ConfigError(
            f"model_type={family!r} is not supported{lacks}. Supported are {', '.join(FAMILIES)}."
        )
    hf = {**DEFAULTS[family], **hf}
    problems = key_problems(hf, family)
    if not problems:
        config = _read_gpt2(hf) if family == "gpt2" else _read_llama(hf, family)
        config = dataclasses.replace(config, num_labels=_num_labels(hf))
        problems = problems_of(config, "model")
    if problems:
        raise ConfigError([f"config.json: {problem}" for problem in problems])
    return config


_LABELED = "ForSequenceClassification"


def _num_labels(hf: Mapping[str, Any]) -> int:
    """Return a classifier's number of labels, by default 2 as in transformers; 0 for others."""
    if not any(str(name).endswith(_LABELED) for name in hf.get("architectures") or ()):
        return 0
    return len(hf.get("id2label") or ()) or hf.get("num_labels") or 2


def left_out(hf: Mapping[str, Any]) -> list[str]:
    """Return a log line about ignored dropout rates of a `config.json`, if any: at most one."""
    rates = ", ".join(f"{name}={hf[name]}" for name in DROPOUT if hf.get(name))
    return [
        f"config.json has {rates}, which is ignored. Set model.dropout and "
        "model.attention_dropout to use it."
    ] * bool(rates)


def decoder_of(model: ModelConfig, where: str) -> DecoderConfig:
    """Return `model` if it is a decoder, else raise `ConfigError`; `where` names its source."""
    if not isinstance(model, DecoderConfig):
        raise ConfigError(
            f"{where} has a {model.kind}. Only decoders can be exported to Hugging Face."
        )
    return model


def family_of(config: DecoderConfig) -> str:
    """Return the first `model_type` with which the written settings read back as the same model.

    Raises:
        ConfigError: there is none.
    """
    for family in _ARCHITECTURES:
        if (family in _NUM_EXPERTS) == bool(config.num_experts):
            with contextlib.suppress(ConfigError):
                if _saved(read_config(_keys(config, family))) == _saved(config):
                    return family
    raise ConfigError(
        "these model settings match none of the Hugging Face families "
        f"{', '.join(_ARCHITECTURES)}, so they cannot be exported. "
        "See configs/ for settings of these families."
    )


def _saved(config: DecoderConfig) -> dict[str, Any]:
    """Return what a `config.json` holds: no settings of training, and each in one spelling."""
    if not config.num_experts:
        config = dataclasses.replace(config.dense, mlp_dim=config.mlp_dim)
    training = ("bias_rate", "balance_loss", "balance_scope", "z_loss", "capacity_factor")
    values = dataclasses.asdict(config) | {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_width,
        "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_width,
        "rope_theta": config.positions == "rotary" and config.rope_theta,
        "bias": set(config.bias),
        "dense_layers": set(config.dense_layers),
        "router": {n: v for n, v in vars(config.routing).items() if n not in training},
        "windows": config.windows,
    }
    unsaved = ("dropout", "attention_dropout", "init_std", "attention", "num_labels")
    for name in (*unsaved, "sliding_window", "full_attention_every"):
        del values[name]
    return values


_DOTS_ROUTER = {
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
    "norm_topk": "norm_topk_prob",
}
"""Our key of `model.router` -> that of dots.llm1."""


def write_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return a Hugging Face `config.json` for a model whose weights are stored in `dtype`."""
    family = family_of(config)
    name, labels = _ARCHITECTURES[family], dict[str, Any]()
    if config.num_labels:
        if family in ("dots1", "olmoe"):
            raise ConfigError(
                f"transformers has no sequence classification for {family}: this model cannot be "
                "exported."
            )
        name = {"gemma3_text": "Gemma3TextForCausalLM", "gpt2": "GPT2ForCausalLM"}.get(family, name)
        name = name.replace("ForCausalLM", _LABELED)
        ids = range(config.num_labels)
        labels["id2label"] = {str(i): f"LABEL_{i}" for i in ids}
        labels["label2id"] = {f"LABEL_{i}": i for i in ids}
    return {"architectures": [name], **labels, "torch_dtype": dtype, **_keys(config, family)}


def _keys(config: DecoderConfig, family: str) -> dict[str, Any]:
    """Return the keys that a `config.json` of the family has for the model."""
    hf: dict[str, Any] = {
        "model_type": family,
        "tie_word_embeddings": config.tie_embeddings,
        **{
            name: getattr(config, ours)
            for name, ours in (GPT2_SIZES if family == "gpt2" else LLAMA_SIZES).items()
        },
    }
    if family == "gpt2":
        return hf | {
            "activation_function": "gelu_new",
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    hf |= {
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "attention_bias": "out" in config.bias,
    }
    if family in GEMMAS:
        hf |= _gemma_keys(config, family)
    else:
        hf["hidden_act"] = "silu"
    if family not in ("olmo2", "olmoe"):  # these have only hidden_size / num_attention_heads
        hf["head_dim"] = config.head_width
    if family == "llama":
        hf["mlp_bias"] = "mlp" in config.bias
    if config.rope_scaling or family == "gpt_oss":  # whose default is a scaling
        scaling = {"type": "default", **config.rope_scaling}
        hf["rope_scaling"] = {"rope_type": scaling.pop("type"), **scaling}
    if family in ("mistral", "mixtral", "gpt_oss"):
        hf["sliding_window"] = config.sliding_window or None
    if family == "gpt_oss":
        hf["layer_types"] = _layer_types(config)
    if config.num_experts:
        hf[_NUM_EXPERTS[family]] = config.num_experts
        hf["num_experts_per_tok"] = config.experts_per_token
        if family in ("dots1", "qwen2_moe", "qwen3_moe"):
            hf["moe_intermediate_size"] = config.mlp_dim
            hf["intermediate_size"] = config.dense_mlp_dim or config.mlp_dim
        if family in ("qwen2_moe", "qwen3_moe"):
            hf |= {"decoder_sparse_step": 1, "mlp_only_layers": config.dense_layers}
        if family == "qwen2_moe":
            hf["shared_expert_intermediate_size"] = config.shared_expert_dim
        if family == "dots1":
            hf |= {name: getattr(config.routing, ours) for ours, name in _DOTS_ROUTER.items()} | {
                "n_shared_experts": config.shared_expert_dim // config.mlp_dim,
                "first_k_dense_replace": len(config.dense_layers),
                "sliding_window": None,
            }
        elif family not in ("mixtral", "gpt_oss"):
            hf["norm_topk_prob"] = config.routing.norm_topk
    return hf


_NUM_EXPERTS = {
    "dots1": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
}


def _read_experts(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the MoE settings; newer Qwen3-MoE files have Mixtral's key `num_local_experts`."""
    count = hf.get(_NUM_EXPERTS[family]) or hf["num_local_experts"]
    shared: dict[str, Any] = {}
    dense: list[int] = []
    is_normed = family in ("mixtral", "gpt_oss") or hf["norm_topk_prob"]
    router: dict[str, Any] = {} if is_normed else {"norm_topk": False}
    if family == "dots1":
        router = {"scores": "sigmoid", "bias": True}
        router |= {ours: hf[name] for ours, name in _DOTS_ROUTER.items()}
        dense = list(range(hf["first_k_dense_replace"]))
        shared = {"shared_expert_dim": hf["n_shared_experts"] * hf["moe_intermediate_size"]}
    if family == "qwen2_moe":
        width = hf["shared_expert_intermediate_size"]
        shared = {"shared_expert_dim": width, "shared_expert_gate": True}
    if family in ("qwen2_moe", "qwen3_moe"):
        step, named = hf["decoder_sparse_step"], hf["mlp_only_layers"] or []
        layers = range(hf["num_hidden_layers"])
        dense = [i for i in layers if i in named or (i + 1) % step]
    return shared | {
        "dense_layers": dense,
        "dense_mlp_dim": hf["intermediate_size"] if dense else 0,
        "num_experts": count,
        "experts_per_token": hf["num_experts_per_tok"],
        "router": router,
        **({"mlp_dim": hf["moe_intermediate_size"]} if "moe_intermediate_size" in hf else {}),
    }


def _read_llama(hf: Mapping[str, Any], family: str) -> DecoderConfig:
    heads = hf["num_attention_heads"]
    kv_heads = hf["num_key_value_heads"] or heads
    rope = rope_of(hf)
    kind = rope["rope_type"]
    scaling: dict[str, Any] = {}
    if kind in ROPE_SCALING:
        values = {name: rope[name] for name in ROPE_SCALING[kind] if rope.get(name) is not None}
        scaling = {"type": kind, **values}
    if kind == "yarn":  # the default of transformers
        scaling.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    width = hf["head_dim"] or hf["hidden_size"] // heads
    biases: list[Any] = ["qkv"] if family in ("qwen2", "qwen2_moe") else []
    if family == "llama":
        biases += ["qkv", "out"] if hf["attention_bias"] else []
        biases += ["mlp"] if hf["mlp_bias"] else []
    if family == "gpt_oss":
        biases = ["qkv", "out"] * hf["attention_bias"] + ["mlp", "router"]
    ours: dict[str, Any] = dict(
        {ours: hf[name] for name, ours in LLAMA_SIZES.items()},
        num_kv_heads=0 if kv_heads == heads else kv_heads,
        head_dim=0 if width * heads == hf["hidden_size"] else width,
        rope_theta=float(rope["rope_theta"]),
        norm_placement="post" if family == "olmo2" else "pre",
        qk_norm=_QK_NORMS.get(family, "none"),
        bias=biases,
        tie_embeddings=bool(hf["tie_word_embeddings"]),
        sliding_window=(hf["sliding_window"] or 0) if family in _WINDOWED else 0,
        rope_scaling=scaling,
    )
    if family in _NUM_EXPERTS:
        ours |= _read_experts(hf, family)
    if family == "gpt_oss":
        ours |= {"activation": "clamped_swiglu", "attention_sinks": True}
        ours["full_attention_every"] = full_every(hf, family)
    return DecoderConfig(**ours | (_read_gemma(hf, family, width) if family in GEMMAS else {}))


def _layer_types(config: DecoderConfig) -> list[str]:
    return [f"{'sliding' if window else 'full'}_attention" for window in config.windows]


def _gemma_keys(config: DecoderConfig, family: str) -> dict[str, Any]:
    hf: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_width,
        "final_logit_softcapping": config.logit_softcap or None,
        "attn_logit_softcapping": config.attention_softcap or None,
        "sliding_window": config.sliding_window,
        "layer_types": _layer_types(config),
    }
    if family == "gemma3_text":
        hf["rope_local_base_freq"] = config.local_rope_theta
    return hf


def _read_gemma(hf: Mapping[str, Any], family: str, width: int) -> dict[str, Any]:
    scalar = hf["query_pre_attn_scalar"]
    ours: dict[str, Any] = {
        "norm": "zero_centered_rms",
        "norm_placement": "both",
        "activation": "geglu",
        "scale_embeddings": True,
        "full_attention_every": full_every(hf, family),
        "query_pre_attn_scalar": 0 if scalar == width else scalar,
        "attention_softcap": float(hf["attn_logit_softcapping"] or 0),
        "logit_softcap": float(hf["final_logit_softcapping"] or 0),
    }
    if family == "gemma3_text":
        ours["local_rope_theta"] = float(local_rope_of(hf)["rope_theta"])
    return ours


def _read_gpt2(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = {**hf, "n_inner": hf["n_inner"] or 4 * hf["n_embd"]}
    return DecoderConfig(
        **{ours: hf[name] for name, ours in GPT2_SIZES.items()},
        norm="layer",
        positions="learned",
        activation="gelu",
        bias=["qkv", "out", "mlp"],
        tie_embeddings=bool(hf["tie_word_embeddings"]),
    )
