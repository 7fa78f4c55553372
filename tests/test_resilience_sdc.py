"""One flipped bit on one device is detected, with device and array; correct states pass."""

import json
import re

import jax
import numpy as np
import pytest
import tiny as reference
from bit_flip_train import flipped, flips_a_bit
from commands import losses, tiny
from refusals import refused

from jaxdist.config.resilience import ResilienceConfig
from jaxdist.run.resilience.sdc_check import SdcCheck, minority

HOSTS = {0: "node-a"}


def watch(case, **settings) -> SdcCheck:
    config = ResilienceConfig(**{"sdc_check_interval_steps": 1, **settings})
    return SdcCheck(config, reference.layout_of(case), HOSTS)


def look(subject: SdcCheck, state, step: int = 1):
    subject.start(step, state)
    return subject.result()


def name_of(path) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


CASES = [
    reference.Case("rotary", "dp=4,fsdp=2"),
    reference.Case("rotary", "pp=2,dp=4"),
    reference.Case("learned", "fsdp=4,tp=2"),
    reference.Case("rotary", "dp=4"),
    reference.Case("rotary", "dp=4,tp=2"),
    reference.Case("rotary", "dp=4", zero=1),
]


COMPILED = [
    reference.Case("learned", "dp=8", zero=2, microbatches=2, remat="full"),
    reference.Case("rotary", "dp=2,fsdp=4", zero=3, microbatches=2, remat="dots"),
]
"""Cases that test_parity compiles too."""


@pytest.mark.parametrize(
    "case",
    [*CASES[:3], *(pytest.param(case, marks=pytest.mark.product) for case in CASES[3:])],
    ids=str,
)
def test_a_flipped_bit_is_detected_in_every_replicated_array(case):
    state = reference.place_state(case)
    subject = watch(case)
    assert look(subject, state) is None
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    sizes = reference.layout_of(case).mesh_spec.sizes
    seen = 0
    for index, (path, leaf) in enumerate(leaves):
        taken = {a for e in leaf.sharding.spec for a in (e if isinstance(e, tuple) else (e,))}
        replicated = any(sizes[axis] > 2 and axis not in taken for axis in ("data", "fsdp"))
        if not replicated or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        seen += 1
        position = (5 * index + 2) % leaf.sharding.mesh.size
        values = [x for _, x in leaves]
        values[index] = flipped(leaf, position, element=index * 7, bit=index % 32)
        corruption = look(subject, jax.tree.unflatten(tree, values), step=7)
        assert corruption is not None and corruption.certain
        assert corruption.devices == {position: [name_of(path)]}
        assert corruption.step == 7 and "after step 1." in str(corruption)
        device = leaf.sharding.mesh.devices.flat[position]
        assert f"device {device.id} of process 0 on node-a in {name_of(path)}" in str(corruption)
    assert seen >= 3
    assert look(subject, state) is None


def test_a_check_exchanges_as_many_bytes_on_8_devices_as_on_2():
    exchanged = []
    for mesh in ("dp=2", "dp=8"):
        case = reference.Case("rotary", mesh)
        state, subject = reference.place_state(case), watch(case)
        assert look(subject, state) is None
        leaves = jax.tree.leaves(state)
        program = jax.make_jaxpr(subject._hash)([leaves[i] for i in subject._leaf_indices])
        # Results of collectives: those with parameters about axes.
        collective = r":(\w+\[[\d,]*\])\S* = (?:all_gather|pmax|psum\w*)"
        exchanged.append(re.findall(collective, str(program)))
    assert exchanged[0] == exchanged[1] and len(exchanged[0]) == 2, exchanged


def test_of_two_copies_both_are_named():
    case = reference.Case("rotary", "dp=2")
    state = reference.place_state(case)
    kernel = state.params["head"] if "head" in state.params else state.params["embedding"]
    leaf = jax.tree.leaves(kernel)[0]
    bad = jax.tree.map(lambda x: flipped(x, 1) if x is leaf else x, state)
    corruption = look(watch(case), bad)
    assert corruption is not None and not corruption.certain
    assert sorted(corruption.devices) == [0, 1]


def test_without_replicas_nothing_is_checked():
    case = reference.Case("rotary", "tp=2")
    assert look(watch(case), reference.place_state(case)) is None


def test_checks_run_at_the_interval_and_if_forced():
    case = reference.Case("rotary", "dp=2")
    state, subject = reference.place_state(case), watch(case, sdc_check_interval_steps=3)
    begun = []
    for step in range(1, 8):
        subject.start(step, state, force=step == 5)
        if subject._pending is not None:
            begun.append(step)
        subject.result()
    assert begun == [3, 5, 6]
    off = watch(case, sdc_check_interval_steps=0)
    off.start(3, state, force=True)
    assert off._pending is None


def test_training_on_every_kind_of_mesh_keeps_replicas_equal():
    """Steps of the real program: replicated arrays must be equal on all devices."""
    for case in COMPILED:
        step, state = reference.step_of(case)
        batch = jax.device_put(reference.batch_of(case.model), step.batch_sharding)
        subject = watch(case)
        for number in range(1, 4):
            state, _ = step.train(state, batch, np.inf)
            assert look(subject, state, number) is None


def test_minority():
    assert minority([4, 4, 4]) == ([], True)
    assert minority([4, 9, 4]) == ([1], True)
    assert minority([4, 9]) == ([0, 1], False)
    assert minority([4, 9, 4, 9]) == ([0, 1, 2, 3], False)


JOB = tiny(
    "--mesh=dp=8",
    "--steps=12",
    "--checkpoint.save_interval_steps=4",
    "--eval.interval_steps=0",
    "--resilience.sdc_check_interval_steps=3",
)


def train(monkeypatch, run_dir, *flags, damage_at=0):
    from jaxdist import train
    from jaxdist.run.monitoring.monitor import Monitor

    damaged = flips_a_bit(Monitor.track_compiles, 6, damage_at, bit=30)
    monkeypatch.setattr(Monitor, "track_compiles", damaged)
    try:
        return train.main([*JOB, "--run-dir", str(run_dir), *flags])
    finally:
        monkeypatch.undo()


@pytest.mark.slow
def test_a_bit_flip_in_training_stops_the_run_or_rolls_it_back(tmp_path, monkeypatch):
    from jaxdist.run.resilience.sdc_check import CorruptState

    assert train(monkeypatch, tmp_path / "clean") == 0
    with refused("step 9", "device 6 ", "params/head", error=CorruptState) as stop:
        train(monkeypatch, tmp_path / "stop", damage_at=9)
    assert stop.value.exit_code == 85
    assert json.loads((tmp_path / "stop/summary.json").read_text())["exit_reason"] == "sdc"
    again = ["--resilience.sdc_policy=rollback"]
    assert train(monkeypatch, tmp_path / "back", *again, damage_at=7) == 0  # saved at 8
    text = (tmp_path / "back/metrics.jsonl").read_text()
    assert text.count('"event": "rollback"') == 1 and "device 6" in text
    assert losses(tmp_path / "back") == losses(tmp_path / "clean")
    assert '"sdc"' not in (tmp_path / "clean/metrics.jsonl").read_text()
