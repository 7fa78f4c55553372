"""Every mesh computes the same as one device: losses, gradients, updates, initial parameters.

Tolerances follow the numerics contract: float32 sums in another order differ by a few units in the
last place (1.2e-7 relative), and nothing else may differ.
"""

import jax
import numpy as np
import pytest
from covering import covering_array
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

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.state import init_state

FIRST_LOSS = 1e-6  # relative: order of one sum
GRADIENTS = 1e-5  # of the largest gradient
UPDATE = 1e-4  # of the learning rate: Adam normalizes gradients
LOSSES = 2e-5  # relative, over 20 consecutive steps

MESHES = ["dp=8", "fsdp=8", "tp=8", "dp=2,fsdp=4", "dp=4,tp=2", "fsdp=2,tp=4", "dp=2,fsdp=2,tp=2"]
"""Each axis alone, each pair of axes with two sizes, and all three."""


def is_legal(**choice) -> bool:
    """Return True if no choice is redundant and the model's dims allow the mesh."""
    case, spec = Case(**choice), MeshSpec.parse(choice["mesh"])
    return not (
        (case.model == "rotary" and spec["tensor"] > 4)  # it has four key/value heads
        or (case.zero and spec["data"] == 1)
        or (not case.sequence and (spec["tensor"] == 1 or case.model == "cnn"))
        or (case.remat != "none" and case.model == "cnn")
    )


CASES = [
    Case(**choice)
    for choice in covering_array(
        {
            "model": ["rotary", "learned", "cnn"],
            "mesh": ["1", *MESHES],
            "zero": [0, 1, 2, 3],
            "sequence": [True, False],
            "microbatches": [1, 2],
            "remat": ["none", "dots", "full"],
        },
        is_legal,
    )
]
"""Every pair of model, mesh, ZeRO stage, sequence parallelism, accumulation and remat policy."""
NUM_SMOKE, NUM_FAST, NUM_SLOW = 3, 5, 10
FAULTS_IN = {10, 14}
"""Cases on which faults are planted (`scripts/bench/mutants.toml`)."""


def marks(number: int) -> list:
    """Return the marks of a case; the first cases cover most pairs."""
    if number in FAULTS_IN or number < NUM_FAST:
        return [pytest.mark.smoke] * (number < NUM_SMOKE)
    return [pytest.mark.slow if number < NUM_SLOW else pytest.mark.product]


def check(trace: Trace, expected: Trace) -> None:
    assert trace.losses[0] == pytest.approx(expected.losses[0], rel=FIRST_LOSS)
    assert distance(trace.grads, expected.grads) <= GRADIENTS * largest(expected.grads)
    assert trace.norm == pytest.approx(expected.norm, rel=GRADIENTS)
    assert distance(trace.params, expected.params) <= UPDATE * LEARNING_RATE
    np.testing.assert_allclose(trace.losses, expected.losses, rtol=LOSSES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=marks(number)) for number, case in enumerate(CASES)],
    ids=str,
)
def test_every_mesh_computes_what_one_device_computes(case):
    check(run(case), reference(case.model))


def test_reference_loss_decreases():
    losses = reference("rotary").losses
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "case",
    [
        *CASES[1:3],  # compiled above
        pytest.param(Case("learned", "cp=2", exchange="ring"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_second_run_is_bit_identical(case):
    first, second = run(case, steps=5), run(case, steps=5)
    assert first.losses == second.losses
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)


@pytest.mark.parametrize(
    "case",
    [
        Case("rotary", "dp=2,fsdp=2,tp=2"),
        Case("rotary", "fsdp=2,cp=2"),
        Case("learned", "dp=4,fsdp=2", zero=3),
        Case("learned", "tp=8"),
    ],
    ids=str,
)
def test_initial_parameters_are_bit_identical(case):
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
