"""The mesh notation, its errors, and the legal meshes closest to a refused one."""

import jax
import pytest
from refusals import refused

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec, factorisations, nearest
from jaxdist.core.parallel.axes import names
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.models import DecoderConfig
from jaxdist.models.adapters import LoraConfig
from jaxdist.settings import ConfigError

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("", (1, 1, 1, 1, 1, 1)),
        ("1", (1, 1, 1, 1, 1, 1)),
        ("dp=4", (1, 4, 1, 1, 1, 1)),
        ("dp=2,tp=4", (1, 2, 1, 1, 1, 4)),
        (" tp = 2 , pp = 3 ", (3, 1, 1, 1, 1, 2)),
        ("data=2,fsdp=2,tensor=2,pipeline=2", (2, 2, 2, 1, 1, 2)),
        ("context=4,tp=2", (1, 1, 1, 1, 4, 2)),
    ],
)
def test_short_and_long_names_in_any_order(text, sizes):
    assert tuple(MeshSpec.parse(text).sizes.values()) == sizes
    assert tuple(MeshSpec().sizes) == names()


@pytest.mark.parametrize(
    ("text", "num_devices", "expected"),
    [("dp=-1", 8, "dp=8"), ("dp=-1,tp=4", 64, "dp=16,tp=4"), ("fsdp=-1,dp=8", 8, "dp=8")],
)
def test_minus_one_uses_the_remaining_devices(text, num_devices, expected):
    assert str(MeshSpec.parse(text, num_devices)) == expected


@pytest.mark.parametrize("spec", factorisations(24), ids=str)
def test_printing_and_parsing_are_inverse(spec):
    assert MeshSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("ddp=2", ["axis 'ddp'", "pp = ", "dp = ", "fsdp = ", "tp = ", "--mesh dp=2,tp=4"]),
        ("dp", ["dp=(nothing)", "1 to 9999999, or -1"]),
        ("dp=", ["dp=(nothing)", "not a size"]),
        ("dp=0", ["dp=0 is", "not a size"]),
        ("dp=-2", ["dp=-2 is", "not a size"]),
        ("dp=--1", ["dp=--1 is", "not a size"]),
        ("dp=2.5", ["dp=2.5 is", "not a size"]),
        ("dp=²", ["dp=² is", "not a size"]),
        ("dp=2,data=2", ["data twice"]),
        ("dp=-1,tp=-1", ["dp and tp to -1"]),
        ("dp=-1,tp=3", ["multiply to 3", "8 devices"]),
        ("dp=2 tp=2", ["dp=2 tp=2 is", "not a size"]),
    ],
)
def test_invalid_mesh_reports_the_allowed_values(text, facts):
    with refused(*facts):
        MeshSpec.parse(text, 8)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        MeshSpec.parse("ddp=2,tp=0,pp=x,fsdp=2,fsdp=4", 8)
    assert len(error.value.problems) == 4


def test_minus_one_is_unresolved_until_devices_are_counted():
    spec = MeshSpec.parse("dp=-1,tp=2")
    assert spec.is_open and spec.resolve(8) == MeshSpec(data=4, tensor=2)
    with refused("dp=-1"):
        _ = spec.num_devices


def test_a_built_mesh_keeps_the_order_of_devices():
    spec = MeshSpec(data=2, fsdp=2, tensor=2)
    mesh = spec.build()
    assert mesh.axis_names == names()
    assert list(mesh.devices.flat) == jax.devices()
    # Neighboring devices differ in tensor first.
    assert list(mesh.devices[0, 0, 0, 0, 0]) == jax.devices()[:2]
    assert MeshSpec.of(mesh) == spec
    assert MeshSpec.of(jax.make_mesh((8,), ("fsdp",))) == MeshSpec(
        fsdp=8
    )  # created outside of jaxdist


@pytest.mark.parametrize(
    ("text", "visible", "facts"),
    [
        ("dp=2,tp=2,pp=3", 8, ["12 devices", "8 are available", "--simulate 12"]),
        ("dp=16", 8, ["16 devices", "8 are available", "dp=-1"]),
        ("dp=4", 1, ["4 devices", "1 is available", "dp=-1"]),
        ("1", 8, ["1 device,", "8 are available"]),
        ("dp=2,tp=2", 8, ["4 devices", "8 are available", "dp=-1", "CUDA_VISIBLE_DEVICES"]),
        ("tp=3", 8, ["3 devices", "8 are available. Set CUDA_VISIBLE_DEVICES"]),  # not dp=-1
    ],
)
def test_wrong_number_of_devices_is_refused_with_the_fix(text, visible, facts):
    with refused(*facts):
        MeshSpec.parse(text).check_device_count(visible)


def test_factorizations_are_complete_and_unique():
    specs = factorisations(8)
    # Number of ways to write 2³ as an ordered product of six powers of two: C(3 + 5, 5).
    assert len(specs) == len(set(specs)) == 56
    assert all(spec.num_devices == 8 for spec in specs)
    assert len(factorisations(8, without=[PIPELINE])) == 35


def test_nearest_mesh_has_the_fewest_changes():
    requested = MeshSpec(data=3, tensor=2)
    assert str(nearest(requested, factorisations(8), count=1)[0]) == "dp=4,tp=2"
    legal = [MeshSpec(data=8), MeshSpec(tensor=8), MeshSpec(data=2, tensor=4)]
    assert nearest(MeshSpec(tensor=6), legal)[0] == MeshSpec(tensor=8)


def test_replicas_split_the_batch():
    assert MeshSpec(data=2, fsdp=4, tensor=8, pipeline=3).num_replicas == 8


def test_dim_smaller_than_a_block_of_quantized_weights_is_reported():
    model = DecoderConfig(d_model=64, mlp_dim=32)
    config = RunConfig(model=model, lora=LoraConfig(rank=4, base_format="nf4"))
    (problem,) = config.mesh_problems(MeshSpec(data=2))
    assert "model.mlp_dim=32" in problem and problem.endswith("Use at least 64.")
