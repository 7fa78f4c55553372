"""Check environment variables: debugging leftovers, and values that disable fast paths.

`check_variables` is a pure function of a mapping. `unreadable_flags` starts a child process,
because an unknown flag makes XLA end the process that starts a device.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxdist.tools.doctor.findings import Finding, Severity, error, note, ok, warning

CHECK = "environment"


@dataclasses.dataclass(frozen=True)
class Risk:
    """A variable or a flag in XLA_FLAGS, its harmful values, and the reason."""

    name: str
    hurts: Callable[[str], bool]
    severity: Severity
    why: str


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _is_off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off")


def _is_set(value: str) -> bool:
    return bool(value.strip())


def _below(limit: float) -> Callable[[str], bool]:
    return lambda value: bool(re.fullmatch(r"0?\.\d+|\d+", value)) and float(value) < limit


# Tables: name, harmful values, severity, reason.
_WITHOUT_GPUS = (
    Risk("JAX_DISABLE_JIT", _is_on, "error", "nothing is compiled: operations run separately"),
    Risk("JAX_DEBUG_NANS", _is_on, "warning", "every result is fetched and checked"),
    Risk("JAX_DEBUG_INFS", _is_on, "warning", "every result is fetched and checked"),
    Risk("JAX_ENABLE_CHECKS", _is_on, "warning", "jax runs its own checks at every operation"),
    Risk("JAX_CHECK_TRACER_LEAKS", _is_on, "warning", "tracing is slow and uses more memory"),
    Risk("JAX_LOG_COMPILES", _is_on, "note", "the log fills with compilations"),
    Risk("JAX_ENABLE_X64", _is_on, "warning", "accidental float64 is slow and uses memory"),
    Risk("JAX_DEFAULT_MATMUL_PRECISION",
         lambda v: v.lower() in ("highest", "float32", "tensorfloat32", "high", "bfloat16_3x"),
         "note", "matrix products use more passes than precision.compute_dtype needs"),
    Risk("JAX_ENABLE_COMPILATION_CACHE", _is_off, "note",
         "jaxdist enables the cache anyway: use JAXDIST_CACHE=off"),
    Risk("JAX_ENABLE_RECOVERABILITY", _is_on, "warning",
         "processes do not end when one dies: they wait for it in a collective"),
    Risk("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", _is_off, "note", "peers hang longer"),
    Risk("TF_CPP_MIN_LOG_LEVEL", lambda v: v.isdigit() and int(v) >= 3, "note",
         "the compiler's errors are not printed"),
)  # fmt: skip

_WITH_GPUS = (
    Risk("XLA_PYTHON_CLIENT_PREALLOCATE", _is_off, "warning",
         "memory is allocated on demand: it fragments, and a run that fits may not"),
    Risk("XLA_PYTHON_CLIENT_ALLOCATOR", lambda v: v.startswith(("platform", "vmm", "cuda_async")),
         "warning", "steps are fast only with the default allocator; `platform` is slow"),
    Risk("XLA_PYTHON_CLIENT_MEM_FRACTION", _below(0.8), "warning",
         "the run gets this share of GPU memory instead of the default 0.92"),
    Risk("TF_FORCE_UNIFIED_MEMORY", _is_on, "warning", "what does not fit is paged to the host"),
    Risk("CUDA_LAUNCH_BLOCKING", _is_on, "warning", "the host waits for every kernel"),
    Risk("CUDA_DEVICE_ORDER", lambda v: v == "FASTEST_FIRST", "note",
         "CUDA_VISIBLE_DEVICES numbers GPUs differently from nvidia-smi"),
    Risk("NCCL_P2P_DISABLE", _is_on, "warning", "GPUs of a host communicate through host memory"),
    Risk("NCCL_SHM_DISABLE", _is_on, "warning", "GPUs without peer access use sockets"),
    Risk("NCCL_IB_DISABLE", _is_on, "warning", "hosts use TCP, not InfiniBand or RoCE"),
    Risk("NCCL_NVLS_ENABLE", _is_off, "note", "the switches do not reduce (NVLink SHARP)"),
    Risk("NCCL_NET", lambda v: v.lower() == "socket", "warning", "hosts use TCP"),
    Risk("NCCL_NET_GDR_LEVEL", lambda v: v.upper() in ("0", "LOC"), "warning",
         "no GPUDirect RDMA: every byte is copied through host memory"),
    Risk("NCCL_P2P_LEVEL", lambda v: v.upper() in ("0", "LOC"), "warning",
         "GPUs of a host communicate through host memory"),
    Risk("NCCL_ALGO", _is_set, "note", "NCCL cannot choose the algorithm by size"),
    Risk("NCCL_PROTO", _is_set, "note", "NCCL cannot choose the protocol by size"),
    Risk("NCCL_DEBUG", lambda v: v.upper() in ("INFO", "TRACE"), "note",
         "NCCL prints a lot to stdout"),
)  # fmt: skip

_FLAGS = (
    Risk("xla_force_host_platform_device_count", _is_set, "warning",
         "creates CPU devices in every process, in addition to --simulate N"),
    Risk("xla_dump_to", _is_set, "warning", "every compilation writes its programs to disk"),
    Risk("xla_backend_optimization_level", lambda v: v in ("0", "1", "2"), "warning",
         "CPU code is optimized less"),
    Risk("xla_gpu_autotune_level", lambda v: v == "0", "warning", "kernels are not autotuned"),
    Risk("xla_gpu_enable_latency_hiding_scheduler", _is_off, "warning",
         "collectives do not overlap with computation"),
    Risk("xla_gpu_deterministic_ops", _is_on, "note", "slower kernels; others measured 15 %"),
    Risk("xla_gpu_exclude_nondeterministic_ops", _is_on, "note",
         "slower kernels; others measured 15 %"),
    Risk("xla_disable_hlo_passes", _is_set, "warning", "optimizations are skipped"),
    Risk("xla_gpu_enable_command_buffer",
         lambda v: "COLLECTIVES" in v.upper() and "-COLLECTIVES" not in v.upper(), "warning",
         "collectives in CUDA graphs can hang after hundreds of steps"),
    Risk("xla_gpu_experimental_use_ragged_dot_fusion", _is_on, "error",
         "ends the process with recent versions of cuDNN"),
    Risk("xla_gpu_enable_dynamic_slice_fusion", _is_on, "error",
         "the train step does not compile with it"),
)  # fmt: skip


def flags_of(text: str) -> dict[str, str]:
    """Return name -> value in `--name=value --other`; a flag without a value is "true"."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    pairs = [word.lstrip("-").partition("=") for word in words if word.startswith("-")]
    return {name: value if equals else "true" for name, equals, value in pairs}


def check_variables(
    environ: Mapping[str, str],
    *,
    num_gpus: int,
    simulated: bool = False,
    coordinator_address: str = "",
    num_hosts: int = 1,
    interfaces: Sequence[str] = (),
) -> list[Finding]:
    """Return a finding for each harmful variable of this host; if none, an "ok".

    `environ` is the environment before jaxdist sets variables of its own. `interfaces` are the
    host's network interfaces. A `simulated` run uses CPU devices.
    """
    on_gpus = num_gpus > 0 and not simulated
    flags = flags_of(environ.get("XLA_FLAGS", ""))
    rules = _WITHOUT_GPUS + (_WITH_GPUS if on_gpus else ())
    results = [
        Finding(rule.severity, CHECK, f"{rule.name}={value}: {rule.why}", f"unset {rule.name}")
        for rule in rules
        if (value := environ.get(rule.name)) is not None and rule.hurts(value)
    ]
    results += [
        Finding(
            rule.severity,
            CHECK,
            f"XLA_FLAGS has --{rule.name}={value}: {rule.why}",
            "remove it from XLA_FLAGS",
        )
        for rule in _FLAGS
        if (value := flags.get(rule.name)) is not None and rule.hurts(value)
    ]
    if on_gpus:
        results += _hidden_gpus(environ, num_gpus)
        results += _interface(environ.get("NCCL_SOCKET_IFNAME", ""), num_hosts, interfaces)
        results += _other_libraries(environ)
    results += _proxies(environ, coordinator_address)
    return results or [ok(CHECK, "no harmful variable")]


def _hidden_gpus(environ: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not any(name in platforms for name in ("cuda", "gpu")):
        yield error(
            CHECK,
            f"JAX_PLATFORMS={platforms}: the run would not use the {num_gpus} GPU(s) of this host",
            "unset JAX_PLATFORMS, or use CPU devices with --simulate N",
        )
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield error(
            CHECK,
            f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} hides the {num_gpus} GPU(s) "
            "of this host",
            "unset CUDA_VISIBLE_DEVICES, or list GPUs in it",
        )


def _interface(name: str, num_hosts: int, interfaces: Sequence[str]) -> Iterator[Finding]:
    """Yield errors in NCCL_SOCKET_IFNAME: `ib` is a prefix, `=ib0` a name, `^lo` an exclusion."""
    if not name or name.startswith("^"):
        return
    exact, names = name.startswith("="), name.lstrip("=").split(",")
    matches = [i for i in interfaces for n in names if i == n or (not exact and i.startswith(n))]
    if interfaces and not matches:
        yield error(
            CHECK,
            f"NCCL_SOCKET_IFNAME={name} matches no interface of this host "
            f"({', '.join(interfaces)}): NCCL would not start",
            "unset it, or use one of these",
        )
    if num_hosts > 1 and set(matches) == {"lo"}:
        yield error(
            CHECK,
            f"NCCL_SOCKET_IFNAME={name} is the loopback interface, which other hosts cannot reach",
            "unset it, or use the interface between the hosts",
        )


def _other_libraries(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning per folder of LD_LIBRARY_PATH whose CUDA libraries replace jax's own."""
    for folder in filter(os.path.isdir, environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted(os.listdir(folder))
        clash = [n for n in names if re.match(r"lib(cudnn|nccl|cublas|cudart)\.so", n)]
        if clash:
            yield warning(
                CHECK,
                f"LD_LIBRARY_PATH has {folder} with {clash[0]}, which is loaded instead of the one "
                "installed with jax",
                f"remove {folder} from LD_LIBRARY_PATH",
            )


def _proxies(environ: Mapping[str, str], coordinator_address: str) -> Iterator[Finding]:
    """Yield a note if a proxy that gRPC uses applies to the coordinator, not exempt by no_proxy."""
    proxies = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if environ.get(name)]
    host = coordinator_address.rpartition(":")[0]
    exempt = environ.get("no_grpc_proxy") or environ.get("no_proxy", "")
    suffixes = tuple(part.strip().lstrip("*") for part in exempt.split(",") if part.strip())
    if proxies and host and not host.endswith(suffixes):
        no_proxy = ",".join(filter(None, (environ.get("no_proxy", ""), host)))
        yield note(
            CHECK,
            f"{proxies[0]}={environ[proxies[0]]} applies to the coordinator {coordinator_address}; "
            "jaxdist bypasses the proxy, but other programs of the job might use it",
            f"export no_proxy={no_proxy}",
        )


def unreadable_flags(environ: Mapping[str, str], timeout_s: float = 120) -> list[Finding]:
    """Return an error if XLA rejects XLA_FLAGS, which would end the run's process."""
    if not environ.get("XLA_FLAGS"):
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env={**environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return []
    if done.returncode == 0:
        return []
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    message = next((line for line in lines if "nknown flag" in line), (lines or ["no message"])[-1])
    message = message[max(message.find("nknown flag") - 1, 0) :].strip()
    return [
        error(
            CHECK,
            f"XLA_FLAGS={environ['XLA_FLAGS']} prevents jax from starting: {message[:200]}",
            "remove the flags that this version does not support",
        )
    ]
