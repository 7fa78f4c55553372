"""Description of a GPU for the compiler, from its data sheet and the limits of its architecture.

XLA:GPU compiles for absent GPUs from a `GpuTargetConfigProto`. Product specifications come from
`jaxdist.hardware`, architecture limits from this file. Clock and cache size affect only the
compiler's own time estimates: halving either changed no byte in the configurations tested.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.hardware import Gpu
from jaxdist.settings import ConfigError

CUDNN = (9, 12, 0)
"""Assumed version of cuDNN; jax[cuda13] installs this or a later one."""

CUDA = (13, 0, 0)
"""Assumed version of the CUDA runtime."""

_KIB = 2**10


class _Architecture(NamedTuple):
    """Limits of a compute capability; cores, threads and `shared_kib` are per multiprocessor.

    `clock_ghz` is the boost clock.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and
        "Shared Memory" of each; cores from the architecture's white paper.
    """

    float32_cores: int
    max_threads: int
    shared_kib: int
    shared_kib_per_block: int
    l2_mib: int
    clock_ghz: float


_ARCHITECTURES = {
    "7.5": _Architecture(64, 1024, 64, 64, 4, 1.59),  # T4: Turing white paper, T4 product brief
    "8.0": _Architecture(64, 2048, 164, 163, 40, 1.41),  # A100 white paper
    "8.6": _Architecture(128, 1536, 100, 99, 6, 1.71),  # GA102 white paper
    "8.9": _Architecture(128, 1536, 100, 99, 48, 2.04),  # Ada white paper, L4 product brief
    "9.0": _Architecture(128, 2048, 228, 227, 50, 1.98),  # H100 white paper
    # Blackwell tuning guide; L2 and clock as cudaDeviceProp reports them.
    "10.0": _Architecture(128, 2048, 228, 227, 126, 1.965),
    "10.3": _Architecture(128, 2048, 228, 227, 126, 1.92),
    "12.0": _Architecture(128, 1536, 100, 99, 96, 2.41),  # RTX Blackwell white paper
}


def target_text(gpu: Gpu) -> str:
    """Return the `GpuTargetConfigProto` of a GPU, in text format."""
    architecture = _ARCHITECTURES.get(gpu.compute_capability)
    if architecture is None:
        raise ConfigError(
            f"GPU {gpu.name!r} has compute capability {gpu.compute_capability!r}, whose "
            f"limits are unknown here. Known: {', '.join(_ARCHITECTURES)}."
        )
    major, minor = gpu.compute_capability.split(".")
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,  # without opt-in, on every GPU
        "shared_memory_per_block_optin": architecture.shared_kib_per_block * _KIB,
        "shared_memory_per_core": architecture.shared_kib * _KIB,
        "threads_per_core_limit": architecture.max_threads,
        "core_count": gpu.num_sms,
        "fpus_per_core": architecture.float32_cores,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": int(gpu.memory_bandwidth),
        "l2_cache_size": architecture.l2_mib * 2**20,
        "clock_rate_ghz": architecture.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
    }
    lines = [
        "gpu_device_info {",
        *(f"  {name}: {value}" for name, value in info.items()),
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
        "}",
        'platform_name: "CUDA"',
        f"dnn_version_info {_version(CUDNN)}",
        f"runtime_version {_version(CUDA)}",
        f'device_description_str: "{gpu.name}"',
    ]
    return "\n".join(lines) + "\n"


def _version(numbers: tuple[int, int, int]) -> str:
    return "{{ major: {} minor: {} patch: {} }}".format(*numbers)
