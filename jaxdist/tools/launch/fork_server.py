"""A process with the imports of training done; workers are forks of it.

Most of the time of a restart goes into importing jax. The launcher therefore keeps one process per
host that has imported everything; a worker is started by forking it. The server starts no device
and no thread of its own. The idle threads that NumPy's OpenBLAS starts at its import are ended by
OpenBLAS before each fork. So the server has one thread when it forks, and forking is safe.

    launcher                                  fork server
    ForkServer()            -- starts -->     imports, then sends "ready"
    start(command, ...)     -- request -->    forks; the child runs the module
    Forked.poll()           <-- exit code --  waits for its children

Both ends exchange JSON over a socket, one message per packet. The server ends with the launcher,
and the forks end with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from jaxdist import runtime

TRAINING = (
    "jaxdist.checkpoint.checkpointer",
    "jaxdist.config",
    "jaxdist.data",
    "jaxdist.data.batches",  # grain
    "jaxdist.models.decoder",  # flax
    "jaxdist.run.audit",
    "jaxdist.run.data_checks",
    "jaxdist.run.monitoring.environment",
    "jaxdist.run.reference",
    "jaxdist.run.replay",
    "jaxdist.run.startup",
    "jaxdist.run.session",
    "jaxdist.run.program",
    "jaxdist.run.teacher",
    "orbax.checkpoint",
)
"""Modules that `jaxdist.train` imports while it starts."""

_MESSAGE_BYTES = 1 << 20
_FORK_S = 10.0
"""Timeout of a fork, which normally takes milliseconds."""

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process if its parent ends; call it between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ForkServer:
    """The launcher's end of a server that imports `modules` in the background."""

    def __init__(self, modules: Sequence[str] = TRAINING) -> None:
        self._socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *modules],
                stdin=server_end.fileno(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._ready = self._gone = False
        self._started = 0  # process id of the last start
        self._codes: dict[int, int] = {}

    def is_ready(self) -> bool:
        """Return whether the imports are done, so that a start can fork without waiting."""
        return not self.is_gone() and self._ready

    def is_gone(self) -> bool:
        """Return whether the server process has ended."""
        self._read(0.0)
        return self._gone

    def start(self, command: list[str], environ: dict[str, str], output: int) -> Forked:
        """Return a fork that runs `python -m ...` of `command`; OSError if none starts in 10 s."""
        words = command[command.index("-m") + 1 :]
        request = json.dumps({"words": words, "environ": environ}).encode()
        self._started = 0
        socket.send_fds(self._socket, [request], [output])
        until = time.monotonic() + _FORK_S
        while not (self._started or self._gone) and time.monotonic() < until:
            self._read(until - time.monotonic())
        if not self._started:
            self._process.kill()  # a late fork must not run next to its replacement
            raise BrokenPipeError("the fork server does not answer")
        return Forked(self, self._started)

    def code_of(self, pid: int, wait_s: float | None = 0.0) -> int | None:
        """Return the exit code of a fork; None if it still runs after `wait_s` (None = no limit).

        It is -SIGKILL if the server has ended, because its forks end with it.
        """
        until = None if wait_s is None else time.monotonic() + wait_s
        self._read(0.0)
        while pid not in self._codes and not self._gone:
            rest = None if until is None else until - time.monotonic()
            if rest is not None and rest <= 0:
                return None
            self._read(rest)
        return self._codes.get(pid, -signal.SIGKILL)

    def close(self) -> None:
        """Kill the server and its forked processes that still run."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _read(self, wait_s: float | None) -> None:
        """Wait up to `wait_s` seconds (None: no limit) for a message; read all that arrived."""
        while not self._gone and wait([self._socket], wait_s):
            try:
                message = self._socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:  # a signal handler of the launcher has read it
                return
            except OSError:
                message = b""
            record = json.loads(message or '{"gone": true}')
            self._ready = self._ready or "ready" in record
            self._gone = "gone" in record
            if "started" in record:
                self._started = record["started"]
                self._codes.pop(self._started, None)  # of an earlier fork with this process id
            if "ended" in record:
                self._codes[record["ended"]] = record["code"]
            wait_s = 0.0


class Forked:
    """A process that a `ForkServer` has forked, with the methods of `subprocess.Popen` in use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None  # an integer after the end
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code (minus the number of a killing signal); None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, None)
        return int(self.returncode)


Process = subprocess.Popen[bytes] | Forked

Start = Callable[[list[str], dict[str, str], int], Process]
"""Start a command with additional environment variables; its output goes to a descriptor."""


def serve(modules: Sequence[str]) -> list[str]:
    """Import, then fork for each request; a fork returns the words after `python -m`."""
    # Signals that a terminal or a scheduler sends to all processes of a job are left to workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, runtime.NOTICES)
    launcher = socket.socket(fileno=os.dup(0))
    for module in modules:
        with contextlib.suppress(Exception):  # the worker that needs it reports the error
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    launcher.send(b'{"ready": true}')
    with selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                    launcher.send(json.dumps({"ended": key.data, "code": code}).encode())
                    continue
                message, received, _, _ = socket.recv_fds(launcher, _MESSAGE_BYTES, 1)
                if not message:
                    raise SystemExit  # the launcher has ended
                request, server = json.loads(message), os.getpid()
                if not (pid := os.fork()):
                    for other in selector.get_map().values():
                        if other.data is not None:
                            os.close(other.fd)
                    launcher.close()
                    _become_worker(server, request["environ"], *received)
                    return list(request["words"])
                os.close(*received)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                launcher.send(json.dumps({"started": pid}).encode())


def _become_worker(server: int, environ: dict[str, str], output: int) -> None:
    """Set up a fork like a process that the launcher starts directly."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server:  # the server has ended since
        os._exit(1)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # text files
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    words = serve(sys.argv[1:])
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
