"""Faults of a launched job: how to cause each one, and the required reaction.

`FAULTS` lists them as data. `inject` causes one at a random moment. It measures the seconds until
the console names the cause and until the job makes progress. `step_results` reads the results that
must be the same with and without faults.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from launched_job import DETECT_S, RECOVER_S, Job, ScenarioFailed

from jaxdist.run.metrics_log import current, read_records

HOST = socket.gethostname()
GUARDS = [
    "--resilience.sdc_check_interval_steps=10",
    "--resilience.spike_policy=stop",
    "--resilience.sdc_policy=stop",
    "--resilience.nonfinite_policy=stop",
    "--monitoring.log_interval_steps=10",
    "--checkpoint.save_interval_steps=100",
]
"""Every guard. None may report anything in a run without faults."""
FINDINGS = {"sdc", "loss_anomaly", "rollback", "skipped_step", "straggler"}


@dataclasses.dataclass(frozen=True)
class FaultResult:
    """Result of one injected fault.

    Attributes:
        fault: name of the fault.
        victim: process id of the affected process.
        moment: "training", or "start" if processes were starting or compiling.
        detected_s: seconds from the fault to the first line that names the cause.
        recovered_s: seconds from the fault to the first new train record; for a fault that lasts (a
            full disk), from its end to the next save.
        problem: description of a failure; empty if there was none.
    """

    fault: str
    victim: int
    moment: str
    detected_s: float = 0.0
    recovered_s: float = 0.0
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: name in the table.
        inject: function that causes it and returns the seconds to detection and to recovery.
        at_start: it can only happen when a job starts.
        mounts: it needs a separate file system.
    """

    name: str
    inject: Callable[[Job, int, random.Random], tuple[float, float]]
    at_start: bool = False
    mounts: bool = False


def _new_work(job: Job, began: float, since: int) -> float:
    """Return the seconds from `began` until the run writes a train record after byte `since`."""
    job.wait(lambda: job.trains(since), "a new train record", RECOVER_S)
    return time.monotonic() - began


def _signalled(number: signal.Signals, victim: int | None, line: str) -> Callable:
    def inject(job: Job, chosen: int, _: random.Random) -> tuple[float, float]:
        index = chosen if victim is None else victim
        job.wait(job.workers, "two processes", DETECT_S)
        since, began = job.position(), time.monotonic()
        os.kill(job.workers()[index], number)
        detected = job.wait_for_line(line.format(p=index), since)
        return detected, _new_work(job, began, job.num_bytes())

    return inject


def _preempted(job: Job, chosen: int, generator: random.Random) -> tuple[float, float]:
    job.wait(job.workers, "two processes", DETECT_S)
    since, began = job.position(), time.monotonic()
    os.kill(job.workers()[chosen], generator.choice([signal.SIGTERM, signal.SIGUSR1]))
    detected = job.wait_for_line("preempted after a save", since)
    if (code := job.wait_for_end()) != 75:
        raise ScenarioFailed(f"exit code {code}, not 75")
    job.start()
    return detected, _new_work(job, began, job.num_bytes())


def _raised(job: Job, chosen: int, _: random.Random) -> tuple[float, float]:
    since, began = job.position(), time.monotonic()
    (job.folder / f"raise-{chosen}").touch()
    detected = job.wait_for_line(f"planted in process {chosen}", since)
    job.wait_for_line(f"process {chosen} failed first", since)
    return detected, _new_work(job, began, job.num_bytes())


def _stuck(job: Job, _: int, __: random.Random) -> tuple[float, float]:
    since, began = job.position(), time.monotonic()
    (job.folder / "stuck-1").touch()
    line = rf"watchdog: .*process 1 on {HOST} \(pid \d+\), last step \d+, phase data"
    detected = job.wait_for_line(line, since)
    job.wait_for_line("launch: restart", since)
    return detected, _new_work(job, began, job.num_bytes())


def _launcher_killed(job: Job, _: int, __: random.Random) -> tuple[float, float]:
    job.wait(job.workers, "two processes", DETECT_S)
    children, began = job.workers(), time.monotonic()
    job.process.kill()
    job.process.wait()
    gone = lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in children)
    detected = job.wait(gone, "its processes end with it", DETECT_S)
    job.start()
    return detected, _new_work(job, began, job.num_bytes())


def _never_joins(job: Job, chosen: int, generator: random.Random) -> tuple[float, float]:
    job.preempt()
    job.start()
    job.wait(job.workers, "two processes", DETECT_S)
    time.sleep(generator.uniform(0.0, 0.5))
    since, began = job.position(), time.monotonic()
    os.kill(job.workers()[chosen], signal.SIGSTOP)
    line = f"process {chosen} of 2 has not joined|process {chosen} failed first.*it hung"
    detected = job.wait_for_line(line, since)
    return detected, _new_work(job, began, job.num_bytes())


def _port_taken(job: Job, _: int, generator: random.Random) -> tuple[float, float]:
    job.preempt()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        since, began = job.position(), time.monotonic()
        job.start(f"--coordinator-address=127.0.0.1:{port}")
        detected = job.wait_for_line(rf"coordinator port {port} on \S+ cannot be used", since)
        time.sleep(generator.uniform(0.0, 2.0))
    return detected, _new_work(job, began, job.num_bytes())


def _disk_full(job: Job, _: int, generator: random.Random) -> tuple[float, float]:
    since, began = job.position(), time.monotonic()
    with job.full():
        line = r"cannot be written \(No space left|No space left on device|no space: "
        detected = job.wait_for_line(line, since)
        time.sleep(generator.uniform(0.0, 3.0))
    since, began = job.position(), time.monotonic()
    job.wait_for_line(r"checkpoint \d+ saved", since, RECOVER_S)
    return detected, time.monotonic() - began


def _directory_gone(job: Job, _: int, generator: random.Random) -> tuple[float, float]:
    since, began = job.position(), time.monotonic()
    job.take_away()
    try:
        detected = job.wait_for_line(r"is missing: is its file system still mounted", since)
        time.sleep(generator.uniform(0.0, 3.0))
    finally:
        job.bring_back()
    since, began = job.position(), time.monotonic()
    job.wait_for_line(r"checkpoint \d+ saved", since, RECOVER_S)
    return detected, time.monotonic() - began


_STILL = (
    r"process {p} on \S+ \(pid \d+\).*no sign of life|process {p} failed first.*it hung"
    r"|process {p}, which never reported|process {p} of 2 has not joined"
)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "SIGKILL of process 0, the coordinator",
            _signalled(signal.SIGKILL, 0, "process {p} failed first.*killed by SIGKILL"),
        ),
        Fault(
            "SIGKILL of process 1",
            _signalled(signal.SIGKILL, 1, "process {p} failed first.*killed by SIGKILL"),
        ),
        Fault("SIGSTOP of one process", _signalled(signal.SIGSTOP, None, _STILL)),
        Fault("SIGTERM or SIGUSR1 to one process", _preempted),
        Fault("exception on one process", _raised),
        Fault("stuck loader of process 1", _stuck),
        Fault("SIGKILL of the launcher", _launcher_killed),
        Fault("one process never joins", _never_joins, at_start=True),
        Fault("the coordinator's port is taken", _port_taken, at_start=True),
        Fault("full disk", _disk_full, mounts=True),
        Fault("run directory gone", _directory_gone, mounts=True),
    )
}


def inject(
    job: Job, fault: Fault, generator: random.Random, moment: str = "training"
) -> FaultResult:
    """Inject a fault at a random moment of training or startup, and measure detection and recovery.

    The job must be running. It is running afterwards, unless the result has a problem.
    """
    chosen = generator.randrange(2)
    result = FaultResult(fault.name, chosen, "start" if fault.at_start else moment)
    try:
        if result.moment == "start" and not fault.at_start:
            job.preempt()
            job.start()
            job.wait(job.workers, "two processes", DETECT_S)
            time.sleep(generator.uniform(0.0, 8.0))
        else:
            _new_work(job, time.monotonic(), job.num_bytes())
            time.sleep(generator.uniform(0.0, 3.0))
        detected, recovered = fault.inject(job, chosen, generator)
    except (ScenarioFailed, OSError, IndexError) as error:
        return dataclasses.replace(result, problem=f"{type(error).__name__}: {error}")
    return dataclasses.replace(result, detected_s=detected, recovered_s=recovered)


def finish(job: Job, timeout_s: float = 600.0) -> int:
    job.pace(0.0)
    return job.wait_for_end(timeout_s)


def findings(run_dir: Path) -> list[dict]:
    return [r for r in read_records(run_dir / "metrics.jsonl") if r.get("event") in FINDINGS]


def step_results(run_dir: Path) -> dict[int, tuple[str, str]]:
    """Return step -> (loss, gradient norm) as hex; check that each step is recorded once.

    Raises:
        ScenarioFailed: a step is missing, or one that ran twice had different results.
    """
    records = read_records(run_dir / "metrics.jsonl")
    value = lambda r: (float(r["loss"]).hex(), float(r["grad_norm"]).hex())
    results: dict[int, tuple[str, str]] = {}
    for record in records:
        if record["kind"] == "train" and results.setdefault(record["step"], value(record)) != value(
            record
        ):
            raise ScenarioFailed(f"step {record['step']} had two results")
    steps = [record["step"] for record in current(records) if record["kind"] == "train"]
    if steps != list(range(1, len(steps) + 1)):
        missing = sorted(set(range(1, max(steps) + 1)) - set(steps))
        raise ScenarioFailed(
            f"steps are not there once each: {len(steps)} records, missing {missing[:10]}"
        )
    return results
