"""The checksums of arrays: every bit counts, and no mesh changes them."""

import itertools
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import checksum, manifest
from jaxdist.checkpoint.checksum import checksums, part_checksum
from jaxdist.core.mesh import MeshSpec
from jaxdist.runtime.storage import locate

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, np.int8, np.uint16, np.bool_, "int4", "complex64"]
)
def test_a_checksum_is_the_same_on_every_mesh_and_covers_every_bit(monkeypatch, on_host, dtype):
    monkeypatch.setattr(checksum, "_is_summed_on_host", lambda x: on_host)
    host = np.random.default_rng(0).integers(0, 2, (8, 6)).astype(dtype)
    mesh = MeshSpec.parse("fsdp=4,tp=2").build()
    specs = P(), P("fsdp", "tensor"), P("tensor"), P(("tensor", "fsdp"))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    values = {checksums([jax.device_put(host, s)])[0] for s in [*shardings, jax.devices()[0]]}
    assert len(values) == 1
    if host.dtype.itemsize * 8 in (8, 16, 32) and dtype not in (np.bool_, "int4"):
        width = host.dtype.itemsize
        for byte in range(0, host.nbytes, 5):
            for bit in range(8):
                flipped = bytearray(host.tobytes())
                flipped[byte] ^= 1 << bit
                wrong = np.frombuffer(bytes(flipped), host.dtype).reshape(host.shape)
                assert checksums([jnp.asarray(wrong)])[0] not in values, (byte, bit, width)


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "bool",
        "int4",
        "int8",
        "uint32",
        "complex64",
    ],
)
def test_parts_on_the_host_add_up_to_the_checksum_on_the_devices(monkeypatch, dtype):
    monkeypatch.setattr(checksum, "_is_summed_on_host", lambda x: False)
    values = np.random.default_rng(1).standard_normal((5, 4, 6)) * 4
    complete = jnp.asarray(values, jnp.dtype(dtype))
    host = np.asarray(complete)
    parts = 0
    for rows, columns in itertools.product((slice(0, 2), slice(2, 5)), (slice(0, 5), slice(5, 6))):
        index = (rows, slice(0, 4), columns)
        parts += part_checksum(host[index], [s.start for s in index], host.shape)
    assert parts % 2**32 == checksums([complete])[0]
    scalar = jnp.asarray(3, jnp.dtype(dtype))
    assert part_checksum(np.asarray(scalar), (), ()) == checksums([scalar])[0]


def test_the_checksum_computed_in_slabs_is_the_same(monkeypatch):
    """Parts are split along any dim; elements have one word, two words and half a word."""
    mesh = MeshSpec.parse("fsdp=4,tp=2").build()
    specs = P(), P("fsdp"), P(None, "tensor", "fsdp"), P("tensor", None, "fsdp"), P(("fsdp",))
    dtypes = itertools.cycle((np.float32, np.complex64, np.float16))
    for dtype, spec in zip(dtypes, specs, strict=False):
        host = np.random.default_rng(3).standard_normal((4, 6, 8)).astype(dtype)
        expected = [part_checksum(x, [0] * x.ndim, x.shape) for x in (host, host[:, :1])]
        monkeypatch.setattr(checksum, "_SLAB_WORDS", 7)
        monkeypatch.setattr(checksum, "_is_summed_on_host", lambda x: False)
        checksum._program_of.cache_clear()
        complete = jax.device_put(host, NamedSharding(mesh, spec))
        row = jax.device_put(host[:, :1], NamedSharding(mesh, P("fsdp")))
        assert checksums([complete, row]) == expected, (dtype, spec)
        monkeypatch.undo()
    checksum._program_of.cache_clear()


MANY_LEAVES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxdist.checkpoint import checksum
from jaxdist.core.mesh import MeshSpec

checksum._is_summed_on_host = lambda x: False
mesh = MeshSpec(fsdp=4, tensor=2).build()
specs = [P("fsdp", "tensor"), P("tensor", "fsdp"), P("fsdp"), P(("fsdp", "tensor")), P()]
values = [np.full((32, 64), i, np.float32) for i in range(80)]
leaves = [jax.device_put(x, NamedSharding(mesh, specs[i % 5])) for i, x in enumerate(values)]
busy = jax.jit(lambda leaves: [leaf * 1 for leaf in leaves])
expected = [checksum.part_checksum(x, (0, 0), x.shape) for x in values]
for _ in range(10):
    leaves = busy(leaves)
    assert checksum.checksums(leaves) == expected
"""


def test_the_checksums_of_many_leaves_never_wait_for_each_other():
    """If all were dispatched at once, XLA:CPU would deadlock and end the process after a minute."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_LEAVES], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_sums_of_equal_shardings_share_one_program(monkeypatch):
    """A train step may give `P(None)` back as `P()`; a save must not compile because of that."""
    monkeypatch.setattr(checksum, "_is_summed_on_host", lambda x: False)
    mesh = MeshSpec.parse("fsdp=2").build(jax.devices()[:2])
    host = np.arange(8, dtype=np.float32)
    spelled = [
        [jax.device_put(host, NamedSharding(mesh, spec)) for spec in specs]
        for specs in [(P("fsdp"), P(None)), (P("fsdp"), P()), (P(("fsdp",)), P())]
    ]
    first = checksums(spelled[0])
    compiled = _compilations()
    assert [checksums(arrays) for arrays in spelled] == [first] * 3
    assert compiled == []
    checksums([jax.device_put(host, NamedSharding(mesh, P())), *spelled[0]])
    assert compiled, "the listener hears compilations"


def test_small_arrays_take_no_program_on_cpus_and_else_one_sum_per_shape_and_spec(monkeypatch):
    """Compiling a sum for each of 1,000 arrays takes 10 to 20 s."""
    mesh = MeshSpec.parse("fsdp=2").build(jax.devices()[:2])
    hosts = [np.full((4, 2 + i % 2), i, np.float32) for i in range(60)]
    specs = (P("fsdp"), P("fsdp"), P()) * 20
    arrays = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(hosts, specs, strict=True)]
    compiled = _compilations()
    expected = [part_checksum(x, (0, 0), x.shape) for x in hosts]
    assert checksums(arrays) == expected and compiled == []
    monkeypatch.setattr(checksum, "_is_summed_on_host", lambda x: False)
    assert checksums(arrays) == expected
    lower = lambda n: checksum._program_of(mesh, specs[:n]).lower(arrays[:n]).as_text()
    one, every = (lower(n).count("shift_right_logical") for n in (1, 60))
    assert every == 4 * one > 0


def _compilations():
    """Return a list to which each later compilation of a program is added."""
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    return compiled


def test_the_crc_of_a_file_is_that_of_all_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxdist.runtime.storage.location.BLOCK_BYTES", 64)
    content = np.random.default_rng(2).bytes(1000)
    sizes = {str(size): size for size in (0, 1, 64, 65, 1000)}
    for name, size in sizes.items():
        locate(tmp_path / name).write(content[:size])
    assert manifest.fingerprints(locate(tmp_path), list(sizes)) == {
        name: [size, zlib.crc32(content[:size])] for name, size in sizes.items()
    }


def test_a_checksum_detects_swapped_elements_and_another_shape():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    swapped = x.copy()
    swapped[0, 0], swapped[2, 3] = x[2, 3], x[0, 0]
    first, second, third = checksums([jnp.asarray(v) for v in (x, swapped, x.T)])
    assert first != second and first != third
