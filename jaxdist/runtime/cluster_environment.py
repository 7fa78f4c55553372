"""Derive a `JoinPlan` from the environment variables of launchers and schedulers.

All functions are pure: they open no socket, read no file and do not import jax.

| started by | main variables |
|---|---|
| `jaxdist.launch` | `JAXDIST_COORDINATOR_ADDRESS`, `_NUM_PROCESSES`, `_PROCESS_ID`, `_LOCAL_*` |
| Kubeflow Trainer, JAX | `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` |
| Kubeflow JAXJob | `COORDINATOR_ADDRESS`, `COORDINATOR_PORT`, `NUM_PROCESSES`, `PROCESS_ID` |
| PyTorchJob, torchrun | `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK` |
| Kubernetes indexed Job, JobSet | `JOB_COMPLETION_INDEX`; set `JAXDIST_COORDINATOR_ADDRESS` and |
| | `JAXDIST_NUM_PROCESSES` in the pod's environment |
| `mpirun` of Open MPI | `OMPI_COMM_WORLD_SIZE`, `_RANK`, `_LOCAL_SIZE`, `_LOCAL_RANK` |
| MPICH, Intel MPI, MVAPICH, PALS, | the rank and size variables in `_MPI`; set |
| `jsrun`, Flux, PMIx | `JAXDIST_COORDINATOR_ADDRESS`, for PMIx also `JAXDIST_NUM_PROCESSES` |
| `srun` | `SLURM_STEP_NODELIST`, `SLURM_NTASKS`, `SLURM_PROCID`, `SLURM_LOCALID` |

The first matching row wins. The launcher closest to the process comes first, because a process
also inherits the variables of outer launchers. Variables of several processes that are incomplete
raise an error if the process would otherwise run alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import re
import zlib
from collections.abc import Mapping

from jaxdist.settings import ConfigError, setting

DEFAULT_PORT = 29400
"""Default port of the coordinator, outside Linux's ephemeral range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Settings with which a process joins its job."""

    coordinator_address: str = setting(
        "", "host:port at which process 0 listens; empty: from the environment"
    )
    num_processes: int = setting(
        0,
        "processes in the job; 0 = from the environment; 1 = ignore the environment and run alone",
        ge=0,
    )
    process_id: int = setting(-1, "index of this process, from 0; -1: from the environment", ge=-1)
    join_timeout_s: int = setting(300, "seconds to wait for all processes to join", ge=1)
    heartbeat_timeout_s: int = setting(
        30, "seconds without a heartbeat after which a process counts as dead", ge=1
    )

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; lower bounds are checked elsewhere."""
        errors = []
        explicit = (bool(self.coordinator_address), self.num_processes > 0, self.process_id >= 0)
        if self.num_processes != 1 and not all(explicit) and any(explicit):
            errors.append(
                f"runtime.coordinator_address={self.coordinator_address!r}, "
                f"num_processes={self.num_processes} and process_id={self.process_id} must be "
                "set together. Give all three, or none to read the environment."
            )
        elif all(explicit) and self.process_id >= self.num_processes:
            errors.append(
                f"runtime.process_id={self.process_id} is not in a job of "
                f"{self.num_processes} processes. Use 0 to {self.num_processes - 1}."
            )
        if self.coordinator_address and not is_address(self.coordinator_address):
            errors.append(
                f"runtime.coordinator_address={self.coordinator_address!r} is not host:port. "
                "Use e.g. node001:29400, with a port from 1 to 65535."
            )
        return errors


def is_address(text: str) -> bool:
    """Return whether a text is host:port; an IPv6 host needs brackets."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]+):([0-9]{1,5})", text)
    return match is not None and 1 <= int(match[2]) <= 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinPlan:
    """Settings with which one process joins its job.

    Attributes:
        source: launcher, for messages.
        coordinator_address: host:port of process 0; empty if alone.
        num_hosts: hosts of the job; num_local_processes: processes on this host; 0 = unknown.
        local_device_ids: indices of this process's GPUs among the visible ones; None: all.
        attempt: number of restarts of the job.
        token: `JAXDIST_JOB_TOKEN` (a secret), else the job's name in SLURM or Open MPI, if any.
    """

    source: str = "alone"
    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str = ""
    num_hosts: int = 1
    num_local_processes: int = 1
    local_process_id: int = 0
    local_device_ids: tuple[int, ...] | None = None
    attempt: int = 0
    token: str = dataclasses.field(default="", repr=False)


def resolve(
    environ: Mapping[str, str], settings: RuntimeConfig | None = None, num_gpus: int = 0
) -> JoinPlan:
    """Return this process's `JoinPlan` from `environ`; the user's `settings` take precedence.

    `num_gpus` is the number of GPUs that this process sees, 0 if unknown. It matters only if
    several processes share a host without `CUDA_VISIBLE_DEVICES`.
    """
    settings = settings or RuntimeConfig()
    if settings.num_processes > 0:
        plan = _from_flags(environ, settings)
    else:
        plan = _from_environment(environ)
    if not 0 <= plan.process_id < plan.num_processes:
        raise ConfigError(
            f"{plan.source}: process id {plan.process_id} is not in a job of "
            f"{plan.num_processes} processes. Number them from 0 to {plan.num_processes - 1}."
        )
    if plan.num_processes == 1:
        return dataclasses.replace(plan, coordinator_address="")
    plan = dataclasses.replace(plan, token=environ.get("JAXDIST_JOB_TOKEN") or plan.token)
    _check(plan)
    return dataclasses.replace(plan, local_device_ids=_local_devices(environ, plan, num_gpus))


def listed_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the valid entries of `CUDA_VISIBLE_DEVICES`, to divide among processes; None if unset.

    Entries are numbers, `GPU-…` or `MIG-…`. As in CUDA, the first invalid entry ends the list, and
    a repeated one hides all devices.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    is_valid = re.compile(r"\d+|(GPU|MIG)-.+").fullmatch
    entries = list(itertools.takewhile(is_valid, entries))
    return entries if len(set(entries)) == len(entries) else []


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return what one process can use of `listed_gpus`: all, or the first MIG slice."""
    entries = listed_gpus(environ)
    return entries[:1] if entries and entries[0].startswith("MIG-") else entries


def expand_hosts(hostlist: str) -> list[str]:
    """Expand a SLURM host list: `n[01-03,7]-ib,login` to five names; leading zeros are kept."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hostlist):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item.strip()):
            pieces = [text] if text else _expand_ranges(ranges)
            names = [name + piece for name in names for piece in pieces]
        hosts.extend(names)
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    pieces = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        pieces += [str(n).zfill(len(first)) for n in numbers]
    return pieces


def expand_counts(text: str) -> list[int]:
    """Expand SLURM's counts per node: `2(x3),1` to [2, 2, 2, 1]."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts.extend([int(number)] * int(times or 1))
    return counts


def _from_flags(environ: Mapping[str, str], settings: RuntimeConfig) -> JoinPlan:
    return JoinPlan(
        source="flags",
        num_processes=settings.num_processes,
        process_id=max(0, settings.process_id),
        coordinator_address=settings.coordinator_address,
        num_hosts=0,
        num_local_processes=_number(environ, "JAXDIST_NUM_LOCAL_PROCESSES", 0),
        local_process_id=_number(environ, "JAXDIST_LOCAL_PROCESS_ID", 0),
        attempt=_number(environ, "JAXDIST_ATTEMPT", 0),
    )


def _from_environment(environ: Mapping[str, str]) -> JoinPlan:
    for read in (_from_launch, _from_kubernetes, _from_mpi, _from_slurm):
        if plan := read(environ):
            return plan
    mpi = {size: ("", "", size, rank) for rank, size, *_ in _MPI if size}
    for address, _, processes, process_id in (*_SPELLINGS, *mpi.values()):
        rest = [name for name in (processes, process_id) if name in environ]
        if len(rest) != 1:
            continue
        (name,), single = rest, rest == [processes]  # a job of 1, or process 0, may run alone
        number = environ[name] if name not in _OTHER_USES and environ[name].isdecimal() else "0"
        if address in environ or int(number) > single:
            facts = " and ".join(f"{n}={environ[n]}" for n in (address, name) if n in environ)
            missing = process_id if single else processes
            raise ConfigError(
                f"{facts} set without {missing}: this process would run alone. Set {missing}, or "
                "runtime.num_processes=1 to run one process."
            )
    return JoinPlan(attempt=_number(environ, "JAXDIST_ATTEMPT", 0))


def _from_launch(environ: Mapping[str, str]) -> JoinPlan | None:
    if "JAXDIST_PROCESS_ID" not in environ:
        return None
    return JoinPlan(
        source="jaxdist.launch",
        num_processes=_number(environ, "JAXDIST_NUM_PROCESSES"),
        process_id=_number(environ, "JAXDIST_PROCESS_ID"),
        coordinator_address=environ.get("JAXDIST_COORDINATOR_ADDRESS", ""),
        num_hosts=_number(environ, "JAXDIST_NUM_HOSTS", 0),
        num_local_processes=_number(environ, "JAXDIST_NUM_LOCAL_PROCESSES", 0),
        local_process_id=_number(environ, "JAXDIST_LOCAL_PROCESS_ID", 0),
        attempt=_number(environ, "JAXDIST_ATTEMPT", 0),
    )


_SPELLINGS = (
    # coordinator address, its port, number of processes, process id
    ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"),
    ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
    (
        "JAXDIST_COORDINATOR_ADDRESS",
        "JAXDIST_COORDINATOR_PORT",
        "JAXDIST_NUM_PROCESSES",
        "JOB_COMPLETION_INDEX",
    ),
)

_OTHER_USES = ("NUM_PROCESSES", "PROCESS_ID", "JOB_COMPLETION_INDEX")
"""Names that also describe independent processes; without an address they mean nothing."""


def _from_kubernetes(environ: Mapping[str, str]) -> JoinPlan | None:
    complete = (names for names in _SPELLINGS if names[2] in environ and names[3] in environ)
    names = next(complete, None)
    if names is None:
        return None
    address, port, processes, process_id = names
    num_processes = _number(environ, processes)
    coordinator = environ.get(address, "")
    if not coordinator and num_processes > 1:
        raise ConfigError(
            f"{processes}={num_processes} and {process_id}={environ[process_id]} describe a job, "
            f"but {address} is not set. Set it to the host of process 0."
        )
    num_local_processes = _number(environ, "LOCAL_WORLD_SIZE", 0)
    return JoinPlan(
        source=f"environment ({process_id})",
        num_processes=num_processes,
        process_id=_number(environ, process_id),
        coordinator_address=_with_port(coordinator, _number(environ, port, DEFAULT_PORT)),
        num_hosts=num_processes // num_local_processes if num_local_processes else 0,
        num_local_processes=num_local_processes,
        local_process_id=_number(environ, "LOCAL_RANK", 0),
        attempt=_number(
            environ, "JAXDIST_ATTEMPT", _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
        ),
    )


def _open_mpi_coordinator(environ: Mapping[str, str], one_host: bool) -> str:
    port = _port_of(_open_mpi_job(environ))
    if one_host:
        return f"127.0.0.1:{port}"
    # In most set-ups mpirun and rank 0 run on the first host.
    if match := re.search(r"tcp://([\d.]+)", environ.get("OMPI_MCA_orte_hnp_uri", "")):
        return f"{match[1]}:{port}"
    raise ConfigError(
        "mpirun started processes on several hosts, and the host of rank 0 is unknown. "
        f"Run mpirun -x JAXDIST_COORDINATOR_ADDRESS=<host of rank 0>:{DEFAULT_PORT} ..."
    )


def _open_mpi_job(environ: Mapping[str, str]) -> str:
    # Unique per job: identifies the mpirun process (Open MPI 4) or the job (Open MPI 5).
    return environ.get("OMPI_MCA_orte_hnp_uri", "") or environ.get("PMIX_NAMESPACE", "")


_MPI = (
    # rank, number of processes, rank on the host, processes on the host; "" = not available
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "", "", ""),
)  # fmt: skip


def _from_mpi(environ: Mapping[str, str]) -> JoinPlan | None:
    names = next((names for names in _MPI if names[0] in environ), None)
    if names is None:
        return None
    rank, size, local_rank, local_size = names
    is_open_mpi = rank.startswith("OMPI")
    is_srun = "SLURM_STEP_NODELIST" in environ and environ[rank] == environ.get("SLURM_PROCID")
    if is_srun and not is_open_mpi:  # srun sets the other variables too, with its own ranks
        return None
    num_processes = _number(environ, size, 0) or _number(environ, "JAXDIST_NUM_PROCESSES", 0)
    num_local_processes = _number(environ, local_size, 0)
    is_one_host = num_processes == num_local_processes
    coordinator = _coordinator_of(environ)
    if is_open_mpi and not coordinator and num_processes > 1:
        coordinator = _open_mpi_coordinator(environ, is_one_host)
    if not num_processes or (num_processes > 1 and not coordinator):
        also = "" if num_processes else " and JAXDIST_NUM_PROCESSES"
        raise ConfigError(
            f"{rank}={environ[rank]} describes a job, but this process would run alone. Set "
            f"JAXDIST_COORDINATOR_ADDRESS=<host of rank 0>:{DEFAULT_PORT}{also} in all processes, "
            "or runtime.num_processes=1 to run one process."
        )
    return JoinPlan(
        source="Open MPI" if is_open_mpi else f"environment ({rank})",
        num_processes=num_processes,
        process_id=_number(environ, rank),
        coordinator_address=coordinator,
        num_hosts=1 if is_one_host else 0,
        num_local_processes=num_local_processes,
        local_process_id=_number(environ, local_rank, 0),
        attempt=_number(environ, "JAXDIST_ATTEMPT", 0),
        token=_open_mpi_job(environ) if is_open_mpi else "",
    )


def _from_slurm(environ: Mapping[str, str]) -> JoinPlan | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    attempt = _number(environ, "SLURM_RESTART_COUNT", 0)
    num_processes = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    if "SLURM_STEP_NODELIST" not in environ:
        # The shell of a batch job or salloc is one process, even in a large allocation.
        sizes = ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_HET_SIZE")
        if any(_number(environ, name, 1) > 1 for name in sizes):
            raise ConfigError(
                f"SLURM allocated {environ.get('SLURM_NTASKS', '1')} tasks on "
                f"{environ.get('SLURM_NNODES', '1')} nodes in {environ.get('SLURM_HET_SIZE', '1')} "
                "components, but this process was not started by "
                "srun and would run alone. Put srun before python, or set "
                "runtime.num_processes=1."
            )
        return JoinPlan(source="SLURM (batch shell)", attempt=attempt)
    per_node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    component = sum(per_node) or num_processes
    total = num_processes
    if _number(environ, "SLURM_HET_SIZE", 1) > 1:
        total = _number(environ, "SLURM_NTASKS", total)
    if total > component:
        raise ConfigError(
            f"srun started {total} tasks in several components of a "
            f"heterogeneous job; this one has {component}. Use one (srun --het-group=0), "
            "or set runtime.coordinator_address, num_processes and process_id in each process."
        )
    hosts = _hosts_of_step(environ)
    node = _number(environ, "SLURM_NODEID", 0)
    coordinator = _coordinator_of(environ)
    name = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}.{attempt}"
    if not coordinator:
        # jax's own port depends only on the job id, so steps would share it through SO_REUSEPORT.
        coordinator = f"{hosts[0]}:{_port_of(name)}"
    return JoinPlan(
        source=f"SLURM job {environ['SLURM_JOB_ID']}",
        num_processes=num_processes,
        process_id=_number(environ, "SLURM_PROCID"),
        coordinator_address=coordinator,
        num_hosts=len(hosts),
        num_local_processes=per_node[node] if node < len(per_node) else 0,
        local_process_id=_number(environ, "SLURM_LOCALID", 0),
        attempt=attempt,
        token=name,
    )


def _hosts_of_step(environ: Mapping[str, str]) -> list[str]:
    nodes = environ["SLURM_STEP_NODELIST"]
    hosts: list[str] = []
    with contextlib.suppress(ValueError):  # a range without numbers
        hosts = expand_hosts(nodes)
    if not hosts:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes!r} is not a list of hosts like n[1-2]. Start the job with "
            "srun, and do not change this variable."
        )
    return hosts


def _local_devices(
    environ: Mapping[str, str], plan: JoinPlan, num_gpus: int
) -> tuple[int, ...] | None:
    """Return the indices of this process's GPUs among the visible ones; None = all, or no GPUs.

    The only process of a host, or one of an unknown number, uses all GPUs. So does a process with
    bound GPUs (`--gpus-per-task`, `--gpu-bind`): one, fewer than SLURM's on the host, or its share
    per task. GPUs visible to all processes of the host are divided equally, in order.
    """
    if plan.num_local_processes <= 1:
        return None
    visible = listed_gpus(environ)
    count = num_gpus if visible is None else len(visible)
    if count == 0:
        return None  # CPU
    if visible is not None:
        on_host = _number(environ, "SLURM_GPUS_ON_NODE", 0)
        per_task = re.search(r"(\d+)$", environ.get("SLURM_GPUS_PER_TASK", ""))
        if count == 1 or count < on_host or (per_task and int(per_task.group(1)) == count):
            return None
    if count % plan.num_local_processes:
        raise ConfigError(
            f"{plan.num_local_processes} processes share {count} GPUs on this host: they cannot be "
            "divided equally. Start as many processes as GPUs, a divisor of them, or one."
        )
    share = count // plan.num_local_processes
    return tuple(range(plan.local_process_id * share, (plan.local_process_id + 1) * share))


def _check(plan: JoinPlan) -> None:
    if not is_address(plan.coordinator_address):
        raise ConfigError(
            f"{plan.source}: coordinator {plan.coordinator_address!r} is not host:port. Set it to "
            f"the host of process 0 and a free port, e.g. node001:{DEFAULT_PORT}."
        )
    on_loopback = is_loopback(plan.coordinator_address.rpartition(":")[0])
    if on_loopback and plan.num_hosts > 1:
        raise ConfigError(
            f"{plan.source}: coordinator {plan.coordinator_address} is a loopback address, which "
            f"the other {plan.num_hosts - 1} host(s) of the job cannot reach. Use a name or "
            "address of process 0's host that they resolve."
        )
    if not (plan.token or plan.num_hosts == 1 or on_loopback):
        raise ConfigError(
            f"{plan.source}: the coordinator {plan.coordinator_address} is on a network and the "
            "job has no secret: any process there could join. Set JAXDIST_JOB_TOKEN to the same "
            "text in all processes, e.g. to one output of `openssl rand -hex 16`."
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or `localhost`; names are not resolved."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _coordinator_of(environ: Mapping[str, str]) -> str:
    for name in ("JAXDIST_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"):
        if environ.get(name):
            return _with_port(environ[name], DEFAULT_PORT)
    return ""


def _with_port(address: str, port: int) -> str:
    with contextlib.suppress(ValueError):
        address = f"[{ipaddress.IPv6Address(address)}]"
    _, colon, tail = address.rpartition(":")
    return address if not address or (colon and tail.isdigit()) else f"{address}:{port}"


def _port_of(job: str) -> int:
    # Ports from 61440 are above Linux's ephemeral range (32768 to 60999).
    return 61440 + zlib.crc32(job.encode()) % 4000


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"-?\d+", text):
        raise ConfigError(
            f"environment variable {name}={text!r} is not a whole number. Correct or unset it."
        )
    return int(text)
