"""`python -m jaxdist.train`: train a model, from settings to summary, read top to bottom.

With no arguments it trains a small byte-level decoder on the source text of this machine's own
Python standard library, on whatever devices there are.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxdist import runtime

if TYPE_CHECKING:
    from jaxdist.checkpoint import Checkpointer, Due
    from jaxdist.core.state import TrainState
    from jaxdist.data import Dataset, Loader
    from jaxdist.plan.estimate.memory_check import Budget
    from jaxdist.run.monitoring import Monitor
    from jaxdist.run.resilience import LossGuard, Rollback, SdcCheck, Watchdog
    from jaxdist.run.setup import Parts

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
    runtime.setup_compilation_cache(config.runtime.compilation_cache_dir)
    job = runtime.join(config.runtime)
    runtime.setup_logging(job.process_id)

    import jax

    from jaxdist.checkpoint import Checkpointer
    from jaxdist.data import open_datasets
    from jaxdist.plan.estimate.memory_check import Budget, needs_of
    from jaxdist.run.monitoring import Monitor, environment
    from jaxdist.run.replay import replay
    from jaxdist.run.resilience import LossGuard, SdcCheck, Watchdog
    from jaxdist.run.setup import assemble, check_data_fits
    from jaxdist.run.startup import announce, open_run_directory, start

    # 3. Everything that can be wrong is found before anything is written or compiled.
    parts = assemble(config, jax.devices(), needs_of)
    budget = Budget.of(parts.config, parts.spec, parts.devices, parts.model)
    if budget is not None and not config.force:
        budget.check()
    train_data, eval_data = open_datasets(
        config.data, seq_len=config.train.seq_len, seed=config.seed
    )
    check_data_fits(parts, train_data)
    if config.replay:
        return replay(parts, train_data)
    run = open_run_directory(config, job.process_id)
    runtime.setup_logging(job.process_id, run.log(job.process_id))
    if job.num_processes > 1:
        log.info("%s, attempt %d\n%s", job.source, job.attempt, job.table())
    config_text = write_toml(config)
    for change in run.write_config(config_text):
        log.warning("settings changed since this run started: %s", change)
    run.write_environment(environment())

    # 4. The newest valid state, or a new one; a restored one decides where the data goes on.
    checkpointer = Checkpointer(run.checkpoints, config.checkpoint, log=log.info)
    watchdog = Watchdog(
        config.resilience,
        run.logs,
        process=job.process_id,
        num_processes=job.num_processes,
    )
    guard = LossGuard(config.resilience, run.anomalies if run.is_writer else None)
    begin = functools.partial(start, parts, train_data, checkpointer, run, guard)
    try:
        state, start_step, loader = begin()
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
                watchdog,
                guard,
                SdcCheck(
                    config.resilience, parts.layout, {row.process: row.host for row in job.devices}
                ),
                begin,
                budget,
            ).go(start_step)
    finally:
        checkpointer.close()
        watchdog.close()


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
        watchdog: Watchdog,
        guard: LossGuard,
        replicas: SdcCheck,
        begin: Callable[..., tuple[TrainState, int, Loader]],
        budget: Budget | None = None,
    ):
        from jaxdist.run.monitoring import StepTimer
        from jaxdist.run.monitoring.environment import versions
        from jaxdist.run.step_report import StepReporter

        self.parts, self.state, self.loader, self.eval_data = parts, state, loader, eval_data
        self.checkpointer, self.monitor, self.preemption = checkpointer, monitor, preemption
        self.config, self.config_text = parts.config, config_text
        self.versions = versions()
        self.watchdog, self.guard = watchdog, guard
        self.begin, self.budget = begin, budget
        self.train_step = monitor.track_compiles(parts.step.train, "train step")
        on_cpu = parts.step.context.platform == "cpu"
        self.timer = StepTimer(blocking_dispatch=on_cpu)
        self.judge = StepReporter(monitor, self.timer, watchdog, guard, replicas, checkpointer)

    def go(self, start_step: int) -> int:
        """Train from `start_step` to the end, going back where a guard asks for it."""
        from jaxdist.run.resilience import Rollback

        while True:
            try:
                return self.train_from(start_step)
            except Rollback as asked:
                start_step = self.roll_back(asked)

    def train_from(self, start_step: int) -> int:
        """Train from `start_step` to the end; returns the exit code."""
        config = self.config
        self.forward_events()
        self.watchdog.enter("compile", start_step)
        for step in range(start_step + 1, config.train.steps + 1):
            if self.monitor.profiler.reaches(step):
                self.judge.report()
                with self.timer.paused(), self.watchdog.phase("trace"):
                    self.monitor.profiler.turn(step)
            with self.watchdog.phase("data"):
                batch = self.timer.fetch(lambda: next(self.loader))
            limit = self.guard.update_limit(step)
            self.check_budget(self.state, batch, limit)
            self.state, metrics = self.timer.dispatch(self.train_step, self.state, batch, limit)
            self.judge.report()
            self.judge.hold(step, metrics, self.loader)
            evaluated: dict[str, float] = {}
            is_last = step == config.train.steps  # evaluated and saved by finish
            due: Due = "" if is_last else self.checkpointer.due(step)
            self.judge.look(step, self.state, force=bool(due) or is_last)
            if (
                config.eval.interval_steps
                and step % config.eval.interval_steps == 0
                and not is_last
            ):
                self.judge.report()
                evaluated = self.evaluate(step, config.eval.max_batches)
            if due:
                self.judge.report()
                self.save(step, due=due, metrics=evaluated)
            if self.preemption.preempted() and not is_last:
                self.judge.look(step, self.state, force=True)
                self.judge.report()
                self.judge.check_replicas()
                return self.leave_early(step)
        self.judge.report()
        return self.finish()

    def roll_back(self, asked: Rollback) -> int:
        """The newest checkpoint's state, and the data without the bad batch; returns its step."""
        self.loader.close()
        self.judge.forget()
        del self.state  # two states may not fit
        left_out = asked.anomaly.all_left_out if asked.anomaly else self.loader.left_out
        with self.timer.paused(), self.watchdog.phase("restore"):
            self.state, step, self.loader = self.begin(left_out)
        without = f", without the batch of step {asked.anomaly.step}" if asked.anomaly else ""
        self.monitor.rewind(step, f"going on from step {step}{without}")
        return step

    def check_budget(self, *arguments: Any) -> None:
        """Once, before the first step: what the compiled step takes against estimate and limit."""
        budget, self.budget = self.budget, None
        if budget is None:
            return
        stats = self.train_step.compile(*arguments).memory_analysis()
        if warning := budget.compare(stats):
            log.warning("%s", warning)
        if not self.config.force:
            budget.check_executable(stats)

    def evaluate(self, step: int, max_batches: int) -> dict[str, float]:
        """Evaluate the current parameters; each held-out row counts once."""
        if self.eval_data is None:
            return {}
        from jaxdist.run.evaluation_loop import evaluate

        config = self.config
        with self.timer.paused(), self.watchdog.phase("evaluation"):
            metrics = evaluate(
                self.parts.step,
                self.state.params,
                self.eval_data,
                global_batch_size=config.eval.global_batch_size or config.train.global_batch_size,
                unit=self.parts.model.unit,
                max_batches=max_batches,
                on_batch=self.watchdog.alive,
            )
            return self.monitor.eval(step, metrics)

    def save(
        self,
        step: int,
        *,
        due: Due = "",
        force: bool = False,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Save the state after `step`; training waits only for the copy to the host.

        Args:
            step: steps done.
            due: what the checkpointer answered, where it asked for this save.
            force: wait until it is committed.
            metrics: evaluation metrics at this step, for `checkpoint.keep_best`.
        """
        with self.timer.paused(), self.watchdog.phase("save"):
            meta = {
                "data": self.loader.state(),
                "guard": self.guard.state(),
                "config": self.config_text,
                "mesh": str(self.parts.spec),
                "versions": self.versions,
            }
            self.checkpointer.save(step, self.state, meta, due=due, force=force, metrics=metrics)
        self.forward_events()

    def commit(self) -> bool:
        """Wait for what is being saved, at the end; whether it is safe."""
        with self.watchdog.phase("save"):
            committed = self.checkpointer.wait()
        self.watchdog.enter("end")
        self.loader.close()
        self.forward_events()
        return committed

    def forward_events(self) -> None:
        """Record what the checkpointer did; it has told the console itself."""
        for event in self.checkpointer.pop_events():
            fields = dict(event)
            failed = str(fields["event"]).endswith("failed")
            level = logging.WARNING if failed else logging.INFO
            self.monitor.event(str(fields.pop("event")), level=level, quiet=True, **fields)

    def leave_early(self, step: int) -> int:
        """Commit a checkpoint and leave with the code that asks to be started again."""
        from jaxdist.run.exit_reason import ExitReason

        self.save(step, force=True)
        committed = self.commit()
        self.monitor.summary(
            ExitReason.PREEMPTED if committed else ExitReason.CHECKPOINT_FAILURE,
            next_commands=[f"python -m jaxdist.train --resume {self.monitor.run.path}"],
        )
        return runtime.EXIT_PREEMPTED if committed else runtime.EXIT_FAILURE

    def finish(self) -> int:
        """Evaluate, save, and say where everything is."""
        from jaxdist.run.exit_reason import ExitReason

        config, last = self.config, self.config.train.steps
        evaluated = self.evaluate(last, config.eval.final_max_batches)
        if config.checkpoint.save_last and last not in self.checkpointer.steps():
            self.save(last, force=True, metrics=evaluated)
        committed = self.commit()
        path = self.monitor.run.path
        next_commands = [f"tensorboard --logdir {path / 'tensorboard'}"]
        if self.parts.model.decoding is not None:
            next_commands.insert(0, f"python -m jaxdist.generate {path} --prompt 'def '")
        self.monitor.summary(
            ExitReason.FINISHED if committed else ExitReason.CHECKPOINT_FAILURE,
            checkpoint=str(path / "checkpoints" / str(last)) if committed else "",
            next_commands=next_commands,
        )
        return runtime.EXIT_OK if committed else runtime.EXIT_FAILURE


if __name__ == "__main__":
    runtime.run_command(main)
