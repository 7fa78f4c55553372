"""Run attempts of a job on this host, and decide after each whether to restart.

| processes exit with | the launcher |
|---|---|
| 0, all of them | exits with 0: the job is done (an elastic job: when all hosts are done) |
| 75 | exits with 75: preempted; the scheduler restarts the job |
| 75, elastic, requested by the leader or another host | takes part in the next round |
| 2 | exits with 2: bad settings; a restart would fail again |
| 85 | exits with 85: silent data corruption; a restart on this device would fail again |
| 87 | exits with 87: NaN, Inf or loss spikes; a restart would repeat them |
| 130 | exits with 130: interrupted from the keyboard |
| anything else | restarts all, up to `--max-restarts` times without a new checkpoint |
| anything else, after a stop request on this host | exits with 128 + the number of the signal |
| elastic, too few hosts or GPUs | exits with 75: the same command resumes when more are back |

A new checkpoint resets the count of restarts. A long run therefore survives any number of lost
hosts, and a crash loop ends after a few attempts. A failure that ends an elastic job on one host
(2, 85, 87, too many restarts) ends it on all hosts, including spares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from jaxdist import runtime
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.local.store import read_lineage
from jaxdist.runtime.storage import Location, locate, remove_empty
from jaxdist.settings import ConfigError
from jaxdist.tools.launch import log, write
from jaxdist.tools.launch.elastic_agent import ElasticAgent
from jaxdist.tools.launch.fork_server import ForkServer, Process
from jaxdist.tools.launch.resources import count_gpus, free_port
from jaxdist.tools.launch.worker_group import GroupResult, Placement, WorkerGroup, start_command

_LOST_DIRECTORY_S = 900.0  # a file server that restarts takes minutes

PRELOAD_AFTER_S = 20.0
"""Age of a job at which its launcher starts the fork server; short jobs never start it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits and delays of restarts; see `LaunchConfig`."""

    max_restarts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    stop_timeout_s: float = 300.0
    preload: bool = False


class FixedAgent:
    """Runs a fixed number of processes and hosts, or one process per GPU of this host."""

    def __init__(
        self,
        nproc_per_node: int,
        nnodes: int = 1,
        node_rank: int = 0,
        coordinator_address: str = "",
    ):
        self._nproc_per_node, self._nnodes, self._node_rank = nproc_per_node, nnodes, node_rank
        self._coordinator_address = coordinator_address
        self._last_nproc_per_node = 0
        self._next_index = 0

    def next_placement(self, stop_signal: Callable[[], int]) -> tuple[int, Placement] | int:
        """Return the attempt's index and placement, on a single host with a new token."""
        index, self._next_index = self._next_index, self._next_index + 1
        return index, Placement(
            nproc_per_node=self._num_processes(),
            nnodes=self._nnodes,
            node_rank=self._node_rank,
            coordinator_address=self._coordinator_address or f"127.0.0.1:{free_port()}",
            # Launchers of several hosts share the secret in JAXDIST_JOB_TOKEN.
            token=secrets.token_hex(16) if self._nnodes == 1 else "",
        )

    def watch(self, group: WorkerGroup) -> None:
        """React to the state of the running processes; called every `POLL_S` seconds."""

    def on_group_end(self, result: GroupResult) -> None:
        """Receive the result of an attempt, after all its processes have ended."""

    def all_hosts_done(self, stop_signal: Callable[[], int]) -> bool:
        """Return, after exit code 0 on this host, whether all hosts' processes ended with 0."""
        return True

    def continues_after_save(self) -> bool:
        """Return whether another attempt follows exit code 75, if this launcher was not stopped."""
        return False

    def close(self, code: int, stop_signal: int) -> None:
        """Receive the exit code of the launcher, and the signal that stopped it (0 = none)."""

    def discard(self) -> None:
        """Restore files to their state before this launch; runs after `close` of a rejected job."""

    def _num_processes(self) -> int:
        """Return the fixed number, or that of GPUs visible now, at least 1; log if it changed."""
        if self._nproc_per_node:
            return self._nproc_per_node
        now = count_gpus() or 1
        if self._last_nproc_per_node and now != self._last_nproc_per_node:
            log(f"other GPUs are visible: {now} processes, {self._last_nproc_per_node} before")
        self._last_nproc_per_node = now
        return now


class Supervisor:
    """Runs attempts of one command until one determines the exit code of the job."""

    def __init__(
        self,
        command: list[str],
        agent: FixedAgent | ElasticAgent,
        run_dir: Path,
        policy: RestartPolicy,
    ):
        self.command, self.agent, self.run_dir, self.policy = command, agent, run_dir, policy
        self.stop_signal = 0
        self.group: WorkerGroup | None = None
        self._preloaded: ForkServer | None = None
        self._may_preload = policy.preload
        self._began = time.monotonic()
        self._failures = 0  # in a row, without a new checkpoint
        self._failed_at = 0.0
        self._is_unchanged = True  # every attempt was rejected before it changed the run

    def run(self) -> int:
        """Run attempts and return the exit code of the job."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        logs = locate(self.run_dir) / "logs"
        try:
            made = logs.missing()
            logs.make_directory()
        except OSError as error:
            raise ConfigError(
                f"--run-dir {self.run_dir} cannot be created ({error.strerror}). Use another one."
            ) from None
        code = runtime.EXIT_CONFIG  # after a ConfigError; nothing else is raised
        try:
            code = self._run_groups()
        finally:
            self.agent.close(code, self.stop_signal)
            if code == runtime.EXIT_CONFIG and self._is_unchanged:
                self.agent.discard()
                remove_empty(made)
            if self._preloaded is not None:
                self._preloaded.close()
        return code

    def checkpoints(self) -> dict[int, int]:
        """Return step -> version of the manifest of each checkpoint that is not marked as corrupt.

        The local save from which the last attempt resumed is included with version 0, because
        the launcher does not see local disks. {} if the storage cannot be reached.
        """
        directory = locate(self.run_dir) / "checkpoints"
        try:
            resumed_from = read_lineage(directory).resumed_from
            return {step: 0 for step in resumed_from[-1:] if step >= 0} | {
                step: (directory / step / manifest.FILE_NAME).version()
                for step in manifest.steps_in(directory)
                if not (directory / step / manifest.CORRUPT).exists()
            }
        except OSError:
            return {}

    def _run_groups(self) -> int:
        checkpoints = self.checkpoints()
        while True:
            placement = self.agent.next_placement(lambda: self.stop_signal)
            if isinstance(placement, int):
                return placement
            result = self._run_group(*placement)
            code = self._job_exit_code(result)
            if code is not None:
                return code
            if result.exit_code in (runtime.EXIT_OK, runtime.EXIT_PREEMPTED):
                continue  # other hosts still run, or the membership changes: no failure
            write(result.report())
            # After a fallback, new checkpoints have lower steps than the corrupt one: compare
            # versions too.
            saved = self.checkpoints()
            self._failures = 1 if saved.items() - checkpoints.items() else self._failures + 1
            self._failed_at = result.failed_at
            checkpoints = saved or checkpoints
            if self._failures > self.policy.max_restarts:
                log(
                    f"giving up: max_restarts={self.policy.max_restarts} restarts without a new "
                    f"checkpoint. Logs: {self.run_dir / 'logs'}"
                )
                return result.exit_code
            newest = max(checkpoints, default=-1)
            has_waited = self._wait_before_restart(self._failures, newest)
            if not (has_waited and self._wait_for_run_dir()):
                return 128 + self.stop_signal if self.stop_signal else result.exit_code

    def _run_group(self, attempt: int, placement: Placement) -> GroupResult:
        self.group = WorkerGroup(
            self.command,
            placement,
            attempt,
            self.run_dir / "logs",
            start=self._start,
            failed_at=self._failed_at,
        )
        self._failed_at = 0.0
        if self.stop_signal:  # received while the processes were being started
            self.group.request_stop()
        try:
            result = self.group.run(self.policy.stop_timeout_s, self._watch)
        finally:
            self.group = None
        self.agent.on_group_end(result)
        self._is_unchanged &= result.is_rejected
        return result

    def _watch(self, group: WorkerGroup) -> None:
        self.agent.watch(group)
        if self._preloaded is not None and self._preloaded.is_gone():
            log("the fork server has ended: restarts import jax again")
            self._preloaded.close()
            self._preloaded, self._may_preload = None, False
        if self._may_preload and time.monotonic() > self._began + PRELOAD_AFTER_S:
            self._preloaded, self._may_preload = ForkServer(), False

    def _start(self, command: list[str], environ: dict[str, str], output: int) -> Process:
        """Return a started process: a fork of the fork server if it is ready, else a fresh one.

        After two failures without a new checkpoint, always start fresh processes, to rule out the
        fork as the cause.
        """
        if self._failures <= 1 and self._preloaded is not None and self._preloaded.is_ready():
            with contextlib.suppress(OSError):  # server just ended: `_watch` reports it
                return self._preloaded.start(command, environ, output)
        return start_command(command, environ, output)

    def _job_exit_code(self, result: GroupResult) -> int | None:
        """Return the job's exit code after an attempt; None if another attempt may follow."""
        if result.exit_code == runtime.EXIT_OK:
            return runtime.EXIT_OK if self.agent.all_hosts_done(lambda: self.stop_signal) else None
        if result.exit_code == runtime.EXIT_PREEMPTED:
            if not self.stop_signal and self.agent.continues_after_save():
                return None
            log("preempted after a save or before training: start the same command again")
            return runtime.EXIT_PREEMPTED
        if result.exit_code in runtime.FINAL_CODES:
            if not result.already_printed:
                write(result.report())
            return result.exit_code
        if self.stop_signal:
            write(result.report())
            return 128 + self.stop_signal
        return None

    def _wait_before_restart(self, failures: int, newest: int) -> bool:
        """Wait before the second and later restarts; return False after a stop request."""
        policy, seconds = self.policy, 0.0
        if failures > 1:
            seconds = min(policy.max_backoff_s, policy.backoff_s * 2.0 ** min(failures - 2, 99))
            seconds *= 1 + 0.25 * random.random()  # spread the restarts of many hosts
        when = f"in {seconds:.1f} s" if seconds else "now"
        point = f"checkpoint {newest}" if newest >= 0 else "the beginning"
        log(f"restart {failures} of {policy.max_restarts} {when}, from {point}")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop_signal:
            time.sleep(0.1)
        return not self.stop_signal

    def _wait_for_run_dir(self) -> bool:
        """Wait up to 15 minutes for a missing run directory; return whether it exists.

        If its mount is lost, a restart would begin a new run.
        """
        logs = locate(self.run_dir) / "logs"  # made before the first attempt
        if _is_here(logs):
            return True
        log(
            f"{self.run_dir} is missing: is its file system still mounted? "
            f"Waiting up to {_LOST_DIRECTORY_S:.0f} s for it"
        )
        until = time.monotonic() + _LOST_DIRECTORY_S
        while not self.stop_signal and time.monotonic() < until:
            if _is_here(logs):
                log(f"{self.run_dir} is back")
                return True
            time.sleep(0.2)
        if not self.stop_signal:
            log(f"giving up: {self.run_dir} did not come back; the job was not restarted")
        return False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again = self.stop_signal != 0
        self.stop_signal = number
        if self.group is None:
            return
        if number == signal.SIGINT and again:
            self.group.kill()
        else:
            self.group.request_stop()


def _is_here(directory: Location) -> bool:
    with contextlib.suppress(OSError):
        return directory.is_directory()
    return False
