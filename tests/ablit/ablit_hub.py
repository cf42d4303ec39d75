"""A hub on loopback for one repository: ranges, a redirect to its storage, trouble, and a count."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

COMMIT = "5eed" * 10
REPO = "donor/GLM-5.3-Flash-edited"
HIDDEN, HEADS = 256, 1024
LAYERS = 6
PREFIX = "model.language_model.layers"


class Hub(ThreadingHTTPServer):
    """`sent` counts body bytes; `cut_after`, `slow_s`, `status`, `commit` and `whole` are trouble.

    `storage` makes it redirect, as the real hub does, and its storage has entity tags of its own.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.sent, self.requests = folder, 0, 0
        self.cut_after: list[int] = []
        self.slow_s = 0.0
        self.status: list[int] = []
        self.commit, self.whole, self.storage, self.salt = COMMIT, False, True, ""
        self.lock = threading.Lock()

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no news."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        super().setup()

    def do_GET(self) -> None:
        hub = self.server
        hub.requests += 1
        match = re.match(rf"/{REPO}/resolve/{COMMIT}/(.+)$", self.path)
        stored = self.path.startswith("/storage/")
        name = self.path.removeprefix("/storage/") if stored else (match[1] if match else "")
        path = hub.folder / name
        if hub.status:
            return self.empty(hub.status.pop(0))
        if not name or not path.is_file():
            return self.empty(404)
        etag = hashlib.sha256(path.read_bytes()).hexdigest() + hub.salt
        if hub.storage and not stored and name.endswith(".safetensors"):
            return self.empty(302, {
                "Location": f"/storage/{name}", "X-Repo-Commit": hub.commit,
                "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(path.stat().st_size),
                "ETag": '"of-the-pointer"',
            })  # fmt: skip
        return self.body(path.read_bytes(), "of-the-storage" if stored else etag)

    def empty(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(key, value)
        self.end_headers()

    def body(self, data: bytes, etag: str) -> None:
        hub = self.server
        asked = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", ""))
        part = asked is not None and not hub.whole
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked and part else (0, len(data))
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        if not self.path.startswith("/storage/"):
            self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        limit = hub.cut_after.pop(0) if hub.cut_after and stop - start > 10_000 else stop - start
        for at in range(start, min(stop, start + limit), 8192):
            piece = data[at : min(at + 8192, stop, start + limit)]
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            with hub.lock:
                hub.sent += len(piece)
            if hub.slow_s:
                time.sleep(hub.slow_s)
        if limit < stop - start:
            self.close_connection = True
            self.connection.shutdown(2)


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def config(hidden: int = HIDDEN, layers: int = LAYERS) -> dict[str, object]:
    kinds = ["linear_attention" if i % 4 != 3 else "deepseek_sparse_attention"
             for i in range(layers)]  # fmt: skip
    text = {"hidden_size": hidden, "num_hidden_layers": layers, "layer_types": kinds}
    return {"text_config": text}


def write_file(path: Path, tensors: dict[str, np.ndarray], dtype: str = "BF16") -> None:
    """A safetensors file of 16-bit patterns, laid out in the order given."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": values.shape,
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_donor(folder: Path, *, dtype: str = "BF16", layers: int = LAYERS) -> dict[str, np.ndarray]:
    """A repository with other tensors around the wanted ones; the output projections by name."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    wanted, weight_map = {}, {}
    (folder / "config.json").write_text(json.dumps(config(layers=layers)))
    for first in range(0, layers + 1, 3):
        tensors = {}
        for layer in range(first, min(first + 3, layers + 1)):
            for leaf, shape in (("q_b_proj", (512, HIDDEN)), ("o_proj", (HIDDEN, HEADS)),
                                ("k_proj", (512, HIDDEN))):  # fmt: skip
                name = f"{PREFIX}.{layer}.self_attn.{leaf}.weight"
                values = generator.normal(size=shape).astype(np.float32)
                tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
                if leaf == "o_proj":
                    wanted[name] = tensors[name]
        file = f"model-{first}.safetensors"
        write_file(folder / file, tensors, dtype)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return wanted
