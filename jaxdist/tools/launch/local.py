"""`python -m jaxdist.launch` on a host: flags to a plan, and who carries it out."""

from __future__ import annotations

import dataclasses
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxdist import runtime
from jaxdist.core.settings import read_settings, setting
from jaxdist.tools.launch.elastic_agent import ElasticAgent
from jaxdist.tools.launch.legal_sizes import read_sizes
from jaxdist.tools.launch.membership import ElasticConfig, LegalSizes, Range, impossible
from jaxdist.tools.launch.rendezvous import Rendezvous
from jaxdist.tools.launch.supervisor import FixedAgent, RestartPolicy, Supervisor

_TRAIN = "jaxdist.train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to start on this host, and how often.

    Attributes:
        command: program and arguments of every process.
        nproc_per_node: processes on this host; 0: as many as GPUs, counted again for each attempt.
        nnodes: hosts of the job, each with a launcher of its own.
        node_rank: of this host.
        coordinator_address: host:port of the first process; empty on one host: a new port for each
            attempt.
        elastic: the ranges, where one was given; `nproc_per_node` and `nnodes` are their maxima.
        run_dir: where checkpoints and logs are; empty: several elastic hosts without any.
        restart_policy: how often to start again.
        misread: flags that cannot be read, one line each.
    """

    command: list[str]
    nproc_per_node: int
    nnodes: int = 1
    node_rank: int = 0
    coordinator_address: str = ""
    elastic: ElasticConfig | None = None
    run_dir: Path
    restart_policy: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    misread: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = [*self.misread, *self.restart_policy.problems()]
        for name, least in (("nproc_per_node", 0), ("nnodes", 1)):
            value = getattr(self, name)
            if value < least:
                flag = name.replace("_", "-")
                found.append(f"--{flag} {value} is too small. Use a whole number ≥ {least}.")
        if not 0 <= self.node_rank < max(1, self.nnodes):
            found.append(
                f"--node-rank {self.node_rank} is not among {self.nnodes} nodes. "
                f"Use 0 to {self.nnodes - 1}, another on each host."
            )
        if self.nproc_per_node == 0 and (self.nnodes > 1 or self.elastic is not None):
            found.append(
                f"--nnodes {self.nnodes} without --nproc-per-node: all hosts must start the same "
                "number of processes. Give --nproc-per-node, e.g. the GPUs of a host."
            )
        if self.elastic is not None:
            return found + self._elastic_problems(self.elastic)
        if self.nnodes > 1 and not re.fullmatch(r".+:\d+", self.coordinator_address):
            found.append(
                f"--coordinator-address {self.coordinator_address!r} with --nnodes {self.nnodes}: "
                "the hosts need one address to meet. Use host:port of node 0, e.g. "
                "--coordinator-address node0:29400."
            )
        host = self.coordinator_address.rpartition(":")[0]
        if self.nnodes > 1 and (host == "localhost" or host.startswith("127.")):
            found.append(
                f"--coordinator-address {self.coordinator_address} is a loopback address, which "
                "other hosts cannot reach. Use a name of node 0 that they resolve."
            )
        return found

    def _elastic_problems(self, elastic: ElasticConfig) -> list[str]:
        found = elastic.problems()
        if self.coordinator_address:
            found.append(
                f"--coordinator-address {self.coordinator_address} with a range: any host may be "
                "lost, that one too, so hosts meet in the run directory instead. Leave "
                "--coordinator-address out; --address says how others reach this host."
            )
        if self.nnodes > 1 and self.run_dir == Path():
            found.append(
                f"--nnodes {elastic.nnodes} without --run-dir: the hosts meet there. Name one "
                "directory on a disk that all of them share."
            )
        return found


def main(argv: Sequence[str]) -> int:
    """Run a job on this host until it is done or cannot be."""
    plan = read_plan(argv)
    problems = plan.problems()
    if problems:
        return _refuse(problems)
    if plan.elastic is None:
        fixed = FixedAgent(
            plan.nproc_per_node, plan.nnodes, plan.node_rank, plan.coordinator_address
        )
        return Supervisor(plan.command, fixed, plan.run_dir, plan.restart_policy).run()
    trains = _TRAIN in plan.command
    sizes: LegalSizes | int = LegalSizes()
    if trains:
        sizes = read_sizes(plan.command[plan.command.index(_TRAIN) + 1 :])
    if isinstance(sizes, int):
        return sizes
    problems = impossible(plan.elastic, sizes)
    if problems:
        return _refuse(problems)
    rendezvous = Rendezvous(
        plan.run_dir / "launch",
        plan.node_rank,
        plan.elastic.address,
        heartbeat_timeout_s=plan.elastic.heartbeat_timeout_s,
    )
    agent = ElasticAgent(plan.elastic, rendezvous, sizes, stop_reaches_all=trains)
    return Supervisor(plan.command, agent, plan.run_dir, plan.restart_policy).run()


def _refuse(problems: Sequence[str]) -> int:
    print("\n".join(problems), file=sys.stderr)
    return runtime.EXIT_CONFIG


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What to start on this host, and how often.

    What is None was not given: its default depends on the rest, or it belongs to elastic jobs only.
    """

    nproc_per_node: str = setting(
        "0", "processes on this host, N or MIN:MAX; 0 = one per GPU, or 1 without GPUs"
    )
    nnodes: str = setting("1", "hosts, N or MIN:MAX; start a launcher on each")
    node_rank: int = setting(0, "number of this host, from 0")
    coordinator_address: str = setting("", "host:port of node 0; needed with several hosts")
    module: str = setting(_TRAIN, "Python module that each process runs")
    program: str = setting("", "another program instead, e.g. 'python worker.py'")
    run_dir: str | None = setting(
        None, "run directory; none = the program's --run-dir, else runs/launch-TIME"
    )
    max_restarts: int | None = setting(
        None,
        "restarts without a new checkpoint; none = 3, or 0 for commands that write no checkpoints",
    )
    backoff_s: float = setting(1.0, "seconds before the first restart; doubled for each one after")
    max_backoff_s: float = setting(60.0, "seconds at which the doubling ends")
    stop_timeout_s: float = setting(300.0, "seconds for saving after a request to stop")
    address: str | None = setting(
        None, "elastic jobs: how other hosts reach this one; none = its name"
    )
    heartbeat_timeout_s: float | None = setting(
        None, "elastic jobs: seconds without a heartbeat until a host counts as lost; none = 15"
    )
    rdzv_timeout_s: float | None = setting(
        None, "elastic jobs: seconds to wait for more hosts before those here start; none = 30"
    )
    grow_interval_s: float | None = setting(
        None, "elastic jobs: seconds between two counts of the GPUs here; none = 60"
    )
    arguments: list[str] = setting([], "arguments of the program")


SUMMARY = """\
Start the processes of a job on this host, watch them, and restart what fails.

    python -m jaxdist.launch --nproc-per-node 4 -- --config run.toml --mesh fsdp=4
    python -m jaxdist.launch --nproc-per-node 8 --nnodes 2 --node-rank 0 \\
        --coordinator-address node0:29400 -- --config run.toml
    python -m jaxdist.launch --nproc-per-node 1:8 -- --config run.toml --mesh fsdp=8
    python -m jaxdist.launch slurm --help

What stands after -- goes to the program. With a range MIN:MAX the job is elastic: it goes on with \
the hosts and GPUs that are there, on a smaller legal mesh with the same batches (--mesh names the \
largest), and grows again when more are back. With --program the range only says how many \
processes run."""


def read_plan(argv: Sequence[str]) -> LaunchPlan:
    """Flags before `--` to a plan; what follows belongs to the program.

    Raises:
        ConfigError: flags that cannot be read.
    """
    args = read_settings(
        LaunchConfig, argv, command="jaxdist.launch", summary=SUMMARY, rest="arguments"
    )
    rest = args.arguments
    nproc_per_node, nnodes, elastic, misread = _read_numbers(args)
    run_dir = args.run_dir or _value_of(rest, "run-dir")
    if run_dir is None:
        shared = elastic is not None and nnodes > 1
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        run_dir = "" if shared else f"runs/launch-{now}"
    return LaunchPlan(
        command=_command(args, rest, run_dir, elastic is not None),
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=args.node_rank,
        coordinator_address=args.coordinator_address,
        elastic=elastic,
        run_dir=Path(run_dir),
        restart_policy=RestartPolicy(
            max_restarts=_max_restarts(args),
            backoff_s=args.backoff_s,
            max_backoff_s=args.max_backoff_s,
            stop_timeout_s=args.stop_timeout_s,
        ),
        misread=tuple(misread),
    )


def _max_restarts(args: LaunchConfig) -> int:
    """As asked for; what a doctor finds, or an evaluation refuses, it does again."""
    if args.max_restarts is not None:
        return int(args.max_restarts)
    is_ours = args.module.startswith("jaxdist.") and not args.program
    return 0 if is_ours and args.module != _TRAIN else RestartPolicy.max_restarts


def _command(args: LaunchConfig, rest: Sequence[str], run_dir: str, is_elastic: bool) -> list[str]:
    if args.program:
        return [*shlex.split(args.program), *rest]
    command = [sys.executable, "-m", args.module, *rest]
    if args.module == _TRAIN:
        if _value_of(rest, "run-dir") is None:
            command.append(f"--run-dir={run_dir}")  # all attempts are one run
        if is_elastic and _value_of(rest, "mesh.elastic") is None:
            command.append("--mesh.elastic=true")
    return command


def _read_numbers(args: LaunchConfig) -> tuple[int, int, ElasticConfig | None, list[str]]:
    """Processes, hosts (the most of each), what is elastic about them, and what is misread."""
    ranges, misread = {}, []
    for flag in ("nproc_per_node", "nnodes"):
        text = getattr(args, flag)
        try:
            number = int(text) if re.fullmatch(r"-?\d+", text) else None
            ranges[flag] = (
                Range.parse(flag.replace("_", "-"), text)
                if number is None
                else Range(minimum=number, maximum=number)
            )
        except ValueError as error:
            misread.append(str(error))
            ranges[flag] = Range(minimum=1, maximum=1)
    most = {flag: found.maximum for flag, found in ranges.items()}
    given = {name: getattr(args, name) for name in _ELASTIC_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if ":" not in args.nproc_per_node + args.nnodes:
        misread += [
            f"--{name.replace('_', '-')} {value} without a range: it is of elastic jobs. Leave it "
            "out, or give --nnodes MIN:MAX or --nproc-per-node MIN:MAX."
            for name, value in given.items()
        ]
        return most["nproc_per_node"], most["nnodes"], None, misread
    plan = ElasticConfig(**{"address": socket.gethostname(), **ranges, **given})
    return most["nproc_per_node"], most["nnodes"], plan, misread


_ELASTIC_FLAGS = ("address", "heartbeat_timeout_s", "rdzv_timeout_s", "grow_interval_s")


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
