"""Report the progress of long waits: a bar of process 0 or, without a bar, log lines."""

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

from jaxdist.runtime.coordination import process_id_and_count
from jaxdist.runtime.formatting.numbers import duration, in_si, percent

log = logging.getLogger("jaxdist")

EVERY_S = 30.0
"""Seconds between log lines of one wait."""

SHORT_S = 1.0
"""Seconds before a wait is shown."""


def has_watcher() -> bool:
    """Return whether this is process 0 on a terminal or in a notebook."""
    return (sys.stderr.isatty() or _is_notebook()) and process_id_and_count()[0] == 0


def make_bar(*, disable: bool | None = None, **options: Any) -> Any:
    """Return a tqdm bar for a terminal or a notebook; `disable=None` shows it if `has_watcher`."""
    kind: Any = tqdm
    if _is_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm_notebook

        kind = tqdm_notebook
    disable = not has_watcher() if disable is None else disable
    return kind(dynamic_ncols=True, disable=disable, **options)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Progress of work of `total` (0 = unknown) in a `unit`, e.g. "B"; a context manager."""

    def __init__(self, what: str, total: int, unit: str):
        self._what, self._total, self._unit = what, total, unit
        self._done = self._earlier = 0
        self._begun = self._logged = time.monotonic()
        self._bar = make_bar(
            total=total or None, desc=what, unit=unit, unit_scale=True, delay=SHORT_S, leave=False
        )

    def reach(self, done: int) -> None:
        """Set the amount of finished work."""
        self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        if self._bar.disable and now - self._logged >= EVERY_S:
            self._logged = now
            rate = (done - self._earlier) / (now - self._begun)
            share = f"{percent(done / self._total, 0)} of {in_si(self._total)} {self._unit}, "
            left = f", {duration((self._total - done) / rate)} left" if self._total and rate else ""
            _log_line(
                f"{self._what}: {share if self._total else ''}{in_si(rate)} {self._unit}/s{left}"
            )

    def advance(self, amount: int = 1) -> None:
        """Add to the amount of finished work."""
        self.reach(self._done + amount)

    def skip(self, amount: int) -> None:
        """Add work that was finished earlier, which does not count in the rate."""
        self._earlier += amount
        self.reach(self._done + amount)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def waiting(what: str, after_s: float | None = None) -> Iterator[None]:
    """Log `what` after `after_s` seconds (default `SHORT_S`) of a block, then every half minute."""
    begun, over = time.monotonic(), threading.Event()

    def remind() -> None:
        if not over.wait(SHORT_S if after_s is None else after_s):
            _log_line(f"{what} ...")
        while not over.wait(EVERY_S):
            _log_line(f"{what}: {duration(time.monotonic() - begun)} so far")

    threading.Thread(target=remind, name=f"waiting: {what}", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def in_time(
    what: str, action: Callable[[], object], timeout_s: float, *, announce: bool = True
) -> bool:
    """Run `action` and wait for it at most `timeout_s`; return whether it finished.

    After the time-out the action continues on a daemon thread and a warning is logged. Before it,
    an error of the action is raised. The wait is reported by `waiting` unless `announce` is false.
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
        log.warning("%s: not finished after %s, no longer waiting", what, duration(timeout_s))
        return False
    if raised:
        raise raised[0]
    return True


def _log_line(line: str) -> None:
    if log.handlers:
        log.info("%s", line)
    else:  # the command has no log
        print(line, file=sys.stderr, flush=True)
