"""`python -m jaxdist.launch` on a host: flags to a plan, and who carries it out."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.runtime.storage import file_system_problem
from jaxdist.settings import ConfigError, read_settings, setting, value_of
from jaxdist.settings.schema import flag_of
from jaxdist.tools.launch.elastic_agent import ElasticAgent
from jaxdist.tools.launch.membership import ElasticConfig, LegalSizes, Range, impossible, read_sizes
from jaxdist.tools.launch.rendezvous import HEARTBEAT_S, Rendezvous
from jaxdist.tools.launch.supervisor import Agent, FixedAgent, RestartPolicy, Supervisor

_TRAIN = "jaxdist.train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What to start on this host, and how often.

    What is None was not given: its default depends on the rest, or it belongs to elastic jobs only.
    """

    nproc_per_node: str = setting(
        "0", "processes on this host, N or MIN:MAX; 0 = one per GPU, or 1 without GPUs"
    )
    nnodes: str = setting("1", "hosts, N or MIN:MAX; start a launcher on each")
    node_rank: int = setting(0, "rank of this host, from 0", ge=0)
    coordinator_address: str = setting("", "host:port of node 0; needed with several hosts")
    module: str = setting(_TRAIN, "Python module that each process runs")
    program: str = setting("", "another program instead, e.g. 'python worker.py'")
    run_dir: str | None = setting(
        None, "run directory; none = the program's --run-dir, else runs/launch-TIME"
    )
    max_restarts: int | None = setting(
        None,
        "restarts without a new checkpoint; none = 3, or 0 for commands that write no checkpoints",
        ge=0,
    )
    backoff_s: float = setting(
        1.0,
        "seconds before the second restart without a new checkpoint; doubled for each one after; "
        "the first is at once",
        ge=0,
    )
    max_backoff_s: float = setting(60.0, "longest wait before a restart, seconds", ge=0)
    stop_timeout_s: float = setting(
        300.0, "seconds that processes may take to save after a request to stop", ge=0
    )
    address: str | None = setting(
        None, "elastic jobs: address at which other hosts reach this one; none = its host name"
    )
    heartbeat_timeout_s: float | None = setting(
        None,
        "elastic jobs: seconds without a heartbeat until a host counts as lost; none = 15",
        ge=3 * HEARTBEAT_S,
    )
    rdzv_timeout_s: float | None = setting(
        None,
        "elastic jobs: seconds to wait for more hosts before those here start; none = 30",
        gt=0,
    )
    grow_interval_s: float | None = setting(
        None, "elastic jobs: seconds between looks for GPUs that came back; none = 60", gt=0
    )
    preload: bool = setting(
        True,
        "keep one process that has imported jax: a restart of jaxdist.train forks it and skips "
        "the imports; takes about 200 MB of the host's memory from 20 s after the start",
    )
    arguments: list[str] = setting([], "arguments of the program")

    def ranges(self) -> tuple[Range, Range]:
        """Processes on this host (0 = one per GPU), and hosts.

        Raises:
            ConfigError: what cannot be read.
        """
        found, problems = [], []
        for flag, text, most in (
            ("nproc-per-node", self.nproc_per_node, 1024),  # more than any host has cores for
            ("nnodes", self.nnodes, 100_000),
        ):
            try:
                found.append(Range.parse(flag, text, int(flag == "nnodes" or ":" in text), most))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)
        return found[0], found[1]

    @property
    def is_elastic(self) -> bool:
        """Whether a range was given."""
        return ":" in self.nproc_per_node + self.nnodes

    @property
    def elastic_settings(self) -> dict[str, Any]:
        """Those of elastic jobs that were given."""
        names = ("address", "heartbeat_timeout_s", "rdzv_timeout_s", "grow_interval_s")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def problems(self) -> list[str]:
        """Every violated rule beyond the bounds of each setting."""
        try:
            nproc_per_node, nnodes = self.ranges()
        except ConfigError as error:
            return error.problems
        found = []
        if self.node_rank >= nnodes.maximum:
            found.append(
                f"--node-rank {self.node_rank} is not among {nnodes.maximum} nodes. "
                f"Use 0 to {nnodes.maximum - 1}, another on each host."
            )
        if nproc_per_node.maximum == 0 and (nnodes.maximum > 1 or self.is_elastic):
            found.append(
                f"--nnodes {self.nnodes} without --nproc-per-node: all hosts must start the same "
                "number of processes. Give --nproc-per-node, e.g. the GPUs of a host."
            )
        try:
            words = shlex.split(self.program)
        except ValueError as error:
            words = []
            found.append(f"--program {self.program!r} is no command ({error}). Repair its quotes.")
        if self.program and not words and not found:
            found.append(f"--program {self.program!r} names no program. Leave it out, or name one.")
        if problem := file_system_problem(self.directory, "the launcher keeps logs"):
            found.append(f"--run-dir {problem} Or start jaxdist.train itself on each host.")
        several = nnodes.maximum > 1
        return found + (self._elastic_rules(several) if self.is_elastic else self._rules(several))

    def _rules(self, several_hosts: bool) -> list[str]:
        found = [
            f"{flag_of(name)} {value} without a range: it is of elastic jobs. Leave it "
            "out, or give --nnodes MIN:MAX or --nproc-per-node MIN:MAX."
            for name, value in self.elastic_settings.items()
        ]
        host, _, port = self.coordinator_address.rpartition(":")
        if several_hosts and not (host and port.isdecimal()):
            found.append(
                f"--coordinator-address {self.coordinator_address!r} with --nnodes {self.nnodes}: "
                "the hosts need one address to meet. Use host:port of node 0, e.g. "
                "--coordinator-address node0:29400."
            )
        if several_hosts and (host == "localhost" or host.startswith("127.")):
            found.append(
                f"--coordinator-address {self.coordinator_address} is a loopback address, which "
                "other hosts cannot reach. Use a name of node 0 that they resolve."
            )
        return found

    def _elastic_rules(self, several_hosts: bool) -> list[str]:
        found = []
        if self.coordinator_address:
            found.append(
                f"--coordinator-address {self.coordinator_address} with a range: any host may be "
                "lost, that one too, so hosts meet in the run directory instead. Leave "
                "--coordinator-address out; --address says how others reach this host."
            )
        if several_hosts and not self.directory:
            found.append(
                f"--nnodes {self.nnodes} without --run-dir: the hosts meet there. Name one "
                "directory on a disk that all of them share."
            )
        if self.address == "":
            found.append("--address '' is no name of this host. Leave it out, or name it.")
        return found

    @property
    def directory(self) -> str:
        """The run directory that was asked for, here or of the program; "" without."""
        return self.run_dir or value_of(self.arguments, "run_dir") or ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What the settings come to on this host.

    Of ranges (`elastic`) `nproc_per_node` and `nnodes` are the maxima. `nproc_per_node` 0 means as
    many processes as GPUs, counted again for each attempt.
    """

    command: list[str]
    nproc_per_node: int
    nnodes: int
    elastic: ElasticConfig | None
    run_dir: Path
    restart_policy: RestartPolicy


def main(argv: Sequence[str], summary: str) -> int:
    """Run a job on this host until it is done or cannot be; `--help` begins with `summary`."""
    config = read_config(argv, summary)
    plan = make_launch_plan(config)
    agent: Agent
    if plan.elastic is None:
        agent = FixedAgent(
            plan.nproc_per_node, plan.nnodes, config.node_rank, config.coordinator_address
        )
    else:
        trains = _TRAIN in plan.command
        sizes: LegalSizes | int = LegalSizes()
        if trains:
            sizes = read_sizes(plan.command[plan.command.index(_TRAIN) + 1 :])
        if isinstance(sizes, int):
            return sizes
        if problems := impossible(plan.elastic, sizes):
            raise ConfigError(problems)
        rendezvous = Rendezvous(
            plan.run_dir / "launch",
            config.node_rank,
            plan.elastic.address,
            heartbeat_timeout_s=plan.elastic.heartbeat_timeout_s,
        )
        agent = ElasticAgent(plan.elastic, rendezvous, sizes, stop_reaches_all=trains)
    return Supervisor(plan.command, agent, plan.run_dir, plan.restart_policy).run()


def read_config(argv: Sequence[str], summary: str = "") -> LaunchConfig:
    """Flags before `--`; what follows belongs to the program.

    Raises:
        ConfigError: every problem of the flags.
    """
    return read_settings(
        LaunchConfig, argv, command="jaxdist.launch", summary=summary, rest="arguments"
    )


def make_launch_plan(config: LaunchConfig) -> LaunchPlan:
    """What to start on this host."""
    nproc_per_node, nnodes = config.ranges()
    elastic = None
    if config.is_elastic:
        given = {"address": socket.gethostname(), **config.elastic_settings}
        elastic = ElasticConfig(nproc_per_node=nproc_per_node, nnodes=nnodes, **given)
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    run_dir = os.path.expanduser(config.directory or f"runs/launch-{now}")
    return LaunchPlan(
        command=_command(config, run_dir),
        nproc_per_node=nproc_per_node.maximum,
        nnodes=nnodes.maximum,
        elastic=elastic,
        run_dir=Path(run_dir),
        restart_policy=RestartPolicy(
            max_restarts=_max_restarts(config),
            backoff_s=config.backoff_s,
            max_backoff_s=config.max_backoff_s,
            stop_timeout_s=config.stop_timeout_s,
            preload=config.preload and _is_training(config),
        ),
    )


def _is_training(config: LaunchConfig) -> bool:
    return config.module == _TRAIN and not config.program


def _max_restarts(config: LaunchConfig) -> int:
    """As asked for; what a doctor finds, or an evaluation refuses, it does again."""
    if config.max_restarts is not None:
        return config.max_restarts
    is_ours = config.module.startswith("jaxdist.") and not config.program
    return 0 if is_ours and config.module != _TRAIN else RestartPolicy.max_restarts


def _command(config: LaunchConfig, run_dir: str) -> list[str]:
    rest = config.arguments
    if config.program:
        return [*shlex.split(config.program), *rest]
    command = [sys.executable, "-m", config.module, *rest]
    if config.module == _TRAIN:
        if value_of(rest, "run_dir") is None:
            command.append(f"--run-dir={run_dir}")  # all attempts are one run
        if config.is_elastic and value_of(rest, "mesh.elastic") is None:
            command.append("--mesh.elastic=true")
    return command
