"""A GPU described to the compiler, from its data sheet and its architecture's limits.

XLA:GPU compiles for a machine it does not run on when it is told what it would otherwise ask the
driver: a `GpuTargetConfigProto`. What differs between products (multiprocessors, memory, bandwidth)
comes from `jaxdist.plan.hardware`; what the architecture fixes is here. Clock and cache size steer
only the compiler's own time estimates: halving either changes no byte of memory or traffic in the
configurations tried.
"""

from __future__ import annotations

import dataclasses

from jaxdist.core.types import ConfigError
from jaxdist.plan.hardware import Gpu

CUDNN = (9, 12, 0)
"""Version of cuDNN that programs are planned for; jax[cuda13] installs this or a later one."""

CUDA = (13, 0, 0)
"""The same of the CUDA runtime."""

_KIB, _MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Architecture:
    """Limits of a compute capability.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and
    "Shared Memory" of each; cores from the architecture's white paper.

    Attributes:
        float32_cores: of one multiprocessor.
        max_threads: resident on one multiprocessor.
        shared_memory: of one multiprocessor, bytes.
        shared_memory_per_block: the most that one block may ask for, bytes.
        l2_bytes: second-level cache, bytes.
        clock_ghz: boost clock.
    """

    float32_cores: int
    max_threads: int
    shared_memory: int
    shared_memory_per_block: int
    l2_bytes: int
    clock_ghz: float


_ARCHITECTURES = {
    "7.5": _Architecture(  # T4: Turing white paper, T4 product brief
        float32_cores=64,
        max_threads=1024,
        shared_memory=64 * _KIB,
        shared_memory_per_block=64 * _KIB,
        l2_bytes=4 * _MIB,
        clock_ghz=1.59,
    ),
    "8.0": _Architecture(  # A100 white paper
        float32_cores=64,
        max_threads=2048,
        shared_memory=164 * _KIB,
        shared_memory_per_block=163 * _KIB,
        l2_bytes=40 * _MIB,
        clock_ghz=1.41,
    ),
    "8.6": _Architecture(  # GA102 white paper
        float32_cores=128,
        max_threads=1536,
        shared_memory=100 * _KIB,
        shared_memory_per_block=99 * _KIB,
        l2_bytes=6 * _MIB,
        clock_ghz=1.71,
    ),
    "8.9": _Architecture(  # Ada white paper, L4 product brief
        float32_cores=128,
        max_threads=1536,
        shared_memory=100 * _KIB,
        shared_memory_per_block=99 * _KIB,
        l2_bytes=48 * _MIB,
        clock_ghz=2.04,
    ),
    "9.0": _Architecture(  # H100 white paper
        float32_cores=128,
        max_threads=2048,
        shared_memory=228 * _KIB,
        shared_memory_per_block=227 * _KIB,
        l2_bytes=50 * _MIB,
        clock_ghz=1.98,
    ),
    "10.0": _Architecture(  # Blackwell tuning guide; L2 and clock as cudaDeviceProp reports them
        float32_cores=128,
        max_threads=2048,
        shared_memory=228 * _KIB,
        shared_memory_per_block=227 * _KIB,
        l2_bytes=126 * _MIB,
        clock_ghz=1.965,
    ),
}


def target_text(gpu: Gpu) -> str:
    """`GpuTargetConfigProto` of a GPU, in text format.

    Raises:
        ConfigError: nothing is known of its architecture.
    """
    architecture = _ARCHITECTURES.get(gpu.compute_capability)
    if architecture is None:
        raise ConfigError(
            f"GPU {gpu.name!r} has compute capability {gpu.compute_capability!r}, which the "
            f"compiler cannot be told about here. Known: {', '.join(_ARCHITECTURES)}."
        )
    major, minor = gpu.compute_capability.split(".")
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,  # without opting in, everywhere
        "shared_memory_per_block_optin": architecture.shared_memory_per_block,
        "shared_memory_per_core": architecture.shared_memory,
        "threads_per_core_limit": architecture.max_threads,
        "core_count": gpu.num_sms,
        "fpus_per_core": architecture.float32_cores,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": int(gpu.memory_bandwidth),
        "l2_cache_size": architecture.l2_bytes,
        "clock_rate_ghz": architecture.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
    }
    lines = [f"  {name}: {value}" for name, value in info.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {_version(CUDNN)}",
            f"runtime_version {_version(CUDA)}",
            f'device_description_str: "{gpu.name}"',
            "",
        ]
    )


def _version(numbers: tuple[int, int, int]) -> str:
    return "{{ major: {} minor: {} patch: {} }}".format(*numbers)
