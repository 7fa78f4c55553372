"""Access jax's coordination service; only this file does.

Importing this module does not import jax. Values are JSON. Keys begin with `jaxdist/` and remain in
the store until they are deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

_MODULE = "jax._src.distributed"
_ROOT = "jaxdist/"
_LEAVE_MS = 3_600_000  # process 0 may still export a large model


def is_joined() -> bool:
    """Return whether this process is connected to a job of several processes."""
    return _state() is not None


def process_id_and_count() -> tuple[int, int]:
    """Return (process id, number of processes): joined, else by `jaxdist.launch`, else (0, 1)."""
    state = _state()
    if state is not None:
        return state.process_id, state.num_processes
    environ = os.environ
    return int(environ.get("JAXDIST_PROCESS_ID", 0)), int(environ.get("JAXDIST_NUM_PROCESSES", 1))


def put(key: str, value: Any, *, overwrite: bool = False) -> None:
    """Store a JSON value under a key; raises `RuntimeError` if it exists, unless `overwrite`."""
    _client().key_value_set(_ROOT + key, json.dumps(value), allow_overwrite=overwrite)


def get(key: str, timeout_s: float) -> Any:
    """Wait for a key; return its value. Raises `TimeoutError`; other errors if process 0 exited."""
    try:
        text = _client().blocking_key_value_get(_ROOT + key, max(1, int(timeout_s * 1000)))
    except Exception as error:  # only the text of jax's error is stable between versions
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError(f"no process has set {_ROOT}{key} within {timeout_s:g} s") from None
        raise
    return json.loads(text)


def delete(key: str) -> None:
    """Remove a key from the store."""
    _client().key_value_delete(_ROOT + key)


def publish(topic: str, value: Any) -> None:
    """Replace this process's latest value for `topic`; ignores errors."""
    if is_joined():
        with contextlib.suppress(Exception):
            put(f"{topic}/{process_id_and_count()[0]}", value, overwrite=True)


def published(topic: str) -> dict[int, Any]:
    """Return the latest value that each process published on `topic`, by process id."""
    if not is_joined():
        return {}
    try:
        entries = _client().key_value_dir_get(f"{_ROOT}{topic}/")
    except Exception:  # no value has been published, or process 0 has exited
        return {}
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in sorted(entries)}


def own_address() -> str:
    """Return the name or address at which other processes reach this host."""
    host, _, port = str(_state().coordinator_address).rpartition(":")
    host = host.strip("[]")
    if process_id_and_count()[0] == 0:
        return host
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # selects the interface, sends nothing
        return str(probe.getsockname()[0])


def has_stop_service() -> bool:
    """Return whether jax's coordination service handles SIGTERM; False before joining."""
    distributed = sys.modules.get(_MODULE)
    return distributed is not None and distributed.global_state.preemption_sync_manager is not None


def reached_agreed_stop(call: int) -> bool:
    """Return whether all processes agreed to stop at `call`, the number of this call."""
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(call))


def leave() -> None:
    """Wait until all processes call this, then disconnect; do nothing if alone."""
    state = _state()
    if state is not None:
        # If a process is late at the barrier in `shutdown`, jax aborts all of them.
        state.client.wait_at_barrier(f"{_ROOT}leave", _LEAVE_MS)
        state.shutdown()


def _state() -> Any:
    distributed = sys.modules.get(_MODULE)
    state = getattr(distributed, "global_state", None)
    return state if state is not None and state.client is not None else None


def _client() -> Any:
    state = _state()
    if state is None:
        raise RuntimeError("this process has joined no job: there is no key-value store")
    return state.client
