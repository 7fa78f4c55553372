"""Simulated hosts on this machine, each with its own network and a cable that can be cut.

Each host is a network and a UTS namespace: its own interface and host name, the same files. All of
them live below one process in its own namespaces: the machine's network is not changed, and nothing
remains when that process is killed.

    h0 eth0 10.78.0.1 --- port0 [switch] port1 --- eth0 10.78.0.2 h1

Run as a program, this file is that process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("unshare", "nsenter", "ip", "hostname", "mount", "setpriv")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
SWITCH = "10.78.0.254"
"""Address of programs that run next to the hosts; see `Hosts.beside`."""


def missing() -> str:
    if os.geteuid() != 0:
        return "network namespaces joined by a cable need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 util-linux)"
    cable = "ip link add br0 type bridge && ip link add port0 type veth peer name end0"
    trial = subprocess.run([*_unshare(), "sh", "-c", cable], capture_output=True, text=True)
    return f"no namespaces: {trial.stderr.strip()[-200:]}" if trial.returncode else ""


class Hosts:
    """Context manager of the running hosts, which are added one by one.

    Args:
        folder: directory of a few internal files.
        names: names of the hosts that exist from the beginning.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ()):
        self.folder, self._names = folder, names
        self.started: list[subprocess.Popen] = []
        self.pids: list[int] = []  # host -> a process in its namespaces
        self._aliases: dict[str, int] = {}

    def __enter__(self) -> Hosts:
        self.folder.mkdir(parents=True)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n")
        self.process = subprocess.Popen(
            [*_unshare(), sys.executable, __file__, str(self.folder)],
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        self.started.append(self.process)
        until = time.monotonic() + 60
        while not (self.folder / "ready").exists():
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError("the hosts do not start")
            time.sleep(0.02)
        for name in self._names:
            self.know([name], self.add(name))
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.started):
            process.kill()
            process.wait()

    def add(self, name: str) -> int:
        """Add a host to the switch, which no other can resolve yet; return its number, from 0."""
        k = len(self.pids)
        words = [*self.beside(), "unshare", "--net", "--uts", "sleep", "infinity"]
        process = subprocess.Popen(words, preexec_fn=_die_with_parent, env=_environ())
        self.started.append(process)
        own = os.stat(f"/proc/{self.process.pid}/ns/net").st_ino
        while os.stat(f"/proc/{process.pid}/ns/net").st_ino in (own, _OUTSIDE):
            time.sleep(0.01)
        self.pids.append(process.pid)
        end = f"name end{k} netns {process.pid}"
        self._run("ip", "link", "add", f"port{k}", "type", "veth", "peer", *end.split())
        self._run("ip", "link", "set", f"port{k}", "master", "switch", "up")
        inside = _enter(process.pid, "net", "uts")
        _run(*inside, "hostname", name)
        _run(*inside, "ip", "link", "set", f"end{k}", "name", "eth0")
        _run(*inside, "ip", "addr", "add", f"10.78.0.{k + 1}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run(*inside, "ip", "link", "set", link, "up")
        return k

    def know(self, names: Sequence[str], host: int | None) -> None:
        """Make all hosts resolve these names to this host; None: remove the names."""
        aliases = {name: k for name, k in self._aliases.items() if name not in names}
        if host is not None:
            aliases |= dict.fromkeys(names, host)
        if aliases == self._aliases:
            return
        self._aliases = aliases
        lines = [f"10.78.0.{k + 1} {name}\n" for name, k in aliases.items()]
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(lines)}")

    def beside(self) -> list[str]:
        """Return the prefix of a command that runs on the switch, at `SWITCH`, not on a host."""
        return _enter(self.process.pid, "mount", "net", "uts")

    def listen_beside(self) -> socket.socket:
        made: list[socket.socket] = []

        def listen() -> None:  # runs in a separate thread, which moves to the other network
            with open(f"/proc/{self.process.pid}/ns/net") as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server((SWITCH, 0), backlog=64))

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        return made[0]

    def inside(self, host: int) -> list[str]:
        return [*_enter(self.process.pid, "mount"), *_enter(self.pids[host], "net", "uts")]

    def start(self, host: int, command: list[str], console: Path, **options) -> subprocess.Popen:
        with open(console, "ab") as words:
            process = subprocess.Popen(
                [*self.inside(host), *command],
                stdin=subprocess.DEVNULL, stdout=words, stderr=words, **options,
            )  # fmt: skip
        self.started.append(process)
        return process

    def cut(self, host: int) -> None:
        self._run("ip", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        self._run("ip", "link", "set", f"port{host}", "up")

    def _run(self, *command: str) -> None:
        _run(*_enter(self.process.pid, "net"), *command)


_CLONE_NEWNET = 0x40000000
_OUTSIDE = os.stat("/proc/self/ns/net").st_ino


def _unshare() -> list[str]:
    return ["unshare", "--mount", "--net", "--uts", "--propagation", "private"]


def _enter(pid: int, *spaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *(f"--{space}" for space in spaces), "--"]


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env=_environ())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _hold(folder: Path) -> None:
    _run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "addr", "add", f"{SWITCH}/24", "dev", "switch")
    for link in ("lo", "switch"):
        _run("ip", "link", "set", link, "up")
    (folder / "ready").touch()
    signal.pause()


if __name__ == "__main__":
    _hold(Path(sys.argv[1]))
