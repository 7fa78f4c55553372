"""The shipped GPU configs are the planner's best for the hardware that they name."""

import pytest
from commands import ROOT

from jaxdist.config import read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.hardware import parse_gpus
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.search import Candidate, search

GPUS = {
    "qwen3_0.6b": "l4:8",
    "qwen3_8b": "h100:8",
    "qwen3_30b_a3b": "h100:8",
    "mixtral_8x7b": "h100:32",
    "qwen3_235b_a22b": "h100:256",
    "llama3_8b": "h100:8",
    "llama3_8b_full": "h100:8",
    "llama3_70b": "h100:128",
    "llama3_405b": "h100:512",
}
"""`pipeline_64gpu`, `*_pipeline` and `llama3_8b_128k` are left out: their mesh is their
subject (the estimate prefers tp=4 to cp=8 by 14 %, within the accuracy for split rows). GPT-2 is
too: the estimate takes one microbatch for 5 % faster than the config's four, within its error."""


def planned(name, *flags):
    path = ROOT / "configs" / f"{name}.toml"
    data = ["--data.sources", "stdlib", "--data.tokenizer", "bytes"]
    run = read_run(["--config", str(path), *data, *flags], command="test")
    cluster = parse_gpus(GPUS[name])[0]
    spec = MeshSpec.parse(run.mesh.shape, cluster.num_gpus)
    return Candidate.of(Job.of(run, spec, cluster)), run, cluster


@pytest.mark.parametrize("name", GPUS)
def test_a_config_is_within_three_percent_of_the_planners_best(name):
    own, run, cluster = planned(name)
    best = search(run, cluster, stages=False).best
    assert own.fits and best is not None  # with the margin that plans keep free
    assert own.time.seconds <= 1.03 * best.time.seconds, best.command(run)


@pytest.mark.parametrize(
    ("mesh", "microbatches", "compiled"),
    [("pp=2,fsdp=4", 8, 68.06), ("pp=2,fsdp=2,tp=2", 16, 108.74)],
)
def test_memory_of_moments_in_8_bits_is_that_of_compiled_programs(mesh, microbatches, compiled):
    """With `tp`, devices hold parts of blocks, which XLA gathers; GiB of `gpu_program.py`."""
    flags = ["--mesh", mesh, "--train.num_microbatches", str(microbatches)]
    own, _, _ = planned("qwen3_30b_a3b", *flags)
    assert own.memory.total_bytes / 2**30 == pytest.approx(compiled, rel=0.05)
