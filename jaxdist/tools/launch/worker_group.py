"""One attempt of a job on this host: its processes, their words, and why it ended."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jaxdist import runtime
from jaxdist.runtime import coordination

POLL_S = 0.05
COLLECT_S = 2.0
"""After the first failure: time for the others to hear of it and to leave their own words."""

_SERVICE_MARK = "JAX distributed service detected fatal"
_SERVICE_LINES = 6  # of its message, before the stacks of all threads

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where this host's processes stand in the job.

    Attributes:
        nproc_per_node: processes of each launcher.
        nnodes: launchers.
        node_rank: of this one.
        coordinator_address: host:port of the first process.
        num_hosts: hosts, where several launchers share one; 0: as many as launchers.
        visible_gpus: `CUDA_VISIBLE_DEVICES` of the processes; empty: as it is.
    """

    nproc_per_node: int
    nnodes: int
    node_rank: int
    coordinator_address: str
    num_hosts: int = 0
    visible_gpus: str = ""

    def environ(self, local: int, attempt: int) -> dict[str, str]:
        """What `runtime.resolve` reads in the process with this local index."""
        shown = {"CUDA_VISIBLE_DEVICES": self.visible_gpus} if self.visible_gpus else {}
        return {
            **shown,
            "JAXDIST_COORDINATOR_ADDRESS": self.coordinator_address,
            "JAXDIST_NUM_PROCESSES": str(self.nproc_per_node * self.nnodes),
            "JAXDIST_PROCESS_ID": str(self.node_rank * self.nproc_per_node + local),
            "JAXDIST_NUM_HOSTS": str(self.num_hosts or self.nnodes),
            "JAXDIST_NUM_LOCAL_PROCESSES": str(self.nproc_per_node),
            "JAXDIST_LOCAL_PROCESS_ID": str(local),
            "JAXDIST_ATTEMPT": str(attempt),
        }


class Worker:
    """One process, in a session of its own, with its output in a file and on our console."""

    def __init__(
        self, command: list[str], environ: dict[str, str], log_file: Path, prefix: str
    ) -> None:
        self.index = int(environ["JAXDIST_PROCESS_ID"])
        self.error_file = log_file.with_suffix(".error.json")
        self.error_file.unlink(missing_ok=True)  # of an earlier launch in this run directory
        self.log_file = log_file
        self.ended_at = 0.0
        self.killed = False
        self.quiet = False  # to the file only
        self.service_words: list[str] = []  # jax aborts a process when another one is lost
        self.last_lines: deque[str] = deque(maxlen=40)
        self._log: IO[bytes] | None = None
        self._lost_log = False
        self.process = subprocess.Popen(
            command,
            env={
                **os.environ,
                **environ,
                "PYTHONUNBUFFERED": "1",
                "JAXDIST_ERROR_FILE": str(self.error_file),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hold_notices if "jaxdist.train" in command else _die_with_parent,
        )
        assert self.process.stdout is not None  # PIPE above
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout, prefix), daemon=True
        )
        self._reader.start()

    def poll(self) -> int | None:
        """Exit code once it has ended."""
        code = self.process.poll()
        if code is not None and not self.ended_at:
            self.ended_at = time.time()
        return code

    def signal(self, number: int) -> None:
        """To the process alone: its data workers and the like are its own affair."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """With everything it has started."""
        self.killed = self.killed or self.process.poll() is None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Reap the process and read what it said last."""
        self.process.wait()
        self.poll()
        self._reader.join(timeout=2)  # a stray grandchild may hold the pipe open

    def said(self) -> dict[str, Any] | None:
        """What `runtime.run_command` left about its failure."""
        try:
            record: dict[str, Any] = json.loads(self.error_file.read_text())
        except (OSError, ValueError):
            return None
        return record

    def _read(self, stream: IO[bytes], prefix: str) -> None:
        for line in stream:
            self._keep(line)
            text = line.decode(errors="replace").rstrip("\n")
            self.last_lines.append(text)
            if _SERVICE_MARK in text or 0 < len(self.service_words) < _SERVICE_LINES:
                self.service_words.append(text)
            if not self.quiet:
                print(prefix + text, flush=True)
        if self._log is not None:
            self._log.close()

    def _keep(self, line: bytes) -> None:
        """Append to the log; a reader that ended with the disk would block the process for ever."""
        try:
            if self._log is None:
                self._log = open(self.log_file, "ab", buffering=0)  # noqa: SIM115, closed by _read
            self._log.write(line)
        except OSError as failure:
            if not self._lost_log:
                self._lost_log = True
                print(
                    f"launch: {self.log_file} cannot be written ({failure.strerror}): lines of "
                    f"process {self.index} are missing there and stand on the console only",
                    file=sys.stderr,
                    flush=True,
                )


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _hold_notices() -> None:
    _die_with_parent()
    # Train takes a notice as soon as it can remember it; until then it would kill the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, runtime.NOTICES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Why an attempt ended.

    Attributes:
        exit_code: 0 and 75 when all processes agree; else that of the first failure.
        attempt: its index.
        first: process id of the first failure, -1 where none is to blame.
        cause: in a few words.
        words: traceback, or the last lines of its log.
        advice: what to do, when the process knew.
        log_file: of the first failure.
        seconds: from the start to the first failure.
        spoken: the process has said it on the console already.
    """

    exit_code: int
    attempt: int
    first: int = -1
    cause: str = ""
    words: str = ""
    advice: str = ""
    log_file: str = ""
    seconds: float = 0.0
    spoken: bool = False

    def report(self) -> str:
        """The block that closes a failed attempt; the cause stands on top."""
        line = "-" * 100
        if self.first < 0:
            text = f"launch: attempt {self.attempt} was ended after {self.seconds:.1f} s: "
            return "\n".join(["", line, text + self.cause, line])
        parts = [
            "",
            line,
            f"launch: attempt {self.attempt}: process {self.first} failed first, after "
            f"{self.seconds:.1f} s: {self.cause}",
            "",
            self.words,
            "",
        ]
        if self.advice:
            parts.append(f"to do:  {self.advice}")
        return "\n".join([*parts, f"log:    {self.log_file}", line])


class Attempt:
    """All processes of one attempt, from start to the last one's end."""

    def __init__(self, command: list[str], place: Place, index: int, log_dir: Path):
        self.index = index
        self.place = place
        self.started = time.time()
        self._stop_at: float | None = None
        self._abandoned = ""
        self._log_dir = log_dir
        self.workers: list[Worker] = []
        try:
            for local in range(place.nproc_per_node):
                environ = place.environ(local, index) | {"JAXDIST_LOG_DIR": str(log_dir)}
                number = environ["JAXDIST_PROCESS_ID"]
                log_file = log_dir / f"attempt-{index}-process-{number}.out"
                prefix = f"[{number}] " if place.nproc_per_node * place.nnodes > 1 else ""
                self.workers.append(Worker(command, environ, log_file, prefix))
        except OSError as failure:
            self.kill()
            from jaxdist.core.settings import ConfigError

            raise ConfigError(
                [f"{command[0]} cannot be started: {failure.strerror}. Check --program."]
            ) from None

    @property
    def is_stopping(self) -> bool:
        """Whether the processes were asked to save and end."""
        return self._stop_at is not None

    def run(
        self, stop_timeout_s: float, watch: Callable[[Attempt], None] = lambda _: None
    ) -> Outcome:
        """Watch until all have ended; the first failure ends the others.

        Args:
            stop_timeout_s: seconds to save after a request to stop.
            watch: called again and again meanwhile.
        """
        failed_at: float | None = None
        while True:
            codes = [worker.poll() for worker in self.workers]
            now = time.monotonic()
            if failed_at is None and not self._abandoned and any(map(_is_failure, codes)):
                failed_at = now
                self._tell_other_hosts()
            if None not in codes:
                break
            if failed_at is not None and now > failed_at + COLLECT_S:
                self._end_survivors()
            if self._stop_at is not None and now > self._stop_at + stop_timeout_s:
                print("launch: no end after the request to stop: killing", file=sys.stderr)
                self.kill()
            watch(self)
            time.sleep(POLL_S)
        for worker in self.workers:
            worker.finish()
            worker.kill()  # what a process left behind in its session goes with it
        return self._outcome()

    def ask_to_stop(self) -> None:
        """Pass a notice on: SIGTERM is what jax's preemption service listens to."""
        self._stop_at = self._stop_at or time.monotonic()
        for worker in self.workers:
            worker.signal(signal.SIGTERM)

    def abandon(self, cause: str) -> None:
        """End everything now, for a reason that none of the processes here has given."""
        self._abandoned = self._abandoned or cause
        self.kill()

    def kill(self) -> None:
        """End everything now."""
        for worker in self.workers:
            worker.kill()

    def _tell_other_hosts(self) -> None:
        """Of processes that died without a word; what could speak has told all by itself."""
        for worker in self.workers:
            if self.place.nnodes > 1 and _is_failure(worker.poll()) and worker.said() is None:
                line = f"process {worker.index} on {socket.gethostname()} is lost: {_cause(worker)}"
                coordination.raise_alarm(self._log_dir, worker.index, line)

    def _end_survivors(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.quiet = True
                worker.signal(signal.SIGQUIT)  # stacks of all threads, into its log
        time.sleep(0.3)
        self.kill()

    def _outcome(self) -> Outcome:
        codes = [worker.process.returncode for worker in self.workers]
        if not any(_is_failure(code) for code in codes):
            code = runtime.EXIT_PREEMPTED if any(codes) else runtime.EXIT_OK
            return Outcome(exit_code=code, attempt=self.index)
        if self._abandoned:
            return Outcome(
                exit_code=runtime.EXIT_FAILURE,
                attempt=self.index,
                cause=self._abandoned,
                seconds=time.time() - self.started,
            )
        failed = [worker for worker in self.workers if _is_failure(worker.process.returncode)]
        first = min(failed, key=lambda worker: _blame_order(worker, self.place.nnodes == 1))
        said = first.said()
        code = first.process.returncode
        return Outcome(
            exit_code=code if code > 0 else 128 - code,
            attempt=self.index,
            first=first.index,
            cause=_cause(first),
            words=said["error"] if said else "\n".join(first.service_words or first.last_lines),
            advice=said["advice"] if said else "",
            log_file=str(first.log_file),
            seconds=first.ended_at - self.started,
            spoken=code == runtime.EXIT_CONFIG and len(self.workers) == 1,
        )


def _is_failure(code: int | None) -> bool:
    return code not in (None, runtime.EXIT_OK, runtime.EXIT_PREEMPTED)


def _blame_order(worker: Worker, one_host: bool) -> tuple[int, float]:
    """Causes before consequences, then by time.

    A process that fell because of another says so (a broken connection), is aborted by jax's
    service, or followed an announcement. Where all that failed did so, the cause is the one that
    was silent to the end - if it can only be on this host.
    """
    said = worker.said()
    if worker.killed:
        rank = 1 if one_host else 3
    elif said is not None:
        rank = 2 if runtime.is_consequence(said["error"]) else 0
    else:
        rank = 3 if worker.service_words else 0
    return rank, said["time"] if said else worker.ended_at


def _lost_peers(worker: Worker) -> str:
    """Whom jax's service missed when it ended this process, with the hosts that they had named."""
    named = set()
    for line in worker.service_words[1:]:  # a list of numbers, or of /job:.../task:<number>
        numbers = re.findall(r"/task:(\d+)", line) or (
            re.findall(r"\d+", line) if re.fullmatch(r"[\d,\s]+", line) else []
        )
        named |= set(map(int, numbers))
    lost = sorted(named - {worker.index}) or [0]  # without a name it is the coordinator
    names = []
    for index in lost[:4]:
        try:
            standing = worker.log_file.with_name(f"process-{index}.progress.json")
            names.append(f"process {index} on {json.loads(standing.read_text())['host']}")
        except (OSError, ValueError, KeyError):
            names.append(f"process {index}")
    return ", ".join(names) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")


def _cause(worker: Worker) -> str:
    code = worker.process.returncode
    if worker.killed:
        return "it stood still, did not end with the others and was killed"
    if code >= 0:
        return f"exit code {code}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (by the system for lack of memory? see dmesg)"
    elif worker.service_words:
        hint = f": lost {_lost_peers(worker)}; it died, its host did, or the network is cut"
    return f"killed by {signal.Signals(-code).name}{hint}"
