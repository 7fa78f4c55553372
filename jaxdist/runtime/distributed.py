"""Join a job: connect the processes, check that they agree, and list their devices."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform as machine
import re
import resource
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.runtime.cluster_environment import (
    JoinPlan,
    RuntimeConfig,
    is_loopback,
    listed_gpus,
    resolve,
    visible_gpus,
)
from jaxdist.runtime.coordination import decide_from
from jaxdist.runtime.coordination.failure_broadcast import watch_failures
from jaxdist.runtime.formatting.tables import columns, few
from jaxdist.runtime.logs import divert_c_stdout
from jaxdist.runtime.rendezvous import wait_for_all
from jaxdist.settings import ConfigError

if TYPE_CHECKING:
    import jax

    from jaxdist.runtime.signals import Preemption

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device of the job; `device` is its index in its process, `uuid` is "" if unknown."""

    process: int
    host: str
    device: int
    kind: str
    uuid: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedJob:
    """This process and its job.

    Attributes:
        platform: "cpu" or "gpu".
        devices: of the job in process 0, of this process elsewhere.
        host_runs: (host, number of consecutive processes on it), in the order of the processes.
        source: launcher of the processes.
        attempt: number of restarts of the job.
    """

    process_id: int
    num_processes: int
    host: str
    local_devices: tuple[jax.Device, ...]
    devices: tuple[DeviceRow, ...]
    host_runs: tuple[tuple[str, int], ...]
    platform: str
    source: str
    attempt: int

    @property
    def num_devices(self) -> int:
        """Number of devices of the job."""
        return self.num_processes * len(self.local_devices)

    @property
    def host_of(self) -> dict[int, str]:
        """Process id -> name of its host."""
        return dict(enumerate(host for host, count in self.host_runs for _ in range(count)))

    def table(self) -> str:
        """Return a table of `devices`: a row per device, or per process if UUIDs are unknown."""
        lines: dict[tuple[str, ...], list[int]] = {}
        for row in self.devices:  # rows of devices without a UUID differ only in the index
            line = (str(row.process), row.host, row.kind, row.uuid or "-")
            lines.setdefault(line, []).append(row.device)
        rows = [("process", "host", "device", "kind", "uuid")]
        for (process, host, kind, uuid), ids in lines.items():
            devices = f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0])
            rows.append((process, host, devices, kind, uuid))
        return "\n".join(columns(rows, left=5))


def join(
    settings: RuntimeConfig | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    same: Mapping[str, str] | None = None,
    stop: Preemption | None = None,
) -> JoinedJob:
    """Connect this process to its job and start its devices, after all agree.

    The processes compare versions, code, settings and GPUs before devices start, then devices.
    `same` maps each setting that must be equal in all processes to its text. A request to `stop`
    ends the wait with `SystemExit` (code 75). Raises `ConfigError` for wrong settings or variables,
    and in every process if they differ; `RendezvousError` if processes are missing or the port is
    taken (a restart may succeed).
    """
    environ = os.environ if environ is None else environ
    # Number the GPUs as nvidia-smi does.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    settings = settings or RuntimeConfig()
    gpus = _gpus_of_host() if _wants_gpu() else []
    plan = resolve(environ, settings, num_gpus=len(gpus))
    if plan.num_processes > 1:
        plan = _one_slice(plan, gpus)
        with stop.at_once() if stop else contextlib.nullcontext():
            _connect(plan, settings, on_cpu=not gpus)
        watch_failures()
    _check_settings(dict(same or {}), settings.join_timeout_s)
    return _start_devices(plan, gpus, settings.join_timeout_s)


def _connect(plan: JoinPlan, settings: RuntimeConfig, *, on_cpu: bool) -> None:
    import jax

    # If jax's C++ threads abort, each CPU process would write a core file of 300 MB.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    host = plan.coordinator_address.rsplit(":", 1)[0]
    if on_cpu:
        _check_gloo_address(plan)
    if "NCCL_DEBUG" not in os.environ:
        divert_c_stdout(os.devnull)  # gloo prints to stdout; setup_logging redirects it
    # Never use a proxy between processes of a job; gRPC would hang.
    jax.config.update("jax_check_proxy_envs", False)
    name = "no_grpc_proxy"  # gRPC uses lower case
    os.environ[name] = ",".join(part for part in (os.environ.get(name), host) if part)
    bind_address = wait_for_all(plan, settings.join_timeout_s)
    jax.distributed.initialize(
        plan.coordinator_address,
        plan.num_processes,
        plan.process_id,
        local_device_ids=list(plan.local_device_ids or ()),
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
        initialization_timeout=settings.join_timeout_s,
        heartbeat_timeout_seconds=settings.heartbeat_timeout_s,
    )


def _check_gloo_address(plan: JoinPlan) -> None:
    """Reject a host whose name resolves to loopback: gloo would send this address to its peers."""
    if plan.num_hosts <= 1:
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return
    if is_loopback(address):
        raise ConfigError(
            f"host {name} resolves its own name to the loopback address {address}, which CPU "
            f"processes on other hosts would use. Remove this entry from /etc/hosts on {name}."
        )


def _wants_gpu() -> bool:
    import jax

    platforms = getattr(jax.config, "jax_platforms", None) or ""
    return not platforms or any(name in platforms for name in ("cuda", "gpu"))


def _gpus_of_host() -> list[str]:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    slices = re.findall(r"UUID: (MIG-[^)]+)\)", listing)
    return slices or re.findall(r"UUID: (GPU-[^)]+)\)", listing)


def _own_gpus(plan: JoinPlan, gpus: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of this process's GPUs; "" for a GPU without known UUID."""
    visible = visible_gpus(environ)
    uuids = []
    for entry in [str(i) for i in range(len(gpus))] if visible is None else visible:
        if not entry.isdigit():
            uuids.append(next((uuid for uuid in gpus if uuid.startswith(entry)), entry))
        else:
            uuids.append(gpus[int(entry)] if int(entry) < len(gpus) else "")
    if plan.local_device_ids is not None:
        uuids = [uuids[i] for i in plan.local_device_ids if i < len(uuids)]
    return uuids


def _one_slice(plan: JoinPlan, gpus: list[str]) -> JoinPlan:
    """Make only a process's MIG slice, if any, visible: CUDA uses only the first of several."""
    visible = listed_gpus(os.environ)
    entries = gpus if visible is None else visible
    if plan.local_device_ids is None or not any(entry.startswith("MIG-") for entry in entries):
        return plan
    if len(plan.local_device_ids) > 1:
        raise ConfigError(
            f"{plan.num_local_processes} processes share {len(entries)} MIG slices on "
            f"{socket.gethostname()}, but a process can use one slice. Start {len(entries)} "
            "processes per host."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = entries[plan.local_device_ids[0]]
    return dataclasses.replace(plan, local_device_ids=None)


def _start_devices(plan: JoinPlan, gpus: list[str], timeout_s: int) -> JoinedJob:
    import jax

    host = socket.gethostname()
    uuids = _own_gpus(plan, gpus, os.environ) if gpus else []
    software: dict[str, Any] = {"host": host, "versions": versions(), "gpus": uuids}
    decide_from("process", software, _check_processes, timeout_s)
    local = tuple(jax.local_devices())
    platform = local[0].platform
    own = uuids if platform == "gpu" and len(uuids) == len(local) else [""] * len(local)
    rows = [
        {"host": host, "device": i, "kind": device.device_kind, "uuid": own[i]}
        for i, device in enumerate(local)
    ]
    devices: list[DeviceRow] = []

    def compare(everyone: list[dict[str, Any]]) -> list[list[Any]]:
        """Check all devices; return [host, number of consecutive processes on it] in order."""
        _check_devices(everyone)
        for process, reply in enumerate(everyone):
            devices.extend(DeviceRow(process=process, **row) for row in reply["rows"])
        names = itertools.groupby(reply["rows"][0]["host"] for reply in everyone)
        return [[name, len(list(group))] for name, group in names]

    facts = {"platform": platform, "rows": rows, "expected": uuids}
    runs = decide_from("devices", facts, compare, timeout_s)
    return JoinedJob(
        process_id=plan.process_id,
        num_processes=plan.num_processes,
        host=host,
        local_devices=local,
        devices=tuple(devices or [DeviceRow(process=plan.process_id, **row) for row in rows]),
        host_runs=tuple((name, count) for name, count in runs),
        platform=platform,
        source=plan.source,
        attempt=plan.attempt,
    )


_EQUAL_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxdist"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


def versions() -> dict[str, str]:
    """Return name -> version of Python, packages and our code, which all processes compare."""
    own = {"python": machine.python_version(), "jaxdist's code": code_digest()}
    return {**own, **installed_versions(_EQUAL_PACKAGES)}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return package -> version, for the installed packages only."""
    installed = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def code_digest(package: Path = Path(__file__).parents[1]) -> str:
    """Return a digest of a package's sources, because edits do not change the version number."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _check_settings(same: dict[str, str], timeout_s: int) -> None:
    """Reject settings that differ between processes; if equal, only digests are exchanged."""
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
    if not decide_from("settings", digest, lambda digests: len(set(digests)) == 1, timeout_s):
        facts = {"host": socket.gethostname(), "same": same}
        decide_from("different settings", facts, _reject_settings, timeout_s)


def _reject_settings(everyone: list[dict[str, Any]]) -> None:
    problems = []
    for name in sorted({name for reply in everyone for name in reply["same"]}):
        values = [reply["same"].get(name, "(nothing)") for reply in everyone]
        common, odd = odd_ones(values)
        if odd:
            which = few([f"{values[i]} in process {i} on {everyone[i]['host']}" for i in odd], 4)
            problems.append(
                f"{name} differs between processes: {common} in {len(everyone) - len(odd)}, but "
                f"{which}. Start all processes with the same flags and the same --config file."
            )
    raise ConfigError(problems)


def _check_processes(everyone: list[dict[str, Any]]) -> None:
    """Reject mixed versions and GPUs used twice, before any device starts."""
    problems = []
    for package in sorted({name for reply in everyone for name in reply["versions"]}):
        versions = [reply["versions"].get(package, "none") for reply in everyone]
        if package == "python":
            versions = [version.rpartition(".")[0] for version in versions]
        common, odd = odd_ones(versions)
        if odd:
            which = few([f"{versions[i]} in process {i} on {everyone[i]['host']}" for i in odd], 4)
            problems.append(
                f"{package} {common} in {len(everyone) - len(odd)} processes, but {which}. "
                "Use one environment on all hosts."
            )
    users: dict[str, list[int]] = {}
    for i, reply in enumerate(everyone):
        for uuid in filter(None, reply["gpus"]):
            users.setdefault(uuid, []).append(i)
    for uuid, processes in users.items():
        if len(processes) > 1:
            problems.append(
                f"GPU {uuid} on {everyone[processes[0]]['host']} would be used by processes "
                f"{' and '.join(map(str, processes))}. Start one process per GPU with its own "
                "CUDA_VISIBLE_DEVICES, or one process per host."
            )
    if problems:
        raise ConfigError(problems)


def odd_ones(values: list[str]) -> tuple[str, list[int]]:
    """Return the most common value, and the indices of all other values."""
    common = Counter(values).most_common(1)[0][0]
    return common, [i for i, value in enumerate(values) if value != common]


def _check_devices(everyone: list[dict[str, Any]]) -> None:
    """Reject unequal platforms or counts, and in a job of several processes CPUs for given GPUs."""
    names = [f"process {i} on {reply['rows'][0]['host']}" for i, reply in enumerate(everyone)]
    problems = [
        f"{name} was given {len(reply['expected'])} GPU(s) but jax sees only the CPU. "
        "Install the extra `cuda13` there, or set JAX_PLATFORMS=cpu to train on CPUs."
        for reply, name in zip(everyone, names, strict=True)
        if reply["platform"] == "cpu" and reply["expected"] and len(everyone) > 1
    ]
    shapes = [f"{len(reply['rows'])} {reply['platform']} device(s)" for reply in everyone]
    common, odd = odd_ones(shapes)
    if odd:
        which = few([f"{names[i]} has {shapes[i]}" for i in odd], 4)
        problems.append(
            f"processes must have equal devices: {len(everyone) - len(odd)} have {common}, but "
            f"{which}. Give all as many, by CUDA_VISIBLE_DEVICES, --gpus-per-task or --simulate."
        )
    if problems:
        raise ConfigError(problems)
