"""Checks of a host: disk, shared memory, limits of the process, SLURM's settings, software."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.runtime.distributed import odd_ones
from jaxdist.runtime.formatting.numbers import in_bytes, rate
from jaxdist.runtime.formatting.tables import few
from jaxdist.tools.doctor.findings import Finding, error, note, ok, warning

_SLOW_DISK = 50e6
"""Bytes per second below which a save of a few GB takes minutes."""
_SMALL_SHM = 1 << 30
"""Docker's default is 64 MiB; NCCL uses some ten MB for each pair of GPUs."""
_FEW_FILES = 4096
"""NCCL, gloo and checkpoints open hundreds to thousands of sockets and files."""
_SLOW_NOTICE_S = 120
"""Detecting a lost node more slowly than this costs more than most restarts."""


def examine_disk(directory: Path, test_bytes: int, needed_bytes: int = 0) -> list[Finding]:
    """Return findings: space for `needed_bytes`, speed with a file of `test_bytes` (0 = none)."""
    usage = shutil.disk_usage(directory)
    results = [check_disk(directory, usage.free, usage.total, needed_bytes)]
    if not test_bytes:
        return results
    if usage.free < 2 * test_bytes:
        return [*results, note("disk speed", "not measured: too little free space")]
    try:
        write_s, read_s, same = _write_and_read(directory, test_bytes)
    except OSError as failure:
        unwritable = error(
            "disk speed",
            f"{directory} cannot be written: {failure.strerror}",
            "use a writable directory with --run-dir, or free some space",
        )
        return [*results, unwritable]
    return [*results, check_speed(directory, test_bytes, write_s, read_s, same)]


def check_disk(directory: Path, free: int, total: int, needed: int) -> Finding:
    """Return a finding: are the free bytes enough for `needed` ones."""
    text = f"{in_bytes(free)} of {in_bytes(total)} free in {directory}"
    text += f"; the run keeps checkpoints of {in_bytes(needed)}" if needed else ""
    fix = "free some space, lower checkpoint.max_to_keep, or use another --run-dir"
    if free < max(needed, 1 << 30):
        make = error
    elif free < max(1.5 * needed, 10 << 30):
        make = warning
    else:
        make, fix = ok, ""
    return make("disk space", text, fix, free_bytes=free, total_bytes=total, needed_bytes=needed)


def check_speed(
    directory: Path, num_bytes: int, write_s: float, read_s: float, same: bool
) -> Finding:
    """Return a finding: the disk's speed, or an error if other bytes were read than written."""
    write, read = num_bytes / write_s, num_bytes / read_s
    numbers: dict[str, Any] = {"write_bytes_per_s": write, "read_bytes_per_s": read}
    if not same:
        return error(
            "disk speed",
            f"{directory} returned other bytes than were written",
            "write no checkpoints there, and have the disk or file system checked",
            **numbers,
        )
    text = f"{rate(write)} written and synced, {rate(read)} read back"
    if write < _SLOW_DISK:
        fix = "use a faster directory with --run-dir, or save less often"
        return warning("disk speed", f"{text} in {directory}: saves will be slow", fix, **numbers)
    return ok("disk speed", text, **numbers)


def _write_and_read(directory: Path, num_bytes: int) -> tuple[float, float, bool]:
    """Return (seconds to write and sync, seconds to read, whether the bytes are the same)."""
    block = os.urandom(1 << 20)  # incompressible
    path = directory / f".doctor-{os.getpid()}-{time.time_ns()}"
    numbers = [i.to_bytes(8, "little") for i in range(max(1, num_bytes >> 20))]
    try:
        with path.open("x+b") as file:
            begin = time.perf_counter()
            for number in numbers:
                file.write(number + block[8:])
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - begin
            # Drop the cached pages, so that the read is from the disk.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            same = all([file.read(len(block)) == number + block[8:] for number in numbers])
            return write_s, time.perf_counter() - begin, same
    finally:
        path.unlink(missing_ok=True)


def examine_limits(num_gpus: int) -> list[Finding]:
    """Return findings about shared memory, open files, locked memory and CPU cores."""
    total = free = 0
    with contextlib.suppress(OSError):
        total, _, free = shutil.disk_usage("/dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infiniband = Path("/sys/class/infiniband")
    has_rdma = infiniband.is_dir() and any(infiniband.iterdir())
    return [
        check_shared_memory(total, free, num_gpus),
        check_files(soft, hard),
        check_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1], has_rdma),
        check_cores(len(os.sched_getaffinity(0)), num_gpus),
    ]


def check_shared_memory(total: int, free: int, num_gpus: int) -> Finding:
    """Return a finding: does /dev/shm, which NCCL uses without peer access, have enough bytes."""
    text = f"{in_bytes(free)} of {in_bytes(total)} free in /dev/shm"
    fix = (
        "start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with "
        "medium Memory on /dev/shm), or delete its files"
    )
    if free >= _SMALL_SHM:
        return ok("shared memory", text, free_bytes=free)
    if num_gpus > 1:
        return error("shared memory", text + ": NCCL may not start", fix, free_bytes=free)
    return warning("shared memory", text, fix, free_bytes=free)


def check_files(soft: int, hard: int) -> Finding:
    """Return a finding about the limits (soft, hard) of open files."""
    unlimited = resource.RLIM_INFINITY
    text = "no limit" if soft == unlimited else f"limit {soft:,}"
    if soft == unlimited or soft >= _FEW_FILES:
        return ok("open files", text, limit=soft)
    can = hard == unlimited or hard >= 65536
    fix = "ulimit -n 65536" if can else "raise the hard limit (limits.conf, LimitNOFILE=1048576)"
    return warning("open files", text + ": large jobs and checkpoints need more", fix, limit=soft)


def check_locked(limit: int, has_rdma: bool) -> Finding:
    """Return a finding about the hard limit, in bytes, of locked memory, which RDMA needs."""
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    text = f"limit {in_bytes(limit)}"
    if not has_rdma:
        return ok("locked memory", f"{text}; no InfiniBand here needs more", limit=limit)
    return warning(
        "locked memory",
        f"{text}, and InfiniBand locks the memory that it sends",
        "raise it (limits.conf: memlock; container: --ulimit memlock=-1; Kubernetes: "
        "LimitMEMLOCK=infinity of the nodes' containerd)",
        limit=limit,
    )


def check_cores(num_cores: int, num_gpus: int) -> Finding:
    """Return a finding: are there enough CPU cores per GPU to dispatch, load and compile."""
    if num_gpus and num_cores < 2 * num_gpus:
        return warning(
            "cores",
            f"{num_cores} CPU core(s) for {num_gpus} GPU(s): loading and compiling will be slow",
            "request more (SLURM: --cpus-per-task, and SRUN_CPUS_PER_TASK; Kubernetes: limits.cpu)",
            cores=num_cores,
        )
    return ok("cores", f"{num_cores} CPU core(s)", cores=num_cores)


def examine_slurm(environ: Mapping[str, str]) -> list[Finding]:
    """Return findings about the settings of the SLURM cluster; [] outside a SLURM job."""
    if "SLURM_JOB_ID" not in environ:
        return []
    try:
        text = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return [note("SLURM", "scontrol does not answer: the cluster's settings are unknown")]
    return check_slurm(text)


def check_slurm(text: str) -> list[Finding]:
    """Return findings on the output of `scontrol show config`: time to save, requeueing."""
    config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, flags=re.M))
    return list(_slurm_problems(config)) or [ok("SLURM", "jobs are requeued")]


def _slurm_problems(config: Mapping[str, str]) -> Iterator[Finding]:
    kill_s, lost_s = _seconds(config, "KillWait"), _seconds(config, "SlurmdTimeout")
    if config.get("JobRequeue") == "0":
        yield warning(
            "SLURM",
            "JobRequeue=0: a job that loses a node or is preempted is not restarted",
            "sbatch --requeue (scripts of `jaxdist launch slurm` have it)",
        )
    if kill_s is not None:
        yield note(
            "SLURM",
            f"KillWait={kill_s:.0f} s: a job is killed that long after SIGTERM, saved or not",
            "request an earlier signal: --signal=B:USR1@SECONDS, as `jaxdist launch slurm` does",
            kill_wait_s=kill_s,
        )
    if lost_s is not None and lost_s > _SLOW_NOTICE_S:
        yield note(
            "SLURM",
            f"SlurmdTimeout={lost_s:.0f} s: SLURM detects a lost node, and requeues its job, only "
            "after that time",
            "if nodes are lost often, request a lower value from the cluster's administrators",
            slurmd_timeout_s=lost_s,
        )


def _seconds(config: Mapping[str, str], name: str) -> float | None:
    """Return the seconds in a setting such as `30 sec`; None if it is missing or unlimited."""
    match = re.match(r"(\d+)", config.get(name, ""))
    return float(match[1]) if match else None


CHECK = "software"

_OLDEST_DRIVER = {"13": 580, "12": 525}
"""CUDA's major version -> the first driver that runs it (CUDA release notes, table 2)."""

_WRONG_VERSIONS = ("0.11.0", "0.11.1")
"""Versions of jax that `pyproject.toml` excludes; conda may install them."""

_SUMMARY = ("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

_MUST_BE_EQUAL = ("code", "jax", "jaxlib", "jaxdist", "flax", "optax", "orbax-checkpoint", "numpy")
"""Different versions compile different programs or write different checkpoints."""


def check_versions(versions: Mapping[str, str], nvidia: Mapping[str, str]) -> list[Finding]:
    """Return findings on one process's packages; arguments as in `run.monitoring.environment`."""
    main = ", ".join(f"{n} {versions[n]}" for n in _SUMMARY if n in versions)
    cuda = ", ".join(f"{n} {v}" for n, v in nvidia.items() if re.search("driver|nccl|cudnn", n))
    facts = ok(CHECK, "; ".join(filter(None, (main, cuda))), **versions, **nvidia)
    return [facts, *_version_problems(versions, nvidia)]


def _version_problems(versions: Mapping[str, str], nvidia: Mapping[str, str]) -> Iterator[Finding]:
    jaxlib, driver = versions.get("jaxlib", ""), nvidia.get("driver", "")
    for name, version in nvidia.items():
        if name.startswith("jax-cuda") and version != jaxlib:
            yield error(
                CHECK,
                f"{name} {version} next to jaxlib {jaxlib}: jax will not use the GPUs",
                "pip install -c constraints.txt -e '.[cuda13]'",
            )
    if jaxlib and versions.get("jax") != jaxlib:
        yield error(
            CHECK,
            f"jax {versions.get('jax')} with jaxlib {jaxlib}",
            "install the same version of both: pip install -c constraints.txt -e .",
        )
    if versions.get("jax") in _WRONG_VERSIONS:
        yield error(
            CHECK,
            f"jax {versions['jax']} is reported to compute wrong values on some GPUs (jax#40633)",
            "install another version: pip install -c constraints.txt -e .",
        )
    majors = sorted({m[1] for n in nvidia if (m := re.match(r"jax-cuda(\d+)-plugin", n))})
    if len(majors) > 1:
        yield error(
            CHECK,
            f"jax plugins for CUDA {' and '.join(majors)} are installed together",
            f"pip uninstall jax-cuda{majors[0]}-plugin jax-cuda{majors[0]}-pjrt",
        )
    for major in majors:
        oldest = _OLDEST_DRIVER.get(major, 0)
        if driver and int(driver.partition(".")[0]) < oldest:
            yield error(
                CHECK,
                f"driver {driver} is too old for CUDA {major}, which needs {oldest} or newer",
                "update the driver",
            )


def compare(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """Return findings on differing versions, or "ok"; `everyone` is (host, name -> version)."""
    code = everyone[0][1].get("code", "?")
    agreed = ok("same software", f"{len(everyone)} processes, code {code}")
    return list(_differences(everyone)) or [agreed]


def _differences(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[Finding]:
    for name in sorted({name for _, versions in everyone for name in versions}):
        values = [versions.get(name, "none") for _, versions in everyone]
        common, odd = odd_ones(values)
        if not odd:
            continue
        others = few([f"{values[i]} in process {i} on {everyone[i][0]}" for i in odd], 4)
        what = "the code of jaxdist" if name == "code" else name
        make = error if name in _MUST_BE_EQUAL else warning
        yield make(
            "same software",
            f"{what} is {common} in {len(values) - len(odd)} processes, but {others}",
            "use one environment and one checkout on all hosts",
        )
