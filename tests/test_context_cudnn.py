"""Ring attention on cuDNN's kernel: when it is chosen, and its math with a CPU stand-in."""

import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_choice import kernel_of
from refusals import refused
from test_context import CLOSE, PLANS, apart, dense, shared

from jaxdist.core.attention import (
    AttentionPlan,
    blockwise,
    kernels,
    make_attend,
    ring,
    zigzag,
)
from jaxdist.core.attention.cudnn import DOCUMENTS
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import AttentionMask

GPU = {"platform": "gpu", "compute_capability": "9.0", "dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("exchange", "change", "kernel", "reason"),
    [
        ("ring", {}, "cudnn", "each part"),
        ("hybrid", {"compute_capability": "8.0"}, "cudnn", "each part"),
        ("ring", {"packed": True}, "cudnn", "document"),
        ("ring", {"causal": False}, "blockwise", "causal mask only"),
        ("hybrid", {"packed": True, "compute_capability": "8.0"}, "blockwise", "capability 9.0"),
        ("hybrid", {"packed": True, "packed_rejection": "it differs"}, "blockwise", "it differs"),
        ("ring", {"packed": True, "window": 9}, "blockwise", "sliding window"),
        ("hybrid", {"window": 63}, "blockwise", "sliding window"),
        ("ring", {"window": 64}, "cudnn", "each part"),
        ("ring", {"head_dim": 256}, "blockwise", "head_dim"),
        ("ring", {"dtype": jnp.float32}, "blockwise", "float32"),
        ("all_gather", {}, "blockwise", "all gathered keys"),
        ("all_to_all", {"packed": True, "window": 9, "head_dim": 256}, "cudnn", "documents"),
    ],
)
def test_kernel_choice_under_context_parallelism_has_a_reason(exchange, change, kernel, reason):
    """Rows with few keys, which would use the dense kernel without context parallelism."""
    ask = {**GPU, "head_dim": 128, "num_keys": 64, "packed": False, **change}
    plan = PLANS[exchange]
    kernel_name, why = kernel_of("auto", **ask, exchange=plan)
    assert kernel_name == kernel and reason in why
    if kernel == "cudnn":
        assert kernel_of("cudnn", **ask, exchange=plan)[0] == "cudnn"
    else:
        with refused("attention='cudnn'", reason):
            kernel_of("cudnn", **ask, exchange=plan)


def test_ring_with_failed_comparison_uses_blockwise_kernel():
    ask = {**GPU, "head_dim": 128, "num_keys": 64, "packed": False}
    plan = {"exchange": PLANS["ring"], "ring_rejection": "it differs"}
    kernel, why = kernel_of("auto", **ask, **plan)
    assert kernel == "blockwise" and "it differs" in why
    assert kernel_of("auto", **ask | {"packed": True}, **plan)[0] == "cudnn"


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: ("cudnn", ""))
    return cudnn_stand_in.install(monkeypatch)


@pytest.mark.parametrize(
    ("plan", "shards", "heads"),
    [
        ("ring", 2, "grouped"),
        ("ring", 4, "odd"),
        ("ring_in_pairs", 4, "grouped"),
        ("hybrid", 4, "grouped"),
    ],
)
def test_cudnn_ring_matches_dense_attention(calls, plan, shards, heads):
    actual = shared(PLANS[plan], "causal", heads, False, shards)
    assert apart(actual, dense("causal", heads, False)) <= CLOSE
    assert set(calls[0]) == set(calls[1]) == {"CAUSAL", "NO_MASK"}


@pytest.mark.parametrize(
    ("plan", "shards"),
    [
        ("ring", 2),
        pytest.param("ring", 4, marks=pytest.mark.product),
        pytest.param("hybrid", 4, marks=pytest.mark.product),
    ],
)
def test_documents_across_every_cut_attend_only_to_themselves(calls, plan, shards):
    """Around the ring, and in groups."""
    actual = shared(PLANS[plan], "causal", "grouped", True, shards)
    assert apart(actual, dense("causal", "grouped", True)) <= CLOSE
    assert set(calls[0]) == set(calls[1]) == {"PADDING_CAUSAL", "PADDING"}


def test_chunks_without_a_shared_document_contribute_nothing(calls):
    """Neither row of these queries sees a key, but one row of the others does."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 6, n, 8)), jnp.float32) for n in (4, 2, 2))
    keys = zigzag.Keys(key, value, jnp.array([[1, 1, 2, 2, 2, 2], [1, 2, 3, 3, 4, 4]]))
    apart_from = zigzag.Queries(query, jnp.array([[3] * 6, [5, 5, 6, 6, 7, 7]]))
    joined = apart_from._replace(segments=jnp.array([[2, 2, 3, 3, 3, 3], [5, 5, 6, 6, 7, 7]]))
    out, lse = zigzag.across(apart_from, keys)
    assert not out.any() and (lse == blockwise.UNSEEN).all()
    out, lse = zigzag.across(joined, keys)
    seen = lse[..., 0] != blockwise.UNSEEN
    assert seen.tolist() == [[True] * 2 + [False] * 4, [False] * 6]
    assert not out[~seen].any()
    forward = zigzag.GlobalAttention(out, query, lse)
    for queries, some in ((apart_from, False), (joined, True)):
        dq, dk, dv = zigzag.across_backward(queries, keys, forward)
        assert not dq[~seen].any() and bool(dq.any()) == some
        assert np.asarray(dk.any((2, 3)) & dv.any((2, 3))).tolist() == [
            [False] * 2 + [some] * 4,
            [False] * 6,
        ]


def another_group_is_earlier(monkeypatch):
    """Use the first group's keys as those of a later group."""
    is_earlier = ring.Ring.is_earlier

    def late(self, steps_back):
        earlier = is_earlier(self, steps_back)
        return earlier if earlier is None else self.group > steps_back

    monkeypatch.setattr(ring.Ring, "is_earlier", late)


def late_keys_are_seen(monkeypatch):
    """Use the wrong half of an earlier group's keys."""
    monkeypatch.setattr(zigzag, "early", zigzag.late)


def positions_stay_as_devices_hold_them(monkeypatch):
    """Keep the device order in groups, whose devices' halves alternate."""
    for name in ("in_row_order", "in_device_order"):
        monkeypatch.setattr(ring.Ring, name, lambda self, x: x)


def a_document_begins_early(monkeypatch):
    """Let queries of a later chunk see the last key of the previous document."""
    of = zigzag.SharedDocument.of

    def early(queries, keys):
        spans = of(queries, keys)
        return spans._replace(keys=spans.keys | jnp.roll(spans.keys, -1, axis=1))

    monkeypatch.setattr(zigzag.SharedDocument, "of", early)


@pytest.mark.parametrize(
    ("plant", "plan", "mask", "is_packed"),
    [
        (another_group_is_earlier, "ring", "causal", False),
        (late_keys_are_seen, "ring", "causal", False),
        (positions_stay_as_devices_hold_them, "hybrid", "causal", False),
        pytest.param(a_document_begins_early, "ring", "causal", True, marks=pytest.mark.slow),
    ],
)
def test_planted_fault_in_cudnn_ring_is_detected(calls, plant, plan, mask, is_packed, monkeypatch):
    plant(monkeypatch)
    actual = shared(PLANS[plan], mask, "grouped", is_packed)
    assert apart(actual, dense(mask, "grouped", is_packed)) > 1e-2


def lowered(window: int, is_packed: bool) -> str:
    mesh = MeshSpec(context=4).build(jax.devices()[:4])
    attend = make_attend(AttentionPlan("gpu", "9.0", PLANS["ring"]))

    def gradients(query, key, value, segments):
        mask = AttentionMask(sliding_window=window, segments=segments if is_packed else None)
        loss = lambda *x: jnp.sum(attend(*x, mask))
        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    over = P(None, "context")
    mapped = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=over, out_specs=over))
    query, key = (jax.ShapeDtypeStruct((1, 1024, n, 64), jnp.bfloat16) for n in (4, 2))
    segments = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    return mapped.trace(query, key, key, segments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("is_packed", [False, True])
def test_window_over_a_ring_uses_no_cudnn_call(is_packed):
    assert "cudnn" not in lowered(300, is_packed)


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_ring_step_is_a_cudnn_call(is_packed):
    """First the local keys, then one chunk of two, in the loop and after it.

    Backward computes all in two halves, and one step before the loop.
    """
    text = lowered(0, is_packed)
    for name, number in (("", 1 + 2 + 2), ("Backward", 2 + 2 + 2 + 2)):
        assert text.count(f"@__cudnn$fmhaSoftmax{name}(") == number
    own = "PADDING_CAUSAL" if is_packed else "CAUSAL"
    assert text.count(f"\\22{own}") == 2
    # Local documents in fours; documents that reach further one by one, of two that a call needs.
    calls = [text.count(f"max_seg_per_batch\\22: {number}") for number in (1, DOCUMENTS, 2)]
    assert calls == ([0, 2, 4 + 7] if is_packed else [2 + 4 + 7, 0, 0])
    assert "dot_general" not in text
