"""Products on CPU: values and gradients against numpy, and values that a step computes once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import RunConfig
from jaxdist.core import types
from jaxdist.core.matmul import cpu
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step.config import TrainConfig
from jaxdist.models import DecoderConfig
from jaxdist.run.setup import assemble

QKV = "batch seq d_model, d_model kv_heads group head_dim -> batch seq kv_heads group head_dim"
OUT = "batch seq heads head_dim, heads head_dim d_model -> batch seq d_model"
CASES = {  # dims: shapes of x and w, einsum subscripts
    QKV: ((2, 5, 4), (4, 3, 2, 6), "abc,cdef->abdef"),
    OUT: ((2, 5, 3, 6), (3, 6, 4), "abcd,cde->abe"),  # wider inside than outside
    "batch seq mlp, mlp d_model -> batch seq d_model": ((2, 5, 8), (8, 3), "abc,cd->abd"),
}
TURNED = "batch seq d_model, vocab d_model -> batch seq vocab"


def _arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def test_gradient_of_activations_reads_the_weight_without_transposing() -> None:
    """For a dot over several dims of it the compiler would make a transposed copy."""
    x, w = _arrays((2, 64, 32), (32, 4, 3, 16))
    back = lambda w, g: jax.vjp(lambda x: cpu.dot(QKV, x, w), x)[1](g)[0]
    g = jnp.zeros((2, 64, 4, 3, 16))
    program = jax.jit(back).lower(w, g).as_text()
    assert re.findall(r"contracting_dims = (\S+ x \S+),", program) == ["[1] x [1]"]
    assert "stablehlo.transpose" not in program


@pytest.mark.parametrize("dims", CASES)
def test_product_and_gradients_equal_numpy(dims: str) -> None:
    x_shape, w_shape, letters = CASES[dims]
    inputs, out = letters.split("->")
    left, right = inputs.split(",")
    x, w = _arrays(x_shape, w_shape)
    product, pull = jax.vjp(lambda x, w: cpu.dot(dims, x, w), x, w)
    (g,) = _arrays(product.shape)
    dx, dw = pull(g)
    wide = [np.float64(a) for a in (x, w, g)]
    expected = [
        np.einsum(letters, wide[0], wide[1]),
        np.einsum(f"{out},{right}->{left}", wide[2], wide[1]),
        np.einsum(f"{left},{out}->{right}", wide[0], wide[2]),
    ]
    for actual, reference in zip((product, dx, dw), expected, strict=True):
        # Sums of up to 36 float32 products: each rounds by 6e-8 of its terms.
        np.testing.assert_allclose(actual, reference, rtol=0, atol=3e-6)


@pytest.mark.parametrize("rows, inner, outer", [(7, 3, 5), (7, 5, 3), (4, 4, 4)])
def test_weight_gradient_equals_numpy(rows: int, inner: int, outer: int) -> None:
    x, g = _arrays((rows, inner), (rows, outer))
    actual = jax.jit(cpu.weight_gradient)(x, g)
    np.testing.assert_allclose(actual, np.float64(x).T @ np.float64(g), rtol=0, atol=2e-6)


def _has_custom_gradient(dims: str, x: jax.Array, w: jax.Array, **options) -> bool:
    total = lambda x, w: jnp.sum(cpu.dot(dims, x, w, **options))
    return "optimization_barrier" in str(jax.make_jaxpr(jax.grad(total, 1))(x, w))


def test_other_dims_and_dtypes_are_left_to_the_plain_product() -> None:
    x, w = (jnp.asarray(a) for a in _arrays((2, 5, 4), (6, 4)))
    np.testing.assert_array_equal(cpu.dot(TURNED, x, w), types.dot(TURNED, x, w))
    plain = "batch seq d_model, d_model vocab -> batch seq vocab"
    low = x.astype(jnp.bfloat16)
    assert _has_custom_gradient(plain, x, w.T)
    assert not _has_custom_gradient(TURNED, x, w)
    assert not _has_custom_gradient(plain, low, w.T)
    assert not _has_custom_gradient(plain, low, w.T, out_dtype=jnp.float32)


def _num_cosines(num_layers: int) -> int:
    config = RunConfig(
        model=DecoderConfig(
            vocab_size=64, d_model=32, num_layers=num_layers, num_heads=2, num_kv_heads=2
        ),
        train=TrainConfig(global_batch_size=2, seq_len=16),
        mesh=MeshConfig(shape="dp=1"),
    )
    parts = assemble(config, jax.devices()[:1])
    tokens = jnp.zeros((2, 16), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones((2, 16))}
    batch = jax.device_put(batch, parts.step.batch_sharding)
    program = parts.step.train.lower(parts.init_state(), batch, np.inf).compile().as_text()
    return len(re.findall(r" cosine\(", program))


@pytest.mark.smoke
def test_angles_are_computed_once_for_all_layers() -> None:
    """If they were fused into their readers, each layer would compute them twice."""
    assert 0 < _num_cosines(1) == _num_cosines(3)
