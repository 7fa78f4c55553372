"""What an elastic job may be made of, and the largest part of it that can run now.

Pure functions: who is there, and what for, is told; `rounds` acts on it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jaxdist.tools.launch.rendezvous import BEAT_S, Host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """From `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Range:
        """Read `MIN:MAX`.

        Raises:
            ValueError: it is none; the message names the fix.
        """
        found = re.fullmatch(r"(-?\d+):(-?\d+)", text.strip())
        if found is None:
            raise ValueError(
                f"--{flag} {text!r} is neither a number nor a range. Use e.g. --{flag} 8, or "
                f"--{flag} 4:8 for at least 4 and at most 8."
            )
        least, most = int(found[1]), int(found[2])
        if least < 1:
            raise ValueError(f"--{flag} {text}: MIN is {least}. Use MIN ≥ 1, e.g. --{flag} 1:8.")
        if most < least:
            raise ValueError(
                f"--{flag} {text}: MAX is smaller than MIN. Use --{flag} {most}:{least}."
                if most >= 1
                else f"--{flag} {text}: MAX is {most}. Use MIN:MAX, e.g. --{flag} 1:8."
            )
        return cls(least=least, most=most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticPlan:
    """What an elastic job may be made of.

    Attributes:
        nproc_per_node: processes on each host, as many on one as on another.
        nnodes: hosts.
        address: by which other hosts reach this one.
        heartbeat_timeout_s: without a sign of life a host is lost.
        rdzv_timeout_s: for hosts to come, before those that are there go on.
        grow_interval_s: between two counts of this host's GPUs.
    """

    nproc_per_node: Range
    nnodes: Range
    address: str
    heartbeat_timeout_s: float = 15.0
    rdzv_timeout_s: float = 30.0
    grow_interval_s: float = 60.0

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        if self.heartbeat_timeout_s < 3 * BEAT_S:
            found.append(
                f"--heartbeat-timeout-s {self.heartbeat_timeout_s:g} is too short: a host's "
                f"heartbeat comes every {BEAT_S:g} s. Use 3 or more; the default is 15."
            )
        for name in ("rdzv_timeout_s", "grow_interval_s"):
            if getattr(self, name) <= 0:
                flag = name.replace("_", "-")
                found.append(f"--{flag} {getattr(self, name):g} is no time. Use seconds > 0.")
        if not self.address:
            found.append("--address '' is no name of this host. Leave it out, or name it.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the program may be started with.

    Attributes:
        legal: device counts that leave none idle; None: any.
        simulate: simulated devices of each process; 0: real ones.
    """

    legal: Sequence[int] | None = None
    simulate: int = 0

    def runs(self, num_processes: int, devices: int) -> bool:
        """Whether so many processes with so many devices each can run it; one may leave some idle.

        Not if there are more than the mesh names: that is refused, whoever asks.
        """
        if self.legal is None or num_processes * devices in self.legal:
            return True
        return num_processes == 1 and min(self.legal) <= devices <= max(self.legal)

    def suits(self, num_processes: int, devices: int) -> bool:
        """Whether they can run it and no GPU is idle, since fewer can be shown to a process."""
        all_used = self.legal is None or num_processes * devices in self.legal
        return all_used or (bool(self.simulate) and self.runs(num_processes, devices))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The largest job that some hosts can run."""

    hosts: tuple[Host, ...]
    nproc_per_node: int
    devices: int

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return len(self.hosts) * self.nproc_per_node * self.devices


def choose(hosts: Sequence[Host], plan: ElasticPlan, sizes: Sizes) -> Choice | None:
    """The hosts, processes and devices that make the largest legal job; None without one.

    The largest has the most devices, or, of a program with which any number is legal, the most
    processes. Among equals: the fewest hosts, between which the network is; then the most processes
    on each. All hosts run equally many. Where any has GPUs, one without has lost them and has no
    place.
    """
    if any(host.gpus for host in hosts):
        hosts = [host for host in hosts if host.gpus]
    best: tuple[tuple[int, ...], Choice] | None = None
    for nproc_per_node in range(plan.nproc_per_node.least, plan.nproc_per_node.most + 1):
        for devices in _device_counts(hosts):
            able = [
                h
                for h in hosts
                if h.nproc_per_node >= nproc_per_node and h.devices >= nproc_per_node * devices
            ]
            for count in range(plan.nnodes.least, min(len(able), plan.nnodes.most) + 1):
                if not sizes.suits(count * nproc_per_node, devices):
                    continue
                chosen = tuple(sorted(able, key=lambda host: host.rank)[:count])
                found = Choice(hosts=chosen, nproc_per_node=nproc_per_node, devices=devices)
                size = count * nproc_per_node * (1 if sizes.legal is None else devices)
                value = (size, -count, nproc_per_node, devices)
                if best is None or value > best[0]:
                    best = value, found
    return None if best is None else best[1]


def _device_counts(hosts: Sequence[Host]) -> list[int]:
    """Devices that a process may get: GPUs are dealt out, simulated ones are what they are."""
    if any(host.gpus for host in hosts):
        return list(range(1, max(host.devices for host in hosts) + 1))
    return sorted({host.devices // host.nproc_per_node for host in hosts})


def legal_nodes(sizes: Sizes, nodes: Range, nproc_per_node: int, devices: int) -> list[int]:
    """Numbers of nodes with which the program can run.

    Args:
        sizes: what it may be started with.
        nodes: those to choose from.
        nproc_per_node: processes on each node.
        devices: of each process.
    """
    every = range(nodes.least, nodes.most + 1)
    return [count for count in every if sizes.runs(count * nproc_per_node, devices)]


def impossible(plan: ElasticPlan, sizes: Sizes) -> list[str]:
    """What is wrong with ranges that are illegal however many hosts and GPUs are there."""
    each = sizes.simulate or _MANY_GPUS
    host = Host(
        rank=0,
        uuid="",
        address="",
        nproc_per_node=plan.nproc_per_node.most,
        gpus=not sizes.simulate,
    )
    host = dataclasses.replace(host, devices=plan.nproc_per_node.most * each)
    hosts = [dataclasses.replace(host, rank=rank) for rank in range(plan.nnodes.most)]
    if choose(hosts, plan, sizes) is not None:
        return []
    legal = ", ".join(map(str, sizes.legal or ()))
    return [
        f"--nnodes {plan.nnodes} × --nproc-per-node {plan.nproc_per_node} never makes a legal job: "
        f"model, batch and mesh are legal with {legal} devices. Use ranges that reach one of these."
    ]


_MANY_GPUS = 16  # of one process; more than hosts have
