"""Files from one host of a job to another: a server in each process, and a client that asks it.

A server gives out the files below one directory, to processes that know the job's secret. Each
connection begins with a number that the server has drawn; every request and every answer carries a
proof of the secret made with it. Contents are not encrypted: like the coordinator's, the port
belongs on a network that only the cluster reaches.
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
from collections.abc import Iterator

from jaxdist.runtime.cluster_environment import is_loopback
from jaxdist.runtime.storage import Location

_ASK_S = 30.0  # a request is one short line
_MOVE_S = 300.0  # without a byte, in the middle of a file whose disk may be slow
_CLOSING_S = 0.1  # until a closed server notices
_LINE_BYTES = 1024
_PATH = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]*(/[0-9A-Za-z_-][0-9A-Za-z._-]*)*")


class FileServer:
    """Serves the files below a directory from threads of its own, until it is closed.

    `address` is how the other processes reach this host: where it is a loopback address, none from
    elsewhere may come.

    Attributes:
        port: where it listens.
    """

    def __init__(self, root: Location, secret: str, address: str) -> None:
        class Handler(_Handler):
            place, key = root, secret.encode()

        self._server = _Server(("", 0), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = _listen(address)
        self.port = int(self._server.socket.getsockname()[1])
        threading.Thread(target=self._server.serve_forever, name="file-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class FileClient:
    """A connection to another process's `FileServer`; every method raises `OSError`."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._key = secret.encode()
        self._socket = socket.create_connection((host, port), timeout=_ASK_S)
        # Else each small file waits 40 ms for the other side's delayed acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._drawn = self._file.readline(_LINE_BYTES).strip()
        self._socket.settimeout(_MOVE_S)

    def read(self, path: str) -> bytes:
        """The content of a file below the server's directory.

        Raises:
            OSError: there is none, the connection was cut, or the server has another secret.
        """
        self._socket.sendall(b"%b %b\n" % (_proof(self._key, self._drawn, path), path.encode()))
        proof, _, size = self._file.readline(_LINE_BYTES).strip().partition(b" ")
        answered = f"{path} {size.decode(errors='replace')}"
        if not hmac.compare_digest(proof, _proof(self._key, self._drawn, answered)):
            raise OSError(f"{path}: no answer from a process of this job")
        if size == b"none":
            raise FileNotFoundError(f"{path} is not there")
        data = self._file.read(int(size))
        if len(data) != int(size):
            raise OSError(f"{path}: the connection was cut after {len(data)} of {int(size)} bytes")
        return data

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()


@contextlib.contextmanager
def connected(host: str, port: int, secret: str) -> Iterator[FileClient]:
    """A client for the length of a `with` block."""
    client = FileClient(host, port, secret)
    try:
        yield client
    finally:
        client.close()


def _listen(address: str) -> socket.socket:
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel may have IPv6 and the host none
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: the client notices, and says what it lacks."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _ASK_S
    disable_nagle_algorithm = True
    place: Location
    key: bytes

    def handle(self) -> None:
        drawn = secrets.token_hex(16).encode()
        self.wfile.write(drawn + b"\n")
        while line := self.rfile.readline(_LINE_BYTES).strip():
            proof, _, name = line.partition(b" ")
            path = name.decode(errors="replace")
            if not hmac.compare_digest(proof, _proof(self.key, drawn, path)):
                return
            self.connection.settimeout(_MOVE_S)
            self._answer(drawn, path)

    def _answer(self, drawn: bytes, path: str) -> None:
        file = self.place / path
        try:
            size = str(file.size()) if _PATH.fullmatch(path) else "none"
        except OSError:
            size = "none"
        head = _proof(self.key, drawn, f"{path} {size}")
        self.wfile.write(b"%b %b\n" % (head, size.encode()))
        if size != "none":
            for block in file.stream():
                self.wfile.write(block)


def _proof(key: bytes, drawn: bytes, text: str) -> bytes:
    """What only a process with the secret can say on this connection."""
    return hmac.new(key, drawn + text.encode(), hashlib.sha256).hexdigest().encode()
