"""A run's settings as a command is given them: what the defaults are, and what replaces them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config.parser import headed, read_settings
from jaxdist.config.run_config import RunConfig
from jaxdist.config.sources import read_file, split_arguments
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.core.types import ConfigError
from jaxdist.data.config import DataConfig
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
    argv: Sequence[str], *, command: str, summary: str = "", check_rules: bool = True
) -> RunConfig:
    """A run's settings from `--config FILE.toml` and flags; see `read_settings`.

    With `--resume PATH` or `--replay PATH:STEP` the settings of that run are the defaults, so that
    only what shall differ needs a flag; with `--init-from DIR` of Hugging Face the model's sizes
    and tokenizer are.
    """
    resumed = _resumed(argv)
    base = None
    if resumed is not None and (locate(resumed) / "config.toml").exists():
        base = dataclasses.replace(stored_run(locate(resumed) / "config.toml"), run_dir="")
    start = _start_of(argv)
    if base is None and start and is_model(start):
        try:
            base = _run_of_model(Path(start).expanduser())
        except ConfigError as error:
            lines = [f"init_from={start!r}: {line}" for line in error.problems]
            raise ConfigError(headed(command, lines)) from None
    if base is None and _asks_to_debug(argv):
        base = _debug_run(argv)
    return read_settings(
        RunConfig,
        argv,
        command=command,
        summary=summary,
        aliases=ALIASES,
        base=base,
        check_rules=check_rules,
    )


def _asks_to_debug(argv: Sequence[str]) -> bool:
    return any(
        given.path == ("debug",) and given.raw in (None, "true")
        for given in split_arguments(argv, ALIASES).flags
    )


def _debug_run(argv: Sequence[str]) -> RunConfig:
    """The defaults of `--debug`: as little as exercises everything, nothing behind one's back."""
    arguments = split_arguments(argv, ALIASES)
    has_mesh = any(given.path == ("mesh", "shape") for given in arguments.flags) or any(
        "shape" in read_file(file)[0].get("mesh", {}) for file in arguments.files
    )
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


def _resumed(argv: Sequence[str]) -> str | None:
    """The run that `--resume` or `--replay` names, if one does."""
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        named = value if equals else following
        if flag == "--replay":
            return named.rpartition(":")[0]
        if flag == "--resume":
            return None if named in ("", "auto", "never") else named
    return None


def _start_of(argv: Sequence[str]) -> str:
    """What `init_from` will be: the flag's value, or the config file's."""
    arguments = split_arguments(argv, ALIASES)
    flags = [given.raw for given in arguments.flags if given.path == ("init_from",)]
    found = flags or [read_file(file)[0].get("init_from") for file in arguments.files]
    return found[0] if found and isinstance(found[0], str) else ""


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
