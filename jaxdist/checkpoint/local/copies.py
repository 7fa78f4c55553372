"""Choose the host that keeps a copy of each shard, and compute which host losses are survivable.

Hosts form a ring, ordered by rack. A host's shards are copied to others at fixed distances along
the ring, with the fewest copies in their own rack, until `neighbours` others have them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from jaxdist.runtime.formatting.tables import few

VARIABLE = "JAXDIST_FAILURE_DOMAIN"
"""Environment variable with the host, or rack/host, that fails together with a process."""

_NAMED = 4  # sets of hosts listed in a log line


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


def holders(
    domains: Sequence[FailureDomain], shards: Sequence[str], neighbours: int
) -> dict[str, set[FailureDomain]]:
    """Return set of shards -> the hosts whose disks have it after a save."""
    held: dict[str, set[FailureDomain]] = {}
    for domain, name in zip(domains, shards, strict=True):
        held.setdefault(name, set()).add(domain)
    for sender, takers in receivers(domains, shards, neighbours).items():
        held[shards[sender]] |= {domains[taker] for taker in takers}
    return held


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survivable:
    """Host losses (including their disks) after which a local save can still be restored.

    Attributes:
        any_hosts: number of arbitrary hosts that may be lost together.
        any_rack: whether any single rack may be lost; None unless there are several racks.
        fatal: sets of hosts that may not be lost together; none includes another.
    """

    num_hosts: int
    any_hosts: int
    any_rack: bool | None
    fatal: tuple[frozenset[FailureDomain], ...]

    def line(self) -> str:
        """Return which losses of hosts and racks local saves survive, as one line for the log."""
        named = few(["+".join(sorted(p.host for p in one)) for one in self.fatal], _NAMED)
        if not self.any_hosts:
            return f"local saves survive crashed processes, but not the loss of {named}"
        hosts = "host" if self.any_hosts == 1 else f"{self.any_hosts} hosts"
        text = f"local saves survive the loss of any {hosts} of {self.num_hosts}"
        if self.any_rack is not None:
            text += ", and of any rack" if self.any_rack else ", but not of every rack"
        smallest = [one for one in self.fatal if len(one) == self.any_hosts + 1]
        if len(smallest) < math.comb(self.num_hosts, self.any_hosts + 1):
            text += f"; of more unless one of these sets is lost together: {named}"
        return text


def survivable(
    held: Mapping[str, Collection[FailureDomain]], domains: Sequence[FailureDomain]
) -> Survivable:
    """Return which host losses leave a copy of each set of shards; `held` is from `holders`."""
    sets = {frozenset(hosts) for hosts in held.values()}
    by_least: dict[FailureDomain, list[frozenset[FailureDomain]]] = {}
    for one in sets:
        by_least.setdefault(min(one), []).append(one)
    fatal = {
        one
        for one in sets
        if not any(other < one for host in one for other in by_least.get(host, ()))
    }
    has_racks = len({domain.rack for domain in domains}) > 1
    is_rack_fatal = any(len({domain.rack for domain in one}) == 1 for one in fatal)
    return Survivable(
        num_hosts=len(set(domains)),
        any_hosts=min(map(len, fatal)) - 1,
        any_rack=not is_rack_fatal if has_racks else None,
        fatal=tuple(sorted(fatal, key=sorted)),
    )


def _shifts(hosts: Sequence[FailureDomain]) -> list[int]:
    """Return the distances to hosts of copies, first those that keep fewest in the own rack."""
    count = len(hosts)
    # A rack of `size` adjacent hosts keeps size - shift of them, and across the end of the ring
    # size - (count - shift).
    sizes = Counter(Counter(host.rack for host in hosts if host.rack).values())
    kept = [sum(n * max(0, size - by) for size, n in sizes.items()) for by in range(count)]
    return sorted(range(1, count), key=lambda shift: kept[shift] + kept[count - shift])
