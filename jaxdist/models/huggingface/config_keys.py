"""Keys of Hugging Face's `config.json`: read, without effect on the model's values, or refused.

A key that nobody here knows may change what the model computes, and the weights would load all the
same. So each key is needed, optional, bound to the values with which our decoder computes the same,
or listed as harmless; any other key that is set is a problem.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.models.configs import ROPE_SCALING

_LLAMA = {
    "vocab_size": int,
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "intermediate_size": int,
}
_GPT2 = {
    "vocab_size": int,
    "n_embd": int,
    "n_layer": int,
    "n_head": int,
}
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
"""Biases of all four products of attention, and of all three of the MLP."""

_GEMMA = {
    "query_pre_attn_scalar": int,
    "final_logit_softcapping": float,
    "sliding_window_pattern": int,
    "_sliding_window_pattern": int,
}
_BY_FAMILY: dict[str, Mapping[str, type]] = {
    "llama": _LLAMA_ONLY,
    "gemma2": {**_GEMMA, "attn_logit_softcapping": float},
    "gemma3_text": {**_GEMMA, "rope_local_base_freq": float},
}
"""Optional keys of one family."""

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
    phi3=dict(_DEFAULTS, max_position_embeddings=4096, rms_norm_eps=1e-5),
    olmo2=dict(_DEFAULTS, rms_norm_eps=1e-5),
    qwen2=_QWEN_DEFAULTS,
    qwen3=dict(_QWEN_DEFAULTS, head_dim=128),
    gemma2=dict(
        _GEMMA_DEFAULTS, max_position_embeddings=8192, final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ),
    gemma3_text=dict(_GEMMA_DEFAULTS, rope_theta=1e6, rope_local_base_freq=10000.0),
    gpt2=dict(n_positions=1024, layer_norm_epsilon=1e-5, tie_word_embeddings=True),
)  # fmt: skip
"""Family -> value of each key that is read and may be absent, as in transformers' config class."""

_NULL_IS_NONE = ("num_key_value_heads", "sliding_window", "final_logit_softcapping",
                 "attn_logit_softcapping")  # fmt: skip
"""Keys whose null turns the feature off, and does not stand for the default."""

GEMMAS: Mapping[str, int] = {"gemma2": 2, "gemma3_text": 6}
"""Family whose layers differ -> every how many layers one has no window, where nothing says so."""

_WORDS = {
    int: "a whole number above 0",
    float: "a number above 0",
    dict: "an object",
    bool: "true or false",
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
}
"""Values with which our decoder computes what transformers does."""

_DROPOUT = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout")
"""Rates of training, see `families.left_out`."""

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
    output_past eos_token_ids _num_labels xla_device cross_attention_hidden_size _commit_hash
    """.split()  # noqa: SIM905  # as quoted words, a line each
)
"""What is stored and names files, starts, trains, classifies or generates; no value of a forward
pass depends on it. `reorder_and_upcast_attn` and `pretraining_tp` change its rounding only."""


_HARMLESS_THERE = {
    ("phi3", "auto_map"),
    ("phi3", "original_max_position_embeddings"),
    ("gemma2", "hidden_act"),
    ("gemma3_text", "hidden_act"),
}
"""The same for one family. Phi-3's `auto_map` names code that became transformers' own, and it
reads the original length for `longrope` alone. Gemma reads `hidden_activation`."""


def key_problems(theirs: Any, family: str) -> list[str]:
    """List the problems of the keys of a `config.json`, defaults included, one line each."""
    needed = _GPT2 if family == "gpt2" else _LLAMA
    found = [
        f"{name}=null is not supported for {family}. Leave the key out for {default!r}."
        for name, default in DEFAULTS[family].items()
        if default and theirs[name] is None and name not in _NULL_IS_NONE
    ]
    found += [f"{name} is missing." for name in needed if theirs.get(name) is None]
    for name, value in theirs.items():
        kind = {**_OPTIONAL, **_BY_FAMILY.get(family, {}), **needed}.get(name)
        if value is None or name in _HARMLESS or (family, name) in _HARMLESS_THERE:
            continue
        if kind is not None:
            fits = _is(value, kind)
            found += [] if fits else [f"{name}={_short(value)} is not {_WORDS[kind]}."]
        elif name in _DROPOUT:
            found += [] if type(value) in (int, float) else [f"{name}={_short(value)} is no rate."]
        elif name == "layer_types":
            found += _layer_type_problems(value, theirs, family)
        elif name not in _ONLY:
            found.append(
                f"{name}={_short(value)} is not known, and may change what {family} computes. "
                "Remove the key if it does not."
            )
        elif value not in _ONLY[name]:
            only = " or ".join(map(_short, _ONLY[name]))
            found.append(f"{name}={_short(value)} is not supported for {family}: only {only} is.")
    if family in ("llama", "olmo2") and theirs.get("sliding_window"):
        found.append(f"sliding_window is no key of {family}. Use model_type=mistral if it has one.")
    return found or ([] if family == "gpt2" else _rope_problems(theirs))


def rope_of(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of rotary positions, under its old and its new name.

    Where layers differ (Gemma 3), of those that see all keys.
    """
    given = theirs.get("rope_parameters") or {}
    found = {**(theirs.get("rope_scaling") or {}), **(given.get("full_attention") or given)}
    found.setdefault("rope_theta", theirs["rope_theta"])
    found["rope_type"] = found.get("rope_type", found.pop("type", "default"))
    return {name: value for name, value in found.items() if name != "type"}


def local_rope_of(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The same of Gemma 3's layers with a window."""
    given = theirs.get("rope_parameters") or {}
    found = dict(given.get("sliding_attention") or {})
    found.setdefault("rope_theta", theirs["rope_local_base_freq"])
    return found


def full_every(theirs: Mapping[str, Any], family: str) -> int:
    """Every how many layers one has no window; 0 where `layer_types` have no such order."""
    usual = next(
        (theirs[n] for n in ("sliding_window_pattern", "_sliding_window_pattern") if theirs.get(n)),
        GEMMAS[family],
    )
    kinds = theirs.get("layer_types")
    if kinds is None:
        return usual
    orders = (usual, *range(2, len(kinds) + 1))
    named = lambda n: [
        f"{'sliding' if i % n else 'full'}_attention" for i in range(1, len(kinds) + 1)
    ]
    return next((n for n in orders if kinds == named(n)), 0)


def _rope_problems(theirs: Mapping[str, Any]) -> list[str]:
    given = theirs.get("rope_parameters") or {}
    found = [
        f"rope_parameters {name}={_short(given[name])} is not an object."
        for name in ("full_attention", "sliding_attention")
        if given.get(name) is not None and not isinstance(given[name], dict)
    ]
    if found:
        return found
    rope = rope_of(theirs)
    found = _problems_of_rope(rope)
    if not found and theirs["model_type"] == "phi3" and rope["rope_type"] != "default":
        found.append(f"rope_type={_short(rope['rope_type'])}: phi3 has only default and longrope.")
    if theirs.get("model_type") == "gemma3_text":
        local = local_rope_of(theirs)
        if local.get("rope_type", "default") != "default":
            found.append(
                f"rope_type={_short(local['rope_type'])} of layers with a window: only "
                "default is supported."
            )
        if not _is(local["rope_theta"], float):
            found.append(
                f"rope_local_base_freq={_short(local['rope_theta'])} is no number above 0."
            )
    return found


def _problems_of_rope(rope: Mapping[str, Any]) -> list[str]:
    kind = rope["rope_type"]
    if kind in ("longrope", "su"):
        return [
            f"rope_type={_short(kind)} is not supported: its angles change "
            "once a text passes original_max_position_embeddings. Use the variant of that length."
        ]
    if kind != "default" and not (isinstance(kind, str) and kind in ROPE_SCALING):
        known = ", ".join(ROPE_SCALING)
        return [f"rope_type={_short(kind)}: only default, {known} are supported."]
    keys = ROPE_SCALING.get(kind, {})
    optional = {name for name, default in keys.items() if default is not None}
    if kind == "yarn":  # transformers takes max_position_embeddings where it is not given
        optional.add("original_max_position_embeddings")
    numbers = ("rope_theta", *keys)
    found = [
        f"rope {name}={_short(rope.get(name))} is not a number above 0."
        for name in numbers
        if not (_is(rope.get(name), float) or (rope.get(name) is None and name in optional))
    ]
    more = {"rope_type", *numbers}
    return found + [
        f"rope {name}={_short(value)} is not supported with rope_type={kind}."
        for name, value in rope.items()
        if name not in more and value is not None and (name, value) != ("partial_rotary_factor", 1)
    ]


def _layer_type_problems(kinds: Any, theirs: Mapping[str, Any], family: str) -> list[str]:
    """All layers alike, or of Gemma every so many without a window."""
    if family in GEMMAS:
        if isinstance(kinds, list) and full_every(theirs, family):
            return []
        return [
            f"layer_types={_short(kinds)} is not supported for {family}: every n-th layer must be "
            "full_attention, the others sliding_attention."
        ]
    window = family in ("mistral", "phi3") and theirs.get("sliding_window")
    allowed = "sliding_attention" if window else "full_attention"
    if isinstance(kinds, list) and all(kind == allowed for kind in kinds):
        return []
    return [f"layer_types={_short(kinds)} is not supported: all layers must be {allowed}."]


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return type(value) in (int, kind) and 0 < value < float("inf")
    return type(value) is kind


def _short(value: Any) -> str:
    text = json.dumps(value)  # as the file has it
    return text if len(text) <= 60 else text[:57] + "..."
