"""Hosts that keep copies of local saves, and the losses of hosts that they survive."""

import numpy as np
import pytest

from jaxdist.checkpoint.local.copies import (
    VARIABLE,
    FailureDomain,
    failure_domain_of,
    holders,
    receivers,
    survivable,
    writers,
)
from jaxdist.checkpoint.local.store import Save, newest
from jaxdist.core.mesh import MeshSpec
from jaxdist.plan.planner import survivable_losses


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


@pytest.mark.parametrize("num_hosts", range(1, 17))
def test_predicted_survival_matches_simulated_loss_of_every_host_subset(num_hosts):
    """The reference simulates disks one by one, for every subset of up to 16 hosts."""
    lost = np.arange(2**num_hosts)
    counts = sum((lost >> host) & 1 for host in range(num_hosts))
    for domains, shards, neighbours in jobs(num_hosts):
        hosts = sorted(set(domains), key=lambda domain: domain.host)
        disks = files_of(domains, shards, neighbours)
        restored = np.ones(len(lost), bool)
        for name in set(shards):
            has_shard = np.zeros(len(lost), bool)
            for number, host in enumerate(hosts):
                if name in disks[host]:
                    has_shard |= (lost >> number) & 1 == 0
            restored &= has_shard
        claim = survivable(holders(domains, shards, neighbours), domains)
        claimed = np.ones(len(lost), bool)
        for together in claim.fatal:
            mask = sum(1 << hosts.index(host) for host in together)
            claimed &= lost & mask != mask
        assert (claimed == restored).all()
        assert restored[counts <= claim.any_hosts].all()
        assert not restored[counts == claim.any_hosts + 1].all()
        distinct = min(neighbours, num_hosts - 1)
        assert claim.any_hosts >= distinct  # the promise of the setting
        racks = {domain.rack for domain in domains}
        masks = [sum(1 << i for i, at in enumerate(hosts) if at.rack == rack) for rack in racks]
        assert claim.any_rack == (all(restored[masks]) if len(racks) > 1 else None)


@pytest.mark.parametrize("num_hosts", [2, 3, 5])
def test_inventory_locates_every_save_predicted_to_survive(num_hosts):
    for domains, shards, neighbours in jobs(num_hosts):
        hosts, disks = sorted(set(domains)), files_of(domains, shards, neighbours)
        held = holders(domains, shards, neighbours)
        for number in range(2**num_hosts):
            lost = {host for i, host in enumerate(hosts) if number >> i & 1}
            replies = [
                [name, [] if at in lost else [Save(3, 70, has) for has in disks[at]]]
                for at, name in zip(domains, shards, strict=True)
            ]
            located = newest(replies, 0)
            assert bool(located.sources) == all(on - lost for on in held.values())
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
    claim = survivable(holders(domains, list(map(str, range(12))), 2), domains)
    assert (claim.any_hosts, claim.any_rack, claim.num_hosts) == (2, True, 12)


def test_replicas_on_other_hosts_count_as_copies():
    domains = [FailureDomain("", host) for host in "abcd"]
    assert receivers(domains, ["x"] * 4, 3) == {}
    assert receivers(domains, ["x", "y", "x", "y"], 1) == {}
    assert receivers([FailureDomain("", "a")] * 3, ["x", "y", "z"], 2) == {}  # one host
    assert survivable(holders(domains, ["x"] * 4, 1), domains).any_hosts == 3
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


@pytest.mark.parametrize(
    ("mesh", "zero", "any_hosts", "fatal"),
    [
        ("fsdp=32", 0, 1, 4),  # a ring of four nodes: each is copied to the next
        ("dp=4,fsdp=8", 0, 3, 1),  # every node holds everything
        ("dp=4,fsdp=8", 1, 1, 4),  # but not the moments
        ("dp=2,fsdp=16", 0, 1, 2),  # two nodes hold one half, two the other
        ("pp=4,tp=8", 0, 1, 4),
    ],
)
def test_plan_predicts_survivable_node_losses(mesh, zero, any_hosts, fatal):
    survivable = survivable_losses(MeshSpec.parse(mesh), 4, 1, zero=zero)
    assert (survivable.num_hosts, survivable.any_hosts, len(survivable.fatal)) == (
        4,
        any_hosts,
        fatal,
    )
