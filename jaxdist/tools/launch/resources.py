"""What this host has for a job: the processes it can run, their devices, a free port."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess

from jaxdist import runtime
from jaxdist.runtime.storage import locate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a host can run: processes, and devices in all.

    GPUs can be divided among the processes, CPU devices cannot.
    """

    max_processes: int
    devices: int
    gpus: bool


def capacity(most: int, simulate: int = 0, *, had_gpus: bool = False) -> Capacity:
    """What this host can run now, of the processes that are asked for.

    With `simulate` each process has so many simulated devices. A host that `had_gpus` before has
    lost them if there are none now; it is no host of a CPU job.
    """
    gpus = 0 if simulate else count_gpus()
    if not gpus and not had_gpus:
        return Capacity(max_processes=most, devices=most * (simulate or 1), gpus=False)
    return Capacity(max_processes=min(most, gpus), devices=gpus, gpus=True)


@dataclasses.dataclass(frozen=True)
class OomKills:
    """Processes that the kernel has killed for want of memory since something was started.

    Attributes:
        own: whether they are this cgroup's (container, SLURM step); else all of the host.
    """

    count: int = 0
    own: bool = False


def count_oom_kills() -> OomKills:
    """What the kernel has counted of this process's cgroup (version 2), else of this host.

    Of the host it may have been another job's process. 0 where nothing is counted.
    """
    try:
        group = re.search(r"^0::/(.*)$", locate("/proc/self/cgroup").text(), re.MULTILINE)
    except OSError:
        group = None
    # A container sees its own group as the root, or its path on the host, which is not there.
    names = (group[1], "") if group else ()
    own = [os.path.join("/sys/fs/cgroup", name, "memory.events") for name in names]
    for path in (*own, "/proc/vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", locate(path).text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return OomKills(int(found[1]), path in own)
    return OomKills()


def count_gpus() -> int:
    """GPUs that processes started here would see; 0 without any."""
    visible = runtime.visible_gpus(os.environ)
    if visible is not None:
        return len(visible)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU \d+:", listing.stdout, re.MULTILINE))


def first_gpus(count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` that shows the first `count` GPUs of those visible here."""
    visible = runtime.visible_gpus(os.environ)
    names = [str(i) for i in range(count)] if visible is None else visible
    return ",".join(names[:count])


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this host's address that nobody listens on now; "" is all its addresses."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
