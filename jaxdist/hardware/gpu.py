"""Records of a GPU type and of a cluster of nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

GIB = 2**30

HOST_BYTES_PER_S = 10e9
"""Bandwidth between a GPU and its host: PCIe 4.0, with all GPUs of a node copying concurrently."""


DISK_BYTES_PER_S = 3e9
"""Bytes per second that a node's local NVMe disk reads and writes at the same time, in all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU type, as JAX counts devices.

    Attributes:
        device_kind: pattern for the complete `jax.Device.device_kind` without the vendor.
        memory_bytes: total that CUDA reports, slightly below the data sheet.
        peak_flops: dtype ("bfloat16", "float16", "float32", "float8", "float4") -> dense FLOP/s.
        memory_bandwidth: of the device memory, bytes/s.
        link_bandwidth: to GPUs on the same fast links, bytes/s per GPU and direction.
        network_bandwidth: to other GPUs, bytes/s per GPU and direction.
        gpus_per_fabric: number of GPUs joined by fast links; 0 = all GPUs of a machine.
        power_w: power limit in watts; 0 = unknown.
        max_clock: maximum clock relative to the boost clock at which peak rates are specified.
        price_per_hour, spot_price_per_hour: of one GPU, USD; spot GPUs are preemptible.
    """

    name: str
    device_kind: str
    compute_capability: str
    num_sms: int
    memory_bytes: int
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int
    gpus_per_fabric: int = 0
    power_w: float = 0.0
    max_clock: float = 1.0
    price_per_hour: float
    spot_price_per_hour: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with GPUs of one type, and a local disk each."""

    gpu: Gpu
    num_nodes: int
    gpus_per_node: int
    disk_bytes_per_s: float = DISK_BYTES_PER_S

    @classmethod
    def of(cls, gpu: Gpu, num_gpus: int) -> Cluster:
        """Return the cluster with the fewest nodes among which the GPUs divide equally."""
        nodes = math.ceil(num_gpus / gpu.gpus_per_node)
        while num_gpus % nodes:
            nodes += 1
        return cls(gpu=gpu, num_nodes=nodes, gpus_per_node=num_gpus // nodes)

    def resized(self, num_gpus: int) -> Cluster:
        """Return a cluster with a different number of these GPUs, on nodes of the same size."""
        per_node = self.gpus_per_node if self.num_nodes > 1 else self.gpu.gpus_per_node
        other = Cluster.of(dataclasses.replace(self.gpu, gpus_per_node=per_node), num_gpus)
        return dataclasses.replace(other, disk_bytes_per_s=self.disk_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.num_nodes * self.gpus_per_node

    @property
    def gpus_per_fabric(self) -> int:
        """Number of GPUs joined by fast links."""
        return max(self.gpus_per_node, self.gpu.gpus_per_fabric)

    def __str__(self) -> str:
        return f"{self.gpu.name}:{self.num_nodes}x{self.gpus_per_node}"
