"""The start of a run: its directory, its state and data, its header."""

from __future__ import annotations

import dataclasses
import logging
from typing import TypeAlias

from jaxdist.checkpoint import Checkpointer
from jaxdist.config import RunConfig
from jaxdist.core.parallel.pipeline.config import describe
from jaxdist.core.state import TrainState
from jaxdist.core.step import has_replica_norms
from jaxdist.data import Loader, Position, TrainData, resume_position
from jaxdist.plan.estimate.memory_check import Budget
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.resilience.anomalies import LossGuard
from jaxdist.run.run_directory import RunDirectory, new_run_path
from jaxdist.run.setup import Parts

log = logging.getLogger("jaxdist")

Samples: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [first, end) of samples."""


def open_run_directory(config: RunConfig, process_id: int) -> RunDirectory:
    """The run directory that the settings name: a new one, or one to resume in."""
    path = config.run_dir
    if config.resume not in ("auto", "never"):
        path = str(RunDirectory.existing(config.resume).path)
    return RunDirectory.open(
        path or new_run_path(config.name),
        process_id=process_id,
        resume=config.resume != "never",
    )


def restore_or_init(
    parts: Parts,
    dataset: TrainData,
    checkpointer: Checkpointer,
    run: RunDirectory,
    guard: LossGuard,
    left_out: Samples | None = None,
) -> tuple[TrainState, int, Loader]:
    """The newest valid checkpoint, or a new state where there is none.

    The guard gets back the losses that it had seen. A run that rolls back says which samples it
    leaves out from now on.

    Returns:
        The state, sharded over the mesh; steps done; the loader of the next batch.
    """
    config = parts.config
    rolls_back = left_out is not None
    chosen = checkpointer.choose() if rolls_back or config.resume != "never" else None
    position, losses = Position(), []
    if chosen is None:
        state, step = parts.init_state(), 0
        if config.init_from:
            log.info("weights from %s", config.init_from)
        if config.checkpoint.preflight and not rolls_back:
            checkpointer.preflight(state)
    else:
        state, meta, step = checkpointer.restore(parts.abstract_state(), step=chosen)
        position = resume_position(
            meta["data"], dataset, seed=config.seed, on_change=config.data.on_change
        )
        losses = meta.get("guard", [])
        log.info("resumed from step %d of %s", step, run.path)
    guard.restore(losses)
    if left_out is not None:
        position = dataclasses.replace(position, left_out=left_out)
    return state, step, parts.open_loader(dataset, position)


def announce(parts: Parts, monitor: Monitor, budget: Budget | None) -> None:
    """The header of a run: devices, mesh, model, batch, and why it is this mesh."""
    config, model = parts.config, parts.model
    for remark in config.remarks():
        log.warning("%s", remark)
    reason = parts.mesh_reason
    if parts.is_shrunk:
        monitor.event("elastic", message=reason, level=logging.WARNING, mesh=str(parts.spec))
        reason = reason.partition(";")[0]
    rows = config.train.global_batch_size // parts.layout.num_replicas
    schedule = parts.pipeline_schedule
    microbatches = schedule.num_microbatches if schedule else config.train.accumulation
    notes = list(model.notes(parts.step.context)) if model.notes else []
    if schedule is not None:
        notes.append(describe(schedule, rows))
    if config.train.replica_norms and not has_replica_norms(parts.layout):
        notes.append(
            "train.replica_norms: nothing to compare, gradients are whole on no data replica "
            "(needs dp > 1 and zero 0 or 1)"
        )
    if budget is not None:
        notes.append(budget.line())
    facts = {
        "mesh": str(parts.spec),
        "mesh_reason": reason,
        "model": model.name,
        "num_parameters": parts.num_params,
        "per_device_batch": rows // microbatches,
        "num_replicas": parts.layout.num_replicas,
        "accumulation": microbatches,
        "tokens_per_row": config.train.seq_len if model.unit == "tokens" else 1,
        "precision": f"{parts.compute_dtype} compute, float32 parameters",
        "notes": notes,
    }
    monitor.header(facts)
