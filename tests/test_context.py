"""Rows shared by devices (the `context` axis) compute what one device computes.

Attention alone is compared with the dense softmax over complete rows, for every exchange and mask;
the complete step with the hand-written reference of `tiny.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering_array
from jax.sharding import PartitionSpec as P
from pipeline_parity import Case as StagesCase
from pipeline_parity import compare, evaluation
from refusals import refused
from test_parity import check
from test_traffic import traffic
from tiny import ROWS, SEQ, Case, layout_of, model_of, reference, run, step_of, text_batch

from jaxdist.core.attention import (
    AttentionPlan,
    blockwise,
    make_attend,
    tiled,
    visible,
)
from jaxdist.core.attention.context_parallel import ExchangePlan, plan_exchange
from jaxdist.core.collective_order import in_order
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import context as axis
from jaxdist.core.types import AttentionDropout, AttentionMask
from jaxdist.settings import ConfigError

SHARDS, LENGTH, WIDTH = 4, 48, 8
CLOSE = 2e-6  # of the largest number: float32 sums in another order

MASKS = {
    "causal": AttentionMask(),
    "window": AttentionMask(sliding_window=9),
    "everything": AttentionMask(causal=False),
    "newest 9": AttentionMask(sliding_window=9),
    **{f"layer {n} of two": AttentionMask(sliding_window=9, full_every=2, layer=n) for n in (0, 1)},
}
CAPS = {"window": 0.7}
"""Mask -> the bound of its scores; the others have none."""
SINKS = ("window", "everything", "layer 0 of two", "newest 9")
"""Masks whose heads have attention sinks."""
HEADS = {"grouped": (8, 4), "odd": (3, 1)}


@functools.cache
def rows(heads: int, kv_heads: int):
    """Return query, key, value, cotangent [2, LENGTH, heads, WIDTH] and documents [2, LENGTH].

    Documents end at every chunk boundary, one position before and after it, and inside chunks.
    """
    rng = np.random.default_rng(0)
    shapes = [(2, LENGTH, n, WIDTH) for n in (heads, kv_heads, kv_heads, heads)]
    ends = np.zeros((2, LENGTH), np.int32)
    ends[0, [6, 11, 17, 18, 24, 29, 36]] = 1
    ends[1, [5, 30, 31, 42]] = 1
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return *arrays, 1 + np.cumsum(ends, axis=1, dtype=np.int32)


def pulled(attend, *inputs, sink=None):
    query, key, value, cotangent, segments = inputs
    out, back = jax.vjp(lambda *x: attend(*x[:3], segments, x[3]), query, key, value, sink)
    return out, back(cotangent)


def inputs_of(heads: str, is_packed: bool):
    *arrays, segments = rows(*HEADS[heads])
    return *arrays, segments if is_packed else None


def sink_of(mask: str, heads: str):
    count = HEADS[heads][0]
    return np.linspace(-1, 2, count, dtype=np.float32) if mask in SINKS else None


def value_and_grads(attend, mask: str, heads: str, is_packed: bool):
    pull = jax.jit(functools.partial(pulled, attend))
    return jax.device_get(pull(*inputs_of(heads, is_packed), sink=sink_of(mask, heads)))


@functools.cache
def dense(mask: str, heads: str, is_packed: bool):
    def attend(query, key, value, segments, sink):
        each = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, each, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH)
        scores = CAPS[mask] * jnp.tanh(scores / CAPS[mask]) if mask in CAPS else scores
        rule = dataclasses.replace(MASKS[mask], segments=segments)
        scores = jnp.where(visible(rule, LENGTH, LENGTH), scores, -jnp.inf)
        probs = jax.nn.softmax(scores)
        if sink is not None:
            lse = jax.nn.logsumexp(scores, -1, keepdims=True)
            probs = probs * jax.nn.sigmoid(lse - sink[:, None, None])
        return jnp.einsum("bhqk,bkhd->bqhd", probs, value)

    return value_and_grads(attend, mask, heads, is_packed)


def shared(plan: ExchangePlan, mask: str, heads: str, is_packed: bool, shards: int = SHARDS):
    mesh = MeshSpec(context=shards).build(jax.devices()[:shards])
    attend = make_attend(AttentionPlan("cpu", exchange=plan))
    order = np.concatenate(
        [axis.position_ids_of(i, LENGTH // shards, shards) for i in range(shards)]
    )

    def attend_packed(query, key, value, segments, sink):
        layer = jnp.asarray(MASKS[mask].layer)
        seen = dataclasses.replace(MASKS[mask], segments=segments, layer=layer)
        return attend(query, key, value, seen, softcap=CAPS.get(mask, 0.0), sink=sink)

    over = P(None, "context")
    pull = in_order(lambda inputs, sink: pulled(attend_packed, *inputs, sink=sink))
    specs = dict(in_specs=(over, P()), out_specs=(over, (over, over, over, P())))
    placed = jax.tree.map(lambda x: x[:, order], inputs_of(heads, is_packed))
    step = jax.jit(jax.shard_map(pull, mesh=mesh, **specs))
    out, (*grads, of_sink) = step(placed, sink_of(mask, heads))
    in_rows = lambda x: np.asarray(x)[:, np.argsort(order)]
    return in_rows(out), (*map(in_rows, grads), of_sink)


def test_dropout_over_shared_rows_is_refused_with_the_fix():
    mesh = MeshSpec(context=2).build(jax.devices()[:2])
    attend = make_attend(AttentionPlan("cpu", exchange=ExchangePlan("ring", 1, False, "")))
    dropout = AttentionDropout(rate=0.1, key=jax.random.key(0), rows=jnp.arange(1))
    local = lambda x: attend(x, x, x, MASKS["causal"], dropout=dropout)
    over = P(None, "context")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=over, out_specs=over)
    with refused("cp=2", "attention_dropout=0"):
        jax.eval_shape(mapped, jnp.ones((1, 8, 2, 4)))


def apart(actual, expected) -> float:
    """Return the largest difference of outputs or gradients, relative to the largest value."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


PLANS = {
    "ring": ExchangePlan("ring", 1, False, ""),
    "ring_in_pairs": ExchangePlan("ring", 1, True, ""),
    "all_gather": ExchangePlan("all_gather", 1, False, ""),
    "all_to_all": ExchangePlan("all_to_all", 4, False, ""),
    "hybrid": ExchangePlan("hybrid", 2, False, ""),
}
SHARED = [
    choice
    for choice in covering_array(
        {
            "plan": list(PLANS),
            "mask": ["causal", "window", "everything"],
            "heads": list(HEADS),
            "is_packed": [False, True],
        },
        lambda plan, heads, **_: PLANS[plan].inner == 1 or heads == "grouped",
    )
]


@pytest.mark.parametrize("choice", SHARED, ids=lambda c: "_".join(map(str, c.values())))
def test_attention_over_shared_rows_is_equal_to_dense_attention(choice):
    actual = shared(PLANS[choice["plan"]], choice["mask"], choice["heads"], choice["is_packed"])
    assert apart(actual, dense(choice["mask"], choice["heads"], choice["is_packed"])) <= CLOSE


def test_the_layer_number_selects_window_or_none():
    """The program of shared rows contains both; the layer number is a runtime value."""
    actual = shared(PLANS["ring"], "layer 0 of two", "grouped", False)
    assert apart(actual, dense("newest 9", "grouped", False)) <= CLOSE


@pytest.mark.parametrize(
    ("mask", "heads", "is_packed", "block"),
    [
        ("causal", "grouped", True, 16),
        ("window", "odd", True, 7),
        ("causal", "odd", False, 32),
        ("everything", "grouped", False, 31),
    ],
)
def test_block_by_block_is_dense(mask, heads, is_packed, block):
    """Blocks of 31 do not divide 48 positions, so that rows are padded."""
    settings = MASKS[mask]

    def attend(query, key, value, segments, sink):
        span = blockwise.Span(jnp.arange(LENGTH)[None], segments)
        rule = blockwise.Rule(settings.causal, settings.sliding_window, block, CAPS.get(mask, 0.0))
        return blockwise.attend(query, key, value, span, span, rule, sink)

    actual = value_and_grads(attend, mask, heads, is_packed)
    assert apart(actual, dense(mask, heads, is_packed)) <= CLOSE


@pytest.mark.parametrize(
    ("mask", "heads", "is_packed", "tile"),
    [
        ("causal", "grouped", True, 16),
        ("window", "odd", True, 7),
        ("everything", "grouped", False, 31),
    ],
)
def test_tile_by_tile_is_dense(mask, heads, is_packed, tile, monkeypatch):
    """Tiles of 7 and 31 do not divide 48 positions; a window of 9 skips tiles of 7."""
    monkeypatch.setattr(tiled, "TILE", tile)
    rule = blockwise.Rule(MASKS[mask].causal, MASKS[mask].sliding_window, 0, CAPS.get(mask, 0.0))
    attend = lambda *x: tiled.attend(*x[:4], rule, x[4])
    actual = value_and_grads(attend, mask, heads, is_packed)
    assert apart(actual, dense(mask, heads, is_packed)) <= CLOSE


def test_layers_of_long_rows_never_allocate_a_score_matrix():
    """In a loop over layers with equal masks, jax would hoist a full mask out of the loop."""
    length = 4096
    kinds = [jax.ShapeDtypeStruct((1, length, n, WIDTH), jnp.float32) for n in (2, 1, 1)]
    attend = make_attend(AttentionPlan("cpu"))

    def loss(query, key, value):
        layer = lambda x, _: (attend(x, key, value, AttentionMask()), None)
        return jnp.sum(jax.lax.scan(layer, query, length=2)[0])

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*kinds).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * length**2  # half of a mask


def test_blocks_that_no_query_sees_are_skipped():
    position = jnp.arange(1024, dtype=jnp.int32).reshape(16, 1, 64)
    document = 1 + (position >= 512).astype(jnp.int32)
    seen = lambda rule, segments=None: blockwise._any_seen(
        blockwise.Span(position, segments), blockwise.Span(position, segments), rule
    )
    assert np.array_equal(seen(blockwise.Rule()), np.tri(16, dtype=bool))
    # 65 keys reach into the previous block and their own.
    near = seen(blockwise.Rule(True, 65))
    assert np.array_equal(near, np.tri(16, dtype=bool) & ~np.tri(16, k=-2, dtype=bool))
    assert int(seen(blockwise.Rule(), document).sum()) == 2 * 36


def is_legal(mesh: str, exchange: str, model: str, zero: int, **_) -> bool:
    spec = MeshSpec.parse(mesh)
    size, tensor = spec["context"], spec["tensor"]
    heads, kv_heads = (6, 3) if model == "windowed" else (8, 4 if model == "rotary" else 8)
    if kv_heads % tensor or (zero and spec["data"] == 1):
        return False
    try:
        plan_exchange(
            exchange, size=size, heads=heads // tensor, kv_heads=kv_heads // tensor,
            per_node=size, has_stages=False,
        )  # fmt: skip
    except ConfigError:
        return False
    return True


CASES = [
    Case(**choice)
    for choice in covering_array(
        {
            "exchange": ["ring", "all_gather", "all_to_all", "hybrid"],
            "mesh": ["dp=2,cp=4", "fsdp=2,cp=2,tp=2", "fsdp=2,cp=4", "cp=4,tp=2"],
            "model": ["rotary", "learned", "windowed"],
            "zero": [0, 1, 3],
            "microbatches": [1, 2],
            "remat": ["none", "dots", "full"],
        },
        is_legal,
    )
]
NUM_FAST, NUM_SLOW = 1, 2


@pytest.mark.parametrize(
    "case",
    [
        *CASES[:NUM_FAST],
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[NUM_FAST:NUM_SLOW]),
        *(pytest.param(case, marks=pytest.mark.product) for case in CASES[NUM_SLOW:]),
    ],
    ids=str,
)
def test_every_mesh_with_shared_rows_equals_one_device(case):
    check(run(case), reference(case.model))


STAGES = [
    StagesCase(mesh="pp=2,cp=2,tp=2", exchange="all_to_all"),
    # With dropout, whose bits depend on the position in the complete row.
    StagesCase(mesh="pp=2,cp=4", exchange="hybrid", family="gpt2"),
    StagesCase(mesh="pp=2,cp=4", exchange="ring", virtual=2),
    # Stages whose layers have a window, and others.
    StagesCase(mesh="pp=2,cp=2", exchange="ring", family="gemma"),
    StagesCase(mesh="pp=2,fsdp=2,cp=2", exchange="all_gather"),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.slow if c.family == "gemma" else pytest.mark.product)
        for c in STAGES
    ],
    ids=str,
)
def test_stages_share_rows(case):
    difference = compare(case)
    assert difference.loss <= 1e-6 and difference.weight == 0
    assert difference.gradient <= 1e-5 and difference.norm <= 1e-5


def test_evaluation_counts_every_token_once():
    case = StagesCase(mesh="dp=2,cp=4")
    actual, expected = evaluation(case), evaluation(dataclasses.replace(case, mesh="dp=1"))
    assert actual["weight"] == expected["weight"]
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert actual["correct"] == expected["correct"]


@pytest.mark.parametrize("model", ["rotary", pytest.param("windowed", marks=pytest.mark.product)])
def test_ring_traffic_is_equal_to_the_formula(model):
    """Keys and values move forward and backward, and their gradients move once."""
    case = Case(model, "cp=4", exchange="ring")
    step, state = step_of(case)
    batch = axis.place_batch(text_batch(packed=False), step.batch_sharding)
    text = step.train.lower(state, batch, np.inf).compile().as_text()
    model = model_of(model)
    each = 4 * 2 * (ROWS * SEQ // 4) * model.dims["kv_heads"] * model.dims["head_dim"]
    _, moved = traffic(text, layout_of(case).mesh_spec.sizes)["collective-permute", "context"]
    assert moved == model.num_layers * (3 + 3 + 3) * each


HEAD_DIM = 8


def test_tiles_compare_no_positions_and_transpose_no_scores() -> None:
    """Otherwise XLA:CPU compares positions for each score, and transposes products in memory."""
    length = 2 * tiled.TILE
    kinds = [jax.ShapeDtypeStruct((1, length, n, HEAD_DIM), jnp.float32) for n in (4, 2, 2)]
    loss = lambda *x: jnp.sum(tiled.attend(*x, None, blockwise.Rule()))
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*kinds).as_text()
    assert program.count("dot_general") >= 2 * 7  # two tiles, forward and backward
    assert "stablehlo.iota" not in program
    transposed = re.findall(r"stablehlo.transpose.*-> tensor<([0-9x]+)xf32>", program)
    largest = max(math.prod(map(int, shape.split("x"))) for shape in transposed)
    assert largest <= length * 4 * HEAD_DIM < 4 * tiled.TILE**2
