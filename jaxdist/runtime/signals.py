"""Requests to stop: SIGTERM, SIGUSR1 or Ctrl-C becomes one step at which all processes stop.

The handlers only set a flag. The loop calls `preempted()` once per step in every process, which is
True on the same step in every process. It then saves and exits with `EXIT_PREEMPTED`. A second
Ctrl-C ends the process at once, or raises `KeyboardInterrupt` in a program that called us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from jaxdist.runtime.coordination import service
from jaxdist.runtime.entry_point import EXIT_INTERRUPTED, EXIT_PREEMPTED

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for a save and an end: schedulers send TERM, our SLURM scripts USR1."""


_ABORT_S = 2.0
"""Seconds that a second Ctrl-C may take to write down why the run ended."""


class Preemption:
    """The requests to stop that this process got, and the step on which the whole job acts on them.

    Make it first in a command: until then such a signal kills the process. Only the main thread may
    make it. As a context manager it gives the signals back to who had them before.

    Args:
        in_program: the process is not ours: a second Ctrl-C raises `KeyboardInterrupt`, and outside
            the main thread, where Python allows no handler, only `request` asks to stop.

    Attributes:
        requested: whether `request` was called.
        on_abort: what a second Ctrl-C still does before it ends the process.
    """

    def __init__(self, *, in_program: bool = False) -> None:
        self.requested = False
        self.on_abort: Callable[[], None] = lambda: None
        self._noticed = False
        self._calls = 0  # to the service, by all processes alike
        self._shared = False  # the other processes are told; alone, there are none
        self._agreed = False
        self._at_once = False
        self._before: dict[int, Any] = {}
        if in_program and threading.current_thread() is not threading.main_thread():
            return
        for number in NOTICES:
            # Once connected, SIGTERM belongs to jax's coordination service; see _share.
            if number != signal.SIGTERM or not service.has_stop_service():
                self._before[number] = signal.signal(number, self._remember)
        # A job in a shell's background ignores Ctrl-C, which is meant for another.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            answer = self._interrupted if in_program else self._remember
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, answer)
            if not in_program:
                _answer_interrupts(self)
        # jaxdist.launch blocks notices until here, so that none is lost while Python imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Ask for a save and an end, as a signal does."""
        self.requested = True
        self._remember(0, None)

    def preempted(self) -> bool:
        """Whether the job stops after this step: the same answer in every process.

        All processes must ask equally often. The agreed call is one past the largest that any
        process had made, 0 before the first: calls are counted here and not by training steps, as
        a run that begins at step 150 would never meet the call 1 that a notice during its start
        asks for.
        """
        if not self._share():
            return self._noticed
        if not self._agreed:
            self._calls += 1
            self._agreed = service.reached_agreed_stop(self._calls)
            if self._agreed:  # the service has done its work; a further SIGTERM must not kill
                signal.signal(signal.SIGTERM, self._remember)
        return self._agreed

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """While processes wait for each other: a request to stop ends the command, 75, by itself.

        There is nothing to save yet, and nobody to agree on a step with.
        """
        self._at_once = True
        try:
            if self._noticed:
                self._end()
            yield
        finally:
            self._at_once = False

    def _end(self) -> NoReturn:
        print(
            "asked to stop before all processes of the job were there: nothing was started. "
            "Start the same command again.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_PREEMPTED)

    def _share(self) -> bool:
        """Whether there are other processes to tell; what came before they were is told now.

        jax's coordination service has taken SIGTERM by then (it replaces our handler without a
        word), tells all processes and picks the step.
        """
        if not self._shared:
            if not service.has_stop_service():
                return False
            self._shared = True
            if self._noticed:
                os.kill(os.getpid(), signal.SIGTERM)
        return True

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._noticed:
            raise KeyboardInterrupt
        print(_SAVING, file=sys.stderr, flush=True)
        self._remember(number, frame)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self._noticed = True
        if self._at_once:
            self._end()
        if self._shared and not self._agreed and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)


_SAVING = "\nCtrl-C: saving after this step; a second one ends at once, unsaved"


def _answer_interrupts(preemption: Preemption) -> None:
    """Answer Ctrl-C from a thread: the main one runs no Python while jax compiles or waits."""
    answered, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)

    def listen() -> None:
        count = 0
        while True:
            for number in os.read(answered, 64):
                count += number == signal.SIGINT
                if number == signal.SIGINT and count == 1:
                    print(_SAVING, file=sys.stderr, flush=True)
                elif count > 1:
                    last = threading.Thread(target=preemption.on_abort, daemon=True)
                    last.start()
                    last.join(_ABORT_S)  # a disk that hangs must not keep the process
                    os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=listen, name="interrupts", daemon=True).start()


class TraceRequests:
    """SIGUSR2, by which a person asks a process for a trace of its next steps.

    Make it first thing in a command, and in the main thread: until then the signal kills.
    """

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGUSR2, self._remember)

    def take(self) -> bool:
        """Whether one came since the last call; many at a time are one."""
        asked, self._asked = self._asked, False
        return asked

    def _remember(self, number: int, _: FrameType | None) -> None:
        self._asked = True
