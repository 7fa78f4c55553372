"""The pipeline: every schedule matches one device, and has the cost that it reports."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pipeline_parity
import pytest
from pipeline_parity import Case, compare

from jaxdist.core.parallel.pipeline.config import PipelineConfig, describe
from jaxdist.core.parallel.pipeline.virtual_stages import exchange_rounds
from jaxdist.settings import problems_of

# The project's contract for float32 across meshes: only the order of sums differs.
LOSS, GRADIENT = 1e-6, 1e-5

FAST = [
    pytest.param(Case(mesh="pp=2,fsdp=2,tp=2", virtual=2, family="gpt2"), marks=pytest.mark.smoke),
    pytest.param(Case(mesh="pp=4,dp=2", family="gpt2"), marks=pytest.mark.smoke),
]
SLOW = [
    Case(mesh="pp=4,tp=2", family="llama_tied", rows=6, microbatches=3),
    Case(mesh="pp=2,dp=2,fsdp=2", zero=2, family="llama_tied", rows=16),
    Case(mesh="pp=2,dp=2,fsdp=2", gather="step", zero=2, virtual=2),
    Case(mesh="pp=2,dp=2,tp=2", automatic=True),
    Case(mesh="pp=2,dp=2", scale=1024.0, virtual=2),
]
MORE = [
    Case(mesh="pp=4,fsdp=2", layers=8, family="llama_tied", remat="full"),
    Case(mesh="pp=2,dp=2,tp=2", zero=3, family="gpt2"),
    Case(mesh="pp=2,tp=4", sequence_parallel=False, family="gpt2"),
    Case(mesh="pp=2,tp=4", remat="dots", gather="step"),
    Case(mesh="pp=8", layers=8),
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


@pytest.mark.slow
def test_gradients_match_one_device_on_64_devices():
    """Every axis at once, on the largest mesh that the design names."""
    cases = ["pp=4,dp=2,fsdp=2,tp=4;rows=32;virtual=2;layers=8"]
    script = Path(pipeline_parity.__file__)
    run = subprocess.run(
        [sys.executable, str(script), "64", *cases],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=script.parent.parent,
        env={"PYTHONPATH": str(script.parent.parent), "PATH": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    differences = [json.loads(line) for line in run.stdout.splitlines()]
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


# --- settings ------------------------------------------------------------------------------------


def test_microbatches_are_chosen_from_stages_and_rows():
    assert PipelineConfig().choose_microbatches(4, rows=32) == 16
    assert PipelineConfig().choose_microbatches(2, rows=64) == 8
    assert PipelineConfig().choose_microbatches(4, rows=6) == 6
    assert PipelineConfig().choose_microbatches(4, rows=15) == 15
    assert PipelineConfig(num_virtual_stages=2).choose_microbatches(4, rows=24) == 24


def test_schedule_description_has_sizes_and_bubble():
    schedule = PipelineConfig().make_schedule(num_stages=4, rows=32)
    assert schedule.num_microbatches == 16
    text = describe(schedule, 32)
    for fact in ("1f1b", "4 stages", "16 microbatches", "2 rows", "15.8 %", "19+19"):
        assert fact in text


@pytest.mark.parametrize(("num_microbatches", "count"), [(0, 8), (1, 1), (2, 2)])
def test_explicit_microbatches_override_the_default(num_microbatches, count):
    schedule = PipelineConfig().make_schedule(
        num_stages=2, rows=16, num_microbatches=num_microbatches
    )
    assert schedule.num_microbatches == count


def test_invalid_settings_are_rejected_with_the_fix():
    (problem,) = problems_of(PipelineConfig(num_virtual_stages=0), "pipeline")
    assert "pipeline.num_virtual_stages=0" in problem


@pytest.mark.parametrize(("p", "v"), [(2, 2), (2, 3), (4, 2), (4, 3), (4, 4), (8, 2), (3, 5)])
def test_virtual_stage_rounds_receive_and_send_one_each(p, v):
    rounds = exchange_rounds(p, v)
    assert sorted(np.concatenate(rounds).tolist()) == list(range(p * v))
    for moved in rounds:
        assert sorted(moved // v) == list(range(p)), "one from every stage that stores"
        assert sorted(moved % p) == list(range(p)), "one to every stage that runs"
