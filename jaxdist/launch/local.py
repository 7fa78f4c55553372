"""Jobs on this host: flags, the loop of attempts, and the rules for starting again.

| a process ends with | then |
|---|---|
| 0, all of them | the job is done: 0 |
| 75 | preempted after a committed save: 75, the scheduler starts the job again |
| 2 | bad configuration, which a restart cannot heal: 2 |
| 85 | a device holds wrong bits, which a restart on it would not heal: 85 |
| 130 | interrupted from the keyboard: 130 |
| anything else | all are stopped and started again, up to `--max-restarts` times without progress |

Progress is a newer checkpoint: it refills the budget, so that a long run survives any number of
lost hosts, while a crash loop ends after a few attempts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from jaxdist import runtime
from jaxdist.launch.attempt import Attempt, Outcome, Place

_LOST_DIRECTORY_S = 900.0  # a file server that restarts takes minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to start on this host, and how often.

    Attributes:
        command: program and arguments of every process.
        nproc: processes on this host; 0: as many as GPUs, counted anew for each attempt.
        nnodes: hosts of the job, each with a launcher of its own.
        node_rank: of this host.
        coordinator: host:port of the first process; empty on one host: a new port per attempt.
        run_dir: where checkpoints and logs are.
        max_restarts: attempts after the first without a new checkpoint.
        backoff_s: wait before the first restart; doubled for each further one without progress.
        max_backoff_s: where doubling ends.
        stop_timeout_s: how long processes may save after a request to stop.
    """

    command: list[str]
    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str = ""
    run_dir: Path
    max_restarts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    stop_timeout_s: float = 300.0

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        for name, least in (("nproc", 0), ("nnodes", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if value < least:
                flag = name.replace("_", "-")
                found.append(f"--{flag} {value} is too small. Use a whole number ≥ {least}.")
        for name in ("backoff_s", "max_backoff_s", "stop_timeout_s"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                found.append(f"--{flag} {getattr(self, name)} is no time. Use seconds ≥ 0.")
        if not 0 <= self.node_rank < max(1, self.nnodes):
            found.append(
                f"--node-rank {self.node_rank} is not among {self.nnodes} nodes. "
                f"Use 0 to {self.nnodes - 1}, another on each host."
            )
        if self.nnodes > 1 and self.nproc == 0:
            found.append(
                f"--nnodes {self.nnodes} without --nproc: all hosts must start equally many. "
                "Give --nproc, e.g. the GPUs of a host."
            )
        if self.nnodes > 1 and not re.fullmatch(r".+:\d+", self.coordinator):
            found.append(
                f"--coordinator {self.coordinator!r} with --nnodes {self.nnodes}: the hosts need "
                "one address to meet. Use host:port of node 0, e.g. --coordinator node0:29400."
            )
        host = self.coordinator.rpartition(":")[0]
        if self.nnodes > 1 and (host == "localhost" or host.startswith("127.")):
            found.append(
                f"--coordinator {self.coordinator} is a loopback address, which other hosts cannot "
                "reach. Use a name of node 0 that they resolve."
            )
        return found


def main(argv: Sequence[str]) -> int:
    """Run a job on this host until it is done or cannot be."""
    plan = read_plan(argv)
    problems = plan.problems()
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return runtime.EXIT_CONFIG
    return Supervisor(plan).run()


def read_plan(argv: Sequence[str]) -> LaunchPlan:
    """Flags before `--` to a plan; what follows belongs to the program."""
    own, rest = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    parser = _parser()
    args, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(
            f"{unknown[0]} is not a flag of the launcher. Flags of the program stand after --, "
            f"e.g. --nproc 2 -- {unknown[0]}"
        )
    run_dir = args.run_dir or _value_of(rest, "run-dir")
    if run_dir is None:
        run_dir = f"runs/launch-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    if args.program:
        command = [*shlex.split(args.program), *rest]
    else:
        command = [sys.executable, "-m", args.module, *rest]
        if args.module == "jaxdist.train" and _value_of(rest, "run-dir") is None:
            command.append(f"--run-dir={run_dir}")  # all attempts are one run
    return LaunchPlan(
        command=command,
        nproc=args.nproc,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        coordinator=args.coordinator,
        run_dir=Path(run_dir),
        max_restarts=args.max_restarts,
        backoff_s=args.backoff_s,
        max_backoff_s=args.max_backoff_s,
        stop_timeout_s=args.stop_timeout_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdist.launch",
        description="Start the processes of a job on this host, watch them, restart what fails.",
        epilog="python -m jaxdist.launch slurm --help: write a SLURM batch script instead.",
    )
    add = parser.add_argument
    add("--nproc", type=int, default=0, help="processes on this host (default: one per GPU, or 1)")
    add("--nnodes", type=int, default=1, help="hosts; start a launcher on each (default 1)")
    add("--node-rank", type=int, default=0, help="of this host, from 0 (default 0)")
    add("--coordinator", default="", help="host:port of node 0; needed with several hosts")
    add("--module", default="jaxdist.train", help="what each process runs (default jaxdist.train)")
    add("--program", default="", help="another program instead, e.g. 'python worker.py'")
    add("--run-dir", help="run directory (default: the program's --run-dir, else runs/launch-TIME)")
    add("--max-restarts", type=int, default=3, help="without a new checkpoint (default 3)")
    add("--backoff-s", type=float, default=1.0, help="seconds before the first restart (default 1)")
    add("--max-backoff-s", type=float, default=60.0, help="where its doubling ends (default 60)")
    add(
        "--stop-timeout-s",
        type=float,
        default=300.0,
        help="seconds for saving after a request to stop (default 300)",
    )
    return parser


def _value_of(words: Sequence[str], flag: str) -> str | None:
    """The value of `--flag value` or `--flag=value`; dashes and underscores are one."""
    value = None
    for i, word in enumerate(words):
        name, equals, after = word.partition("=")
        if name.replace("_", "-") != f"--{flag}":
            continue
        if equals:
            value = after
        elif i + 1 < len(words):
            value = words[i + 1]
    return value


def _num_gpus() -> int:
    visible = runtime.visible_gpus(os.environ)
    if visible is not None:
        return len(visible)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU \d+:", listing.stdout, re.MULTILINE))


class Supervisor:
    """The loop of attempts of one plan."""

    def __init__(self, plan: LaunchPlan):
        self.plan = plan
        self.stop_signal = 0
        self.last_nproc = 0
        self.attempt: Attempt | None = None

    def run(self) -> int:
        """Attempts until one decides; returns the job's exit code."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        (self.plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        failures, newest = 0, self.newest_checkpoint()
        index = 0
        while True:
            outcome = self._one_attempt(index)
            code = self._decided(outcome)
            if code is not None:
                return code
            print(outcome.report(), file=sys.stderr, flush=True)
            reached = self.newest_checkpoint()
            failures = 1 if reached > newest else failures + 1
            newest = max(newest, reached)
            if failures > self.plan.max_restarts:
                self._say(
                    f"giving up: {failures} attempts in a row ended without a new checkpoint. "
                    f"Logs: {self.plan.run_dir / 'logs'}"
                )
                return outcome.exit_code
            if not self._wait_before_restart(failures, newest) or not self._wait_for_run_dir():
                return 128 + self.stop_signal if self.stop_signal else outcome.exit_code
            index += 1

    def newest_checkpoint(self) -> int:
        """Step of the newest committed checkpoint, -1 without one."""
        try:
            names = os.listdir(self.plan.run_dir / "checkpoints")
        except OSError:
            return -1
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _one_attempt(self, index: int) -> Outcome:
        plan = self.plan
        coordinator = plan.coordinator or f"127.0.0.1:{free_port()}"
        nproc = self._num_processes()
        place = Place(
            nproc=nproc, nnodes=plan.nnodes, node_rank=plan.node_rank, coordinator=coordinator
        )
        self.attempt = Attempt(plan.command, place, index, plan.run_dir / "logs")
        if self.stop_signal:  # it came while the processes were being started
            self.attempt.ask_to_stop()
        try:
            return self.attempt.run(plan.stop_timeout_s)
        finally:
            self.attempt = None

    def _num_processes(self) -> int:
        """As asked for, or one per GPU that is there now: a lost GPU ends no job."""
        if self.plan.nproc:
            return self.plan.nproc
        now = _num_gpus() or 1
        if self.last_nproc and now != self.last_nproc:
            self._say(f"{now} GPUs are there, {self.last_nproc} were: going on with {now}")
        self.last_nproc = now
        return now

    def _decided(self, outcome: Outcome) -> int | None:
        """The job's exit code if this attempt settles it, None to try again."""
        if outcome.exit_code == runtime.EXIT_OK:
            return runtime.EXIT_OK
        if outcome.exit_code == runtime.EXIT_PREEMPTED:
            self._say("preempted after a committed save; the same command goes on from there")
            return runtime.EXIT_PREEMPTED
        final = (runtime.EXIT_CONFIG, runtime.EXIT_DAMAGED, runtime.EXIT_INTERRUPTED)
        if outcome.exit_code in final:
            if not outcome.spoken:
                print(outcome.report(), file=sys.stderr, flush=True)
            return outcome.exit_code
        if self.stop_signal:
            print(outcome.report(), file=sys.stderr, flush=True)
            return 128 + self.stop_signal
        return None

    def _wait_before_restart(self, failures: int, newest: int) -> bool:
        """Back off; False when asked to stop meanwhile."""
        seconds = min(self.plan.max_backoff_s, self.plan.backoff_s * 2 ** (failures - 1))
        seconds *= 1 + 0.25 * random.random()  # hosts of one job must not come back in step
        point = f"checkpoint {newest}" if newest >= 0 else "the beginning"
        self._say(
            f"restart {failures} of {self.plan.max_restarts} in {seconds:.1f} s, from {point}"
        )
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop_signal:
            time.sleep(min(0.1, seconds))
        return not self.stop_signal

    def _wait_for_run_dir(self) -> bool:
        """Whether the run directory is there; a start without it would begin a new run below it."""
        logs = self.plan.run_dir / "logs"  # made before the first attempt
        if logs.is_dir():
            return True
        self._say(
            f"{self.plan.run_dir} is gone: is its file system still mounted? "
            f"Waiting up to {_LOST_DIRECTORY_S:.0f} s for it"
        )
        until = time.monotonic() + _LOST_DIRECTORY_S
        while not self.stop_signal and time.monotonic() < until:
            if logs.is_dir():
                self._say(f"{self.plan.run_dir} is back")
                return True
            time.sleep(0.2)
        if not self.stop_signal:
            self._say("giving up: it did not come back; nothing was started without it")
        return False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again = self.stop_signal != 0
        self.stop_signal = number
        if self.attempt is None:
            return
        if number == signal.SIGINT and again:
            self.attempt.kill()
        else:
            self.attempt.ask_to_stop()

    def _say(self, text: str) -> None:
        print(f"launch: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
