"""The processes of one attempt on this host: start them, end them together, report the cause.

The first failure ends the attempt, because the other processes wait in collectives. They get
`COLLECT_S` to report their own errors: the first process to fail often does not have the cause.
`GroupResult` names the cause.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from jaxdist import runtime
from jaxdist.runtime.coordination import failure_broadcast
from jaxdist.runtime.start_times import FAILED_AT
from jaxdist.settings import ConfigError
from jaxdist.tools.launch import log
from jaxdist.tools.launch.fork_server import Start
from jaxdist.tools.launch.worker import Worker, start_command

POLL_S = 0.05
COLLECT_S = 2.0
"""Time after the first failure for the others to notice it and write their own errors."""
COLLECT_KILLED_S = 0.3
"""Shorter wait after a SIGKILL on a single host, where no other process has the cause."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Position of this host's processes in the job.

    `num_hosts` is the number of hosts if launchers share a host; 0 = one per launcher.
    `visible_gpus` is `CUDA_VISIBLE_DEVICES`; empty = as the launcher has it. `token` is the shared
    secret of this attempt; empty = `JAXDIST_JOB_TOKEN` of the environment.
    """

    nproc_per_node: int
    nnodes: int
    node_rank: int
    coordinator_address: str
    num_hosts: int = 0
    visible_gpus: str = ""
    token: str = ""

    def environ(self, local_process_id: int, attempt: int) -> dict[str, str]:
        """Return the variables that `runtime.resolve` reads in this process."""
        gpus = {"CUDA_VISIBLE_DEVICES": self.visible_gpus} if self.visible_gpus else {}
        token = {"JAXDIST_JOB_TOKEN": self.token} if self.token else {}
        return {
            **gpus,
            **token,
            "JAXDIST_COORDINATOR_ADDRESS": self.coordinator_address,
            "JAXDIST_NUM_PROCESSES": str(self.nproc_per_node * self.nnodes),
            "JAXDIST_PROCESS_ID": str(self.node_rank * self.nproc_per_node + local_process_id),
            "JAXDIST_NUM_HOSTS": str(self.num_hosts or self.nnodes),
            "JAXDIST_NUM_LOCAL_PROCESSES": str(self.nproc_per_node),
            "JAXDIST_LOCAL_PROCESS_ID": str(local_process_id),
            "JAXDIST_ATTEMPT": str(attempt),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Reason for the end of an attempt.

    `exit_code` is that of the first failure, 0 or 75 without one. `first_process` is the process id
    of the failure; -1 if no process of this host caused it. `details` are a traceback or the last
    lines of the log. `failed_at` is its time (`time.monotonic`) or 0. `is_rejected`: the
    settings were rejected before any process changed the run directory.
    """

    exit_code: int
    attempt: int
    first_process: int = -1
    cause: str = ""
    details: str = ""
    advice: str = ""
    log_file: str = ""
    seconds: float = 0.0
    failed_at: float = 0.0
    already_printed: bool = False
    is_rejected: bool = False

    def report(self) -> str:
        """Return the text printed after a failed attempt; the cause comes first."""
        line, after = "-" * 100, f"after {self.seconds:.1f} s: {self.cause}"
        if self.first_process < 0:
            return f"\n{line}\nlaunch: attempt {self.attempt} ended {after}\n{line}"
        head = f"launch: attempt {self.attempt}: process {self.first_process} failed first, {after}"
        to_do = f"to do:  {self.advice}\n" if self.advice else ""
        log = f"log:    {self.log_file}\n" if self.log_file else ""
        return f"\n{line}\n{head}\n\n{self.details}\n\n{to_do}{log}{line}"


class WorkerGroup:
    """All processes of one attempt on this host; `failed_at` is the time of the last failure."""

    def __init__(
        self,
        command: list[str],
        placement: Placement,
        attempt: int,
        log_dir: Path,
        *,
        start: Start = start_command,
        failed_at: float = 0.0,
    ):
        self.attempt, self.placement = attempt, placement
        self._start_process, self._failed_at = start, failed_at
        self.started = time.monotonic()
        self._stop_at: float | None = None
        self._abort_cause = ""
        self._log_dir = log_dir
        self.workers: list[Worker] = []
        try:
            for local_process_id in range(placement.nproc_per_node):
                self.workers.append(self._start(command, local_process_id))
        except OSError as failure:
            self.kill()
            raise ConfigError(
                f"{command[0]} cannot be started: {failure.strerror}. Check --program."
            ) from None

    @property
    def is_stopping(self) -> bool:
        """Return whether the processes have received a stop request."""
        return self._stop_at is not None

    def run(
        self, stop_timeout_s: float, watch: Callable[[WorkerGroup], None] = lambda _: None
    ) -> GroupResult:
        """Wait until all processes have ended; the first failure ends the others.

        After a stop request they have `stop_timeout_s` to save. `watch` is called every `POLL_S`.
        """
        failed_at: float | None = None
        while True:
            codes = [worker.poll() for worker in self.workers]
            now = time.monotonic()
            if failed_at is None and not self._abort_cause and any(map(_is_failure, codes)):
                failed_at = now
                self._alert_other_hosts()
            if None not in codes:
                break
            if failed_at is not None:
                self._end_survivors(now - failed_at)
            if self._stop_at is not None and now > self._stop_at + stop_timeout_s:
                log(f"still running {stop_timeout_s:g} s after the stop request: killed")
                self.kill()
            watch(self)
            time.sleep(POLL_S)
        for worker in self.workers:
            worker.finish()
            worker.kill()  # data workers that remain in its session
        return self._result()

    def request_stop(self) -> None:
        """Send SIGTERM, at which the processes save and end."""
        self._stop_at = self._stop_at or time.monotonic()
        for worker in self.workers:
            worker.signal(signal.SIGTERM)

    def abort(self, cause: str) -> None:
        """Kill all processes for a cause outside this host."""
        self._abort_cause = self._abort_cause or cause
        self.kill()

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            worker.kill()

    def _start(self, command: list[str], local_process_id: int) -> Worker:
        environ = self.placement.environ(local_process_id, self.attempt)
        environ |= {"JAXDIST_LOG_DIR": str(self._log_dir)}
        environ |= {FAILED_AT: repr(self._failed_at)} if self._failed_at else {}
        process_id = environ["JAXDIST_PROCESS_ID"]
        log_file = self._log_dir / f"attempt-{self.attempt}-process-{process_id}.out"
        is_alone = environ["JAXDIST_NUM_PROCESSES"] == "1"
        prefix = "" if is_alone else f"[{process_id}] "
        return Worker(command, environ, log_file, prefix, self._start_process)

    def _alert_other_hosts(self) -> None:
        """Report workers that were killed before they could report an error."""
        if self.placement.nnodes == 1:
            return
        for worker in self.workers:
            if _is_failure(worker.poll()) and worker.error_record() is None:
                host = socket.gethostname()
                line = f"process {worker.process_id} on {host} is lost: {worker.cause()}"
                failure_broadcast.request_abort(self._log_dir, worker.process_id, line)

    def _end_survivors(self, waited_s: float) -> None:
        codes = [(worker.process.returncode, worker.killed) for worker in self.workers]
        if self.placement.nnodes == 1 and (-signal.SIGKILL, False) in codes:
            if waited_s > COLLECT_KILLED_S:
                self.kill()
        elif waited_s > COLLECT_S:
            for worker in self.workers:
                if worker.poll() is None:
                    worker.quiet = True
                    worker.signal(signal.SIGQUIT)  # stacks of all threads, into its log
            time.sleep(0.3)
            self.kill()

    def _result(self) -> GroupResult:
        codes = [worker.process.returncode for worker in self.workers]
        if not any(_is_failure(code) for code in codes):
            code = runtime.EXIT_PREEMPTED if any(codes) else runtime.EXIT_OK
            return GroupResult(exit_code=code, attempt=self.attempt)
        if self._abort_cause:
            return GroupResult(
                exit_code=runtime.EXIT_FAILURE,
                attempt=self.attempt,
                cause=self._abort_cause,
                seconds=time.monotonic() - self.started,
                failed_at=time.monotonic(),
            )
        failed = [worker for worker in self.workers if _is_failure(worker.process.returncode)]
        first = min(failed, key=lambda worker: _cause_order(worker, self.placement.nnodes == 1))
        record = first.error_record()
        code = first.process.returncode
        last_lines = "\n".join(first.service_lines or first.last_lines)
        is_rejected = code == runtime.EXIT_CONFIG and record is not None
        if is_rejected := is_rejected and not any(worker.has_begun for worker in self.workers):
            for worker in self.workers:
                worker.discard_output()
        return GroupResult(
            exit_code=code if code > 0 else 128 - code,
            attempt=self.attempt,
            first_process=first.process_id,
            cause=first.cause(),
            details=record["error"] if record else last_lines,
            advice=record["advice"]
            if record
            else runtime.HOST_MEMORY_ADVICE * first.may_be_out_of_memory(),
            log_file="" if is_rejected else str(first.log_file),
            seconds=first.ended_at - self.started,
            failed_at=first.ended_at,
            already_printed=code == runtime.EXIT_CONFIG and len(self.workers) == 1,
            is_rejected=is_rejected,
        )


def _is_failure(code: int | None) -> bool:
    return code not in (None, runtime.EXIT_OK, runtime.EXIT_PREEMPTED)


def _cause_order(worker: Worker, one_host: bool) -> tuple[int, float]:
    """Return a sort key: causes before consequences, then by time.

    A process that ended because of another one reports a broken connection, was aborted by jax's
    service, or followed a broadcast. If all failures are such consequences, the cause is the
    process that hung until it was killed, unless the cause may be on another host.
    """
    record = worker.error_record()
    if worker.killed:
        rank = 1 if one_host else 3
    elif record is not None:
        rank = 2 if runtime.is_consequence(record["error"]) else 0
    else:
        rank = 3 if worker.service_lines else 0
    return rank, record.get("monotonic", worker.ended_at) if record else worker.ended_at
