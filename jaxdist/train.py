"""`python -m jaxdist.train`: train a model, from settings to summary, read top to bottom.

With no arguments it trains a small byte-level decoder on the source text of this machine's own
Python standard library, on whatever devices there are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxdist import runtime

if TYPE_CHECKING:
    from jaxdist.assembly import Parts
    from jaxdist.checkpoint import Checkpointer
    from jaxdist.config import RunConfig
    from jaxdist.data import Dataset, Loader
    from jaxdist.estimate.budget import Budget
    from jaxdist.monitoring import Monitor, RunDirectory
    from jaxdist.state import TrainState

log = logging.getLogger("jaxdist")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    # 1. From here on a request to stop is remembered; settings are judged before jax starts.
    preemption, traces = runtime.Preemption(), runtime.TraceRequests()
    from jaxdist.config import read_run, write_toml

    config = read_run(
        sys.argv[1:] if argv is None else argv, command="jaxdist.train", summary=__doc__ or ""
    )
    # 2. Devices, in the order in which they can still be chosen.
    if config.debug:
        runtime.be_careful()
    if config.simulate:
        runtime.simulate(config.simulate)
    runtime.reserve_memory(config.runtime.memory_fraction)
    runtime.setup_compile_cache(config.runtime.compile_cache)
    job = runtime.join(config.runtime)
    runtime.setup_logging(job.process_index)

    import jax

    from jaxdist.assembly import assemble, check_data_fits
    from jaxdist.checkpoint import Checkpointer
    from jaxdist.data import open_datasets
    from jaxdist.estimate.budget import Budget, needs_of
    from jaxdist.monitoring import Monitor, environment

    # 3. Everything that can be wrong is found before anything is written or compiled.
    parts = assemble(config, jax.devices(), needs_of)
    budget = Budget.of(config, parts.spec, jax.devices(), parts.model)
    if budget is not None and not config.force:
        budget.check()
    train_data, eval_data = open_datasets(
        config.data, seq_len=config.train.seq_len, seed=config.seed
    )
    check_data_fits(parts, train_data)
    run = open_run_directory(config, job.process_index)
    runtime.setup_logging(job.process_index, run.log(job.process_index))
    if job.num_processes > 1:
        log.info("%s, attempt %d\n%s", job.source, job.attempt, job.table())
    config_text = write_toml(config)
    for change in run.write_config(config_text):
        log.warning("settings changed since this run started: %s", change)
    run.write_environment(environment())

    # 4. The newest valid state, or a new one; a restored one decides where the data goes on.
    checkpointer = Checkpointer(run.checkpoints, config.checkpoint, log=log.info)
    try:
        state, start_step, loader = start(parts, train_data, checkpointer, run)
        with Monitor(
            config.monitoring,
            run,
            total_steps=config.train.steps,
            start_step=start_step,
            flops_per_token=parts.model.flops_per_token,
            unit=parts.model.unit,
            compute_dtype=str(parts.compute_dtype),
            config_text=config_text,
            asked_to_trace=traces.take,
        ) as monitor:
            announce(parts, monitor, budget)
            return Run(
                parts,
                state,
                loader,
                eval_data,
                checkpointer,
                monitor,
                preemption,
                config_text,
                budget,
            ).go(start_step)
    finally:
        checkpointer.close()


class Run:
    """The loop: dispatch step n, then read the metrics of step n−1."""

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        loader: Loader,
        eval_data: Dataset | None,
        checkpointer: Checkpointer,
        monitor: Monitor,
        preemption: runtime.Preemption,
        config_text: str,
        budget: Budget | None = None,
    ):
        from jaxdist.monitoring import StepTimer
        from jaxdist.monitoring.environment import versions

        self.parts, self.state, self.loader, self.eval_data = parts, state, loader, eval_data
        self.checkpointer, self.monitor, self.preemption = checkpointer, monitor, preemption
        self.config, self.config_text = parts.config, config_text
        self.versions = versions()
        self.budget = budget
        self.train_step = monitor.watch_compiles(parts.step.train, "train step")
        on_cpu = parts.step.context.platform == "cpu"
        self.timer = StepTimer(blocking_dispatch=on_cpu)
        self.pending: tuple[int, Any] | None = None

    def go(self, start_step: int) -> int:
        """Train from `start_step` to the end; returns the exit code."""
        config = self.config
        self.forward_events()
        for step in range(start_step + 1, config.train.steps + 1):
            if self.monitor.profiler.reaches(step):
                self.report()
                with self.timer.paused():
                    self.monitor.profiler.turn(step)
            batch = self.timer.fetch(lambda: next(self.loader))
            self.state, metrics = self.timer.dispatch(self.train_step, self.state, batch)
            self.report()
            self.pending = (step, metrics)
            evaluated: dict[str, float] = {}
            is_last = step == config.train.steps  # evaluated and saved by finish
            if (
                config.eval.interval_steps
                and step % config.eval.interval_steps == 0
                and not is_last
            ):
                self.report()
                evaluated = self.evaluate(step, config.eval.max_batches)
            if self.checkpointer.due(step) and not is_last:
                self.report()
                self.save(step, metrics=evaluated)
            if self.preemption.preempted(step) and not is_last:
                self.report()
                return self.leave_early(step)
        self.report()
        return self.finish()

    def report(self) -> None:
        """Read and report the metrics of the step before; stop on NaN if the policy says so."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        finite = metrics["finite"]
        weight = self.timer.read(lambda: float(metrics["weight"]))
        step_time_s, data_wait_s = self.timer.lap()
        self.check_budget()
        self.monitor.train(
            step,
            metrics,
            tokens=weight,
            step_time_s=step_time_s,
            data_wait_s=data_wait_s,
            device_wait_s=self.timer.device_wait_s,
        )
        if self.config.train.nan_policy == "stop" and not bool(finite):
            self.checkpointer.wait()
            self.monitor.summary("NaN or Inf", error=f"step {step}: loss or gradient not finite")
            raise FloatingPointError(
                f"step {step}: the loss or a gradient is NaN or Inf, and train.nan_policy='stop'. "
                "The update was not applied; checkpoints up to here are good. Lower optim.peak_lr, "
                "look at the batch, or set train.nan_policy=skip."
            )

    def check_budget(self) -> None:
        """Once, after the first step: warn where the memory really used is not the estimate."""
        budget, self.budget = self.budget, None
        if budget is None:
            return
        import jax

        from jaxdist.monitoring import device_memory

        peak = device_memory(jax.local_devices()).get("memory_peak_bytes")
        if peak and (warning := budget.compare(peak)):
            log.warning("%s", warning)

    def evaluate(self, step: int, max_batches: int) -> dict[str, float]:
        """Evaluate the current parameters; each held-out row counts once."""
        if self.eval_data is None:
            return {}
        from jaxdist.evaluation import evaluate

        config = self.config
        with self.timer.paused():
            metrics = evaluate(
                self.parts.step,
                self.state.params,
                self.eval_data,
                global_batch_size=config.eval.global_batch_size or config.train.global_batch_size,
                unit=self.parts.model.unit,
                max_batches=max_batches,
            )
            return self.monitor.eval(step, metrics)

    def save(
        self, step: int, *, force: bool = False, metrics: dict[str, float] | None = None
    ) -> None:
        """Save the state after `step`; training waits only for the copy to the host.

        Args:
            step: steps done.
            force: wait until it is committed.
            metrics: evaluation metrics at this step, for `checkpoint.keep_best`.
        """
        with self.timer.paused():
            meta = {
                "data": self.loader.state(),
                "config": self.config_text,
                "mesh": str(self.parts.spec),
                "versions": self.versions,
            }
            self.checkpointer.save(step, self.state, meta, force=force, metrics=metrics)
        self.forward_events()

    def forward_events(self) -> None:
        """Record what the checkpointer did; it has told the console itself."""
        for event in self.checkpointer.pop_events():
            fields = dict(event)
            failed = str(fields["event"]).endswith("failed")
            level = logging.WARNING if failed else logging.INFO
            self.monitor.event(str(fields.pop("event")), level=level, quiet=True, **fields)

    def leave_early(self, step: int) -> int:
        """Commit a checkpoint and leave with the code that asks to be started again."""
        self.save(step, force=True)
        committed = self.checkpointer.wait()
        self.loader.close()
        self.forward_events()
        self.monitor.summary(
            "preempted", next_commands=[f"python -m jaxdist.train --resume {self.monitor.run.path}"]
        )
        return runtime.EXIT_PREEMPTED if committed else runtime.EXIT_FAILURE

    def finish(self) -> int:
        """Evaluate, save, and say where everything is."""
        config, last = self.config, self.config.train.steps
        evaluated = self.evaluate(last, config.eval.final_max_batches)
        if config.checkpoint.save_last and last not in self.checkpointer.steps():
            self.save(last, force=True, metrics=evaluated)
        committed = self.checkpointer.wait()
        self.loader.close()
        self.forward_events()
        path = self.monitor.run.path
        next_commands = [f"tensorboard --logdir {path / 'tensorboard'}"]
        if self.parts.model.decoding is not None:
            next_commands.insert(0, f"python -m jaxdist.generate {path} --prompt 'def '")
        self.monitor.summary(
            "finished",
            checkpoint=str(path / "checkpoints" / str(last)) if committed else "",
            next_commands=next_commands,
        )
        return runtime.EXIT_OK if committed else runtime.EXIT_FAILURE


def open_run_directory(config: RunConfig, process_index: int) -> RunDirectory:
    """The run directory that the settings name, made or gone on in."""
    from jaxdist.monitoring import RunDirectory, new_run_path

    path = config.run_dir
    if config.resume not in ("auto", "never"):
        path = str(RunDirectory.existing(config.resume).path)
    return RunDirectory.open(
        path or new_run_path(config.name),
        process_index=process_index,
        resume=config.resume != "never",
    )


def start(
    parts: Parts, dataset: Dataset, checkpointer: Checkpointer, run: RunDirectory
) -> tuple[TrainState, int, Loader]:
    """State, steps done and loader: of the newest valid checkpoint, or new ones."""
    from jaxdist.data import Loader, resume_sample

    config = parts.config
    chosen = checkpointer.choose() if config.resume != "never" else None
    first_sample = 0
    if chosen is None:
        state, step = parts.init_state(), 0
        if config.init_from:
            log.info("weights from %s", config.init_from)
        if config.checkpoint.probe:
            checkpointer.probe(state)
    else:
        state, meta, step = checkpointer.restore(parts.abstract_state(), step=chosen)
        first_sample = resume_sample(
            meta["data"], dataset, seed=config.seed, on_change=config.data.on_change
        )
        log.info("resumed from step %d of %s", step, run.path)
    loader = Loader(
        dataset,
        global_batch_size=config.train.global_batch_size,
        seed=config.seed,
        sharding=parts.step.batch_sharding,
        start_sample=first_sample,
        prefetch=config.data.prefetch,
    )
    return state, step, loader


def announce(parts: Parts, monitor: Monitor, budget: Budget | None) -> None:
    """The first lines of a run: what will happen, where, and why this way."""
    from jaxdist.parallel.microbatches import describe

    config, model = parts.config, parts.model
    for remark in config.remarks():
        log.warning("%s", remark)
    rows = config.train.global_batch_size // parts.layout.num_replicas
    schedule = parts.pipeline_schedule
    microbatches = schedule.num_microbatches if schedule else config.train.num_microbatches
    notes = list(model.notes(parts.step.context)) if model.notes else []
    if schedule is not None:
        notes.append(describe(schedule, rows))
    if budget is not None:
        notes.append(budget.line())
    monitor.header(
        mesh=str(parts.spec),
        mesh_reason=parts.mesh_reason,
        model=model.name,
        num_parameters=parts.num_params,
        per_device_batch=rows // microbatches,
        num_replicas=parts.layout.num_replicas,
        accumulation=microbatches,
        tokens_per_row=config.train.seq_len if model.unit == "tokens" else 1,
        precision=f"{parts.compute_dtype} compute, float32 parameters",
        notes=notes,
    )


if __name__ == "__main__":
    runtime.run_command(main)
