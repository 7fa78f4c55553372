"""A run's settings as a command is given them: what the defaults are, and what replaces them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config.run_config import RunConfig
from jaxdist.core.settings import ConfigError, read_settings
from jaxdist.core.settings.reader import GivenValues
from jaxdist.core.settings.schema import BadValueError, read_value
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.data.config import DataConfig, settings_of_tokens
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface.directory import is_model, read_json
from jaxdist.models.huggingface.families import read_config
from jaxdist.optim import OptimConfig
from jaxdist.run.monitoring.config import MonitoringConfig
from jaxdist.run.resilience.config import ResilienceConfig
from jaxdist.runtime.config import RuntimeConfig
from jaxdist.runtime.storage import locate

ALIASES = {
    "mesh": "mesh.shape",
    "zero": "mesh.zero",
    "steps": "train.steps",
    "model": "model.kind",
    "profile": "monitoring.profile",
}
"""Short flags of the commands that take a whole run's settings."""

_TUNING_LR = 2e-5
"""Peak learning rate of a run that starts from published weights: what papers on tuning all weights
of models of 1 to 70 billion parameters use (1e-5 to 3e-5); a new model's rate would undo them."""


def read_run(
    argv: Sequence[str],
    *,
    command: str,
    summary: str = "",
    check_rules: bool = True,
    base: RunConfig | None = None,
    values: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A run's settings from `--config FILE.toml` and flags; see `read_settings`.

    With `--resume PATH` or `--replay PATH:STEP` the settings of that run are the defaults, so that
    only what differs needs a flag. With `--init-from DIR` of Hugging Face the model's sizes and
    tokenizer are, and with `--debug` those of a tiny run. A token folder among the sources brings
    its tokenizer and the size of its vocabulary. A Python program gives `values`, and `base` to
    start from instead of all of these.
    """
    run = read_settings(
        RunConfig,
        argv,
        command=command,
        summary=summary,
        aliases=ALIASES,
        base=_base_of if base is None else base,
        check_rules=check_rules,
        values=values,
    )
    return _with_absolute_tokenizer(run)


def _with_absolute_tokenizer(run: RunConfig) -> RunConfig:
    """Settings under which the run can be opened from another directory than it was started in."""
    file = run.data.tokenizer
    if file == "bytes" or not os.path.isfile(file):
        return run
    data = dataclasses.replace(run.data, tokenizer=os.path.abspath(file))
    return dataclasses.replace(run, data=data)


def _base_of(given: GivenValues) -> RunConfig | None:
    """What stands in the place of the defaults, where something does."""
    run = _stored(given)
    if run and (locate(run) / "config.toml").exists():
        return dataclasses.replace(stored_run(locate(run) / "config.toml"), run_dir="")
    start = given.get("init_from")
    if isinstance(start, str) and start and is_model(start):
        try:
            return _run_of_model(Path(start).expanduser())
        except ConfigError as error:
            raise ConfigError([f"init_from={start!r}: {p}" for p in error.problems]) from None
    if "debug" in given and given["debug"] in (None, True, "true"):
        return _with_tokens(_debug_run(has_mesh="mesh.shape" in given), given)
    return _with_tokens(RunConfig(), given)


def _with_tokens(run: RunConfig, given: GivenValues) -> RunConfig:
    """The defaults of a run whose first token folder says how its text became tokens."""
    try:
        sources = read_value(given.get("data.sources", []), list[str])
    except BadValueError:  # the reader says so
        return run
    told = next((told for source in sources if (told := settings_of_tokens(source))), None)
    if told is None:
        return run
    settings, vocab_size = told
    model = run.model
    if model.kind == "decoder":
        model = dataclasses.replace(model, vocab_size=vocab_size or model.vocab_size)
    return dataclasses.replace(run, model=model, data=dataclasses.replace(run.data, **settings))


def _stored(given: GivenValues) -> str:
    """The run that `--resume` or `--replay` names, if one does."""
    if given.get("replay"):
        return str(given["replay"]).rpartition(":")[0]
    resume = str(given.get("resume") or "")
    return "" if resume in ("auto", "never") else resume


def _debug_run(has_mesh: bool) -> RunConfig:
    """The defaults of `--debug`: as little as exercises everything, nothing in the background."""
    return RunConfig(
        name="debug",
        debug=True,
        simulate=0 if has_mesh else 2,
        model=DecoderConfig(d_model=64, num_layers=2, num_heads=8, mlp_dim=128),
        train=TrainConfig(steps=8, global_batch_size=16, seq_len=64),
        resilience=ResilienceConfig(nonfinite_policy="stop"),
        optim=OptimConfig(warmup_steps=2),
        data=DataConfig(prefetch=1),
        eval=EvalConfig(interval_steps=4, max_batches=1, final_max_batches=1),
        checkpoint=CheckpointConfig(save_interval_steps=4, async_save=False),
        monitoring=MonitoringConfig(log_interval_steps=1),
        runtime=RuntimeConfig(compilation_cache_dir="off"),
    )


def _run_of_model(folder: Path) -> RunConfig:
    """The defaults of a run that goes on from a Hugging Face model."""
    name = re.sub(r"[^\w.+-]", "-", folder.resolve().name).lstrip(".+-")
    return RunConfig(
        name=name or "tuned",
        model=read_config(read_json(folder)),
        data=DataConfig(tokenizer=str(folder / "tokenizer.json")),
        optim=OptimConfig(peak_lr=_TUNING_LR),
    )


def stored_run(path: str | os.PathLike[str]) -> RunConfig:
    """The settings that a run wrote into its `config.toml`, as they were.

    Their rules were checked when the run started; some (does the data exist?) need not hold on
    the machine that looks at the run now.
    """
    return read_settings(
        RunConfig, ["--config", str(path)], command=f"settings of {path}", check_rules=False
    )
