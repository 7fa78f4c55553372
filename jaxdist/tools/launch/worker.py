"""One process of a job: start it, store its output, report how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from jaxdist import runtime
from jaxdist.runtime.storage import locate
from jaxdist.tools.launch import log
from jaxdist.tools.launch.fork_server import Process, Start, die_with_parent
from jaxdist.tools.launch.resources import OomKills, count_oom_kills

_SERVICE_MARK = "JAX distributed service detected fatal"
_SERVICE_LINES = 6  # length of the message; stacks of all threads follow

_OOM_WINDOW_S = 60.0
"""A killed process may need many seconds to free its memory and end."""


def start_command(command: list[str], environ: dict[str, str], output: int) -> Process:
    """Start a command in its own session; see `fork_server.Start`."""
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
    `service_lines` is the message of jax's service if it ended this process because of another.
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
        # Counts one to two windows ago, and in the last window: older kills are unrelated.
        self._oom_kills = self._oom_kills_next = count_oom_kills()
        self._oom_counted_at = time.monotonic()
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
        """Return the exit code, or None while it runs."""
        code, now = self.process.poll(), time.monotonic()
        if code is not None and not self.ended_at:
            self.ended_at = now
        if code is None and now - self._oom_counted_at > _OOM_WINDOW_S:
            self._oom_kills, self._oom_kills_next = self._oom_kills_next, count_oom_kills()
            self._oom_counted_at = now
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process only; it stops its data workers itself."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and all processes in its session."""
        self.killed = self.killed or self.process.poll() is None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Wait for the end and for the last output."""
        self.process.wait()
        self.poll()
        self._reader.join(timeout=2)  # a stray grandchild may hold the pipe open

    def error_record(self) -> dict[str, Any] | None:
        """Return the record of its failure that `runtime.run_command` wrote, or None."""
        try:
            record: dict[str, Any] = self.error_file.json()
        except (OSError, ValueError):
            return None
        return record

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
        """Describe in a few words how the process ended."""
        code = self.process.returncode
        if self.killed:
            return "it hung, did not end with the others, and was killed"
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

    def may_be_out_of_memory(self) -> bool:
        """Return whether the process was killed while the kernel counted an out-of-memory kill."""
        killed = (-signal.SIGKILL, 128 + signal.SIGKILL)
        return self.process.returncode in killed and self._new_oom_kills().count > 0

    def _who_killed(self) -> str:
        kills = self._new_oom_kills()
        if not kills.count:
            return " (out of memory? see dmesg)"
        if kills.own:
            return ": killed by the kernel, because the job ran out of memory on this host"
        return (
            ": perhaps killed by the kernel, because the host ran out of memory; it killed a "
            "process of this host at that time (see dmesg)"
        )

    def _new_oom_kills(self) -> OomKills:
        now = count_oom_kills()
        return OomKills(now.count - self._oom_kills.count, now.own)

    def _lost_peers(self) -> str:
        """Return the processes, with hosts, that jax's service lost before it ended this one."""
        lost_ids = set()
        for line in self.service_lines[1:]:  # a list of numbers, or of /job:.../task:<number>
            numbers = re.findall(r"/task:(\d+)", line) or (
                re.findall(r"\d+", line) if re.fullmatch(r"[\d,\s]+", line) else []
            )
            lost_ids |= set(map(int, numbers))
        lost = sorted(lost_ids - {self.process_id}) or [0]  # if unnamed: the coordinator
        names = []
        for process_id in lost[:4]:
            try:
                progress = self.log_file.with_name(f"process-{process_id}.progress.json")
                host = locate(progress).json()["host"]
                names.append(f"process {process_id} on {host}")
            except (OSError, ValueError, KeyError):
                names.append(f"process {process_id}")
        return ", ".join(names) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")

    def _read(self, stream: IO[bytes], prefix: str) -> None:
        for line in stream:
            self._keep(line)
            text = line.decode(errors="replace").rstrip("\n")
            self.last_lines.append(text)
            if _SERVICE_MARK in text or 0 < len(self.service_lines) < _SERVICE_LINES:
                self.service_lines.append(text)
            if not self.quiet:
                print(prefix + text, flush=True)
        if self._log is not None:
            self._log.close()

    def _keep(self, line: bytes) -> None:
        """Append to the log; continue without it on a full disk, or the pipe would block."""
        try:
            if self._log is None:
                descriptor = locate(self.log_file).append_descriptor()
                self._log = os.fdopen(descriptor, "ab", buffering=0)
            self._written += self._log.write(line) or 0
        except OSError as failure:
            if not self._lost_log:
                self._lost_log = True
                log(
                    f"{self.log_file} cannot be written ({failure.strerror}): output of process "
                    f"{self.process_id} is on the console only"
                )


def _block_notices() -> None:
    die_with_parent()
    # A notice would kill the process until `runtime.Preemption` handles and unblocks them.
    signal.pthread_sigmask(signal.SIG_BLOCK, runtime.NOTICES)
