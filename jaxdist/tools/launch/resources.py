"""Resources of this host: GPUs, processes killed for lack of memory, a free port."""

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
    """Numbers of processes and devices of a host; GPUs can be divided among the processes."""

    max_processes: int
    devices: int
    gpus: bool


def capacity(most: int, simulate: int = 0, *, had_gpus: bool = False) -> Capacity:
    """Return the present capacity of this host, for at most `most` processes.

    With `simulate` each process has that many simulated devices. A host that `had_gpus` and has
    none now has lost them and can run nothing.
    """
    gpus = 0 if simulate else count_gpus()
    if not gpus and not had_gpus:
        return Capacity(max_processes=most, devices=most * (simulate or 1), gpus=False)
    return Capacity(max_processes=min(most, gpus), devices=gpus, gpus=True)


@dataclasses.dataclass(frozen=True)
class OomKills:
    """Number of processes killed for lack of memory: in this cgroup if `own`, else on this host."""

    count: int = 0
    own: bool = False


def count_oom_kills() -> OomKills:
    """Return the kernel's count for this cgroup (version 2), or else for this host.

    A count of the host may include processes of other jobs. 0 if the kernel has no counter.
    """
    try:
        group = re.search(r"^0::/(.*)$", locate("/proc/self/cgroup").text(), re.MULTILINE)
    except OSError:
        group = None
    # In a container the group is the root, or a path on the host that does not exist here.
    names = (group[1], "") if group else ()
    own = [os.path.join("/sys/fs/cgroup", name, "memory.events") for name in names]
    for path in (*own, "/proc/vmstat"):
        try:
            match = re.search(r"^oom_kill (\d+)$", locate(path).text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return OomKills(int(match[1]), path in own)
    return OomKills()


def count_gpus() -> int:
    """Return the number of GPUs that processes started here would see."""
    visible = runtime.listed_gpus(os.environ)
    if visible is not None:
        return len(visible)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU \d+:", listing.stdout, re.MULTILINE))


def first_gpus(count: int) -> str:
    """Return `CUDA_VISIBLE_DEVICES` for the first `count` of the GPUs visible here."""
    visible = runtime.listed_gpus(os.environ)
    names = [str(i) for i in range(count)] if visible is None else visible
    return ",".join(names[:count])


def free_port(host: str = "127.0.0.1") -> int:
    """Return an unused port of an address of this host; "" means all its addresses."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
