"""Half precision with context parallelism: bfloat16 and float16 train as on one device."""

import jax
import numpy as np
import pytest
from tiny import Case, distance, largest, run, step_of, text_batch

from jaxdist.core.parallel.context import place_batch
from jaxdist.core.precision import PrecisionConfig

pytestmark = pytest.mark.slow

BFLOAT16 = PrecisionConfig(compute_dtype="bfloat16")


def test_bfloat16_over_shared_rows_matches_one_device():
    """8 bits of mantissa: a rounding error of 4e-3, averaged over many tokens and products."""
    actual, expected = (
        run(Case("rotary", mesh, exchange=exchange), precision=BFLOAT16)
        for mesh, exchange in (("cp=2", "ring"), ("1", "auto"))
    )
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=1e-3)
    assert distance(actual.grads, expected.grads) <= 0.02 * largest(expected.grads)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=0.01)


def test_float16_over_shared_rows_finds_a_loss_scale_and_matches_one_device(monkeypatch):
    """Start with a scale that overflows, and let it grow again.

    Devices that share rows sum fewer terms in float16, so their scales may differ. Updates do not
    depend on the scale.
    """
    monkeypatch.setattr("jaxdist.core.precision.INITIAL_LOSS_SCALE", 2.0**22)
    monkeypatch.setattr("jaxdist.core.precision.GROWTH_STEPS", 4)
    shared, alone = (
        trained(Case("learned", mesh, exchange=exchange))
        for mesh, exchange in (("cp=2", "ring"), ("1", "auto"))
    )
    assert not shared["applied"][0] and shared["applied"][-1] and len(set(shared["scales"])) > 4
    pairs = zip(shared["scales"], shared["scales"][1:], shared["applied"], strict=False)
    assert all(after == before / 2 for before, after, applied in pairs if not applied)
    steps = min(len(shared["losses"]), len(alone["losses"]))
    assert steps >= 4
    np.testing.assert_allclose(shared["losses"][:steps], alone["losses"][:steps], rtol=5e-3)
    assert shared["losses"][-1] < 0.8 * shared["losses"][0]


def trained(case: Case, steps: int = 16) -> dict[str, list]:
    step, state = step_of(case, precision=PrecisionConfig(compute_dtype="float16"))
    batch = place_batch(text_batch(), step.batch_sharding)
    seen: dict[str, list] = {"losses": [], "scales": [], "applied": []}
    for _ in range(steps):
        state, metrics = step.train(state, batch, np.inf)
        metrics = jax.device_get(metrics)
        seen["losses"] += [float(metrics["loss"])] * bool(metrics["applied"])
        seen["scales"].append(float(metrics["loss_scale"]))
        seen["applied"].append(bool(metrics["applied"]))
    return seen
