"""Training on GPUs reports the estimate, refuses runs that cannot fit, and compares.

There is no GPU here: devices are described.
"""

import dataclasses
import functools
import json
import math
import types

import jax
import optax
import pytest
from refusals import missing, refused

from jaxdist.config import RunConfig
from jaxdist.core.attention.kernel_check import KernelCheck
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import DecoderConfig
from jaxdist.models.weights import num_params
from jaxdist.optim import OptimConfig
from jaxdist.plan.estimate import memory_check
from jaxdist.plan.estimate.memory_check import Budget, executable_bytes, needs_of
from jaxdist.plan.estimate.remat import POLICIES, policies_of
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.run import setup
from jaxdist.run.program import Program
from jaxdist.run.setup import assemble
from jaxdist.run.startup import with_objects
from jaxdist.runtime import backend
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.settings import ConfigError

GIB = 2**30
LLAMA = DecoderConfig(
    vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_dim=14336
)


def gpus(count: int, limit_gib: float, kind: str = "NVIDIA H100 80GB HBM3") -> list:
    return [
        types.SimpleNamespace(
            platform="gpu",
            device_kind=kind,
            compute_capability="9.0",
            process_index=0,
            memory_stats=lambda: {"bytes_limit": int(limit_gib * GIB)},
        )
        for _ in range(count)
    ]


def stats(arguments: float, output: float = 0, alias: float = 0) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        argument_size_in_bytes=arguments,
        output_size_in_bytes=output,
        alias_size_in_bytes=alias,
        temp_size_in_bytes=0,
    )


def run(**train) -> RunConfig:
    settings = {"global_batch_size": 64, "seq_len": 4096, "remat": "none", **train}
    return RunConfig(model=LLAMA, train=TrainConfig(**settings))


@pytest.mark.parametrize(("hosts", "num_nodes"), [("aaaaaaaabbbbbbbb", 2), ("abcdefgh" * 2, 8)])
def test_nodes_are_hosts_and_not_processes(hosts, num_nodes):
    """The launcher starts a process for each GPU, so processes do not indicate the links."""
    devices = gpus(16, 72)
    for process, device in enumerate(devices):
        device.process_index = process
    budget = Budget.of(run(), MeshSpec(fsdp=16), devices, None, dict(enumerate(hosts)))
    cluster = budget.job.cluster
    assert (cluster.num_nodes, cluster.gpus_per_node) == (num_nodes, 16 // num_nodes)


def test_own_optimizer_is_counted_with_its_state(monkeypatch):
    """The reference are the estimates of the same rules as settings."""
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=8)
    monkeypatch.setattr(memory_check, "_cluster_of", lambda *_: (cluster, 72 * 2.0**30))
    moments = lambda parts: parts.budget().memory.state["optimizer moments"]
    for name, rule in (("adamw", optax.adam(1.0)), ("sgd", optax.trace(0.9))):
        config = RunConfig(mesh=MeshConfig(shape="dp=2,fsdp=2,tp=2"))
        parts = assemble(config, jax.devices())
        own = with_objects(parts, Program(optimizer=rule))
        optim = OptimConfig(optimizer=name)
        expected = assemble(dataclasses.replace(config, optim=optim), jax.devices())
        assert moments(own) == pytest.approx(moments(expected), rel=1e-3)
    plain = with_objects(parts, Program(optimizer=optax.scale(-1.0)))
    assert moments(plain) == 0 < moments(parts)
    assert plain.budget().replanned(False, ()).memory.state["optimizer moments"] == 0


def test_the_change_that_is_named_makes_it_fit():
    config = run()
    budget = Budget.of(config, MeshSpec(fsdp=8), gpus(8, 72), None)
    with pytest.raises(ConfigError, match=r"num-microbatches (\d+)") as error:
        budget.check()
    count = int(str(error.value).split("num-microbatches ")[1].split(":")[0])
    train = dataclasses.replace(config.train, num_microbatches=count)
    changed = dataclasses.replace(config, train=train)
    fixed = Budget.of(changed, MeshSpec(fsdp=8), gpus(8, 72), None)
    fixed.check()
    fewer = dataclasses.replace(train, num_microbatches=count // 2)
    tighter = dataclasses.replace(config, train=fewer)
    with pytest.raises(ConfigError):
        Budget.of(tighter, MeshSpec(fsdp=8), gpus(8, 72), None).check()


def test_another_mesh_is_named_if_settings_do_not_help():
    budget = Budget.of(run(remat="full"), MeshSpec(data=8), gpus(8, 72), None)
    with refused("--mesh fsdp="):
        budget.check()


def test_a_model_too_large_for_every_mesh_is_referred_to_the_planner():
    budget = Budget.of(run(remat="full"), MeshSpec(fsdp=2), gpus(2, 14, "NVIDIA L4"), None)
    with refused("`jaxdist plan`"):
        budget.check()


def test_nothing_is_refused_within_the_error_of_the_estimate():
    config, spec = run(remat="full", num_microbatches=8), MeshSpec(fsdp=8)
    needed = Budget.of(config, spec, gpus(8, 80), None).memory.total_bytes / GIB
    Budget.of(config, spec, gpus(8, needed * 0.96), None).check()
    with pytest.raises(ConfigError):
        Budget.of(config, spec, gpus(8, needed * 0.94), None).check()


def test_the_start_reports_the_estimate_and_compares_the_compiled_step():
    budget = Budget.of(run(remat="full"), MeshSpec(fsdp=8), gpus(8, 72), None)
    assert "72.0 GiB" in budget.line()
    total = budget.memory.total_bytes
    assert budget.compare(stats(total * 1.04)) == "" == budget.compare(stats(total * 0.96))
    assert "(-9 %)" in budget.compare(stats(total * 1.1))
    roomy = dataclasses.replace(budget, limit_bytes=total * 11)  # 0.1 of 11 is negligible
    assert roomy.compare(stats(total * 1.1)) == ""


def test_a_compiled_step_beyond_the_limit_is_refused_with_a_fix():
    budget = Budget.of(run(remat="full"), MeshSpec(fsdp=8), gpus(8, 72), None)
    budget.fit(lambda _: stats(72 * GIB))
    with refused("80.0 GiB", "72.0 GiB", "Add --"):
        budget.fit(lambda _: stats(80 * GIB))


def test_donated_arguments_count_once():
    assert executable_bytes(stats(10, output=6, alias=5)) == 11


def test_simulated_devices_are_not_checked():
    import jax

    assert Budget.of(run(), MeshSpec(data=8), jax.devices(), None) is None
    assert needs_of(run(), jax.devices(), None) is None


def test_the_default_mesh_follows_the_estimate():
    small = RunConfig(train=TrainConfig(global_batch_size=64))
    needs = needs_of(small, gpus(8, 72), None)
    spec, reason = small.choose_mesh(8, needs=needs)
    assert spec == MeshSpec(data=8) and "data parallelism" in reason
    large = run(remat="full", num_microbatches=8)
    spec, reason = large.choose_mesh(8, needs=needs_of(large, gpus(8, 72), None))
    assert spec == MeshSpec(fsdp=8) and missing(reason, "a replica", "GiB") == []


def test_host_memory_is_checked_for_each_process_and_host(monkeypatch):
    """8B on 8 GPUs has 60 GiB of moments in all."""
    config, spec = run(offload_optimizer="host", remat="full"), MeshSpec(fsdp=8)
    budget = Budget.of(config, spec, gpus(8, 72), None)
    moments, pinned = (x / GIB for x in budget.memory.process_bytes(8))
    assert budget.own_gpus == 8 and 59 < moments < 61 and pinned == 0
    monkeypatch.setattr(memory_check, "host_memory_bytes", lambda: 121 * GIB)
    budget.check()
    one_each = gpus(8, 72)
    for process, device in enumerate(one_each):
        device.process_index = process
    hosts = dict.fromkeys(range(8), "a")
    Budget.of(config, spec, one_each, None, hosts).check()
    copies = Budget.of(config, MeshSpec(data=8), gpus(8, 200), None)
    assert copies.memory.process_bytes(8) == budget.memory.process_bytes(8)  # copies are kept once
    copies.check()
    monkeypatch.setattr(memory_check, "host_memory_bytes", lambda: 119 * GIB)
    for devices in (gpus(8, 72), one_each):
        with refused("119.0 GiB", "--train.offload-optimizer=none"):
            Budget.of(config, spec, devices, None, hosts).check()
    # Activations are pinned, and XLA's own limit is 64 GiB a process.
    budget = Budget.of(run(remat="offload:layer_input"), spec, gpus(8, 72), None)
    pinned = round(budget.memory.process_bytes(8)[1] / GIB) - 1
    monkeypatch.setenv(backend.PINNED_LIMIT_GIB, str(pinned))
    with refused("8 GPUs", backend.PINNED_LIMIT_GIB, f"{pinned}.0 GiB", "--train.remat=full"):
        budget.check()
    monkeypatch.setenv(backend.PINNED_LIMIT_GIB, str(pinned + 1))
    budget.check()


def test_xla_may_pin_the_memory_of_the_host(monkeypatch):
    monkeypatch.delenv(backend.PINNED_LIMIT_GIB, raising=False)
    assert backend.pinned_limit_bytes() == math.inf  # a plan on another machine
    monkeypatch.setenv(backend.MEMORY_FRACTION, "0.5")
    backend.reserve_memory()
    limit = backend.pinned_limit_bytes()
    assert backend.host_memory_bytes() - GIB < limit <= backend.host_memory_bytes()
    monkeypatch.setenv(backend.PINNED_LIMIT_GIB, "7")
    backend.reserve_memory()
    assert backend.pinned_limit_bytes() == 7 * GIB


def test_an_unknown_gpu_warns_unless_its_peak_is_set(caplog):
    devices = gpus(8, 72, "NVIDIA X1")
    spec, config = MeshSpec(fsdp=8), run()
    unknown = Budget.of(config, spec, devices, None)
    assert missing(caplog.text, "'NVIDIA X1'", "H100", "--monitoring.peak-tflops") == []
    caplog.clear()
    monitoring = dataclasses.replace(config.monitoring, peak_tflops=1978.8)
    set_peak = Budget.of(dataclasses.replace(config, monitoring=monitoring), spec, devices, None)
    Budget.of(config, spec, gpus(8, 72), None)
    assert caplog.text == ""
    ratio = estimate_time(unknown.job).seconds / estimate_time(set_peak.job).seconds
    assert 1.3 < ratio < 2.0


SMALL = (
    *("--steps=2", "--model.d_model=32", "--model.num_layers=2", "--model.num_heads=4"),
    *("--model.mlp_dim=64", "--train.seq_len=32", "--train.global_batch_size=8"),
    *("--eval.max_batches=1", "--eval.final_max_batches=1", "--optim.warmup_steps=0"),
)


def test_override_memory_starts_anyway(monkeypatch, tmp_path):
    """Training calls `budget.check()` unless `--override=memory` is set."""
    from jaxdist import train

    class Refusing:
        remat = None
        job = types.SimpleNamespace(remat=None)

        def replanned(self, packed, checks):
            return self

        def check(self):
            raise ConfigError("memory: refused")

        def line(self):
            return "memory estimate: none"

        def compare(self, stats):
            return ""

    monkeypatch.setattr(memory_check.Budget, "of", classmethod(lambda *args, **_: Refusing()))
    flags = [*SMALL, "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match="memory: refused"):
        train.main(flags)
    assert not (tmp_path / "run").exists()  # before anything is written or compiled
    assert train.main([*flags, "--override=memory"]) == 0


def test_a_rejected_kernel_reopens_the_choice_of_remat():
    draft = Budget.of(run(remat="auto"), MeshSpec(fsdp=16), gpus(16, 72), None)
    rejected = KernelCheck(errors={}, rejection_reason="differs")
    by_cudnn, by_blocks = (draft.replanned(True, check) for check in ((), (rejected,)))
    assert (by_cudnn.job.attention, by_blocks.job.attention) == ("cudnn", "blockwise")
    for policy in policies_of(draft.job):
        assert by_blocks.remat.seconds[policy] > by_cudnn.remat.seconds[policy]
    assert by_blocks.job.plan.remat == by_blocks.remat.job.remat != "auto"
    assert draft.replanned(False, ()).remat.seconds == draft.remat.seconds


@pytest.mark.slow
def test_training_compares_with_its_executable_and_compiles_it_once(monkeypatch, tmp_path, capsys):
    """On CPU devices that pose as GPUs, memory is that of the executable."""
    from jaxdist import train

    seen, policies = [], []
    of, build = memory_check.Budget.of, setup.make_step

    def judged(config, spec, devices, *rest, limit_gib=72.0, **options):
        return of(config, spec, gpus(len(devices), limit_gib), *rest, **options)

    def compare(self, stats):
        seen.append(executable_bytes(stats))
        return f"compared: {seen[-1]}"

    def built(*arguments, **options):
        policies.append(arguments[4].remat)
        return build(*arguments, **options)

    monkeypatch.setattr(setup, "make_step", built)
    monkeypatch.setattr(memory_check.Budget, "of", judged)
    monkeypatch.setattr(memory_check.Budget, "compare", compare)
    assert train.main([*SMALL, "--run-dir", str(tmp_path / "run")]) == 0
    (needed,) = seen  # once, and not after each step
    assert policies and set(policies) <= set(POLICIES)  # one step, with the selected policy
    assert f"compared: {needed}" in capsys.readouterr().out
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    events = [record["event"] for record in records if record["kind"] == "event"]
    assert events.count("compile") == 1 and "recompile" not in events
    state_bytes = needed_state(tmp_path / "run")
    assert state_bytes < needed < 100 * state_bytes

    too_little = functools.partial(judged, limit_gib=needed / 2 / GIB)
    monkeypatch.setattr(memory_check.Budget, "of", too_little)
    monkeypatch.setattr(memory_check.Budget, "check", lambda self: None)  # estimate unused here
    same = ["--train.remat", policies[-1]]  # with less memory, auto would choose another
    with refused("compiled step", in_bytes(needed), "--override=memory"):
        train.main([*SMALL, *same, "--run-dir", str(tmp_path / "refused")])
    forced = ["--override=memory", "--run-dir", str(tmp_path / "forced")]
    assert train.main([*SMALL, *forced]) == 0


def needed_state(run_dir) -> int:
    from jaxdist.config import stored_run

    return 12 * num_params(stored_run(run_dir / "config.toml").build_model())
