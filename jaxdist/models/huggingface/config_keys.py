"""Check the keys of Hugging Face's `config.json`: used, harmless, or rejected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.models.configs import ROPE_SCALING

GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "max_seq_len",
    "n_embd": "d_model",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "mlp_dim",
    "layer_norm_epsilon": "norm_eps",
}
LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}
# Key of config.json -> our setting, for GPT-2 and for all other families.

_OPTIONAL = {
    "max_position_embeddings": int,
    "n_positions": int,
    "rms_norm_eps": float,
    "layer_norm_epsilon": float,
    "num_key_value_heads": int,
    "head_dim": int,
    "sliding_window": int,
    "n_inner": int,
    "rope_theta": float,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "tie_word_embeddings": bool,
}
_LLAMA_ONLY = {"attention_bias": bool, "mlp_bias": bool}
"""Biases of all four projections of attention and all three of the MLP."""

_GEMMA = {
    "query_pre_attn_scalar": int,
    "final_logit_softcapping": float,
    "sliding_window_pattern": int,
    "_sliding_window_pattern": int,
}
_DOTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_EXPERTS = {"num_local_experts": int, "num_experts_per_tok": int}
_QWEN_EXPERTS = {
    **_EXPERTS,
    "num_experts": int,
    "moe_intermediate_size": int,
    "norm_topk_prob": bool,
    "decoder_sparse_step": int,
    "mlp_only_layers": list,
}
_BY_FAMILY: dict[str, Mapping[str, type]] = {
    "llama": _LLAMA_ONLY,
    "dots1": {
        "n_routed_experts": int,
        "n_shared_experts": int,
        "num_experts_per_tok": int,
        "moe_intermediate_size": int,
        "first_k_dense_replace": int,
        "n_group": int,
        "topk_group": int,
        "routed_scaling_factor": float,
        "norm_topk_prob": bool,
    },
    "mixtral": _EXPERTS,
    "olmoe": {"num_experts": int, "num_experts_per_tok": int, "norm_topk_prob": bool},
    "qwen2_moe": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": int},
    "qwen3_moe": _QWEN_EXPERTS,
    "gpt_oss": {**_EXPERTS, "attention_bias": bool, "quantization_config": dict},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": float},
    "gemma3_text": {**_GEMMA, "rope_local_base_freq": float},
}
"""Family -> types of its further keys."""

_DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0, num_key_value_heads=None,
    head_dim=None, sliding_window=None, tie_word_embeddings=False, attention_bias=False,
    mlp_bias=False,
)  # fmt: skip
_QWEN_DEFAULTS = dict(_DEFAULTS, max_position_embeddings=32768, num_key_value_heads=32)
_GEMMA_DEFAULTS = dict(
    _DEFAULTS, max_position_embeddings=131072, num_key_value_heads=4, head_dim=256,
    sliding_window=4096, tie_word_embeddings=True, query_pre_attn_scalar=256,
    final_logit_softcapping=None, attn_logit_softcapping=None,
)  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = dict(
    llama=_DEFAULTS,
    mistral=dict(
        _DEFAULTS, max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096
    ),
    mixtral=dict(
        _DEFAULTS, max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2,
    ),
    olmoe=dict(
        _DEFAULTS, max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64,
        num_experts_per_tok=8, norm_topk_prob=False,
    ),
    dots1=dict(
        _DEFAULTS, num_key_value_heads=32, n_routed_experts=None, n_shared_experts=None,
        num_experts_per_tok=None, moe_intermediate_size=1408, first_k_dense_replace=0, n_group=1,
        topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False,
    ),
    qwen2_moe=dict(
        _DEFAULTS, max_position_embeddings=32768, num_key_value_heads=16, num_experts=60,
        num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    qwen3_moe=dict(
        _DEFAULTS, max_position_embeddings=32768, num_key_value_heads=4, num_local_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    gpt_oss=dict(
        _DEFAULTS, max_position_embeddings=131072, num_key_value_heads=8, head_dim=64,
        rms_norm_eps=1e-5, rope_theta=150000.0, sliding_window=128, attention_bias=True,
        num_local_experts=128, num_experts_per_tok=4,
    ),
    phi3=dict(_DEFAULTS, max_position_embeddings=4096, rms_norm_eps=1e-5),
    olmo2=dict(_DEFAULTS, rms_norm_eps=1e-5),
    qwen2=_QWEN_DEFAULTS,
    qwen3=dict(_QWEN_DEFAULTS, head_dim=128),
    gemma2=dict(
        _GEMMA_DEFAULTS, max_position_embeddings=8192, final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ),
    gemma3_text=dict(_GEMMA_DEFAULTS, rope_theta=1e6, rope_local_base_freq=10000.0),
    gpt2=dict(n_positions=1024, layer_norm_epsilon=1e-5, tie_word_embeddings=True, n_inner=None),
)  # fmt: skip
"""Family -> defaults of optional keys, as in transformers' config class."""

_NULL_IS_NONE = ("num_key_value_heads", "sliding_window", "final_logit_softcapping",
                 "attn_logit_softcapping")  # fmt: skip
"""Keys that may be null; others with a default may if that is null, false, 0 or []."""

GEMMAS: Mapping[str, int] = {"gemma2": 2, "gemma3_text": 6}
MIXED: Mapping[str, int] = {**GEMMAS, "gpt_oss": 2}
"""Family that mixes layers -> default interval of the layers without a window."""

_ROPE_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_WORDS = {
    int: "a whole number above 0",
    float: "a number above 0",
    dict: "an object",
    bool: "true or false",
    list: "a list",
}

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "clip_qkv": (),
    "qkv_bias": (True,),
    "moe_layer_freq": (1,),
    "scoring_func": ("noaux_tc", "sigmoid"),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7,),
    "topk_method": ("noaux_tc",),
}
"""Values for which our decoder computes the same function as transformers."""

DROPOUT = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout")
"""Dropout rates for training, which are ignored; see `families.left_out`."""

_HARMLESS = frozenset(
    """
    _name_or_path architectures dtype torch_dtype model_type transformers_version tokenizer_class
    attn_implementation _attn_implementation _attn_implementation_autoset
    initializer_range use_cache pretraining_tp chunk_size_feed_forward reorder_and_upcast_attn
    gradient_checkpointing torchscript use_bfloat16 tf_legacy_loss max_window_layers n_ctx
    is_decoder finetuning_task problem_type task_specific_params num_labels id2label label2id
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens generation_config cache_implementation
    unsloth_version unsloth_fixed transformers.js_config max_sequence_length model_max_length
    router_aux_loss_coef output_router_logits router_jitter_noise
    output_past eos_token_ids _num_labels xla_device cross_attention_hidden_size _commit_hash
    """.split()  # noqa: SIM905  # as quoted words, a line each
)
"""Keys that do not affect the forward pass, except for rounding (`reorder_and_upcast_attn` and
`pretraining_tp`) and the head of a classifier."""

_HARMLESS_IN_FAMILY = {
    ("phi3", "auto_map"),
    ("phi3", "original_max_position_embeddings"),
    ("gemma2", "hidden_act"),
    ("gemma3_text", "hidden_act"),
    ("qwen2_moe", "sliding_window"),
    ("gpt_oss", "experts_per_token"),
    ("gpt_oss", "initial_context_length"),
}
"""Harmless keys of one family. Phi-3's `auto_map` names code that is now part of transformers;
Qwen2-MoE has a window only with `use_sliding_window`; gpt-oss has second names of two keys."""


def key_problems(hf: Any, family: str) -> list[str]:
    """Return errors of a `config.json` with defaults; of RoPE only if there are no others."""
    sizes = GPT2_SIZES if family == "gpt2" else LLAMA_SIZES
    needed = {name: int for name in sizes if name not in DEFAULTS[family]}
    errors = [
        f"{name}=null is not supported for {family}. Remove the key for {default!r}."
        for name, default in DEFAULTS[family].items()
        if default and hf[name] is None and name not in _NULL_IS_NONE
    ]
    if family == "dots1":
        needed = {**needed, **dict.fromkeys(_DOTS, int)}
        window = hf.get("sliding_window") and hf.get("layer_types") is None
        if window and hf.get("max_window_layers", 62) < (hf.get("num_hidden_layers") or 0):
            errors.append(f"sliding_window={hf['sliding_window']} is not supported for dots1.")
    errors += [f"{name} is missing." for name in needed if hf.get(name) is None]
    for name, value in hf.items():
        kind = {**_OPTIONAL, **_BY_FAMILY.get(family, {}), **needed}.get(name)
        if value is None or name in _HARMLESS or (family, name) in _HARMLESS_IN_FAMILY:
            continue
        if kind is not None:
            fits = _is(value, kind) or (name, value) == ("first_k_dense_replace", 0)
            errors += [] if fits else [f"{name}={_short(value)} is not {_WORDS[kind]}."]
        elif name in DROPOUT:
            errors += [] if type(value) in (int, float) else [f"{name}={_short(value)} is no rate."]
        elif name == "layer_types":
            errors += _layer_type_problems(value, hf, family)
        elif name not in _ONLY:
            errors.append(
                f"{name}={_short(value)} is unknown and may change the result of {family}. "
                "Remove the key if it does not."
            )
        elif value not in _ONLY[name]:
            only = " or ".join(map(_short, _ONLY[name] or (None,)))
            errors.append(f"{name}={_short(value)} is not supported for {family}: only {only} is.")
    quantized = hf.get("quantization_config")
    method = quantized.get("quant_method", "mxfp4") if isinstance(quantized, dict) else "mxfp4"
    if method != "mxfp4":
        errors.append(f"quant_method={_short(method)} is not supported: only gpt-oss's mxfp4 is.")
    if family in ("llama", "olmo2") and hf.get("sliding_window"):
        errors.append(f"{family} has no sliding_window. Use mistral if the model has.")
    return errors or ([] if family == "gpt2" else _rope_problems(hf))


def rope_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, `rope_type` and more; for Gemma 3, of the layers without a window."""
    parameters = hf.get("rope_parameters") or {}
    rope = {**(hf.get("rope_scaling") or {}), **(parameters.get("full_attention") or parameters)}
    if not rope and hf.get("model_type") == "gpt_oss":
        rope = dict(_ROPE_OF_GPT_OSS)
    rope.setdefault("rope_theta", hf["rope_theta"])
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    return {name: value for name, value in rope.items() if name != "type"}


def local_rope_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and other rotary settings of Gemma 3's layers with a window."""
    parameters = hf.get("rope_parameters") or {}
    rope = dict(parameters.get("sliding_attention") or {})
    rope.setdefault("rope_theta", hf["rope_local_base_freq"])
    return rope


def full_every(hf: Mapping[str, Any], family: str) -> int:
    """Return the interval of layers without a window; 0 if `layer_types` have no such interval."""
    usual = next(
        (hf[n] for n in ("sliding_window_pattern", "_sliding_window_pattern") if hf.get(n)),
        MIXED[family],
    )
    kinds = hf.get("layer_types")
    if kinds is None:
        return usual
    orders = (usual, *range(2, len(kinds) + 1))
    named = lambda n: [
        f"{'sliding' if i % n else 'full'}_attention" for i in range(1, len(kinds) + 1)
    ]
    return next((n for n in orders if kinds == named(n)), 0)


def _rope_problems(hf: Mapping[str, Any]) -> list[str]:
    parameters = hf.get("rope_parameters") or {}
    errors = [
        f"rope_parameters {name}={_short(parameters[name])} is not an object."
        for name in ("full_attention", "sliding_attention")
        if parameters.get(name) is not None and not isinstance(parameters[name], dict)
    ]
    if errors:
        return errors
    rope = rope_of(hf)
    errors = _problems_of_rope(rope)
    if not errors and hf["model_type"] == "phi3" and rope["rope_type"] != "default":
        errors.append(f"rope_type={_short(rope['rope_type'])}: phi3 has only default and longrope.")
    if hf.get("model_type") == "gemma3_text":
        local = local_rope_of(hf)
        if local.get("rope_type", "default") != "default":
            errors.append(
                f"rope_type={_short(local['rope_type'])} of layers with a window: only "
                "default is supported."
            )
        if not _is(local["rope_theta"], float):
            errors.append(
                f"rope_local_base_freq={_short(local['rope_theta'])} is not a number above 0."
            )
    return errors


def _problems_of_rope(rope: Mapping[str, Any]) -> list[str]:
    kind = rope["rope_type"]
    if kind in ("longrope", "su"):
        return [
            f"rope_type={_short(kind)} is not supported: its angles change "
            "once a text passes original_max_position_embeddings. Use the variant of that length."
        ]
    if kind != "default" and not (isinstance(kind, str) and kind in ROPE_SCALING):
        supported = ", ".join(ROPE_SCALING)
        return [f"rope_type={_short(kind)}: only default, {supported} are supported."]
    keys = ROPE_SCALING.get(kind, {})
    optional = {name for name, default in keys.items() if default is not None}
    if kind == "yarn":  # transformers defaults to max_position_embeddings
        optional.add("original_max_position_embeddings")
    numbers = ("rope_theta", *keys)
    kind_of = lambda name: bool if name == "truncate" else float
    errors = [
        f"rope {name}={_short(rope.get(name))} is not {_WORDS[kind_of(name)]}."
        for name in numbers
        if not (_is(rope.get(name), kind_of(name)) or (rope.get(name) is None and name in optional))
    ]
    more = {"rope_type", *numbers}
    return errors + [
        f"rope {name}={_short(value)} is not supported with rope_type={kind}."
        for name, value in rope.items()
        if name not in more and value is not None and (name, value) != ("partial_rotary_factor", 1)
    ]


def _layer_type_problems(kinds: Any, hf: Mapping[str, Any], family: str) -> list[str]:
    """Return an error unless all layers have the usual type or, in `MIXED`, each n-th no window."""
    if family in MIXED:
        if isinstance(kinds, list) and full_every(hf, family):
            return []
        return [
            f"layer_types={_short(kinds)} is not supported for {family}: every n-th layer must be "
            "full_attention, the others sliding_attention."
        ]
    window = family in ("mistral", "mixtral", "phi3") and hf.get("sliding_window")
    allowed = "sliding_attention" if window else "full_attention"
    if isinstance(kinds, list) and all(kind == allowed for kind in kinds):
        return []
    return [f"layer_types={_short(kinds)} is not supported: all layers must be {allowed}."]


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return type(value) in (int, kind) and 0 < value < float("inf")
    return type(value) is kind


def _short(value: Any) -> str:
    text = json.dumps(value)  # spelled as in the file
    return text if len(text) <= 60 else text[:57] + "..."
