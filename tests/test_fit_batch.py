"""`jaxdist plan batch`: the largest batch by trial; on CPUs, the limit is of the compiled step."""

import json
import math
import sys

import jax
import pytest
from commands import tiny
from refusals import refused

from jaxdist.config import read_run
from jaxdist.plan.estimate.memory_check import executable_bytes
from jaxdist.run.setup import assemble
from jaxdist.tools import fit_batch


@pytest.mark.parametrize("guess", [1, 2, 3, 30, 100, 500])
@pytest.mark.parametrize("most", [1, 2, 5, 16, 33, 100, 1000])
def test_search_is_exact_to_a_sixteenth(guess, most):
    tried = []

    def fits(rows):
        tried.append(rows)
        return rows <= most

    best = fit_batch.search(fits, guess)
    assert best <= most < best + max(1, best / 16) + 1
    assert best == 1 or best in tried
    assert len(tried) == len(set(tried)) <= 18
    if guess == most > 30:
        assert len(tried) <= 4


def test_rows_of_a_pipeline_are_those_of_each_chosen_microbatch():
    """Eight microbatches: four for each of two stages, chosen from the batch of the run."""
    words = [*tiny("--mesh=dp=2,pp=2", "--train.global_batch_size=32"), "--rows=3"]
    config = fit_batch._read(words)
    train = fit_batch._with_rows(config, assemble(config.run, jax.devices()[:4])).config.train
    assert (train.global_batch_size, train.num_microbatches) == (3 * 2 * 8, 8)


def compiled_bytes(rows: int, flags) -> int:
    """Return the bytes of the step as XLA reports them, without the code under test."""
    sizes = [f"--train.global_batch_size={rows * 2}", "--train.num_microbatches=1"]
    parts = assemble(read_run(tiny(*flags, *sizes), command="x"), jax.devices()[:2])
    step = parts.step.train.lower(parts.step_state(), parts.abstract_batch(), math.inf)
    return executable_bytes(step.compile().memory_analysis())


def test_largest_batch_within_a_limit(monkeypatch, capsys):
    """Trials run in this process; the limit is what six rows need."""
    flags = ["--mesh=dp=2", "--simulate=2"]
    monkeypatch.setattr(fit_batch.runtime, "simulate", lambda _: None)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:2])
    limit = compiled_bytes(6, flags)
    assert limit < compiled_bytes(7, flags)

    def in_process(words, rows):
        return fit_batch.trial(fit_batch._read([*words, f"--rows={rows}"]))

    monkeypatch.setattr(fit_batch, "_in_child", in_process)
    words = [*tiny(*flags), f"--limit-gib={limit / 2**30}", "--data.sources=none.txt"]
    assert fit_batch.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["rows"], result["global_batch_size"], result["mesh"]) == (6, 12, "dp=2")
    assert result["compiled_bytes"] == limit
    assert {trial["rows"]: trial["fits"] for trial in result["trials"]}[7] is False
    run = fit_batch._run

    def out_of_memory(parts, *rest):
        if parts.config.train.global_batch_size > 6:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return run(parts, *rest)

    monkeypatch.setattr(fit_batch, "_run", out_of_memory)
    assert fit_batch.main(words) == 0
    out = capsys.readouterr().out
    assert "4 examples per replica and microbatch: RESOURCE_EXHAUSTED" in out
    assert out.splitlines()[-1].endswith("--train.global-batch-size 6 --train.num-microbatches 1")
    monkeypatch.setattr(fit_batch, "_run", run)
    with refused("one example", "memory: the compiled step takes"):
        fit_batch.main([*words[:-2], "--limit-gib=1e-9"])


def test_children_that_die_do_not_fit_and_other_errors_are_reported(tmp_path, monkeypatch):
    with refused("exit code 2", "--limit-gib"):  # a real child
        fit_batch.main(tiny("--simulate=1"))
    with refused("train.steps=0"):
        fit_batch.main(tiny("--steps=0"))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with refused("killed by signal 9"):
        fit_batch.main(tiny("--simulate=1"))
