"""One process of a job, started by the launcher: its output, its end and what it said about it."""

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
from jaxdist.tools.launch.console import say
from jaxdist.tools.launch.fork_server import Process, Start, die_with_parent
from jaxdist.tools.launch.resources import OomKills, count_oom_kills

_SERVICE_MARK = "JAX distributed service detected fatal"
_SERVICE_LINES = 6  # of its message, before the stacks of all threads

_OOM_WINDOW_S = 60.0
"""A process that the kernel kills may take many seconds to free its memory and end."""


def start_command(command: list[str], environ: dict[str, str], output: int) -> Process:
    """Start a command in a session of its own; see `fork_server.Start`."""
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
    """One process in a session of its own. Its output goes to a file and to the console.

    Attributes:
        ended_at: time of its end (seconds of `time.monotonic`); 0 while it runs.
        quiet: its output goes to the file only.
        service_lines: what jax's service printed when it ended this process for another one's loss.
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
        self.error_file.delete()  # of an earlier launch in this run directory
        self.log_file = log_file
        self._log_size, self._written = locate(log_file).size() if log_file.exists() else 0, 0
        self._own_log = locate(log_file.with_name(f"process-{self.process_id}.log"))
        self._own_version = self._own_log.version()
        self.ended_at = 0.0
        self.killed = False
        # Counts of one or two windows ago and of the last: a kill of long ago explains nothing.
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
        """Exit code once it has ended."""
        code, now = self.process.poll(), time.monotonic()
        if code is not None and not self.ended_at:
            self.ended_at = now
        if code is None and now - self._oom_counted_at > _OOM_WINDOW_S:
            self._oom_kills, self._oom_kills_next = self._oom_kills_next, count_oom_kills()
            self._oom_counted_at = now
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process alone; it tells its data workers itself."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it and every process that it has started."""
        self.killed = self.killed or self.process.poll() is None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Wait for its end and for its last output."""
        self.process.wait()
        self.poll()
        self._reader.join(timeout=2)  # a stray grandchild may hold the pipe open

    def error_record(self) -> dict[str, Any] | None:
        """What `runtime.run_command` wrote about its failure; None where it wrote nothing."""
        try:
            record: dict[str, Any] = self.error_file.json()
        except (OSError, ValueError):
            return None
        return record

    @property
    def has_begun(self) -> bool:
        """Whether the run directory was changed: training opens the process's own log then."""
        return self._own_log.version() != self._own_version

    def discard_output(self) -> None:
        """Restore the log and the error file as they were before this process."""
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
        """How it ended, in a few words."""
        code = self.process.returncode
        if self.killed:
            return "it hung, did not end with the others and was killed"
        if code == 128 + signal.SIGKILL:  # of a shell whose program was killed
            return f"exit code {code}, killed by SIGKILL{self._who_killed()}"
        if code >= 0:
            return f"exit code {code}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = self._who_killed()
        elif self.service_lines:
            hint = f": lost {self._lost_peers()}; it died, its host did, or the network is cut"
        return f"killed by {signal.Signals(-code).name}{hint}"

    def may_be_out_of_memory(self) -> bool:
        """Whether it was killed, and the kernel ended a process for want of memory by then."""
        killed = (-signal.SIGKILL, 128 + signal.SIGKILL)
        return self.process.returncode in killed and self._new_oom_kills().count > 0

    def _who_killed(self) -> str:
        found = self._new_oom_kills()
        if not found.count:
            return " (out of memory? see dmesg)"
        if found.own:
            return ": the kernel ended it, as the job's memory on this host ran out"
        return (
            ": perhaps the kernel ended it, as the host's memory ran out. It ended a process of "
            "this host then (see dmesg)"
        )

    def _new_oom_kills(self) -> OomKills:
        now = count_oom_kills()
        return OomKills(now.count - self._oom_kills.count, now.own)

    def _lost_peers(self) -> str:
        """Whom jax's service missed when it ended this process, with the hosts they ran on."""
        named = set()
        for line in self.service_lines[1:]:  # a list of numbers, or of /job:.../task:<number>
            numbers = re.findall(r"/task:(\d+)", line) or (
                re.findall(r"\d+", line) if re.fullmatch(r"[\d,\s]+", line) else []
            )
            named |= set(map(int, numbers))
        lost = sorted(named - {self.process_id}) or [0]  # without a name it is the coordinator
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
        """Append to the log; on a full disk go on without it, or the pipe would fill and block."""
        try:
            if self._log is None:
                descriptor = locate(self.log_file).append_descriptor()
                self._log = os.fdopen(descriptor, "ab", buffering=0)
            self._written += self._log.write(line) or 0
        except OSError as failure:
            if not self._lost_log:
                self._lost_log = True
                say(
                    f"{self.log_file} cannot be written ({failure.strerror}): lines of process "
                    f"{self.process_id} are on the console only"
                )


def _block_notices() -> None:
    die_with_parent()
    # Unblocked by `runtime.Preemption`: until training can act on a notice, it would be killed.
    signal.pthread_sigmask(signal.SIG_BLOCK, runtime.NOTICES)
