"""A local server with the part of the hub's API that downloads use, for files in a folder."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?")
_PUSH = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclasses.dataclass
class Hub:
    """Repositories on a local hub, which tests change while it runs.

    Attributes:
        address: URL of the server.
        folders: ("models" or "datasets", ORG/NAME, commit) -> folder of its files.
        branches: (kind, ORG/NAME, branch) -> commit.
        gated: names of repositories whose files are refused.
        stalled: names of files that are sent half, and never completed.
        forget: clears what this process remembers of the hub.
        is_down: answer no request.
        fail_after: number of files after which no request is answered; None = all are.
        num_bytes: bytes of content that were requested.
        sent: name of each file whose content was requested, with the first byte if it is not 0.
        writers: token -> the organization whose repositories it may write.
        private: repositories that were created as private.
        root: folder for the files of commits that are pushed.
    """

    address: str = ""
    folders: dict[tuple[str, str, str], Path] = dataclasses.field(default_factory=dict)
    branches: dict[tuple[str, str, str], str] = dataclasses.field(default_factory=dict)
    gated: set[str] = dataclasses.field(default_factory=set)
    stalled: set[str] = dataclasses.field(default_factory=set)
    is_down: bool = False
    fail_after: int | None = None
    num_bytes: int = 0
    sent: list[str] = dataclasses.field(default_factory=list)
    writers: dict[str, str] = dataclasses.field(default_factory=dict)
    private: set[str] = dataclasses.field(default_factory=set)
    root: Path | None = None
    forget: Callable[[], None] = lambda: None
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)

    def store(self, kind: str, repo: str, folder: Path, commit: str, branch: str = "main") -> None:
        self.folders[kind, repo, commit] = folder
        self.branches[kind, repo, branch] = commit

    @property
    def environment(self) -> dict[str, str]:
        names = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        return {"HF_ENDPOINT": self.address, **names}


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *args):
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        own = self.hub.writers.get(token)
        if path == "/api/validate-yaml":
            return self.reply(200, {}, b'{"errors": [], "warnings": []}')
        if own is None:
            return self.reply(401, {}, b'{"error": "bad token"}')
        if path == "/api/repos/create":
            asked = json.loads(body)
            if asked["organization"] != own:
                return self.reply(403, {}, b'{"error": "not yours"}')
            repo = f"{own}/{asked['name']}"
            self.hub.private |= {repo} if asked["visibility"] == "private" else set()
            return self.reply(200, {}, json.dumps({"url": f"{self.hub.address}/{repo}"}).encode())
        repo, what = _PUSH.fullmatch(path).groups()
        if what == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return self.reply(200, {}, json.dumps({"files": modes}).encode())
        commit = hashlib.sha1(body).hexdigest()
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = self.hub.root / commit / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
        self.hub.store("models", repo, self.hub.root / commit, commit)
        url = f"{self.hub.address}/{repo}/commit/{commit}"
        self.reply(200, {}, json.dumps({"commitOid": commit, "commitUrl": url}).encode())

    def answer(self, has_body: bool) -> None:
        if self.hub.is_down or len(self.hub.sent) >= (self.hub.fail_after or 1 << 30):
            self.close_connection = True
            return None
        path = self.path.partition("?")[0].replace("%2F", "/")
        if match := _API.fullmatch(path):
            kind, repo, what, revision = match.groups()
        elif match := _FILE.fullmatch(path):
            kind, repo, revision, name = match.groups()
            kind, what = kind or "models", "file"
        else:
            return self.reply(404, {}, has_body=has_body)
        if not any(key[:2] == (kind, repo) for key in self.hub.folders):
            return self.reply(404, {"X-Error-Code": "RepoNotFound"}, has_body=has_body)
        commit = self.hub.branches.get((kind, repo, revision or "main"), revision)
        folder = self.hub.folders.get((kind, repo, commit))
        if folder is None:
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"}, has_body=has_body)
        files = [file for file in folder.rglob("*") if file.is_file()]
        names = {file.relative_to(folder).as_posix(): file for file in files}
        if what == "tree":
            tree = [
                {"type": "file", "path": n, "size": f.stat().st_size, "oid": tag_of(f)}
                | ({"lfs": {"oid": tag_of(f), "size": 0, "pointerSize": 0}} if is_large(f) else {})
                for n, f in names.items()
            ]
            return self.reply(200, {}, json.dumps(tree).encode(), has_body)
        if what != "file":
            about = {"id": repo, "sha": commit, "siblings": [], "tags": []}
            return self.reply(200, {}, json.dumps(about).encode(), has_body)
        if name not in names:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self.reply(404, headers, has_body=has_body)
        if repo in self.hub.gated and name != "README.md":
            return self.reply(403, {"X-Error-Code": "GatedRepo"}, has_body=has_body)
        headers = {"ETag": f'"{tag_of(names[name])}"', "X-Repo-Commit": commit}
        self.send_file(name, names[name].read_bytes(), headers, has_body)

    def send_file(self, name: str, content: bytes, headers: dict[str, str], has_body: bool) -> None:
        begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        first, size = int(begin), len(content)
        content = content[: int(end) + 1] if end else content
        if has_body:
            self.hub.sent.append(f"{name}+{first}" if first else name)
            self.hub.num_bytes += len(content) - first
        if first or end:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{size}"
        self.send_response(206 if first or end else 200)
        for key, value in {**headers, "Content-Length": str(len(content) - first)}.items():
            self.send_header(key, value)
        self.end_headers()
        if has_body and name in self.hub.stalled:
            self.wfile.write(content[first : len(content) // 2])
            self.wfile.flush()
            self.hub.stopped.wait()
        elif has_body:
            self.wfile.write(content[first:])

    def reply(
        self, code: int, headers: dict[str, str], content: bytes = b"", has_body: bool = True
    ) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(content)


@contextlib.contextmanager
def hub_in_use(folder: Path, monkeypatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    from jaxdist.data import hub_sets
    from jaxdist.runtime import hub as names

    def forget() -> None:
        for function in (names._download, names.check_access, hub_sets.hub_files):
            function.cache_clear()

    with local_hub() as server:
        server.forget = forget
        url = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in {
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "ENDPOINT": server.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": url,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("JAXDIST_CACHE", str(folder / "cache"))
        monkeypatch.chdir(folder)
        forget()
        yield server
        # Else threads that prepare shards would download from the server of the next test.
        server.stalled.clear()
        server.is_down, server.fail_after = False, None
        server.stopped.set()
        finish_downloads()
        forget()


def finish_downloads() -> None:
    """Wait for the threads that download and tokenize shards ahead."""
    for thread in threading.enumerate():
        if thread.name.startswith("shard "):
            thread.join(60)
            assert not thread.is_alive()


def is_large(file: Path) -> bool:
    return file.suffix == ".parquet"


def tag_of(file: Path) -> str:
    """Return the ETag of a file: SHA-256 if it is large, else the id of its git blob."""
    content = file.read_bytes()
    if is_large(file):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextlib.contextmanager
def local_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = functools.partial(_Handler, hub)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_port}"
        yield hub
        hub.stopped.set()
        server.shutdown()
