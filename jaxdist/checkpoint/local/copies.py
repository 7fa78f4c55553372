"""Choose the hosts that keep a copy of each shard.

Hosts form a ring, ordered by rack. A host's shards are copied to others at fixed distances along
the ring, with the fewest copies in their own rack, until `neighbours` others have them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

VARIABLE = "JAXDIST_FAILURE_DOMAIN"
"""Environment variable with the host, or rack/host, that fails together with a process."""


@dataclasses.dataclass(frozen=True, order=True)
class FailureDomain:
    """The host of a process and the rack of that host ("" = unknown); each may fail as one."""

    rack: str
    host: str


def failure_domain_of(environ: Mapping[str, str], hostname: str) -> FailureDomain:
    """Return the failure domain of this process, from `VARIABLE` (RACK/HOST or HOST) if it is set.

    Else SLURM's topology gives the rack, and the host is `hostname`.
    """
    if named := environ.get(VARIABLE, ""):
        rack, _, host = named.rpartition("/")
        return FailureDomain(rack, host)
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    switches = [name for kind, name in zip(kinds, names, strict=False) if kind == "switch"]
    return FailureDomain(switches[-1] if switches else "", hostname)


def writers(domains: Sequence[FailureDomain], shards: Sequence[str]) -> set[int]:
    """Return the processes that write their shards: one per host and set of equal shards."""
    first: dict[tuple[FailureDomain, str], int] = {}
    for process, held in enumerate(zip(domains, shards, strict=True)):
        first.setdefault(held, process)
    return set(first.values())


def receivers(
    domains: Sequence[FailureDomain], shards: Sequence[str], neighbours: int
) -> dict[int, list[int]]:
    """Return process -> the processes, on up to `neighbours` other hosts, that copy its shards.

    Equal `shards` are equal data: only the first process with them is a key, and the hosts of
    other processes with them count as copies. A process that needs no copies is no key.
    """
    hosts = sorted(set(domains))
    number = {domain: i for i, domain in enumerate(hosts)}
    on: dict[FailureDomain, list[int]] = {}
    for process, domain in enumerate(domains):
        on.setdefault(domain, []).append(process)
    shifts = _shifts(hosts)
    copies: dict[int, list[int]] = {}
    members: dict[str, list[int]] = {}
    for process, name in enumerate(shards):
        members.setdefault(name, []).append(process)
    for same in members.values():
        holding, sender = {domains[p] for p in same}, same[0]
        here = domains[sender]
        for shift in shifts:
            if len(holding) > neighbours:
                break
            target = hosts[(number[here] + shift) % len(hosts)]
            if target not in holding:
                holding.add(target)
                peers = on[target]
                copies.setdefault(sender, []).append(peers[on[here].index(sender) % len(peers)])
    return copies


def _shifts(hosts: Sequence[FailureDomain]) -> list[int]:
    """Return the distances to hosts of copies, first those that keep fewest in the own rack."""
    count = len(hosts)
    # A rack of `size` adjacent hosts keeps size - shift of them, and across the end of the ring
    # size - (count - shift).
    sizes = Counter(Counter(host.rack for host in hosts if host.rack).values())
    kept = [sum(n * max(0, size - by) for size, n in sizes.items()) for by in range(count)]
    return sorted(range(1, count), key=lambda shift: kept[shift] + kept[count - shift])
