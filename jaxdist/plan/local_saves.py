"""Which losses of nodes the local saves of a planned run survive."""

from __future__ import annotations

import numpy as np

from jaxdist.checkpoint.local.copies import FailureDomain, Survivable, holders, survivable
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import axes


def survivable_on(
    spec: MeshSpec,
    num_nodes: int,
    neighbours: int,
    *,
    zero: int = 0,
) -> Survivable:
    """The losses survived on nodes that take the mesh's devices in order, with racks unknown.

    Nodes hold the same shards if their devices have the same indices along every axis that
    shards parameters or moments. An array that such an axis does not divide stays whole, so a run
    may survive more.
    """
    sharding = {axis.name for axis in axes.AXES if axis.weights != "replicated"}
    sharding |= set(axes.joining_fsdp(zero))
    sizes = spec.sizes
    indices = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    rows = [row for name, row in zip(sizes, indices, strict=True) if name in sharding]
    by_node = np.stack(rows).reshape(len(rows), num_nodes, -1)
    shards = [str(sorted(set(zip(*by_node[:, n].tolist(), strict=True)))) for n in range(num_nodes)]
    domains = [FailureDomain("", f"node{n:0{len(str(num_nodes - 1))}}") for n in range(num_nodes)]
    return survivable(holders(domains, shards, neighbours), domains)
