"""Saves and restores: bits, meshes, policies, retention, partial restores."""

import dataclasses
import itertools
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damaged import like
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import missing, refused

from jaxdist.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    manifest,
    orbax_io,
    save,
)
from jaxdist.checkpoint.checksum import start_checksums
from jaxdist.core.mesh import MeshSpec

pytestmark = pytest.mark.smoke

QUIET = {"log": lambda line: None}

# One row per layout: mesh, how parameters are split, how moments are split.
LAYOUTS = {
    "one_device": ("dp=1", {}, {}),
    "dp2_replicated": ("dp=2", {}, {}),
    "tp4": ("tp=4", {"w": P(None, None, "tensor"), "table": P("tensor")}, None),
    "dp8_zero1": ("dp=8", {}, {"w": P(None, "data"), "table": P("data")}),
    "dp8_zero3": ("dp=8", {"w": P(None, "data"), "table": P(None, "data")}, None),
    "fsdp8": ("fsdp=8", {"w": P(None, None, "fsdp"), "table": P("fsdp")}, None),
    "pp4_tp2": ("pp=4,tp=2", {"w": P("pipeline", "tensor"), "table": P(None, "tensor")}, None),
}


def numpy_params(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "layers": {"w": rng.standard_normal((4, 16, 8), dtype=np.float32)},
        "embed": {"table": rng.standard_normal((32, 8)).astype(jnp.bfloat16)},
    }


def layout(name: str) -> tuple:
    text, params, moments = LAYOUTS[name]
    spec = MeshSpec.parse(text)
    mesh = spec.build(jax.devices()[: spec.num_devices])

    def sharding_of(path, leaf):
        names = [getattr(key, "key", getattr(key, "name", "")) for key in path]
        table = params if moments is None or "opt_state" not in names else moments
        return NamedSharding(mesh, table.get(names[-1], P()))

    return mesh, sharding_of


def state_on(name: str, seed: int = 0) -> dict:
    params = numpy_params(seed)
    opt_state = optax.adamw(1e-3).init(jax.tree.map(jnp.asarray, params))
    counter = itertools.count(1)
    moments = jax.tree.map(lambda x: (x + next(counter)).astype(x.dtype), opt_state)
    rest = {
        "step": jnp.int32(7),
        "key": jax.random.key(seed + 17),
        "loss_scale": jnp.float32(2.0**15),
    }
    state = {"params": params, "opt_state": moments, "rest": rest}
    _, sharding_of = layout(name)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, sharding_of(path, x)), state
    )


def abstract_on(name: str, state) -> dict:
    _, sharding_of = layout(name)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(path, x)), state
    )


def bits(tree) -> list[bytes]:
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x).tobytes() for x in raw]


def checkpointer(path, **settings) -> Checkpointer:
    return Checkpointer(path, CheckpointConfig(**settings), **QUIET)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    written = {}

    def directory(name: str):
        if name not in written:
            path = tmp_path_factory.mktemp(name)
            state = state_on(name)
            writer = checkpointer(path)
            writer.save(7, state, {"data": {"next_sample": 224}})
            writer.close()
            written[name] = (path, state)
        return written[name]

    return directory


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["one_device", "tp4", "dp8_zero1", "pp4_tp2"])
def test_every_leaf_is_bit_identical_on_another_mesh(saved, source, target):
    path, state = saved(source)
    reader = Checkpointer(path, CheckpointConfig(), read_only=True, **QUIET)
    abstract = abstract_on(target, state)
    restored, meta, step = reader.restore(abstract)
    assert step == 7 and meta == {"data": {"next_sample": 224}}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert bits(restored["params"]) == bits(numpy_params())
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, abstract
    )
    draw = lambda tree: np.asarray(jax.random.normal(tree["rest"]["key"], (4,)))
    np.testing.assert_array_equal(draw(restored), draw(state))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("mesh", "spec", "verify", "times"),
    [
        ("fsdp=8", P("fsdp"), "none", 1),
        ("dp=8", P(), "none", 1),
        ("dp=4,tp=2", P("tensor"), "none", 1),
        ("dp=1", P(), "none", 1),
        ("dp=8", P(), "full", 2),  # once to verify the files, once to load them
    ],
)
def test_restore_reads_each_byte_once(tmp_path, mesh, spec, verify, times):
    """Written by 8 devices, read by few or many, sharded or replicated."""
    split = NamedSharding(MeshSpec.parse("fsdp=8").build(), P("fsdp"))
    rng = np.random.default_rng(0)
    values = {f"w{i}": rng.standard_normal((1024, 1024), np.float32) for i in range(4)}
    state = {"params": jax.tree.map(lambda x: jax.device_put(x, split), values)}
    writer = checkpointer(tmp_path)
    writer.save(1, state, {}, force=True)
    writer.close()
    mesh_spec = MeshSpec.parse(mesh)
    target = NamedSharding(mesh_spec.build(jax.devices()[: mesh_spec.num_devices]), spec)
    reader = Checkpointer(tmp_path, CheckpointConfig(verify=verify), read_only=True, **QUIET)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target), state
    )
    before = bytes_read()
    restored, _, _ = reader.restore(abstract)
    jax.block_until_ready(restored)
    read = bytes_read() - before
    assert bits(restored) == bits(state)
    # Other reads of this process count too, e.g. of compiled programs (1.7 MB observed).
    assert read <= 1.2 * times * sum(x.nbytes for x in values.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    loss_scale: jax.Array | None
    key: jax.Array


def small_state(value: float = 0.0, size: int = 4) -> dict:
    device = jax.devices()[0]
    state = {
        "params": {"w": jnp.full(size, value)},
        "opt_state": (),
        "rest": {"step": jnp.int32(0)},
    }
    return jax.tree.map(lambda x: jax.device_put(x, device), state)


def test_dataclass_state_round_trips_like_a_dict(tmp_path):
    params = jax.tree.map(jnp.asarray, numpy_params())
    opt_state = optax.sgd(0.1, momentum=0.9).init(params)
    state = State(jnp.int32(3), params, opt_state, None, jax.random.key(4))
    writer = checkpointer(tmp_path)
    writer.save(3, state, {})
    restored, _, _ = writer.restore(like(state))
    assert isinstance(restored, State) and restored.loss_scale is None
    assert bits(restored) == bits(state)
    as_dict = {
        "params": params,
        "opt_state": opt_state,
        "rest": {"step": state.step, "key": state.key},
    }
    assert bits(writer.restore(like(as_dict))[0]) == bits(as_dict)
    writer.close()


def test_state_can_be_donated_during_a_save(tmp_path):
    mesh = MeshSpec(fsdp=4).build(jax.devices()[:4])
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("fsdp") if x.ndim else P()))
    state = jax.tree.map(put, small_state(1.0, size=1 << 20))
    expected = bits(state)
    double = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
    writer = checkpointer(tmp_path)
    shape = like(state)
    writer.save(1, state, {})
    for _ in range(3):
        state = double(state)
    writer.wait()
    assert bits(writer.restore(shape)[0]) == expected
    writer.close()


def test_save_does_not_wait_for_checksums(tmp_path, monkeypatch):
    started, waiting_threads, may_answer = [], [], threading.Event()

    def start(arrays):
        started.append(len(arrays))
        result = start_checksums(arrays)

        def wait():
            waiting_threads.append(threading.current_thread())
            return result() if may_answer.wait(5) else []

        return wait

    monkeypatch.setattr(save, "start_checksums", start)
    writer = checkpointer(tmp_path)
    writer.save(1, small_state(), {})
    assert started == [2]
    may_answer.set()
    assert writer.wait() and waiting_threads and threading.main_thread() not in waiting_threads
    writer.close()


def test_restore_casts_to_the_requested_dtype(tmp_path):
    state = small_state(1.2345678)
    writer = checkpointer(tmp_path)
    writer.save(1, state, {})
    target = like(state)["params"]
    half = {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=target["w"].sharding)}
    writer.wait()
    restored = writer.restore_params(half)
    np.testing.assert_array_equal(restored["w"], state["params"]["w"].astype(jnp.bfloat16))
    writer.close()


@pytest.fixture
def two_parts(tmp_path):
    state = small_state()
    state["params"] = {"body": {"w": jnp.ones(4)}, "head": {"w": jnp.ones((4, 2))}}
    writer = checkpointer(tmp_path)
    writer.save(5, state, {})
    writer.wait()
    yield writer, like(state)
    writer.close()


def test_all_mismatched_leaves_are_reported(two_parts):
    writer, target = two_parts
    device = target["rest"]["step"].sharding
    target["params"]["head"]["w"] = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=device)
    target["params"]["extra"] = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=device)
    del target["params"]["body"]
    with refused(num_problems=3) as caught:
        writer.restore(target)
    problems = {line.split()[5]: line for line in caught.value.problems}
    assert missing(problems["params/head/w"], "[4, 2]", "[4, 3]", "reinit_params") == []
    assert missing(problems["params/extra"], "[1]", "reinit_params") == []
    assert missing(problems["params/body/w"], "[4]", "reinit_params") == []


def test_new_head_is_kept_if_listed(two_parts):
    writer, target = two_parts
    params = target["params"]
    params["head"]["w"] = jnp.full((4, 3), 9.0)
    restored = writer.restore_params(params, 5, reinit=["head"])
    np.testing.assert_array_equal(restored["head"]["w"], np.full((4, 3), 9.0))
    np.testing.assert_array_equal(restored["body"]["w"], np.ones(4))


def test_unused_parts_are_skipped_only_if_listed(two_parts):
    writer, target = two_parts
    body = {"body": target["params"]["body"]}
    with refused("params/head/w [4, 2] is in"):
        writer.restore_params(body)
    assert list(writer.restore_params(body, reinit=["head"])) == ["body"]
    with refused("reinit_params", "params/haed"):
        writer.restore_params(body, reinit=["head", "haed"])


def test_missing_step_error_lists_available_steps(two_parts):
    writer, target = two_parts
    with refused("checkpoint 6", "there: 5", error=CheckpointError):
        writer.restore(target, step=6)


def test_non_array_leaf_is_rejected(tmp_path):
    writer = checkpointer(tmp_path)
    with pytest.raises(TypeError, match=r"^rest/step\b.*\bint\b"):
        writer.save(1, {"params": {}, "rest": {"step": 3}}, {})
    with pytest.raises(TypeError, match="JSON"):
        writer.save(1, small_state(), {"data": object()})
    with pytest.raises(TypeError, match=r"params\.a\.b"):
        writer.save(1, {"params": {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}}, {})
    writer.close()


def test_retention_on_disk_survives_a_restart(tmp_path):
    settings = {"max_to_keep": 2, "keep_best": "loss:1"}
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.6}
    for step, loss in losses.items():
        writer = checkpointer(tmp_path, **settings)
        if step > 1:
            writer.restore(like(small_state()))
        writer.save(step, small_state(step), {}, metrics={"loss": loss})
        writer.wait()
        writer.close()
        assert str(min((s for s in losses if s <= step), key=losses.get)) in os.listdir(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "2", "4", "5"]


def test_orbax_reads_saved_arrays(tmp_path):
    import orbax.checkpoint as ocp

    params = numpy_params()
    state = {"params": jax.tree.map(jnp.asarray, params), "step": jnp.int32(1)}
    writer = checkpointer(tmp_path)
    writer.save(1, state, {})
    writer.close()
    target = like({"params": state["params"], "rest": {"step": state["step"]}})
    restored = ocp.StandardCheckpointer().restore(tmp_path / "1" / "arrays", target)
    assert restored["rest"]["step"] == 1
    jax.tree.map(np.testing.assert_array_equal, restored["params"], params)


def test_second_save_waits_and_logs_it(tmp_path, monkeypatch):
    import time

    wait = orbax_io.OrbaxWriter.wait
    monkeypatch.setattr(orbax_io.OrbaxWriter, "wait", lambda self: (time.sleep(0.2), wait(self))[1])
    lines = []
    writer = Checkpointer(tmp_path, CheckpointConfig(), log=lines.append)
    writer.save(1, small_state(), {})
    writer.save(2, small_state(), {})
    assert writer.wait()
    first, second = [e for e in writer.pop_events() if e["event"] == "save"]
    assert first["waited_s"] == 0 and second["waited_s"] > 0.1
    assert set(first) == {
        *("event", "step", "halfway", "blocked_s", "waited_s", "written_s", "bytes", "gb_per_s")
    }
    assert first["written_s"] > 0.2 and first["blocked_s"] > 0 and first["bytes"] > 0
    assert any("waited" in line for line in lines)
    assert writer.pop_events() == []
    writer.close()


def test_choose_waits_for_a_save_in_progress(tmp_path):
    writer = checkpointer(tmp_path)
    for step in (1, 2):
        writer.save(step, small_state(), {})
        assert writer.choose() == step
    assert writer.steps() == [1, 2]
    writer.close()


def test_saving_an_existing_step_changes_nothing(tmp_path):
    writer = checkpointer(tmp_path)
    writer.save(1, small_state(1.0), {}, force=True)
    writer.save(1, small_state(2.0), {}, force=True)
    assert writer.wait()
    assert [e["event"] for e in writer.pop_events()] == ["save", "save_skipped"]
    restored, _, _ = writer.restore(like(small_state()))
    np.testing.assert_array_equal(restored["params"]["w"], np.full(4, 1.0))
    writer.close()


def test_a_step_that_is_repeated_after_a_restore_is_saved_again(tmp_path):
    writer = checkpointer(tmp_path, save_interval_steps=2)
    for step in (1, 2):
        writer.save(step, small_state(step), {}, force=True)
    writer.restore(like(small_state()), step=1)
    assert writer.due(2) == "interval" and writer.due(1) == ""
    writer.close()


def test_continuing_from_an_older_step_supersedes_newer_ones(tmp_path):
    writer = checkpointer(tmp_path, max_to_keep=5)
    for step in (1, 2, 3):
        writer.save(step, small_state(step), {})
    writer.close()
    writer = checkpointer(tmp_path, max_to_keep=5)
    writer.restore(like(small_state()), step=1)
    writer.save(2, small_state(20.0), {}, force=True)
    assert writer.steps() == [1, 2]
    restored, _, _ = writer.restore(like(small_state()))
    np.testing.assert_array_equal(restored["params"]["w"], np.full(4, 20.0))
    assert (tmp_path / "3" / manifest.SUPERSEDED).exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1", "2", "3"]
    with pytest.raises(CheckpointError, match="marked SUPERSEDED"):
        writer.restore(like(small_state()), step=3)
    writer.close()
