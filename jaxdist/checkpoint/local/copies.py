"""Which host keeps copies of which shards, and which hosts may be lost: pure functions.

Hosts are ordered by rack, and each one's shards go to the host some places further round, the same
number of places for all: where none are replicated, every host receives as much as it sends. The
number is the one that leaves the fewest copies in the rack that they came from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from jaxdist.runtime.formatting.tables import few

VARIABLE = "JAXDIST_FAILURE_DOMAIN"
"""Environment variable with the host, or rack/host, that a process is lost together with."""

_NAMED = 4  # sets of hosts that a line lists


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """What a process is lost together with: its host, and the host's rack ("" = not known)."""

    rack: str
    host: str


def place_of(environ: Mapping[str, str], hostname: str) -> Place:
    """Return the place of this process; SLURM tells the switch of a node where it knows the topology."""
    if given := environ.get(VARIABLE, ""):
        rack, _, host = given.rpartition("/")
        return Place(rack, host)
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    switches = [name for kind, name in zip(kinds, names, strict=False) if kind == "switch"]
    return Place(switches[-1] if switches else "", hostname)


def writers(places: Sequence[Place], shards: Sequence[str]) -> set[int]:
    """Of the processes on one host that hold the same shards, the one that writes them."""
    first: dict[tuple[Place, str], int] = {}
    for process, held in enumerate(zip(places, shards, strict=True)):
        first.setdefault(held, process)
    return set(first.values())


def receivers(
    places: Sequence[Place], shards: Sequence[str], neighbours: int
) -> dict[int, list[int]]:
    """Process -> the processes that take a copy of its shards; both lists go by process.

    Equal `shards` are the same ones. What replicas on other hosts hold anyway counts as a copy.
    """
    hosts = sorted(set(places))
    number = {place: i for i, place in enumerate(hosts)}
    on: dict[Place, list[int]] = {}
    for process, place in enumerate(places):
        on.setdefault(place, []).append(process)
    shifts = _shifts(hosts)
    found: dict[int, list[int]] = {}
    members: dict[str, list[int]] = {}
    for process, name in enumerate(shards):
        members.setdefault(name, []).append(process)
    for same in members.values():
        holding, sender = {places[p] for p in same}, same[0]
        here = places[sender]
        for shift in shifts:
            if len(holding) > neighbours:
                break
            target = hosts[(number[here] + shift) % len(hosts)]
            if target not in holding:
                holding.add(target)
                peers = on[target]
                found.setdefault(sender, []).append(peers[on[here].index(sender) % len(peers)])
    return found


def holders(
    places: Sequence[Place], shards: Sequence[str], neighbours: int
) -> dict[str, set[Place]]:
    """Shards -> the hosts on whose disks they lie after a save."""
    held: dict[str, set[Place]] = {}
    for place, name in zip(places, shards, strict=True):
        held.setdefault(name, set()).add(place)
    for sender, takers in receivers(places, shards, neighbours).items():
        held[shards[sender]] |= {places[taker] for taker in takers}
    return held


def survives(lost: Collection[Place], held: Mapping[str, Collection[Place]]) -> bool:
    """Return whether every set of shards is left when the disks of these hosts are lost together."""
    return all(set(hosts) - set(lost) for hosts in held.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survivable:
    """Which losses of whole hosts, disks included, leave a local save that can be restored.

    Attributes:
        num_hosts: hosts of the job.
        any_hosts: any so many of them may be lost together.
        any_rack: the hosts of any one rack may; None where no racks are known.
        fatal: hosts that may not be lost together, in the smallest sets; whatever holds none of
            them may be lost.
    """

    num_hosts: int
    any_hosts: int
    any_rack: bool | None
    fatal: tuple[frozenset[Place], ...]

    def line(self) -> str:
        """One line for people."""
        named = few([" with ".join(sorted(p.host for p in one)) for one in self.fatal], _NAMED)
        if not self.any_hosts:
            return f"local saves survive the end of processes, and not the loss of {named}"
        hosts = "host" if self.any_hosts == 1 else f"{self.any_hosts} hosts"
        text = f"local saves survive the loss of any {hosts} of {self.num_hosts}"
        if self.any_rack is not None:
            text += ", and of any rack" if self.any_rack else ", and not of every rack"
        smallest = [one for one in self.fatal if len(one) == self.any_hosts + 1]
        if len(smallest) < math.comb(self.num_hosts, self.any_hosts + 1):
            text += f"; of more where none of these is lost together: {named}"
        return text


def survivable(held: Mapping[str, Collection[Place]], places: Sequence[Place]) -> Survivable:
    """Which losses leave every set of shards; `held` is what `holders` answers."""
    sets = {frozenset(hosts) for hosts in held.values()}
    fatal = {one for one in sets if not any(other < one for other in sets)}
    racks = {place.rack for place in places}
    by_rack = [{place for place in places if place.rack == rack} for rack in racks]
    knows = len(racks) > 1
    return Survivable(
        num_hosts=len(set(places)),
        any_hosts=min(map(len, fatal)) - 1,
        any_rack=all(survives(lost, held) for lost in by_rack) if knows else None,
        fatal=tuple(sorted(fatal, key=sorted)),
    )


def _shifts(hosts: Sequence[Place]) -> list[int]:
    count = len(hosts)

    def same_rack(shift: int) -> int:
        return sum(hosts[i].rack == hosts[(i + shift) % count].rack != "" for i in range(count))

    return sorted(range(1, count), key=same_rack)
