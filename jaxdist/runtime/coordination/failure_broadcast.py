"""End all processes of a job when one fails, and report the cause, before jax detects the failure.

1. The process can still run code: it puts one line into the key-value store. A thread in each
   other process waits for this line and exits with the same code.
2. The process was killed (SIGKILL): its launcher kills the others on its host and writes
   `abort.json` next to the logs. Every watchdog checks for this file at each heartbeat. Without
   the launcher, a process whose collective fails puts the line, and the threads of all others
   answer: the process without an answer is named.
3. The host lost power or network: jax's heartbeat times out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from jaxdist.runtime.coordination import service
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import locate

_KEY = "failure"
_ANSWERS = "failure_answers"
FOLLOWED = "ends because process"
ABORT_FILE = "abort.json"
"""File next to the logs; watchdogs that see it end their processes."""
_REPORT_S = 1.0
"""Time for a process to report its own error before another process's failure ends it."""
_ANSWER_S = 3.0
"""Time for all processes to answer if one of them is lost, before the silent ones are named."""


def announce_failure(code: int, line: str, *, is_cause: bool = True) -> None:
    """Announce that this process ends with `code`; the others follow the first announcement.

    `is_cause` is False if the error in `line` is only a consequence of another process's end.
    """
    if not service.is_joined():
        return
    process_id, _ = service.process_id_and_count()
    failure = {
        "process": process_id,
        "host": socket.gethostname(),
        "code": code,
        "is_cause": is_cause,
        "line": ("failed: " if is_cause else "lost another process, which failed first: ")
        + line[:300],
    }
    # Fails if another process was first or process 0 exited; then the others have a cause already.
    with contextlib.suppress(Exception):
        service.put(_KEY, failure)
    with contextlib.suppress(Exception):  # process 0 exited
        if not service.get(_KEY, _REPORT_S)["is_cause"] and (silent := _silent_processes()):
            print(silent, file=sys.stderr, flush=True)
    if process_id == 0:
        # Process 0 runs the store. If it exited now, the others would abort before reading this.
        time.sleep(2 * _REPORT_S)


def watch_failures() -> None:
    """Start threads that end this process when another one announces its failure or is lost.

    Without the launcher, a thread also reports that jax aborts this process.
    """
    threading.Thread(target=_watch, name="jaxdist-failures", daemon=True).start()
    # The launcher reads from the signal and jax's lines which process was lost.
    if sys.platform == "linux" and "JAXDIST_LOG_DIR" not in os.environ:
        libc = ctypes.CDLL(None)
        libc.sysv_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.sysv_signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
        threading.Thread(target=_watch_abort, name="jaxdist-abort", daemon=True).start()


def _watch_abort() -> None:
    """End this process with a line and an exit code when jax's client aborts it.

    The client aborts in a C++ thread when process 0 is unreachable or any process has missed its
    heartbeats. It has a Python callback for this, but cannot convert the argument of the callback
    (jaxlib 0.10 to 0.12). So the handler of SIGABRT is libc's `sleep`, which is safe in a handler
    and delays the abort by as many seconds as the signal's number, 6. A System V handler is reset
    when it is called: the kernel's mask of caught signals shows the abort.
    """
    status = Path("/proc/self/status")
    while int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> 5 & 1:
        time.sleep(_REPORT_S / 2)
    time.sleep(_REPORT_S)  # `_watch` ends this process if it has lost process 0
    faulthandler.dump_traceback()
    _end(
        f"process {service.process_id_and_count()[0]} on {socket.gethostname()} was aborted: see "
        "the lines above. If they name the JAX distributed service, it ends because another "
        "process died or became unreachable: its log has the cause"
    )


def _watch() -> None:
    while service.is_joined():
        process_id, _ = service.process_id_and_count()
        try:
            failure = service.get(_KEY, 60.0)
        except TimeoutError:
            continue
        except Exception as error:  # disconnected: this process is leaving, or jax aborts it soon
            if "UNAVAILABLE" in str(error):
                _end(
                    f"process {process_id} on {socket.gethostname()} {FOLLOWED} 0, which runs "
                    "jax's coordination service, died or became unreachable: its log has the cause"
                )
            return
        if failure["process"] != process_id:
            _follow(failure, process_id)
        return


def _follow(failure: dict[str, Any], process_id: int) -> None:
    line = (
        f"process {process_id} on {socket.gethostname()} {FOLLOWED} {failure['process']} on "
        f"{failure['host']} {failure['line']}"
    )
    silent = "" if failure["is_cause"] else _silent_processes()
    if not silent or process_id == 0:  # the others read their answers from process 0
        time.sleep(_REPORT_S)
    _end(f"{silent}\n{line}".lstrip(), failure["code"])


def _silent_processes() -> str:
    """Answer for this process; return a line with the silent ones, "" if none or if launched."""
    if "JAXDIST_LOG_DIR" in os.environ:  # the launcher reports how each process ended
        return ""
    service.publish(_ANSWERS, socket.gethostname())
    time.sleep(_ANSWER_S)
    answers = service.published(_ANSWERS)
    process_id, count = service.process_id_and_count()
    silent = [str(i) for i in range(count) if i not in answers]
    if not silent or process_id not in answers:  # without an own answer, process 0 is gone
        return ""
    plural = "es" if len(silent) > 1 else ""
    return (
        f"no answer from process{plural} {few(silent, 8)} of {count} within {_ANSWER_S:.0f} s: "
        "killed, or the host is unreachable. See its log, and `dmesg` there for a process that "
        "the system killed"
    )


def _end(text: str, code: int = 1) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    write_error_file(code, text, "")
    os._exit(code)


def request_abort(folder: str | os.PathLike[str], process: int, line: str) -> None:
    """Write `abort.json` into a folder: its watchdogs end their processes and print `line`."""
    failure = {"process": process, "time": time.time(), "line": line}
    with contextlib.suppress(OSError):
        (locate(folder) / ABORT_FILE).write(json.dumps(failure), durable=False)


def write_error_file(code: int, text: str, advice: str) -> None:
    """Write exit code, error and advice into the launcher's JSON file, if it named one."""
    path = os.environ.get("JAXDIST_ERROR_FILE")
    if not path:
        return
    process_id, num_processes = service.process_id_and_count()
    job = {"process": process_id, "num_processes": num_processes, "host": socket.gethostname()}
    record = {"time": time.time(), **job, "pid": os.getpid(), "exit_code": code}
    record["monotonic"] = time.monotonic()  # orders errors in the launcher; wall clocks jump
    record |= {"error": text, "advice": advice}
    try:
        locate(path).write(json.dumps(record))
    except OSError as error:
        print(f"warning: the error above is not in {path}: {error}", file=sys.stderr)
