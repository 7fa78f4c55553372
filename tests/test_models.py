"""The decoder, mostly on one device: decoding, packed documents, windows, dropout, padding,
kernels.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from decoders import FAMILIES, SIZES, VARIANTS, logits_of, random_params, random_tokens
from flax import nnx
from kernel_choice import kernel_of
from refusals import refused

from jaxdist.core.attention import AttentionPlan, blockwise, kernels, make_attend
from jaxdist.core.attention.cudnn import DOCUMENTS
from jaxdist.core.attention.kernel_check import KernelCheck
from jaxdist.core.attention.kernels import BLOCKWISE_FROM
from jaxdist.core.attention.tiled import TILE
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.core.step import TrainConfig, make_context, make_value_and_grad
from jaxdist.core.step_plan import Device, StepSettings, plan_step
from jaxdist.core.types import AttentionDropout, AttentionMask, Context, dot
from jaxdist.models import DecoderConfig, build, layers
from jaxdist.models.decoder import Attention
from jaxdist.settings import ConfigError

# The same float32 numbers, summed in another order; logits are of order 1.
TOLERANCE = 1e-5


def test_norms_start_with_a_scale_of_one():
    params = jax.jit(build(FAMILIES["gpt2"], seq_len=16).init)(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    scales = [leaf for path, leaf in leaves if "scale" in jax.tree_util.keystr(path)]
    assert scales and all(np.all(np.asarray(scale) == 1) for scale in scales)


@pytest.mark.parametrize("name", ["llama3.1", "mistral", "qwen3", "gpt2", "gemma2", "gemma3"])
def test_decoding_with_a_cache_equals_the_full_forward(name):
    """Ragged prompts at once, then one token at a time; every position's logits must match."""
    model = build({**FAMILIES, **VARIANTS}[name], seq_len=16)
    params = random_params(model)
    tokens = random_tokens(3, 12)
    expected = np.array(logits_of(model, params, {"tokens": tokens}))
    lengths = np.array([7, 2, 5])
    context = Context(attend=make_attend(AttentionPlan("cpu")))
    step = jax.jit(lambda *args: model.decoding.step(*args, context))

    positions = np.where(np.arange(7) < lengths[:, None], np.arange(7), -1)
    prompt = np.where(positions < 0, 3, tokens[:, :7])  # padding holds some other token
    shapes = jax.eval_shape(lambda: model.decoding.init_cache(3, 14, jnp.float32))
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    logits, cache = step(params, cache, prompt, positions)
    real = positions >= 0
    atol = TOLERANCE * max(1, np.abs(expected).max())
    np.testing.assert_allclose(np.array(logits)[real], expected[:, :7][real], atol=atol, rtol=0)
    for offset in range(5):
        rows, at = np.arange(3), lengths + offset
        logits, cache = step(params, cache, tokens[rows, at][:, None], at[:, None])
        np.testing.assert_allclose(logits[:, 0], expected[rows, at], atol=atol, rtol=0)

    _, unchanged = step(params, cache, tokens[:, :1], np.full((3, 1), -1))
    jax.tree.map(np.testing.assert_array_equal, unchanged, cache)


def test_decoding_bounds_learned_positions():
    assert build(FAMILIES["gpt2"], seq_len=16).decoding.max_len == SIZES["max_seq_len"]
    assert build(FAMILIES["llama2"], seq_len=16).decoding.max_len > 10**6


@pytest.mark.parametrize("sum_bytes", [1 << 20, 4 * 8 * 4, 4 * 2 * 4])
@pytest.mark.parametrize("table_dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_a_frequent_token_are_summed_in_float32(monkeypatch, table_dtype, sum_bytes):
    """One token at 2,048 positions: in bfloat16, adding equal terms stops at 256 of them."""
    monkeypatch.setattr(layers, "_SUM_BYTES", sum_bytes)  # 8, 8 and 2 columns at a time
    table = jnp.zeros((4, 8), table_dtype)
    index = jnp.zeros((8, 256), jnp.int32).at[0, :3].set(2)

    def total(table):
        rows = layers.look_up(table, index, jnp.bfloat16)
        return (rows * jnp.arange(1, 9, dtype=jnp.bfloat16)).astype(jnp.float32).sum()

    actual = jax.jit(jax.grad(total))(table)
    assert actual.dtype == table_dtype
    exact = np.array([2045, 0, 3, 0], np.float32)[:, None] * np.arange(1, 9, dtype=np.float32)
    assert np.array_equal(actual.astype(jnp.float32), exact.astype(jnp.bfloat16).astype(np.float32))


def test_query_scale_of_gemma_is_not_rounded_to_bfloat16():
    """With 8/9, like Gemma 2 27B's 128/144, bfloat16 would make the root 0.15 % smaller."""
    plain = DecoderConfig(**SIZES, positions="learned")
    scaled = dataclasses.replace(plain, query_pre_attn_scalar=9)
    x = jax.random.normal(jax.random.key(1), (2, 16, 32), jnp.bfloat16)
    context = Context(attend=None, dtype=jnp.bfloat16)
    before, query = (
        Attention(config, nnx.Rngs(0)).project(x, {}, context)[0] for config in (plain, scaled)
    )
    right = before.astype(jnp.float32) * np.float32(np.sqrt(8 / 9))
    assert query.dtype == jnp.bfloat16
    assert np.array_equal(query, right.astype(jnp.bfloat16))


# Packed documents


def packed_batch():
    tokens = random_tokens(2, 16, seed=3)
    lengths = [[5, 9], [16]]
    segments, positions = np.zeros((2, 16), np.int32), np.zeros((2, 16), np.int32)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    return {"tokens": tokens, "segments": segments, "positions": positions}


@pytest.mark.parametrize("name", ["llama3.1", "gpt2", "gemma3"])
def test_packed_document_has_the_logits_of_a_separate_row(name):
    model = build({**FAMILIES, **VARIANTS}[name], seq_len=16)
    params, batch = random_params(model), packed_batch()
    packed = np.array(logits_of(model, params, batch))
    alone = np.array(logits_of(model, params, {"tokens": np.roll(batch["tokens"][:1], -5, 1)}))
    np.testing.assert_allclose(packed[0, 5:14], alone[0, :9], atol=TOLERANCE, rtol=0)

    # Without segments the second document sees the first, so the test can fail.
    leaky = {name: batch[name] for name in ("tokens", "positions")}
    leaked = np.array(logits_of(model, params, leaky))
    assert np.abs(leaked[0, 5:14] - alone[0, :9]).max() > 1e-2
    np.testing.assert_allclose(leaked[1], packed[1], atol=TOLERANCE, rtol=0)


def test_no_gradient_crosses_a_document_boundary():
    """The second document's loss does not depend on the first document's tokens."""
    model = build(FAMILIES["llama2"], seq_len=16)
    params, batch = random_params(model), packed_batch()
    params["embed"]["table"][:16] = np.eye(16, 32)  # rows that distinguish tokens
    batch["tokens"][0] = np.arange(16)  # no token twice: each gradient has one source

    def second_document(table):
        logits = logits_of(model, {**params, "embed": {"table": table}}, batch)
        return logits[0, 5:14].sum()

    grad = jax.grad(second_document)(jnp.asarray(params["embed"]["table"]))
    assert np.all(grad[:5] == 0)
    assert np.all(np.abs(grad[5:14]).max(-1) > 0)


# Attention kernels


GPU = dict(platform="gpu", dtype=jnp.bfloat16, compute_capability="9.0")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"platform": "cpu"}, "this is cpu"),
        ({"dtype": jnp.float32}, "float32"),
        ({"compute_capability": "7.5"}, "8.0, this is 7.5"),
        ({"packed": True, "compute_capability": "8.0"}, "9.0, this is 8.0"),
        ({"packed": True, "compute_capability": ""}, "9.0, this is unknown"),
        ({"packed": True, "packed_rejection": "differs from the reference"}, "differs from"),
        ({"cached": True}, "explicit query positions"),
        ({"head_dim": 36}, "this is 36"),
        ({"head_dim": 512}, "this is 512"),
        ({"dropout": 0.1}, "every mesh"),
        ({"softcap": 50.0}, "capped at 50"),
        ({"sinks": True}, "no attention sinks"),
    ],
)
def test_unsupported_cudnn_falls_back_with_a_reason_or_is_refused_if_requested(change, reason):
    ask = {**GPU, "head_dim": 64, "num_keys": 64, "packed": False, **change}
    kernel, why = kernel_of("auto", **ask)
    assert kernel == "xla" and reason in why
    with refused("attention='cudnn'", reason):
        kernel_of("cudnn", **ask)
    assert kernel_of("xla", **ask) == ("xla", "from the settings")


def test_cudnn_is_chosen_on_a_supported_gpu():
    for requested, packed in itertools.product(("auto", "cudnn"), (False, True)):
        width = 256 if packed else 128
        kernel, why = kernel_of(requested, **GPU, head_dim=width, num_keys=8192, packed=packed)
        assert kernel == "cudnn" and "causal" in why
        assert (f"{DOCUMENTS} documents" in why) == packed


def test_long_rows_use_blockwise_attention_without_cudnn():
    ask = {**GPU, "platform": "cpu", "head_dim": 64, "packed": False}
    for requested in ("auto", "xla"):
        assert kernel_of(requested, **ask, num_keys=BLOCKWISE_FROM)[0] == "blockwise"
        assert kernel_of(requested, **ask, num_keys=BLOCKWISE_FROM - 1)[0] == "tiled"
        assert kernel_of(requested, **ask, num_keys=BLOCKWISE_FROM, dropout=0.1)[0] == "xla"


@pytest.mark.parametrize("change", [{"platform": "gpu"}, {"platform": "cpu", "cached": True}])
def test_rows_without_tiling_use_blockwise_attention_earlier(change):
    ask = {**GPU, "head_dim": 64, "packed": False, **change}
    for num_keys, kernel in ((1023, "xla"), (1024, "blockwise")):
        assert kernel_of("xla", **ask, num_keys=num_keys)[0] == kernel


def test_rows_on_cpu_use_tiled_attention_if_a_tile_can_be_skipped():
    ask = {**GPU, "platform": "cpu", "head_dim": 64, "packed": True, "num_keys": TILE + 1}
    for requested in ("auto", "xla"):
        assert kernel_of(requested, **ask)[0] == "tiled"
        for change in ({"num_keys": TILE}, {"dropout": 0.1}, {"cached": True}):
            assert kernel_of(requested, **{**ask, **change})[0] == "xla"
    assert kernel_of("xla", **{**ask, "platform": "gpu"})[0] == "xla"


def test_packed_rows_with_requested_cudnn_are_refused_if_unsupported():
    config = dataclasses.replace(FAMILIES["llama2"], attention="cudnn")
    model = build(config, seq_len=16)
    ampere = {**GPU, "compute_capability": "8.6"}
    with refused("attention='cudnn'", "capability 9.0"):
        logits_of(model, random_params(model), packed_batch(), **ampere)


def test_plan_has_the_kernel_and_its_reason():
    model = build(FAMILIES["llama2"], seq_len=16)
    layout = Layout(mesh=MeshSpec.parse("1").build(jax.devices()[:1]))
    settings = StepSettings(TrainConfig(seq_len=16))
    plan = lambda device, packed, **change: plan_step(
        model, layout, device, packed, settings, **change
    )
    cpu, gpu = Device("cpu"), Device("gpu", "9.0", is_described=True)
    assert plan(cpu, False).kernel == "xla"
    assert plan(cpu, False).reasons["kernel"].startswith("cuDNN needs an NVIDIA GPU")
    slow = KernelCheck(errors={}, rejection_reason="slow")
    for packed, checks, kernel in (
        (False, (), "cudnn"),
        (True, (), "cudnn"),
        (True, (slow,), "xla"),
        (False, (slow,), "cudnn"),
    ):
        result = plan(gpu, packed, checks=checks)
        assert result.kernel == kernel
        assert ("slow" in result.reasons["kernel"]) == (kernel == "xla")
    assert plan(gpu, True).digest != plan(gpu, True, checks=(slow,)).digest


@pytest.mark.parametrize("layer", [0, 1])
def test_capped_scores_and_a_window_in_every_other_layer(layer, monkeypatch):
    """Compare dense attention with the definition, and blockwise (values, gradients) with dense."""
    rng = np.random.default_rng(0)
    heads = [jnp.asarray(rng.normal(size=(2, 8, n, 4)), jnp.float32) for n in (4, 2, 2)]
    mask = AttentionMask(sliding_window=3, full_every=2, layer=jnp.asarray(layer))
    attend = jax.jit(lambda *x: make_attend(AttentionPlan("cpu"))(*x, mask, softcap=0.7))
    query, key, value = heads
    mixed = attend(*heads)
    for row, head, at in np.ndindex(2, 4, 8):
        seen = slice(0 if layer == 1 else max(0, at - 2), at + 1)
        scores = np.tanh(key[row, seen, head // 2] @ query[row, at, head] / 2 / 0.7) * 0.7
        probs = np.exp(scores) / np.exp(scores).sum()
        expected = probs @ value[row, seen, head // 2]
        np.testing.assert_allclose(mixed[row, at, head], expected, atol=1e-6)
    pull = lambda *x: jnp.sum(jnp.sin(make_attend(AttentionPlan("cpu"))(*x, mask, softcap=0.7)))
    dense = jax.jit(jax.grad(pull, (0, 1, 2)))(*heads)
    monkeypatch.setattr(kernels, "BLOCKWISE_FROM", 1)
    monkeypatch.setattr(blockwise.Rule.__new__, "__defaults__", (True, 0, 4, 0.0))
    again = make_attend(AttentionPlan("cpu"))(*heads, mask, softcap=0.7)
    np.testing.assert_allclose(again, mixed, atol=1e-6)
    for ours, expected in zip(jax.jit(jax.grad(pull, (0, 1, 2)))(*heads), dense, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_settings_for_different_layers_are_refused_if_layers_are_equal():
    sizes = {**SIZES, "full_attention_every": 2}
    with refused("model.full_attention_every=2", num_problems=1):
        raise ConfigError(DecoderConfig(**sizes).problems())
    with refused("model.local_rope_theta=100", num_problems=1):
        raise ConfigError(DecoderConfig(**SIZES, local_rope_theta=100.0).problems())


@pytest.mark.parametrize(
    ("dims", "w", "expected"),
    [
        ("batch seq d, d mlp -> batch seq mlp", (8, 5), "bsd,dm->bsm"),
        ("batch seq d, d kv group -> batch seq kv group", (8, 2, 3), "bsd,dkg->bskg"),
        ("batch seq d, batch d -> seq", (2, 8), "bsd,bd->s"),
    ],
)
def test_dot_contracts_the_dims_that_its_result_lacks(dims, w, expected):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 4, 8), w))
    np.testing.assert_allclose(dot(dims, x, w), np.einsum(expected, x, w), rtol=1e-4, atol=1e-5)
    half = dot(dims, x.astype(jnp.bfloat16), w)
    assert half.dtype == jnp.bfloat16
    assert dot(dims, x.astype(jnp.bfloat16), w, out_dtype=jnp.float32).dtype == jnp.float32


# Dropout


DROPPING = dataclasses.replace(FAMILIES["gpt2"], dropout=0.2, attention_dropout=0.3)


def test_every_layer_has_its_own_dropout_key():
    def draws(_params, x, _aux, context):
        draw = jax.random.uniform(context.dropout_key)
        return x, {"draw": draw, "square": draw * draw}

    case = tiny.Case("learned", "1")
    model = dataclasses.replace(tiny.model_of("learned"), block=draws)
    layout = tiny.layout_of(case)
    plan = tiny.plan_of(model, layout, tiny.train_config(case))
    function = make_value_and_grad(model, layout, plan, make_context(model, layout, plan))
    params, batch = tiny.initial_state("learned").params, tiny.text_batch()
    sums, _, _ = jax.jit(function)(params, batch, jax.random.key(0), jnp.float32(1.0))
    # The squared mean equals the mean of squares if all draws are equal; otherwise it is smaller.
    assert model.num_layers * sums["square"] > 1.01 * sums["draw"] ** 2


def test_nothing_is_dropped_without_a_key():
    plain = build(FAMILIES["gpt2"], seq_len=16)
    dropping = build(DROPPING, seq_len=16)
    params, batch = random_params(plain), {"tokens": random_tokens(2, 16)}
    np.testing.assert_array_equal(
        logits_of(dropping, params, batch), logits_of(plain, params, batch)
    )


def test_dropout_keeps_the_mean_and_the_rate():
    x = jnp.ones((8, 64, 32))
    drop = jax.jit(
        lambda x: layers.dropout(x, 0.25, jax.random.key(0), jnp.arange(8), jnp.arange(64))
    )
    y = np.array(drop(x))
    kept = y > 0
    np.testing.assert_allclose(y[kept], 1 / 0.75, rtol=1e-6)
    # 16384 draws: the rate's standard deviation is 0.0034; allow four of them.
    assert abs(kept.mean() - 0.75) < 0.014
    # No two tokens of any row share their bits.
    assert len({bits.tobytes() for bits in kept.reshape(-1, 32)}) == 8 * 64


def test_kernel_without_dropout_support_is_refused_for_dropout():
    rows = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    attend = make_attend(AttentionPlan("gpu", "9.0"))
    dropout = AttentionDropout(rate=0.1, key=jax.random.key(0), rows=jnp.arange(1))
    with refused("attention='cudnn'", "dropout"):
        attend(rows, rows, rows, AttentionMask(), kernel="cudnn", dropout=dropout)


def test_attention_dropout_keeps_the_mean():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 6, n, 4)), jnp.float32) for n in (4, 2, 2))
    attend, mask = make_attend(AttentionPlan("cpu")), AttentionMask(sliding_window=3)

    @jax.jit
    def mean(keys):
        drop = lambda dropout_key: attend(
            *(query, key, value),
            mask,
            dropout=AttentionDropout(rate=0.3, key=dropout_key, rows=jnp.arange(2)),
        )
        return jax.vmap(drop)(keys).mean(0)

    means = mean(jax.random.split(jax.random.key(0), 512))
    plain = attend(query, key, value, mask)
    # A probability's estimate has standard deviation ≤ 0.65 / √512 ≈ 0.03; values reach 2.5.
    np.testing.assert_allclose(means, plain, atol=0.25)
    np.testing.assert_allclose(means.mean(), plain.mean(), atol=0.02)
