"""Which hosts take part in an elastic job: its limits, and the largest legal job of those here.

Pure functions of what the hosts report; `elastic_agent` acts on the answer.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.tools.launch.rendezvous import Host, Membership


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """From `minimum` to `maximum`, both included."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, flag: str, text: str, least: int = 1, most: int = 100_000) -> Range:
        """Read `N` or `MIN:MAX`, no number below `least` or above `most`.

        Raises:
            ValueError: the text is neither; the message names the fix.
        """
        found = re.fullmatch(r"(-?[0-9]{1,20})(?::(-?[0-9]{1,20}))?", text.strip())
        if found is None:
            raise ValueError(
                f"--{flag} {text!r} is neither a number nor a range. Use e.g. --{flag} 8, or "
                f"--{flag} 4:8 for at least 4 and at most 8."
            )
        low, high = int(found[1]), int(found[2] or found[1])
        if min(low, high) < least:
            raise ValueError(
                f"--{flag} {text}: {min(low, high)} is too small. Use {least} or more."
            )
        if max(low, high) > most:
            raise ValueError(f"--{flag} {text}: {max(low, high)} is too large. Use {most} or less.")
        if high < low:
            raise ValueError(
                f"--{flag} {text}: MAX is smaller than MIN. Use --{flag} {high}:{low}."
            )
        return cls(minimum=low, maximum=high)

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """The limits of an elastic job and its times to wait; `LaunchConfig` explains each."""

    nproc_per_node: Range
    nnodes: Range
    address: str
    heartbeat_timeout_s: float = 15.0
    rdzv_timeout_s: float = 30.0
    grow_interval_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LegalSizes:
    """The sizes at which a program can run.

    Attributes:
        legal: device counts that leave no device idle; None: any count.
        simulate: simulated devices of each process; 0: real devices.
    """

    legal: Sequence[int] | None = None
    simulate: int = 0

    def runs(self, num_processes: int, devices: int) -> bool:
        """Whether `num_processes` with `devices` each can run it; one process may leave some idle.

        Not with more devices than the mesh names: training refuses that.
        """
        if self.legal is None or num_processes * devices in self.legal:
            return True
        return num_processes == 1 and min(self.legal) <= devices <= max(self.legal)

    def suits(self, num_processes: int, devices: int) -> bool:
        """Whether they can run it and leave no GPU idle: a process can be shown fewer GPUs."""
        all_used = self.legal is None or num_processes * devices in self.legal
        return all_used or (bool(self.simulate) and self.runs(num_processes, devices))


def choose_members(
    hosts: Sequence[Host], plan: ElasticConfig, sizes: LegalSizes
) -> Membership | None:
    """The hosts, processes and devices that make the largest legal job; None without one.

    The largest job has the most devices or, where every number of devices is legal, the most
    processes. Among equals the fewest hosts win, because the network between hosts is slower; then
    the most processes on each host. Where some hosts have GPUs, a host without has lost its own and
    takes no part.
    """
    if any(host.gpus for host in hosts):
        hosts = [host for host in hosts if host.gpus]
    best: tuple[tuple[int, ...], Membership] | None = None
    for nproc_per_node in range(plan.nproc_per_node.minimum, plan.nproc_per_node.maximum + 1):
        for devices in _device_counts(hosts):
            able = [
                h
                for h in hosts
                if h.max_processes >= nproc_per_node and h.devices >= nproc_per_node * devices
            ]
            for count in range(plan.nnodes.minimum, min(len(able), plan.nnodes.maximum) + 1):
                if not sizes.suits(count * nproc_per_node, devices):
                    continue
                chosen = tuple(sorted(able, key=lambda host: host.rank)[:count])
                found = Membership(members=chosen, nproc_per_node=nproc_per_node, devices=devices)
                size = count * nproc_per_node * (1 if sizes.legal is None else devices)
                value = (size, -count, nproc_per_node, devices)
                if best is None or value > best[0]:
                    best = value, found
    return None if best is None else best[1]


def _device_counts(hosts: Sequence[Host]) -> list[int]:
    """Devices that a process may get. GPUs can be divided; simulated devices are fixed."""
    if any(host.gpus for host in hosts):
        return list(range(1, max(host.devices for host in hosts) + 1))
    return sorted({host.devices // host.max_processes for host in hosts})


def legal_nodes(sizes: LegalSizes, nodes: Range, nproc_per_node: int, devices: int) -> list[int]:
    """Numbers of nodes with which a program can run, `devices` in each of a node's processes."""
    every = range(nodes.minimum, nodes.maximum + 1)
    return [count for count in every if sizes.runs(count * nproc_per_node, devices)]


def impossible(plan: ElasticConfig, sizes: LegalSizes) -> list[str]:
    """What is wrong with ranges that allow no legal job, however many hosts and GPUs are here."""
    most = plan.nproc_per_node.maximum
    hosts = [
        Host(
            rank=rank,
            uuid="",
            address="",
            max_processes=most,
            devices=most * (sizes.simulate or _MANY_GPUS),
            gpus=not sizes.simulate,
        )
        for rank in range(plan.nnodes.maximum)
    ]
    if choose_members(hosts, plan, sizes) is not None:
        return []
    legal = ", ".join(map(str, sizes.legal or ()))
    return [
        f"--nnodes {plan.nnodes} × --nproc-per-node {plan.nproc_per_node} never makes a legal job: "
        f"model, batch and mesh are legal with {legal} devices. Use ranges that reach one of these."
    ]


_MANY_GPUS = 16  # of one process; more than hosts have


def read_sizes(arguments: Sequence[str]) -> LegalSizes | int:
    """Return the sizes at which `jaxdist.train` with these arguments can run.

    A child process computes them: reading the settings imports jax, and a process that has
    imported jax should not fork.

    Returns:
        The exit code instead if the arguments are rejected; the child prints the problems.
    """
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        return done.returncode or LegalSizes(**json.loads(done.stdout))
    except (ValueError, TypeError):
        print(done.stdout, end="")
        return runtime.EXIT_OK if {"-h", "--help"} & set(arguments) else runtime.EXIT_FAILURE


def main() -> int:
    """Print the fields of `LegalSizes` as JSON; `read_sizes` starts this process."""
    from jaxdist.config import legal_sizes, read_run
    from jaxdist.settings import ConfigError, problems_of

    # Rules about this machine's devices are checked by the processes that have the devices.
    config = read_run(sys.argv[1:], command="jaxdist.train", check_rules=False)
    sections = {"mesh": config.mesh, "train": config.train, "pipeline": config.pipeline}
    problems = [p for name, section in sections.items() for p in problems_of(section, name)]
    if problems:
        raise ConfigError(problems, asked="jaxdist.train")
    legal = None
    if config.mesh.elastic and config.mesh.spec is not None:
        config.check_mesh(config.mesh.spec)
        legal = legal_sizes(config)
    print(json.dumps({"legal": legal, "simulate": config.simulate}))
    return runtime.EXIT_OK


if __name__ == "__main__":
    runtime.run_command(main)
