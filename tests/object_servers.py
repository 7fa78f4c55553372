"""Object stores for tests: servers in processes of their own, reached over HTTP."""

import contextlib
import http.client
import http.server
import itertools
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

SECRET = "not-to-be-seen-anywhere"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(command: list[str], address: str) -> Iterator[None]:
    """Run a server until the block ends; it answers when the block begins."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(address, timeout=5).close()
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                assert server.poll() is None, command
                time.sleep(0.1)
            else:
                break
        else:
            pytest.fail(f"it does not answer: {command}")
        yield
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def s3(environment: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server with a bucket, which the environment's credentials are for; its address."""
    for module in ("obstore", "moto", "flask", "flask_cors"):
        pytest.importorskip(module, reason="needs the dev extra (obstore, moto, flask)")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with serving(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], address
    ):
        request = urllib.request.Request(f"{address}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        environment.setenv("AWS_ENDPOINT_URL", address)
        environment.setenv("AWS_REGION", "us-east-1")
        environment.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield address


@contextlib.contextmanager
def troubled(address: str, every: int) -> Iterator[tuple[str, list[str]]]:
    """A way to a server that fails one request in `every`: its address, and what it did.

    Such a request is refused with 503, or hears half of its answer if it asked for content.
    """
    number, done = itertools.count(1), []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        log_message = lambda *_: None

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fails = next(number) % every == 0
            server = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
            if fails and self.command != "GET":
                done.append("503")
                status, headers, answer = 503, [], b"<Error><Code>SlowDown</Code></Error>"
            else:
                server.request(self.command, self.path, body, dict(self.headers))
                got = server.getresponse()
                status, headers, answer = got.status, got.getheaders(), got.read()
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = dict(headers).get("Content-Length", len(answer))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if fails and self.command == "GET" and answer:
                done.append("cut")
                answer, self.close_connection = answer[: len(answer) // 2], True
            self.wfile.write(answer)
            server.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}", done
        finally:
            proxy.shutdown()
