"""The processes of one attempt on this host: start them, end them together, report the cause.

The first failure ends the attempt, because the other processes wait in collectives. They get
`COLLECT_S` to report their own errors: the first process to fail often does not have the cause.
`GroupResult` names the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jaxdist import runtime
from jaxdist.runtime.coordination import failure_broadcast
from jaxdist.runtime.start_times import FAILED_AT
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError
from jaxdist.tools.launch import log
from jaxdist.tools.launch.fork_server import Process, Start, die_with_parent
from jaxdist.tools.launch.resources import count_oom_kills

_SERVICE_MARK = "JAX distributed service detected fatal"
_SERVICE_LINES = 6  # length of the message; stacks of all threads follow


def start_command(command: list[str], environ: dict[str, str], output: int) -> Process:
    """Return a process that runs a command in its own session; see `fork_server.Start`."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_block_notices if "jaxdist.train" in command else die_with_parent,
    )


class Worker:
    """One process in its own session; its output goes to a log file and to the console.

    `ended_at` is the time of the end (`time.monotonic`); 0 while it runs. `quiet`: log file only.
    `service_lines`: message of jax's coordination service if it ended this process because another
    one was lost.
    """

    def __init__(
        self,
        command: list[str],
        environ: dict[str, str],
        log_file: Path,
        prefix: str,
        start: Start = start_command,
    ) -> None:
        self.process_id = int(environ["JAXDIST_PROCESS_ID"])
        self.error_file = locate(log_file.with_suffix(".error.json"))
        self._earlier_error = self.error_file.text() if self.error_file.exists() else ""
        self.error_file.delete()  # left by an earlier launch in this run directory
        self.log_file = log_file
        self._log_size, self._written = locate(log_file).size() if log_file.exists() else 0, 0
        self._own_log = locate(log_file.with_name(f"process-{self.process_id}.log"))
        self._own_version = self._own_log.version()
        self.ended_at = 0.0
        self.killed = False
        self._oom_kills = count_oom_kills()
        self.quiet = False
        self.service_lines: list[str] = []
        self.last_lines: deque[str] = deque(maxlen=40)
        self._log: IO[bytes] | None = None
        self._lost_log = False
        readable, output = os.pipe()
        try:
            environ = {**environ, "JAXDIST_ERROR_FILE": str(self.error_file)}
            self.process = start(command, environ, output)
        except OSError:
            os.close(readable)
            self.discard_output()
            raise
        finally:
            os.close(output)
        self._reader = threading.Thread(
            target=self._read, args=(os.fdopen(readable, "rb"), prefix), daemon=True
        )
        self._reader.start()

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while it runs."""
        code = self.process.poll()
        if code is not None and not self.ended_at:
            self.ended_at = time.monotonic()
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process only; it stops its data workers itself."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended: the fork server reports it soon
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and all processes in its session."""
        self.killed = self.killed or self.process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Wait until the process has ended, and at most 2 s until its last output is written."""
        self.process.wait()
        self.poll()
        self._reader.join(timeout=2)  # a stray grandchild may hold the pipe open

    def error_record(self) -> dict[str, Any] | None:
        """Return the record that `runtime.run_command` wrote of the failure; None without one."""
        with contextlib.suppress(OSError, ValueError):
            return dict(self.error_file.json())
        return None

    @property
    def has_begun(self) -> bool:
        """Return whether training has opened its own log, i.e. changed the run directory."""
        return self._own_log.version() != self._own_version

    def discard_output(self) -> None:
        """Restore the log and the error file to their state before this process."""
        with contextlib.suppress(OSError):
            if self.log_file.stat().st_size == self._log_size + self._written:
                os.truncate(self.log_file, self._log_size)
            if not self._log_size:
                self.log_file.unlink()
        with contextlib.suppress(OSError):
            self.error_file.delete()
            if self._earlier_error:
                self.error_file.write(self._earlier_error)

    def cause(self) -> str:
        """Return a few words on how the process ended: exit code, signal, hung, lost peers."""
        code = self.process.returncode
        if self.killed:
            return "it hung or did not end in time, and was killed"
        if code == 128 + signal.SIGKILL:  # a shell whose program was killed
            return f"exit code {code}, killed by SIGKILL{self._who_killed()}"
        if code >= 0:
            return f"exit code {code}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = self._who_killed()
        elif self.service_lines:
            hint = f": lost {self._lost_peers()}; it or its host died, or the network failed"
        return f"killed by {signal.Signals(-code).name}{hint}"

    def is_out_of_memory(self) -> bool:
        """Return whether it was killed after the kernel had killed processes of this job."""
        is_killed = self.process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return is_killed and count_oom_kills() > self._oom_kills

    def _who_killed(self) -> str:
        if self.is_out_of_memory():
            return ": killed by the kernel, because the job ran out of memory on this host"
        return " (out of memory? see dmesg)"

    def _lost_peers(self) -> str:
        """Return text: the processes that jax reported as lost (process 0 if none), with hosts."""
        lost_ids = set()
        for line in self.service_lines[1:]:  # a list of numbers, or of /job:.../task:<number>
            numbers = re.findall(r"/task:(\d+)", line) or (
                re.findall(r"\d+", line) if re.fullmatch(r"[\d,\s]+", line) else []
            )
            lost_ids |= set(map(int, numbers))
        lost = sorted(lost_ids - {self.process_id}) or [0]  # if unnamed: the coordinator
        names = []
        for process_id in lost[:4]:
            names.append(f"process {process_id}")
            progress = self.log_file.with_name(f"process-{process_id}.progress.json")
            with contextlib.suppress(OSError, ValueError, KeyError):
                names[-1] += f" on {locate(progress).json()['host']}"
        return ", ".join(names) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")

    def _read(self, stream: IO[bytes], prefix: str) -> None:
        for line in stream:
            self._keep(line)
            text = line.decode(errors="replace").rstrip("\n")
            self.last_lines.append(text)
            if _SERVICE_MARK in text or 0 < len(self.service_lines) < _SERVICE_LINES:
                self.service_lines.append(text)
            # A console that cannot be written must not end this thread. Whole lines do not mix.
            with contextlib.suppress(OSError, ValueError):
                if not self.quiet:
                    print(f"{prefix}{text}\n", end="", flush=True)
        if self._log is not None:
            self._log.close()

    def _keep(self, line: bytes) -> None:
        """Append output to the log file; on a full disk drop it, because the pipe would block."""
        try:
            if self._log is None:
                descriptor = locate(self.log_file).append_descriptor()
                self._log = os.fdopen(descriptor, "ab", buffering=0)
            self._written += self._log.write(line) or 0
        except OSError as failure:
            if not self._lost_log:
                self._lost_log = True
                log(
                    f"{self.log_file} cannot be written ({failure.strerror}): it lacks some output "
                    f"of process {self.process_id}"
                )


def _block_notices() -> None:
    die_with_parent()
    # A notice would kill the process until `runtime.Preemption` handles and unblocks them.
    signal.pthread_sigmask(signal.SIG_BLOCK, runtime.NOTICES)


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
        """Return the variables of one process that `runtime.resolve` reads, and its GPUs."""
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

    `exit_code` is that of the first failure (128 + the number of a signal), 1 after `abort`, else 0
    or 75. `first_process` is the index in the job of the process that failed first; -1 if none of
    this host caused it. `details` are a traceback or the last lines of the log. `failed_at` is the
    time of the failure (`time.monotonic`) or 0. `is_rejected`: the settings were rejected before
    any process changed the run directory.
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
    """All processes of one attempt on this host; `failed_at`: when the last attempt failed or 0."""

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
            problem = f"{command[0]} cannot be started: {failure.strerror}"
            if failure.filename == command[0]:
                raise ConfigError(f"{problem}. Check --program.") from None
            self._abort_cause = problem  # the host lacks processes or files; a restart may help

    @property
    def is_stopping(self) -> bool:
        """Return whether a stop request was sent to the processes."""
        return self._stop_at is not None

    def run(
        self, stop_timeout_s: float, watch: Callable[[WorkerGroup], None] = lambda _: None
    ) -> GroupResult:
        """Wait until all processes have ended; return why. The first failure ends the others.

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
                log(f"killing processes that run {stop_timeout_s:g} s after the stop request")
                self.kill()
            watch(self)
            time.sleep(POLL_S)
        for worker in self.workers:
            worker.finish()
            worker.kill()  # data workers that remain in its session
        return self._result()

    def request_stop(self) -> None:
        """Send SIGTERM, at which training saves and ends."""
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
        if len(codes) == self.placement.nproc_per_node and not any(map(_is_failure, codes)):
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
            else runtime.HOST_MEMORY_ADVICE * first.is_out_of_memory(),
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

    A process that ended because of another one has a broken connection, was aborted by jax's
    coordination service, or stopped after the other broadcast its failure. If all failures are such
    consequences, the cause is the hung process that was killed, unless other hosts are involved.
    """
    record = worker.error_record()
    if worker.killed:
        rank = 1 if one_host else 3
    elif record is not None:
        rank = 2 if runtime.is_consequence(record["error"]) else 0
    else:
        rank = 3 if worker.service_lines else 0
    return rank, record.get("monotonic", worker.ended_at) if record else worker.ended_at
