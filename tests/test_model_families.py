"""Every decoder family against Hugging Face transformers: same weights, same logits and loss."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import FAMILIES, VARIANTS, logits_of, random_tokens

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.forward import ForwardPass
from jaxdist.core.losses import Vocabulary, token_cross_entropy
from jaxdist.core.types import Context
from jaxdist.models import DecoderConfig, build, layers
from jaxdist.models.huggingface.families import read_config, write_config
from jaxdist.models.weights import num_params

torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

SEQ = 16
# Both sum the same float32 products in another order; logits are of order 1.
TOLERANCE = 2e-5


EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "dots1": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}


def reference_of(name, config, scale=10.0):
    name = name.removesuffix("_mixed")
    common = dict(vocab_size=config.vocab_size, tie_word_embeddings=config.tie_embeddings)
    common |= dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    if name.startswith("gpt2"):
        reference = transformers.GPT2Config(
            n_positions=config.max_seq_len,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.mlp_dim,
            layer_norm_epsilon=config.norm_eps,
            **common,
        )
    else:
        common |= dict(
            hidden_size=config.d_model,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        if name == "llama3.1":
            common["rope_parameters"] |= {
                "rope_type": "llama3",
                **{name: x for name, x in config.rope_scaling.items() if name != "type"},
            }
        if config.sliding_window:
            common["sliding_window"] = config.sliding_window
        if name == "gpt_oss":
            scaling = {n: x for n, x in config.rope_scaling.items() if n != "type"}
            common["rope_parameters"] |= {"rope_type": "yarn", **scaling}
        if name.startswith(("qwen3", "gpt_oss")):
            common["head_dim"] = config.head_width
        if name.startswith("llama_"):
            common |= dict(attention_bias="out" in config.bias, mlp_bias="mlp" in config.bias)
        if config.num_experts:
            common |= {
                EXPERT_KEYS[name]: config.num_experts,
                "num_experts_per_tok": config.experts_per_token,
            }
        if name == "dots1":
            router = config.router
            common |= dict(
                intermediate_size=config.dense_mlp_dim,
                moe_intermediate_size=config.mlp_dim,
                n_shared_experts=config.shared_expert_dim // config.mlp_dim,
                first_k_dense_replace=len(config.dense_layers),
                n_group=router["groups"],
                topk_group=router["groups_per_token"],
                routed_scaling_factor=router["scale"],
                norm_topk_prob=router["norm_topk"],
                sliding_window=None,
            )
        elif config.shared_expert_dim:
            common["shared_expert_intermediate_size"] = config.shared_expert_dim
        if name in ("qwen2_moe", "qwen3_moe", "olmoe"):
            common["norm_topk_prob"] = config.routing.norm_topk
        if name in ("qwen2_moe", "qwen3_moe"):
            common["moe_intermediate_size"] = config.mlp_dim
        if name == "qwen3_moe" and config.dense_layers:
            common |= dict(intermediate_size=config.dense_mlp_dim, decoder_sparse_step=2)
            common["mlp_only_layers"] = [1]
        if name.startswith("gemma"):
            common |= gemma_keys(name, config)
        kinds = {
            **{name: transformers.LlamaConfig for name in VARIANTS},
            "llama2": transformers.LlamaConfig,
            "llama3.1": transformers.LlamaConfig,
            "mistral": transformers.MistralConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
            "olmo2": transformers.Olmo2Config,
            "phi3": transformers.Phi3Config,
            "mixtral": transformers.MixtralConfig,
            "qwen2_moe": transformers.Qwen2MoeConfig,
            "qwen3_moe": transformers.Qwen3MoeConfig,
            "olmoe": transformers.OlmoeConfig,
            "dots1": transformers.Dots1Config,
            "gpt_oss": transformers.GptOssConfig,
            "gemma2": transformers.Gemma2Config,
            "gemma3": transformers.Gemma3TextConfig,
        }
        reference = kinds[name](**common)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(reference, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for key, weight in model.named_parameters():
            if key.endswith("sinks") or "gate_up_proj" in key:
                weight.mul_(scale)  # by default so large that sinks and limits matter
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.5 * torch.randn_like(buffer) - 0.5)
    return model.eval()


def gemma_keys(name, config):
    keys = dict(
        head_dim=config.head_width,
        query_pre_attn_scalar=config.query_pre_attn_scalar or config.head_width,
        layer_types=["sliding_attention", "full_attention"],
    )
    if name == "gemma2":
        caps = config.attention_softcap, config.logit_softcap
        return keys | dict(
            zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
        )
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": config.rope_theta}
    near = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return keys | dict(rope_parameters={"full_attention": full, "sliding_attention": near})


def params_of(reference, name, config):
    weights = {key: value.numpy() for key, value in reference.state_dict().items()}
    read = gpt2_layer if name == "gpt2" else llama_layer
    layers = [read(weights, index, config) for index in range(config.num_layers)]
    stacked = {
        part: {leaf: stack([layer[part][leaf] for layer in layers]) for leaf in layers[0][part]}
        for part in layers[0]
    }
    embed, norm = (
        ("transformer.wte", "transformer.ln_f")
        if name == "gpt2"
        else (
            "model.embed_tokens",
            "model.norm",
        )
    )
    padding = ((0, config.padded_vocab - config.vocab_size), (0, 0))
    params = {
        # Ones, not zeros: padding that leaked into the softmax would show.
        "embed": {"table": np.pad(weights[f"{embed}.weight"], padding, constant_values=1.0)},
        "layers": stacked,
        "head": {"norm": {"scale": weights[f"{norm}.weight"]}},
    }
    if name == "gpt2":
        params["embed"]["positions"] = weights["transformer.wpe.weight"]
        params["head"]["norm"]["bias"] = weights["transformer.ln_f.bias"]
    if not config.tie_embeddings:
        params["head"]["kernel"] = np.pad(weights["lm_head.weight"], padding, constant_values=1.0).T
    return params


def stack(leaves):
    if isinstance(leaves[0], dict):
        return {key: stack([leaf[key] for leaf in leaves]) for key in leaves[0]}
    return np.stack(leaves)


def fuse_qkv(query, key, value, config):
    """Fuse [heads·width, ...] weights -> [..., kv_heads, group + 2, width]."""
    kv, width = config.kv_heads, config.head_width
    parts = [x.reshape(kv, -1, width, *x.shape[1:]) for x in (query, key, value)]
    return np.moveaxis(np.concatenate(parts, axis=1), (0, 1, 2), (-3, -2, -1))


def llama_layer(weights, index, config):
    prefix = f"model.layers.{index}."
    get = lambda name: weights[prefix + name]
    products = [get(f"self_attn.{n}_proj.weight") for n in "qkv"]
    out = get("self_attn.o_proj.weight").T
    attention = {
        "qkv": fuse_qkv(*products, config),
        "out": out.reshape(config.num_heads, config.head_width, config.d_model),
    }
    if "qkv" in config.bias:
        attention["qkv_bias"] = fuse_qkv(*(get(f"self_attn.{n}_proj.bias") for n in "qkv"), config)
    if config.qk_norm != "none":
        attention["query_norm"] = {"scale": get("self_attn.q_norm.weight")}
        attention["key_norm"] = {"scale": get("self_attn.k_norm.weight")}
    gate, up = get("mlp.gate_proj.weight").T, get("mlp.up_proj.weight").T
    return {
        "attention_norm": {"scale": get("input_layernorm.weight")},
        "attention": attention,
        "mlp_norm": {"scale": get("post_attention_layernorm.weight")},
        "mlp": {"up": np.stack([gate, up], axis=1), "down": get("mlp.down_proj.weight").T},
    }


def gpt2_layer(weights, index, config):
    prefix = f"transformer.h.{index}."
    get = lambda name: weights[prefix + name]
    products = np.split(get("attn.c_attn.weight").T, 3)
    biases = np.split(get("attn.c_attn.bias"), 3)
    out = get("attn.c_proj.weight")
    return {
        "attention_norm": {"scale": get("ln_1.weight"), "bias": get("ln_1.bias")},
        "attention": {
            "qkv": fuse_qkv(*products, config),
            "qkv_bias": fuse_qkv(*biases, config),
            "out": out.reshape(config.num_heads, config.head_width, config.d_model),
            "out_bias": get("attn.c_proj.bias"),
        },
        "mlp_norm": {"scale": get("ln_2.weight"), "bias": get("ln_2.bias")},
        "mlp": {
            "up": get("mlp.c_fc.weight")[:, None],
            "up_bias": get("mlp.c_fc.bias")[None],
            "down": get("mlp.c_proj.weight"),
            "down_bias": get("mlp.c_proj.bias"),
        },
    }


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    config = FAMILIES[request.param]
    reference = reference_of(request.param, config)
    params = params_of(reference, request.param, config)
    tokens = random_tokens(2, SEQ)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    return request.param, build(config, seq_len=SEQ), params, tokens, expected


def leaves_of(tree):
    return {str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_parameters_have_the_shapes_of_the_initialization(family):
    name, model, params, _, _ = family
    config = FAMILIES[name]
    own = leaves_of(jax.eval_shape(model.init, jax.random.key(0)))
    shapes = lambda leaves: {path: leaf.shape for path, leaf in leaves.items()}
    assert shapes(own) == shapes(leaves_of(params))
    padding = (config.padded_vocab - config.vocab_size) * config.d_model
    tables = 1 if config.tie_embeddings else 2
    total = sum(math.prod(leaf.shape) for leaf in own.values())
    assert num_params(model) == total - tables * padding


def test_logits_equal_transformers(family):
    _, model, params, tokens, expected = family
    ours = logits_of(model, params, {"tokens": tokens})
    assert expected.std() > 0.3  # the tolerance is absolute: logits must be of order 1
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)


def test_summed_loss_equals_torch(family):
    name, model, params, tokens, expected = family
    targets = random_tokens(*tokens.shape, seed=1)
    weights = (np.random.default_rng(2).random(tokens.shape) > 0.3).astype(np.float32)
    losses = torch.nn.functional.cross_entropy(
        torch.from_numpy(expected).flatten(0, 1),
        torch.from_numpy(targets).long().flatten(),
        reduction="none",
    )
    vocabulary = Vocabulary(FAMILIES[name].vocab_size, chunk=7)
    context = Context(
        attend=make_attend(AttentionPlan("cpu")),
        token_loss=lambda head, *args: token_cross_entropy(head.x, head.kernel, *args, vocabulary),
    )
    batch = {"tokens": tokens, "targets": targets, "weights": weights}
    sums = jax.jit(lambda *args: ForwardPass(model).loss(*args, context))(params, batch)
    assert sums["weight"] == weights.sum()
    # Relative: a sum over some twenty tokens, each with the error of its logits.
    np.testing.assert_allclose(
        sums["loss"], (losses.numpy() * weights.ravel()).sum(), rtol=TOLERANCE
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
        VARIANTS["gpt_oss"].rope_scaling | {"original_max_position_embeddings": 256},
        FAMILIES["llama3.1"].rope_scaling,
    ],
    ids=lambda scaling: f"{scaling['type']}{len(scaling)}",
)
def test_scaled_rope_equals_hugging_face_and_survives_a_round_trip(scaling):
    """A reference that is not scaled, or of another length, differs by more than 1e-2."""
    config = DecoderConfig(
        d_model=128, num_heads=2, rope_theta=5e5, rope_scaling=scaling, max_seq_len=2048
    )
    assert config.problems() == []
    written = json.loads(json.dumps(write_config(config, "float32")))
    assert read_config(written).rope_scaling == scaling
    kind = scaling["type"]
    rope = {"rope_theta": config.rope_theta, **written["rope_scaling"]}
    llama = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=rope
    )
    expected, length = ROPE_INIT_FUNCTIONS[kind](llama, "cpu")
    positions = jnp.arange(2048)
    stretch, ours = layers.rope_stretch(scaling, 64, config.rope_theta)
    cos, sin = layers.rotary_angles(positions, 64, config.rope_theta, stretch, ours)
    angles = np.arange(2048)[:, None] * expected.double().numpy()
    assert ours == pytest.approx(length, rel=1e-12)
    np.testing.assert_allclose(cos, length * np.cos(angles), atol=1e-3)
    np.testing.assert_allclose(sin, length * np.sin(angles), atol=1e-3)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "linear"}, "lacks factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        ({**FAMILIES["llama3.1"].rope_scaling, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"type": "yarn", "factor": 0, "original_max_position_embeddings": 8}, "factor=0"),
        (VARIANTS["gpt_oss"].rope_scaling | {"truncate": 1.0}, "truncate=1.0"),
    ],
)
def test_a_wrong_rope_scaling_is_refused(scaling, named):
    (problem,) = DecoderConfig(rope_scaling=scaling).problems()
    assert named in problem
