"""Notices of AWS, Google and Azure from a local server that answers as their metadata services."""

import http.server
import json
import logging
import threading
import time

import pytest
from commands import records, run_here, tiny

from jaxdist.runtime import spot_notices

NOT_FOUND = (404, "")
EVENT = {"EventType": "Preempt", "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT"}


class Service(http.server.ThreadingHTTPServer):
    """A metadata service: `answers` maps method and path to status and text."""

    def __init__(self, required: dict[str, str], answers: dict[str, tuple[int, str]]):
        self.required, self.answers = required, answers
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_token = self.command == "PUT" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        required = self.server.required.items()
        allowed = is_token or all(self.headers[name] == value for name, value in required)
        status, text = self.server.answers.get(f"{self.command} {self.path}", NOT_FOUND)
        self.send_response(status if allowed else 401)
        self.end_headers()
        self.wfile.write(text.encode() if allowed else b"")

    do_PUT = do_GET

    def log_message(self, *_):
        pass


AWS = "GET /latest/meta-data/spot/instance-action"
GOOGLE = "GET /computeMetadata/v1/instance/preempted"
AZURE = "GET /metadata/scheduledevents?api-version=2020-07-01"
NAME = "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {
    "aws": {"X-aws-ec2-metadata-token": "secret"},
    "google": {"Metadata-Flavor": "Google"},
    "azure": {"Metadata": "true"},
}


def events(*events: dict) -> tuple[int, str]:
    return 200, json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


NOTHING = {
    "aws": (AWS, NOT_FOUND),
    "google": (GOOGLE, (200, "FALSE")),
    "azure": (AZURE, events({**EVENT, "Resources": ["vm_1"]})),  # of another machine
}
NOTICE = {
    "aws": (AWS, (200, '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}')),
    "google": (GOOGLE, (200, "TRUE")),
    "azure": (AZURE, events({**EVENT, "Resources": ["vm_1", "vm_0"]})),
}


@pytest.fixture
def service(monkeypatch):
    servers = []

    def start(cloud: str) -> Service:
        path, answer = NOTHING[cloud]
        answers = {"PUT /latest/api/token": (200, "secret"), NAME: (200, "vm_0"), path: answer}
        servers.append(Service(HEADERS[cloud], answers))
        address = f"http://127.0.0.1:{servers[0].server_port}"
        monkeypatch.setitem(spot_notices._ADDRESSES, cloud, address)
        return servers[0]

    monkeypatch.setattr(spot_notices, "INTERVAL_S", 0.02)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no proxy can reach a cloud's service
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("cloud", NOTICE)
def test_only_a_notice_for_this_machine_stops(service, cloud, caplog, propagating):
    server, noticed = service(cloud), threading.Event()
    with spot_notices.watching(cloud, noticed.set):
        assert not noticed.wait(0.3)
        assert caplog.records == []
        server.answers.update([NOTICE[cloud]])
        assert noticed.wait(5)


def test_polling_continues_after_an_unexpected_answer(service, caplog, propagating):
    server, noticed = service("azure"), threading.Event()
    server.answers[AZURE] = (200, "[]")
    with spot_notices.watching("azure", noticed.set):
        assert not noticed.wait(0.3) and len(caplog.records) == 1
        server.answers.update([NOTICE["azure"]])
        assert noticed.wait(5)


def test_unreachable_service_is_one_warning(monkeypatch, caplog, propagating):
    monkeypatch.setattr(spot_notices, "INTERVAL_S", 0.02)
    monkeypatch.setitem(spot_notices._ADDRESSES, "aws", "http://127.0.0.1:9")
    with spot_notices.watching("aws", lambda: pytest.fail("a notice")):
        time.sleep(0.3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.args[0] == "aws"


def test_notice_saves_and_ends_a_run_with_code_75(service, tmp_path):
    server = service("google")
    server.answers.update([NOTICE["google"]])
    flags = tiny("--steps=500", "--resilience.spot_notices=google", f"--run-dir={tmp_path}")
    assert run_here("train", *flags) == 75
    saved = [event["step"] for event in records(tmp_path, "event") if event["event"] == "save"]
    assert 0 < saved[-1] < 500
