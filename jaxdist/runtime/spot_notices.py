"""Poll a cloud's metadata service for the notice that ends this machine.

Amazon announces an interruption 2 minutes before, Google and Azure 30 s. The service is at a
link-local address and needs no credentials:

- AWS: Amazon EC2 User Guide, "Spot Instance interruption notices" (metadata service version 2)
- Google: Compute Engine, "Create and use Spot VMs", section on detecting preemption
- Azure: "Scheduled Events for Linux VMs"
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

log = logging.getLogger("jaxdist")

INTERVAL_S = 5.0
_TIMEOUT_S = 5.0
_ADDRESSES = {
    "aws": "http://169.254.169.254",
    "google": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}


@contextlib.contextmanager
def watching(cloud: str, on_notice: Callable[[], None]) -> Iterator[None]:
    """In this block, poll a cloud's metadata service ("" = none); call `on_notice` at its first."""
    if not cloud:
        yield
        return
    ended = threading.Event()
    arguments = (cloud, on_notice, ended)
    threading.Thread(target=_poll, args=arguments, name="spot-notices", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _poll(cloud: str, on_notice: Callable[[], None], ended: threading.Event) -> None:
    failed = False
    while True:
        try:
            notice = _NOTICES[cloud](_ADDRESSES[cloud])
        except Exception as error:  # of the network, of HTTP, or of an unexpected answer
            if not failed:
                log.warning(
                    "the metadata service of %s does not respond (%s): until it does, spot notices "
                    "are missed. On other machines, leave resilience.spot_notices empty",
                    cloud,
                    error,
                )
            failed = True
        else:
            failed = False
            if notice and not ended.is_set():
                log.warning("%s will reclaim this machine: %s", cloud, notice)
                on_notice()
                return
        if ended.wait(INTERVAL_S):
            return


def _aws_notice(address: str) -> str:
    """Return the announced action and its time; "" if there is none."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _read(f"{address}/latest/api/token", lifetime, "PUT")
    headers = {"X-aws-ec2-metadata-token": token}
    try:
        return _read(f"{address}/latest/meta-data/spot/instance-action", headers)
    except urllib.error.HTTPError as error:
        if error.code == 404:  # no action is planned
            return ""
        raise


def _google_notice(address: str) -> str:
    url = f"{address}/computeMetadata/v1/instance/preempted"
    value = _read(url, {"Metadata-Flavor": "Google"})
    return "preempted" if value == "TRUE" else ""


def _azure_notice(address: str) -> str:
    """Return the eviction of this machine, "" if none; the service lists those of a scale set."""
    headers = {"Metadata": "true"}
    text = _read(f"{address}/metadata/scheduledevents?api-version=2020-07-01", headers)
    evictions = [event for event in json.loads(text)["Events"] if event["EventType"] == "Preempt"]
    if not evictions:
        return ""
    query = "api-version=2021-02-01&format=text"
    own = _read(f"{address}/metadata/instance/compute/name?{query}", headers)
    times = [event["NotBefore"] for event in evictions if own in event["Resources"]]
    return f"evicted at {times[0] or 'any moment'}" if times else ""


def _read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies cannot reach it
    with direct.open(request, timeout=_TIMEOUT_S) as answer:
        return str(answer.read(1 << 20).decode()).strip()


_NOTICES = {"aws": _aws_notice, "google": _google_notice, "azure": _azure_notice}
