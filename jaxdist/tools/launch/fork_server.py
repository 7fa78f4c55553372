"""A process that has imported what training needs, and becomes a worker by a fork.

A restart of processes spends most of its time on importing jax. The launcher therefore keeps one
process per host that has imported all of it and waits; to start a worker it forks. It starts no
device and no thread of its own, so nothing that a fork would break is in it.

    launcher                                  fork server
    ForkServer()            -- starts -->     imports, then says that it is ready
    start(command, ...)     -- request -->    forks; the child runs the module
    Forked.poll()           <-- exit code --  waits for its children

Both ends speak JSON over a socket, one message in each packet. The server ends with the launcher,
and its children with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxdist import runtime

TRAINING = (
    "jaxdist.checkpoint.preflight",
    "jaxdist.config",
    "jaxdist.data",
    "jaxdist.data.batches",  # grain
    "jaxdist.data.prefetch",
    "jaxdist.models.decoder",  # flax
    "jaxdist.run.audit",
    "jaxdist.run.monitoring.environment",
    "jaxdist.run.replay",
    "jaxdist.run.startup",
    "jaxdist.run.session",
    "jaxdist.run.program",
    "orbax.checkpoint",
)
"""What `jaxdist.train` imports in the course of a start."""

_MESSAGE_BYTES = 1 << 20
_FORK_S = 10.0
"""Longest wait for a fork, which takes milliseconds."""

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork
_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """What the launcher needs of a process; `subprocess.Popen` has it."""

    pid: int
    returncode: Any  # None while it runs

    def poll(self) -> int | None:
        """Exit code once it has ended; minus the signal that killed it."""

    def wait(self) -> int:
        """Its exit code, when it has ended."""


Start = Callable[[list[str], dict[str, str], int], Process]
"""Starts a command with more variables of the environment; its output goes to a descriptor."""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ForkServer:
    """The launcher's end. `modules` are imported once, in the background.

    A start that comes before they are would wait for them: see `is_ready`.
    """

    def __init__(self, modules: Sequence[str] = TRAINING) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *modules],
                stdin=theirs.fileno(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._ready = self._gone = False
        self._started = 0  # process id of the last start
        self._codes: dict[int, int] = {}

    def is_ready(self) -> bool:
        """Whether a start forks at once."""
        self._hear(0.0)
        return self._ready and not self._gone

    def is_gone(self) -> bool:
        """Whether the server has ended."""
        self._hear(0.0)
        return self._gone

    def start(self, command: list[str], environ: dict[str, str], output: int) -> Forked:
        """Start `python -m MODULE ARGUMENTS` as a fork; see `Start`.

        Raises:
            OSError: the server has ended.
        """
        words = command[command.index("-m") + 1 :]
        request = json.dumps({"words": words, "environ": environ}).encode()
        self._started = 0
        socket.send_fds(self._socket, [request], [output])
        until = time.monotonic() + _FORK_S
        while not (self._started or self._gone) and time.monotonic() < until:
            self._hear(until - time.monotonic())
        if not self._started:
            self._process.kill()  # no late fork may run beside what is started instead
            raise BrokenPipeError("the process that imports are kept in does not answer")
        return Forked(self, self._started)

    def code_of(self, pid: int, wait_s: float | None = 0.0) -> int | None:
        """Exit code of a fork, or None if it still runs after `wait_s` (None: until it has ended).

        A fork that has lost its server was killed with it.
        """
        until = None if wait_s is None else time.monotonic() + wait_s
        self._hear(0.0)
        while pid not in self._codes and not self._gone:
            rest = None if until is None else until - time.monotonic()
            if rest is not None and rest <= 0:
                return None
            self._hear(rest)
        return self._codes.get(pid, -signal.SIGKILL)

    def close(self) -> None:
        """End the server, and forks that still run."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _hear(self, wait_s: float | None) -> None:
        """Take in what the server says within `wait_s` seconds, None = until it says something."""
        while not self._gone and select.select([self._socket], [], [], wait_s)[0]:
            try:
                message = self._socket.recv(_MESSAGE_BYTES)
            except OSError:
                message = b""
            said = json.loads(message or '{"gone": true}')
            self._ready = self._ready or "ready" in said
            self._gone = "gone" in said
            self._started = said.get("started", self._started)
            if "ended" in said:
                self._codes[said["ended"]] = said["code"]
            wait_s = 0.0


class Forked:
    """A process that a `ForkServer` has started; as much of `subprocess.Popen` as is needed."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit code once it has ended."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, None)
        assert self.returncode is not None  # it was waited for
        return self.returncode


# --- the server -----------------------------------------------------------------------------------


def serve(modules: Sequence[str]) -> list[str]:
    """Import, then fork for each request; ends with the launcher.

    Returns:
        Only in a fork: the words after `python -m`.
    """
    # What a terminal or a scheduler sends to all processes of a job is for the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, runtime.NOTICES)
    launcher = socket.socket(fileno=os.dup(0))
    for module in modules:
        with contextlib.suppress(Exception):  # the worker that needs it says why it fails
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
    """What the launcher does for a process that it starts itself."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server:  # it ended in between
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
