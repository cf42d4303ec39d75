"""A model hub on loopback: one repository, byte ranges, and trouble on request.

    python hub_stub.py FOLDER PORT_FILE [--repo NAME]

It serves the files of FOLDER as revision `main` of NAME with the metadata that huggingface_hub asks
for. `POST /control` with JSON sets trouble: `status` (401, 403, 404, 503 for every request),
`cut_after` (bytes, then the connection is closed), `bytes_per_s`. `GET /control` tells what was
sent: requests and bytes per file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import time
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
LARGE = 1024
ERRORS = {401: "", 403: "GatedRepo", 404: "RepoNotFound", 503: ""}


@lru_cache
def hashes(path: Path, mtime_ns: int) -> tuple[str, str]:
    """(git blob hash, sha256) of a file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(
        data
    ).hexdigest()


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, repo: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.repo = folder, repo
        self.trouble: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.requests = 0
        self.lock = threading.Lock()

    def siblings(self) -> list[dict]:
        found = []
        for path in sorted(self.folder.iterdir()):
            git, sha = hashes(path, path.stat().st_mtime_ns)
            size = path.stat().st_size
            large = {"lfs": {"sha256": sha, "oid": sha, "size": size, "pointerSize": 130}}
            entry = {"rfilename": path.name, "path": path.name, "type": "file", "size": size,
                     "blobId": git, "oid": git}  # fmt: skip
            found.append(entry | (large if size >= LARGE else {}))
        return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_POST(self) -> None:
        self.server.trouble = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests = 0
        self.server.sent.clear()
        self.reply(200, {})

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/control":
            self.reply(200, {"sent": self.server.sent, "requests": self.server.requests})
            return
        self.server.requests += 1
        if status := self.server.trouble.get("status"):
            headers = {"X-Error-Code": ERRORS[status]} if ERRORS[status] else {}
            self.reply(status, {"error": "trouble"}, headers)
        elif match := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/([^/]+).*", path):
            self.metadata(match[1], match[2], match[3])
        elif match := re.fullmatch(rf"/{self.server.repo}/resolve/([^/]+)/(.+)", path):
            self.content(self.server.folder / match[2], body=body)
        else:
            self.reply(404, {"error": "no such thing"}, {"X-Error-Code": "RepoNotFound"})

    def metadata(self, repo: str, kind: str, revision: str) -> None:
        if repo != self.server.repo:
            self.reply(404, {"error": "unknown"}, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.reply(404, {"error": "unknown"}, {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            self.reply(200, self.server.siblings())
        else:
            value = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [],
                     "siblings": self.server.siblings(), "downloads": 0, "likes": 0}  # fmt: skip
            self.reply(200, value)

    def content(self, path: Path, *, body: bool) -> None:
        if not path.is_file():
            self.reply(404, {"error": "no file"}, {"X-Error-Code": "EntryNotFound"})
            return
        data, total = path.read_bytes(), path.stat().st_size
        git, sha = hashes(path, path.stat().st_mtime_ns)
        first = 0
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first = int(match[1])
            data = data[first : int(match[2]) + 1 if match[2] else None]
        self.send_response(206 if match else 200)
        etag = sha if total >= LARGE else git
        for name, value in (
            ("Content-Length", str(len(data))), ("ETag", f'"{etag}"'), ("Accept-Ranges", "bytes"),
            ("X-Repo-Commit", COMMIT), ("X-Linked-Etag", f'"{etag}"'),
            ("X-Linked-Size", str(total)),
        ):  # fmt: skip
            self.send_header(name, value)
        if match:
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
        self.end_headers()
        if body:
            self.send_slowly(path.name, data)

    def send_slowly(self, name: str, data: bytes) -> None:
        trouble = self.server.trouble
        step = max(1, trouble.get("bytes_per_s", 0) // 50) or 1 << 16
        step = step if trouble.get("bytes_per_s") else 1 << 16
        for start in range(0, len(data), step):
            part = data[start : start + step]
            if start + len(part) > trouble.get("cut_after", 1 << 60):
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(part)
            with self.server.lock:
                self.server.sent[name] = self.server.sent.get(name, 0) + len(part)
            if trouble.get("bytes_per_s"):
                time.sleep(0.02)

    def reply(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--repo", default="lab/tiny")
    options = parser.parse_args()
    hub = Hub(options.folder, options.repo)
    options.port_file.write_text(str(hub.server_port))
    hub.serve_forever()
