"""Every wrapper against numpy on eight devices, values and gradients, over one axis and several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.core import collectives
from jaxdist.core.mesh import MeshSpec

pytestmark = pytest.mark.smoke

AXES = ("data", "fsdp", "tensor")
SHAPE = (8, 8)  # of each device's array; 8 so that the largest group divides it
GROUPS = ["data", "tensor", ("data", "tensor"), ("fsdp", "tensor"), AXES]
# float32 sums of up to 8 numbers of size 1.
TOLERANCE = dict(rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def mesh():
    return MeshSpec(data=2, fsdp=2, tensor=2).build()


def on_devices(function, mesh):
    def local(x):
        return collectives.vary(function(x[0]), AXES)[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES)))


def groups(axes):
    axes = (axes,) if isinstance(axes, str) else axes
    dims = [AXES.index(axis) for axis in axes]
    ids = np.moveaxis(np.arange(8).reshape(2, 2, 2), dims, range(-len(dims), 0))
    return ids.reshape(-1, 2 ** len(dims))


def by_group(function, axes):
    def everywhere(x):
        results = [None] * 8
        for group in groups(axes):
            for device, result in zip(group, function(x[group]), strict=True):
                results[device] = result
        return np.stack(results)

    return everywhere


def repeated(x, n):
    return [x] * n


def exchanged(x, split_dim, concat_dim):
    parts = [np.split(array, len(x), axis=split_dim) for array in x]
    return [np.concatenate([p[i] for p in parts], axis=concat_dim) for i in range(len(x))]


LINEAR = [
    *[
        (f"all_reduce_{op}", lambda x, a, op=op: collectives.all_reduce(x, a, op), reference)
        for op, reference in [
            ("sum", lambda x: repeated(x.sum(0), len(x))),
            ("mean", lambda x: repeated(x.mean(0), len(x))),
        ]
    ],
    (
        "all_gather",
        lambda x, a: collectives.all_gather(x, a, dim=1),
        lambda x: repeated(np.concatenate(x, axis=1), len(x)),
    ),
    (
        "reduce_scatter",
        lambda x, a: collectives.reduce_scatter(x, a, dim=1),
        lambda x: np.split(x.sum(0), len(x), axis=1),
    ),
]
ON_ONE_AXIS = [
    (
        "all_to_all",
        lambda x, a: collectives.all_to_all(x, a, split_dim=0, concat_dim=1),
        lambda x: exchanged(x, 0, 1),
    ),
    ("permute", collectives.permute, lambda x: np.roll(x, 1, axis=0)),
    ("permute_back", lambda x, a: collectives.permute(x, a, -1), lambda x: np.roll(x, -1, axis=0)),
]
CASES = [(*case, axes) for case in LINEAR for axes in GROUPS]
CASES += [(*case, axes) for case in ON_ONE_AXIS for axes in ("data", "tensor")]


@pytest.mark.parametrize(
    ("name", "function", "reference", "axes"),
    CASES,
    ids=[f"{c[0]}-{c[3] if isinstance(c[3], str) else '_'.join(c[3])}" for c in CASES],
)
def test_values_and_gradients_equal_numpy(name, function, reference, axes, mesh):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, *SHAPE)).astype(np.float32)
    mapped, expected = on_devices(lambda x: function(x, axes), mesh), by_group(reference, axes)
    result, pull = jax.vjp(mapped, x)
    np.testing.assert_allclose(result, expected(x), **TOLERANCE)
    # The functions are linear: <f(v), c> = <v, gradient of <f(x), c>> for any v.
    c = rng.normal(size=result.shape).astype(np.float32)
    (grad,) = pull(jnp.asarray(c))
    for _ in range(3):
        v = rng.normal(size=x.shape).astype(np.float32)
        # 512 products of size 1, which may cancel.
        np.testing.assert_allclose(np.vdot(grad, v), np.vdot(c, expected(v)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("op", ["max", "min"])
def test_largest_and_smallest(op, mesh):
    x = np.random.default_rng(0).normal(size=(8, *SHAPE)).astype(np.float32)
    mapped = on_devices(lambda x: collectives.all_reduce(x, ("data", "tensor"), op), mesh)
    expected = by_group(lambda x: repeated(getattr(x, op)(0), len(x)), ("data", "tensor"))
    np.testing.assert_array_equal(mapped(x), expected(x))


def test_ring_of_eight_rotates(mesh):
    ring = MeshSpec(tensor=8).build()

    def local(x):
        return collectives.permute(x, "tensor", shift=3)

    mapped = jax.shard_map(local, mesh=ring, in_specs=P("tensor"), out_specs=P("tensor"))
    np.testing.assert_array_equal(jax.jit(mapped)(np.arange(8)), np.roll(np.arange(8), 3))


@pytest.mark.parametrize("axes", GROUPS, ids=str)
def test_size_and_index_of_a_group(axes, mesh):
    mapped = on_devices(
        lambda x: 100 * collectives.group_size(axes) + collectives.group_index(axes), mesh
    )
    expected = by_group(lambda x: [100 * len(x) + i for i in range(len(x))], axes)
    np.testing.assert_array_equal(mapped(np.zeros((8, 1))), expected(np.zeros((8, 1))))


def test_vary_sums_the_gradient_without_forward_communication(mesh):
    def local(w, x):
        return jnp.sum(collectives.vary(w, "data") * x)[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(("data",)))
    w, x = np.float32(2), np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(mapped(w, x), [2, 10])
    assert jax.grad(lambda w: mapped(w, x).sum())(w) == x.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: collectives.all_reduce(x, AXES, "product"), "'product' is unknown. Use sum"),
        (lambda x: collectives.reduce_scatter(x[:3], "data"), r"dim 0 of \(3, 8\) divisible by 2"),
    ],
)
def test_invalid_calls_are_rejected(function, message, mesh):
    with pytest.raises(ValueError, match=message):
        on_devices(function, mesh)(np.zeros((8, *SHAPE), np.float32))
