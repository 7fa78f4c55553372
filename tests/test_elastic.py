"""Runs on fewer devices than their mesh names: mesh, microbatches, and equal losses."""

import dataclasses
import itertools

import jax
import pytest
from refusals import missing, refused

from jaxdist.config import RunConfig, fit_devices, legal_sizes, read_run
from jaxdist.config.elastic import shrink_reason
from jaxdist.core.mesh import MeshSpec, factorisations, shrink, shrunk_sizes
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.models.configs import DecoderConfig
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError

MODEL = DecoderConfig(d_model=32, num_layers=4, num_heads=4, num_kv_heads=4, mlp_dim=64)
DIVISIBLE = DecoderConfig(d_model=96, num_layers=12, num_heads=12, num_kv_heads=12, mlp_dim=96)


def a_run(
    mesh: str, batch: int = 24, zero: int = 0, microbatches: int = 1, model=MODEL, **fields
) -> RunConfig:
    return RunConfig(
        model=model,
        mesh=MeshConfig(shape=mesh, elastic=True, zero=zero),
        train=TrainConfig(global_batch_size=batch, num_microbatches=microbatches, seq_len=32),
        **fields,
    )


def best_by_search(requested: MeshSpec, num_devices: int, batch: int, zero: int) -> set[tuple]:
    """Return (data, fsdp) of every best mesh by the rules in the README."""
    candidates = []
    fixed = requested["pipeline"] * requested["context"] * requested["tensor"]
    for data, fsdp in itertools.product(range(1, num_devices + 1), repeat=2):
        if data * fsdp * fixed > num_devices:
            continue
        splits = fsdp * requested["context"] * (data if zero else 1)
        if batch % (data * fsdp) or DIVISIBLE.d_model % splits:
            continue
        # Most devices; then fsdp as requested; then less state on a device rather than more.
        closeness = -abs(fsdp - requested["fsdp"])
        candidates.append(
            (
                (data * fsdp, fsdp == requested["fsdp"], fsdp > requested["fsdp"], closeness),
                data,
                fsdp,
            )
        )
    best = max((value for value, *_ in candidates), default=None)
    return {(data, fsdp) for value, data, fsdp in candidates if value == best}


@pytest.mark.parametrize("batch", [24, 40])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("total", [2, 4, 8, 12, 16])
def test_the_shrunk_mesh_equals_exhaustive_search(total, zero, batch):
    compared = 0
    for requested in factorisations(total):
        config = a_run(str(requested), batch, zero, model=DIVISIBLE)
        try:
            config.check_mesh(requested)
        except ConfigError:
            continue
        for num_devices in range(1, total):
            expected = best_by_search(requested, num_devices, batch, zero)
            try:
                fitted = fit_devices(config, num_devices)
            except ConfigError:
                assert not expected, (requested, num_devices)
                continue
            spec = MeshSpec.parse(fitted.mesh.shape)
            assert {(spec["data"], spec["fsdp"])} == expected, (requested, num_devices)
            for axis in ("pipeline", "context", "tensor"):
                assert spec[axis] == requested[axis]
            assert fitted.mesh_problems(spec) == []
            compared += 1
    assert compared


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,fsdp=4", "fsdp=8", "dp=4,pp=2", "dp=4,tp=2"])
@pytest.mark.parametrize("eval_batch", [0, 48])
def test_no_device_takes_more_rows_at_once_and_the_batch_size_is_kept(
    mesh, microbatches, eval_batch
):
    config = a_run(mesh, 48, microbatches=microbatches)
    config = dataclasses.replace(
        config, eval=EvalConfig(global_batch_size=eval_batch, max_batches=5)
    )
    requested = MeshSpec.parse(mesh)
    config.check_mesh(requested)
    before = rows_at_once(config, requested)
    for num_devices in range(requested["pipeline"] * requested["tensor"], requested.num_devices):
        fitted = fit_devices(config, num_devices)
        spec = MeshSpec.parse(fitted.mesh.shape)
        count = 48 // spec.num_replicas // rows_at_once(fitted, spec)
        assert fitted.train.global_batch_size == 48
        assert rows_at_once(fitted, spec) <= before
        # As few as that: one less would be too large or uneven.
        rows = 48 // spec.num_replicas
        assert all(rows % n or rows // n > before for n in range(1, count))
        evaluation = fitted.eval
        assert evaluation.global_batch_size % spec.num_replicas == 0
        assert evaluation.global_batch_size // spec.num_replicas <= 48 // requested.num_replicas
        assert evaluation.global_batch_size * evaluation.max_batches == 48 * 5
        assert evaluation.final_max_batches == 0


def rows_at_once(config: RunConfig, spec: MeshSpec) -> int:
    rows = config.train.global_batch_size // spec.num_replicas
    if spec["pipeline"] == 1:
        return rows // config.train.num_microbatches
    schedule = config.pipeline.make_schedule(
        num_stages=spec["pipeline"], rows=rows, num_microbatches=config.train.num_microbatches
    )
    return rows // schedule.num_microbatches


def test_microbatches_of_the_pipeline_that_were_chosen_for_few_rows_grow_too():
    config = a_run("dp=4,pp=2", 32, microbatches=0)  # 8 rows per replica: 8 of one row
    fitted = fit_devices(config, 4)
    assert fitted.mesh.shape == "pp=2,dp=2" and fitted.train.num_microbatches == 16
    named = a_run("dp=4,pp=2", 32, microbatches=4)
    assert fit_devices(named, 2).train.num_microbatches == 16


def test_an_evaluation_batch_that_does_not_divide_is_not_legal():
    config = a_run("dp=4", 48, eval=EvalConfig(global_batch_size=20))
    assert fit_devices(config, 3).mesh.shape == "dp=2"
    assert legal_sizes(config) == [1, 2, 4]


def test_the_reason_contains_the_numbers():
    config = a_run("fsdp=8", 32)
    reason = shrink_reason(config, fit_devices(config, 7), 7)
    facts = "7 of the 8", "fsdp=8", "2 microbatches of 4", "1 of 4", "batch 32", "3 idle"
    assert missing(reason, *facts) == []


def test_nothing_changes_if_no_device_is_missing():
    config = a_run("dp=4")
    assert fit_devices(config, 4) is config and fit_devices(config, 5) is config
    rigid = dataclasses.replace(config, mesh=MeshConfig(shape="dp=4"))
    assert fit_devices(rigid, 2) is rigid


def test_legal_sizes_leave_no_device_idle():
    assert legal_sizes(a_run("dp=8", 24)) == [1, 2, 3, 4, 6, 8]
    assert legal_sizes(a_run("dp=4,tp=2", 24)) == [2, 4, 6, 8]
    config = a_run("dp=8", 24)
    for num_devices in range(1, 9):
        used = MeshSpec.parse(fit_devices(config, num_devices).mesh.shape).num_devices
        assert (used == num_devices) == (num_devices in legal_sizes(config))


def test_no_legal_mesh_gives_none():
    requested = MeshSpec(data=4, tensor=2)
    assert shrink(requested, 1, lambda _: True) is None
    assert shrink(requested, 7, lambda _: False) is None
    assert shrunk_sizes(requested, lambda _: False) == []


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ([], ["mesh.elastic", "mesh.shape='auto'"]),
        (["--mesh=dp=-1"], ["mesh.elastic", "mesh.shape='dp=-1'"]),
        (["--mesh=dp=5"], ["global_batch_size=16", "multiple of 5"]),
        (["--mesh=tp=4", "--simulate=2"], ["mesh tp=4", "2 of its 4 devices", "Wait for 4"]),
    ],
)
def test_settings_that_cannot_shrink_are_rejected(flags, facts):
    with refused(*facts):
        read_run(["--mesh.elastic=true", *flags], command="jaxdist.train")


def test_fewer_simulated_devices_are_accepted_for_an_elastic_mesh():
    flags = ["--mesh=dp=4", "--simulate=2"]
    assert read_run([*flags, "--mesh.elastic=true"], command="x").mesh.shape == "dp=4"
    with refused("dp=4", "4 devices", "2 are available"):
        read_run(flags, command="x")


def test_one_process_leaves_devices_idle():
    parts = assemble(a_run("dp=8", 32), jax.devices()[:7])
    assert parts.devices == jax.devices()[:4]


def test_the_number_of_processes_to_start_is_reported(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Device:
        process_index: int
        platform: str = "cpu"

    config = a_run("dp=8", 32)
    devices = [Device(i) for i in range(7)]
    with refused("4 of the 7 devices of 7 ", "Start 4"):
        assemble(config, devices)
    devices = [Device(i // 2) for i in range(6)]
    with refused("4 of the 6 devices of 3 ", "Start 2"):
        assemble(config, devices)
