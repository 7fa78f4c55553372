"""Small decoders of every family, and helpers that compute logits of a `Model` record."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.experts import make_experts
from jaxdist.core.forward import ForwardPass
from jaxdist.core.matmul.grouped import make_grouped_dot
from jaxdist.core.types import Context
from jaxdist.models import DecoderConfig

SIZES = dict(vocab_size=97, d_model=32, num_layers=2, num_heads=4, mlp_dim=48, max_seq_len=32)

FAMILIES = {
    "llama2": DecoderConfig(**SIZES),
    "llama3.1": DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        rope_theta=500000.0,
        rope_scaling={
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            # Short enough that the test's positions meet stretched, blended and kept frequencies.
            "original_max_position_embeddings": 64,
        },
        tie_embeddings=True,
    ),
    "mistral": DecoderConfig(**SIZES, num_kv_heads=2, sliding_window=5),
    "qwen2": DecoderConfig(
        **SIZES, num_kv_heads=2, bias=["qkv"], norm_eps=1e-6, rope_theta=1e6, tie_embeddings=True
    ),
    "qwen3": DecoderConfig(
        **SIZES, num_kv_heads=2, head_dim=16, qk_norm="head", norm_eps=1e-6, rope_theta=1e6
    ),
    "gpt2": DecoderConfig(
        **SIZES,
        norm="layer",
        positions="learned",
        activation="gelu",
        bias=["qkv", "out", "mlp"],
        tie_embeddings=True,
    ),
}

GEMMA = dict(
    norm="zero_centered_rms",
    norm_eps=1e-6,
    norm_placement="both",
    activation="geglu",
    tie_embeddings=True,
    scale_embeddings=True,
    sliding_window=5,
    full_attention_every=2,
)

VARIANTS = {
    "llama_biases": DecoderConfig(**SIZES, num_kv_heads=2, bias=["qkv", "out", "mlp"]),
    "llama_mlp_bias": DecoderConfig(**SIZES, bias=["mlp"], tie_embeddings=True),
    "olmo2": DecoderConfig(
        **SIZES, num_kv_heads=2, norm_placement="post", qk_norm="all", norm_eps=1e-6, rope_theta=5e5
    ),
    # Caps low enough to affect the scores of random weights.
    "gemma2": DecoderConfig(
        **SIZES, **GEMMA, num_kv_heads=2, attention_softcap=1.5, logit_softcap=2.0
    ),
    "gemma3": DecoderConfig(
        **SIZES,
        **GEMMA,
        num_kv_heads=2,
        head_dim=16,
        query_pre_attn_scalar=24,
        qk_norm="head",
        rope_theta=1e6,
        local_rope_theta=100.0,
        rope_scaling={"type": "linear", "factor": 8.0},
    ),
    "mixtral": DecoderConfig(
        **SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2, sliding_window=5
    ),
    "qwen2_moe": DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        bias=["qkv"],
        num_experts=5,
        experts_per_token=2,
        router={"norm_topk": False},
        shared_expert_dim=24,
        shared_expert_gate=True,
    ),
    "qwen3_moe": DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        head_dim=16,
        qk_norm="head",
        norm_eps=1e-6,
        rope_theta=1e6,
        num_experts=6,
        experts_per_token=3,
        router={"norm_topk": False},
    ),
    # Experts in every second layer but the second: two first layers, then a block of two.
    "qwen3_moe_mixed": DecoderConfig(
        **{**SIZES, "num_layers": 6},
        num_kv_heads=2,
        qk_norm="head",
        norm_eps=1e-6,
        num_experts=4,
        experts_per_token=2,
        dense_layers=[0, 1, 2, 4],
        dense_mlp_dim=40,
    ),
    "dots1": DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        qk_norm="head",
        norm_eps=1e-6,
        num_experts=8,
        experts_per_token=3,
        shared_expert_dim=2 * SIZES["mlp_dim"],
        dense_layers=[0],
        dense_mlp_dim=40,
        router={
            "scores": "sigmoid",
            "bias": True,
            "scale": 2.5,
            "groups": 4,
            "groups_per_token": 2,
            "norm_topk": True,
        },
    ),
    "olmoe": DecoderConfig(
        **SIZES, qk_norm="all", num_experts=4, experts_per_token=3, router={"norm_topk": False}
    ),
    "gpt_oss": DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        head_dim=16,
        bias=["qkv", "out", "mlp", "router"],
        activation="clamped_swiglu",
        attention_sinks=True,
        sliding_window=5,
        full_attention_every=2,
        rope_theta=150000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        num_experts=4,
        experts_per_token=2,
    ),
    "gpt2_untied": dataclasses.replace(FAMILIES["gpt2"], tie_embeddings=False),
}
"""Models of these families that are seldom met."""


def capture_logits(head, targets, weights):
    del targets, weights
    x, kernel, vocab_size, softcap = head
    logits = jnp.einsum("bsd,dv->bsv", x, kernel, preferred_element_type=jnp.float32)
    logits = logits[..., :vocab_size]
    return {"logits": softcap * jnp.tanh(logits / softcap) if softcap else logits}


def logits_of(model, params, batch, **context):
    """Return logits [batch, seq, vocab] of the path that training differentiates, on one device."""
    shape = batch["tokens"].shape
    batch = {"targets": batch["tokens"], "weights": np.ones(shape, np.float32), **batch}
    capability = context.pop("compute_capability", "")
    attend = make_attend(AttentionPlan(context.get("platform", "cpu"), capability))
    experts = make_experts(make_grouped_dot("cpu"))
    context = Context(token_loss=capture_logits, attend=attend, experts=experts, **context)
    return jax.jit(lambda *args: ForwardPass(model).loss(*args, context)["logits"])(params, batch)


def random_params(model, seed=0):
    """Return parameters in which every leaf matters: norm scales near 1, all others near 0.

    NumPy draws them because `model.init` would take most of the tests' time to compile.
    """
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(center, 0.1, shape.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(model.init, jax.random.key(0)))


def random_tokens(batch, seq, vocab_size=SIZES["vocab_size"], seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, (batch, seq), np.int32)
