"""The ring on cuDNN's kernel: when it is chosen, and its algebra with a stand-in for the kernel."""

import cudnn_stand_in
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from refusals import refused
from test_context import CLOSE, PLANS, apart, dense, shared

from jaxdist.core.attention import choose_kernel, kernels, make_attend, ring, zigzag
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import AttentionMask

GPU = {"platform": "gpu", "compute_capability": "9.0", "dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("exchange", "change", "kernel", "reason"),
    [
        ("ring", {}, "cudnn", "one call for each part"),
        ("hybrid", {"compute_capability": "8.0"}, "cudnn", "one call for each part"),
        ("ring", {"packed": True}, "blockwise", "documents of a row that devices share"),
        ("ring", {"window": 9}, "blockwise", "a window of 9"),
        ("ring", {"head_dim": 256}, "blockwise", "head_dim"),
        ("ring", {"dtype": jnp.float32}, "blockwise", "float32"),
        ("all_gather", {}, "blockwise", "all gathered keys"),
        ("all_to_all", {"packed": True, "window": 9, "head_dim": 256}, "cudnn", "documents"),
    ],
)
def test_the_kernel_of_shared_rows_has_a_stated_reason(exchange, change, kernel, reason):
    """Rows of few keys, which alone would take the dense kernel."""
    ask = {**GPU, "head_dim": 128, "num_keys": 64, "packed": False, **change}
    plan = PLANS[exchange]
    found, why = choose_kernel("auto", **ask, exchange=plan)
    assert found == kernel and reason in why
    if kernel == "cudnn":
        assert choose_kernel("cudnn", **ask, exchange=plan)[0] == "cudnn"
    else:
        with refused("attention='cudnn'", reason):
            choose_kernel("cudnn", **ask, exchange=plan)


def test_a_ring_whose_comparison_failed_goes_block_by_block():
    ask = {**GPU, "head_dim": 128, "num_keys": 64, "packed": False}
    plan = PLANS["ring"]._replace(cudnn_obstacle="it differs")
    found, why = choose_kernel("auto", **ask, exchange=plan)
    assert found == "blockwise" and "it differs" in why
    assert "packed" not in choose_kernel("auto", **ask | {"packed": True}, exchange=plan)[1]


@pytest.fixture
def calls(monkeypatch):
    """Masks of the kernel's calls forward and backward. It is chosen whatever the dtype."""
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: ("cudnn", ""))
    return cudnn_stand_in.install(monkeypatch)


@pytest.mark.parametrize(
    ("plan", "shards", "mask", "heads"),
    [
        ("ring", 2, "causal", "grouped"),
        ("ring", 4, "causal", "odd"),
        ("ring_in_pairs", 4, "causal", "grouped"),
        ("ring", 4, "everything", "grouped"),
        ("hybrid", 4, "causal", "grouped"),
    ],
)
def test_the_ring_on_cudnn_is_attention_over_whole_rows(calls, plan, shards, mask, heads):
    found = shared(PLANS[plan], mask, heads, False, shards)
    assert apart(found, dense(mask, heads, False)) <= CLOSE
    masks = {"CAUSAL", "NO_MASK"} if mask == "causal" else {"NO_MASK"}
    assert set(calls[0]) == set(calls[1]) == masks


def another_group_is_earlier(monkeypatch):
    """The first group's keys are taken for a later one's."""
    is_earlier = ring.Ring.is_earlier

    def late(self, steps_back):
        found = is_earlier(self, steps_back)
        return found if found is None else self.group > steps_back

    monkeypatch.setattr(ring.Ring, "is_earlier", late)


def late_keys_are_seen(monkeypatch):
    """Of an earlier group's keys the wrong half."""
    monkeypatch.setattr(zigzag, "_early", zigzag._late)


def positions_stay_as_devices_hold_them(monkeypatch):
    """In groups, whose devices' halves alternate."""
    for name in ("in_row_order", "in_device_order"):
        monkeypatch.setattr(ring.Ring, name, lambda self, x: x)


@pytest.mark.parametrize(
    ("plant", "plan"),
    [
        (another_group_is_earlier, "ring"),
        (late_keys_are_seen, "ring"),
        (positions_stay_as_devices_hold_them, "hybrid"),
    ],
)
def test_a_fault_in_the_ring_on_cudnn_is_seen(calls, plant, plan, monkeypatch):
    plant(monkeypatch)
    found = shared(PLANS[plan], "causal", "grouped", False)
    assert apart(found, dense("causal", "grouped", False)) > 1e-2


def test_every_step_of_the_ring_is_a_call_of_cudnn():
    """Lowered for a GPU, which needs none: own keys, then one of two, in the loop and after it."""
    mesh = MeshSpec(context=4).build(jax.devices()[:4])
    attend = make_attend(platform="gpu", compute_capability="9.0", exchange=PLANS["ring"])

    def gradients(query, key, value):
        loss = lambda *x: jnp.sum(attend(*x, AttentionMask()))
        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    over = P(None, "context")
    mapped = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=over, out_specs=over))
    query, key = (jax.ShapeDtypeStruct((1, 1024, n, 64), jnp.bfloat16) for n in (4, 2))
    text = mapped.trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        assert text.count(f"@{name}") == 5
    assert text.count("\\22CAUSAL") == 2
    assert "dot_general" not in text
