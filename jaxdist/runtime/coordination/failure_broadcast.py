"""One process's failure ends all processes of the job, and each of them says why.

Without it, the others would wait in a collective for a process that has failed: jax notices only
when that process has ended, and then half a minute later. Three ways a failure reaches the others:

1. The process can still speak: it puts one line into the key-value store. A thread in every other
   process waits for that line and ends its process with the same exit code.
2. The process was killed without a word (SIGKILL): its launcher notices at once, ends the others on
   its host, and writes `abort.json` next to the logs, which every watchdog looks for each second.
3. The host has lost power or its network: jax's heartbeat runs out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from jaxdist.runtime.coordination import service
from jaxdist.runtime.storage import locate

_KEY = "failure"
FOLLOWED = "ends because process"
ABORT_FILE = "abort.json"
"""File next to the logs that ends all processes whose watchdogs see it appear."""
_OWN_WORDS_S = 1.0
"""Time for a process to report its own error before another's failure ends it."""


def announce_failure(code: int, line: str) -> None:
    """Tell every process of the job that this one ends with exit code `code`; alone, do nothing.

    Only the first announcement of a job counts. Callable from any thread.
    """
    if not service.is_joined():
        return
    process_id, _ = service.process_place()
    said = {"process": process_id, "host": socket.gethostname(), "code": code, "line": line[:300]}
    # It fails when another process was first, or process 0 is gone: then the others know.
    with contextlib.suppress(Exception):
        service.put(_KEY, said)
    if process_id == 0:
        # The store lives in process 0; its end would abort the others before they read this.
        time.sleep(2 * _OWN_WORDS_S)


def watch_failures() -> None:
    """End this process, with a line on stderr, soon after another one has announced its failure."""
    threading.Thread(target=_watch, name="jaxdist-failures", daemon=True).start()


def _watch() -> None:
    while service.is_joined():
        try:
            said = service.get(_KEY, 60.0)
        except TimeoutError:
            continue
        except Exception:
            return  # the connection has ended: the process is leaving, or jax is ending it
        process_id, _ = service.process_place()
        if said["process"] != process_id:
            _follow(said, process_id)
        return


def _follow(said: dict[str, Any], process_id: int) -> None:
    time.sleep(_OWN_WORDS_S)
    text = (
        f"process {process_id} on {socket.gethostname()} {FOLLOWED} {said['process']} on "
        f"{said['host']} failed: {said['line']}"
    )
    print(text, file=sys.stderr, flush=True)
    leave_error(said["code"], text, "")
    os._exit(said["code"])


def request_abort(folder: str | os.PathLike[str], process: int, line: str) -> None:
    """Tell all watchdogs that look at this folder to end their processes, and why."""
    said = {"process": process, "time": time.time(), "line": line}
    with contextlib.suppress(OSError):
        (locate(folder) / ABORT_FILE).write(json.dumps(said), durable=False)


def leave_error(code: int, text: str, advice: str) -> None:
    """Tell the launcher why this process ends, in the file that it asked for."""
    path = os.environ.get("JAXDIST_ERROR_FILE")
    if not path:
        return
    process_id, num_processes = service.process_place()
    place = {"process": process_id, "num_processes": num_processes, "host": socket.gethostname()}
    record = {"time": time.time(), **place, "pid": os.getpid(), "exit_code": code}
    record["monotonic"] = time.monotonic()  # what the launcher orders by: the clock may be set
    record |= {"error": text, "advice": advice}
    try:
        locate(path).write(json.dumps(record))
    except OSError as failure:
        print(f"cannot write {path}: {failure}", file=sys.stderr)
