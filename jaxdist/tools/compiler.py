"""Compile a train step in a child process: settings on stdin, facts about the step on stdout.

`check.compile_step` starts `python -m jaxdist.tools.compiler`. A separate process is needed because
jax must be configured before its import (no GPU, no cached executable), the compiler writes
warnings to the stderr descriptor, and only a process can be stopped if compilation takes too long.

It prints one line of JSON: the facts, or `{"refused": [...]}` for illegal settings. Other errors
end it with a traceback.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from jax.experimental import topologies

from jaxdist.config import stored_run
from jaxdist.core.attention import cudnn
from jaxdist.core.matmul import hopper
from jaxdist.core.parallel.pipeline.simulation import branch_shares
from jaxdist.core.types import offloaded_names
from jaxdist.hardware import Cluster, Gpu
from jaxdist.plan.compiled.collectives import custom_calls, read_collectives
from jaxdist.plan.compiled.hlo import HloInstruction, Module, parse, shapes_of
from jaxdist.plan.compiled.host_offload import ON_HOST, offload_problems
from jaxdist.plan.estimate.attention import cudnn_scratch
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError

_NUM_BUFFERS = 12
_SHAPES_OF_A_BUFFER = 3
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def main() -> int:
    """Compile the step of a request (JSON on stdin), print facts or `refused` as JSON; return 0."""
    output = os.dup(1)
    os.dup2(2, 1)  # other output goes to stderr
    request = json.load(sys.stdin)
    try:
        answer = compile_request(request)
    except ConfigError as error:
        answer = {"refused": error.problems}
    with os.fdopen(output, "w") as stream:
        json.dump(answer, stream)
    return 0


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the step of a request (TOML settings, GPUs); return its memory in bytes, HLO, ..."""
    gpu = Gpu(**request["gpu"])
    cluster = Cluster(
        gpu=gpu, num_nodes=request["num_nodes"], gpus_per_node=request["gpus_per_node"]
    )
    text = target_text(gpu)
    devices = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{cluster.num_nodes}x{cluster.gpus_per_node}",
        target_config=text,
    ).devices
    cudnn.emulate_gpu(gpu.compute_capability, CUDNN)
    if gpu.compute_capability == hopper.COMPUTE_CAPABILITY:
        hopper.emulate_gpu(gpu.num_sms)
    with tempfile.TemporaryDirectory(prefix="jaxdist-plan-") as scratch:
        start = time.perf_counter()
        settings = Path(scratch) / "config.toml"
        settings.write_text(request["config"])
        parts = assemble(stored_run(settings), devices)
        lowered = parts.step.train.lower(parts.step_state(), parts.abstract_batch(), math.inf)
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": scratch, "xla_dump_hlo_as_text": True}
        )
        compile_s = time.perf_counter() - start
        hlo = compiled.as_text()
        buffers = _largest_buffers(Path(scratch), parse(hlo))
    calls = custom_calls(hlo)
    schedule = parts.pipeline_schedule
    collectives = read_collectives(hlo, parts.spec.sizes, gpus_per_node=cluster.gpus_per_fabric)
    return {
        "memory": _memory(compiled.memory_analysis(), calls, gpu),
        "buffers": buffers,
        "collectives": [dataclasses.asdict(collective) for collective in collectives],
        "branch_shares": {} if schedule is None else branch_shares(schedule),
        "program": hlo,
        "attention": _attention(parts, calls),
        "offload": offload_problems(compiled) if offloaded_names(parts.plan.remat) else [],
        "compile_s": compile_s,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "target": text,
    }


def _memory(stats: Any, calls: list[tuple[str, HloInstruction]], gpu: Gpu) -> dict[str, int]:
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "workspace_bytes": max(
            (attention_workspace(call, gpu) for name, call in calls if "fmha" in name), default=0
        ),
        "host_bytes": stats.host_temp_size_in_bytes,
    }


def attention_workspace(call: HloInstruction, gpu: Gpu) -> int:
    """Return the scratch bytes of a cuDNN call, which the compiler does not count.

    A forward call needs 256 from Hopper on, else 0; for backward see `cudnn_scratch`. cuDNN treats
    each document of a packed call as a row.
    """
    if "Backward" not in call.attributes:
        return 256 if float(gpu.compute_capability) >= 9.0 else 0
    # [batch, heads, positions, head width]
    (batch, heads, positions, width), key, *_ = (shape.dims for shape in shapes_of(call.type))
    documents = re.search(r'"max_seg_per_batch": *(\d+)', call.attributes)
    batch *= int(documents[1]) if documents else 1
    return cudnn_scratch(batch * heads * positions, width, shares_keys=key[1] < heads, gpu=gpu)


_VALUE = re.compile(r"value: <\d+ ([^\s{]+)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")


def _largest_buffers(scratch: Path, module: Module) -> list[dict[str, Any]]:
    """Return `bytes`, `shapes`, `op_name` of the largest temporary buffers, at most 12.

    Buffers with different lifetimes share addresses. A buffer that overlaps a larger one is
    omitted, so that the sizes add up.
    """
    reports = sorted(scratch.glob("*after_optimizations-buffer-assignment.txt"))
    if not reports:
        return []
    by_name = {i.name: i for instructions in module.computations.values() for i in instructions}
    pieces: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for name, size, offset, shape in _temporaries(
        max(reports, key=lambda path: path.stat().st_size).read_text()
    ):
        pieces.setdefault((size, offset), []).append((shape, name))
    chosen: list[tuple[int, int]] = []
    buffers = []
    for size, offset in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        if any(offset < o + s and o < offset + size for s, o in chosen):
            continue
        chosen.append((size, offset))
        values = pieces[size, offset]
        names = [by_name[name].op_name for _, name in values if name in by_name]
        buffers.append(
            {
                "bytes": size,
                "shapes": list(dict.fromkeys(shape for shape, _ in values))[:_SHAPES_OF_A_BUFFER],
                "op_name": next((name for name in names if name), ""),
            }
        )
    return buffers[:_NUM_BUFFERS]


def _temporaries(report: str) -> list[tuple[str, int, int, str]]:
    """Return (instruction, size, offset, shape) of every temporary value on the device."""
    values, inside = [], False
    for line in report.splitlines():
        if line.startswith("allocation "):
            inside = "preallocated-temp" in line
        elif inside and (value := _VALUE.search(line)) and ON_HOST not in value[5]:
            shape = re.sub(r"\{[^}]*\}", "", value[5])
            values.append((value[1], int(value[3]), int(value[4]), shape))
    return values


def _attention(parts: Any, calls: list[tuple[str, HloInstruction]]) -> str:
    if any(name.startswith("__cudnn$fmha") for name, _ in calls):
        return "cudnn"
    return "xla" if parts.model.unit == "tokens" else ""


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


if __name__ == "__main__":
    sys.exit(main())
