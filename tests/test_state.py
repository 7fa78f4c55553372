"""The state is initialized sharded: every leaf by its rule, never complete on a device."""

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny import Case, layout_of, model_of

from jaxdist.core.state import (
    abstract_state,
    init_state,
    make_state,
    opt_shardings,
    state_shardings,
)

ADAM = optax.scale_by_adam()


def tree_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_no_device_holds_the_complete_model_during_initialization():
    case = Case("learned", "fsdp=8")
    model, layout = model_of(case.model), layout_of(case)
    make = make_state(model, ADAM, {})
    shardings = state_shardings(model, ADAM, layout, loss_scale={})
    memory = (
        jax.jit(make, static_argnums=0, out_shardings=shardings)
        .lower(0)
        .compile()
        .memory_analysis()
    )
    params = tree_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    # An eighth of parameters and two moments, and vectors, which are replicated.
    assert memory.output_size_in_bytes < 3 * params / 8 * 1.3
    assert memory.temp_size_in_bytes < params / 2


def test_shards_are_on_their_devices():
    case = Case("learned", "dp=2,fsdp=2,tp=2", zero=1)
    model, layout = model_of(case.model), layout_of(case)
    state = init_state(model, ADAM, layout, seed=0, loss_scale={})
    down, moment = (tree["layers"]["mlp"]["down"] for tree in (state.params, state.opt_state.mu))
    assert down.sharding.spec == P(None, "tensor", "fsdp")
    assert {shard.data.shape for shard in down.addressable_shards} == {(2, 32, 16)}
    # ZeRO-1 splits moments over data too.
    assert {shard.data.shape for shard in moment.addressable_shards} == {(2, 32, 8)}
    assert state.opt_state.count.sharding.is_fully_replicated
    assert int(state.step) == 0


def test_abstract_state_matches_the_real_one():
    case = Case("learned", "fsdp=2,tp=2")
    model, layout = model_of(case.model), layout_of(case)
    scale = {"scale": jax.numpy.float32(8), "finite_steps": jax.numpy.int32(0)}
    real = init_state(model, ADAM, layout, seed=0, loss_scale=scale)
    described = abstract_state(model, ADAM, layout, loss_scale=scale)

    def compare(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)

    jax.tree.map(compare, described, real)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_moments_can_be_in_host_memory(offload):
    case = Case("learned", "fsdp=2")
    shardings = opt_shardings(model_of("learned"), ADAM, layout_of(case), offload=offload)
    kinds = {sharding.memory_kind for sharding in jax.tree.leaves(shardings.mu)}
    assert kinds == {"pinned_host" if offload == "host" else "device"}
    assert shardings.count.memory_kind == "device"


def test_moment_of_another_shape_is_replicated():
    case = Case("learned", "fsdp=2")
    rule = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    shardings = opt_shardings(model_of("learned"), rule, layout_of(case))
    rows = jax.tree.leaves(shardings.v_row)
    assert rows and all(sharding.is_fully_replicated for sharding in rows)
