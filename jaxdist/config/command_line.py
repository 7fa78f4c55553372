"""Settings of a run from flags, files and stored runs."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.config.resilience import ResilienceConfig
from jaxdist.config.run_config import RunConfig
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.data.config import DataConfig, settings_of_tokens, split_set
from jaxdist.data.hub_sets import is_hub_set, pin_commit, without_commit
from jaxdist.data.tokenizer import BUILT_IN, OLD_TEXT_FORMAT
from jaxdist.models.configs import DecoderConfig, ModelConfig
from jaxdist.models.huggingface.directory import folder_of, is_model, read_model
from jaxdist.models.scaled import scaled_model
from jaxdist.optim import OptimConfig
from jaxdist.runtime import hub
from jaxdist.runtime.storage import is_url, locate, read_url
from jaxdist.settings import (
    ConfigError,
    problems_of,
    read_settings,
    split_flags,
    value_of,
    without_flags,
)
from jaxdist.settings.reader import InputValues
from jaxdist.settings.schema import BadValueError, read_value

C = TypeVar("C", bound=RunConfig)

ALIASES = {
    "mesh": "mesh.shape",
    "zero": "mesh.zero",
    "steps": "train.steps",
    "model": "model.kind",
    "profile": "monitoring.profile",
}
"""Short flags of the commands that take all settings of a run."""

_FINETUNING_LR, _ADAPTER_LR = 2e-5, 2e-4
"""Default peak learning rates of runs that start from published weights: full, with adapters.
Papers on full fine-tuning of 1 to 70 billion parameters use 1e-5 to 3e-5."""


def read_run(
    argv: Sequence[str],
    *,
    command: str,
    summary: str = "",
    check_rules: bool = True,
    base: RunConfig | None = None,
    values: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the settings of a run from `--config FILE.toml` and flags; see `read_with_origins`.

    Some settings select the defaults: `resume=PATH` and `replay=PATH:STEP` those of that run, a
    Hugging Face model in `init_from` its sizes and tokenizer, `debug` a tiny run. Without the first
    three, a token folder in the sources sets its tokenizer and vocabulary size. `base` replaces
    these defaults, and `values` are those of a Python program. Hub names are resolved to a commit.
    `--try` scales the run of `--config` down; other flags override the small run.
    """
    if value_of(argv, "try") is not None:
        base, argv = _small_run(argv, command)
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


def read_elsewhere(
    cls: type[C], argv: Sequence[str], *, command: str, summary: str, **changes: Any
) -> C:
    """Return the settings of a command that needs no files of the run.

    The run's rules, except of data, are checked with these `changes` and without its paths.
    """
    config = read_settings(
        cls,
        argv,
        command=command,
        summary=summary,
        aliases=ALIASES,
        check_rules=False,
        read_url=read_url,
    )
    run = dataclasses.replace(config.run, run_dir="", resume="auto", init_from="", **changes)
    if problems := [rule for rule in problems_of(run) if not rule.startswith("data.")]:
        raise ConfigError(problems, heading=command)
    return config


def _small_run(argv: Sequence[str], command: str) -> tuple[RunConfig, list[str]]:
    """Return the run of `--config` scaled down, and the other arguments without `--try`."""
    files = [flag.value or "" for flag in split_flags(argv) if flag.name == "config"]
    config = [word for file in files for word in ("--config", file)]
    run = read_settings(RunConfig, config, command=command, check_rules=False, read_url=read_url)
    small = _scaled_down(run)
    print(_describe(run, small), file=sys.stderr)
    return small, without_flags(argv, "config", "try")


_SEQ_LEN, _MAX_RANK = 128, 16
_LR = 3e-3
"""Peak learning rate of AdamW at this width; that of a config suits its own width."""


def _scaled_down(run: RunConfig) -> RunConfig:
    """Return a small run of the same architecture on data that every machine has.

    Family, norm, positions, activation, ratio of query to key/value heads, ratio of the widths,
    modules with adapters and update rule are those of `run`. Mesh, batch, steps, AdamW's learning
    rate, data and precision are not.
    """
    is_text = run.model.reads == "text"
    steps = 100 if is_text else 60
    lr = _LR if run.optim.optimizer == "adamw" else run.optim.peak_lr
    seq_len = min(_SEQ_LEN, run.train.seq_len)
    return RunConfig(
        name=f"{run.name}-try",
        seed=run.seed,
        model=scaled_model(run.model, 256 if run.data.tokenizer == "bytes" else 1024, seq_len),
        lora=dataclasses.replace(run.lora, rank=min(run.lora.rank, _MAX_RANK), ranks=[]),
        mesh=MeshConfig(),
        train=TrainConfig(steps=steps, global_batch_size=8 if is_text else 32, seq_len=seq_len),
        optim=dataclasses.replace(
            run.optim, peak_lr=lr, warmup_steps=steps // 10, decay_steps=0, lr_scaling="none"
        ),
        precision=PrecisionConfig(),
        data=_small_data(run),
        eval=EvalConfig(interval_steps=0, final_max_batches=8),
    )


def _describe(run: RunConfig, small: RunConfig) -> str:
    """Return one line about a small run and how it differs."""
    full: Any = run.model
    model: Any = small.model
    if model.reads == "images":
        return f"--try: {run.name}, {small.train.steps} steps on generated images"
    tokenizer = small.data.tokenizer_name
    reason = f"a vocabulary of {full.vocab_size:,} would take longer"
    why = f", because {reason}" if full.vocab_size > model.vocab_size else ""
    return (
        f"--try: {run.name} with {model.num_layers} layers of width {model.d_model}, "
        f"{model.num_heads} heads and {model.kv_heads} key/value heads, {small.train.steps} steps "
        f"on Python's standard library; tokenizer {tokenizer} ({model.vocab_size:,} tokens){why}"
    )


def _small_data(run: RunConfig) -> DataConfig:
    if run.model.reads == "images":
        return DataConfig(sources=["jaxdist.data.pattern_images:make_rows"])
    return DataConfig(
        sources=["stdlib"], tokenizer="bytes" if run.data.tokenizer == "bytes" else "code"
    )


def _with_lasting_names(run: RunConfig) -> RunConfig:
    """Return settings with commits of hub names, some absolute paths, and the run's text format."""
    directory = run.named_directory
    file = run.data.tokenizer
    here = os.path.abspath(os.path.expanduser(file))
    is_file = file not in ("auto", "bytes", *BUILT_IN) and os.path.isfile(here)
    template = run.data.chat_template
    is_kept = template in ("auto", "plain") or not os.path.isfile(template)
    teacher = _lasting(run.objective.teacher, directory)
    # With adapters, each start reads `init_from` again.
    start = (_lasting if run.lora.rank else _with_commit)(run.init_from, directory)
    pinned = lambda source: _with_set_commit(source, directory)
    run = dataclasses.replace(
        run,
        init_from=start,
        objective=dataclasses.replace(run.objective, teacher=teacher),
        data=dataclasses.replace(
            run.data,
            tokenizer=here if is_file else _with_commit(file, directory),
            chat_template=template if is_kept else os.path.abspath(template),
            sources=[pinned(source) for source in run.data.sources],
            eval_sources=[
                f"{name}={pinned(source)}" if name else pinned(source)
                for name, source in run.data.eval_sets
            ],
        ),
    )
    return _with_text_format(run, _table_of(directory)) if directory else run


def _lasting(path: str, directory: str) -> str:
    """Return the absolute path of a file or folder; of other texts `_with_commit`."""
    if path and not (is_url(path) or hub.is_hub_name(path)):
        return os.path.abspath(os.path.expanduser(path))
    return _with_commit(path, directory)


def _with_commit(name: str, directory: str) -> str:
    """Return a hub name with its commit; any other text unchanged.

    If the name has no revision, a run in `directory` keeps its stored commit. The same command then
    resumes with the same files.
    """
    if not hub.is_hub_name(name):
        return name
    table = _table_of(directory) if directory and "@" not in name else {}
    tokenizer = table.get("data", {}).get("tokenizer")
    teacher = table.get("objective", {}).get("teacher")
    for earlier in (table.get("init_from"), tokenizer, teacher):
        if str(earlier).startswith(f"{name}@"):
            return str(earlier)
    return hub.with_commit(name)


def _with_set_commit(source: str, directory: str) -> str:
    """Return a data set of the hub with its commit, as `_with_commit`; other sources unchanged."""
    if not is_hub_set(source):
        return source
    data = _table_of(directory).get("data", {}) if directory else {}
    named = [split_set(item)[1] for item in data.get("eval_sources", [])]
    for earlier in [*data.get("sources", []), *named]:
        if is_hub_set(earlier) and without_commit(earlier) == source:
            return earlier
    return pin_commit(source)


def _table_of(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the stored settings of a run as a table; {} for a new or a damaged run."""
    run = locate(directory)
    try:
        text = manifest.stored_config(run / "checkpoints") or (run / "config.toml").text()
        table = tomllib.loads(text)
        sections = [table.get(name, {}) for name in ("data", "objective")]
        return table if all(isinstance(section, dict) for section in sections) else {}
    except (OSError, ValueError):
        return {}


def _with_text_format(run: RunConfig, stored: Mapping[str, Any]) -> RunConfig:
    """Return `run` with `data.text_format` of the `stored` settings of a run, if that is older.

    Stored settings without it have the oldest one; {} = there are no stored settings.
    """
    if not stored:
        return run
    text_format = stored.get("data", {}).get("text_format", OLD_TEXT_FORMAT)
    data = dataclasses.replace(run.data, text_format=min(run.data.text_format, text_format))
    return dataclasses.replace(run, data=data)


def _base_of(values: InputValues) -> RunConfig | None:
    run, step = _stored(values)
    if run and (_table_of(run) or (locate(run) / "config.toml").exists()):
        stored = settings_of_run(run) if step is None else settings_before(run, step)
        return dataclasses.replace(stored, run_dir="")
    start = values.get("init_from")
    if isinstance(start, str) and start and is_model(start):
        try:
            name = _with_commit(str(start), str(values.get("run_dir") or ""))
            return _run_of_model(name, has_adapters=values.get("lora.rank") not in (None, 0, "0"))
        except ConfigError as error:
            raise ConfigError([f"init_from={start!r}: {p}" for p in error.problems]) from None
    if "debug" in values and values["debug"] in (None, True, "true"):
        return _with_tokens(_debug_run(has_mesh="mesh.shape" in values), values)
    return _with_tokens(RunConfig(), values)


def _with_tokens(run: RunConfig, values: InputValues) -> RunConfig:
    """Return `run` with the settings of the first token folder in the sources of `values`."""
    try:
        sources = read_value(values.get("data.sources", []), list[str])
    except BadValueError:  # the reader reports it
        return run
    tokens = next((x for source in sources if (x := settings_of_tokens(source))), None)
    if tokens is None:
        return run
    settings, vocab_size = tokens
    model: Any = run.model
    if vocab_size and "vocab_size" in model.size_settings:
        model = dataclasses.replace(model, vocab_size=vocab_size)
    return dataclasses.replace(run, model=model, data=dataclasses.replace(run.data, **settings))


def _stored(values: InputValues) -> tuple[str, int | None]:
    """Return (run that `--resume` or `--replay` names, or ""; step to replay, or None)."""
    if values.get("replay"):
        run, _, step = str(values["replay"]).rpartition(":")
        return run, int(step) if re.fullmatch("[0-9]{1,18}", step) else None
    resume = str(values.get("resume") or "")
    return "" if resume in ("auto", "never") else resume, None


def _debug_run(has_mesh: bool) -> RunConfig:
    """Return the defaults of `--debug`: a tiny run, on 2 simulated devices unless `has_mesh`."""
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


def _run_of_model(start: str, *, has_adapters: bool) -> RunConfig:
    folder, is_hub = folder_of(start), hub.is_hub_name(start)
    name = hub.short_name(start) if is_hub else folder.absolute().name
    return RunConfig(
        name=re.sub(r"[^\w.+-]", "-", name).lstrip(".+-") or "tuned",
        model=read_model(folder),
        data=DataConfig(tokenizer=start if is_hub else str(folder / "tokenizer.json")),
        optim=OptimConfig(peak_lr=_ADAPTER_LR if has_adapters else _FINETUNING_LR),
    )


def model_at(path: str) -> ModelConfig:
    """Return the model settings of a Hugging Face model, a run or a checkpoint in it."""
    if is_model(path):
        return read_model(folder_of(path))
    directory, step = manifest.named_step(path)
    return settings_of_run(directory.parent, step).model


def replaced_head(config: RunConfig) -> list[str]:
    """Return the names of head parameters, old and new, if a score head replaces a token head.

    The old head is that of `init_from`; [] if no head is replaced.
    """
    if not (config.init_from and config.model.num_labels):
        return []
    stored = model_at(config.init_from)
    return [] if stored.num_labels else [*config.model.head_parts, *stored.head_parts]


def stored_run(path: str | os.PathLike[str]) -> RunConfig:
    """Return the settings in a file, such as `config.toml` of a run; rules are not checked."""
    run = read_settings(
        RunConfig,
        ["--config", str(path)],
        command=f"settings of {path}",
        check_rules=False,
        is_stored=True,
        read_url=read_url,
    )
    is_config = (file := locate(path)).name == "config.toml"
    return _with_text_format(run, tomllib.loads(file.text())) if is_config else run


def settings_of_run(path: str | os.PathLike[str], step: int | None = None) -> RunConfig:
    """Return a run's settings: of its newest intact checkpoint up to `step`, else `config.toml`.

    Paths of `init_from` and the tokenizer that no longer exist are those of `config.toml`.
    """
    run = locate(path)
    if text := manifest.stored_config(run / "checkpoints", step):
        return _with_moved_files(parse_run(text, str(run)), run / "config.toml")
    if not (run / "config.toml").exists():
        raise ConfigError(
            f"{run} has no config.toml, and no usable checkpoint stores settings. Name a complete "
            "run directory."
        )
    return stored_run(run / "config.toml")


def _with_moved_files(run: RunConfig, file: os.PathLike[str]) -> RunConfig:
    start, tokenizer = run.init_from, run.data.tokenizer
    is_missing = lambda path: os.path.isabs(path) and not os.path.exists(path)
    if not (is_missing(start) or is_missing(tokenizer)):
        return run
    try:
        newest = stored_run(file)
    except (OSError, ValueError, ConfigError):  # absent or damaged
        return run
    start = newest.init_from if is_missing(start) else start
    tokenizer = newest.data.tokenizer if is_missing(tokenizer) else tokenizer
    data = dataclasses.replace(run.data, tokenizer=tokenizer)
    return dataclasses.replace(run, init_from=start, data=data)


def settings_before(path: str | os.PathLike[str], step: int) -> RunConfig:
    """Return the settings that reproduce a step: those stored with the checkpoint before it.

    If the data mixture changes during the run, the data settings are the newest ones, which contain
    all mixtures.
    """
    run, file = settings_of_run(path, step - 1), locate(path) / "config.toml"
    newest = stored_run(file) if file.exists() else run
    return dataclasses.replace(run, data=newest.data) if newest.data.stages else run


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
