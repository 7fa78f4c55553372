"""Set up logging: console on process 0, one file per process; C output of commands to it only."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import sys

from jaxdist.runtime.storage import Location, locate


class _Console(logging.Formatter):
    """Formatter without timestamps; prefixes warnings and errors, colors `styled` records."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if hasattr(record, "styled") and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            text = record.styled
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _Stream(logging.StreamHandler):
    """Handler that prints one warning for OSErrors of writing, instead of many tracebacks."""

    baseFilename = "standard output"
    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            with contextlib.suppress(OSError):
                print(
                    f"warning: {self.baseFilename} cannot be written ({error.strerror}): lines "
                    "are missing until it can",
                    file=sys.stderr,
                    flush=True,
                )


class _File(_Stream, logging.FileHandler):
    """Log file of a process."""

    def __init__(self, location: Location) -> None:
        self._location = location
        logging.FileHandler.__init__(self, location)

    def _open(self) -> io.TextIOWrapper:
        return os.fdopen(self._location.append_descriptor(), "a", encoding="utf-8")


class _AboveBar(logging.Handler):
    """Handler that prints records above progress bars, except those that a bar shows."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        if not getattr(record, "in_bar", False):
            tqdm.write(self.format(record))


class _Held(logging.Handler):
    """Handler that keeps the newest records in memory until a log file is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.records: collections.deque[logging.LogRecord] = collections.deque(maxlen=1000)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def setup_logging(
    process_id: int = 0,
    log_file: str | os.PathLike[str] | None = None,
    *,
    owns_stdout: bool = True,
    has_bar: bool = False,
) -> logging.Logger:
    """Send the logger `jaxdist` to the console (process 0 only) and to this process's file.

    Without a file, the newest records are kept for the file of the next call. C output on stdout
    (gloo, NCCL) goes only there, unless `owns_stdout` is false because a user's program called us.
    With `has_bar`, records with the attribute `in_bar` are not printed, and the others are printed
    above the bar.
    """
    held = [
        handler for handler in logging.getLogger("jaxdist").handlers if isinstance(handler, _Held)
    ]
    logger = close_logs()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if log_file is None:
        logger.addHandler(_Held())
    else:
        path = locate(log_file)
        path.parent.make_directory()
        if owns_stdout:
            divert_c_stdout(path)
        to_file = _File(path)
        to_file.setFormatter(
            logging.Formatter(f"%(asctime)s p{process_id} %(levelname)s %(message)s")
        )
        logger.addHandler(to_file)
        for record in (record for handler in held for record in handler.records):
            to_file.handle(record)
    if process_id == 0:
        console = _AboveBar() if has_bar else _Stream(sys.stdout)
        console.setFormatter(_Console("%(message)s"))
        logger.addHandler(console)
    return logger


def close_logs() -> logging.Logger:
    """Undo `setup_logging`, except for the level and the redirected stdout; return the logger."""
    logger = logging.getLogger("jaxdist")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    return logger


def divert_c_stdout(path: str | os.PathLike[str]) -> None:
    """Redirect fd 1, but not `sys.stdout`, to `path`; do nothing if stdout is captured."""
    if not isinstance(sys.stdout, _Stdout):
        try:
            if sys.stdout.fileno() != 1:
                return
        except (OSError, ValueError, AttributeError):
            return
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
        sys.stdout = _Stdout(
            os.fdopen(os.dup(1), "wb"), encoding=sys.stdout.encoding, errors="replace"
        )
        sys.stdout.reconfigure(line_buffering=True)
    target = locate(path).append_descriptor()
    os.dup2(target, 1)
    os.close(target)


class _Stdout(io.TextIOWrapper):
    """Console stream after fd 1 was redirected; the type marks the redirection."""
