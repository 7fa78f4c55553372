"""Context-parallel exchanges: which one a mesh uses, and how balanced the work is."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import model_of, plan_of

from jaxdist.config import read_run
from jaxdist.core.attention.context_parallel import plan_exchange
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import context as axis
from jaxdist.core.sharding import Layout
from jaxdist.core.step import describe_exchange
from jaxdist.core.step_plan import _per_node, exchange_of
from jaxdist.core.weights import gradient_barrier
from jaxdist.settings import ConfigError


@pytest.mark.parametrize(
    ("sizes", "exchange", "inner"),
    [
        ({"size": 2, "heads": 32, "kv_heads": 8}, "all_to_all", 2),
        ({"size": 3, "heads": 32, "kv_heads": 4}, "all_gather", 1),
        ({"size": 3, "heads": 32, "kv_heads": 8}, "ring", 1),
        ({"size": 8, "heads": 32, "kv_heads": 8}, "all_to_all", 8),
        ({"size": 64, "heads": 32, "kv_heads": 8, "per_node": 8}, "hybrid", 8),
        ({"size": 4, "heads": 3, "kv_heads": 3}, "ring", 1),
        ({"size": 8, "heads": 6, "kv_heads": 2}, "ring", 1),
        # Neighbors share the work that documents make uneven.
        ({"size": 8, "heads": 6, "kv_heads": 2, "packed": True}, "hybrid", 2),
        ({"size": 4, "heads": 3, "kv_heads": 3, "packed": True}, "ring", 1),
        ({"size": 3, "heads": 4, "kv_heads": 4, "has_stages": True}, "all_gather", 1),
    ],
)
def test_exchange_is_chosen_by_heads_and_devices(sizes, exchange, inner):
    plan = plan_exchange("auto", **{"per_node": sizes["size"], "has_stages": False, **sizes})
    assert (plan.exchange, plan.inner) == (exchange, inner)


@pytest.mark.parametrize(
    ("mesh", "per_host", "exchange", "inner"),
    [
        ("cp=8", 8, "all_to_all", 8),
        ("cp=8", 4, "hybrid", 4),
        ("cp=4,tp=2", 4, "hybrid", 2),
        # Two rows of six devices on hosts of four: only pairs share a host in both rows.
        ("dp=2,cp=6", 4, "hybrid", 2),
        ("cp=8", 1, None, 0),
    ],
)
def test_single_device_processes_are_grouped_by_host(mesh, per_host, exchange, inner):
    """Also if each process has one device, as with one process per GPU."""
    spec = MeshSpec.parse(mesh)
    devices = [SimpleNamespace(process_index=i) for i in range(spec.num_devices)]
    simulated = SimpleNamespace(
        devices=np.array(devices).reshape(*spec.sizes.values()),
        axis_names=tuple(spec.sizes),
        shape=spec.sizes,
    )
    requested = "auto" if exchange == "all_to_all" else "hybrid"
    hosts = {i: f"host{i // per_host}" for i in range(spec.num_devices)}
    layout = Layout(mesh=simulated, context_attention=requested, host_of=hosts)
    model = SimpleNamespace(context_parallel=True, dims={"heads": 24, "kv_heads": 24})
    if exchange is None:
        with pytest.raises(ConfigError):
            exchange_of(model, layout, _per_node(layout), packed=False)
        return
    plan = exchange_of(model, layout, _per_node(layout), packed=False)
    assert (plan.exchange, plan.inner) == (exchange, inner)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--mesh=cp=3"], "train.seq_len=132"),
        (["--mesh=cp=2", "--model.attention_dropout=0.1"], "model.attention_dropout=0.1"),
        (["--mesh=cp=2", "--model=cnn", "--data.sources="], "Model.context_parallel"),
        (["--mesh=cp=16", "--mesh.context_attention=all_to_all"], "cp=2, 4 or 8 "),
        (["--mesh=cp=3,pp=2", "--mesh.context_attention=ring"], "'all_gather'"),
        (["--mesh=fsdp=8,cp=32"], "fsdp=8 × cp=32"),
        (["--mesh=cp=3"], "mesh cp=3 does not divide model.d_model=128"),
    ],
)
def test_a_mesh_that_cannot_share_rows_is_refused(flags, named):
    with pytest.raises(ConfigError) as refused:
        read_run(flags, command="jaxdist.train")
    assert named in str(refused.value)


def test_zigzag_balances_work_across_devices():
    assert axis.imbalance(8, 4096) <= 0.05
    assert axis.imbalance(8, 64) <= 0.05
    # With a window of 2 only the row's first position sees fewer keys: 7 on one device, 8 on the
    # other.
    assert axis.imbalance(2, 8, window=2) == pytest.approx(8 / 7.5 - 1)
    # A document of 2 and one of 6: keys seen in the quarters 1+2, 1+2, 3+4, 5+6. Two neighbors that
    # exchange heads share the work of both.
    documents = np.array([[0, 1, 0, 1, 2, 3, 4, 5]])
    assert axis.imbalance(2, 8, position_ids=documents) == pytest.approx(14 / 12 - 1)
    assert axis.imbalance(2, 8, position_ids=np.repeat(documents, 3, 0), inner=2) == 0
    # The work of a microbatch's rows adds up.
    mirrored = np.array([[0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2, 0, 1]])
    seen = (mirrored + 1).reshape(2, 4, 2).sum(2)
    work = seen[:, :2] + seen[:, :1:-1]
    assert work.tolist() == [[14, 10], [6, 9]]
    imbalance = axis.imbalance(2, 8, position_ids=mirrored, rows=2)
    assert imbalance == pytest.approx(20 / 19.5 - 1)
    assert axis.imbalance(2, 8, position_ids=mirrored, rows=16) == imbalance
    position_ids = np.sort(np.concatenate([axis.position_ids_of(i, 6, 4) for i in range(4)]))
    assert np.array_equal(position_ids, np.arange(24))


def unbalanced_rows(exchange: str, heads: int) -> str:
    """Describe the exchange of 8 devices whose rows have five documents."""
    spec = MeshSpec.parse("cp=8")
    layout = Layout(mesh=spec.build(jax.devices()), context_attention=exchange)
    dims = {"heads": heads, "kv_heads": heads}
    model = dataclasses.replace(model_of("rotary"), dims=dims)
    plan = plan_of(model, layout, packed=True)
    position_ids = np.concatenate([np.arange(length) for length in (5, 11, 3, 21, 24)])[None]
    (line,) = describe_exchange(model, layout, plan, 64, position_ids=position_ids)
    return line


@pytest.mark.parametrize(
    ("exchange", "heads", "named"),
    [
        ("ring", 8, ["all_to_all (0.0 %)", "hybrid (11.7 %)"]),
        ("auto", 12, []),  # uses the hybrid; no other has less
        ("ring", 12, ["hybrid (11.7 %)"]),
    ],
)
def test_imbalance_message_names_exchanges_with_less(exchange, heads, named):
    line = unbalanced_rows(exchange, heads)
    assert ("--mesh.context-attention" in line) == bool(named)
    assert all(name in line for name in named)


def test_gradient_barrier_joins_gradients_and_keeps_their_values():
    """Their values do not change."""

    def loss(x, w, barrier=gradient_barrier):
        x, w = barrier((x, w))
        return jnp.sum(jnp.tanh(x @ w))

    inputs = jnp.ones((2, 3)), jnp.arange(12.0).reshape(3, 4) / 12
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*inputs)
    (barrier,) = [e for e in traced.eqns if e.primitive.name == "optimization_barrier"]
    assert barrier.outvars == traced.jaxpr.outvars
    plain = jax.grad(partial(loss, barrier=lambda tree: tree), (0, 1))(*inputs)
    for ours, expected in zip(jax.grad(loss, (0, 1))(*inputs), plain, strict=True):
        assert np.array_equal(ours, expected)


def test_balanced_work_gets_no_suggestion():
    assert "--mesh.context-attention" not in unbalanced_rows("all_to_all", 8)
