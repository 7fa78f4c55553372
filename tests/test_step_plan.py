"""The plan of a step: all commands print one digest, and no other code makes its decisions."""

import ast
import dataclasses
import json
import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import Case, layout_of, model_of, plan_of

from jaxdist import evaluate, generate, train
from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.step import TrainConfig
from jaxdist.core.step_plan import Device, StepSettings, plan_step
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import DecoderConfig
from jaxdist.plan import planner
from jaxdist.plan.estimate import memory_check
from jaxdist.plan.estimate import remat as estimate_remat
from jaxdist.plan.estimate.job import Job
from jaxdist.tools.audit import __main__ as audit

PACKAGE = Path(planner.__file__).parents[1]
SMALL = [
    "--model.d_model=32", "--model.num_heads=2", "--model.num_layers=1", "--model.mlp_dim=32",
    "--train.seq_len=32", "--train.global_batch_size=8", "--mesh=dp=8",
]  # fmt: skip


def digest_in(text: str) -> str:
    (digest,) = set(re.findall(r"step plan ([0-9a-f]{12})", text))
    return digest


def test_audit_prints_the_digest_of_training(tmp_path, capsys):
    flags = ["--train.steps=1", "--eval.final-max-batches=1", f"--run-dir={tmp_path / 'run'}"]
    assert train.main([*SMALL, *flags]) == 0
    digest = digest_in(capsys.readouterr().out)
    assert audit.main([*SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_plan"] == digest


def test_every_command_prints_the_digest_of_the_cost_based_remat(tmp_path, capsys, monkeypatch):
    """On CPU devices with the memory of H100s, for which another policy is fastest."""
    cluster = Cluster.of(GPUS["h100"], 8)
    monkeypatch.setattr(memory_check, "_cluster_of", lambda *_: (cluster, 72 * 2.0**30))
    monkeypatch.setattr(estimate_remat, "POLICIES", ("dots", "full"))
    run = str(tmp_path / "run")
    flags = ["--train.num-microbatches=1", "--train.steps=2", f"--run-dir={run}"]
    assert train.main([*SMALL, *flags, "--eval.final-max-batches=1"]) == 0
    digest = digest_in(capsys.readouterr().out)
    assert evaluate.main([run, "--mesh=dp=8", "--json", "--max-batches=1"]) == 0
    assert json.loads(capsys.readouterr().out)["step_plan"] == digest
    assert generate.main([run, "--mesh=dp=8", "--prompt=a", "--max-new-tokens=1"]) == 0
    assert digest_in(capsys.readouterr().err) == digest
    # The compiled step does not fit, so the run continues with another policy.
    needs = iter([73 * 2**30] * 2)  # read for the log, and to decide
    monkeypatch.setattr(memory_check, "executable_bytes", lambda _: next(needs, 2**30))
    larger = [flag.replace("num_layers=1", "num_layers=4") for flag in SMALL] + flags[:2]
    assert train.main([*larger, f"--run-dir={run}-again", "--eval.final-max-batches=1"]) == 0
    out = capsys.readouterr().out
    fallback = digest_in(out)
    assert "with dots did not fit" in out
    assert evaluate.main([f"{run}-again", "--mesh=dp=8", "--json", "--max-batches=1"]) == 0
    assert json.loads(capsys.readouterr().out)["step_plan"] == fallback
    assert evaluate.main([f"{run}-again", "--mesh=dp=4", "--json", "--max-batches=1"]) == 0
    assert json.loads(capsys.readouterr().out)["step_plan"] != fallback
    assert train.main([*larger, f"--replay={run}-again:2"]) == 0
    captured = capsys.readouterr()
    assert digest_in(captured.out + captured.err) == fallback
    assert audit.main([*SMALL, "--json"]) == 0  # of CPUs
    assert json.loads(capsys.readouterr().out)["step_plan"] != digest


@pytest.mark.parametrize("mesh", ["fsdp=8", "cp=2,tp=4", "pp=2,fsdp=4"])
def test_a_plan_of_gpus_has_the_digest_of_training_on_them(mesh):
    config = RunConfig(model=DecoderConfig(num_heads=8, num_kv_heads=8, d_model=512))
    spec, model = MeshSpec.parse(mesh), config.build_model()
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0",
        process_index=0,
    )  # fmt: skip
    there = SimpleNamespace(
        devices=np.full(tuple(spec.sizes.values()), device),
        axis_names=tuple(spec.sizes), shape=spec.sizes, size=8,
    )  # fmt: skip
    layout = config.layout(there, model)
    settings = StepSettings(config.train, config.precision, config.pipeline)
    packed = config.data.packs_documents
    plan = plan_step(model, layout, Device.of(layout), packed, settings)
    job = Job.of(config, spec, Cluster.of(GPUS["h100"], 8), model)
    assert job.plan.digest == plan.digest and plan.kernel == "cudnn"


def test_other_decisions_have_other_digests():
    model, case = model_of("rotary"), Case("rotary", "dp=2")
    layout = layout_of(case)
    plan = plan_of(model, layout)
    assert plan == plan_of(model, layout) and plan.digest == plan_of(model, layout).digest
    changes = [TrainConfig(remat="dots"), TrainConfig(loss_chunk_tokens=8)]
    others = {plan_of(model, layout, train).digest for train in changes}
    assert len(others | {plan.digest, plan_of(model, layout, packed=True).digest}) == 4
    texts = dataclasses.replace(plan, reasons={})
    assert texts.digest == plan.digest
    assert {"remat", "layers_per_body", "max_row_chunks", "loss_chunk", "dot", "formats"} <= set(
        plan.reasons
    )


def test_building_a_plan_is_quick_and_traces_nothing(monkeypatch):
    """A mesh search builds thousands."""
    model, layout = model_of("rotary"), layout_of(Case("rotary", "fsdp=2,tp=2"))
    monkeypatch.setattr(jax, "eval_shape", None)
    device, settings = Device("gpu", "9.0", "h100", 1, True), StepSettings(TrainConfig())
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        plan_step(model, layout, device, True, settings)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 5e-3  # 0.5 ms on an idle machine


DECIDED = {
    "platform", "device_kind", "compute_capability", "attention", "context_attention", "remat",
    "pipeline", "compute_dtype", "matmul_dtype", "reduce_dtype", "loss_chunk_tokens",
}  # fmt: skip
"""Facts of devices and settings that determine the plan of a step."""

EXCEPTIONS = {
    "core.step_plan": "the builder",
    "core.precision": "settings: resolves auto for the builder",
    "core.step.config": "settings: checks names",
    "core.matmul.block_scaled": "a record of its own, made for one format",
    "core.mesh_choice": "rejects a mesh before there is a layout to plan for",
    "core.trials": "names the device in the key of a verdict",
    "models.configs": "settings: rejects combinations, and names the kernel in AttentionCall",
    "models.decoder": "passes the kernel of its call on; spells a split as XLA's backend prefers",
    "models.layers": "keeps angles that XLA:CPU would compute again",
    "models.example": "a submodule named attention",
    "run.audit": "makes a small copy of the run, as deep as its stages need",
    "run.setup": "hands settings to the builder, and rejects formats that a device lacks",
    "run.start_checks": "names the GPU on which an operation is wrong",
    "run.startup": "reports the estimates of remat policies",
    "run.session": "names the device in a key",
    "run.monitoring.monitor": "reports the device",
    "run.monitoring.environment": "reports the device, and asks the driver if there is one",
}
"""Module -> why it may read them outside of the plan."""


def plan_inputs_read(tree: ast.AST) -> set[str]:
    """Return the fields of `DECIDED` that a module reads from anything but a plan."""
    fields_read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DECIDED:
            owner = ast.unparse(node.value)
            if owner.rpartition(".")[2] != "plan" and not owner.startswith("self.plan"):
                fields_read.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            fields_read |= {a.value for a in node.args if isinstance(a, ast.Constant)} & DECIDED
    return fields_read


def test_only_the_builder_reads_the_inputs_of_the_plan():
    fields_by_module = {}
    for folder in ("core", "models", "run"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            if fields := plan_inputs_read(ast.parse(path.read_text())):
                fields_by_module[name] = fields
    assert {
        name: fields for name, fields in fields_by_module.items() if name not in EXCEPTIONS
    } == {}
    assert fields_by_module.keys() == EXCEPTIONS.keys()  # unused exceptions must be removed
