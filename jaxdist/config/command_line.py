"""A run's settings as a command is given them: what the defaults are, and what replaces them."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.config.resilience import ResilienceConfig
from jaxdist.config.run_config import RunConfig
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.data.config import DataConfig, settings_of_tokens
from jaxdist.data.tokenizer import BUILT_IN, OLD_TEXT_FORMAT
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface.directory import folder_of, is_model, read_model
from jaxdist.optim import OptimConfig
from jaxdist.runtime import hub
from jaxdist.runtime.storage import locate, read_url
from jaxdist.settings import ConfigError, read_settings
from jaxdist.settings.reader import GivenValues
from jaxdist.settings.schema import BadValueError, read_value

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
    only what differs needs a flag. With `--init-from` a Hugging Face model, its sizes and tokenizer
    are, and with `--debug` those of a tiny run. A token folder among the sources brings its
    tokenizer and the size of its vocabulary. A Python program gives `values`, and `base` to start
    from instead of all of these. Names on the hub come back with their commit.
    """
    return read_settings(
        RunConfig,
        argv,
        command=command,
        summary=summary,
        aliases=ALIASES,
        base=_base_of if base is None else base,
        settle=_with_lasting_names,
        check_rules=check_rules,
        values=values,
        read_url=read_url,
    )


def _with_lasting_names(run: RunConfig) -> RunConfig:
    """Settings that name the same files in another directory and on another day."""
    directory = run.known_directory
    file = run.data.tokenizer
    here = os.path.abspath(os.path.expanduser(file))
    is_file = file not in ("auto", "bytes", *BUILT_IN) and os.path.isfile(here)
    file = here if is_file else _with_commit(file, directory)
    run = dataclasses.replace(
        run,
        init_from=_with_commit(run.init_from, directory),
        data=dataclasses.replace(run.data, tokenizer=file),
    )
    return _with_text_format(run, _table_of(directory)) if directory else run


def _with_commit(name: str, directory: str) -> str:
    """A hub name with its commit; any other text as it is.

    Without a revision it is the commit that the run in `directory` began with, if there is one:
    the same command goes on with the same files, whatever the hub holds by now.

    Raises:
        ConfigError: the hub has no such model, or cannot be reached.
    """
    if not hub.is_hub_name(name):
        return name
    earlier = _hub_names_of(directory) if directory and "@" not in name else []
    return next((e for e in earlier if e.partition("@")[0] == name), "") or hub.with_commit(name)


def _hub_names_of(directory: str) -> list[str]:
    """Names with a commit in the settings of a run; [] where there is none."""
    table = _table_of(directory)
    named = table.get("init_from", ""), table.get("data", {}).get("tokenizer", "")
    return [str(name) for name in named if "@" in str(name)]


def _table_of(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the stored settings of a run as a table; {} for a new or a damaged run."""
    run = locate(directory)
    try:
        text = manifest.stored_config(run / "checkpoints") or (run / "config.toml").text()
        table = tomllib.loads(text)
        return table if isinstance(table.get("data", {}), dict) else {}
    except (OSError, ValueError):
        return {}


def _with_text_format(run: RunConfig, stored: Mapping[str, Any]) -> RunConfig:
    """Keep the text format of the stored settings of a run; without one it is the old."""
    if not stored:
        return run
    stored_format = stored.get("data", {}).get("text_format")
    text_format = min(run.data.text_format, stored_format or OLD_TEXT_FORMAT)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, text_format=text_format))


def _base_of(given: GivenValues) -> RunConfig | None:
    """What stands in the place of the defaults, where something does."""
    run, step = _stored(given)
    if run and (_table_of(run) or (locate(run) / "config.toml").exists()):
        return dataclasses.replace(settings_of_run(run, step), run_dir="")
    start = given.get("init_from")
    if isinstance(start, str) and start and is_model(start):
        try:
            return _run_of_model(_with_commit(str(start), str(given.get("run_dir") or "")))
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
    model: Any = run.model
    if vocab_size and "vocab_size" in model.size_settings:
        model = dataclasses.replace(model, vocab_size=vocab_size)
    return dataclasses.replace(run, model=model, data=dataclasses.replace(run.data, **settings))


def _stored(given: GivenValues) -> tuple[str, int | None]:
    """The run that `--resume` or `--replay` names, if one does, and the step to replay from."""
    if given.get("replay"):
        run, _, step = str(given["replay"]).rpartition(":")
        return run, int(step) - 1 if re.fullmatch("[0-9]{1,18}", step) else None
    resume = str(given.get("resume") or "")
    return "" if resume in ("auto", "never") else resume, None


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
        eval=EvalConfig(interval_steps=4, max_batches=1, final_max_batches=1),
        checkpoint=CheckpointConfig(save_interval_steps=4, async_save=False),
        monitoring=MonitoringConfig(log_interval_steps=1),
    )


def _run_of_model(start: str) -> RunConfig:
    """The defaults of a run that goes on from a Hugging Face model: a directory or hub name."""
    folder, is_hub = folder_of(start), hub.is_hub_name(start)
    name = hub.short_name(start) if is_hub else folder.absolute().name
    return RunConfig(
        name=re.sub(r"[^\w.+-]", "-", name).lstrip(".+-") or "tuned",
        model=read_model(folder),
        data=DataConfig(tokenizer=start if is_hub else str(folder / "tokenizer.json")),
        optim=OptimConfig(peak_lr=_TUNING_LR),
    )


def stored_run(path: str | os.PathLike[str]) -> RunConfig:
    """The settings that a run wrote into its `config.toml`, as they were.

    Their rules were checked when the run started; some (does the data exist?) need not hold on
    the machine that looks at the run now.
    """
    run = read_settings(
        RunConfig,
        ["--config", str(path)],
        command=f"settings of {path}",
        check_rules=False,
        is_stored=True,
        read_url=read_url,
    )
    place = locate(path)
    return (
        _with_text_format(run, tomllib.loads(place.text())) if place.name == "config.toml" else run
    )


def settings_of_run(path: str | os.PathLike[str], step: int | None = None) -> RunConfig:
    """Return the settings stored with a checkpoint of a run, as `manifest.stored_config` picks it.

    A run without checkpoints, or whose checkpoint stores none, has those of its `config.toml`.
    """
    run = locate(path)
    if text := manifest.stored_config(run / "checkpoints", step):
        return parse_run(text, str(run))
    if not (run / "config.toml").exists():
        raise ConfigError(
            f"{run} holds no config.toml, and its checkpoints store no settings. Name a whole run."
        )
    return stored_run(run / "config.toml")


def parse_run(text: str, origin: str) -> RunConfig:
    """Return the settings in the text of a stored `config.toml`; their rules are not checked."""
    table = tomllib.loads(text)
    run = read_settings(
        RunConfig,
        [],
        command=f"settings of {origin}",
        check_rules=False,
        is_stored=True,
        values=table,
    )
    return _with_text_format(run, table)
