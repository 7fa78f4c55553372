"""`python -m jaxdist.launch` on a host: flags to a plan, and who carries it out."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist import runtime
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
        nproc_per_node: processes on this host; 0: as many as GPUs, counted anew for each attempt.
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
            f"e.g. --nproc-per-node 2 -- {unknown[0]}"
        )
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


def _max_restarts(args: argparse.Namespace) -> int:
    """As asked for; what a doctor finds, or an evaluation refuses, it does again."""
    if args.max_restarts is not None:
        return int(args.max_restarts)
    is_ours = args.module.startswith("jaxdist.") and not args.program
    return 0 if is_ours and args.module != _TRAIN else RestartPolicy.max_restarts


def _command(
    args: argparse.Namespace, rest: Sequence[str], run_dir: str, is_elastic: bool
) -> list[str]:
    if args.program:
        return [*shlex.split(args.program), *rest]
    command = [sys.executable, "-m", args.module, *rest]
    if args.module == _TRAIN:
        if _value_of(rest, "run-dir") is None:
            command.append(f"--run-dir={run_dir}")  # all attempts are one run
        if is_elastic and _value_of(rest, "mesh.elastic") is None:
            command.append("--mesh.elastic=true")
    return command


def _read_numbers(args: argparse.Namespace) -> tuple[int, int, ElasticConfig | None, list[str]]:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdist.launch",
        description="Start the processes of a job on this host, watch them, restart what fails.",
        epilog="With MIN:MAX the job is elastic: it goes on with the hosts and GPUs that are "
        "there, on a smaller legal mesh with the same batches (--mesh names that of all), and "
        "grows again when more are back. With --program the range only says how many processes "
        "run. python -m jaxdist.launch slurm --help: write a SLURM batch script instead.",
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        default="0",
        metavar="N|MIN:MAX",
        help="processes on this host (default: one per GPU, or 1)",
    )
    add(
        "--nnodes",
        default="1",
        metavar="N|MIN:MAX",
        help="hosts; start a launcher on each (default 1)",
    )
    add("--node-rank", type=int, default=0, help="of this host, from 0 (default 0)")
    add("--coordinator-address", default="", help="host:port of node 0; needed with several hosts")
    add("--module", default=_TRAIN, help="what each process runs (default jaxdist.train)")
    add("--program", default="", help="another program instead, e.g. 'python worker.py'")
    add("--run-dir", help="run directory (default: the program's --run-dir, else runs/launch-TIME)")
    add(
        "--max-restarts",
        type=int,
        help="without a new checkpoint (default 3; 0 for jaxdist's modules that write none)",
    )
    _add_seconds(parser, "backoff-s", 1.0, "before the first restart")
    _add_seconds(parser, "max-backoff-s", 60.0, "at which its doubling ends")
    _add_seconds(parser, "stop-timeout-s", 300.0, "for saving after a request to stop")
    elastic = parser.add_argument_group("elastic jobs (with MIN:MAX)")
    elastic.add_argument("--address", help="how others reach this host (default: its name)")
    # Their defaults are ElasticConfig's, so that it is known whether they were given.
    _add_seconds(
        elastic,
        "heartbeat-timeout-s",
        None,
        "without a heartbeat until a host counts as lost (default 15)",
    )
    _add_seconds(
        elastic,
        "rdzv-timeout-s",
        None,
        "to wait for more hosts before those here start (default 30)",
    )
    _add_seconds(
        elastic, "grow-interval-s", None, "between two counts of the GPUs here (default 60)"
    )
    return parser


def _add_seconds(parser: Any, flag: str, default: float | None, what: str) -> None:
    tail = "" if default is None else f" (default {default:g})"
    parser.add_argument(f"--{flag}", type=float, default=default, help=f"seconds {what}{tail}")


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
