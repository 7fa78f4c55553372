r"""`python -m jaxdist.launch`: start the processes of a job, watch them, and restart failures.

    python -m jaxdist.launch --nproc-per-node 4 -- --config run.toml --mesh fsdp=4
    python -m jaxdist.launch --nnodes 2 --node-rank 0 --nproc-per-node 8 \
        --coordinator-address node0:29400 -- --config run.toml
    python -m jaxdist.launch --nproc-per-node 1:8 -- --config run.toml --mesh fsdp=8
    python -m jaxdist.launch --nnodes 1:2 --node-rank 0 --nproc-per-node 8 \
        --run-dir runs/shared -- --config run.toml
    python -m jaxdist.launch slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 -- --config run.toml
    python -m jaxdist.launch kubernetes --nodes 2 --gpus-per-node 8 --image registry/jaxdist:1 \
        --volume runs:/runs -- --config run.toml

Arguments after `--` go to the program. With ranges MIN:MAX the job is elastic: it continues on the
hosts and GPUs that are available, on a smaller legal mesh with the same batches, and grows again
when more return. --mesh names the largest mesh. With --program or --module the range only sets the
number of processes. All hosts of a fixed job need the same secret in JAXDIST_JOB_TOKEN.
For batch jobs see `python -m jaxdist.launch slurm --help`, and `kubernetes --help`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist import runtime
from jaxdist.runtime.cluster_environment import is_address, is_loopback
from jaxdist.runtime.storage import file_system_problem
from jaxdist.settings import ConfigError, read_settings, setting, value_of
from jaxdist.settings.schema import flag_of
from jaxdist.tools.launch import run_of
from jaxdist.tools.launch.elastic_agent import ElasticAgent
from jaxdist.tools.launch.membership import ElasticConfig, LegalSizes, Range, impossible, read_sizes
from jaxdist.tools.launch.rendezvous import HEARTBEAT_S, Rendezvous
from jaxdist.tools.launch.supervisor import FixedAgent, RestartPolicy, Supervisor

_TRAIN = "jaxdist.train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Processes to start on this host, and when to restart them.

    None means that the default depends on other settings, or that only elastic jobs use the value.
    """

    nproc_per_node: str = setting(
        "0", "number of processes on this host, N or MIN:MAX; 0 = one per GPU, or 1 without GPUs"
    )
    nnodes: str = setting("1", "number of hosts, N or MIN:MAX; start a launcher on each")
    node_rank: int = setting(0, "rank of this host, from 0", ge=0)
    coordinator_address: str = setting("", "host:port of node 0; for fixed jobs of several hosts")
    module: str = setting(_TRAIN, "Python module that each process runs")
    program: str = setting("", "program to run instead of the module, e.g. 'python worker.py'")
    run_dir: str | None = setting(
        None, "run directory; none = the program's --run-dir, else runs/launch-TIME"
    )
    max_restarts: int | None = setting(
        None,
        "maximum restarts in a row without a new checkpoint; none = 3, or 0 for jaxdist's modules "
        "but train",
        ge=0,
    )
    backoff_s: float = setting(
        1.0,
        "seconds before the second restart without a new checkpoint, doubled for each further one; "
        "the first restart is immediate",
        ge=0,
    )
    max_backoff_s: float = setting(
        60.0, "longest wait before a restart, seconds; up to 25 % are added at random", ge=0
    )
    stop_timeout_s: float = setting(
        300.0, "seconds that processes may take to save after a stop request", ge=0
    )
    address: str | None = setting(
        None, "elastic jobs: address of this host for other hosts; none = its host name"
    )
    heartbeat_timeout_s: float | None = setting(
        None,
        "elastic jobs: seconds without a heartbeat until a host counts as lost; none = 15",
        ge=3 * HEARTBEAT_S,
    )
    rdzv_timeout_s: float | None = setting(
        None,
        "elastic jobs: seconds to wait for more hosts before processes start; none = 30",
        gt=0,
    )
    grow_interval_s: float | None = setting(
        None, "elastic jobs: seconds between checks for GPUs that came back; none = 60", gt=0
    )
    preload: bool = setting(
        True,
        "keep one process with jax imported, which a restart of jaxdist.train forks to skip the "
        "imports; it starts 20 s after the launch and uses about 200 MB of host memory",
    )
    arguments: list[str] = setting([], "arguments of the program")

    def ranges(self) -> tuple[Range, Range]:
        """Return the range of processes on this host (0 = one per GPU), and the range of hosts."""
        ranges, problems = [], []
        for flag, text, most in (
            ("nproc-per-node", self.nproc_per_node, 1024),  # more than any host has cores for
            ("nnodes", self.nnodes, 100_000),
        ):
            try:
                ranges.append(Range.parse(flag, text, int(flag == "nnodes" or ":" in text), most))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)
        return ranges[0], ranges[1]

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of processes or of hosts is a range."""
        return ":" in self.nproc_per_node + self.nnodes

    @property
    def elastic_settings(self) -> dict[str, Any]:
        """Return the settings of elastic jobs that are not None."""
        names = ("address", "heartbeat_timeout_s", "rdzv_timeout_s", "grow_interval_s")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        try:
            nproc_per_node, nnodes = self.ranges()
        except ConfigError as error:
            return error.problems
        problems = []
        if self.node_rank >= nnodes.maximum:
            problems.append(
                f"--node-rank {self.node_rank} is not among {nnodes.maximum} nodes. "
                f"Use 0 to {nnodes.maximum - 1}, another on each host."
            )
        if nproc_per_node.maximum == 0 and (nnodes.maximum > 1 or self.is_elastic):
            problems.append(
                f"--nnodes {self.nnodes} without --nproc-per-node: all hosts must start the same "
                "number of processes. Set --nproc-per-node, e.g. to the GPUs of a host."
            )
        try:
            words = shlex.split(self.program)
        except ValueError as error:
            words = []
            problems.append(
                f"--program {self.program!r} is no command ({error}). Check its quotes."
            )
        if self.program and not words and not problems:
            problems.append(f"--program {self.program!r} is empty. Name one, or leave it out.")
        if problem := file_system_problem(self.directory, "the launcher keeps logs"):
            problems.append(f"--run-dir {problem} Or start jaxdist.train itself on each host.")
        rules = self._elastic_rules if self.is_elastic else self._fixed_rules
        return problems + rules(nnodes.maximum > 1)

    def _fixed_rules(self, several_hosts: bool) -> list[str]:
        problems = [
            f"{flag_of(name)} {value} is for elastic jobs. Leave it out, or set --nnodes MIN:MAX "
            "or --nproc-per-node MIN:MAX."
            for name, value in self.elastic_settings.items()
        ]
        if several_hosts and not os.environ.get("JAXDIST_JOB_TOKEN"):
            problems.append(
                f"--nnodes {self.nnodes} without JAXDIST_JOB_TOKEN: any process on the network "
                "could join. Set it to the same secret on all hosts, e.g. to one output of "
                "`openssl rand -hex 16`."
            )
        if several_hosts and not is_address(self.coordinator_address):
            problems.append(
                f"--coordinator-address {self.coordinator_address!r} with --nnodes {self.nnodes}: "
                "the hosts need one address to connect to. Use host:port of node 0, e.g. "
                "--coordinator-address node0:29400."
            )
        if several_hosts and is_loopback(self.coordinator_address.rpartition(":")[0]):
            problems.append(
                f"--coordinator-address {self.coordinator_address} is a loopback address, which "
                "other hosts cannot reach. Use a name of node 0 that they resolve."
            )
        return problems

    def _elastic_rules(self, several_hosts: bool) -> list[str]:
        problems = []
        if self.coordinator_address:
            problems.append(
                f"--coordinator-address {self.coordinator_address} with a range: elastic hosts "
                "find each other through the run directory, because any host may be lost. Leave "
                "--coordinator-address out; --address is the address of this host."
            )
        if several_hosts and not self.directory:
            problems.append(
                f"--nnodes {self.nnodes} without --run-dir: the hosts find each other there. Name "
                "a directory on a disk that all of them share."
            )
        if self.address == "":
            problems.append("--address '' is empty. Use the name of this host, or leave it out.")
        return problems

    @property
    def directory(self) -> str:
        """Return the run directory by the launcher's or the program's flags; "" without one."""
        if self.module == _TRAIN and not self.program:
            return self.run_dir or run_of(self.arguments)
        return self.run_dir or value_of(self.arguments, "run_dir") or ""

    @functools.cached_property
    def run_directory(self) -> Path:
        """Return the run directory, by default a new one named after the present time."""
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        return Path(os.path.expanduser(self.directory or f"runs/launch-{now}"))

    @property
    def command(self) -> list[str]:
        """Return the command of each process; training gets --run-dir, elastic --mesh.elastic."""
        if self.program:
            return [*shlex.split(self.program), *self.arguments]
        command = [sys.executable, "-m", self.module, *self.arguments]
        if self.module == _TRAIN:
            if value_of(self.arguments, "run_dir") is None:
                command.append(f"--run-dir={self.run_directory}")  # all attempts are one run
            if self.is_elastic and value_of(self.arguments, "mesh.elastic") is None:
                command.append("--mesh.elastic=true")
        return command

    @property
    def restart_policy(self) -> RestartPolicy:
        """Return limits and delays; by default only train, of jaxdist's commands, restarts."""
        max_restarts = self.max_restarts
        if max_restarts is None:
            is_ours = self.module.startswith("jaxdist.") and not self.program
            is_tool = is_ours and self.module != _TRAIN
            max_restarts = 0 if is_tool else RestartPolicy.max_restarts
        return RestartPolicy(
            max_restarts=max_restarts,
            backoff_s=self.backoff_s,
            max_backoff_s=self.max_backoff_s,
            stop_timeout_s=self.stop_timeout_s,
            preload=self.preload and self.module == _TRAIN and not self.program,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job on this host, or write or submit one for a scheduler; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["slurm"]:
        from jaxdist.tools.launch import slurm

        return slurm.main(words[1:])
    if words[:1] == ["kubernetes"]:
        from jaxdist.tools.launch import kubernetes

        return kubernetes.main(words[1:])
    if words[:1] == ["skypilot"]:
        raise ConfigError(
            "`launch skypilot` was removed. Adapt the task file in docs/kubernetes.md and start it "
            "with `sky jobs launch`."
        )
    config = read_config(words)
    nproc_per_node, nnodes = config.ranges()
    command, agent = config.command, None
    if config.is_elastic:
        trains = _TRAIN in command
        sizes = read_sizes(command[command.index(_TRAIN) + 1 :]) if trains else LegalSizes()
        if isinstance(sizes, int):
            return sizes
        limits = {"address": socket.gethostname(), **config.elastic_settings}
        elastic = ElasticConfig(nproc_per_node=nproc_per_node, nnodes=nnodes, **limits)
        if problems := impossible(elastic, sizes):
            raise ConfigError(problems)
        rendezvous = Rendezvous(
            config.run_directory / "launch",
            config.node_rank,
            elastic.address,
            heartbeat_timeout_s=elastic.heartbeat_timeout_s,
        )
        agent = ElasticAgent(elastic, rendezvous, sizes, stop_reaches_all=trains)
    fixed = FixedAgent(
        nproc_per_node.maximum, nnodes.maximum, config.node_rank, config.coordinator_address
    )
    return Supervisor(command, agent or fixed, config.run_directory, config.restart_policy).run()


def read_config(argv: Sequence[str]) -> LaunchConfig:
    """Return the settings of the command line; arguments after `--` belong to the program."""
    return read_settings(
        LaunchConfig, argv, command="jaxdist.launch", summary=__doc__ or "", rest="arguments"
    )


if __name__ == "__main__":
    runtime.run_command(main, resumes=True)
