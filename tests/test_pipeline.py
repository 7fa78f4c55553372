"""Pipeline stages: gradients equal one device; exchanges, products and memory of the program."""

import dataclasses
import json
import re
from collections.abc import Iterator

import jax
import numpy as np
import pipeline_parity
import pytest
from commands import Fork
from pipeline_parity import Case, compare, lowered

from jaxdist.core.parallel.pipeline.config import PipelineConfig, describe
from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedules import make_schedule
from jaxdist.core.parallel.pipeline.simulation import simulate
from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit, balanced, to_model_order
from jaxdist.settings import problems_of

# The project's contract for float32 across meshes: only the order of sums differs.
LOSS, GRADIENT = 1e-6, 1e-5

DEPTHS = Case(mesh="pp=2,tp=2", virtual=2, layers=5, depths="1.2.2.0", family="gpt2")
FAST = [
    pytest.param(Case(mesh="pp=2,fsdp=2,tp=2", virtual=2, family="gpt2"), marks=pytest.mark.smoke),
    pytest.param(Case(mesh="pp=4,dp=2", family="gpt2"), marks=pytest.mark.product),
    pytest.param(DEPTHS, marks=pytest.mark.product),  # `test_pipeline_run` trains it for 20 steps
]
SLOW = [
    Case(mesh="pp=2,dp=2,fsdp=2", gather="step", zero=2, virtual=2),
    Case(mesh="pp=2,dp=2,tp=2", automatic=True),
]
MORE = [
    Case(mesh="pp=4,tp=2", family="llama_tied", rows=6, microbatches=3),
    Case(mesh="pp=2,dp=2,fsdp=2", zero=2, family="llama_tied", rows=16),
    Case(mesh="pp=2,dp=2", scale=1024.0, virtual=2),
    Case(mesh="pp=4,fsdp=2", layers=8, family="llama_tied", remat="full"),
    Case(mesh="pp=2,dp=2,tp=2", zero=3, family="gpt2"),
    Case(mesh="pp=2,tp=4", sequence_parallel=False, family="gpt2"),
    Case(mesh="pp=2,tp=4", remat="dots", gather="step"),
    Case(mesh="pp=8", layers=8),
    Case(mesh="pp=2", layers=3, depths="2.1"),
    Case(mesh="pp=2,cp=2", layers=3, depths="1.2", family="gpt2"),
    Case(mesh="pp=4", layers=6, depths="1.2.2.1", family="gemma"),
    Case(mesh="pp=2,fsdp=2", layers=3, depths="1.2", family="gpt2"),
    Case(mesh="pp=2,dp=2,tp=2", layers=3, depths="2.1", zero=2, gather="step", remat="dots"),
    *pipeline_parity.cover(),
]


@pytest.mark.parametrize(
    "case",
    [
        *FAST,
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(case, marks=pytest.mark.product) for case in MORE),
    ],
    ids=str,
)
def test_gradients_match_one_device(case):
    check(compare(case))


def test_optional_parts_in_loops_match_one_device(monkeypatch):
    """GPUs run optional parts in loops, and idle stages act; without collectives, CPUs can, too."""
    parts = pipeline_parity.make_parts

    def as_on_gpus(case):
        model, layout, plan, context = parts(case)
        plan = dataclasses.replace(plan, orders_collectives=False, skips_idle=False)
        return model, layout, plan, context

    monkeypatch.setattr(pipeline_parity, "make_parts", as_on_gpus)
    case = Case(mesh="pp=2", virtual=2, layers=5, depths="1.2.2.0", family="llama_tied")
    assert "at_most_once" in lowered(case)[0].lower(*lowered(case)[1]).as_text(debug_info=True)
    check(compare(case))


@pytest.mark.slow
def test_gradients_match_one_device_on_64_devices():
    """Every axis at once, on the largest mesh that the design names."""
    cases = ["pp=4,dp=2,fsdp=2,tp=4;rows=32;virtual=2;layers=8"]
    run = Fork("pipeline_parity", 64, *cases)
    out, errors = run.communicate(timeout=1800)
    assert run.returncode == 0, errors[-3000:]
    differences = [json.loads(line) for line in out.splitlines()]
    assert len(differences) == len(cases)
    for difference in differences:
        name = difference.pop("case")
        check(pipeline_parity.Difference(**difference), name)


def check(difference, name=""):
    assert difference.loss <= LOSS, name
    assert difference.weight == 0, name
    assert difference.gradient <= GRADIENT, name
    assert difference.norm <= GRADIENT, name


@pytest.mark.usefixtures("users_promotion")
def test_bfloat16_and_loss_scale_stay_within_rounding():
    """bf16 keeps 8 bits, and gradients are sums of such products; a power of two is exact."""
    brain = compare(Case(mesh="pp=2,tp=2", dtype="bfloat16", scale=1024.0, family="llama_tied"))
    assert brain.loss < 1e-3
    assert brain.gradient < 3e-2


@pytest.mark.parametrize(
    "case",
    [Case(mesh="pp=2,dp=2", virtual=2), Case(mesh="pp=4,tp=2", family="llama_tied", rows=6)],
    ids=str,
)
def test_evaluation_through_stages_matches_one_device(case):
    sums = pipeline_parity.evaluation(case)
    one = pipeline_parity.evaluation(Case(mesh="dp=1", family=case.family, rows=case.rows))
    assert sums["weight"] == one["weight"]
    np.testing.assert_allclose(sums["loss"], one["loss"], rtol=LOSS)


def test_microbatches_are_chosen_from_stages_and_rows():
    assert PipelineConfig().choose_microbatches(4, rows=32) == 16
    assert PipelineConfig().choose_microbatches(2, rows=64) == 8
    assert PipelineConfig().choose_microbatches(4, rows=6) == 6
    assert PipelineConfig().choose_microbatches(4, rows=15) == 15
    assert PipelineConfig(num_virtual_stages=2).choose_microbatches(4, rows=24) == 24


def test_schedule_description_has_sizes_and_bubble():
    schedule = PipelineConfig().make_schedule(num_stages=4, rows=32)
    assert schedule.num_microbatches == 16
    text = describe(schedule, 32, LayerSplit((2, 2, 2, 2), 4))
    for fact in ("1f1b", "4 stages", "16 microbatches", "2 rows", "15.8 %", "19+19"):
        assert fact in text
    # Of 19 pairs of ticks, the first and the last take half: 54 units of time for 36 of work.
    text = describe(schedule, 32, LayerSplit((1, 2, 2, 1), 4))
    assert "1 to 2 layers" in text and "33.3 %" in text


@pytest.mark.parametrize(("num_microbatches", "count"), [(0, 8), (1, 1), (2, 2)])
def test_explicit_microbatches_override_the_default(num_microbatches, count):
    schedule = PipelineConfig().make_schedule(
        num_stages=2, rows=16, num_microbatches=num_microbatches
    )
    assert schedule.num_microbatches == count


def test_invalid_settings_are_rejected_with_the_fix():
    (problem,) = problems_of(PipelineConfig(num_virtual_stages=-1), "pipeline")
    assert "pipeline.num_virtual_stages=-1" in problem


@pytest.mark.parametrize(
    ("layers", "p", "v", "head", "expected"),
    [
        (31, 4, 1, 0.6, (8, 8, 8, 7)),
        (31, 4, 1, 2.4, (8, 9, 9, 5)),
        (126, 16, 8, 0.65, (0, *[1] * 126, 0)),
        (126, 16, 4, 0.65, (1, *[2] * 62, 1)),
        (3, 2, 1, 0.0, (1, 2)),
        (8, 4, 1, 2.4, (2, 2, 2, 2)),  # equal numbers need no padding
    ],
)
def test_layers_are_balanced_with_the_head(layers, p, v, head, expected):
    assert balanced(layers, p, v, head) == expected


@pytest.mark.parametrize(
    ("layers", "p", "m", "head", "virtual"),
    [  # the fastest of the compiled programs in `results/pipeline_gpu_compile.md`
        (40, 4, 16, 0.6, 5),
        (80, 4, 32, 0.6, 10),
        (126, 16, 64, 0.65, 4),
        (8, 4, 4, 0.0, 2),
        (8, 2, 5, 3.0, 2),
    ],
)
def test_the_cheapest_number_of_virtual_stages_is_chosen(layers, p, m, head, virtual):
    def seconds(v: int) -> float:
        depths = balanced(layers, p, v, head)
        ticks = simulate(make_schedule("1f1b", p, m, v)).forward_permutes
        loops = 1 if max(depths) <= 2 else max(depths)
        at_end = m * max(0.0, 3 * head - 2 * (max(depths) - depths[-1]))
        return 3 * ticks * (max(depths) + 0.1 * loops) + at_end

    config = PipelineConfig(num_virtual_stages=0)
    chosen = config.choose_depths(layers, p, m, head)
    assert chosen == balanced(layers, p, virtual, head)
    counts = [v for v in (1, 2, 4, 5, 8, 10) if -(-layers // p) % v == 0]
    assert min(counts, key=seconds) == virtual


def test_layers_are_stored_on_the_stages_that_run_them():
    """Virtual stages 0 and 2 are on stage 0; 7 is the padding of a model with seven layers."""
    split = LayerSplit((2, 1, 3, 1), 2)
    assert split.order.tolist() == [0, 1, 7, 3, 4, 5, 2, 7, 7, 6, 7, 7]
    assert split.positions.tolist() == [0, 1, 6, 3, 4, 5, 9]
    assert (split.num_stored, split.starts.tolist()) == (12, [0, 2, 3, 6])


def inner(equation) -> list:
    jaxprs = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                jaxprs.append(item)
            elif hasattr(item, "jaxpr"):
                jaxprs.append(item.jaxpr)
    return jaxprs


def products(jaxpr) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[d] for d in contracted])
            total += 2.0 * float(np.prod(equation.outvars[0].aval.shape) * depth)
        elif name == "cond":
            total += max(products(branch.jaxpr) for branch in equation.params["branches"])
        else:
            times = equation.params["length"] if name == "scan" else 1
            total += times * sum(map(products, inner(equation)))
    return total


def bodies(jaxpr, times: int = 1) -> Iterator[tuple]:
    if any(equation.primitive.name == "ppermute" for equation in jaxpr.eqns):
        yield jaxpr, times
    for equation in jaxpr.eqns:
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in inner(equation):
            yield from bodies(part, times * length)


def program(case: Case):
    function, arguments = lowered(case)
    return jax.make_jaxpr(function)(*arguments).jaxpr


@pytest.mark.parametrize("m", [3, 8])
@pytest.mark.parametrize("v", [1, 2])
def test_the_number_of_permutes_equals_the_schedule(m, v):
    jaxpr = program(Case(mesh="pp=4", virtual=v, layers=8, rows=m, microbatches=m))
    forward = backward = 0
    for body, times in bodies(jaxpr):
        for equation in body.eqns:
            if equation.primitive.name == "ppermute":
                up = equation.params["perm"][0] == (0, 1)
                forward += times * up
                backward += times * (not up)
    report = simulate(make_schedule("1f1b", 4, m, v))
    assert (forward, backward) == (report.forward_permutes, report.backward_permutes)


@pytest.mark.parametrize("v", [1, 2])
def test_no_product_is_computed_twice(v):
    """Each tick has one forward or one backward of a virtual stage, if no stage is idle."""
    m, p = 8, 4
    ideal = products(program(Case(mesh="dp=1", layers=8, rows=m)))
    without_layers = products(program(Case(mesh="dp=1", layers=1, rows=m)))
    layers = (ideal - without_layers) * 8 / 7
    head = (ideal - layers) / m
    executed = products(program(Case(mesh="pp=4", virtual=v, layers=8, rows=m, microbatches=m)))
    ticks = v * m + p - 1
    # A conditional counts as its most expensive branch: the head, in every tick.
    assert executed == pytest.approx(layers / (v * p * m) * ticks + head * ticks, rel=0.01)


def compiled(case: Case):
    function, arguments = lowered(case)
    return function.lower(*arguments).compile()


def test_the_compiler_adds_no_exchange_between_stages():
    case = Case(mesh="pp=4", rows=8, microbatches=8)
    text = compiled(case).as_text()
    loops = plan_loops(make_schedule("1f1b", 4, 8))
    permutes = sum(len(loop.kinds) for loop in loops)
    assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == permutes
    for other in ("all-gather", "reduce-scatter", "all-to-all"):
        assert not re.search(rf" {other}(?:-start)?\(", text), other


@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches():
    cases = [Case(mesh="pp=4", layers=16, rows=m, microbatches=m) for m in (8, 32)]
    few, many = (compiled(case).memory_analysis().temp_size_in_bytes for case in cases)
    # From 2p - 1 = 7 microbatches on, 1F1B keeps the same number. The contract is 5 %.
    assert many / few <= 1.05


def test_a_tree_without_stacked_layers_keeps_its_order():
    """Trained arrays may all be outside of them: a head, adapters of dense first layers."""
    tree = {"first_layers": {"0": np.ones(3)}}
    assert to_model_order(tree, LayerSplit((2, 1), 2)) is tree
