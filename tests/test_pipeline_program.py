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
    """Return the jaxprs in an equation."""
    jaxprs = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                jaxprs.append(item)
            elif hasattr(item, "jaxpr"):
                jaxprs.append(item.jaxpr)
    return jaxprs


def products(jaxpr) -> float:
    """Return FLOPs of matrix products; a conditional counts as its most expensive branch."""
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
    """Yield (jaxpr, number of executions) of everything that contains a ring permute."""
    if any(equation.primitive.name == "ppermute" for equation in jaxpr.eqns):
        yield jaxpr, times
    for equation in jaxpr.eqns:
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in inner(equation):
            yield from bodies(part, times * length)


def program(case: Case):
    function, arguments = lowered(case)
    return jax.make_jaxpr(function)(*arguments).jaxpr


@pytest.mark.parametrize("name", ["gpipe", "1f1b_lockstep", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("m", [3, 8])
def test_the_number_of_permutes_equals_the_schedule(name, m):
    jaxpr = program(Case(mesh="pp=4", schedule=name, rows=m, microbatches=m))
    forward = backward = 0
    for body, times in bodies(jaxpr):
        for equation in body.eqns:
            if equation.primitive.name == "ppermute":
                up = equation.params["perm"][0] == (0, 1)
                forward += times * up
                backward += times * (not up)
    report = simulate(make_schedule(name, 4, m))
    assert (forward, backward) == (report.forward_permutes, report.backward_permutes)


def test_idle_ticks_have_no_products_and_others_one_recomputation():
    m, pieces = 8, 4
    jaxpr = program(Case(mesh="pp=4", rows=m, microbatches=m))
    switches = [
        equation.params["branches"]
        for body, _ in bodies(jaxpr)
        for equation in body.eqns
        if equation.primitive.name == "cond"
    ]
    assert len(switches) == 3
    assert all(products(idle.jaxpr) == 0 for idle, _ in switches)
    acting = sorted({products(action.jaxpr) for _, action in switches})
    forward, backward = acting
    ideal = products(program(Case(mesh="dp=1", rows=m)))
    head = ideal / m - 3 * pieces * forward
    assert 0 < head < backward
    executed = m * ((pieces - 1) * forward + pieces * backward - (pieces - 1) * head)
    recomputed = m * pieces * forward
    # The backward pass runs the last chunk's forward, so one recomputation costs nothing.
    assert executed == pytest.approx(ideal + recomputed - m * forward, rel=0.05)


def test_zero_bubble_does_the_products_of_both_gradients_once():
    m, pieces = 8, 4
    ticks = [body for body, _ in bodies(program(Case(mesh="pp=4", rows=m, microbatches=m)))]
    forward = min(p for p in map(products, ticks) if p > 0)
    jaxpr = program(Case(mesh="pp=4", schedule="zero_bubble", rows=m, microbatches=m))
    branches = {
        products(branch.jaxpr)
        for body, _ in bodies(jaxpr)
        for equation in body.eqns
        if equation.primitive.name == "cond"
        for branch in equation.params["branches"]
    }
    head = products(program(Case(mesh="dp=1", rows=m))) / m - 3 * pieces * forward
    idle, weight, again, backward = sorted(branches)
    assert (idle, again) == (0, forward)
    # Attention multiplies no weights, so its products belong to the input gradient alone.
    assert 0.7 * forward < weight < forward
    assert again + backward + weight == pytest.approx(4 * forward + head)


def compiled(case: Case):
    function, arguments = lowered(case)
    return function.lower(*arguments).compile(compiler_options=FAST_COMPILE)


def test_the_compiler_adds_no_exchange_between_stages():
    case = Case(mesh="pp=4", rows=8, microbatches=8)
    text = compiled(case).as_text()
    bodies_with_permutes = sum(
        kind != "weight"
        for phase in plan_loops(make_schedule("1f1b_lockstep", 4, 8))
        for kinds in phase.kinds
        for kind in kinds
    )
    assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == bodies_with_permutes
    for other in ("all-gather", "reduce-scatter", "all-to-all"):
        assert not re.search(rf" {other}(?:-start)?\(", text), other


@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches_except_under_gpipe():
    """M grows from p to 8p. A stage has four layers: one layer needs less memory than the stash."""

    def growth(name: str) -> float:
        cases = [
            Case(mesh="pp=4", layers=16, schedule=name, rows=m, microbatches=m) for m in (4, 32)
        ]
        few, many = (compiled(case).memory_analysis().temp_size_in_bytes for case in cases)
        return many / few

    # The project's contract is 5 %; 1F1B's stash itself grows from 4 to 2p - 1 = 7 microbatches.
    assert growth("1f1b_lockstep") <= 1.05
    assert growth("1f1b") <= 1.05
    assert growth("gpipe") >= 1.10
