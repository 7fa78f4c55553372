"""Two hosts on this machine, h0 and h1, with a cable between them that can be pulled.

Each host is a network and a UTS namespace: an interface and a name of its own, the same files. All
of it lives below one process in namespaces of its own: nothing of the machine is touched, and
nothing is left when that process is killed.

    h0 eth0 10.78.0.1 --- port0 [switch] port1 --- eth0 10.78.0.2 h1

Run as a program, this file is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("h0", "h1")
PROGRAMS = ("unshare", "nsenter", "ip", "hostname", "mount")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces joined by a cable need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 util-linux)"
    cable = "ip link add br0 type bridge && ip link add port0 type veth peer name end0"
    trial = subprocess.run([*_unshare(), "sh", "-c", cable], capture_output=True, text=True)
    return f"no namespaces: {trial.stderr.strip()[-200:]}" if trial.returncode else ""


class TwoHosts:
    """The running hosts; a context manager.

    Args:
        folder: for a few files of its own.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[subprocess.Popen] = []

    def __enter__(self) -> TwoHosts:
        self.folder.mkdir(parents=True)
        self.process = subprocess.Popen(
            [*_unshare(), sys.executable, __file__, str(self.folder)],
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        ready = self.folder / "ready.json"
        until = time.monotonic() + 60
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError("the hosts do not start")
            time.sleep(0.02)
        self.pids = json.loads(ready.read_text())
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.started, self.process]:
            process.kill()
            process.wait()

    def start(self, host: int, command: list[str], console: Path, **options) -> subprocess.Popen:
        """A command on a host, its words in a file."""
        with open(console, "ab") as words:
            process = subprocess.Popen(
                [*_enter(self.process.pid, "mount"), *_enter(self.pids[host], "net", "uts"),
                 *command],
                stdin=subprocess.DEVNULL, stdout=words, stderr=words, **options,
            )  # fmt: skip
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Pull the cable of h1: what is sent is lost, and neither side is told."""
        self._set_port("down")

    def mend(self) -> None:
        """Plug it in again."""
        self._set_port("up")

    def _set_port(self, state: str) -> None:
        enter = _enter(self.process.pid, "net")
        subprocess.run([*enter, "ip", "link", "set", "port1", state], check=True, env=_environ())


def _unshare() -> list[str]:
    return ["unshare", "--mount", "--net", "--uts", "--propagation", "private"]


def _enter(pid: int, *spaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *(f"--{space}" for space in spaces), "--"]


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# --- the process that holds the namespaces --------------------------------------------------------


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env=_environ())


def _hold(folder: Path) -> None:
    hosts = "".join(f"10.78.0.{k} {name}\n" for k, name in enumerate(NAMES, start=1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    _run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    pids = [_host(k, name) for k, name in enumerate(NAMES)]
    (folder / "ready.new").write_text(json.dumps(pids))
    os.replace(folder / "ready.new", folder / "ready.json")
    signal.pause()


def _host(k: int, name: str) -> int:
    own = os.stat("/proc/self/ns/net").st_ino
    words = ["unshare", "--net", "--uts", "sleep", "infinity"]
    pid = subprocess.Popen(words, preexec_fn=_die_with_parent).pid
    while os.stat(f"/proc/{pid}/ns/net").st_ino == own:
        time.sleep(0.01)
    _run("ip", "link", "add", f"port{k}", "type", "veth", "peer", "name", f"end{k}")
    _run("ip", "link", "set", f"port{k}", "master", "switch", "up")
    _run("ip", "link", "set", f"end{k}", "netns", str(pid), "name", "eth0")
    inside = _enter(pid, "net", "uts")
    _run(*inside, "hostname", name)
    _run(*inside, "ip", "addr", "add", f"10.78.0.{k + 1}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _run(*inside, "ip", "link", "set", link, "up")
    return pid


if __name__ == "__main__":
    _hold(Path(sys.argv[1]))
