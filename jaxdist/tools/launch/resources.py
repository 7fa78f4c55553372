"""Resources of this host: GPUs, processes killed for lack of memory, a free port."""

from __future__ import annotations

import contextlib
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


def count_oom_kills() -> int:
    """Return how many processes of this cgroup the kernel killed for lack of memory."""
    with contextlib.suppress(OSError):
        groups = locate("/proc/self/cgroup").text()
        for controller, file in (("memory", "memory.oom_control"), ("", "memory.events")):
            group = re.search(rf"^\d+:{controller}:/(.*)$", groups, re.MULTILINE)
            # In a container the group is the root, or a path on the host that does not exist here.
            for name in (group[1], "") if group else ():
                with contextlib.suppress(OSError, IndexError):  # old kernels do not count
                    events = locate(os.path.join("/sys/fs/cgroup", controller, name, file)).text()
                    return int(re.findall(r"^oom_kill (\d+)$", events, re.MULTILINE)[0])
    return 0


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
