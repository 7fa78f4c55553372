"""Every mesh computes what one device computes: losses, gradients, updates, initial parameters.

Tolerances are the contract of the numerics: float32 sums in another order differ by a few units in
the last place (1.2e-7 relative), and nothing else may differ.
"""

import jax
import numpy as np
import pytest
from tiny import (
    LEARNING_RATE,
    Case,
    Trace,
    distance,
    initial_state,
    largest,
    layout_of,
    model_of,
    optimizer,
    reference,
    run,
)

from jaxdist.core import collectives
from jaxdist.core.mesh import factorisations
from jaxdist.core.parallel import reduction
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.state import init_state

FIRST_LOSS = 1e-6  # relative: the order of one sum
GRADIENTS = 1e-5  # of the largest gradient
UPDATE = 1e-4  # of the learning rate: Adam divides gradients by themselves
LOSSES = 2e-5  # relative, over 20 steps, each building on the last

FAST = [
    Case("learned", "1"),
    Case("learned", "1", microbatches=4),
    Case("learned", "dp=8"),
    Case("learned", "fsdp=8"),
    Case("learned", "tp=8"),
    Case("learned", "tp=8", sequence=False),
    Case("rotary", "dp=4", zero=1, microbatches=2),
    Case("rotary", "dp=2,fsdp=4"),
    Case("rotary", "dp=2,tp=4", zero=2, microbatches=2),
    Case("rotary", "fsdp=2,tp=4"),
    Case("rotary", "fsdp=2,tp=2", sequence=False, microbatches=2),
    Case("rotary", "dp=2,fsdp=2,tp=2"),
    Case("rotary", "dp=2,fsdp=2,tp=2", zero=3, microbatches=2),
    Case("learned", "dp=2,fsdp=2,tp=2", zero=1),
    Case("cnn", "dp=8"),
    Case("cnn", "fsdp=8"),
    Case("cnn", "tp=8"),
    Case("cnn", "dp=2,fsdp=2,tp=2", zero=2, microbatches=2),
]


def every_case() -> list[Case]:
    """All factorisations of 8 devices × ZeRO × sequence parallelism, two microbatches each."""
    cases = []
    for spec in factorisations(8, without=[PIPELINE]):
        for name in ("rotary", "learned", "cnn"):
            if name == "rotary" and spec["tensor"] > 4:
                continue  # it has four key/value heads
            for zero in (0, 1, 2, 3) if spec["data"] > 1 else (0,):
                for sequence in (True, False) if spec["tensor"] > 1 and name != "cnn" else (True,):
                    case = Case(name, str(spec), zero, sequence, microbatches=2)
                    if case not in FAST:
                        cases.append(case)
    return cases


def check(trace: Trace, expected: Trace) -> None:
    """Compare a run with the reference, number by number of the contract."""
    assert trace.losses[0] == pytest.approx(expected.losses[0], rel=FIRST_LOSS)
    assert distance(trace.grads, expected.grads) <= GRADIENTS * largest(expected.grads)
    assert trace.norm == pytest.approx(expected.norm, rel=GRADIENTS)
    assert distance(trace.params, expected.params) <= UPDATE * LEARNING_RATE
    np.testing.assert_allclose(trace.losses, expected.losses, rtol=LOSSES)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_every_mesh_computes_what_one_device_computes(case):
    check(run(case), reference(case.model))


@pytest.mark.slow
@pytest.mark.parametrize("case", every_case(), ids=str)
def test_every_mesh_computes_what_one_device_computes_exhaustively(case):
    check(run(case), reference(case.model))


def test_the_reference_learns():
    losses = reference("rotary").losses
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "case", [Case("rotary", "dp=2,fsdp=2,tp=2"), Case("learned", "dp=2,tp=4", zero=2)], ids=str
)
def test_a_second_run_gives_the_same_bits(case):
    first, second = run(case, steps=5), run(case, steps=5)
    assert first.losses == second.losses
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)


@pytest.mark.parametrize(
    "case",
    [
        Case("rotary", "dp=8"),
        Case("rotary", "dp=2,fsdp=2,tp=2"),
        Case("rotary", "fsdp=2,tp=4"),
        Case("learned", "dp=4,fsdp=2", zero=3),
        pytest.param(Case("learned", "tp=8"), marks=pytest.mark.slow),
        pytest.param(Case("learned", "fsdp=8"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_initial_parameters_are_equal_bit_for_bit(case):
    model = model_of(case.model)
    state = init_state(model, optimizer(), layout_of(case), seed=0, loss_scale={})
    expected = initial_state(case.model)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), expected.params)
    assert (jax.random.key_data(state.key) == jax.random.key_data(expected.key)).all()


def test_another_seed_gives_other_parameters():
    case = Case("learned", "1")
    state = init_state(model_of("learned"), optimizer(), layout_of(case), seed=1, loss_scale={})
    table = initial_state("learned").params["embed"]["table"]
    assert np.mean(np.asarray(state.params["embed"]["table"]) == table) < 1e-3


def mean_of_replicas(monkeypatch):
    """Each replica's gradients averaged instead of summed."""
    reduce_gradients = reduction.reduce_gradients

    def averaged(grads, *args):
        return jax.tree.map(lambda g: g / 2, reduce_gradients(grads, *args))

    monkeypatch.setattr(reduction, "reduce_gradients", averaged)


def rows_counted_locally(monkeypatch):
    """Sums over the global batch replaced by twice those of the first replica."""
    all_reduce = collectives.all_reduce

    def local(x, axes, op="sum"):
        if x.ndim == 0 and op == "sum" and axes == ("data",):
            return 2 * collectives.broadcast(x, axes)
        return all_reduce(x, axes, op)

    monkeypatch.setattr(collectives, "all_reduce", local)


def wrong_part_of_the_sequence(monkeypatch):
    """Each tensor device keeps its neighbour's positions."""
    index = collectives.group_index
    shifted = lambda axes: 1 - index(axes) if axes == "tensor" else index(axes)
    from jaxdist.core.parallel import tensor

    split = tensor._split_sequence

    def swapped(x):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "group_index", shifted)
            return split(x)

    monkeypatch.setattr(tensor, "_split_sequence", swapped)


@pytest.mark.parametrize(
    ("plant", "case"),
    [
        (mean_of_replicas, Case("learned", "dp=2")),
        (rows_counted_locally, Case("learned", "dp=2")),
        (wrong_part_of_the_sequence, Case("learned", "tp=2")),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_planted_fault_is_seen(plant, case, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(run(case), reference(case.model))
