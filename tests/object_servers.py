"""Object stores for tests: servers in processes of their own, reached over HTTP."""

import contextlib
import socket
import subprocess
import sys
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
