"""Choose the hosts that take part in an elastic job: the largest legal job of the hosts present.

Pure functions of the hosts' reports; `elastic_agent` acts on the result. As a process, this module
computes the legal sizes for `read_sizes`.
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
    """A range from `minimum` to `maximum`, inclusive."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, flag: str, text: str, least: int = 1, most: int = 100_000) -> Range:
        """Return the range in `N` or `MIN:MAX`; ValueError unless `least` <= numbers <= `most`."""
        match = re.fullmatch(r"(-?[0-9]{1,20})(?::(-?[0-9]{1,20}))?", text.strip())
        if match is None:
            raise ValueError(
                f"--{flag} {text!r} is neither a number nor a range. Use e.g. --{flag} 8, or "
                f"--{flag} 4:8 for at least 4 and at most 8."
            )
        low, high = int(match[1]), int(match[2] or match[1])
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
    """Limits and timeouts of an elastic job; see `LaunchConfig`."""

    nproc_per_node: Range
    nnodes: Range
    address: str
    heartbeat_timeout_s: float = 15.0
    rdzv_timeout_s: float = 30.0
    grow_interval_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LegalSizes:
    """Sizes at which a program can run.

    `legal` are device counts without an idle device; None = any count. `simulate` is the number of
    simulated devices of each process; 0 = real devices.
    """

    legal: Sequence[int] | None = None
    simulate: int = 0

    def runs(self, num_processes: int, devices: int) -> bool:
        """Return whether `num_processes` with `devices` each can run the program.

        A single process may leave devices idle, but may not have more than the full mesh.
        """
        if self.legal is None or num_processes * devices in self.legal:
            return True
        return num_processes == 1 and min(self.legal) <= devices <= max(self.legal)

    def suits(self, num_processes: int, devices: int) -> bool:
        """Return whether these processes can run the program with no GPU idle."""
        all_used = self.legal is None or num_processes * devices in self.legal
        return all_used or (bool(self.simulate) and self.runs(num_processes, devices))


def choose_members(
    hosts: Sequence[Host], plan: ElasticConfig, sizes: LegalSizes
) -> Membership | None:
    """Return the hosts, processes and devices of the largest legal job, or None.

    The largest job has the most devices or, if every number of devices is legal, the most
    processes. Ties go to the fewest hosts, because the network between hosts is slower, then to the
    most processes per host. If some hosts have GPUs, a host without GPUs has lost them and is
    excluded.
    """
    if any(host.gpus for host in hosts):
        hosts = [host for host in hosts if host.gpus]
    best: tuple[tuple[int, ...], Membership] | None = None
    for nproc_per_node in range(plan.nproc_per_node.minimum, plan.nproc_per_node.maximum + 1):
        for devices in _device_counts(hosts):
            able = [
                h
                for h in sorted(hosts, key=lambda host: host.rank)
                if h.max_processes >= nproc_per_node and h.devices >= nproc_per_node * devices
            ]
            counts = range(min(len(able), plan.nnodes.maximum), plan.nnodes.minimum - 1, -1)
            suited = (n for n in counts if sizes.suits(n * nproc_per_node, devices))
            if (count := next(suited, 0)) == 0:  # the largest job of this shape
                continue
            chosen = tuple(able[:count])
            job = Membership(members=chosen, nproc_per_node=nproc_per_node, devices=devices)
            size = count * nproc_per_node * (1 if sizes.legal is None else devices)
            value = (size, -count, nproc_per_node, devices)
            if best is None or value > best[0]:
                best = value, job
    return None if best is None else best[1]


def _device_counts(hosts: Sequence[Host]) -> list[int]:
    """Return the device counts a process may have: GPUs are divisible, simulated are not."""
    if any(host.gpus for host in hosts):
        return list(range(1, max(host.devices for host in hosts) + 1))
    return sorted({host.devices // host.max_processes for host in hosts})


def legal_nodes(sizes: LegalSizes, nodes: Range, nproc_per_node: int, devices: int) -> list[int]:
    """Return the node counts on which the program can run, with `devices` per process."""
    every = range(nodes.minimum, nodes.maximum + 1)
    return [count for count in every if sizes.runs(count * nproc_per_node, devices)]


def impossible(plan: ElasticConfig, sizes: LegalSizes) -> list[str]:
    """Return one problem if the ranges allow no legal job on any hosts and GPUs, else []."""
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
        f"--nnodes {plan.nnodes} × --nproc-per-node {plan.nproc_per_node} allows no legal job: "
        f"model, batch and mesh are legal on {legal} devices. Use ranges that reach one of these."
    ]


_MANY_GPUS = 16  # per process; more than hosts have


def read_sizes(arguments: Sequence[str]) -> LegalSizes | int:
    """Return the sizes at which `jaxdist.train` with these arguments can run, or an exit code.

    A child process computes them and prints problems: reading the settings imports jax, and a
    process that has imported jax should not fork.
    """
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        return done.returncode or LegalSizes(**json.loads(done.stdout))
    except (ValueError, TypeError):
        print(done.stdout, end="")
        return runtime.EXIT_OK if {"-h", "--help"} & set(arguments) else runtime.EXIT_FAILURE


def main() -> int:
    """Print `LegalSizes` for a program's arguments as JSON, return 0; `read_sizes` starts this."""
    from jaxdist.config import legal_sizes, read_run
    from jaxdist.settings import ConfigError, problems_of

    # Rules about this machine's devices are checked by the processes that have the devices.
    config = read_run(sys.argv[1:], command="jaxdist.train", check_rules=False)
    sections = {"mesh": config.mesh, "train": config.train, "pipeline": config.pipeline}
    problems = [p for name, section in sections.items() for p in problems_of(section, name)]
    if problems:
        raise ConfigError(problems, heading="jaxdist.train")
    legal = None
    if config.mesh.elastic and config.mesh.spec is not None:
        model = config.build_model()  # a user's objective may take several rows as an example
        config.check_mesh(config.mesh.spec, model)
        legal = legal_sizes(config, model)
    print(json.dumps({"legal": legal, "simulate": config.simulate}))
    return runtime.EXIT_OK


if __name__ == "__main__":
    runtime.run_command(main)
