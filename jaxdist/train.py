"""`python -m jaxdist.train`: train a model.

With no arguments it trains a small decoder on the source text of this machine's own
Python standard library, on whatever devices there are. `--config FILE --try` trains the
architecture of a config on the same text, scaled down to minutes on two cores.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxdist import runtime

if TYPE_CHECKING:
    from jaxdist.config import RunConfig
    from jaxdist.run.program import Program
    from jaxdist.run.session import Session

log = logging.getLogger("jaxdist")


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the settings of the command line; return the exit code of the process."""
    times = runtime.StartTimes.of_process()
    # From here on signals are handled. Settings are checked before jax starts.
    preemption, traces = runtime.Preemption(), runtime.TraceRequests()
    from jaxdist.config import read_run
    from jaxdist.run.program import Program

    config = read_run(
        sys.argv[1:] if argv is None else argv, command="jaxdist.train", summary=__doc__ or ""
    )
    return run(config, Program(), preemption, traces.take, times)


def run(
    config: RunConfig,
    program: Program,
    preemption: runtime.Preemption,
    trace_requested: Callable[[], bool],
    times: runtime.StartTimes | None = None,
) -> int:
    """Train for a command or a Python program; return the exit code of the process."""
    # 1. Start the devices of all processes.
    times = times or runtime.StartTimes()
    job = start_devices(config, preemption, program, times)
    import jax

    from jaxdist.core.types import offloaded_names
    from jaxdist.plan.estimate.memory_check import needs_of
    from jaxdist.run.audit import check_mesh, check_model
    from jaxdist.run.data_checks import (
        check_data_fits,
        check_passes,
        in_examples,
        open_run_data,
        with_steps,
    )
    from jaxdist.run.reference import with_reference
    from jaxdist.run.replay import replay
    from jaxdist.run.session import Session
    from jaxdist.run.setup import assemble, decide_step
    from jaxdist.run.start_checks import check_operations
    from jaxdist.run.startup import (
        audited_meshes,
        check_objects,
        fetch_weights,
        open_run_directory,
        with_objects,
    )
    from jaxdist.run.task_evaluation import check_tasks
    from jaxdist.run.teacher import with_teacher
    from jaxdist.settings import write_toml

    times.mark("imports")
    # 2. Check everything before the run directory is opened.
    if "operations" not in config.override:
        check_operations()
    open_data = functools.cache(lambda: open_run_data(config, program.rows))
    if config.train.epochs:
        config = with_steps(config, open_data()[0])
    model = program.model(config.train.seq_len) if program.model else None
    parts = assemble(
        config, jax.devices(), needs_of, job.host_of, model=model, objective=program.objective
    )
    check_objects(config, program)
    parts = with_objects(parts, program)
    check_tasks(parts)
    if parts.moments is not None:
        parts.moments.check()
    budget = parts.budget(job.host_of)
    if budget is not None and "memory" not in config.override:
        budget.check()
    data = open_data()
    data = in_examples(parts, data[0]), data[1] and in_examples(parts, data[1])
    for part in (part for part in data if part is not None):  # held-out rows may be of another kind
        check_data_fits(parts, part)
    check_passes(config, data[0])
    parts = with_teacher(parts, data[0].fields)
    parts, budget = decide_step(parts, data[0].fields, budget)
    if budget is not None and "memory" not in config.override:
        budget.check()
    if offloaded_names(parts.plan.remat) and "operations" not in config.override:
        check_operations("offload")
    data = with_reference(parts, *data)
    if config.replay:
        return replay(parts, data[0])
    audit = None if "audit" in config.override else check_mesh(parts, data[0].fields)
    audited_mesh = ""
    is_users = config.model.is_user_model or program.objective is not None
    compare = audit is not None and audit.axes and is_users
    if compare and str(parts.spec) not in audited_meshes(config):
        audited_mesh = check_model(parts, data[0].fields, program.model)
    fetch_weights(config)

    # 3. Open the run directory. The session changes no file in it before all checks have passed.
    directory = open_run_directory(config, job.process_id)
    directory.audited_mesh = audited_mesh
    directory.objective = program.object_names
    program.on_start(directory)
    if job.num_processes > 1:
        line = "launcher %s, attempt %d, devices (process 0 lists all):\n%s"
        log.info(line, job.source, job.attempt, job.table())
    config_text = write_toml(config)
    if audit is None:
        log.warning("no audit of the step (override=audit): wrong sums over devices go undetected")
    elif audit.axes:
        log.info("%s", audit.line())
    times.mark("setup")

    # 4. Restore the newest checkpoint or initialize a new state, then train.
    with Session(
        parts,
        data,
        directory,
        job,
        config_text,
        program,
        budget=budget,
        preemption=preemption,
        trace_requested=trace_requested,
        start_times=times,
    ) as session:
        code = train(session)
    # 5. Process 0 exports the last checkpoint.
    if code == runtime.EXIT_OK and config.checkpoint.export == "hf" and job.process_id == 0:
        from jaxdist.tools.convert.checkpoint_export import export_checkpoint

        log.info("%s", export_checkpoint(directory.path))
    return code


def start_devices(
    config: RunConfig, stop: runtime.Preemption, program: Program, times: runtime.StartTimes
) -> runtime.JoinedJob:
    """Configure jax, join the job, start the devices and logging; return the joined job."""
    from jaxdist.run.run_directory import flatten
    from jaxdist.settings import to_table

    if config.debug:
        runtime.enable_debug_checks()
    if config.simulate:
        runtime.simulate(config.simulate)
    runtime.tune_malloc()
    runtime.reserve_memory()
    runtime.setup_compilation_cache("off" if config.debug else "")
    # Only the settings of `runtime` may differ between processes.
    same = {k: str(v) for k, v in flatten(to_table(config)).items() if not k.startswith("runtime.")}
    times.mark("imports")
    job = runtime.join(config.runtime, same=same, stop=stop)
    program.setup_logging(job.process_id)
    times.mark("join")
    return job


def train(session: Session) -> int:
    """Train until the run ends, resuming after each `Rollback`; return the exit code."""
    from jaxdist.run.resilience.anomalies import Rollback

    while True:
        try:
            return train_from(session)
        except Rollback as rollback:
            session.roll_back(rollback)


def train_from(session: Session) -> int:
    """Train after `session.step` until the run ends, and return the exit code.

    Step n is dispatched before the host reads the metrics of step n−1. A guard raises `Rollback`,
    `Stopped` or `CorruptState`.
    """
    config, reporter = session.config, session.reporter
    session.start_steps()
    for step in range(session.step + 1, config.train.steps + 1):
        if session.early_stopping.is_over:
            break
        batch = session.next_batch()
        metrics = session.dispatch(batch)  # step n: does not block
        reporter.flush()  # step n-1: record and check it
        reporter.defer(step, session.state, metrics, session.loader)
        runtime.give_back_memory()
        if actions := session.due_actions():
            session.sync(actions)  # wait for step n
            evaluated = session.evaluate(config.eval.max_batches) if actions.evaluate else {}
            session.early_stopping.update(evaluated)
            if actions.save:
                session.save(evaluated, due=actions.save)
            if actions.leave:
                return session.leave()
            if actions.trace:
                session.turn_trace()
    return session.finish()


if __name__ == "__main__":
    runtime.run_command(main, resumes=True)
