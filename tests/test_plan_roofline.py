"""The roofline of a compiled program: its classes against closed forms, on manual programs."""

import pytest
from roofline import model_times

from jaxdist.core.step_plan import default_loss_chunk
from jaxdist.hardware import GPUS, Cluster

H100 = GPUS["h100"]
CLUSTER = Cluster(gpu=H100, num_nodes=1, gpus_per_node=2)
LAUNCH_S, LATENCY_S = 2.5e-6, 12e-6
MEMORY = 0.85 * H100.memory_bandwidth
DIMS = (
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},'
)
PRODUCT = (
    "%g = (bf16[4096,8192]{1,0}, s8[64]{0}) custom-call(%a, %b), "
    f'custom_call_target="__cublas$gemm", backend_config={{{DIMS}"alpha_real":1}}'
)
FLOPS = 2 * 4096 * 1024 * 8192
PRODUCT_S = FLOPS / (0.72 * H100.peak_flops["bfloat16"]) + LAUNCH_S


def times(body: str, others: str = ""):
    text = f"""HloModule m

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

{others}

ENTRY %main () -> f32[] {{
  %a = bf16[4096,1024]{{1,0}} parameter(0)
  %b = bf16[1024,8192]{{1,0}} parameter(1)
  %x = f32[1048576]{{0}} parameter(2)
{body}
}}
"""
    return model_times(text, {"data": 1, "fsdp": 2}, CLUSTER, {"head": 0.25})


def test_matmul_time_is_its_flops_or_its_bytes():
    times_of_program = times("  " + PRODUCT)
    assert times_of_program.flops == FLOPS
    assert times_of_program.classes == {"products": pytest.approx(PRODUCT_S)}
    assert times_of_program.seconds == pytest.approx(PRODUCT_S)


@pytest.mark.parametrize("causal, share", [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
@pytest.mark.parametrize(
    "name, work", [("fmhaSoftmax", 1 / 0.55), ("fmhaSoftmaxBackward", 2.5 / 0.45)]
)
def test_attention_time_counts_unmasked_flops(causal, share, name, work):
    query, key = "bf16[2,4096,32,128]{3,2,1,0}", "bf16[2,4096,8,128]{3,2,1,0}"
    times_of_program = times(
        f"""  %q = {query} parameter(3)
  %k = {key} parameter(4)
  %o = ({query}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="__cudnn${name}", """
        f'backend_config={{"mask_type":"{causal}"}}'
    )
    flops = 4 * 2 * 32 * 128 * 4096**2 * share
    assert times_of_program.classes["attention"] == pytest.approx(
        flops * work / H100.peak_flops["bfloat16"]
    )
    assert times_of_program.calls == {"attention": 1}


LOOP = """%body (t: (f32[1048576])) -> (f32[1048576]) {
  %t = (f32[1048576]{0}) parameter(0)
  %x = f32[1048576]{0} get-tuple-element(%t), index=0
  %y = f32[1048576]{0} multiply(%x, %x)
  ROOT %r = (f32[1048576]{0}) tuple(%y)
}
%condition (t: (f32[1048576])) -> pred[] {
  %t = (f32[1048576]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}"""


def test_loop_time_is_multiplied_by_its_trip_count():
    times_of_program = times(
        """  %t = (f32[1048576]{0}) tuple(%x)
  %w = (f32[1048576]{0}) while(%t), condition=%condition, body=%body, """
        'backend_config={"known_trip_count":{"n":"7"}}',
        LOOP,
    )
    once = 3 * 4 * 2**20 / MEMORY + LAUNCH_S
    assert times_of_program.seconds == pytest.approx(7 * once)
    assert times_of_program.calls == {"element-wise": 7}


GATHER_S = 2**20 * 4 * 64 / 2 / (0.80 * H100.link_bandwidth) + LATENCY_S


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("products", [0, 1, 3])
def test_collective_time_that_compute_waits_for_is_exposed(products, update):
    between = "\n".join("  " + PRODUCT.replace("%g", f"%g{n}") for n in range(products))
    started = "%s"
    if update:
        between, started = between + "\n  %u = (f32[1], f32[1]) all-gather-update(%s)", "%u"
    times_of_program = times(
        f"""  %s = (f32[33554432]{{0}}, f32[67108864]{{0}}) all-gather-start(%x), \
replica_groups=[1,2]<=[2]
{between}
  %d = f32[67108864]{{0}} all-gather-done({started})"""
    )
    exposed = max(0.0, GATHER_S - products * PRODUCT_S)
    assert times_of_program.classes.get("exposed fsdp", 0.0) == pytest.approx(exposed)
    assert times_of_program.seconds == pytest.approx(max(GATHER_S, products * PRODUCT_S))


@pytest.mark.parametrize("gpu", ["t4", "a100-80", "h100", "h200", "b200"])
@pytest.mark.parametrize("vocab", [50304, 128256, 16032])
def test_loss_chunk_makes_the_head_fast_or_fills_its_share_of_memory(gpu, vocab):
    gpu_spec = GPUS[gpu]
    chunk = default_loss_chunk(vocab, "gpu", gpu)
    assert chunk % 128 == 0
    peak = gpu_spec.peak_flops.get("bfloat16") or gpu_spec.peak_flops["float16"]
    passes = 12 * vocab / (0.85 * gpu_spec.memory_bandwidth)
    products = lambda tokens: 6 * tokens * vocab / (0.72 * peak)
    is_fast = passes <= 0.15 * products(chunk)
    fills = 4 * vocab * (chunk + 128) > gpu_spec.memory_bytes / 64
    assert is_fast or fills
    assert 4 * vocab * chunk <= gpu_spec.memory_bytes / 64
    # Not larger than that requires.
    assert fills or passes > 0.15 * products(chunk - 128)


def test_cpu_and_unknown_gpu_have_a_loss_chunk():
    assert default_loss_chunk(256, "cpu", "cpu") == 65536
    assert default_loss_chunk(10**7, "gpu", "some card") == 128
    assert default_loss_chunk(0, "gpu", "h100") == 0


OPTIONAL = """%once (p: f32[1048576]) -> f32[1048576] {
  %p = f32[1048576]{0} parameter(0)
  ROOT %n = f32[1048576]{0} negate(%p), metadata={op_name="x/pipeline_backward/pipeline_head/neg"}
}

%same (p: f32[1048576]) -> f32[1048576] {
  %p = f32[1048576]{0} parameter(0)
  ROOT %n = f32[1048576]{0} copy(%p)
}

%needed (p: f32[1048576]) -> pred[] {
  %p = f32[1048576]{0} parameter(0)
  ROOT %t = pred[] constant(true)
}"""


def test_optional_parts_count_as_often_as_a_stage_runs_them():
    once = 2 * 4 * 2**20 / MEMORY + LAUNCH_S
    loop = "  %w = f32[1048576]{0} while(%x), condition=%needed, body=%once"
    assert times(loop, OPTIONAL).seconds == pytest.approx(once / 4)
    condition = "  %c = pred[] parameter(3)\n  %w = f32[1048576]{0} conditional(%c, %x, %x), "
    branches = times(condition + "branch_computations={%once, %same}", OPTIONAL)
    assert branches.classes == pytest.approx({"element-wise": once / 4, "copies": once * 3 / 4})
