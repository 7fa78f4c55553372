"""The decoder: decoding, packed documents, windows, dropout, padding, kernels. One device unless
a test says otherwise; families against transformers are in test_model_families.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import FAMILIES, SIZES, logits_of, random_params, random_tokens

from jaxdist.models import build
from jaxdist.types import Context

# The same float32 numbers, summed in another order; logits are of order 1.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_with_a_cache_equals_the_full_forward(name):
    """Ragged prompts at once, then one token at a time; every position's logits must agree."""
    model = build(FAMILIES[name], seq_len=16)
    params = random_params(model)
    tokens = random_tokens(3, 12)
    expected = np.array(logits_of(model, params, {"tokens": tokens}))
    lengths = np.array([7, 2, 5])
    step = jax.jit(lambda *args: model.decoding.step(*args, Context()))

    positions = np.where(np.arange(7) < lengths[:, None], np.arange(7), -1)
    prompt = np.where(positions < 0, 3, tokens[:, :7])  # padding holds some other token
    shapes = jax.eval_shape(lambda: model.decoding.init_cache(3, 14, jnp.float32))
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    logits, cache = step(params, cache, prompt, positions)
    real = positions >= 0
    np.testing.assert_allclose(
        np.array(logits)[real], expected[:, :7][real], atol=TOLERANCE, rtol=0
    )
    for offset in range(5):
        rows, at = np.arange(3), lengths + offset
        logits, cache = step(params, cache, tokens[rows, at][:, None], at[:, None])
        np.testing.assert_allclose(logits[:, 0], expected[rows, at], atol=TOLERANCE, rtol=0)


def test_decoding_bounds_learned_positions():
    assert build(FAMILIES["gpt2"], seq_len=16).decoding.max_len == SIZES["max_seq_len"]
    assert build(FAMILIES["llama2"], seq_len=16).decoding.max_len > 10**6
