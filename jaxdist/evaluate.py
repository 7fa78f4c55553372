"""`python -m jaxdist.evaluate RUN`: compute loss and perplexity, or accuracy, of a checkpoint.

Evaluates the evaluation data of the run, other data, or tasks of the lm-evaluation-harness. It
runs on any legal mesh, independent of the mesh of the training.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist.run.command_settings import CheckpointSettings
from jaxdist.runtime import run_command
from jaxdist.runtime.formatting.tables import columns
from jaxdist.runtime.storage import read_url
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(CheckpointSettings):
    """Checkpoint, data and devices."""

    sources: list[str] = setting(
        [], "data to evaluate on, also as NAME=SOURCE; empty = the evaluation data of the run"
    )
    tasks: list[str] = setting(
        [],
        "tasks of the lm-evaluation-harness, e.g. hellaswag,arc_easy, instead of data (the extra "
        "`eval`)",
    )
    task_folder: str = setting("", "folder with your own task files of the lm-evaluation-harness")
    num_fewshot: int = setting(-1, "few-shot examples per question; -1 = the task's default", ge=-1)
    limit: int = setting(0, "largest number of questions of each task; 0 = all", ge=0)
    global_batch_size: int = setting(
        0, "rows per batch over all devices; 0 = the run's train.global_batch_size", ge=0
    )
    max_batches: int = setting(
        0, "maximum number of batches of each set, spread over it; 0 = every row once", ge=0
    )
    json: bool = setting(False, "print one JSON object instead of text")

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        problems = []
        if self.tasks and self.sources:
            problems.append(f"tasks={self.tasks} and sources={self.sources}. Leave one out.")
        if not self.tasks and (self.task_folder or self.limit or self.num_fewshot >= 0):
            problems.append("task_folder, num_fewshot and limit are for tasks. Set --tasks.")
        if self.task_folder and not Path(self.task_folder).is_dir():
            problems.append(f"task_folder={self.task_folder!r} is not a folder. Check the path.")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            from jaxdist.run.task_evaluation import task_problem

            problems.append(task_problem("tasks"))
        return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint, print its metrics and return 0."""
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
    dataset = None if config.tasks else run.open_held_out(config.sources)
    weights = run.weights(step, config.weights)
    parts = run.parts_for(None if dataset is None else dataset.fields)
    if dataset is None:
        from jaxdist.run.task_evaluation import evaluate_tasks

        tasks = evaluate_tasks(
            parts,
            weights.params,
            config.tasks,
            task_folder=config.task_folder,
            num_fewshot=None if config.num_fewshot < 0 else config.num_fewshot,
            limit=config.limit or None,
        )
        means = {
            f"{task}/{name}": x for task, values in tasks.items() for name, x in values.items()
        }
    else:
        means = run.evaluate(weights.params, dataset, max_batches=config.max_batches)
    facts = {"run": str(run.path), "step": weights.step, "weights": weights.kind}
    result = {**facts, "mesh": str(parts.spec), "step_plan": parts.plan.digest, **means}
    text = lambda value: f"{value:,.6g}" if isinstance(value, float) else str(value)
    lines = columns([(name, text(value)) for name, value in result.items()], left=2)
    print(encode(result) if config.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    run_command(main)
