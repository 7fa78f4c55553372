"""Run a command: map its result to an exit code and report failures."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import logging
import os
import select
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from jaxdist.runtime.coordination import process_id_and_count, service
from jaxdist.runtime.coordination.failure_broadcast import (
    FOLLOWED,
    announce_failure,
    write_error_file,
)
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.host_memory import raise_limits
from jaxdist.runtime.storage import flush_appended, is_url, locate
from jaxdist.settings import ConfigError

EXIT_OK = 0  # finished
EXIT_FAILURE = 1  # any other failure
EXIT_CONFIG = 2  # bad usage or configuration: a restart cannot help
EXIT_PREEMPTED = 75  # saved, stopped while joining, or too few hosts: start it again
EXIT_SDC = 85  # silent data corruption: replicas of a value differ; test the devices
EXIT_HANG = 86  # the watchdog killed a process that made no progress
EXIT_DIVERGED = 87  # stopped for losses, gradients or weights that are not finite, or a spike
EXIT_INTERRUPTED = 130  # from the keyboard
FINAL_CODES = (EXIT_CONFIG, EXIT_SDC, EXIT_DIVERGED, EXIT_INTERRUPTED)
"""Exit codes after which a restart does not help."""


class Agreed(int):
    """An exit code on which all processes agreed; the failure of one process is a plain int."""


HOST_MEMORY_ADVICE = (
    "the host is out of memory: give the job more (SLURM: --mem), or use less: fewer data "
    "workers (data.num_workers), fewer processes on the host"
)

_CONSEQUENCE = ("Gloo", "NCCL", "Connection reset", "Connection closed", "Socket closed")
_MISSED = ("has not joined at", "cannot reach the coordinator")  # see rendezvous
_ADVICE = (
    (  # first: TensorStore reports a full disk as RESOURCE_EXHAUSTED
        ("No space left", "no space:", "ENOSPC", "Disk quota"),
        "the disk of the path in the message is full: free space there, or choose another disk "
        "(--run-dir; JAXDIST_CACHE for caches), then start the same command again; committed "
        "checkpoints are intact",
    ),
    (
        ("is gone: is its file system still mounted?",),
        "mount its file system again, or move the directory back or name its new path (--run-dir), "
        "then start the same command again: it resumes from the newest valid checkpoint there",
    ),
    (
        ("File too large",),
        "a file exceeds the limit of its file system or of `ulimit -f`: raise the limit, or choose "
        "another disk (--run-dir), then start the same command again; committed checkpoints are "
        "intact",
    ),
    (
        ("RESOURCE_EXHAUSTED", "out of memory", "OUT_OF_MEMORY"),
        "the devices are out of memory: use a smaller microbatch, remat, or more fsdp/tensor",
    ),
    (("MemoryError", "Cannot allocate memory", "std::bad_alloc"), HOST_MEMORY_ADVICE),
    (
        ("credentials have expired",),
        "set the variables in the message to new credentials, then start the same command again; "
        "committed checkpoints are intact. Credentials of a role, machine or pod renew themselves",
    ),
    (
        _CONSEQUENCE,
        "if another process died or became unreachable first, its log has the cause",
    ),
    (
        ("The last checkpoint with finite parameters",),
        "the same command would fail again: first change the settings in the message",
    ),
    (
        ("No module named",),
        "a library is not installed: install the package with its extras",
    ),
    (
        ("CUDA_ERROR", "cuInit", "XID", "ECC"),
        "the GPU or its driver failed: see `nvidia-smi` and `dmesg` there, or use another node",
    ),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
RERUN = "start the same command again: it resumes from the newest valid checkpoint"
"""Default advice of commands that train."""
_PROMPTLY_S = 2.0  # uploads that take longer are announced
_EXIT_S = 60.0
_FIX = "fix the error above, then start the same command again"


def run_command(main: Callable[[], int | None], *, resumes: bool = False) -> NoReturn:
    """Run `main` and end the process with its exit code, without hanging at exit.

    `ConfigError` prints its problems to stderr without traceback (code 2). `OSError` of a URL or of
    a full disk (code 1) and Ctrl-C (130) print one line, a closed stdout none (141). Others but
    `SystemExit` print advice and a traceback, or with `has_traceback = False` their message (their
    `exit_code`, or 1). `kill -QUIT` prints the stacks of all threads. With `resumes`, the default
    advice is `RERUN`, and the command does not fail if only its output is lost.
    """
    # Tracing creates millions of long-lived objects; the default setting takes 1/5 of a start.
    gc.set_threshold(100_000, 50, 100)
    raise_limits()
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)
    line = ""
    try:
        code = main() or EXIT_OK
        line = f"exit code {code}"
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code, line = EXIT_INTERRUPTED, "interrupted from the keyboard"
    except SystemExit as leaving:
        code = _system_exit_code(leaving)
        line = f"exit code {code}"
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():  # `... | head`
            code = 128 + signal.SIGPIPE
        else:
            code = _report(error, RERUN if resumes else _FIX)
        line = _first_line(error)
    _stdout_is_closed()
    _drop_unwritable(sys.stderr)
    lost = _drop_unwritable(sys.stdout)
    if lost and code == EXIT_OK:
        lost.filename = "standard output"
        if resumes:
            print(f"warning: {lost.filename}: {lost.strerror}: lines are missing", file=sys.stderr)
        else:
            code, line = _report(lost, _FIX), _first_line(lost)
    _exit(code, line)


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout has closed it; if so, redirect stdout to /dev/null."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLERR)  # set if the reader closed the pipe
        if not poll.poll(0):
            return False
        _redirect(sys.stdout)
    except (OSError, ValueError):  # no stdout at all
        return False
    return True


def _redirect(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _drop_unwritable(stream: TextIO) -> OSError | None:
    """If a stream cannot be written, redirect it to /dev/null and return the error, else None.

    Otherwise Python would write the same lines again when it exits, and end with code 120.
    """
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            _redirect(stream)
            stream.flush()
        return error
    except (AttributeError, ValueError):  # no such stream
        pass
    return None


def _system_exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or EXIT_OK
    print(leaving.code, file=sys.stderr)
    return EXIT_FAILURE


def _report(error: BaseException, otherwise: str) -> int:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = ConfigError(f"{_first_line(error)}. Use a shorter path.")
    if isinstance(error, ConfigError):
        text, code, advice = str(error), EXIT_CONFIG, ""  # each problem already includes a fix
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
    elif isinstance(error, OSError) and (
        is_url(str(path := error.filename))
        or (error.errno in _FULL and (path := error.filename or _full_stdout()))
    ):
        text, code = f"{path}: {error.strerror}", EXIT_FAILURE
        advice = advice_for(text, otherwise)
        _print_error(f"{text}; {advice}")
    else:
        text = str(error)
        if getattr(error, "has_traceback", True):
            text = "".join(traceback.format_exception(error)).rstrip()
        # Some errors (e.g. of the loss guard) have their own exit code and advice.
        code = getattr(error, "exit_code", EXIT_FAILURE)
        advice = getattr(error, "advice", "") or advice_for(
            f"{type(error).__name__}: {error}", otherwise
        )
        process, total = process_id_and_count()
        where = f"process {process} of {total} on {socket.gethostname()} (pid {os.getpid()})"
        rule = "=" * 100
        block = (
            f"\n{rule}\nfailed:  {_first_line(error)}\nwhere:   {where}\n\n{text}\n\n"
            f"to do:   {advice}\n{rule}"
        )
        _print_error(block)
    write_error_file(code, text, advice)
    return code


def _full_stdout() -> str:
    """Return "standard output" if its disk is full, else ""."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # after an error, `flush` has nothing left to write
    except OSError as error:
        return "standard output" if error.errno in _FULL else ""
    return ""


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr is on a full disk
        print(text, file=sys.stderr, flush=True)
    for handler in logging.getLogger("jaxdist").handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def advice_for(message: str, otherwise: str = RERUN) -> str:
    """Return one line of advice for an error message; `otherwise` if none matches."""
    fitting = (advice for marks, advice in _ADVICE if any(mark in message for mark in marks))
    return next(fitting, otherwise)


def is_consequence(error: str) -> bool:
    """Return whether an error text looks as if another process ended first or is missing."""
    return any(mark in error for mark in (*_CONSEQUENCE, *_MISSED, FOLLOWED))


def shell_python() -> str:
    """Return a shell word for this Python: `python` if PATH finds that beside it, or a path."""
    on_path, own = shutil.which("python"), Path(sys.executable)
    if on_path and Path(on_path).parent == own.parent:
        return "python"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def _exit(code: int, line: str) -> NoReturn:
    _write_exit_code(code)
    if process_id_and_count()[1] == 1:
        _flush()
        _limit_exit_time(code)
        sys.exit(code)
    # Avoid jax's atexit hook: it waits for every process, which deadlocks after a failure.
    _flush()
    if code in (EXIT_OK, EXIT_PREEMPTED) or isinstance(code, Agreed):
        try:
            with _show_waiting("waiting for the other processes to exit"):
                service.leave()
        except Exception as error:  # all work is saved
            print(f"warning: exiting without the other processes: {error}", file=sys.stderr)
    else:
        announce_failure(code, line, is_cause=not is_consequence(line))
    _flush()
    os._exit(code)


def _write_exit_code(code: int) -> None:
    path = os.environ.get("JAXDIST_EXIT_CODE_FILE")
    if not path or process_id_and_count()[0] != 0 or int(os.environ.get("SLURM_PROCID", 0)) != 0:
        return
    try:
        locate(path).write(f"{code}\n")
    except OSError as failure:
        print(f"warning: the exit code is not in {path}: {failure}", file=sys.stderr)


def _flush() -> None:
    for handler in logging.getLogger("jaxdist").handlers:
        with contextlib.suppress(OSError, ValueError):  # a full disk must not change the exit code
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not change it either
            stream.flush()
    if flush_appended(_PROMPTLY_S):
        return
    with _show_waiting("uploading the last lines of this process"):
        if not flush_appended(ending=True):
            print(
                "warning: the object store does not answer; the last lines may be lost",
                file=sys.stderr,
                flush=True,
            )


def _show_waiting(what: str) -> contextlib.AbstractContextManager[None]:
    from jaxdist.runtime.progress import waiting  # a slow import that few commands need

    return waiting(what)


def _limit_exit_time(code: int) -> None:
    """When Python exits, give threads and exit functions `_EXIT_S`, then kill the process."""
    leaving = threading.Event()

    def guard() -> None:
        leaving.wait()
        time.sleep(_EXIT_S / 6)
        print(f"exiting: waiting for {_pending_threads()} ...", file=sys.stderr, flush=True)
        time.sleep(_EXIT_S * 5 / 6)
        text = f"warning: exiting after {_EXIT_S:.0f} s without waiting for {_pending_threads()}"
        print(text, file=sys.stderr, flush=True)
        os._exit(code)

    threading.Thread(target=guard, name="exit", daemon=True).start()
    # Functions registered with `atexit` would run only after all threads have ended.
    threading._register_atexit(leaving.set)  # type: ignore[attr-defined]  # as Executors do


def _pending_threads() -> str:
    names = [each.name for each in threading.enumerate() if not each.daemon and each.is_alive()]
    others = [name for name in names if name != threading.main_thread().name]
    return few(others, 4) if others else "exit functions of libraries"
