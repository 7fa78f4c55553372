"""What a host gives its processes: disk, shared memory, files, memory that can be locked, cores."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from jaxdist.runtime.formatting.numbers import in_bytes, rate
from jaxdist.tools.doctor.findings import Finding, error, note, ok, warning

_SLOW_DISK = 50e6
"""Bytes per second below which a save of a few GB takes minutes."""
_SMALL_SHM = 1 << 30
"""Docker gives 64 MiB by default; NCCL takes some ten MB for each pair of GPUs."""
_FEW_FILES = 4096
"""NCCL, gloo and checkpoints open hundreds to thousands of sockets and files."""


def examine_disk(directory: Path, test_bytes: int, needed_bytes: int = 0) -> list[Finding]:
    """Free space in an existing directory, and what becomes of bytes that are written there.

    `test_bytes` are written, synced, read back and removed. The run will write `needed_bytes`.
    """
    stats = os.statvfs(directory)
    free, total = shutil.disk_usage(directory).free, shutil.disk_usage(directory).total
    found = check_disk(
        directory, free, total, needed_bytes, stats.f_favail if stats.f_files else None
    )
    if not test_bytes:
        return found
    if free < 2 * test_bytes:
        return [*found, note("disk speed", "not measured: too little room")]
    try:
        write_s, read_s, same = _write_and_read(directory, test_bytes)
    except OSError as failure:
        unwritable = error(
            "disk speed",
            f"{directory} cannot be written: {failure.strerror}",
            "name a directory that can with --run-dir, or make room",
        )
        return [*found, unwritable]
    return [*found, check_speed(directory, test_bytes, write_s, read_s, same)]


def check_disk(
    directory: Path, free: int, total: int, needed: int, free_files: int | None = None
) -> list[Finding]:
    """Room for the run's checkpoints, and for the files they are made of."""
    text = f"{in_bytes(free)} of {in_bytes(total)} free in {directory}"
    numbers: dict[str, Any] = {"free_bytes": free, "total_bytes": total, "needed_bytes": needed}
    fix = "make room, keep fewer checkpoints (checkpoint.max_to_keep), or name another --run-dir"
    text += f"; the checkpoints that are kept take {in_bytes(needed)}" if needed else ""
    if free < max(needed, 1 << 30):
        found = [error("disk space", text, fix, **numbers)]
    elif free < max(1.5 * needed, 10 << 30):
        found = [warning("disk space", text, fix, **numbers)]
    else:
        found = [ok("disk space", text, **numbers)]
    if free_files is not None and free_files < 10_000:
        found.append(
            warning(
                "disk space",
                f"only {free_files:,} more files can be made in {directory}",
                "remove files, or name another --run-dir",
            )
        )
    return found


def check_speed(
    directory: Path, num_bytes: int, write_s: float, read_s: float, same: bool
) -> Finding:
    """What came back must be what was written, at a bearable speed."""
    write, read = num_bytes / write_s, num_bytes / read_s
    numbers: dict[str, Any] = {"write_bytes_per_s": write, "read_bytes_per_s": read}
    if not same:
        return error(
            "disk speed",
            f"{directory} gave back other bytes than were written",
            "do not write checkpoints there: have the disk or the file system looked at",
            **numbers,
        )
    text = f"{rate(write)} written and synced, {rate(read)} read back"
    if write < _SLOW_DISK:
        return warning(
            "disk speed",
            text + f" in {directory}: saves will take long",
            "name a faster directory with --run-dir, or save less often",
            **numbers,
        )
    return ok("disk speed", text, **numbers)


def _write_and_read(directory: Path, num_bytes: int) -> tuple[float, float, bool]:
    """(seconds to write and sync, seconds to read, whether the same bytes came back)."""
    block = os.urandom(1 << 20)  # no file system can make it smaller
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
            # Synced pages can be dropped, so that the disk is read and not the memory.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            same = all([file.read(len(block)) == number + block[8:] for number in numbers])
            return write_s, time.perf_counter() - begin, same
    finally:
        path.unlink(missing_ok=True)


def examine_shared_memory(num_gpus: int, path: str = "/dev/shm") -> list[Finding]:
    """How much of /dev/shm there is."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return [check_shared_memory(0, 0, num_gpus)]
    return [check_shared_memory(usage.total, usage.free, num_gpus)]


def check_shared_memory(total: int, free: int, num_gpus: int) -> Finding:
    """NCCL passes data between the GPUs of a host through it where they have no direct way."""
    text = f"{in_bytes(free)} of {in_bytes(total)} free in /dev/shm"
    numbers: dict[str, Any] = {"free_bytes": free}
    fix = (
        "start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with "
        "medium Memory on /dev/shm), or remove what lies there"
    )
    if free >= _SMALL_SHM:
        return ok("shared memory", text, **numbers)
    if num_gpus > 1:
        return error("shared memory", text + ": NCCL may not start", fix, **numbers)
    return warning("shared memory", text, fix, **numbers)


def examine_limits(num_gpus: int) -> list[Finding]:
    """Files that may be open, memory that may be locked, cores that may be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = [check_files(soft, hard)]
    if Path("/sys/class/infiniband").is_dir() and os.listdir("/sys/class/infiniband"):
        found.append(check_locked(locked))
    found.append(check_cores(len(os.sched_getaffinity(0)), num_gpus))
    return found


def check_files(soft: int, hard: int) -> Finding:
    """A run opens sockets to its peers, and every file of a checkpoint."""
    unlimited = resource.RLIM_INFINITY
    text = "no limit" if soft == unlimited else f"{soft:,} files may be open"
    if soft == unlimited or soft >= _FEW_FILES:
        return ok("open files", text, limit=soft)
    can = hard == unlimited or hard >= 65536
    fix = "ulimit -n 65536" if can else "raise the hard limit (limits.conf, LimitNOFILE=1048576)"
    return warning("open files", text + ": large jobs and checkpoints need more", fix, limit=soft)


def check_locked(limit: int) -> Finding:
    """InfiniBand registers memory, which locks it."""
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    return warning(
        "locked memory",
        f"{in_bytes(limit)} may be locked, and InfiniBand locks what it sends",
        "ulimit -l unlimited (limits.conf: memlock; container: --ulimit memlock=-1)",
        limit=limit,
    )


def check_cores(num_cores: int, num_gpus: int) -> Finding:
    """The host dispatches, loads data and compiles for its GPUs."""
    if num_gpus and num_cores < 2 * num_gpus:
        return warning(
            "cores",
            f"{num_cores} CPU core(s) for {num_gpus} GPU(s): loading and compiling will lag",
            "ask for more (SLURM: --cpus-per-task, and SRUN_CPUS_PER_TASK; Kubernetes: limits.cpu)",
            cores=num_cores,
        )
    return ok("cores", f"{num_cores} CPU core(s)", cores=num_cores)
