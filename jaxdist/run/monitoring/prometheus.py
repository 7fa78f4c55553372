"""An HTTP endpoint from which Prometheus scrapes the newest numbers of a run.

Names follow Prometheus' rules: base units at the end, `_total` for counters. Every number has the
label `run`, so that one dashboard shows many runs.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.core.types import ConfigError

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
_LEFT_OUT = ("kind", "time", "applied", "weight")


class Prometheus:
    """An HTTP endpoint with the newest numbers of a run.

    A port that is in use is a warning and does not end the run.

    Args:
        address: host:port to listen on.
        run: the label on every number.
    """

    def __init__(self, address: str, run: str):
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigError(
                f"monitoring.prometheus={address} needs the package prometheus-client "
                f"({error}). Install it with `pip install prometheus-client`, or leave the "
                "setting empty."
            ) from error
        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._events: Counter[str] = Counter()
        self._facts: dict[str, str] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server: Any = None
        try:
            host, _, port = address.rpartition(":")
            self._server, self._thread = start_http_server(int(port), addr=host, registry=registry)
        except OSError as failure:
            logger.warning(
                "nothing is served to Prometheus: %s cannot be used (%s). "
                "Set monitoring.prometheus to a free port.",
                address,
                failure.strerror,
            )

    def train(self, record: Mapping[str, Any], unit: str) -> None:
        """Take over the newest step; `unit` (tokens, images) is a counter."""
        found = _numbers(record)
        total = found.pop(unit, None)
        with self._lock:
            self._gauges |= found | {"last_step_timestamp_seconds": float(record["time"])}
            if total is not None:
                self._totals[unit] = total

    def eval(self, record: Mapping[str, Any]) -> None:
        """Take over the newest evaluation."""
        found = {f"eval_{name}": value for name, value in _numbers(record).items()}
        with self._lock:
            self._gauges |= found

    def event(self, name: str, *, is_warning: bool) -> None:
        """Count an event."""
        with self._lock:
            self._events[name] += 1
            if is_warning:
                self._totals["warnings"] = self._totals.get("warnings", 0) + 1

    def facts(self, **facts: Any) -> None:
        """Constants of the run: numbers become gauges, texts labels of `jaxdist_run_info`."""
        with self._lock:
            for name, value in facts.items():
                if isinstance(value, str):
                    self._facts[name] = value
                elif value is not None:
                    self._gauges[name] = float(value)

    def collect(self) -> Iterator[Any]:
        """Called by the Prometheus client at each scrape.

        Totals are set, not incremented, because a rollback lowers them; `Counter` cannot do that.
        """
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            gauges, totals = dict(self._gauges), dict(self._totals)
            events, facts = dict(self._events), dict(self._facts)
        family: Any
        for name, value in sorted(gauges.items()):
            family = GaugeMetricFamily(PREFIX + name, name.replace("_", " "), labels=["run"])
            family.add_metric([self._run], value)
            yield family
        for name, value in sorted(totals.items()):
            family = CounterMetricFamily(PREFIX + name, f"{name} so far", labels=["run"])
            family.add_metric([self._run], value)
            yield family
        family = CounterMetricFamily(PREFIX + "events", "events by name", labels=["run", "event"])
        for name, count in sorted(events.items()):
            family.add_metric([self._run, name], count)
        yield family
        names = sorted(facts)
        family = GaugeMetricFamily(PREFIX + "run_info", "the run", labels=["run", *names])
        family.add_metric([self._run, *(facts[name] for name in names)], 1.0)
        yield family

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a record under Prometheus' names."""
    found = {}
    for key, value in record.items():
        if key in _LEFT_OUT or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name, factor = key, 1.0
        for ending, full, times in _UNITS:
            if key.endswith(ending):
                name, factor = key.removesuffix(ending) + full, times
                break
        found[re.sub(r"\W", "_", name)] = value * factor
    return found
