"""Losses against `log_softmax`, numpy and torch: values, gradients, dtypes, shards, memory."""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives, precision
from jaxdist.core.collective_order import in_order
from jaxdist.core.losses import (
    Regularizers,
    Vocabulary,
    label_cross_entropy,
    token_cross_entropy,
)
from jaxdist.core.precision import PrecisionConfig, initial_loss_scale, update_loss_scale
from jaxdist.core.state import TrainState
from jaxdist.core.step.train_step import _make_begin, _make_train, move_copies

pytestmark = pytest.mark.smoke

BATCH, SEQ, WIDTH, VOCAB, PADDED = 2, 15, 12, 29, 32


def case(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
    kernel = rng.normal(size=(WIDTH, PADDED)).astype(np.float32)
    kernel[:, VOCAB:] = 50.0  # padding with a probability would win
    targets = rng.integers(0, VOCAB, (BATCH, SEQ), np.int32)
    targets[:, ::3] = np.argmax(x @ kernel[:, :VOCAB], -1)[:, ::3]  # some are hit
    weights = rng.choice([0.0, 0.5, 1.0], (BATCH, SEQ)).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype), targets, weights


def plain_loss(x, kernel, targets, weights, cap=0.0):
    logits = x.astype(jnp.float32) @ kernel.astype(jnp.float32)[:, :VOCAB]
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    hits = jnp.argmax(logits, -1) == targets
    return -jnp.sum(picked * weights), jnp.sum(hits.astype(jnp.float32) * weights)


@jax.jit
def plain(x, kernel, targets, weights):
    grad = jax.value_and_grad(plain_loss, argnums=(0, 1), has_aux=True)
    (loss, correct), grads = grad(x, kernel, targets, weights)
    return loss, correct, grads


def fused(x, kernel, targets, weights, *, chunk=0, axis=None, regularizers=None):
    vocabulary = Vocabulary(VOCAB, axis, chunk, regularizers=regularizers)

    def loss(x, kernel):
        x = collectives.vary(x, axis) if axis else x  # as `Context.enter` does
        sums = token_cross_entropy(x, kernel, targets, weights, vocabulary)
        return sums["loss"], sums

    (_, sums), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, kernel)
    return sums, grads, loss(x, kernel)[1]


def test_capped_logits_match_the_definition():
    x, kernel, targets, weights = case()
    capped = lambda *arrays: plain_loss(*arrays, targets, weights, cap=2.0)[0]
    expected = jax.value_and_grad(capped, argnums=(0, 1))(x, kernel)
    vocabulary = Vocabulary(VOCAB, None, 7, softcap=2.0)
    ours = lambda *arrays: token_cross_entropy(*arrays, targets, weights, vocabulary)["loss"]
    actual = jax.value_and_grad(ours, argnums=(0, 1))(x, kernel)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


def sharded(num_devices, chunk, **options):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    return jax.shard_map(
        in_order(partial(fused, chunk=chunk, axis="tensor", **options)),
        mesh=mesh,
        in_specs=(P(), P(None, "tensor"), P(), P()),
        out_specs=(P(), (P(), P(None, "tensor")), P()),
    )


def check(result, expected):
    sums, grads, undifferentiated = result
    loss, correct, expected_grads = expected
    # float32 sums of the same numbers in a different order.
    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(undifferentiated["loss"], loss, rtol=1e-6)
    assert sums["correct"] == undifferentiated["correct"] == correct > 0
    for ours, reference in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-6 * np.abs(reference).max(), rtol=0)


@pytest.mark.parametrize("chunk", [0, 1, 7, 10, 30, 64])
def test_chunked_loss_and_gradients_equal_the_definition(chunk):
    """7 does not divide the 30 tokens; 64 is more than all of them."""
    arguments = case()
    result = jax.jit(partial(fused, chunk=chunk))(*arguments)
    check(result, plain(*arguments))
    assert result[0]["weight"] == arguments[3].sum()


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_sharded_vocabulary_matches_the_definition(num_devices, chunk):
    arguments = case()
    check(jax.jit(sharded(num_devices, chunk))(*arguments), plain(*arguments))


def regularized(logits, targets, weights, z_loss, smoothing):
    """Return loss + z-loss + smoothed part by definition, and the plain loss."""
    log_probs = jax.nn.log_softmax(logits)
    soft = (1 - smoothing) * jax.nn.one_hot(targets, logits.shape[-1])
    soft += smoothing / logits.shape[-1]
    squared = z_loss * jax.nn.logsumexp(logits, -1) ** 2
    picked = jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    total = jnp.sum((squared - jnp.sum(soft * log_probs, -1)) * weights)
    return total, -jnp.sum(picked * weights)


@pytest.mark.parametrize("terms", [(0.01, 0.1), (0.01, 0.0), (0.0, 0.1)])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_z_loss_and_label_smoothing_equal_their_definitions(num_devices, terms):
    """Also over a vocabulary whose padding columns would dominate; loss stays the plain one."""
    x, kernel, targets, weights = case()
    options = {"chunk": 7, "regularizers": Regularizers(*terms)}
    run = sharded(num_devices, **options) if num_devices > 1 else partial(fused, **options)
    sums, grads, undifferentiated = jax.jit(run)(x, kernel, targets, weights)
    by_definition = lambda x, k: regularized(x @ k[:, :VOCAB], targets, weights, *terms)
    (total, plain), expected = jax.value_and_grad(by_definition, (0, 1), has_aux=True)(x, kernel)
    for each in (sums, undifferentiated):
        np.testing.assert_allclose(each["loss"], plain, rtol=1e-6)
        np.testing.assert_allclose(each["loss"] + each["aux_loss"], total, rtol=1e-6)
    for ours, reference in zip(grads, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=2e-6 * np.abs(reference).max(), rtol=0)


def test_class_labels_have_the_same_regularizers():
    logits, labels, weights = jnp.eye(4, 5) * 3, jnp.array([0, 1, 4, 3]), jnp.ones(4)

    def ours(logits):
        sums = label_cross_entropy(logits, labels, weights, Regularizers(0.01, 0.1))
        return sums["loss"] + sums["aux_loss"]

    by_definition = lambda logits: regularized(logits, labels, weights, 0.01, 0.1)[0]
    for actual, expected in zip(
        jax.value_and_grad(ours)(logits), jax.value_and_grad(by_definition)(logits), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_padding_columns_get_no_gradient():
    arguments = case()
    for function in (fused, sharded(8, 7)):
        _, (_, grad), _ = jax.jit(function)(*arguments)
        assert np.all(grad[:, VOCAB:] == 0)
        assert np.all(np.abs(grad[:, :VOCAB]).max(0) > 0)


@pytest.mark.parametrize("chunk", [0, 7])
def test_tokens_of_weight_zero_have_no_effect(chunk):
    x, kernel, targets, weights = case()
    sums, (dx, dkernel), _ = jax.jit(partial(fused, chunk=chunk))(
        x.at[weights == 0].set(1e4), kernel, np.where(weights == 0, 0, targets), weights
    )
    check((sums, (jnp.where(weights[..., None] == 0, 0, dx), dkernel), sums), plain(*case()))
    assert np.all(dx[weights == 0] == 0)

    nothing = np.zeros_like(weights)
    sums, grads, _ = jax.jit(partial(fused, chunk=chunk))(x, kernel, targets, nothing)
    assert sums["loss"] == sums["weight"] == sums["correct"] == 0
    assert all(np.all(grad == 0) for grad in grads)


def test_large_logit_does_not_overflow():
    x, kernel, targets, weights = case()
    arguments = (x * 1e3, kernel, targets, weights)
    check(jax.jit(fused)(*arguments), plain(*arguments))


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_keeps_a_float32_softmax(dtype, num_devices):
    """Matmuls take rounded inputs but accumulate in float32, like everything after them."""
    arguments = case(dtype)
    function = partial(fused, chunk=7) if num_devices == 1 else sharded(num_devices, 7)
    sums, grads, _ = jax.jit(function)(*arguments)
    loss, correct, expected = plain(*arguments)
    assert sums["loss"].dtype == sums["correct"].dtype == jnp.float32
    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-5)
    assert sums["correct"] == correct
    for ours, reference in zip(grads, expected, strict=True):
        assert ours.dtype == dtype
        # Two roundings (of the logits' gradient, of the result), each half a unit in the last place
        # relative to terms that partly cancel.
        tolerance = 4 * float(jnp.finfo(dtype).eps) * np.abs(reference.astype(np.float32)).max()
        np.testing.assert_allclose(
            ours.astype(np.float32), reference.astype(np.float32), atol=tolerance, rtol=0
        )


def test_float16_gradients_below_its_range_survive_a_loss_scale():
    """Without a scale they are some 1e-8, below float16's minimum of 6e-8."""
    x, kernel, targets, weights = case(jnp.float16)
    tiny, scale = weights * np.float32(1e-7), 2.0**16

    def loss(x, weights, scale):
        sums = token_cross_entropy(x, kernel, targets, weights, Vocabulary(VOCAB, None, 7))
        return sums["loss"] * scale

    grad = jax.jit(jax.grad(loss))
    scaled = np.float32(grad(x, tiny, scale)) / scale / 1e-7
    expected = np.float32(grad(x, weights, 1.0))
    np.testing.assert_allclose(scaled, expected, atol=4e-3 * np.abs(expected).max(), rtol=0)


def test_chunked_loss_never_materializes_all_logits():
    tokens, width, vocab, chunk = 512, 16, 8192, 32
    shapes = [
        jax.ShapeDtypeStruct((1, tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    ]

    def compiled(chunk):
        def loss(x, kernel, targets, weights):
            vocabulary = Vocabulary(vocab, None, chunk)
            return token_cross_entropy(x, kernel, targets, weights, vocabulary)["loss"]

        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()

    logits_bytes = 4 * tokens * vocab
    unchunked, chunked = compiled(0), compiled(chunk)
    assert unchunked.memory_analysis().temp_size_in_bytes > logits_bytes
    assert f"f32[{tokens},{vocab}]" in unchunked.as_text()
    # Some buffers of one chunk's logits, and the kernel's gradient.
    assert chunked.memory_analysis().temp_size_in_bytes < logits_bytes / 3
    assert f"[{tokens},{vocab}]" not in chunked.as_text()
    assert f"[{tokens // chunk},{chunk},{vocab}]" not in chunked.as_text()


def test_label_loss_equals_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, 5)).astype(np.float32) * 3
    labels, weights = rng.integers(0, 5, 9, np.int32), rng.choice([0.0, 1.0, 2.0], 9)
    sums = jax.jit(label_cross_entropy)(logits, labels, weights.astype(np.float32))
    wide = logits.astype(np.float64)
    losses = np.log(np.exp(wide).sum(-1)) - wide[np.arange(9), labels]
    np.testing.assert_allclose(sums["loss"], (losses * weights).sum(), rtol=1e-6)
    assert sums["weight"] == weights.sum()
    assert sums["correct"] == ((wide.argmax(-1) == labels) * weights).sum()


def test_label_loss_of_low_precision_logits_is_float32():
    logits = jnp.asarray([[8.0, 0.0], [0.0, 8.0]], jnp.bfloat16)
    sums = label_cross_entropy(logits, jnp.array([0, 1]), jnp.ones(2))
    assert sums["loss"].dtype == jnp.float32
    np.testing.assert_allclose(sums["loss"], 2 * np.log1p(np.exp(-8.0)), rtol=1e-3)


@pytest.mark.parametrize(
    ("setting", "platform", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "gpu", "bfloat16"),
        ("float32", "gpu", "float32"),
        ("float16", "cpu", "float16"),
    ],
)
def test_auto_dtype_depends_on_the_platform(setting, platform, dtype):
    assert PrecisionConfig(compute_dtype=setting).resolve(platform) == jnp.dtype(dtype)


@pytest.mark.parametrize(
    ("setting", "compute", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_gradients_are_summed_in_the_compute_dtype_by_default(setting, compute, dtype):
    """float16 is the exception, because its range is narrow."""
    assert PrecisionConfig(reduce_dtype=setting).resolve_reduce(compute) == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_float16_has_a_loss_scale(dtype):
    assert initial_loss_scale(dtype) == {}
    assert update_loss_scale({}, jnp.array(False)) == {}


def test_the_scale_halves_on_overflow_and_doubles_after_a_run_of_finite_steps(monkeypatch):
    monkeypatch.setattr(precision, "INITIAL_LOSS_SCALE", 8.0)
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    state = initial_loss_scale(jnp.float16)
    update = jax.jit(update_loss_scale)
    seen = []
    # The first overflow is on the step that would double the scale; the second is not.
    for finite in (True, True, True, True, True, False, True, False, True, True, True):
        state = update(state, finite)
        seen.append((float(state["scale"]), int(state["finite_steps"])))
    assert seen[:6] == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (8, 0)]
    assert seen[6:] == [(8, 1), (4, 0), (4, 1), (4, 2), (8, 0)]


def test_the_scale_never_falls_below_one(monkeypatch):
    monkeypatch.setattr(precision, "INITIAL_LOSS_SCALE", 2.0)
    state = initial_loss_scale(jnp.float16)
    for _ in range(3):
        state = update_loss_scale(state, jnp.array(False))
    assert float(state["scale"]) == 1


@pytest.mark.parametrize(
    "loss, weight, norm, limit, applied, scale",
    [
        (1.0, 1.0, 1.0, math.inf, True, 16.0),
        (1.0, 1.0, math.inf, math.inf, False, 4.0),
        (math.nan, 1.0, 1.0, math.inf, False, 4.0),
        (1.0, 1.0, 1.0, 0.5, False, 16.0),  # a finite loss above the limit is no overflow
        (0.0, 0.0, 0.0, math.inf, False, 8.0),  # no labels: nothing was measured
        (0.0, 0.0, math.nan, math.inf, False, 8.0),
    ],
)
def test_step_on_which_the_loss_scale_doubles(
    monkeypatch, loss, weight, norm, limit, applied, scale
):
    """Check the update, the average and the loss scale of one step at the scale's boundary."""
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    state = TrainState(
        step=jnp.int32(7),
        params={"w": jnp.float32(2)},
        opt_state=jnp.float32(5),
        loss_scale={"scale": jnp.float32(8), "finite_steps": jnp.int32(2)},
        key=jax.random.key(0),
        copies={"ema": {"w": jnp.float32(1)}},
    )
    sums = {"loss": jnp.float32(loss), "weight": jnp.float32(weight)}
    step = _make_train(
        _make_begin(
            lambda params, batch, key, scale: (sums, {"w": scale}, jnp.float32(norm)),
            lambda step: jnp.float32(0.1),
        ),
        lambda state, grads, norm, rate: ({"w": jnp.float32(4)}, jnp.float32(6)),
        None,
        functools.partial(move_copies, decays={"ema": 0.75}),
    )
    state, metrics = step(state, {}, jnp.float32(limit))
    assert (bool(metrics["applied"]), float(metrics["loss_scale"])) == (applied, 8.0)
    assert (float(state.params["w"]), float(state.opt_state)) == ((4, 6) if applied else (2, 5))
    assert float(state.copies["ema"]["w"]) == (0.75 * 1 + 0.25 * 4 if applied else 1)
    assert (float(state.loss_scale["scale"]), int(state.step)) == (scale, 8)
    assert int(state.loss_scale["finite_steps"]) == (2 if scale == 8 else 0)
