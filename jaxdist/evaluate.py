"""`python -m jaxdist.evaluate RUN`: compute loss and perplexity, or accuracy, of a checkpoint.

Evaluates the held-out rows of the run or other data, each row once. It runs on any legal mesh,
independent of the mesh of the training.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

from jaxdist.runtime import run_command
from jaxdist.runtime.formatting.tables import columns
from jaxdist.runtime.storage import read_url
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Checkpoint, data and devices."""

    run: str = setting("", "run directory, or one of its checkpoints", required=True)
    step: int = setting(-1, "step of the checkpoint; -1 = the newest valid one", ge=-1)
    weights: Literal["auto", "ema", "raw"] = setting(
        "auto",
        "ema = moving average of the weights, raw = as trained, auto = the average if the run has "
        "one",
    )
    sources: list[str] = setting([], "data to evaluate on; empty = the held-out rows of the run")
    global_batch_size: int = setting(0, "rows per batch over all devices; 0 = as in the run", ge=0)
    max_batches: int = setting(
        0, "number of batches, spread over the data; 0 = every row once", ge=0
    )
    mesh: str = setting("auto", "mesh axes, e.g. fsdp=8; auto = one device")
    simulate: int = setting(
        0, "simulated CPU devices; 0 = the machine's own devices", ge=0, le=4096
    )
    json: bool = setting(False, "print one JSON object instead of text")


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and print its metrics."""
    from jaxdist.settings import read_settings

    config = read_settings(
        EvaluateConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.evaluate",
        summary=__doc__ or "",
        positional=("run",),
        read_url=read_url,
    )
    from jaxdist.run.metrics_log import encode
    from jaxdist.run.trained_run import open_run

    changes = {"global_batch_size": config.global_batch_size} if config.global_batch_size else {}
    step = None if config.step < 0 else config.step
    run = open_run(config.run, step=step, mesh=config.mesh, simulate=config.simulate, train=changes)
    dataset = run.open_held_out(config.sources)
    weights = run.weights(step, config.weights)
    means = run.evaluate(weights.params, dataset, max_batches=config.max_batches)
    facts = {"run": str(run.path), "step": weights.step, "weights": weights.kind}
    parts = run.parts_for(dataset.fields)
    result = {**facts, "mesh": str(parts.spec), "step_plan": parts.plan.digest, **means}
    text = lambda value: f"{value:,.6g}" if isinstance(value, float) else str(value)
    lines = columns([(name, text(value)) for name, value in result.items()], left=2)
    print(encode(result) if config.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    run_command(main)
