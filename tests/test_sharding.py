"""Shardings of every strategy, the sharded initial state, and errors of meshes that do not fit."""

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P
from refusals import missing, refused
from tiny import Case, layout_of, model_of

from jaxdist.core.axis import Workload, axes_of, dim_of
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.mesh_choice import default_mesh, legal_meshes, mesh_problems
from jaxdist.core.parallel import axes
from jaxdist.core.sharding import Layout, MeshConfig
from jaxdist.core.state import (
    init_state,
    make_state,
    opt_shardings,
    state_shardings,
)
from jaxdist.core.types import Dims
from jaxdist.models.configs import CnnConfig, DecoderConfig

pytestmark = pytest.mark.smoke

MATRIX = Dims(("layers", "d_model", "mlp"))
TABLE = Dims(("vocab", "d_model"))
VECTOR = Dims(("layers", "d_model"))
BIAS = Dims(("layers", None, "mlp"))


def layout(text, **options):
    spec = MeshSpec.parse(text)
    return Layout(mesh=spec.build(jax.devices()[: spec.num_devices]), **options)


BOTH = ("fsdp", "data")


@pytest.mark.parametrize(
    ("text", "zero", "param", "gradient", "moment", "batch"),
    [
        # One row per strategy: the spec of a stacked matrix [layers, d_model, mlp].
        ("1", 0, P(), P(), P(), P(None)),
        ("dp=4", 0, P(), P(), P(), P(("data",))),
        ("dp=4", 1, P(), P(), P(None, "data"), P(("data",))),
        ("dp=4", 2, P(), P(None, "data"), P(None, "data"), P(("data",))),
        ("dp=4", 3, *[P(None, "data")] * 3, P(("data",))),
        ("fsdp=4", 0, *[P(None, "fsdp")] * 3, P(("fsdp",))),
        ("dp=2,fsdp=4", 0, *[P(None, "fsdp")] * 3, P(("data", "fsdp"))),
        ("dp=2,fsdp=4", 1, P(None, "fsdp"), P(None, "fsdp"), P(None, BOTH), P(("data", "fsdp"))),
        ("dp=2,fsdp=4", 3, *[P(None, BOTH)] * 3, P(("data", "fsdp"))),
        ("tp=4", 0, *[P(None, None, "tensor")] * 3, P(None)),
        ("fsdp=2,ep=2", 0, *[P(None, ("fsdp", "expert"))] * 3, P(("fsdp", "expert"))),
        ("fsdp=2,tp=4", 0, *[P(None, "fsdp", "tensor")] * 3, P(("fsdp",))),
        ("pp=2,fsdp=2,tp=2", 0, *[P("pipeline", "fsdp", "tensor")] * 3, P(("fsdp",))),
    ],
)
def test_specs_of_every_strategy(text, zero, param, gradient, moment, batch):
    here = layout(text, zero=zero)
    assert here.param_specs(MATRIX) == param
    assert here.gradient_specs(MATRIX) == gradient
    assert here.moment_specs(MATRIX) == moment
    assert here.batch_spec() == batch


def test_experts_are_split_and_their_width_is_sharded_by_the_other_axes():
    here, up = layout("dp=2,fsdp=2,ep=2", zero=3), Dims(("layers", "experts", "d_model", "mlp"))
    assert here.param_specs(up) == P(None, "expert", BOTH)
    assert here.gather_specs(up) == P(None, None, BOTH)
    assert here.param_specs(MATRIX) == P(None, ("fsdp", "expert", "data"))
    assert here.gather_specs(MATRIX) == here.param_specs(MATRIX)


def test_vectors_are_replicated_and_biases_follow_their_matrix():
    here = layout("dp=2,fsdp=2,tp=2", zero=3)
    assert here.param_specs(VECTOR) == P()
    assert here.param_specs(BIAS) == P(None, None, "tensor")
    assert here.param_specs(TABLE) == P("tensor", BOTH)


def test_two_dims_on_one_axis_are_rejected():
    with refused("'heads' and 'mlp'", "'tensor'"):
        layout("dp=2").param_specs(Dims(("heads", "mlp")))


def test_custom_model_rules_are_added_to_those_of_the_axes():
    here = layout("fsdp=2,tp=2", rules={"flat": "fsdp", "hidden": "tensor", "vocab": None})
    assert here.param_specs(Dims(("flat", "hidden"))) == P("fsdp", "tensor")
    assert here.param_specs(TABLE) == P(None, "fsdp")


def test_weight_is_gathered_only_over_its_sharded_axes():
    here = layout("pp=2,dp=2,fsdp=2", zero=3)
    assert here.param_specs(MATRIX) == P("pipeline", BOTH)
    assert here.gather_specs(MATRIX) == P(None, BOTH)
    assert layout("dp=2,tp=2").gather_specs(MATRIX) == P()


@pytest.mark.parametrize(
    ("text", "sequence", "summed", "loss"),
    [
        ("dp=2,tp=2", False, ("data",), ("data",)),
        ("dp=2,tp=2", True, ("data", "tensor"), ("data",)),
        ("pp=2,fsdp=2,tp=2", True, ("pipeline", "fsdp", "tensor"), ("pipeline", "fsdp")),
        ("1", True, (), ()),
    ],
)
def test_gradients_and_losses_are_summed_over_their_axes(text, sequence, summed, loss):
    here = layout(text, sequence_parallel=sequence)
    assert (here.summed_axes, here.loss_axes) == (summed, loss)


def test_axes_and_dims_of_a_spec():
    spec = P(None, ("fsdp", "data"), "tensor")
    assert axes_of(spec) == ("fsdp", "data", "tensor")
    assert [dim_of(spec, axis) for axis in ("data", "tensor", "pipeline")] == [1, 2, None]


@pytest.mark.parametrize(
    ("text", "options", "facts"),
    [
        ("tp=3", {}, ["tp=3", "model.num_heads=8", "tp=1, 2, 4 or 8"]),
        ("fsdp=3", {}, ["fsdp=3", "model.d_model=64"]),
        ("dp=3,fsdp=2", dict(zero=1), ["fsdp=2 × dp=3 (zero=1)", "model.d_model=64"]),
        ("ep=2", {}, ["ep=2", "fsdp=2", "model.num_experts"]),
        ("pp=5", {}, ["pp=5", "model.num_layers=4", "pp=4 or less"]),
        ("dp=3", dict(global_batch_size=16), ["train.global_batch_size=16", "multiple of 3",
         "(dp=3 × fsdp=1 × microbatches=1)", "15 or 18"]),
        ("dp=2", dict(global_batch_size=16, num_microbatches=3), ["multiple of 6"]),
        ("dp=8", dict(global_batch_size=4), ["train.global_batch_size=4", "Use 8"]),
    ],
    ids=str,
)  # fmt: skip
def test_mesh_error_has_value_allowed_values_and_fix(text, options, facts):
    dims = {"heads": 8, "kv_heads": 4, "layers": 4, "d_model": 64, "mlp": 192, "vocab": 192}
    workload = Workload(dims=dims, settings=DecoderConfig.size_settings, **options)
    problems = mesh_problems(MeshSpec.parse(text), workload)
    assert any(missing(problem, *facts) == [] for problem in problems), problems


def test_all_mesh_problems_are_reported_at_once():
    dims = {"heads": 6, "kv_heads": 2, "layers": 4, "d_model": 64}
    workload = Workload(dims=dims, global_batch_size=16, num_microbatches=5)
    problems = mesh_problems(MeshSpec(tensor=4, pipeline=30), workload)
    assert len(problems) == 4  # heads, kv_heads, layers, batch


def test_stages_require_stacked_layers():
    (problem,) = mesh_problems(MeshSpec(pipeline=2), Workload(dims=CnnConfig().dims))
    assert missing(problem, "pp=2", "layers") == []


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (dict(num_virtual_stages=8), []),
        (dict(num_virtual_stages=9), ["num_virtual_stages=9", "num_layers=30", "=8 or less"]),
        (dict(layers_per_stage=(7, 8, 8, 7)), []),
        (dict(layers_per_stage=(8, 8, 8, 8)), ["8,8,8,8", "32 layers", "num_layers=30"]),
        (dict(layers_per_stage=(15, 15)), ["15,15", "2 virtual", "4 numbers", "pp=4"]),
    ],
    ids=str,
)
def test_virtual_stages_may_have_any_number_of_layers(options, facts):
    dims = {"layers": 30}
    workload = Workload(dims=dims, settings=DecoderConfig.size_settings, **options)
    problems = mesh_problems(MeshSpec(pipeline=4), workload)
    assert len(problems) == bool(facts)
    assert missing("".join(problems), *facts) == []


def test_model_rule_without_a_mesh_axis_is_rejected():
    workload = Workload(dims={"width": 8}, rules={"width": "tensors"})
    (problem,) = mesh_problems(MeshSpec(data=2), workload)
    assert missing(problem, "'tensors'", *MeshSpec().sizes) == []


def test_suggested_meshes_are_legal_and_similar():
    workload = Workload(dims={"heads": 4, "layers": 6})
    problems_of = lambda spec: mesh_problems(spec, workload)
    meshes = legal_meshes(MeshSpec(tensor=8), 8, problems_of)
    assert [str(spec) for spec in meshes] == ["dp=2,tp=4", "fsdp=2,tp=4", "pp=2,tp=4"]
    assert legal_meshes(MeshSpec(), 8, lambda spec: ["never"]) == []


@pytest.mark.parametrize(
    ("num_devices", "state", "memory", "mesh", "reason"),
    [
        (1, 2**40, 2**30, "dp=1", "one device"),
        (8, 2**20, None, "dp=8", "unknown"),
        (8, 2**30, 2**32, "dp=8", "1.0 GiB"),
        (8, 2**33, 2**33, "fsdp=8", "(8.0 GiB, of which 50 %"),
    ],
)
def test_default_mesh_and_its_reason(num_devices, state, memory, mesh, reason):
    spec, why = default_mesh(num_devices, state, memory)
    assert str(spec) == mesh
    assert reason in why


def test_mesh_section_is_checked_without_devices():
    assert MeshConfig().problems() == []
    assert MeshConfig(shape="dp=-1,tp=4").problems() == []
    assert len(MeshConfig(shape="dp=x,zz=2").problems()) == 2
    config = MeshConfig(shape="dp=-1,tp=4")
    assert config.spec is config.spec and config.spec.resolve(8) == MeshSpec(data=2, tensor=4)


def test_rules_name_only_mesh_axes():
    assert set(axes.rules().values()) <= set(MeshSpec().sizes)


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


def test_moments_can_be_left_out_of_the_state():
    case = Case("learned", "fsdp=2")
    shardings = opt_shardings(model_of("learned"), ADAM, layout_of(case), offload=True)
    assert jax.tree.leaves(shardings) == [shardings.count]


def test_moment_of_another_shape_is_replicated():
    case = Case("learned", "fsdp=2")
    rule = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    shardings = opt_shardings(model_of("learned"), rule, layout_of(case))
    rows = jax.tree.leaves(shardings.v_row)
    assert rows and all(sharding.is_fully_replicated for sharding in rows)
