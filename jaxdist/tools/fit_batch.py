"""`jaxdist plan batch`: find the largest batch that fits, by steps on this machine's devices.

    jaxdist plan batch --config gpt2_124m            (also: python -m jaxdist.fit_batch)

Takes the settings of training. Each candidate is a child process that compiles the step with the
remat policy that training would choose, and runs two steps on rows of ones: data need not exist.
The batch is that of one step without accumulation; a pipeline keeps its number of microbatches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import runtime
from jaxdist.config import RunConfig
from jaxdist.config.command_line import read_elsewhere
from jaxdist.core.types import rows_per_example
from jaxdist.plan.estimate.memory_check import Budget, executable_bytes
from jaxdist.plan.planner import largest_batch
from jaxdist.run.setup import Parts, assemble, decide_step
from jaxdist.run.teacher import with_teacher
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.progress import waiting
from jaxdist.settings import ConfigError, setting

COMMAND = "jaxdist.plan batch"

_FINENESS = 16
"""The search ends if the smallest batch that does not fit has at most 1/16, or one row, more."""

_MOST_ROWS = 1 << 16
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(RunConfig):
    """The settings of a run, the memory that its step may use, and a single size to try."""

    limit_gib: float = setting(
        0.0,
        "GiB that the compiled step may use of each device; 0 = what the GPU's allocator provides. "
        "CPUs need a value",
        ge=0,
    )
    rows: int = setting(
        0, "try only this many examples per replica and microbatch; 0 = search", ge=0
    )
    json: bool = setting(False, "print one JSON object instead of text")


def main(argv: Sequence[str] | None = None) -> int:
    """Print each trial and the largest batch that fits, or that of --rows as JSON; return 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = _read(words)
    if config.rows:
        print(json.dumps(trial(config)))
        return 0
    trials: dict[int, dict[str, Any]] = {}

    def fits(rows: int) -> bool:
        with waiting(f"trying {rows} examples per replica and microbatch"):
            trials[rows] = _in_child(words, rows)
        if not config.json:
            print(_line(trials[rows]), flush=True)
        return bool(trials[rows]["fits"])

    if not fits(1):
        raise ConfigError(
            f"{COMMAND}: one example per replica and microbatch does not fit: "
            f"{trials[1]['reason']} Use more devices, a mesh that splits the model, "
            "--train.remat=full or shorter rows."
        )
    best = trials[search(fits, trials[1].get("estimate", 1))]
    if config.json:
        print(json.dumps({**best, "trials": [trials[n] for n in sorted(trials)]}))
        return 0
    counts = f" --train.num-microbatches {best['num_microbatches']}"
    print(f"largest: --train.global-batch-size {best['global_batch_size']}{counts}")
    return 0


def search(fits: Callable[[int], bool], guess: int) -> int:
    """Return the most rows that fit, or up to 1/`_FINENESS` less; 1 row fits.

    `guess` is tried first, then more rows in growing steps, then those between. From `_MOST_ROWS`
    rows on, the search ends.
    """
    low, high, following = 1, 0, max(1, guess // 8)
    step = max(1, guess - 1)
    while not high and low < _MOST_ROWS:
        if fits(low + step):
            low, step, following = low + step, following, 2 * following
        else:
            high = low + step
    while high - low > max(1, low // _FINENESS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def trial(config: FitConfig) -> dict[str, Any]:
    """Run steps of `config.rows` examples per microbatch; return `fits`, memory or `reason`, ..."""
    if config.simulate:
        runtime.simulate(config.simulate)
    runtime.tune_malloc()
    runtime.reserve_memory()
    runtime.setup_compilation_cache("")
    limit = config.limit_gib * 2**30
    parts = _with_rows(config, assemble(config.run, jax.devices()))
    budget = parts.budget()
    if budget is None and not limit:
        raise ConfigError(
            f"{COMMAND}: without a GPU nothing limits the memory of a step. Set --limit-gib, or "
            "use `jaxdist plan --gpus ...`, which estimates the largest batch of a GPU."
        )
    train = parts.config.train
    about = {
        "rows": config.rows,
        "global_batch_size": train.global_batch_size,
        "num_microbatches": train.num_microbatches,
        "mesh": str(parts.spec),
    }
    if budget is not None:
        if limit:
            budget = dataclasses.replace(budget, limit_bytes=min(limit, budget.limit_bytes))
        largest = largest_batch(budget.job, train.remat)
        unit = rows_per_example(parts.model.objective)
        about["estimate"] = 1 if largest is None else largest.job.rows // unit
    try:
        return {**about, "fits": True, **_run(parts, budget, limit)}
    except (ConfigError, jax.errors.JaxRuntimeError) as error:
        text = str(error)
        if not text.startswith("memory: ") and _OUT_OF_MEMORY not in text:
            raise
        return {**about, "fits": False, "reason": text.splitlines()[0]}


def _with_rows(config: FitConfig, parts: Parts) -> Parts:
    """Return the parts of the run with `config.rows` examples per replica and microbatch."""
    train, unit = parts.config.train, rows_per_example(parts.model.objective)
    schedule = parts.pipeline_schedule
    count = schedule.num_microbatches if schedule else 1
    rows = config.rows * unit * count * parts.spec.num_replicas
    train = dataclasses.replace(train, batch_schedule=[], seq_schedule=[])
    train = dataclasses.replace(train, global_batch_size=rows, num_microbatches=count)
    mesh = dataclasses.replace(parts.config.mesh, shape=str(parts.spec))
    changed = dataclasses.replace(parts.config, train=train, mesh=mesh)
    return assemble(changed, parts.devices)


def _run(parts: Parts, budget: Budget | None, limit: float) -> dict[str, Any]:
    """Compile, run two steps; return compiled and peak bytes, and remat; raise if too many."""
    fields = parts.fields
    parts = with_teacher(parts, fields)
    parts, budget = decide_step(parts, fields, budget)
    compiled_bytes = 0

    def compile_with(budget: Budget | None) -> Any:
        nonlocal parts, compiled_bytes
        parts = parts if budget is None else parts.within(budget)
        arguments = parts.step_state(), parts.abstract_batch(fields), math.inf
        stats = parts.step.train.lower(*arguments).compile().memory_analysis()
        compiled_bytes = executable_bytes(stats)
        return stats

    if budget is not None:
        budget.check()
        budget.fit(compile_with)
    else:
        compile_with(None)
        if compiled_bytes > limit:
            raise ConfigError(
                f"memory: the compiled step takes {in_bytes(compiled_bytes)} of each device, but "
                f"{in_bytes(limit)} may be used."
            )
    state = parts.init_state()
    batch = {
        name: jax.device_put(np.ones(x.shape, x.dtype), x.sharding)
        for name, x in parts.abstract_batch(fields).items()
    }
    for _ in range(2):
        state, metrics = parts.step.train(state, batch, math.inf)
    jax.block_until_ready((state, metrics))
    peak = (parts.devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"compiled_bytes": compiled_bytes, "peak_bytes": peak, "remat": parts.plan.remat}


def _in_child(words: Sequence[str], rows: int) -> dict[str, Any]:
    """Return the result of `trial` with `rows` in a child process; a killed one does not fit."""
    command = [sys.executable, "-m", "jaxdist.fit_batch", *words, f"--rows={rows}"]
    done = subprocess.run(command, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("{"):
        return dict(json.loads(last))
    if done.returncode < 0:  # by the system, or an abort of XLA
        return {"rows": rows, "fits": False, "reason": f"killed by signal {-done.returncode}."}
    raise ConfigError(
        f"{COMMAND}: the trial of {rows} examples failed with exit code {done.returncode}:\n"
        f"{done.stderr.strip()[-2000:]}"
    )


def _line(result: Mapping[str, Any]) -> str:
    if not result["fits"]:
        return f"{result['rows']} examples per replica and microbatch: {result['reason']}"
    used = result["peak_bytes"] or result["compiled_bytes"]
    return (
        f"{result['rows']} examples per replica and microbatch fit: {in_bytes(used)} of each "
        f"device, remat {result['remat']}"
    )


def _read(words: Sequence[str]) -> FitConfig:
    return read_elsewhere(FitConfig, words, command=COMMAND, summary=__doc__ or "")


if __name__ == "__main__":
    runtime.run_command(main)
