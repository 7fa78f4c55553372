"""Handle stop requests: SIGTERM, SIGUSR1 or Ctrl-C stops all processes after the same step.

The loop calls `preempted()` once per step in every process. If it returns True, the loop saves and
exits. A second Ctrl-C ends the process, or raises `KeyboardInterrupt` in a user's program.
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
"""Signals that request a save and an exit: schedulers send TERM, our SLURM scripts USR1."""

_ABORT_S = 2.0
"""Time-out for recording why the run ended after a second Ctrl-C."""


class Preemption(contextlib.AbstractContextManager["Preemption"]):
    """Stop requests to this process, and the step at which all processes act on them.

    Create it at the start of a command, in the main thread. As a context manager it restores the
    previous handlers.

    Args:
        in_program: a user's program called us: a second Ctrl-C raises `KeyboardInterrupt`. Outside
            the main thread Python allows no handlers, so signals do not stop the run.

    Attributes:
        requested: whether `request` was called.
        reason: of that request, for the summary.
        on_abort: called by a second Ctrl-C before it ends the process.
    """

    def __init__(self, *, in_program: bool = False) -> None:
        self.requested, self.reason = False, ""
        self.on_abort: Callable[[], None] = lambda: None
        self._noticed = False
        self._calls = 0  # calls of the stop service, the same in all processes
        self._shared = False  # requests are forwarded to other processes
        self._agreed = False
        self._at_once = False
        self._before: dict[int, Any] = {}
        if in_program and threading.current_thread() is not threading.main_thread():
            return
        for number in NOTICES:
            # After joining, jax's coordination service handles SIGTERM; see _share.
            if number != signal.SIGTERM or not service.has_stop_service():
                self._before[number] = signal.signal(number, self._remember)
        # Background jobs of a shell must keep ignoring Ctrl-C.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            answer = self._interrupted if in_program else self._remember
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, answer)
            if not in_program:
                _answer_interrupts(self)
        # jaxdist.launch blocks these signals until here, so that none is lost during imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def request(self, reason: str = "") -> None:
        """Request a save and an exit with code 0, for a callback."""
        self.requested, self.reason = True, reason
        self.notice()

    def notice(self) -> None:
        """Request a save and an exit with code 75, as a signal does."""
        self._remember(0, None)

    def preempted(self) -> bool:
        """Return whether the job stops after this step; the same in every process.

        All processes must call it equally often. After a signal they agree on a call number, one
        more than the most calls in any process. From that call on all return True. Step numbers
        would not work: if the signal arrives before the first step, a run that resumes at step 150
        would never reach the agreed step 1.
        """
        if not self._share():
            return self._noticed
        if not self._agreed:
            self._calls += 1
            self._agreed = service.reached_agreed_stop(self._calls)
            if self._agreed:  # the service no longer handles SIGTERM, which must not kill
                signal.signal(signal.SIGTERM, self._remember)
        return self._agreed

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """In this block, a stop request exits immediately with code 75 (for waits on others)."""
        self._at_once = True
        try:
            if self._noticed:
                self._end()
            yield
        finally:
            self._at_once = False

    def _end(self) -> NoReturn:
        print(
            "stopped before all processes had joined: nothing was started. "
            "Start the same command again.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_PREEMPTED)

    def _share(self) -> bool:
        """Return whether jax's coordination service handles SIGTERM; forward an earlier request.

        The service then has replaced our handler, and chooses the number of the call.
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


_SAVING = "\nCtrl-C: saving after this step; a second one ends immediately, unsaved"


def _answer_interrupts(preemption: Preemption) -> None:
    """Start a thread that handles Ctrl-C: the main one runs no Python while jax compiles."""
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
                    last.join(_ABORT_S)  # a hanging disk must not block the exit
                    os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=listen, name="interrupts", daemon=True).start()


class TraceRequests:
    """Handle SIGUSR2, which requests a trace of the next steps; create it in the main thread."""

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGUSR2, self._remember)

    def take(self) -> bool:
        """Return whether a request came since the last call."""
        requested, self._requested = self._requested, False
        return requested

    def _remember(self, number: int, _: FrameType | None) -> None:
        self._requested = True
