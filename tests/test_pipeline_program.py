"""The compiled pipeline: its exchanges, products and memory."""

import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from pipeline_parity import FAST_COMPILE, Case, lowered

from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedules import make_schedule
from jaxdist.core.parallel.pipeline.simulation import simulate


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
    """Each tick has one forward or one backward of a virtual stage; idle stages run it, too."""
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
    return function.lower(*arguments).compile(compiler_options=FAST_COMPILE)


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
