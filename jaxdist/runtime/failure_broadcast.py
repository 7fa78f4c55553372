"""The other processes of a job: one's failure is told to all, so that all end at once and say why.

A process that fails cannot be noticed by the others while it lives: they wait for it in a
collective, and jax's own heartbeat takes half a minute even when it is gone. So the failing process
writes one line to the coordinator's key-value store, and a thread in each process waits for it.
What is killed without a word (SIGKILL) its launcher notices at once; it ends the others on its host
and raises an alarm in the run directory, which the watchdogs on other hosts look for every second.
Power failures are left to the heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

_KEY = "jaxdist/failure"
FOLLOWED = "ends because process"
ALARM = "abort.json"
"""File beside the logs that ends all processes whose watchdogs see it appear."""
_OWN_WORDS_S = 1.0
"""Time for a process to report its own error before another's failure ends it."""


def announce_failure(code: int, line: str) -> None:
    """Tell every process of the job that this one ends with exit code `code`; alone, nothing.

    The first announcement stands. Callable from any thread.
    """
    state = _state()
    if state is None:
        return
    said = {
        "process": state.process_id,
        "host": socket.gethostname(),
        "code": code,
        "line": line[:300],
    }
    # It fails when someone was first, or the coordinator is gone: the others know.
    with contextlib.suppress(Exception):
        state.client.key_value_set(_KEY, json.dumps(said))
    if state.process_id == 0:
        # The coordinator lives in process 0; its end would abort the others before they read this.
        time.sleep(2 * _OWN_WORDS_S)


def watch_failures() -> None:
    """End this process, with a line on stderr, soon after another one has announced its failure."""
    threading.Thread(target=_watch, name="jaxdist-peers", daemon=True).start()


def _watch() -> None:
    while (state := _state()) is not None:
        try:
            said = json.loads(state.client.blocking_key_value_get(_KEY, 60_000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            return  # the connection has ended: the process is leaving, or jax is ending it
        if said["process"] != state.process_id:
            _follow(said, state.process_id)
        return


def _follow(said: dict[str, Any], own_index: int) -> None:
    time.sleep(_OWN_WORDS_S)
    text = (
        f"process {own_index} on {socket.gethostname()} {FOLLOWED} {said['process']} on "
        f"{said['host']} failed: {said['line']}"
    )
    print(text, file=sys.stderr, flush=True)
    leave_error(said["code"], text, "")
    os._exit(said["code"])


def raise_alarm(folder: Path, process: int, line: str) -> None:
    """Tell all watchdogs that look at this folder to end their processes, and why."""
    fresh = folder / f"abort-{process}.writing"
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps({"process": process, "time": time.time(), "line": line}))
        os.replace(fresh, folder / ALARM)


def leave_error(code: int, text: str, advice: str) -> None:
    """Tell the launcher why this process ends, in the file that it asked for."""
    path = os.environ.get("JAXDIST_ERROR_FILE")
    if not path:
        return
    process, total = process_place()
    record = {
        "time": time.time(),
        "process": process,
        "num_processes": total,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "exit_code": code,
        "error": text,
        "advice": advice,
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(record, file)
    except OSError as failure:
        print(f"cannot write {path}: {failure}", file=sys.stderr)


def exchange(topic: str, said: Any, timeout_s: float) -> list[Any]:
    """What every process says about `topic`, by process id, through the coordinator.

    No device takes part, so it works before devices start and while they compute. It returns when
    all have spoken, which makes it a barrier too.

    Args:
        topic: the same in all processes, and used once in the life of a job.
        said: what JSON can hold.
        timeout_s: seconds to wait for each process; jax's error names the key that is missing.
    """
    state = _state()
    if state is None:
        return [said]
    state.client.key_value_set(f"jaxdist/{topic}/{state.process_id}", json.dumps(said))
    return [
        json.loads(
            state.client.blocking_key_value_get(f"jaxdist/{topic}/{i}", int(timeout_s * 1000))
        )
        for i in range(state.num_processes)
    ]


def publish(topic: str, said: Any) -> None:
    """Leave what this process says about `topic` with the coordinator, over what it said before.

    Waits for nobody; alone, nothing is left. A coordinator that cannot be reached is no error here.
    """
    state = _state()
    if state is not None:
        with contextlib.suppress(Exception):
            state.client.key_value_set(
                f"jaxdist/{topic}/{state.process_id}", json.dumps(said), allow_overwrite=True
            )


def published(topic: str) -> dict[int, Any]:
    """What processes have last said about `topic`, by process id; alone, {}."""
    state = _state()
    if state is None:
        return {}
    try:
        entries = state.client.key_value_dir_get(f"jaxdist/{topic}/")
    except Exception:  # none has spoken, or the coordinator is gone
        return {}
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in sorted(entries)}


def process_place() -> tuple[int, int]:
    """(process id, number of processes), without touching a device."""
    distributed = sys.modules.get("jax._src.distributed")
    if distributed is not None and distributed.global_state.client is not None:
        return distributed.global_state.process_id, distributed.global_state.num_processes
    return int(os.environ.get("JAXDIST_PROCESS_ID", 0)), int(
        os.environ.get("JAXDIST_NUM_PROCESSES", 1)
    )


def _state() -> Any:
    """What jax knows of its coordinator, or None when alone."""
    distributed = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    return state if state is not None and state.client is not None else None
