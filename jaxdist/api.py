"""Python API: `jaxdist.train`, `jaxdist.open`, `jaxdist.plan`; see docs/python.md.

The guards of training raise `Stopped` and `CorruptState`; exceptions of callbacks pass through.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from jaxdist import runtime
from jaxdist.checkpoint import CheckpointError
from jaxdist.config import RunConfig, read_run
from jaxdist.config.command_line import ALIASES
from jaxdist.core.types import Model, Objective
from jaxdist.data.custom import PYTHON_ROWS
from jaxdist.models import PYTHON_MODEL
from jaxdist.results import Run, check_type
from jaxdist.run.metrics_log import Record
from jaxdist.run.program import Program
from jaxdist.run.run_directory import RunDirectory
from jaxdist.runtime.progress import has_watcher, make_bar
from jaxdist.runtime.storage import flush_appended
from jaxdist.settings import ConfigError
from jaxdist.train import run as run_training

Callback: TypeAlias = Callable[..., bool | str | None]
"""Called with each train and eval record, and if it has two required arguments with a function that
returns the `TrainState`. True or a reason (a text) ends the run after a save."""

Config: TypeAlias = "RunConfig | str | os.PathLike[str] | Mapping[str, Any] | None"
"""Base settings: a TOML file, the name of a config of the package, a table of settings, or a
`RunConfig`; None = the defaults."""


def train(
    config: Config = None,
    *,
    model: Model | Callable[..., Model] | Mapping[str, Any] | str | None = None,
    data: Any = None,
    objective: Objective | None = None,
    optimizer: Any = None,
    schedule: Callable[[Any], Any] | None = None,
    callbacks: Callback | Iterable[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Run:
    """Train a model, as `python -m jaxdist.train` does.

    Args:
        config: base settings.
        model: a `Model`, a function that returns one (called with `seq_len`), or settings: a kind
            ("cnn") or a table ({"d_model": 256}).
        data: your own rows (anything with len() and [index], such as a torch or Hugging Face
            Dataset, a grain MapDataset or IterDataset, a pair (training rows, evaluation rows), a
            DatasetDict with "train", or a function that returns one of these), paths, or a table
            of settings.
        objective: (output of the model's head, batch, context) -> Sums, instead of that of the
            settings; see docs/parallelism.md. A resume needs it again, like optimizer and schedule.
        optimizer: an optax optimizer with its learning rate, e.g. `optax.adam(1e-3)`, instead of
            that of the settings; gradients are clipped before it by `optim.max_grad_norm`.
        schedule: step -> learning rate, instead of that of the settings. It multiplies the updates
            of `optimizer`, which then has a learning rate of 1.
        callbacks: functions as described at `Callback`, called on every process.
        progress: show steps and evaluations in a bar; None = only if this is process 0 on a
            terminal or in a notebook.
        settings: settings of the run, as short flags (`steps=100`, `mesh="dp=2"`), tables
            (`optim={"peak_lr": 1e-3}`) or dotted names (`**{"optim.peak_lr": 1e-3}`).

    Returns:
        The run, finished or stopped: see `Run.exit_reason`.

    Raises:
        ConfigError: wrong arguments or settings.
        Stopped: losses or weights are bad, and the policy ends the run.
        CorruptState: copies of a value on several devices differ, and the policy ends the run.
        CheckpointError: a restore failed, too many saves in a row failed, or the last one did.
        KeyboardInterrupt: a second Ctrl-C; the first one saves, ends the run and returns.
    """
    config, values = _begin(config, settings)
    make_model, rows = _objects(model, data, values)
    base = config if isinstance(config, RunConfig) else None
    flags = [] if base else _file_flags(config)
    run_config = read_run(flags, command="jaxdist.train", base=base, values=values)
    if run_config.replay:
        raise ConfigError("replay does not train. Use python -m jaxdist.train --replay RUN:STEP.")
    _check_objective(objective)
    is_rule = optimizer is None or callable(getattr(optimizer, "update", None))
    check_type("optimizer", optimizer, is_rule, "an optax optimizer, e.g. optax.adam(1e-3)")
    is_rate = schedule is None or callable(schedule)
    check_type("schedule", schedule, is_rate, "a function step -> learning rate")
    is_many = isinstance(callbacks, Iterable) and not callable(callbacks)
    callbacks = list(callbacks) if is_many else [callbacks]  # type: ignore[arg-type, list-item]
    are_functions = all(map(callable, callbacks))
    check_type("callbacks", callbacks, are_functions, "a function or a list of functions")
    check_type("progress", progress, progress in (None, True, False), "True, False or None")
    has_bar = has_watcher() if progress is None else progress
    started: list[RunDirectory] = []
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(runtime.Preemption(in_program=True))
        stack.callback(flush_appended)
        stack.callback(runtime.close_logs)
        if has_bar:
            length = None if run_config.train.epochs else run_config.train.steps
            callbacks.append(stack.enter_context(_bar(length)))

        takes_state = [_num_arguments(callback) == 2 for callback in callbacks]

        def on_record(record: Record, state: Callable[[], Any]) -> None:
            answers = [
                callback(record, state) if takes else callback(record)
                for callback, takes in zip(callbacks, takes_state, strict=True)
            ]
            reason = next((text for text in answers if isinstance(text, str)), "")
            if reason or True in answers:
                stop.request(reason)

        program = Program(
            model=make_model,
            objective=objective,
            optimizer=optimizer,
            schedule=schedule,
            rows=rows,
            on_start=started.append,
            on_record=on_record,
            owns_stdout=False,
            has_bar=has_bar,
        )
        code = run_training(run_config, program, stop, lambda: False)
    if code == runtime.EXIT_FAILURE:
        raise CheckpointError(
            f"{started[0].path}: the last checkpoint could not be saved, so the steps after the "
            "previous one are lost. Fix the cause in the log, and train with resume set to this "
            "directory."
        )
    return Run(started[0].path, model=make_model, objective=objective, rows=rows)


def open(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    mesh: str = "auto",
    weights: Literal["auto", "ema", "raw"] = "auto",
    model: Model | Callable[..., Model] | None = None,
    data: Any = None,
    objective: Objective | None = None,
) -> Run:
    """Open a run directory, to read its metrics and to use its weights.

    Args:
        path: path of the run, or of one of its checkpoints.
        step: step of the checkpoint to use; None = that of `path`, or the newest valid one.
        mesh: devices for the weights, e.g. "tp=2"; "auto" = one device.
        weights: "ema" = moving average, "raw" = as trained, "auto" = the average if the run has
            one.
        model: the object that was passed to `train`, if any.
        data: the object that was passed to `train`, if any.
        objective: the object that was passed to `train`, if any; for evaluation.

    Raises:
        ConfigError: there is no run, or an argument is wrong.
    """
    make_model, rows = _objects(model, data, {})
    for name, value, parsed in (("model", model, make_model), ("data", data, rows)):
        is_object = value is None or parsed is not None or callable(value)
        check_type(name, value, is_object, "the object passed to train, or None for settings")
    _check_objective(objective)
    return Run(
        path, step=step, mesh=mesh, weights=weights,
        model=make_model, objective=objective, rows=rows,
    )  # fmt: skip


def _num_arguments(function: Callable[..., Any]) -> int:
    """Return the number of required positional arguments; 1 for functions without a signature."""
    try:
        arguments = inspect.signature(function).parameters.values()
    except ValueError:
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in arguments)


def _check_objective(objective: Any) -> None:
    is_allowed = objective is None or callable(objective)
    check_type("objective", objective, is_allowed, "a function (output, batch, context) -> sums")


def plan(gpus: str, config: Config = None, **settings: Any) -> list[dict[str, Any]]:
    """Plan a run on GPUs that need not be available, as `python -m jaxdist.plan` does.

    Args:
        gpus: e.g. "h100:8", "h100:8x8" for 8 nodes of 8, or several, separated by commas.
        config: base settings.
        settings: settings as for `train`, and of the plan (`tokens=1e12`, `compile=False`).

    Returns:
        One record for each cluster, as `--json` prints it: "fits", "mesh", "memory", "step",
        "cost", "meshes" and more; sizes in bytes, times in seconds if no name says otherwise.

    Raises:
        ConfigError: every problem of the settings; no mesh is legal; unknown GPUs.
    """
    from jaxdist.plan.advice import advise
    from jaxdist.plan.json_record import record_of
    from jaxdist.plan.options import clusters_of, read_gpus, read_plan
    from jaxdist.plan.planner import make_plan

    config, values = _begin(config, {"gpus": gpus, **settings})
    if isinstance(config, RunConfig):
        raise ConfigError("config of jaxdist.plan is a RunConfig. Give a TOML file or a table.")
    question, mesh = read_plan(_file_flags(config), values=values)
    plans = [make_plan(question, cluster, mesh) for cluster in clusters_of(question)]
    gpus_by_name = read_gpus(question)
    return [record_of(one, advise(one, question, gpus_by_name)) for one in plans]


def _begin(config: Config, settings: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    if isinstance(config, Mapping):
        return None, {**_flat(config), **_flat(settings)}
    return config, _flat(settings)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name if prefix else ALIASES.get(name, name)}"] = value
    return flat


def _file_flags(config: Config) -> list[str]:
    if config is None:
        return []
    check_type("config", config, isinstance(config, str | os.PathLike), "a TOML file or a table")
    return ["--config", os.fspath(config)]  # type: ignore[arg-type]


def _objects(
    model: Any, data: Any, values: dict[str, Any]
) -> tuple[Callable[[int], Model] | None, Any]:
    """Return (seq_len -> model, data); None = not passed, or described by settings in `values`.

    The settings store the name of an importable function, so that the run can be opened and resumed
    without the program.
    """
    make_model = None
    if isinstance(model, str | Mapping):
        values |= _flat({"model": model})
    elif model is not None:
        is_model = isinstance(model, Model) or callable(model)
        check_type("model", model, is_model, "a Model, a function that makes one, or settings")
        name = _importable(model)
        values |= {"model.kind": "custom", "model.factory": name or PYTHON_MODEL}
        if isinstance(model, Model):
            make_model = lambda seq_len: model
        elif not name:
            make_model = lambda seq_len: model(seq_len=seq_len)
    if isinstance(data, Mapping) and "train" in data:
        data = (data["train"], data.get("validation", data.get("test")))
    if data is None:
        return make_model, None
    if isinstance(data, Mapping):
        values |= _flat({"data": data})
        return make_model, None
    paths = data if isinstance(data, list) else [data]
    if all(isinstance(item, str | os.PathLike) for item in paths):
        values["data.sources"] = paths
        return make_model, None
    name = _importable(data)
    values["data.sources"] = [name or PYTHON_ROWS]
    return make_model, None if name else data


def _importable(thing: Any) -> str:
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    if not inspect.isfunction(thing) or module == "__main__" or not name.isidentifier():
        return ""
    is_same = getattr(importlib.import_module(module), name, None) is thing
    return f"{module}:{name}" if is_same else ""


@contextlib.contextmanager
def _bar(total_steps: int | None) -> Iterator[Callback]:
    bar = make_bar(total=total_steps, desc="training", unit="step", disable=False)
    losses: dict[str, str] = {}

    def follow(record: Record) -> None:
        step, is_train = record["step"], record["kind"] == "train"
        if isinstance(record.get("loss"), float):  # None = no labels
            losses["loss" if is_train else "eval_loss"] = f"{record['loss']:.4f}"
        bar.set_postfix(losses, refresh=False)
        if is_train and not bar.n:
            bar.initial = bar.n = step - 1  # start of a resumed run
        if is_train:
            bar.update(step - bar.n)

    with bar:
        yield follow


__all__ = ["Callback", "Run", "open", "plan", "train"]
