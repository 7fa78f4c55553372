"""Environment variables that hurt: leftovers of debugging, and what turns fast paths off.

`check_variables` is a pure function of a mapping. `unreadable_flags` asks a child process, because
a flag that XLA does not know ends the process that starts a device.
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
    """A variable (or a flag inside XLA_FLAGS), the values that hurt, and why."""

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


def _is_more_than_one_pass(precision: str) -> bool:
    return precision.lower() in ("highest", "float32", "tensorfloat32", "high", "bfloat16_3x")


def _has_collectives(commands: str) -> bool:
    return "COLLECTIVES" in commands.upper() and "-COLLECTIVES" not in commands.upper()


def _below(limit: float) -> Callable[[str], bool]:
    return lambda value: bool(re.fullmatch(r"0?\.\d+|\d+", value)) and float(value) < limit


# Tables: name, values that hurt, severity, and below them the reason.
_WITHOUT_GPUS = (
    Risk("JAX_DISABLE_JIT", _is_on, "error", "nothing is compiled: every operation runs by itself"),
    Risk("JAX_DEBUG_NANS", _is_on, "warning", "every result is fetched and looked at"),
    Risk("JAX_DEBUG_INFS", _is_on, "warning", "every result is fetched and looked at"),
    Risk("JAX_ENABLE_CHECKS", _is_on, "warning", "jax checks itself at every operation"),
    Risk("JAX_CHECK_TRACER_LEAKS", _is_on, "warning", "tracing is slow and keeps memory"),
    Risk("JAX_LOG_COMPILES", _is_on, "note", "the log fills with compilations"),
    Risk("JAX_ENABLE_X64", _is_on, "warning", "stray float64 arithmetic is slow and takes memory"),
    Risk("JAX_DEFAULT_MATMUL_PRECISION", _is_more_than_one_pass, "note",
         "products take more passes than precision.compute_dtype asks for"),
    Risk("JAX_ENABLE_COMPILATION_CACHE", _is_off, "note",
         "jaxdist turns the cache on again: JAXDIST_CACHE=off means it"),
    Risk("JAX_ENABLE_RECOVERABILITY", _is_on, "warning",
         "a process that died does not end the others: they wait for it in a collective"),
    Risk("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", _is_off, "note", "peers hang longer"),
    Risk("TF_CPP_MIN_LOG_LEVEL", lambda v: v.isdigit() and int(v) >= 3, "note",
         "the compiler's errors are not printed"),
)  # fmt: skip

_WITH_GPUS = (
    Risk("XLA_PYTHON_CLIENT_PREALLOCATE", _is_off, "warning",
         "memory is taken piece by piece: it fragments, and a run that fits may not"),
    Risk("XLA_PYTHON_CLIENT_ALLOCATOR", lambda v: v.startswith(("platform", "vmm", "cuda_async")),
         "warning", "fast steps count on the default allocator; `platform` allocates every array"),
    Risk("XLA_PYTHON_CLIENT_MEM_FRACTION", _below(0.8), "warning",
         "the run gets this share of a GPU's memory, not our default of 0.92"),
    Risk("TF_FORCE_UNIFIED_MEMORY", _is_on, "warning", "what does not fit is paged to the host"),
    Risk("CUDA_LAUNCH_BLOCKING", _is_on, "warning", "the host waits for every kernel"),
    Risk("CUDA_DEVICE_ORDER", lambda v: v == "FASTEST_FIRST", "note",
         "numbers in CUDA_VISIBLE_DEVICES do not mean what nvidia-smi prints"),
    Risk("NCCL_P2P_DISABLE", _is_on, "warning", "GPUs of a host talk through its memory"),
    Risk("NCCL_SHM_DISABLE", _is_on, "warning", "GPUs without peer access talk through sockets"),
    Risk("NCCL_IB_DISABLE", _is_on, "warning", "hosts talk over TCP, not InfiniBand or RoCE"),
    Risk("NCCL_NVLS_ENABLE", _is_off, "note", "the switches do not add up (NVLink SHARP)"),
    Risk("NCCL_NET", lambda v: v.lower() == "socket", "warning", "hosts talk over TCP"),
    Risk("NCCL_NET_GDR_LEVEL", lambda v: v.upper() in ("0", "LOC"), "warning",
         "the network cannot read a GPU's memory: every byte goes through the host's"),
    Risk("NCCL_P2P_LEVEL", lambda v: v.upper() in ("0", "LOC"), "warning",
         "GPUs of a host talk through its memory"),
    Risk("NCCL_ALGO", _is_set, "note", "NCCL may not choose the algorithm by size"),
    Risk("NCCL_PROTO", _is_set, "note", "NCCL may not choose the protocol by size"),
    Risk("NCCL_DEBUG", lambda v: v.upper() in ("INFO", "TRACE"), "note",
         "NCCL writes a great deal to stdout"),
)  # fmt: skip

_FLAGS = (
    Risk("xla_force_host_platform_device_count", _is_set, "warning",
         "makes CPU devices in every process, in addition to those of --simulate N"),
    Risk("xla_dump_to", _is_set, "warning", "every compilation writes its programs to disk"),
    Risk("xla_backend_optimization_level", lambda v: v in ("0", "1", "2"), "warning",
         "machine code for the CPU is optimised less"),
    Risk("xla_gpu_autotune_level", lambda v: v == "0", "warning", "no kernel is chosen by time"),
    Risk("xla_gpu_enable_latency_hiding_scheduler", _is_off, "warning",
         "collectives do not hide behind computation"),
    Risk("xla_gpu_deterministic_ops", _is_on, "note", "slower kernels; others measured 15 %"),
    Risk("xla_gpu_exclude_nondeterministic_ops", _is_on, "note",
         "slower kernels; others measured 15 %"),
    Risk("xla_disable_hlo_passes", _is_set, "warning", "optimisations are left out"),
    Risk("xla_gpu_enable_command_buffer", _has_collectives, "warning",
         "collectives in CUDA graphs have been seen to hang after hundreds of steps"),
    Risk("xla_gpu_experimental_use_ragged_dot_fusion", _is_on, "error",
         "ends the process with recent versions of cuDNN"),
    Risk("xla_gpu_enable_dynamic_slice_fusion", _is_on, "error",
         "the train step does not compile with it"),
)  # fmt: skip


def flags_of(text: str) -> dict[str, str]:
    """`--name=value --other` as a mapping; a flag without a value is "true"."""
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
    """Every variable that hurts a run on this host, with `num_gpus` GPUs and network `interfaces`.

    `environ` is as the user's shell made it, before jaxdist sets variables of its own. A
    `simulated` run asks for CPU devices.
    """
    on_gpus = num_gpus > 0 and not simulated
    flags = flags_of(environ.get("XLA_FLAGS", ""))
    rules = _WITHOUT_GPUS + (_WITH_GPUS if on_gpus else ())
    found = [
        Finding(rule.severity, CHECK, f"{rule.name}={value}: {rule.why}", f"unset {rule.name}")
        for rule in rules
        if (value := environ.get(rule.name)) is not None and rule.hurts(value)
    ]
    found += [
        Finding(
            rule.severity,
            CHECK,
            f"XLA_FLAGS has --{rule.name}={value}: {rule.why}",
            "take it out of XLA_FLAGS",
        )
        for rule in _FLAGS
        if (value := flags.get(rule.name)) is not None and rule.hurts(value)
    ]
    if on_gpus:
        found += _hidden_gpus(environ, num_gpus)
        found += _interface(environ.get("NCCL_SOCKET_IFNAME", ""), num_hosts, interfaces)
        found += _other_libraries(environ)
    found += _proxies(environ, coordinator_address)
    return found or [ok(CHECK, "no variable that hurts")]


def _hidden_gpus(environ: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not any(name in platforms for name in ("cuda", "gpu")):
        yield error(
            CHECK,
            f"JAX_PLATFORMS={platforms}: the run would not use the {num_gpus} GPU(s) of this host",
            "unset JAX_PLATFORMS, or ask for CPU devices with --simulate N",
        )
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield error(
            CHECK,
            f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} hides the {num_gpus} GPU(s) "
            "of this host",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs in it",
        )


def _interface(name: str, num_hosts: int, interfaces: Sequence[str]) -> Iterator[Finding]:
    """NCCL reads `ib` as a prefix, `=ib0` as a name, `^lo` as all but these."""
    if not name or name.startswith("^"):
        return
    exact, wanted = name.startswith("="), name.lstrip("=").split(",")
    matches = [i for i in interfaces for w in wanted if i == w or (not exact and i.startswith(w))]
    if interfaces and not matches:
        yield error(
            CHECK,
            f"NCCL_SOCKET_IFNAME={name} names no interface of this host, which has "
            f"{', '.join(interfaces)}: NCCL would not start",
            "unset it, or name one of these",
        )
    if num_hosts > 1 and set(matches) == {"lo"}:
        yield error(
            CHECK,
            f"NCCL_SOCKET_IFNAME={name} is the loopback interface, which reaches no other host",
            "unset it, or name the interface between the hosts",
        )


def _other_libraries(environ: Mapping[str, str]) -> Iterator[Finding]:
    """CUDA libraries in LD_LIBRARY_PATH are found before those that were installed with jax."""
    for folder in filter(os.path.isdir, environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted(os.listdir(folder))
        clash = [n for n in names if re.match(r"lib(cudnn|nccl|cublas|cudart)\.so", n)]
        if clash:
            yield warning(
                CHECK,
                f"LD_LIBRARY_PATH has {folder} with {clash[0]}: it is loaded instead of the one "
                "that was installed with jax",
                f"take {folder} out of LD_LIBRARY_PATH",
            )


def _proxies(environ: Mapping[str, str], coordinator_address: str) -> Iterator[Finding]:
    """GRPC asks these proxies, in this order; `no_grpc_proxy`, then `no_proxy` exempt hosts."""
    given = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if environ.get(name)]
    host = coordinator_address.rpartition(":")[0]
    exempt = environ.get("no_grpc_proxy") or environ.get("no_proxy", "")
    suffixes = tuple(part.strip().lstrip("*") for part in exempt.split(",") if part.strip())
    if given and host and not host.endswith(suffixes):
        no_proxy = ",".join(filter(None, (environ.get("no_proxy", ""), host)))
        yield note(
            CHECK,
            f"{given[0]}={environ[given[0]]} would catch the coordinator {coordinator_address}; "
            "jaxdist goes around it, other programs of the job may not",
            f"export no_proxy={no_proxy}",
        )


def unreadable_flags(environ: Mapping[str, str], timeout_s: float = 120) -> list[Finding]:
    """Whether this XLA knows every flag of XLA_FLAGS; it would end the run's process otherwise."""
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
    said = next((line for line in lines if "nknown flag" in line), (lines or ["no message"])[-1])
    said = said[said.find("nknown flag") - 1 :] if "nknown flag" in said else said
    return [
        error(
            CHECK,
            f"XLA_FLAGS={environ['XLA_FLAGS']} ends what starts jax: {said.strip()[:200]}",
            "take out the flags that this version does not know",
        )
    ]
