"""A hub that speaks Hugging Face's protocol over loopback, and can be told to misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
LARGE = (".safetensors", ".gguf", ".bin")


def digests(content: bytes) -> tuple[str, str]:
    """The digest of git's blob, and the SHA-256."""
    blob = b"blob %d\0" % len(content) + content
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest(), hashlib.sha256(content).hexdigest()


class FakeHub:
    """Repositories by name, each with files. `sent` has what is sent in place of a file's listed content."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.sent: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}  # bytes after which the connection ends, once
        self.redirects: dict[str, str] = {}
        self.gated: set[str] = set()
        self.etag = ""  # in place of the right one
        self.asked: list[str] = []  # "GET path", with its range
        self.endpoint = ""

    def listing(self, repository: str) -> dict[str, Any]:
        """What the hub's API says of a repository."""
        siblings = []
        for path, content in self.files[repository].items():
            oid, digest = digests(content)
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": oid}
            if path.endswith(LARGE):
                entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 134}
            siblings.append(entry)
        return {"id": repository, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if path in self.hub.redirects:
            self._send(302, b"", {"Location": self.hub.redirects[path]})
        elif path.startswith("/api/models/"):
            repository = "/".join(path.split("/")[3:5])
            if repository not in self.hub.files:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            else:
                self._send(200, json.dumps(self.hub.listing(repository)).encode(), {})
        else:
            self._file(path)

    def _file(self, path: str) -> None:
        _, owner, name, _, _, *rest = path.split("/")
        repository, file = f"{owner}/{name}", "/".join(rest)
        if repository in self.hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        listed = self.hub.files[repository][file]
        content = self.hub.sent.get(file, listed)
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{self.hub.etag or digests(listed)[file.endswith(LARGE)]}"',
        }
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(
            206 if start else 200,
            content[start:],
            headers,
            self.hub.cut.pop(file, None) if self.command == "GET" else None,
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
