"""The check by compilation: one real compilation without a GPU, and every way in which it fails."""

import dataclasses
import itertools
import json
import re
import sys
import textwrap
import time

import jax
import pytest
from roofline import model_times

from jaxdist.config import RunConfig, read_run
from jaxdist.core.attention.cudnn import DOCUMENTS
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.data import DataConfig
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import DecoderConfig, build
from jaxdist.models.weights import num_params
from jaxdist.plan.compiled import check
from jaxdist.plan.compiled.check import CompiledStep, NotCompiled, compile_step
from jaxdist.plan.compiled.hlo import HloInstruction, parse
from jaxdist.plan.estimate.attention import cudnn_scratch
from jaxdist.plan.estimate.remat import WRONG_OFFLOAD
from jaxdist.run.setup import assemble
from jaxdist.tools import compiler

MODEL = DecoderConfig(d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=256)
TRAIN = TrainConfig(global_batch_size=16, seq_len=128, num_microbatches=4, remat="full")
CONFIG = RunConfig(model=MODEL, train=TRAIN, simulate=8)
NODES = Cluster(gpu=GPUS["h100"], num_nodes=2, gpus_per_node=4)
MESH = MeshSpec(pipeline=2, data=2, tensor=2)


needs_compiler = pytest.mark.skipif(
    check.missing_compiler() is not None,
    reason="the extra `plan` (XLA:GPU compiler) is not installed",
)


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    outcome = compile_step(CONFIG, MESH, NODES, timeout_s=300)
    assert isinstance(outcome, CompiledStep), outcome
    return outcome


@needs_compiler
def test_a_pipeline_step_compiles_for_absent_gpus(step):
    assert step.attention == "cudnn"
    state = 3 * 4 * num_params(build(MODEL, seq_len=1)) // (MESH["pipeline"] * MESH["tensor"])
    # Apart from the layers, every stage contains the embedding and the head.
    assert state < step.memory.argument_bytes < 2 * state
    assert step.memory.temporary_bytes > 0
    assert step.memory.host_bytes == 0
    # B=1: two rows go in two groups; h=2 of 4 heads, T=128, d=32, and key heads are shared.
    rows = 4 * 1 * 2 * 128
    assert step.memory.workspace_bytes == rows * (32 + 1) + 256 + rows * 32
    assert step.memory.total_bytes > step.memory.argument_bytes + step.memory.temporary_bytes
    sizes = [buffer.bytes for buffer in step.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= step.memory.temporary_bytes


@needs_compiler
def test_permutes_of_the_gpu_program_match_the_schedule_and_are_asynchronous(step):
    permutes = [c for c in step.collectives if c.kind == "collective-permute"]
    assert {c.axes for c in permutes} == {("pipeline",)}
    assert all(c.overlapped and not c.in_branch for c in permutes)
    assert {c.nodes for c in permutes} == {2}
    # M + p - 1 ticks of forwards, and as many of backwards.
    m, p = 4, 2
    microbatch = 2 * 64 * 128 * 2  # rows, positions, width, bfloat16
    assert sum(c.count * c.bytes for c in permutes) == 2 * (m + p - 1) * microbatch
    ticks = m + p - 1
    ends = {"embed": m / ticks, "head": m / ticks, "embed_gradient": m / ticks}
    assert step.branch_shares == pytest.approx(ends)


@needs_compiler
def test_no_loop_of_a_pipeline_copies_a_large_array():
    """Such copies take milliseconds in every tick: of residuals, or of sums of gradients."""
    data = ["--data.sources", "stdlib", "--data.tokenizer", "bytes"]
    config = read_run(["--config", "pipeline_64gpu", *data], command="train")
    spec = MeshSpec.parse(config.mesh.shape)
    outcome = compile_step(config, spec, Cluster.of(GPUS["h100"], 64), timeout_s=600)
    assert isinstance(outcome, CompiledStep), outcome
    module = parse(outcome.program)
    pending = [
        loop for loop in itertools.chain(*module.computations.values()) if loop.opcode == "while"
    ]
    inside: dict[str, HloInstruction] = {}
    while pending:
        instruction = pending.pop()
        for name in module.called(instruction) if instruction.opcode != "fusion" else ():
            pending += [i for i in module.computations[name] if i.name not in inside]
            inside |= {i.name: i for i in module.computations[name]}
    assert len([i for i in inside.values() if "fmha" in i.attributes]) >= 6  # the layers are inside
    sizes = {
        i.name: sum(s.num_bytes for s in i.shapes) for i in inside.values() if "copy" in i.opcode
    }
    assert {name: size for name, size in sizes.items() if size > 100 * 2**20} == {}


@needs_compiler
def test_a_stage_gathers_activations_as_often_as_its_layers_run(step):
    gathers = [c for c in step.collectives if (c.kind, c.axes) == ("all-gather", ("tensor",))]
    assert all("/pipeline_" in c.op_name for c in gathers if c.in_branch)
    # XLA combines some gathers, so bytes are counted: of 2 rows, 128 positions, width 128.
    one = 2 * 128 * 128 * 2
    in_layers = sum(c.count * c.bytes for c in gathers if not c.in_branch and c.bytes >= one // 2)
    # In each of 2 layers 2 in the forward, again in the backward that recomputes it, and 2 for
    # gradients, in 4 + 2 - 1 ticks; embedding and head are branches.
    assert in_layers == one * 2 * (2 + 2 + 2) * 5


@needs_compiler
def test_every_axis_has_the_expected_traffic(step):
    sent = step.wire_bytes()
    assert ("reduce-scatter", "tensor") in sent and ("all-gather", "tensor") in sent
    assert ("all-reduce", "data") in sent
    assert not any("data" in axes and kind == "all-gather" for kind, axes in sent)
    assert all(c.nodes == 1 for c in step.collectives if c.axes == ("tensor",))


@needs_compiler
def test_the_compiler_is_rejected_if_its_version_is_listed():
    """jax 0.10.2 and 0.11.0 read forward; others must be right, or belong on the list."""
    train = dataclasses.replace(CONFIG.train, num_microbatches=1, remat="offload:layer_input")
    model = dataclasses.replace(CONFIG.model, d_model=1024)
    config = dataclasses.replace(CONFIG, model=model, train=train)
    outcome = compile_step(config, MeshSpec(fsdp=8), NODES, timeout_s=300)
    assert isinstance(outcome, CompiledStep), outcome
    # The inputs of 4 layers: 2 rows of 128 positions on each of 8 devices.
    assert outcome.memory.host_bytes == 4 * 2 * 128 * 1024 * 2
    assert bool(outcome.offload) == (jax.__version__ in WRONG_OFFLOAD)


def compile_for_two(config: RunConfig, spec: MeshSpec, gpu: str = "h100"):
    cluster = Cluster.of(GPUS[gpu], 2)
    outcome = compile_step(config, spec, cluster, timeout_s=300)
    assert isinstance(outcome, CompiledStep), outcome
    return outcome, model_times(outcome.program, spec.sizes, cluster)


@needs_compiler
@pytest.mark.parametrize("remat, forwards", [("dots", 1), ("names:attention", 1), ("full", 2)])
def test_attention_runs_forward_once_if_its_result_is_kept(remat, forwards):
    train = dataclasses.replace(TRAIN, num_microbatches=1, remat=remat)
    config = dataclasses.replace(CONFIG, train=train, simulate=2)
    _, times = compile_for_two(config, MeshSpec(data=2))
    assert times.calls["attention"] == (forwards + 1) * MODEL.num_layers
    # All products of the step are counted: those without recomputation, and more under full.
    useful = build(MODEL, seq_len=128).flops_per_token["causal"] * 16 * 128 / 2
    assert times.flops == pytest.approx(useful, rel=0.05) or remat != "dots"
    assert times.seconds >= sum(times.classes.values()) * 0.999


@needs_compiler
def test_packed_documents_are_multiplied_by_cudnn_alone():
    model = dataclasses.replace(MODEL, head_dim=256)
    train = dataclasses.replace(TRAIN, num_microbatches=1, remat="dots", seq_len=2048)
    data = DataConfig(packing="documents")
    config = RunConfig(model=model, train=train, data=data, simulate=2)
    outcome, times = compile_for_two(config, MeshSpec(data=2))
    # Forward once and backward, in each of the layers.
    assert times.calls["attention"] == 2 * model.num_layers
    assert not any("2048,2048" in shape for buffer in outcome.buffers for shape in buffer.shapes)
    # 8 rows, 4 heads, and key heads are shared.
    one = cudnn_scratch(8 * 4 * 2048, 256, shares_keys=True, gpu=GPUS["h100"])
    assert outcome.memory.workspace_bytes == pytest.approx(DOCUMENTS * one, rel=1e-3)
    # No products but those of weights and cuDNN's, whose backward computes the scores again.
    useful = build(model, seq_len=2048).flops_per_token["causal"] * 16 * 2048 / 2
    again = model.num_layers * 2 * 8 * 4 * 2048**2 * 256 / 2
    assert times.flops == pytest.approx(useful + again, rel=0.02)


@needs_compiler
def test_every_product_of_a_middle_layer_is_in_8_bits_and_so_are_its_weights():
    train = dataclasses.replace(TRAIN, num_microbatches=1, remat="dots")
    precision = PrecisionConfig(matmul_dtype="fp8")
    config = dataclasses.replace(CONFIG, train=train, precision=precision, simulate=2)
    outcome, times = compile_for_two(config, MeshSpec(fsdp=2))
    middle = MODEL.num_layers - 2
    # Four products of weights, forward once and twice backward.
    assert times.calls["fp8 products"] == 12 * middle
    weights = 128 * (4 * 32 + 2 * 2 * 32 + 4 * 32 + 3 * 256)
    outside = 2 * MODEL.vocab_size * 128  # embedding and head
    gathered = sum(outcome.runs(c) * c.bytes for c in outcome.collectives if c.kind == "all-gather")
    # The middle layers in 8 bits, both ends in 16 bits, each forward and backward.
    assert gathered == 2 * middle * weights + 2 * (2 * 2 * weights + outside)


@needs_compiler
def test_every_product_of_a_middle_layer_is_block_scaled_on_blackwell():
    train = dataclasses.replace(TRAIN, num_microbatches=1, remat="dots")
    precision = PrecisionConfig(matmul_dtype="nvfp4")
    model = dataclasses.replace(MODEL, num_layers=3)
    config = dataclasses.replace(CONFIG, model=model, train=train, precision=precision, simulate=2)
    _, times = compile_for_two(config, MeshSpec(fsdp=2), "b200")
    # Four products of weights, forward once in nvfp4, backward twice in mxfp8.
    assert times.calls["fp4 products"] == 4
    assert times.calls["fp8 products"] == 8


@needs_compiler
def test_an_illegal_mesh_is_refused_with_its_reason():
    outcome = compile_step(CONFIG, MeshSpec(tensor=8), NODES, timeout_s=300)
    assert isinstance(outcome, NotCompiled)
    assert outcome.kind == "refused"
    assert "num_heads" in outcome.reason or "heads" in outcome.reason


def test_without_the_compiler_reason_and_install_command_are_returned(monkeypatch):
    monkeypatch.setattr(check, "_PACKAGES", ("no-such-plugin", "nor-this"))
    outcome = compile_step(CONFIG, MESH, NODES)
    assert isinstance(outcome, NotCompiled)
    assert outcome.kind == "missing"
    assert "-e '.[plan]'" in outcome.fix


def test_a_compiler_of_another_version_is_rejected(monkeypatch):
    versions = {"jax": "0.10.2", "jax-cuda13-plugin": "0.9.1", "jax-cuda13-pjrt": "0.9.1"}
    monkeypatch.setattr(check.importlib.metadata, "version", versions.__getitem__)
    missing = check.missing_compiler()
    assert missing is not None
    assert "0.9.1" in missing.reason
    assert "jax-cuda13-pjrt==0.10.2" in missing.fix


def run_compiler(code: str, timeout_s: float = 60.0) -> NotCompiled:
    """Return the outcome of a process that runs `code` instead of the compiler."""
    answer = check._ask([sys.executable, "-c", textwrap.dedent(code)], {}, timeout_s)
    outcome = check._interpret(*answer, timeout_s)
    assert isinstance(outcome, NotCompiled)
    return outcome


def test_a_crash_of_the_compiler_is_reported_in_one_line():
    outcome = run_compiler("raise RuntimeError('no ptxas')")
    assert outcome.kind == "failed"
    assert outcome.reason.endswith(": RuntimeError: no ptxas")
    assert "Traceback" in outcome.details
    outcome = run_compiler("import os; os.abort()")
    assert (outcome.kind, "signal 6" in outcome.reason) == ("failed", True)
    assert "exit code 3" in run_compiler("raise SystemExit(3)").reason


def test_a_killed_compiler_ends_its_children(tmp_path):
    mark = tmp_path / "child"
    outcome = run_compiler(
        f"""
        import os, time
        if not os.fork():
            open({str(mark)!r}, "w").write(str(os.getpid()))
        time.sleep(600)
        """,
        timeout_s=3.0,
    )
    assert outcome.kind == "timeout"
    child = int(mark.read_text())
    for _ in range(100):
        if not running(child):
            break
        time.sleep(0.1)
    assert not running(child)


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FACTS = {
    "memory": dict.fromkeys((f.name for f in dataclasses.fields(check.CompiledMemory)), 1),
    "buffers": [],
    "collectives": [],
    "branch_shares": {"backward": 0.5},
    "program": "",
    "attention": "cudnn",
    "offload": [],
    "compile_s": 1.0,
    "versions": {},
    "target": "",
}
COLLECTIVE = {
    "kind": "reduce-scatter",
    "axes": ["data", "fsdp"],
    "dtypes": ["bf16"],
    "bytes": 2**30,
    "wire_bytes": 2**29,
    "count": 4,
    "in_branch": True,
    "group_size": 2,
    "nodes": 1,
    "overlapped": False,
    "between": 0,
    "products": 0,
    "op_name": "jit(train)/cond/branch_1_fun/pipeline_backward/reduce_scatter",
}


def compiled_step(log: str = "", **facts) -> CompiledStep:
    text = json.dumps({**FACTS, **facts})
    outcome = check._interpret(0, text, log, 1.0)
    assert isinstance(outcome, CompiledStep)
    return outcome


def test_traffic_of_a_branch_is_weighted_by_the_schedule():
    step = compiled_step(collectives=[COLLECTIVE, {**COLLECTIVE, "in_branch": False}])
    assert step.wire_bytes() == {("reduce-scatter", "data+fsdp"): (2 + 4) * 2**29}


@pytest.mark.parametrize(
    ("log", "facts", "kind", "text"),
    [
        (
            "W [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding A "
            "to B efficiently for HLO operation %gather.12 = f32[8]",
            {},
            "rematerialization",
            "1 arrays .*%gather.12",
        ),
        (
            "W hlo_rematerialization.cc:3005] Can't reduce memory use below 31.2GiB (335 bytes) by",
            {},
            "memory",
            "31.2GiB",
        ),
        ("", {"collectives": [COLLECTIVE]}, "synchronous", "1 collectives .* 100 % .* of 1.0 GiB"),
        ("", {"collectives": [COLLECTIVE]}, "reduction dtype", r"in bf16 over data\+fsdp"),
        ("", {"offload": ["wrong order"]}, "offload", "wrong order"),
        ("", {"attention": "xla"}, "attention", "not cuDNN"),
    ],
)
def test_relevant_facts_are_remarked(log, facts, kind, text):
    remarks = {remark.kind: remark.text for remark in compiled_step(log, **facts).remarks}
    assert kind in remarks
    assert re.search(text, remarks[kind]), remarks[kind]


def test_a_clean_step_has_no_remarks():
    assert compiled_step().remarks == ()


@pytest.mark.parametrize(
    ("gpu", "result", "bytes_"),
    [  # measured with cuDNN 9.23 compiling its own engines, ahead of time
        ("h200", "(bf16[1,8,2048,128], bf16[1,8,2048,128], bf16[1,8,2048,128])", 8_454_400),
        ("h200", "(bf16[1,16,2048,64], bf16[1,16,2048,64], bf16[1,16,2048,64])", 8_519_936),
        ("h100", "(bf16[1,32,4096,128], bf16[1,8,4096,128], bf16[1,8,4096,128])", 134_742_272),
        ("h200", "(bf16[2,4,8192,128], bf16[2,2,8192,128], bf16[2,2,8192,128])", 67_371_264),
        ("a100-80", "(bf16[1,32,4096,128], bf16[1,8,4096,128], bf16[1,8,4096,128])", 201_851_008),
    ],
)
def test_the_workspace_of_cudnn_equals_measurements(gpu, result, bytes_):
    call = HloInstruction(
        "c", result, "custom-call", "", ' custom_call_target="fmhaSoftmaxBackward"'
    )
    assert compiler.attention_workspace(call, GPUS[gpu]) == bytes_


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_gpu_of_the_catalogue_can_be_described_to_the_compiler(name):
    text = compiler.target_text(GPUS[name])
    assert f"core_count: {GPUS[name].num_sms}\n" in text
    assert text.count("{") == text.count("}")


def test_fields_of_a_batch_are_named_before_compiling():
    train = dataclasses.replace(TRAIN, num_microbatches=8, global_batch_size=8, remat="none")
    config = RunConfig(model=MODEL, train=train, mesh=MeshConfig(shape="pp=2"))
    devices = jax.devices()[:2]
    parts = assemble(config, devices)
    assert set(parts.abstract_batch()) == {"tokens", "targets", "weights"}
    assert {leaf.shape for leaf in parts.abstract_batch().values()} == {(8, 128)}
    by_documents = dataclasses.replace(config, data=DataConfig(packing="best_fit"))
    assert "segments" in assemble(by_documents, devices).abstract_batch()
