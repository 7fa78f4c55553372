"""In-process stand-in for jax's key-value store, with one client per simulated process."""

from __future__ import annotations

import threading
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from jaxdist.runtime.coordination import group, service


class KeyValueStore:
    """Store of jax's coordination service; deleting a key deletes all below it."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()
        self._set: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._lock:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self._set[key].set()

    def key_value_delete(self, key):
        directory = key.rstrip("/") + "/"
        with self._lock:
            below = [k for k in self.values if k.startswith(directory)] if key[-1] == "/" else []
            for old in [*below, directory[:-1]]:
                self.values.pop(old, None)
                self._set.pop(old, None)

    def blocking_key_value_get(self, key, timeout_ms):
        with self._lock:
            ready = self._set[key]
        if not ready.wait(timeout_ms / 1000):
            raise RuntimeError("DEADLINE_EXCEEDED: no such key")
        return self.values[key]


class Client:
    """A process's connection to the store; counts its requests, and their bytes."""

    def __init__(self, store: Any):
        self._store, self.requests, self.bytes = store, 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            answer = call(*arguments, **options)
            self.requests += 1
            self.bytes += sum(len(text) for text in (*arguments, answer) if isinstance(text, str))
            return answer

        return counted


class Job:
    """Simulated processes: threads with separate groups and counting clients.

    `clients` are those of the processes to simulate here; by default of all, of one store.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        num_processes: int,
        clients: dict[int, Client] | None = None,
    ):
        self.num_processes, store = num_processes, KeyValueStore()
        self.clients = clients or {i: Client(store) for i in range(num_processes)}
        self._own = threading.local()
        monkeypatch.setattr(service, "_state", lambda: self._own.state)
        monkeypatch.setattr(group, "_made", _PerThread(self._own, "made"))
        monkeypatch.setattr(group, "_topics", _PerThread(self._own, "topics"))

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """Return the result or the error of `call(process_id)` in each process."""
        results: dict[int, Any] = {}

        def body(process: int) -> None:
            client, own = self.clients[process], self._own
            own.made, own.topics = Counter(), {}
            own.state = types.SimpleNamespace(
                client=client, process_id=process, num_processes=self.num_processes
            )
            try:
                results[process] = call(process)
            except Exception as error:
                results[process] = error

        threads = [threading.Thread(target=body, args=(i,)) for i in self.clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return [results.get(i, "no result") for i in self.clients]


class _PerThread:
    """A mapping with separate contents in each thread."""

    def __init__(self, own: threading.local, name: str):
        self._own, self._name = own, name

    def __getitem__(self, key):
        return getattr(self._own, self._name)[key]

    def __setitem__(self, key, value):
        getattr(self._own, self._name)[key] = value

    def __contains__(self, key):
        return key in getattr(self._own, self._name)
