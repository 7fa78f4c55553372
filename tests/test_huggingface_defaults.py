"""Keys of `config.json` that are absent: their defaults are those of transformers."""

import json

import pytest
from decoders import FAMILIES, VARIANTS
from refusals import refused

from jaxdist.models.huggingface.config_keys import DEFAULTS
from jaxdist.models.huggingface.families import read_config, write_config

SIZES = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=32, intermediate_size=48
)


def minimal(family: str, **keys) -> dict:
    """Return a `config.json` without keys that have a default."""
    sizes = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4) if family == "gpt2" else SIZES
    if family == "dots1":
        sizes = SIZES | dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
    return {"model_type": family, **sizes, **keys}


@pytest.mark.parametrize(
    ("family", "expected"),
    {
        "llama": dict(kv_heads=32, head_width=2, norm_eps=1e-6, max_seq_len=2048, rope_theta=1e4),
        "mistral": dict(kv_heads=8, sliding_window=4096, norm_eps=1e-6, max_seq_len=131072),
        "phi3": dict(kv_heads=32, sliding_window=0, norm_eps=1e-5, max_seq_len=4096),
        "olmo2": dict(kv_heads=32, norm_eps=1e-5, tie_embeddings=False, bias=[]),
        "qwen2": dict(kv_heads=32, sliding_window=0, norm_eps=1e-6, max_seq_len=32768),
        "qwen3": dict(kv_heads=32, head_width=128, sliding_window=0, tie_embeddings=False),
        "gemma2": dict(
            kv_heads=4, head_width=256, sliding_window=4096, full_attention_every=2,
            attention_softcap=50.0, logit_softcap=30.0, tie_embeddings=True, rope_theta=1e4),
        "gemma3_text": dict(
            kv_heads=4, head_width=256, sliding_window=4096, full_attention_every=6,
            attention_softcap=0.0, logit_softcap=0.0, rope_theta=1e6, local_rope_theta=1e4),
        "gpt2": dict(norm_eps=1e-5, max_seq_len=1024, mlp_dim=256, tie_embeddings=True),
    }.items(),
)  # fmt: skip
def test_an_absent_key_has_the_default_of_its_family(family, expected):
    config = read_config(minimal(family))
    assert {name: getattr(config, name) for name in expected} == expected


def test_null_turns_a_feature_off_or_is_rejected():
    assert read_config(minimal("mistral", sliding_window=None)).sliding_window == 0
    assert read_config(minimal("mistral", num_key_value_heads=None)).kv_heads == 32
    assert read_config(minimal("gemma2", final_logit_softcapping=None)).logit_softcap == 0
    for family, key in (
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "tie_word_embeddings"),
        ("qwen3", "head_dim"),
        ("llama", "rms_norm_eps"),
        ("llama", "max_position_embeddings"),
    ):
        with refused(f"{key}=null"):
            read_config(minimal(family, **{key: None}))
    with refused("sliding_window"):
        read_config(minimal("gemma2", sliding_window=None))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    with refused("yarn", "phi3"):  # transformers reads it as longrope
        read_config(minimal("phi3", rope_scaling=yarn))


@pytest.mark.parametrize("family", DEFAULTS)
def test_every_key_of_the_class_in_transformers_has_its_default_here(family):
    pytest.importorskip("transformers", reason="needs the reference extra")
    from transformers import AutoConfig

    sizes = minimal(family)
    reference = AutoConfig.for_model(**sizes).to_dict()
    absent = read_config(sizes)
    assert read_config(reference) == absent
    differ = [key for key in reference if read_config({**sizes, key: reference[key]}) != absent]
    assert differ == []


PUBLISHED = {
    "qwen2": {"use_mrope": False},
    "llama": {
        "is_llama_config": True, "rope_interleaved": False, "max_sequence_length": 2048,
        "transformers.js_config": {"dtype": "q4"}, "unsloth_version": "2025.9.1",
        "unsloth_fixed": True,
    },
    "gpt2": {"_num_labels": 1, "output_past": True, "eos_token_ids": 0, "model_max_length": 512},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
}  # fmt: skip
"""Keys of published models of a family that change nothing."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_keys_without_effect_are_accepted(family):
    assert read_config(minimal(family, **PUBLISHED[family])) == read_config(minimal(family))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "rope_interleaved", True),
        ("qwen2", "use_mrope", True),
        ("phi3", "lm_head_bias", True),
        ("phi3", "full_attn_mod", 2),
        ("phi3", "interpolate_factor", 2),
        ("llama", "is_llama_config", False),
        ("llama", "is_causal", False),
        ("llama", "attention_chunk_size", 8),
    ],
)
def test_a_value_that_changes_the_model_is_rejected(family, key, value):
    with refused(f"{key}={json.dumps(value)}"):
        read_config(minimal(family, **{key: value}))


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_transformers_reads_written_configs_equally(name):
    """transformers fills absent keys with its defaults, and writes every key."""
    pytest.importorskip("transformers", reason="needs the reference extra")
    from transformers import AutoConfig

    config = {**FAMILIES, **VARIANTS}[name]
    written = write_config(config, "float32")
    reference = AutoConfig.for_model(**written)
    assert read_config(json.loads(reference.to_json_string(use_diff=False))) == config
