"""Long waits say what they wait for: a bar for a person, a log line each half minute elsewhere.

A person looks at a terminal or a notebook. Only process 0 shows bars; every process has lines in
its own log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from jaxdist.runtime.coordination import process_place
from jaxdist.runtime.formatting.numbers import duration, in_si, percent

log = logging.getLogger("jaxdist")

EVERY_S = 30.0
"""Seconds between two log lines of one wait."""

SHORT_S = 1.0
"""Seconds that a person waits without asking why."""


def has_watcher() -> bool:
    """Whether a person looks on, at a terminal or a notebook, and this process may show bars."""
    return (sys.stderr.isatty() or _is_notebook()) and process_place()[0] == 0


def make_bar(*, disable: bool | None = None, **options: Any) -> Any:
    """A bar of tqdm for a terminal or a notebook; `disable=None` shows it where a person looks on.

    A notebook without ipywidgets gets the bar of a terminal.
    """
    kind: Any = tqdm
    if _is_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm_notebook

        kind = tqdm_notebook
    disable = not has_watcher() if disable is None else disable
    return kind(dynamic_ncols=True, disable=disable, **options)


def _is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; one in a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class Progress:
    """How far work of `total` units ("B", "batches"; 0 = not known) is; a context manager."""

    def __init__(self, what: str, total: int, unit: str):
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._begun = self._said = time.monotonic()
        self._bar = make_bar(
            total=total or None, desc=what, unit=unit, unit_scale=True, delay=SHORT_S, leave=False
        )

    def reach(self, done: int) -> None:
        """Say that so much of the work is done."""
        self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        if self._bar.disable and now - self._said >= EVERY_S:
            self._said = now
            rate = done / (now - self._begun)
            share = f"{percent(done / self._total, 0)} of {in_si(self._total)} {self._unit}, "
            left = f", {duration((self._total - done) / rate)} left" if self._total and rate else ""
            _say(f"{self._what}: {share if self._total else ''}{in_si(rate)} {self._unit}/s{left}")

    def advance(self, amount: int = 1) -> None:
        """Say that so much more is done."""
        self.reach(self._done + amount)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Announce a wait that cannot tell how far it is, and say each half minute that it lasts.

    A wait that is over within `SHORT_S` is not worth a line.
    """
    begun, over = time.monotonic(), threading.Event()

    def remind() -> None:
        if not over.wait(SHORT_S):
            _say(f"{what} ...")
        while not over.wait(EVERY_S):
            _say(f"{what}: {duration(time.monotonic() - begun)} so far")

    threading.Thread(target=remind, name=f"waiting: {what}", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def in_time(
    what: str, action: Callable[[], object], timeout_s: float, *, announce: bool = True
) -> bool:
    """Do the last of something, and go on without it after so many seconds.

    What is left behind is said, and what is waited for as `waiting` does, unless `announce` is
    false. Raises what `action` raises in time.

    Returns:
        Whether it was done. If not, it goes on beside, for as long as the process lives.
    """
    raised: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=act, name=what, daemon=True)
    thread.start()
    with waiting(what) if announce else contextlib.nullcontext():
        thread.join(timeout_s)
    if thread.is_alive():
        log.warning("%s: not done after %s, which is not waited for", what, duration(timeout_s))
        return False
    if raised:
        raise raised[0]
    return True


def _say(line: str) -> None:
    if log.handlers:
        log.info("%s", line)
    else:  # a command that keeps no log
        print(line, file=sys.stderr, flush=True)
