"""Compare two runs that diverge: the first step, layer and tensor are named."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.config import read_run
from jaxdist.run.audit import _batch
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError, write_toml
from jaxdist.tools.compare import rerun
from jaxdist.tools.compare.__main__ import (
    _recorded_otherwise,
    describe,
    main,
    read_divergence,
)
from jaxdist.tools.compare.rerun import (
    RerunStep,
    first_difference,
    make_diagnostic_step,
    rerun_steps,
)

STEPS = 3
FLAGS = ["--model.d_model=16", "--model.num_layers=2", "--model.num_heads=2", "--model.mlp_dim=32"]
FLAGS += ["--train.seq_len=16", "--train.global_batch_size=4", "--mesh=dp=2"]


@pytest.fixture(scope="module")
def parts():
    return assemble(read_run(FLAGS, command="test"), jax.devices()[:2])


@pytest.fixture(scope="module")
def diagnose(parts):
    return make_diagnostic_step(parts)


@pytest.fixture(scope="module")
def batches(parts):
    first = jax.device_put(_batch(parts, None), parts.step.batch_sharding)
    return [
        jax.tree.map(lambda x, n=n: x + (n * (x.dtype == np.float32)), first) for n in range(STEPS)
    ]


@pytest.fixture(scope="module")
def clean(parts, diagnose, batches):
    return list(rerun_steps(parts, diagnose, parts.init_state(), batches))


def harmed(leaf, generator, kind):
    """Return the array with one element changed by a bit or to the next float, and its index."""
    host = np.array(leaf)
    flat = host.reshape(-1)
    index = int(generator.integers(flat.size))
    if kind == "ulp":
        flat[index] = np.nextafter(flat[index], np.float32(9), dtype=np.float32)
    else:
        flat[index : index + 1].view(np.uint32)[0] ^= np.uint32(1 << int(generator.integers(23)))
    return jax.device_put(host, leaf.sharding), np.unravel_index(index, host.shape)


def with_fault(parts, step, seed, kind):
    generator, named = np.random.default_rng(seed), []

    def train(state, batch, limit):
        state, metrics = parts.step.train(state, batch, limit)
        if int(state.step) != step:
            return state, metrics
        section = ("params", "opt_state")[int(generator.integers(2))]
        leaves, structure = jax.tree_util.tree_flatten_with_path(getattr(state, section))
        floats = [i for i, (_, leaf) in enumerate(leaves) if leaf.dtype == np.float32 and leaf.ndim]
        chosen = floats[int(generator.integers(len(floats)))]
        path, leaf = leaves[chosen]
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        values = [leaf for _, leaf in leaves]
        values[chosen], index = harmed(leaf, generator, kind)
        layer = f", layer {index[0]}" if "layers" in name.split("/") else ""
        named.append(f"{section}/{name}{layer}")
        tree = jax.tree.unflatten(structure, values)
        return dataclasses.replace(state, **{section: tree}), metrics

    faulty = dataclasses.replace(parts)
    vars(faulty)["step"] = dataclasses.replace(parts.step, train=train)
    return faulty, named


@pytest.mark.parametrize(("seed", "kind"), [(0, "bit"), (1, "ulp"), (2, "bit"), (3, "ulp")])
def test_a_planted_fault_is_named(parts, diagnose, batches, clean, seed, kind):
    step = 1 + seed % (STEPS - 1)
    faulty, named = with_fault(parts, step, seed, kind)
    walk = rerun_steps(faulty, diagnose, parts.init_state(), batches)
    differences = [d for a, b in zip(clean, walk, strict=True) if (d := first_difference(a, b))]
    assert (differences[0].step, differences[0].what) == (step + 1, named[0])


def test_equal_runs_have_equal_digests(parts, diagnose, batches, clean):
    again = list(rerun_steps(parts, diagnose, parts.init_state(), batches))
    assert [first_difference(a, b) for a, b in zip(clean, again, strict=True)] == [None] * STEPS
    assert [one.numbers for one in again] == [one.numbers for one in clean]


def test_digests_are_those_of_an_objective_that_adds_fields_to_the_batch(tmp_path):
    (tmp_path / "a.jsonl").touch()
    flags = ["--objective.kind=kto", "--data.records=labeled", f"--data.sources={tmp_path}"]
    flags += ["--lora.rank=2", "--mesh=dp=1", "--model.num_layers=1"]
    config = read_run([FLAGS[0], *FLAGS[2:-1], *flags], command="test")
    parts = assemble(config, jax.devices()[:1])
    batch = jax.device_put(_batch(parts, None), parts.step.batch_sharding)
    (step,) = rerun_steps(parts, make_diagnostic_step(parts), parts.init_state(), [batch])
    weight = np.frombuffer(step.digests["weight"], np.float32)
    assert np.frombuffer(step.digests["loss"], np.float32) / weight == step.numbers["loss"]


def test_a_fault_inside_a_layer_is_named_by_the_layer(parts, batches):
    """Both runs start equal; one computes the layer with a marked norm differently."""
    state = parts.init_state()
    path, leaf = jax.tree_util.tree_leaves_with_path(state.params["layers"])[0]
    marked = jax.device_put(np.array(leaf), leaf.sharding).at[1].mul(1.5)
    name = [key.key for key in path]

    def mark(tree):
        inner = dict(tree)
        inner[name[0]] = marked if len(name) == 1 else {**tree[name[0]], name[1]: marked}
        return inner

    state = dataclasses.replace(
        state, params={**state.params, "layers": mark(state.params["layers"])}
    )
    block, total = parts.model.block, float(np.abs(np.asarray(marked)[1]).sum())

    def faulty(weights, x, aux, context):
        x, sums = block(weights, x, aux, context)
        mine = weights[name[0]] if len(name) == 1 else weights[name[0]][name[1]]
        hit = jax.numpy.abs(jax.numpy.abs(mine).sum() - total) < 1e-3 * total
        return jax.numpy.where(hit, x * (1 + 2**-20), x), sums

    other = dataclasses.replace(parts, model=dataclasses.replace(parts.model, block=faulty))
    expected = make_diagnostic_step(parts)(state, batches[0])
    actual = make_diagnostic_step(other)(state, batches[0])
    differing = [name for name in expected if expected[name] != actual[name]]
    assert differing[0] == "layer 1: output"
    assert "layer 0: output" not in differing and "params/embed" not in " ".join(differing)


def run_directory(path, losses, ledger="ab", seed=1):
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.toml").write_text(
        write_toml(read_run([*FLAGS, f"--seed={seed}"], command="test"))
    )
    (path / "environment.json").write_text(
        json.dumps({"versions": {"jax": "0.10"}, "time": path.name})
    )
    lines = [
        {
            "kind": "train",
            "step": step,
            "loss": loss,
            "grad_norm": 1.0,
            "data_ledger": ledger + str(step),
        }
        for step, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunDirectory.existing(path)


def test_records_show_where_settings_data_and_losses_diverge(tmp_path, capsys):
    a = run_directory(tmp_path / "a", [3.0, 2.0, 1.0])
    same = run_directory(tmp_path / "same", [3.0, 2.0, 1.0, 0.5])
    b = run_directory(tmp_path / "b", [3.0, np.nextafter(2.0, 3), 1.0], ledger="cd", seed=2)
    parting = read_divergence(a, b)
    assert (parting.step, parting.data_step, list(parting.numbers)) == (2, 1, ["loss"])
    assert parting.settings == {"seed": (1, 2)} and not parting.environment
    assert "step 2" in " ".join(describe(parting))
    assert read_divergence(a, same).is_equal and read_divergence(a, same).last_common_step == 3
    assert main([str(a.path), str(same.path)]) == 0
    assert main([str(a.path), str(b.path), "--rerun=false"]) == 1
    assert "seed: 1 | 2" in capsys.readouterr().out


def test_steps_are_rerun_from_the_newest_equal_checkpoint_before_the_difference(tmp_path):
    """The log differs although later checkpoints are equal."""
    state, device = {"w": np.zeros(2, np.float32)}, jax.devices()[0]
    runs = [run_directory(tmp_path / n, [3.0, x, 1.0]) for n, x in (("a", 2.0), ("b", 2.5))]
    for run in runs:
        with contextlib.closing(Checkpointer(run.checkpoints, CheckpointConfig())) as writer:
            for step in (1, 3):
                writer.save(step, {"params": jax.device_put(state, device)}, {})
    parting = read_divergence(*runs)
    assert (parting.equal_checkpoints, parting.last_to_rerun) == ([1, 3], 2)
    assert parting.rerun_from == 1


@pytest.mark.parametrize("fields", [{}, {"segments": None}], ids=["stream", "packed"])
def test_steps_are_rerun_with_the_kernel_of_training(tmp_path, monkeypatch, fields):
    runs = tuple(run_directory(tmp_path / name, [3.0]) for name in "ab")
    flags = [flag for flag in FLAGS if "mesh" not in flag]
    parts = assemble(read_run([*flags, "--mesh=cp=2"], command="test"), jax.devices()[:2])
    data = [SimpleNamespace(fields=fields)] * 2
    kernels = []
    compared = lambda own, fields, _: (dataclasses.replace(own, checks=fields), None)
    monkeypatch.setattr(rerun, "decide_step", compared)
    monkeypatch.setattr(rerun, "open_run_data", lambda config: data)
    loader = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(rerun, "state_before", lambda own, *args: (own, loader, 0))
    monkeypatch.setattr(
        rerun,
        "make_diagnostic_step",
        lambda own: kernels.append(own.checks),
    )
    assert rerun.rerun(runs, (parts, parts), 0, 0) == (None, [])
    assert kernels == [fields] * 2


@pytest.mark.parametrize("name", ["config.toml", "environment.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, name):
    runs = [run_directory(tmp_path / n, [3.0]) for n in "ab"]
    (tmp_path / "a" / name).write_text("[x")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "a" / name))):
        read_divergence(*runs)


def test_the_run_whose_records_differ_from_the_rerun_is_reported(tmp_path):
    runs = [run_directory(tmp_path / n, x) for n, x in (("a", [3.0, 2.0]), ("b", [3.0, 2.5]))]
    numbers = ({"loss": loss, "grad_norm": 1.0} for loss in (3.0, 2.0))
    again = [RerunStep(step=n, digests={}, numbers=x) for n, x in enumerate(numbers, start=1)]
    a, b = _recorded_otherwise(tuple(runs), [(one, one) for one in again], None, "dp=2")
    assert [re.findall(r"step (\d+)", line) for line in (a, b)] == [[], ["2"]]
    assert "sdc_check_interval_steps" in b
    # On another mesh sums have another order, and no device is at fault.
    with (tmp_path / "b" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": "event", "event": "run", "mesh": "cp=2"}) + "\n")
    a, b = _recorded_otherwise(tuple(runs), [(one, one) for one in again], None, "dp=2")
    assert "--mesh cp=2" in b and "sdc_check_interval_steps" not in b


def test_arrays_that_a_rerun_keeps_outside_of_devices_are_not_compared(tmp_path, monkeypatch):
    runs = tuple(run_directory(tmp_path / name, [3.0]) for name in "ab")
    entry = {"shape": [2], "dtype": "float32", "checksum": 7}
    stored = {"params/w": entry, "opt_state/mu/w": entry}
    monkeypatch.setattr("jaxdist.tools.compare.__main__.stored_arrays", lambda run, step: stored)
    numbers = {"loss": 3.0, "grad_norm": 1.0}
    again = RerunStep(step=1, digests={}, numbers=numbers, arrays={"params/w": entry})
    assert _recorded_otherwise(runs, [(again, again)], 0, "dp=2")[0] == "a: equals the rerun"
    stored["params/w"] = {**entry, "checksum": 8}
    assert "saved 1 different" in _recorded_otherwise(runs, [(again, again)], 0, "dp=2")[0]
