"""An HTTP endpoint from which Prometheus scrapes the newest numbers of a run.

Names follow the Prometheus conventions: base units at the end, `_total` for counters.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from wsgiref import simple_server

logger = logging.getLogger("jaxdist")

PREFIX = "jaxdist_"

_UNITS = (
    # end of a record's key, end of the metric's name, factor
    ("_per_s_per_device", "_per_second_per_device", 1.0),
    ("_per_s", "_per_second", 1.0),
    ("_s", "_seconds", 1.0),
    ("_w", "_watts", 1.0),
    ("_c", "_celsius", 1.0),
    ("_mhz", "_hertz", 1e6),
)
_MAX_CONNECTIONS = 8
_LEFT_OUT = ("kind", "time", "applied", "weight")


class Prometheus:
    """An HTTP endpoint at host:port, numbers labeled `run`; a port in use only causes a warning."""

    def __init__(self, address: str, run: str):
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._events: Counter[str] = Counter()
        self._facts: dict[str, str] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server: Any = None
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port))
        except OSError as failure:
            logger.warning(
                "the Prometheus endpoint is off: %s cannot be used (%s). "
                "Set monitoring.prometheus to a free port.",
                address,
                failure.strerror,
            )
            return
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def train(self, record: Mapping[str, Any], unit: str) -> None:
        """Store a step's metrics, and the number of `unit` so far, for the next scrape."""
        numbers = _numbers(record)
        total = numbers.pop(unit, None)
        with self._lock:
            self._gauges |= numbers | {"last_step_timestamp_seconds": float(record["time"])}
            if total is not None:
                self._totals[unit] = total

    def eval(self, record: Mapping[str, Any]) -> None:
        """Store the metrics of the newest evaluation for the next scrape."""
        with self._lock:
            self._gauges |= {f"eval_{name}": x for name, x in _numbers(record).items()}

    def event(self, name: str, *, is_warning: bool) -> None:
        """Count an event by name, and as a warning if it is one."""
        with self._lock:
            self._events[name] += 1
            if is_warning:
                self._totals["warnings"] = self._totals.get("warnings", 0) + 1

    def facts(self, **facts: Any) -> None:
        """Store constants of the run: numbers as gauges, texts as labels of `jaxdist_run_info`."""
        with self._lock:
            for name, value in facts.items():
                if isinstance(value, str):
                    self._facts[name] = value
                elif value is not None:
                    self._gauges[name] = float(value)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families at each scrape. Totals are set: a rollback lowers them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def family(
            kind: Any, name: str, text: str, samples: Sequence[tuple[dict[str, str], float]]
        ) -> Any:
            made = kind(PREFIX + name, text, labels=["run", *samples[0][0]])
            for labels, value in samples:
                made.add_metric([self._run, *labels.values()], value)
            return made

        with self._lock:
            gauges, totals = sorted(self._gauges.items()), sorted(self._totals.items())
            events, facts = sorted(self._events.items()), dict(sorted(self._facts.items()))
        for name, value in gauges:
            yield family(GaugeMetricFamily, name, name.replace("_", " "), [({}, value)])
        for name, value in totals:
            yield family(CounterMetricFamily, name, f"{name} so far", [({}, value)])
        if events:
            counts = [({"event": name}, count) for name, count in events]
            yield family(CounterMetricFamily, "events", "events by name", counts)
        yield family(GaugeMetricFamily, "run_info", "the run", [(facts, 1.0)])

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None


class _Handler(simple_server.WSGIRequestHandler):
    """One request of at most `timeout` seconds."""

    timeout = 5

    def log_message(self, *_: Any) -> None:
        """Do nothing: requests write no log lines."""


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    """Server with one thread per connection; it closes connections beyond `_MAX_CONNECTIONS`."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection; end it after the handler's time-out, however often it sends."""
        end = threading.Timer(_Handler.timeout, _hang_up, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that disconnects or stays silent causes no traceback."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for key, value in record.items():
        if key in _LEFT_OUT or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name, factor = key, 1.0
        for ending, full, times in _UNITS:
            if key.endswith(ending):
                name, factor = key.removesuffix(ending) + full, times
                break
        numbers[re.sub(r"\W", "_", name)] = value * factor
    return numbers
