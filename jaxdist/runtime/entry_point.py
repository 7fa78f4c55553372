"""The entry point of every command: what its exit code means, and how it reports a failure."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from jaxdist.runtime.coordination import process_place, service
from jaxdist.runtime.coordination.failure_broadcast import FOLLOWED, announce_failure, leave_error
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.limits import raise_limits
from jaxdist.runtime.storage import flush_appended, is_url, locate
from jaxdist.settings import ConfigError

EXIT_OK = 0  # finished
EXIT_FAILURE = 1  # anything that has no code of its own
EXIT_CONFIG = 2  # bad usage or configuration: a restart cannot help
EXIT_PREEMPTED = (
    75  # saved, or asked to stop before all had joined, or too few hosts: start it again
)
EXIT_SDC = 85  # silent data corruption: devices hold different bits of one value, test them
EXIT_HANG = 86  # the watchdog ended a process that made no progress
EXIT_DIVERGED = 87  # losses, gradients or parameters stayed NaN or infinite
EXIT_INTERRUPTED = 130  # from the keyboard
FINAL_CODES = (EXIT_CONFIG, EXIT_SDC, EXIT_DIVERGED, EXIT_INTERRUPTED)
"""What a restart would not repair."""


class Agreed(int):
    """An exit code on which all processes have agreed, and not the failure of one of them."""


HOST_MEMORY_ADVICE = (
    "the host has too little memory: give the job more (SLURM: --mem), or use less: fewer data "
    "workers (data.num_workers), fewer processes on the host"
)

_CONSEQUENCE = ("Gloo", "NCCL", "Connection reset", "Connection closed", "Socket closed")
_MISSED = ("has not joined at", "cannot reach the coordinator")  # see rendezvous
_ADVICE = (
    (
        ("RESOURCE_EXHAUSTED", "out of memory", "OUT_OF_MEMORY"),
        "the devices have too little memory: use a smaller microbatch, remat, or more fsdp/tensor",
    ),
    (("MemoryError", "Cannot allocate memory", "std::bad_alloc"), HOST_MEMORY_ADVICE),
    (
        ("No space left", "no space:", "ENOSPC", "Disk quota"),
        "the disk is full: make room or name another --run-dir, then start the same command "
        "again; committed checkpoints are intact",
    ),
    (
        ("credentials have expired",),
        "put new credentials into the variables that the message names, then start the same "
        "command again: committed checkpoints are intact. Those of a role, of the machine or of a "
        "pod, renew themselves",
    ),
    (
        _CONSEQUENCE,
        "another process died or became unreachable first: its own log has the cause",
    ),
    (
        ("The last checkpoint with finite parameters",),
        "the same command would fail again: change the settings that the message names first",
    ),
    (
        ("No module named",),
        "a library is missing in this environment: install the package with its extras",
    ),
    (
        ("CUDA_ERROR", "cuInit", "XID", "ECC"),
        "the GPU or its driver failed: see `nvidia-smi` and `dmesg` there; another node may do",
    ),
)
RERUN = "start the same command again: it resumes from the newest valid checkpoint"
"""Advice of commands that train, where nothing better is known."""
_PROMPTLY_S = 2.0  # an upload that takes longer is told
_WAY_OUT_S = 60.0
_MEND = "mend what the message names, then start the same command again"


def run_command(main: Callable[[], int | None], *, resumes: bool = False) -> NoReturn:
    """Run `main` and end the process with its exit code, without hanging on the way out.

    * `ConfigError`: its problems on stderr, one per line, and exit code 2; no traceback.
    * `OSError` of a URL, as of an object store that is away: one line and exit code 1.
    * Ctrl-C: one line, 130.
    * `SystemExit` (`--help`): its code.
    * Anything else: one closing block - what, where, traceback, what to do - and exit code 1.

    `kill -QUIT` prints the stacks of all threads to stderr while the command goes on. `resumes`:
    the same command goes on with what was saved, which the closing block then says.
    """
    # Tracing and reading weights make millions of objects that live on. Looking through them after
    # every 700 new ones takes a fifth of a start, and stops one process of many at a time later.
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
            code = _report(error, RERUN if resumes else _MEND)
        line = _first_line(error)
    _stdout_is_closed()
    _leave(code, line)


def _stdout_is_closed() -> bool:
    """Whether nobody reads stdout any more; what is left for it goes nowhere, without an error."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLERR)  # of a pipe: its reader is gone
        if not poll.poll(0):
            return False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no stdout at all
        return False
    return True


def _system_exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or EXIT_OK
    print(leaving.code, file=sys.stderr)
    return EXIT_FAILURE


def _report(error: BaseException, otherwise: str) -> int:
    """Print what ended the command, leave it for the launcher, and return the exit code."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = ConfigError(f"{_first_line(error)}. Use a shorter path.")
    if isinstance(error, ConfigError):
        text, code, advice = str(error), EXIT_CONFIG, ""  # every problem names its fix
        print(text, file=sys.stderr)
    elif isinstance(error, OSError) and is_url(str(error.filename)):
        text, code = f"{error.filename}: {error.strerror}", EXIT_FAILURE
        advice = otherwise
        _tell(f"{text}; {advice}")
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
        # An error of a guard brings its own code and advice.
        code = getattr(error, "exit_code", EXIT_FAILURE)
        advice = getattr(error, "advice", "") or advice_for(
            f"{type(error).__name__}: {error}", otherwise
        )
        _print_block(error, text, advice)
    leave_error(code, text, advice)
    return code


def _print_block(error: BaseException, text: str, advice: str) -> None:
    process, total = process_place()
    where = f"process {process} of {total} on {socket.gethostname()} (pid {os.getpid()})"
    rule = "=" * 100
    block = (
        f"\n{rule}\nfailed:  {_first_line(error)}\nwhere:   {where}\n\n{text}\n\n"
        f"to do:   {advice}\n{rule}"
    )
    _tell(block)


def _tell(text: str) -> None:
    """Print to stderr and into the log of this process, if it has one."""
    print(text, file=sys.stderr, flush=True)
    for handler in logging.getLogger("jaxdist").handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def advice_for(message: str, otherwise: str = RERUN) -> str:
    """One line of what to do about an error with this message; `otherwise` where none is known."""
    fitting = (advice for marks, advice in _ADVICE if any(mark in message for mark in marks))
    return next(fitting, otherwise)


def is_consequence(error: str) -> bool:
    """Whether this error text tells of another process's end rather than of a cause."""
    return any(mark in error for mark in (*_CONSEQUENCE, *_MISSED, FOLLOWED))


def _leave(code: int, line: str) -> NoReturn:
    _write_exit_code(code)
    if process_place()[1] == 1:
        _flush()
        _bound_the_way_out(code)
        sys.exit(code)
    # jax's atexit hook waits for every process. That is right after a success; after a failure
    # the others are stuck in a collective, waiting for us.
    _flush()
    if code in (EXIT_OK, EXIT_PREEMPTED) or isinstance(code, Agreed):
        try:
            with _waiting("waiting for the other processes to end"):
                service.leave()
        except Exception as error:  # the work is done and saved
            print(f"warning: leaving without the other processes: {error}", file=sys.stderr)
    else:
        announce_failure(code, line)
    _flush()
    os._exit(code)


def _write_exit_code(code: int) -> None:
    """Write process 0's exit code for the batch script; srun's is the highest of all tasks."""
    path = os.environ.get("JAXDIST_EXIT_CODE_FILE")
    if not path or process_place()[0] != 0 or int(os.environ.get("SLURM_PROCID", 0)) != 0:
        return
    try:
        locate(path).write(f"{code}\n")
    except OSError as failure:
        print(f"cannot write {path}: {failure}", file=sys.stderr)


def _flush() -> None:
    for handler in logging.getLogger("jaxdist").handlers:
        with contextlib.suppress(OSError, ValueError):  # a full disk must not change the exit code
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nor a closed pipe
            stream.flush()
    if flush_appended(_PROMPTLY_S):
        return
    with _waiting("uploading the last lines of this process"):
        if not flush_appended(ending=True):
            print("warning: the store does not answer: they are lost", file=sys.stderr, flush=True)


def _waiting(what: str) -> contextlib.AbstractContextManager[None]:
    from jaxdist.runtime.progress import waiting  # few commands get here, and it takes a while

    return waiting(what)


def _bound_the_way_out(code: int) -> None:
    """From Python's end on, give threads and exit functions `_WAY_OUT_S`, then end the process.

    One of them may wait for a server that is gone, or a library for a device; the work is done.
    """
    leaving = threading.Event()

    def guard() -> None:
        leaving.wait()
        time.sleep(_WAY_OUT_S / 6)
        print(f"waiting for {_still_there()} to end ...", file=sys.stderr, flush=True)
        time.sleep(_WAY_OUT_S * 5 / 6)
        text = f"warning: left after {_WAY_OUT_S:.0f} s without waiting for {_still_there()}"
        print(text, file=sys.stderr, flush=True)
        os._exit(code)

    threading.Thread(target=guard, name="way out", daemon=True).start()
    # Not atexit, whose functions run when all threads have ended.
    threading._register_atexit(leaving.set)  # type: ignore[attr-defined]  # as Executors do


def _still_there() -> str:
    """Which threads Python waits for at its end."""
    names = [each.name for each in threading.enumerate() if not each.daemon and each.is_alive()]
    others = [name for name in names if name != threading.main_thread().name]
    return few(others, 4) if others else "exit functions of libraries"
