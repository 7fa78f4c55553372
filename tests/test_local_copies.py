"""Hosts that keep copies of local saves, after losses of hosts."""

import itertools

import pytest

from jaxdist.checkpoint.local.copies import (
    VARIABLE,
    FailureDomain,
    failure_domain_of,
    receivers,
    writers,
)
from jaxdist.checkpoint.local.store import Save, newest


def jobs(num_hosts: int):
    """Return jobs on so many hosts: domain and shards of each process, and neighbor count."""
    flat = [FailureDomain("", f"h{i:02}") for i in range(num_hosts)]
    racks = [FailureDomain(f"r{i * 3 // num_hosts}", domain.host) for i, domain in enumerate(flat)]
    uneven = [FailureDomain("a" if i else "b", domain.host) for i, domain in enumerate(flat)]
    own = [str(i) for i in range(num_hosts)]
    for domains in (flat, racks, uneven):
        for neighbours in range(4):
            yield domains, own, neighbours
            yield domains, [str(i // 2) for i in range(num_hosts)], neighbours  # replicas
    yield flat, ["all"] * num_hosts, 1
    two_each = [domain for domain in flat for _ in range(2)]
    yield two_each, [str(i) for i in range(2 * num_hosts)], 1
    yield two_each, [str(i % 2) for i in range(2 * num_hosts)], 1


def files_of(domains, shards, neighbours) -> dict[FailureDomain, set[str]]:
    """Return host -> files on its disk after a save, simulated process by process."""
    disks = {domain: set() for domain in domains}
    for process in writers(domains, shards):
        disks[domains[process]].add(shards[process])
    for sender, takers in receivers(domains, shards, neighbours).items():
        for taker in takers:
            disks[domains[taker]].add(shards[sender])
    return disks


@pytest.mark.parametrize("num_hosts", range(1, 10))
def test_shards_survive_the_loss_of_any_neighbours(num_hosts):
    for domains, shards, neighbours in jobs(num_hosts):
        disks = files_of(domains, shards, neighbours)
        for lost in itertools.combinations(disks, min(neighbours, num_hosts - 1)):
            left = (files for host, files in disks.items() if host not in lost)
            assert set().union(*left) == set(shards)


@pytest.mark.parametrize("num_hosts", [2, 3, 5])
def test_inventory_locates_every_save_that_survives(num_hosts):
    for domains, shards, neighbours in jobs(num_hosts):
        hosts, disks = sorted(set(domains)), files_of(domains, shards, neighbours)
        held = [{host for host, has in disks.items() if name in has} for name in set(shards)]
        for number in range(2**num_hosts):
            lost = {host for i, host in enumerate(hosts) if number >> i & 1}
            replies = [
                [name, [] if at in lost else [Save(3, 70, has) for has in disks[at]]]
                for at, name in zip(domains, shards, strict=True)
            ]
            located = newest(replies, 0)
            assert bool(located.sources) == all(on - lost for on in held)
            for process, source in enumerate(located.sources):
                assert Save(3, 70, shards[process]) in replies[source][1]
                own = shards[process] in disks[domains[process]] and domains[process] not in lost
                assert not own or source == process


def test_copies_go_to_other_racks_and_load_all_hosts_equally():
    domains = [FailureDomain(f"r{i // 4}", f"h{i:02}") for i in range(12)]
    taken = receivers(domains, list(map(str, range(12))), 2)
    received = [taker for takers in taken.values() for taker in takers]
    assert sorted(received) == sorted([*range(12)] * 2)
    assert all(domains[s].rack != domains[t].rack for s, takers in taken.items() for t in takers)


def test_replicas_on_other_hosts_count_as_copies():
    domains = [FailureDomain("", host) for host in "abcd"]
    assert receivers(domains, ["x"] * 4, 3) == {}
    assert receivers(domains, ["x", "y", "x", "y"], 1) == {}
    assert receivers([FailureDomain("", "a")] * 3, ["x", "y", "z"], 2) == {}  # one host
    same_host = [FailureDomain("", "a"), FailureDomain("", "a"), FailureDomain("", "b")]
    assert writers(same_host, ["x", "x", "x"]) == {0, 2}


@pytest.mark.parametrize(
    ("environ", "rack", "host"),
    [
        ({}, "", "n7"),
        ({VARIABLE: "node9"}, "", "node9"),
        ({VARIABLE: "row1/rack3/node9"}, "row1/rack3", "node9"),
        (
            {
                "SLURM_TOPOLOGY_ADDR": "s0.s4.n7",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            },
            "s4",
            "n7",
        ),
        ({"SLURM_TOPOLOGY_ADDR": "n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "", "n7"),
    ],
)
def test_failure_domain_is_host_and_rack(environ, rack, host):
    assert failure_domain_of(environ, "n7") == FailureDomain(rack, host)
