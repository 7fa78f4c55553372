"""Transfer files between hosts of a job: a server in each process, and a client.

Each request and answer carries a proof: an HMAC of a random challenge with a secret that both have.
Contents are not encrypted, so only the cluster's network should reach the port.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import socket
import socketserver
import threading

from jaxdist.runtime.cluster_environment import is_loopback
from jaxdist.runtime.storage import Location

_REQUEST_S = 30.0  # to receive a request (one short line)
_IDLE_S = 300.0  # without data inside a file, because disks may be slow
_LINE_BYTES = 1024
_PATH = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]*(/[0-9A-Za-z_-][0-9A-Za-z._-]*)*")


class FileServer:
    """Serve the files below a directory from threads, on a free `port`; see `listen`."""

    def __init__(self, root: Location, secret: str, address: str) -> None:
        class Handler(_Handler):
            root_directory, key = root, secret.encode()

        self._server = _Server(("", 0), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listen(address, 0)
        self.port = int(self._server.socket.getsockname()[1])
        threading.Thread(target=self._server.serve_forever, name="file-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class FileClient(contextlib.AbstractContextManager["FileClient"]):
    """Connection to another process's `FileServer`; raises `OSError` if it fails."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._key = secret.encode()
        self._socket = socket.create_connection((host, port), timeout=_REQUEST_S)
        # Otherwise each small file waits 40 ms for a delayed acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._challenge = self._file.readline(_LINE_BYTES).strip()
        self._socket.settimeout(_IDLE_S)

    def read(self, path: str) -> bytes:
        """Return the content of a file below the server's directory."""
        self._socket.sendall(b"%b %b\n" % (_proof(self._key, self._challenge, path), path.encode()))
        proof, _, size = self._file.readline(_LINE_BYTES).strip().partition(b" ")
        answered = f"{path} {size.decode(errors='replace')}"
        if not hmac.compare_digest(proof, _proof(self._key, self._challenge, answered)):
            raise OSError(f"{path}: the answer is not from a process of this job (bad signature)")
        if size == b"none":
            raise FileNotFoundError(f"{path} does not exist")
        data = self._file.read(int(size))
        if len(data) != int(size):
            raise OSError(f"{path}: the connection was cut after {len(data)} of {int(size)} bytes")
        return data

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` if it is loopback, else on all addresses."""
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel may support IPv6, but not the host
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: the client reports its error."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _REQUEST_S
    disable_nagle_algorithm = True
    root_directory: Location
    key: bytes

    def handle(self) -> None:
        challenge = secrets.token_hex(16).encode()
        self.wfile.write(challenge + b"\n")
        while line := self.rfile.readline(_LINE_BYTES).strip():
            proof, _, name = line.partition(b" ")
            path = name.decode(errors="replace")
            if not hmac.compare_digest(proof, _proof(self.key, challenge, path)):
                return
            self.connection.settimeout(_IDLE_S)
            self._answer(challenge, path)

    def _answer(self, challenge: bytes, path: str) -> None:
        file = self.root_directory / path
        try:
            size = str(file.size()) if _PATH.fullmatch(path) else "none"
        except OSError:
            size = "none"
        head = _proof(self.key, challenge, f"{path} {size}")
        self.wfile.write(b"%b %b\n" % (head, size.encode()))
        if size != "none":
            for block in file.stream():
                self.wfile.write(block)


def _proof(key: bytes, challenge: bytes, text: str) -> bytes:
    return hmac.new(key, challenge + text.encode(), hashlib.sha256).hexdigest().encode()
