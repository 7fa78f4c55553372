"""A running job: its parts, data and guards, and the actions between two steps."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxdist import runtime
from jaxdist.checkpoint import Checkpointer, Due
from jaxdist.checkpoint.events import one_line
from jaxdist.core.step import Metrics
from jaxdist.core.types import Batch, offloaded_names
from jaxdist.data import Dataset, Loader, TrainData
from jaxdist.plan.compiled.host_offload import offload_problems
from jaxdist.plan.estimate.memory_check import Budget
from jaxdist.run.evaluation_loop import EarlyStopping, NoLabels, evaluate
from jaxdist.run.gradient_checks import FIRST_STEPS, without_gradient
from jaxdist.run.metrics_log import ExitReason
from jaxdist.run.monitoring.environment import environment, versions
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.monitoring.timers import CompileTracker, StepTimer
from jaxdist.run.program import Program
from jaxdist.run.resilience.anomalies import LossGuard, Rollback
from jaxdist.run.resilience.sdc_check import SdcCheck
from jaxdist.run.resilience.watchdog import Watchdog
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts
from jaxdist.run.start_checks import nonfinite_names
from jaxdist.run.startup import Samples, announce, batch_shape, restore_or_init
from jaxdist.run.step_report import StepReporter
from jaxdist.run.task_evaluation import task_metrics
from jaxdist.run.text_generation import MIN_STEPS, first_request, write_sample
from jaxdist.runtime import spot_notices
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.numbers import duration
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepActions:
    """Actions due between two steps; falsy if there are none.

    `leave`: save and end the run early. `trace`: a profiler trace starts or ends on this process.
    `last`: this was the last step.
    """

    evaluate: bool = False
    save: Due = ""
    leave: bool = False
    trace: bool = False
    last: bool = False

    def __bool__(self) -> bool:
        return self != StepActions()


class Session:
    """State, data, guards and monitoring of a running job, until its `with` block ends.

    It restores the newest valid checkpoint or initializes a new state. `preemption` handles signals
    from before jax starts, so none is lost. `budget`, None on CPUs, is checked after compilation.
    `state`, sharded over the mesh, is the state after `step`, the last dispatched one. Each step
    donates it.

    Raise ConfigError if the checkpoints do not fit the config or another run uses the directory.
    Raise CheckpointError if checkpoints exist but none is valid.
    """

    def __init__(
        self,
        parts: Parts,
        data: tuple[TrainData, Dataset | None],
        run: RunDirectory,
        job: runtime.JoinedJob,
        config_text: str,
        program: Program,
        *,
        budget: Budget | None,
        preemption: runtime.Preemption,
        trace_requested: Callable[[], bool],
        start_times: runtime.StartTimes | None = None,
    ) -> None:
        self.parts, self.run, self.config_text = parts, run, config_text
        (self.train_data, self.eval_data), self.config = data, parts.config
        self.budget, self.preemption = budget, preemption
        self._compiled = self._has_evaluated = False
        self._times = start_times or runtime.StartTimes()
        resilience = self.config.resilience
        with contextlib.ExitStack() as stack:
            stack.callback(run.discard)
            stack.callback(self._discard_moments)  # after the last save
            self.watchdog = Watchdog(
                resilience, run.logs, process=job.process_id, num_processes=job.num_processes
            )
            self.watchdog.is_held = True
            stack.callback(self.watchdog.close)
            self.checkpointer = Checkpointer(
                run.checkpoints, self.config.checkpoint, log=log.info, is_held=True
            )
            stack.callback(self.checkpointer.close)
            self.guard = LossGuard(resilience, run.anomalies if run.is_writer else None)
            self.early_stopping = EarlyStopping(self.config.eval.patience)
            if self.config.eval.patience and self.eval_data is None:
                log.warning("eval.patience has no effect: there are no held-out rows")
            self.sdc_check = SdcCheck(resilience, parts.layout, job.host_of)
            self.train_step = CompileTracker(parts.step.train, "train step")
            self.stage = parts
            if budget is not None and "memory" not in self.config.override:
                self._compile_to_fit(budget)
            self.state, self.step, self.loader = self._restore()
            self._times.mark("restore")
            saved = parts.without_base(self.state)
            if local := self.checkpointer.survivable(saved):
                log.info("%s", local)
            stack.callback(lambda: self.loader.close())  # a rollback replaces the loader
            self.monitor = stack.enter_context(
                Monitor(
                    self.config.monitoring,
                    run,
                    total_steps=self.config.train.steps,
                    start_step=self.step,
                    flops_per_token=parts.flops_per_unit,
                    unit=parts.unit,
                    compute_dtype=str(parts.plan.compute_dtype),
                    devices=jax.devices(),
                    config_text=config_text,
                    trace_requested=trace_requested,
                    on_record=lambda record: program.on_record(record, self.current_state),
                    is_held=True,
                )
            )
            if min(i for i, host in job.host_of.items() if host == job.host) == job.process_id:
                cloud = self.config.resilience.spot_notices
                stack.enter_context(spot_notices.watching(cloud, preemption.notice))
            preemption.on_abort = lambda: self.monitor.abort("a second Ctrl-C, unsaved")
            announce(self.parts, self.train_data, self.monitor, self.budget)
            # On CPU devices a dispatch waits for the previous step.
            self.timer = StepTimer(blocking_dispatch=parts.plan.platform == "cpu")
            self.train_step = self.monitor.track_compiles(self.train_step)
            self._train_steps = {id(self.parts): self.train_step}
            if self._compiled:
                self._finish_preflight()
            self._commit(program, job)
            self._stack = stack.pop_all()
        self.reporter = StepReporter(
            monitor=self.monitor,
            timer=self.timer,
            watchdog=self.watchdog,
            guard=self.guard,
            sdc_check=self.sdc_check,
            checkpointer=self.checkpointer,
            start_times=self._times,
            parts=self.parts,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _discard_moments(self) -> None:
        if self.parts.moments is not None:
            self.parts.moments.close()

    def _commit(self, program: Program, job: runtime.JoinedJob) -> None:
        """Write logs, settings and environment, which wait until no check can reject this start."""
        self.run.logs.make_directory()  # a concurrent rejected start may have removed it
        self.checkpointer.commit()
        program.setup_logging(job.process_id, self.run.log(job.process_id))
        for change in self.run.write_config(self.config_text):
            log.warning("settings changed since the previous start of this run: %s", change)
        if self.run.is_writer:  # its git commands take long in a large job
            self.run.write_environment(environment(list(job.host_of.values())))
        self.watchdog.is_held = False
        self.monitor.commit()

    def _restore(self, left_out: Samples | None = None) -> tuple[Any, int, Loader]:
        return restore_or_init(
            self.parts,
            self.train_data,
            self.checkpointer,
            self.run,
            self.guard,
            self.early_stopping,
            left_out,
        )

    def start_steps(self) -> None:
        """Prepare for the first step of the start, or after a rollback."""
        self.forward_events()
        self.watchdog.enter("compile", self.step)
        self._checked_step = self.step + FIRST_STEPS
        if self.monitor.profiler.reaches(self.step + 1):
            self.turn_trace()

    def next_batch(self) -> Batch:
        """Return the batch of the next step, global arrays [global_batch_size, ...]; may wait."""
        with self.watchdog.phase("data"):
            return self.timer.fetch(lambda: next(self.loader))

    def dispatch(self, batch: Batch) -> Metrics:
        """Dispatch the train step for a batch of arrays [global_batch_size, ...].

        Return its `Metrics`, replicated arrays that the devices still compute. Some calls compile
        or wait for the devices.
        """
        limit = self.guard.update_limit(self.step + 1)
        if (stage := self.parts.in_stage(self.step)) is not self.stage:
            self._start_stage(stage, batch, limit)
        if not self._compiled:
            self._times.mark("setup")
            self.timer.dispatch(self._compile, self.state, batch, limit)
            self._finish_preflight()
            self._times.mark("compile")
        self.state, metrics = self.timer.dispatch(self.train_step, self.state, batch, limit)
        self.step += 1
        if self.step == self._checked_step:
            self._warn_without_gradient()
        return metrics

    def _start_stage(self, stage: Parts, batch: Batch, limit: float) -> None:
        """Train with batches of another shape from now on; compile their step at its first use."""
        self.stage = stage
        shape = batch_shape(stage.config.train, stage.model.unit)
        text = f"batches of {shape} from step {self.step + 1} on"
        self.monitor.event("batch_stage", step=self.step, message=text)
        if id(stage) not in self._train_steps:
            step = CompileTracker(stage.step.train, f"train step for {shape}")
            self._train_steps[id(stage)] = self.monitor.track_compiles(step)
        self.train_step = self._train_steps[id(stage)]
        if self._compiled and not self.train_step.count:
            with self.phase("compile"):
                self._compile(self.state, batch, limit)

    def _warn_without_gradient(self) -> None:
        """Warn of parameters that have had no gradient so far; waits for the newest step."""
        with self.phase("gradient check"):
            jax.block_until_ready(self.state)
            names = without_gradient(
                self.state,
                self.parts.plan.layers.positions,
                self.config.lora.token_ids,
                self.parts.moments,
            )
        if names:
            self.monitor.event(
                "no_gradient",
                step=self.step,
                parameters=names,
                level=logging.WARNING,
                message=f"no gradient in the first {self.step} steps: {few(names, 8)}. Unless all "
                "these steps were skipped, the loss does not depend on these parameters. Freeze "
                "them (--optim.freeze), or correct the model.",
            )

    def due_actions(self) -> StepActions:
        """Return the actions due before the next step, equal on every process except `trace`."""
        config, step = self.config, self.step
        if step == config.train.steps:
            return StepActions(last=True)  # `finish` evaluates and saves
        every = config.eval.interval_steps
        return StepActions(
            evaluate=bool(every) and step % every == 0,
            save=self.checkpointer.due(step),
            leave=self.preemption.preempted(),
            trace=self.monitor.profiler.reaches(step + 1),
        )

    def sync(self, actions: StepActions) -> None:
        """Wait for the newest step; report it (`StepReporter.flush`) unless only a trace is due."""
        if actions.trace and not (actions.evaluate or actions.save or actions.leave):
            # A trace may be due on this process only. The other processes report this step after
            # dispatching the next one, and a rollback needs all processes at the same step.
            self.timer.read(lambda: jax.block_until_ready(self.state))
            return
        if actions.save or actions.leave or actions.last:  # never save a corrupt replica
            self.reporter.start_check(self.step, self.state, force=True)
        self.reporter.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Exclude the `with` block from step times; the watchdog times it as the phase `name`."""
        with self.timer.paused(), self.watchdog.phase(name):
            yield

    def turn_trace(self) -> None:
        """End a finished profiler trace, and start one if the next step is to be traced."""
        with self.phase("trace"):
            self.monitor.profiler.turn(self.step + 1)

    def evaluate(self, max_batches: int) -> dict[str, float]:
        """Evaluate `eval.tasks`, and `max_batches` of each held-out set (0 = every row once).

        Return the metrics; only those of tasks without rows, or if a set has no labels. If
        `eval.sample` is "always", also generate a sample.
        """
        if self.config.eval.sample == "always":
            self.sample()
        tasks: dict[str, float] = {}
        if self.config.eval.tasks:
            with self.phase("tasks"):
                params = self.parts.in_model_order(self.state.eval_params)
                tasks = task_metrics(self.parts, params, self.watchdog.alive)
        tasks_only = lambda: self.monitor.eval(self.step, tasks) if tasks else {}
        if self.eval_data is None:
            return tasks_only()
        config = self.config
        with self.phase("evaluation"):
            try:
                metrics = evaluate(
                    self.parts.step,
                    self.state.eval_params,
                    self.eval_data,
                    global_batch_size=config.eval.global_batch_size
                    or config.train.global_batch_size,
                    unit=self.parts.unit,
                    max_batches=max_batches,
                    on_batch=self.watchdog.alive,
                )
            except NoLabels as error:
                self.monitor.event("eval_no_labels", message=str(error), level=logging.WARNING)
                return tasks_only()
            evaluated = self.monitor.eval(self.step, {**metrics, **tasks})
        self._warn_of_missing_best(evaluated)
        return evaluated

    def _warn_of_missing_best(self, evaluated: Mapping[str, float]) -> None:
        text = "" if self._has_evaluated else self.config.checkpoint.missing_best(evaluated)
        self._has_evaluated = True
        if text:
            self.monitor.event("keep_best_missing", message=text, level=logging.WARNING)

    def sample(self) -> None:
        """Record a short text that the model generates; a failure only causes a warning.

        Do nothing if the model is not a decoder, or if the job has several processes.
        """
        if self.parts.model.decoding is None or jax.process_count() > 1:
            return
        with self.phase("sample"):
            try:
                params = self.parts.in_model_order(self.state.eval_params)
                prompt, text = write_sample(self.parts, params, self.train_data)
            except Exception as error:
                log.warning(
                    "no sample text was generated: %s: %s", type(error).__name__, one_line(error)
                )
                return
        if prompt:
            message = f"sample of step {self.step}:\n{prompt}{text}"
            self.monitor.event("sample", step=self.step, prompt=prompt, text=text, message=message)

    def save(self, metrics: dict[str, float], *, due: Due = "", force: bool = False) -> None:
        """Save the state as `Checkpointer.save` does, which may wait for the previous save.

        `metrics` are from an evaluation of this state, for `checkpoint.keep_best`. `due` is the
        kind of a scheduled save, else "". `force` waits until a run-directory save is committed.
        Raise `Stopped` instead if weights contain NaN or infinity.
        """
        with self.phase("save"):
            if names := nonfinite_names(self.state.groups):
                self.reporter.stop(
                    ExitReason.NONFINITE_LOSS,
                    f"step {self.step}: {few(names, 8)} contain NaN or infinity, so the state is "
                    "not saved. Lower optim.peak_lr, or raise optim.eps.",
                )
            meta = {
                "data": self.loader.state(everywhere=self.checkpointer.is_local),
                "guard": self.guard.state(),
                "early_stopping": self.early_stopping.state(),
                "config": self.config_text,
                "mesh": str(self.parts.spec),
                "versions": versions(),
            }
            if self.parts.base:
                meta["base"] = self.parts.base
            state = self.parts.in_model_order(self.parts.without_base(self.state))
            moments = self.parts.moments
            self.checkpointer.save(
                self.step, state, meta, due=due, force=force, metrics=metrics, moments=moments
            )
        self.forward_events()

    def roll_back(self, rollback: Rollback) -> None:
        """Return to the newest valid checkpoint; skip the batch of an anomaly from now on."""
        anomaly = rollback.anomaly
        left_out = anomaly.all_left_out if anomaly else self.loader.left_out
        self.loader.close()
        self.reporter.discard()
        self.state = None  # two states may not fit into memory
        with self.phase("restore"):
            self.state, self.step, self.loader = self._restore(left_out)
        without = f", without the batch of step {anomaly.step}" if anomaly else ""
        self.monitor.rewind(self.step, f"continuing from step {self.step}{without}")

    def current_state(self) -> Any:
        """Return the state after the last dispatched step, with layers in the model's order."""
        return self.parts.in_model_order(self.state)

    def forward_events(self) -> None:
        """Record the checkpointer's events in metrics.jsonl; it has already logged them."""
        for event in self.checkpointer.pop_events():
            fields = dict(event)
            name = str(fields.pop("event"))
            level = logging.WARNING if name.endswith("failed") else logging.INFO
            self.monitor.event(name, level=level, quiet=True, **fields)

    def leave(self) -> int:
        """Save and end the run early; return 0 for a callback's request, else 75; 1 on failure."""
        with waiting("saving before the end"):
            self.save({}, force=True)
        if self.preemption.requested:
            why = self.preemption.reason
            return self._end(ExitReason.STOPPED_BY_CALLBACK, runtime.EXIT_OK, [], stop_reason=why)
        resume = [f"{shell_python()} -m jaxdist.train --resume {shlex.quote(str(self.run.path))}"]
        return self._end(ExitReason.PREEMPTED, runtime.EXIT_PREEMPTED, resume)

    def finish(self) -> int:
        """Evaluate and save the last state; return 0, or 1 if the save failed."""
        reason = ExitReason.FINISHED
        if self.step < self.config.train.steps:
            reason = ExitReason.STOPPED_EARLY
            self.reporter.start_check(self.step, self.state, force=True)
            self.reporter.flush()
        if self.step and self.guard.skipped == self.step:
            self.reporter.stop_skipping(self.step)
        evaluated = self.evaluate(self.config.eval.final_max_batches)
        with waiting("saving the last state"):
            self.save(evaluated, force=True)  # skipped if a valid checkpoint has it
        if self.config.eval.sample == "end" and self.step >= MIN_STEPS:
            self.sample()
        run = shlex.quote(str(self.run.path))
        commands = [f"{shell_python()} -m jaxdist.report {run} --html {run}/report.html"]
        if self.parts.model.decoding is not None:
            flags = first_request(self.config.data, self.train_data)
            commands.insert(0, f"{shell_python()} -m jaxdist.generate {run} {flags}".rstrip())
        return self._end(reason, runtime.EXIT_OK, commands)

    def _end(self, reason: ExitReason, code: int, next_commands: list[str], **fields: str) -> int:
        """Wait for the last save, write the summary; return `code`, or 1 if the save failed."""
        with self.watchdog.phase("save"), waiting("finishing the save"):
            committed = self.checkpointer.wait(exports=code == runtime.EXIT_OK)
        self.watchdog.enter("end")
        self.loader.close()
        if committed and code == runtime.EXIT_OK:
            self.checkpointer.discard_local()
        self.forward_events()
        checkpoint = self.run.checkpoints / str(self.step)
        self.monitor.summary(
            reason if committed else ExitReason.CHECKPOINT_FAILURE,
            checkpoint=str(checkpoint) if committed else "",
            next_commands=next_commands if committed else [],
            **fields,
        )
        return code if committed else runtime.EXIT_FAILURE

    def _compile_to_fit(self, budget: Budget) -> None:
        """Compile the step before the state is allocated, with the remat policy that fits."""

        def compile_with(budget: Budget) -> Any:
            if budget is not self.budget:
                self.budget, self.parts = budget, self.parts.within(budget)
                self.train_step = CompileTracker(self.parts.step.train, "train step")
                self.stage = self.parts
            batch = self.parts.abstract_batch(self.train_data.fields)
            return self._compile(self.parts.step_state(), batch, math.inf)

        self._times.mark("setup")
        budget.fit(compile_with)
        self.run.compiled = self.parts.compiled
        self._times.mark("compile")

    def _compile(self, state: Any, batch: Mapping[str, Any], limit: float) -> Any:
        """Compile the step for arrays, or for their shapes; return its `memory_analysis()`."""
        times = CompileTimes(self.stage)
        before = times.last()
        took = f", {duration(before)} last time" if before else ""
        with waiting(f"compiling the train step{took}"):
            compiled = self.train_step.compile(state, batch, limit)
        stats, plan = compiled.memory_analysis(), self.stage.plan
        moves = offloaded_names(plan.remat) and plan.platform == "gpu"
        if moves and (problems := offload_problems(compiled)):
            raise ConfigError(problems)
        budget = self.budget if self.stage is self.parts else None  # of the largest batch
        if budget is not None and (warning := budget.compare(stats)):
            log.warning("%s", warning)
        self._compiled = True
        if self.run.is_writer:
            times.store(self.train_step.seconds)
        return stats

    def _finish_preflight(self) -> None:
        with waiting("trying to save and restore"):
            self.checkpointer.finish_preflight()
        self.forward_events()


class CompileTimes:
    """Time of the last compilation of a train step, stored for each settings, mesh and device."""

    def __init__(self, parts: Parts):
        config, device = parts.config, parts.devices[0]
        mesh = dataclasses.replace(config.mesh, shape="")  # `spec` is the resolved shape
        program = [
            *(config.model, config.optim, config.precision, config.pipeline, mesh),
            dataclasses.replace(config.train, steps=1),
            *(str(parts.spec), device.device_kind, len(parts.devices), jax.__version__),
        ]
        digest = hashlib.sha256(repr(program).encode()).hexdigest()[:24]
        folder = getattr(jax.config, "jax_compilation_cache_dir", None)
        self._file = locate(folder) / f"seconds-{digest}" if folder else None

    def last(self) -> float:
        """Return the seconds of the last compilation; 0 if unknown."""
        with contextlib.suppress(OSError, ValueError):
            return float(self._file.text()) if self._file else 0.0
        return 0.0

    def store(self, seconds: float) -> None:
        """Store the seconds of this compilation, for the next start."""
        if self._file:
            with contextlib.suppress(OSError):
                self._file.write(f"{seconds}", durable=False)
