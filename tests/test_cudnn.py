"""cuDNN's attention as this package calls it, with a stand-in for its operations on the CPU."""

from types import SimpleNamespace

import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxdist.core.attention import admission, blockwise, cudnn
from jaxdist.core.attention.admission import Admission, Shapes, compare_packed, sample_segments
from jaxdist.core.attention.blockwise import Rule, Span
from jaxdist.core.attention.cudnn import DOCUMENTS, Documents
from jaxdist.core.step import TrainConfig
from jaxdist.core.step.packed_kernel import admit_packed_kernel
from jaxdist.runtime import coordination

LENGTH = 40
ROWS = {
    "one document": [LENGTH],
    "as many as a call takes": [13, 1, 20, 6],
    "one more": [1, 9, 12, 16, 2],
    "more than two calls take": [4] * 8 + [7, 1],
}


def segments_of(*rows, padding: int = 0) -> np.ndarray:
    """int32 [rows, LENGTH] of documents with these lengths; the last `padding` positions are 0."""
    segments = np.array([np.repeat(np.arange(1, len(row) + 1), row) for row in rows], np.int32)
    segments[:, LENGTH - padding :] = 0
    return segments


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("padding", [0, 1])
def test_sequences_begin_and_end_where_documents_do(name, padding):
    lengths = ROWS[name]
    if padding:  # the last document ends earlier, and padding is one of its own
        lengths = [*lengths[:-1], lengths[-1] - 1, 1]
        lengths = [n for n in lengths if n]
    documents = Documents.of(
        jnp.asarray(segments_of(ROWS[name], ROWS["one more"], padding=padding))
    )
    needed = max(len(lengths), len(ROWS["one more"]) + padding)
    assert int(documents.num_calls) == -(-needed // DOCUMENTS)
    found = [documents.sequences(jnp.int32(n)) for n in range(int(documents.num_calls))]
    starts, sizes = (np.concatenate([np.asarray(x[i][0]) for x in found]) for i in (0, 1))
    expected = np.cumsum([0, *lengths])[:-1]
    assert starts[: len(lengths)].tolist() == expected.tolist()
    assert sizes[: len(lengths)].tolist() == lengths
    assert set(starts[len(lengths) :]) <= {LENGTH} and set(sizes[len(lengths) :]) <= {0}
    taken = np.array([documents.taken(jnp.int32(n)) for n in range(len(found))])
    assert np.all(taken.sum(0) == 1)


def pulled(attend, inputs):
    """Output, and gradients of query, key and value."""
    query, key, value, cotangent = inputs
    out, back = jax.vjp(attend, query, key, value)
    return [np.asarray(x) for x in (out, *back(cotangent))]


def inputs_of(heads: int, kv_heads: int, rows: int = 2):
    rng = np.random.default_rng(0)
    shapes = [(rows, LENGTH, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def reference(segments, rule, inputs):
    span = Span(jnp.arange(LENGTH, dtype=jnp.int32)[None], segments)
    return pulled(lambda *x: blockwise.attend(*x, span, span, rule), inputs)


@pytest.mark.parametrize(
    "name, heads, rule",
    [
        ("one document", (4, 4), Rule()),
        ("as many as a call takes", (4, 2), Rule(window=5)),
        ("one more", (3, 1), Rule(causal=False)),
        ("more than two calls take", (4, 2), Rule()),
    ],
)
def test_packed_attention_is_each_documents_own(monkeypatch, name, heads, rule):
    forwards, backwards = cudnn_stand_in.install(monkeypatch)
    segments = jnp.asarray(segments_of(ROWS[name], ROWS["one more"], padding=1))
    inputs = inputs_of(*heads)
    found = pulled(jax.jit(lambda *x: cudnn.attend_packed(*x, segments, rule)), inputs)
    for a, b in zip(found, reference(segments, rule, inputs), strict=True):
        assert np.max(np.abs(a - b)) <= 3e-6 * np.max(np.abs(b))
    mask = "PADDING_CAUSAL" if rule.causal else "PADDING"
    assert set(forwards) == set(backwards) == {mask}


SHAPES = Shapes(rows=3, seq_len=64, heads=4, kv_heads=2, head_dim=16, window=0, dtype=jnp.bfloat16)


def test_the_kernel_is_admitted_where_it_computes_what_the_reference_does(monkeypatch):
    cudnn_stand_in.install(monkeypatch)
    found = compare_packed(SHAPES, jax.devices()[0])
    assert not found.obstacle
    assert 0 < max(found.errors.values()) < admission.TOLERANCE / 2


def test_the_kernel_is_refused_where_it_sees_a_key_less(monkeypatch):
    cudnn_stand_in.install(monkeypatch, late=True)
    found = compare_packed(SHAPES, jax.devices()[0])
    assert "differs" in found.obstacle
    assert not found.errors["key gradient"] <= 5 * admission.TOLERANCE


def test_the_kernel_is_refused_where_it_cannot_run():
    found = compare_packed(SHAPES, jax.devices()[0])  # a CPU
    assert "failed" in found.obstacle and not found.errors


def test_what_is_compared_has_more_documents_than_a_call_takes():
    segments = sample_segments(2, 8192)
    assert len(np.unique(segments[0])) > DOCUMENTS
    assert segments[0, -1] == 0 and np.all(segments[1] == 1)
    assert int(Documents.of(jnp.asarray(segments)).num_calls) > 2


@pytest.mark.parametrize("obstacle", ["", "differs"])
def test_one_process_that_refuses_the_kernel_refuses_it_for_all(monkeypatch, obstacle):
    compared = []

    def compare(shapes, device):
        compared.append(shapes)
        return Admission(errors={}, obstacle="")

    monkeypatch.setattr(admission, "compare_packed", compare)
    monkeypatch.setattr(coordination, "gather", lambda name, value: [value, obstacle])
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    layout = SimpleNamespace(
        mesh=SimpleNamespace(devices=np.array([gpu])),
        size=lambda axis: {"tensor": 2}.get(axis.name, 1),
        num_replicas=2,
        used=(),
    )
    model = SimpleNamespace(dims={"heads": 8, "kv_heads": 2, "head_dim": 64})
    config = TrainConfig(global_batch_size=24, num_microbatches=3, seq_len=4096)

    def admit(dtype):
        return admit_packed_kernel(
            model, layout, config, dtype, wanted="auto", window=7, softcap=0.0
        )

    assert obstacle in admit(jnp.bfloat16).obstacle
    assert bool(admit(jnp.bfloat16).obstacle) == bool(obstacle)
    (shapes, _) = compared
    assert shapes == Shapes(
        rows=4, seq_len=4096, heads=4, kv_heads=1, head_dim=64, window=7, dtype=jnp.bfloat16
    )
    # What the kernel cannot do is not compared, nor what is described and not here.
    assert admit(jnp.float32) is None
    monkeypatch.setattr(jax, "local_devices", list)
    assert admit(jnp.bfloat16) is None and len(compared) == 2


def test_jaxs_operations_take_what_they_are_given():
    """Lowered for a GPU, which needs none: one call forward and one backward."""
    assert not cudnn.missing()
    query = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def loss(query, key, value, segments):
        return jnp.sum(cudnn.attend_packed(query, key, value, segments, Rule(window=64)))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(query, key, key, segments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    kept = text.count("PADDING_CAUSAL"), text.count(f"max_seg_per_batch\\22: {DOCUMENTS}")
    assert kept == (2, 2)


def test_a_batch_that_cudnn_cannot_count_is_refused():
    shape = jax.ShapeDtypeStruct((2, 2**20, 8, 128), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 2**20), jnp.int32)
    with refused("32 bits"):
        jax.eval_shape(lambda q, s: cudnn.attend_packed(q, q, q, s, Rule()), shape, segments)
