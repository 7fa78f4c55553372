"""Moments on a disk and in host memory: the same bits in both, and as in one program."""

import collections
import dataclasses
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import Fork, free_port, losses, run, run_here, tiny
from refusals import refused
from test_trials import GPU, cache  # noqa: F401  (a fixture)
from tiny import Case, batch_of, layout_of, model_of, place_batch, step_of

from jaxdist import optim
from jaxdist.checkpoint import crash_points, moment_files
from jaxdist.checkpoint.moment_files import DamagedMoments, MomentFiles
from jaxdist.checkpoint.moment_store import MomentStore, Snapshot
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import read_run
from jaxdist.core.step import grouped_update
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.run.gradient_checks import without_gradient
from jaxdist.run.monitoring.timers import CompileTracker

STEPS, SKIPPED = 20, 7


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(grouped_update, "GROUP_BYTES", 20_000)


def steps_of(mesh, disk, config=None, **options):
    """Return (step, state) by store: in files, in host memory, and in one program; and stores."""
    case = Case("learned", mesh, microbatches=2)
    config = config or OptimConfig(eps=1e-3)
    axes = optim.with_frozen(config, model_of("learned").axes)
    shardings = layout_of(case).shardings(layout_of(case).moment_specs(axes))
    rule = make_optimizer(config, axes, shardings)
    options |= {"rule": rule, "axes": axes, "max_grad_norm": 0.5}
    grouped = lambda store: step_of(case, store=store, unit=config.unit, **options)
    made = {
        "files": grouped(lambda groups: MomentFiles(groups, str(disk))),
        "host": grouped(MomentStore),
        "one": step_of(case, **options),
    }
    return made, *(made[name][0].train._store for name in ("files", "host"))


def train(step, state, steps=STEPS):
    batch, seen = place_batch(batch_of("learned"), step.batch_sharding), []
    for number in range(steps):
        state, metrics = step.train(state, batch, -np.inf if number == SKIPPED else np.inf)
        seen.append([float(metrics[name]) for name in ("loss", "grad_norm", "applied")])
    return jax.device_get(state), np.array(seen)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def arrays_of(state):
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


@pytest.mark.parametrize(
    "mesh", [pytest.param("dp=1", marks=pytest.mark.product), "fsdp=2,tp=2", "dp=2,pp=2"]
)
def test_moments_in_files_give_the_bits_of_moments_in_memory(mesh, tmp_path):
    made, files, host = steps_of(mesh, tmp_path, ema_decay=0.9)
    groups = groups_of(made)
    assert len(groups) >= 4 and sum(g.rows > 0 for g in groups) >= (0 if "pp" in mesh else 2)
    (a, seen_a), (b, seen_b), (c, seen_c) = (train(*made[name]) for name in made)
    assert same_bits(arrays_of(a), arrays_of(b)) and np.array_equal(seen_a, seen_b)
    for number in range(len(groups)):
        assert same_bits(files.read(number, STEPS), host.read(number, STEPS))
    # One program rounds an update differently by at most one unit in the last place.
    np.testing.assert_allclose(seen_a, seen_c, rtol=2e-5)
    assert seen_a[:, 2].tolist() == [float(n != SKIPPED) for n in range(STEPS)]
    for one, other in ((a.params, c.params), (a.copies["ema"], c.copies["ema"])):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        assert max(np.abs(x - y).max() for x, y in pairs) < 2e-6
    expected = {f"opt_state/{name}": x for name, x in named(c.opt_state).items() if x.ndim}
    moments = moments_in(host, STEPS)
    assert moments.keys() == expected.keys()
    for name, values in moments.items():
        np.testing.assert_allclose(values, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert files.num_bytes == sum(x.nbytes for x in expected.values())


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def moments_in(store, step):
    """Return name -> the moment in the order of the model."""
    made = {x.name: np.full(x.value.shape, np.nan, x.value.dtype) for x in store.leaves}
    for number, group in enumerate(store.shards):
        for shard, values in zip(group, store.read(number, step), strict=True):
            for own, index in shard.runs:
                made[shard.leaf.name][index] = values[own]
    return made


def groups_of(made):
    return made["files"][0].train._groups.groups


@pytest.mark.parametrize(
    "config",
    [
        OptimConfig(optimizer="lion", groups=["embed:lr=0.1"], moment_dtype="bfloat16"),
        OptimConfig(optimizer="muon", moment_dtype="int8", eps=1e-3),
        pytest.param(OptimConfig(moment_dtype="int8", eps=1e-3), marks=pytest.mark.product),
        pytest.param(OptimConfig(optimizer="adafactor"), marks=pytest.mark.product),
        pytest.param(OptimConfig(optimizer="muon", eps=1e-3), marks=pytest.mark.product),
        pytest.param(
            OptimConfig(optimizer="sgd", freeze=["layers/attention", "embed/positions"]),
            marks=pytest.mark.product,
        ),
    ],
    ids=["lion", "muon-int8", "int8", "adafactor", "muon", "sgd-frozen"],
)
def test_other_rules_agree_with_one_program(config, tmp_path):
    made, _, host = steps_of("fsdp=2", tmp_path, config)
    assert any(group.rows for group in groups_of(made))
    (a, seen_a), _, (c, seen_c) = (train(*made[name], steps=4) for name in made)
    np.testing.assert_allclose(seen_a, seen_c, rtol=2e-5)
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(c.params), strict=True)
    # Lion's sign of a value that is 0 up to rounding may differ.
    share = np.mean(np.concatenate([np.abs(x - y).ravel() > 2e-6 for x, y in pairs]))
    assert share <= (1e-3 if config.optimizer == "lion" else 0)
    names = {f"opt_state/{name}" for name, x in named(c.opt_state).items() if x.ndim}
    assert {leaf.name for leaf in host.leaves} == names


def test_a_step_compiles_all_programs_before_its_first_call(tmp_path):
    made, _, _ = steps_of("fsdp=2", tmp_path)
    step, state = made["files"]
    batch = place_batch(batch_of("learned"), step.batch_sharding)
    tracker = CompileTracker(step.train, "train step")
    stats = tracker.compile(state, batch, np.inf).memory_analysis()
    assert stats.argument_size_in_bytes > 0 and tracker.count == 1
    for _ in range(2):
        state, _ = tracker(state, batch, np.inf)
    assert tracker.count == 1


def torn(file):
    os.truncate(file, file.stat().st_size - 1)


def longer(file):
    file.write_bytes(file.read_bytes() + b"\0")


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def relabeled(file):
    data = bytearray(file.read_bytes())
    data[8] ^= 1  # the step
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [torn, longer, flipped, relabeled])
def test_a_torn_group_is_never_read(damage, tmp_path):
    _, files, _ = steps_of("dp=1", tmp_path)
    damage(files._file(2))
    with refused("group-2", "damaged", error=DamagedMoments):
        files.read(2, 0)


@pytest.mark.parametrize(("store", "error"), [("files", DamagedMoments), ("host", RuntimeError)])
def test_a_step_detects_a_stale_group(store, error, tmp_path):
    made, files, host = steps_of("dp=1", tmp_path)
    step, state = made[store]
    batch = place_batch(batch_of("learned"), step.batch_sharding)
    if store == "files":
        shutil.copy(files._file(1), tmp_path / "old")
    old = dict(host._kept)
    state, _ = step.train(state, batch, np.inf)
    if store == "files":
        shutil.copy(tmp_path / "old", files._file(1))
    host._kept[1] = old[1]
    with refused("1 ", "step 0", "step 1", error=error):
        step.train(state, batch, np.inf)


@pytest.mark.parametrize("store", ["files", "host"])
def test_later_steps_leave_a_snapshot_unchanged(store, tmp_path):
    made, *_ = steps_of("fsdp=2", tmp_path)
    step, state = made[store]
    batch = place_batch(batch_of("learned"), step.batch_sharding)
    state, _ = step.train(state, batch, np.inf)
    own = step.train._store
    before = moments_in(own, 1)
    snapshot = Snapshot(own, 1)
    for _ in range(2):
        state, _ = step.train(state, batch, np.inf)
    assert not same_bits(before, moments_in(own, 3))
    parts = [take() for take in snapshot._take]
    kept = SimpleNamespace(
        leaves=own.leaves, shards=own.shards, read=lambda number, _: parts[number]
    )
    assert same_bits(before, moments_in(kept, 1))


def test_parameters_without_gradient_are_those_with_moments_on_devices(tmp_path):
    made, files, host = steps_of("fsdp=2,tp=2", tmp_path)
    batch = place_batch(batch_of("learned"), made["one"][0].batch_sharding)
    states = {name: step.train(state, batch, np.inf)[0] for name, (step, state) in made.items()}
    layers = made["one"][1].params["layers"]["mlp"]["up"].shape[0]
    clear = {"opt_state/0/mu/layers/mlp/up": slice(1, 2), "opt_state/0/nu/embed/table": slice(None)}
    for store in (files, host):
        for number, group in enumerate(store.shards):
            values = [np.array(x) for x in store.read(number, 1)]
            for shard, own in zip(group, values, strict=True):
                for part, index in shard.runs if shard.leaf.name in clear else ():
                    rows = np.arange(index[0].start, index[0].stop)
                    own[part][np.isin(rows, np.arange(10**6)[clear[shard.leaf.name]])] = 0
            store.put(number, 1, values)
    one = states["one"]

    def cleared(path, x):
        name = "opt_state/" + jax.tree_util.keystr(path, simple=True, separator="/")
        return x.at[clear[name]].set(0) if name in clear else x

    opt_state = jax.tree_util.tree_map_with_path(cleared, one.opt_state)
    one = dataclasses.replace(one, opt_state=opt_state)
    expected = without_gradient(one, np.arange(layers))
    assert {"layers/mlp/up of layer 1", "embed/table"} <= set(expected)
    for name, store in (("files", files), ("host", host)):
        assert without_gradient(states[name], np.arange(layers), (), store) == expected


def test_files_of_killed_processes_are_deleted_and_those_of_others_stay(tmp_path):
    _, files, _ = steps_of("dp=1", tmp_path)
    left = tmp_path / "jaxdist-moments-left"
    shutil.copytree(files._own, left)
    files.check()
    assert not left.exists() and len(files.read(0, 0)) == len(files.shards[0])
    more = MomentFiles(files.groups, str(tmp_path))
    more.fill_zeros()
    own = more._own
    del more  # files live as long as their run
    assert not own.exists() and files._own.exists()


def test_a_disk_that_cannot_hold_the_moments_is_rejected(tmp_path, monkeypatch):
    _, files, _ = steps_of("dp=1", tmp_path)
    usage = collections.namedtuple("Usage", "free")
    largest = max(sum(shard.num_bytes for shard in group) for group in files.shards)
    needed = 2 * files.num_bytes + largest
    monkeypatch.setattr(moment_files.shutil, "disk_usage", lambda _: usage(needed))
    files.check()
    monkeypatch.setattr(moment_files.shutil, "disk_usage", lambda _: usage(needed - 1))
    with refused(f"disk:{tmp_path}", "are free"):
        files.check()
    files.directory = tmp_path / "none"
    with refused(f"disk:{tmp_path}/none", "not a directory"):
        files.check()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--monitoring.layer-statistics-steps=5"], ["layer_statistics_steps=5"]),
        (["--checkpoint.local-dir=/x"], ["checkpoint.local_dir='/x'"]),
        (["--run-dir=s3://a/b"], ["run_dir='s3://a/b'"]),
    ],
)
def test_what_moments_outside_of_devices_exclude_is_rejected(flags, words):
    for where in ("host", "disk:/nvme"):
        with refused(where, *words, num_problems=2 if "s3" in str(flags) else 1):  # no credentials
            read_run([f"--train.offload-optimizer={where}", *flags], command="test")
    if "s3" not in str(flags):
        read_run(flags, command="test")


def test_a_directory_is_absolute():
    with refused("offload_optimizer='disk:nvme'", "disk:/DIR", num_problems=1):
        read_run(["--train.offload-optimizer=disk:nvme"], command="test")


def arrays(run_dir, step):
    stored = StoredArrays(run_dir / "checkpoints" / str(step))
    return {name: np.concatenate([x.ravel() for _, x in stored.blocks(name)])
            if stored.entries[name]["shape"] else stored.read(name)
            for name in stored.entries}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("store", ["disk", "host"])
def test_a_killed_run_resumes_with_equal_bits_and_moments_move_between_stores(
    store, tmp_path, monkeypatch
):
    monkeypatch.undo()  # processes would round differently with other groups
    disk = tmp_path / "disk"
    disk.mkdir()
    saves = "--checkpoint.save_interval_steps=2", "--checkpoint.max_to_keep=9"
    flags = tiny(
        *saves, "--optim.schedule=constant", "--eval.final_max_batches=1", "--model.num_layers=3"
    )
    away = "--train.offload-optimizer=" + {"disk": f"disk:{disk}", "host": "host"}[store]
    start = lambda name, *more: ["train", *flags, f"--run-dir={tmp_path / name}", *more]
    mesh = ["--simulate=8", "--mesh=fsdp=2,tp=4"]
    assert run_here(*start("complete", away, "--train.steps=10", *mesh)) == 0
    assert run_here(*start("run", away, "--train.steps=4", *mesh)) == 0
    monkeypatch.setenv(crash_points.VARIABLE, "during_moments")
    killed = run(*start("run", away, "--train.steps=6", *mesh))
    assert killed.returncode == -9, killed.stderr[-2000:]
    monkeypatch.delenv(crash_points.VARIABLE)
    left = 1 if store == "disk" else 0  # of the killed process
    assert len(list(disk.glob("jaxdist-moments-*"))) == left
    done = run(*start("run", away, "--train.steps=6", *mesh))
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(disk.iterdir()) == []
    complete = losses(tmp_path / "complete")
    assert losses(tmp_path / "run") == {step: complete[step] for step in range(1, 7)}
    assert same_bits(arrays(tmp_path / "run", 6), arrays(tmp_path / "complete", 6))

    # The checkpoint resumes with moments elsewhere, and back, on other meshes.
    monkeypatch.setattr(grouped_update, "GROUP_BYTES", 20_000)
    assert run_here(*start("run", "--train.steps=8", "--mesh=dp=8")) == 0
    other = "fsdp=8" if store == "disk" else "pp=2,fsdp=4"  # the second stage has one layer
    assert run_here(*start("run", away, "--train.steps=10", f"--mesh={other}")) == 0
    check_arrays(tmp_path / "run", tmp_path / "complete", 10)
    with refused("optim.optimizer='adamw'", "now 'sgd'"):
        run_here(*start("run", away, "--train.steps=12", "--optim.optimizer=sgd", *mesh))


def check_arrays(run_dir, expected_dir, step):
    ours, expected = arrays(run_dir, step), arrays(expected_dir, step)
    assert ours.keys() == expected.keys() and any(name.startswith("opt_state") for name in ours)
    for name, values in expected.items():
        np.testing.assert_allclose(ours[name], values, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_two_processes_keep_their_own_shards(tmp_path, monkeypatch):
    """They write one checkpoint together, and each loads its part of it."""
    monkeypatch.undo()
    flags = tiny("--optim.schedule=constant", "--checkpoint.save_interval_steps=2")
    meshes = {"host": "dp=2,fsdp=2", f"disk:{tmp_path}": "fsdp=4"}
    for steps, (where, mesh) in zip((2, 4), meshes.items(), strict=True):
        job = [*flags, f"--run-dir={tmp_path / 'run'}", f"--steps={steps}", "--simulate=2"]
        job += [f"--mesh={mesh}", f"--train.offload-optimizer={where}"]
        job += [f"--runtime.coordinator_address=127.0.0.1:{free_port()}"]
        job += ["--runtime.num_processes=2"]
        alive = {crash_points.VARIABLE: ""}
        forks = [Fork("jaxdist.train", *job, f"--runtime.process_id={i}", **alive) for i in (0, 1)]
        errors = [fork.communicate(timeout=300)[1][-3000:] for fork in forks]
        assert [fork.returncode for fork in forks] == [0, 0], errors
    one = [*flags, f"--run-dir={tmp_path / 'one'}", "--steps=4", "--mesh=dp=4", "--simulate=4"]
    errors = (fork := Fork("jaxdist.train", *one)).communicate()[1]
    assert fork.returncode == 0, errors
    check_arrays(tmp_path / "run", tmp_path / "one", 4)
