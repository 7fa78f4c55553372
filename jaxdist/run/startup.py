"""The start of a run: its directory, its state and data, its header."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shlex
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint import Checkpointer
from jaxdist.checkpoint.events import MismatchError
from jaxdist.config import RunConfig, parse_run
from jaxdist.core import matmul
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.config import describe
from jaxdist.core.state import TrainState
from jaxdist.core.step import TrainConfig, describe_exchange, needs_step_sums
from jaxdist.core.types import Array
from jaxdist.data import Dataset, Loader, Position, TrainData, resume_position
from jaxdist.models.adapters import num_trained
from jaxdist.models.huggingface.directory import folder_of
from jaxdist.models.weights import num_params
from jaxdist.optim import from_optax, make_lr_schedule
from jaxdist.plan.estimate.memory_check import Budget
from jaxdist.run.evaluation_loop import EarlyStopping
from jaxdist.run.metrics_log import read_outline
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.program import Program
from jaxdist.run.resilience.anomalies import LossGuard
from jaxdist.run.run_directory import RunDirectory, changed_settings, flatten, new_run_path
from jaxdist.run.setup import Parts
from jaxdist.run.start_checks import nonfinite_names
from jaxdist.runtime import coordination, hub
from jaxdist.runtime.formatting.numbers import percent
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError
from jaxdist.settings.schema import flag_of
from jaxdist.settings.sources import to_table

log = logging.getLogger("jaxdist")

_PREVIEW_TOKENS = 16

_BALANCE_ROWS = 16
"""Number of packed rows to read for estimating the load balance of context parallelism."""

_SAME_RATE = 1.05  # a smaller rise of the learning rate is rounding of the schedule

Samples: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [first, end) of samples."""


def audited_meshes(config: RunConfig) -> set[str]:
    """Return the meshes on which earlier starts of the run passed the deep audit."""
    return {one.get("audited_mesh", "") for one in _earlier_starts(config)}


def _earlier_starts(config: RunConfig) -> list[dict[str, Any]]:
    path = config.run_dir if config.resume in ("auto", "never") else config.resume
    if not path:
        return []
    return RunDirectory(path, is_writer=False, resumed=True).starts()


def check_objects(config: RunConfig, program: Program) -> None:
    """Reject a resume whose objective, optimizer or schedule has another name than the run's."""
    starts = _earlier_starts(config) if config.resume != "never" else []
    before, now = (starts[0].get("objective", "") if starts else None), program.object_names
    if before not in (None, now):
        fix = f"Pass to jaxdist.train(objective=, optimizer=, schedule=): {before}."
        raise ConfigError(
            f"the run was trained with {before or 'objective and optimizer of its settings'}, and "
            f"this start has {now or 'none'}. {fix if before else 'Omit it.'} A new --run-dir "
            "starts another run."
        )


def with_objects(parts: Parts, program: Program) -> Parts:
    """Return the parts with optimizer and schedule of a Python program."""
    rule, schedule = program.optimizer, program.schedule
    if rule is not None:
        parts = dataclasses.replace(parts, optimizer=from_optax(rule), has_own_optimizer=True)
        schedule = schedule or (lambda step: 1.0)
    if schedule is None:
        return parts

    def rate(step: Array) -> Array:
        """Return the learning rate of a step, float32 []; `step` is int32 []."""
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(schedule(step), jnp.float32)

    return dataclasses.replace(parts, schedule=rate, has_own_schedule=True)


def open_run_directory(config: RunConfig, process_id: int) -> RunDirectory:
    """Return the run directory of the settings, created or reopened; no file is changed yet."""
    path = config.run_dir
    if config.resume not in ("auto", "never"):
        path = config.resume
        if not (locate(path) / "config.toml").exists():  # a converted run has no metrics
            path = str(RunDirectory.existing(path).path)
    return RunDirectory.open(
        path or new_run_path(config.name),
        process_id=process_id,
        resume=config.resume != "never",
    )


def fetch_weights(config: RunConfig) -> None:
    """Download initial weights from the hub if a new run, or one with adapters, needs them."""
    directory = config.named_directory
    resumes = bool(directory) and bool((locate(directory) / "checkpoints").entries())
    if hub.is_hub_name(config.init_from) and (config.lora.rank or not resumes):
        folder_of(config.init_from, weights=True)


def restore_or_init(
    parts: Parts,
    dataset: TrainData,
    checkpointer: Checkpointer,
    run: RunDirectory,
    guard: LossGuard,
    early_stopping: EarlyStopping,
    left_out: Samples | None = None,
) -> tuple[TrainState, int, Loader]:
    """Restore the newest valid checkpoint, or initialize a new state, sharded over the mesh.

    Return the state, its step and the loader of the next batch. The losses of the guard and the
    counts of `early_stopping` are restored. `left_out` are the samples to skip after a rollback.
    For a new run, the preflight of `checkpointer` is started; the caller finishes it before the
    first step.
    """
    config = parts.config
    rolls_back = left_out is not None
    chosen = None
    if rolls_back or config.resume != "never":
        chosen = checkpointer.choose(lambda: parts.without_base(parts.abstract_state()))
    position, losses, counts = Position(), [], {}
    if chosen is None:
        state, step = parts.init_state(), 0
        if config.init_from:
            log.info("initial weights from %s", config.init_from)
    else:
        with waiting(f"restoring checkpoint {chosen}"):
            try:
                state, meta, step = parts.restore(checkpointer, chosen)
            except MismatchError as error:
                raise _with_settings(error, parts, str(run.path)) from None
            names = nonfinite_names(state.groups)
        if names:  # saved by an older version
            raise ConfigError(
                f"checkpoint {step} of {run.path}: {few(names, 8)} contain NaN or infinity, so "
                f"every step would be skipped. Move {run.checkpoints / str(step)} away to resume "
                "from the previous checkpoint, or use another --run-dir."
            )
        position = resume_position(
            meta["data"], dataset, seed=config.seed, restarts="data" in config.override
        )
        if not rolls_back:
            check_recorded_ledger(run, step, position)
        losses, counts = meta.get("guard", []), meta.get("early_stopping", {})
        text = meta.get("config", "")
        if text and (warning := _raised_rate(parts, parse_run(text, str(run.path)), step)):
            log.warning("%s", warning)
        log.info("resumed %s from step %d", run.path, step)
    guard.restore(losses)
    early_stopping.restore(counts)
    if left_out is not None:
        position = dataclasses.replace(position, left_out=left_out)
    loader = parts.open_loader(dataset, position, step)
    if chosen is None and not rolls_back:
        # Start it after the loader: importing grain temporarily replaces `__import__`, also for the
        # thread that traces the preflight's programs.
        checkpointer.start_preflight(parts.without_base(state))
    return state, step, loader


_SHAPING = r"(model|lora)\.|optim\.(optimizer|freeze|groups|moment)|precision\.(compute|matmul)"
"""Starts of settings on which the arrays of a checkpoint depend, unless their type is float."""


def _with_settings(error: MismatchError, parts: Parts, run: str) -> ConfigError:
    """Return an error that names changed settings of model and optimizer; else `error` itself."""
    text = error.document["meta"].get("config", "")
    if not text:
        return error
    both = (parse_run(text, f"checkpoint {error.step}"), parts.config)
    changed = changed_settings(*(flatten(to_table(config)) for config in both))
    causes = {
        name: pair
        for name, pair in changed.items()
        if re.match(_SHAPING, name) and "not set" not in pair and not isinstance(pair[0], float)
    }
    if not causes:
        return error
    named = ", ".join(f"{name}={before!r} (now {now!r})" for name, (before, now) in causes.items())
    flags = " ".join(
        f"{flag_of(name)}={shlex.quote(before if isinstance(before, str) else json.dumps(before))}"
        for name, (before, _) in causes.items()
    )
    same_weights = not any(name.startswith(("model.", "lora.")) for name in causes)
    weights = f" from its weights with --init-from={shlex.quote(run)}" if same_weights else ""
    return ConfigError(
        f"checkpoint {error.step} was saved with {named}, so its arrays do not fit. Use {flags}, "
        f"or start a new run{weights} in another --run-dir."
    )


def check_recorded_ledger(run: RunDirectory, step: int, position: Position) -> None:
    """Raise ConfigError if metrics.jsonl has other data at `step` than `position`; collective."""
    saved = position.ledger[-1].digest

    def compare() -> None:  # in process 0
        if not (run.is_writer and run.resumed and saved):
            return
        recorded = [r for r in read_outline(run.metrics, step) if r["kind"] == "train"]
        digest = next((r for r in reversed(recorded) if r["step"] == step), {}).get("data_ledger")
        if digest not in (None, saved):
            raise ConfigError(
                f"data ledger: the data up to step {step} have digest {digest} in metrics.jsonl "
                f"and {saved} in checkpoint {step}: they belong to two runs. Restore the "
                f"metrics.jsonl or the checkpoints that belong to {run.path}."
            )

    coordination.decide("data_ledger", compare)


def _raised_rate(parts: Parts, stored: RunConfig, step: int) -> str:
    """Return a warning if another `train.steps` increases the rate of a resumed run, else ""."""
    total, now = stored.train.steps, parts.config
    if not step or total == now.train.steps or parts.has_own_schedule:
        return ""
    before = make_lr_schedule(
        stored.optim,
        total_steps=total,
        global_batch_size=stored.train.global_batch_size,
        batches=[(stage.first_step, stage.batch_size) for stage in stored.train.stages],
    )
    # With train.batch_schedule, the stored rate may rise at this step, too.
    old_rate = float(before(jnp.arange(step - 1, step + 1)).max())
    rate = float(parts.schedule(jnp.int32(step)))
    if step <= now.optim.warmup_steps or rate <= old_rate * _SAME_RATE:
        return ""
    fix = f"set --optim.decay-steps {max(1, total - now.optim.warmup_steps)}"
    if now.optim.schedule == "wsd":
        fix = "resume from a checkpoint before the decay"
    return (
        f"train.steps {total} -> {now.train.steps} stretches the {now.optim.schedule} schedule: "
        f"the learning rate increases from {old_rate:.2e} to {rate:.2e}. To avoid that, {fix}."
    )


def announce(parts: Parts, data: TrainData, monitor: Monitor, budget: Budget | None) -> None:
    """Log warnings about the settings, and the header of a run."""
    config, model = parts.config, parts.model
    for remark in config.remarks(has_own_schedule=parts.has_own_schedule):
        log.warning("%s", remark)
    reason = parts.mesh_reason
    if parts.is_shrunk:
        monitor.event("elastic", message=reason, level=logging.WARNING, mesh=str(parts.spec))
        reason = reason.partition(";")[0]
    rows = config.train.global_batch_size // parts.layout.num_replicas
    schedule = parts.pipeline_schedule
    microbatches = schedule.num_microbatches if schedule else config.train.accumulation
    plan = parts.plan
    of = " of packed documents" if plan.packed else ""
    notes = [f"step plan {plan.digest}"]
    if plan.kernel:
        notes.append(f"attention kernel{of}: {plan.kernel} ({plan.reasons['kernel']})")
    notes += describe_exchange(
        model, parts.layout, plan, config.train.seq_len, position_ids=_position_ids(parts, data),
        windows=model.attention_call.windows, rows=rows // microbatches,
    )  # fmt: skip
    if len(config.train.stages) > 1:
        shapes = (
            f"{batch_shape(config.train.in_stage(stage), model.unit)} after step {stage.first_step}"
            for stage in config.train.stages
        )
        notes.append(f"batches of {', '.join(shapes)}; the estimates are for the largest")
    notes += [check.describe() for check in parts.checks]
    if model.experts_call.per_token and plan.platform == "gpu" and plan.grouped == "blocks":
        notes.append(f"products of experts: blocks of plain JAX ({plan.reasons['grouped']})")
    notes += [option.describe() for option in parts.step.options]
    if schedule is not None:
        notes.append(describe(schedule, rows, parts.plan.layers))
    if config.model.active_experts < 1:
        active = num_params(model, config.model.active_experts)
        notes.append(
            f"{percent(config.model.active_experts, 1)} of {model.dims['experts']} experts process "
            f"each token: {active:,} of {parts.num_params:,} parameters are active"
        )
    if needs_step_sums(model, parts.layout, plan):
        notes.append(
            f"balance loss of the global batch with {microbatches} microbatches: each step starts "
            "with a forward pass that counts the tokens of each expert"
        )
    if parts.has_adapters:
        count = num_trained(model)
        notes.append(
            f"adapters of rank {config.lora.rank}: {count:,} trained parameters "
            f"({percent(count / parts.num_params, 2)} of all), frozen weights in "
            f"{config.lora.base_format}"
        )
    if config.optim.ema_decay:
        notes.append(f"EMA of the weights, decay {config.optim.ema_decay}: evaluation uses it")
    if budget is not None:
        notes += [budget.line(), *([budget.remat.line()] if budget.remat else [])]
    if isinstance(data, Dataset) and data.kind == "text" and data.tokenizer is not None:
        tokens = data.sample_row()["tokens"][:_PREVIEW_TOKENS]
        start = data.tokenizer.decode(tokens, show_special=True)
        notes.append(f"the first row starts with {start!r}")
    facts = {
        "mesh": str(parts.spec),
        "mesh_reason": reason,
        "model": model.name,
        "num_parameters": parts.num_params,
        "per_device_batch": rows // microbatches,
        "num_replicas": parts.layout.num_replicas,
        "accumulation": microbatches,
        "tokens_per_row": config.train.seq_len if parts.unit == "tokens" else 1,
        "precision": _precision(parts),
        "data": ", ".join(config.data.sources) + f": {data.describe()}{_passes(config, data)}",
        "notes": notes,
        "seed": config.seed,
        "data_fingerprint": data.fingerprint,
        "data_ledger": "rows" if isinstance(data, Dataset) else "none: a stream has no row numbers",
    }
    monitor.header(facts)


def batch_shape(train: TrainConfig, unit: str) -> str:
    """Return the number of rows of a batch, for a model of tokens also their length, as text."""
    length = f" of {train.seq_len} tokens" if unit == "tokens" else ""
    return f"{train.global_batch_size} rows{length}"


def _passes(config: RunConfig, data: TrainData) -> str:
    if not isinstance(data, Dataset) or data.streams:
        return ""
    passes = config.train.samples_before(config.train.steps) / data.num_rows
    return f"; {passes:.2g} passes in {config.train.steps:,} steps"


def _precision(parts: Parts) -> str:
    trained = "trained " if parts.has_adapters else ""
    compute = f"{parts.plan.compute_dtype} compute, float32 {trained}parameters"
    name = parts.plan.matmul_dtype
    if not name:
        return compute
    number_format = matmul.FORMATS[name]
    emulated = parts.plan.platform == "cpu"
    how = "emulated on this platform" if emulated else f"by {number_format.library}"
    return (
        f"{compute}; {name} products in layers 2 to {parts.model.num_layers - 1} of "
        f"{parts.model.num_layers} ({number_format.rounding}; {how})"
    )


def _position_ids(parts: Parts, data: TrainData) -> np.ndarray | None:
    """Return positions of sampled packed rows, int32 [n, seq_len], for a context axis; or None."""
    if parts.spec[CONTEXT] == 1 or "segments" not in data.fields or not isinstance(data, Dataset):
        return None
    if data.streams:
        return None
    sample = np.linspace(0, data.num_rows - 1, _BALANCE_ROWS).astype(np.int64)
    return data.rows(sample).get("positions")
