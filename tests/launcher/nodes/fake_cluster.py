"""A head and workers made of folders, and the command line of the launcher on the head."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from glm_launch.nodes.facts import PLUGIN_LABEL

ROOT = Path(__file__).parents[3]
TOOLS = Path(__file__).with_name("fake_tools.py")
PROGRAMS = ("ssh", "docker", "rsync", "ip", "ping")
GOOD = {"layers": ["sha256:a"], "plugin": "p1"}
assert PLUGIN_LABEL == "io.glm-exl3.plugin"


@dataclass
class Nodes:
    """`names[0]` is the head; `settings` are the environment of every command."""

    folder: Path
    names: tuple[str, ...]
    settings: dict[str, str] = field(default_factory=dict)

    def make(self, port: int, master: int, watch: int) -> None:
        tools = self.folder / "bin"
        tools.mkdir(parents=True)
        for name in PROGRAMS:
            (tools / name).write_text(f"#!{sys.executable} -S\n{TOOLS.read_text()}")
            (tools / name).chmod(0o755)
        for number, name in enumerate(self.names):
            (self[name] / "home").mkdir(parents=True)
            (self[name] / "containers").mkdir()
            (self[name] / "address").write_text(f"10.99.0.{number + 1}")
        self.registry({"reg.example/glm:1": GOOD})
        workers = [f"10.99.0.{number + 2}" for number in range(len(self.names) - 1)]
        packages = (str(ROOT / part) for part in ("launcher", "bench", "overlay"))
        self.settings = {
            "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(self["head"] / "home"),
            "FAKE_ENGINE": str(TOOLS.parents[1] / "fake_engine.py"),
            "PYTHONPATH": os.pathsep.join(packages), "FAKE_NODES": str(self.folder),
            "GLM_STATE_DIR": str(self.folder / "state"), "GLM_ENV_FILE": str(self.folder / "env"),
            "IMAGE": "reg.example/glm:1", "DEVICE": "cpu", "SPEC_METHOD": "none",
            "MODEL": str(self.model()), "HEAD_IP": "10.99.0.1", "WORKER_IP": ",".join(workers),
            "WORKER_SSH": ",".join(self.names[1:]), "PORT": str(port), "STOP_GRACE_S": "2",
            "MASTER_PORT": str(master), "WATCH_PORT": str(watch), "READY_TIMEOUT_S": "40",
            "SUPERVISE": "0",
        }  # fmt: skip

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def model(self) -> Path:
        folder = self["head"] / "home" / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"architectures": ["Small"]}))
        shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for number, shard in enumerate(shards):
            entry = {f"x{number}": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}
            header = json.dumps(entry).encode()
            data = struct.pack("<Q", len(header)) + header + bytes([number] * 8)
            (folder / shard).write_bytes(data)
        index = {"weight_map": {f"x{number}": shard for number, shard in enumerate(shards)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def registry(self, images: dict[str, dict]) -> None:
        (self.folder / "registry.json").write_text(json.dumps(images))

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "glm_launch", *arguments], env=self.settings | env,
            capture_output=True, text=True, timeout=120, cwd=ROOT,
        )  # fmt: skip

    def popen(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "glm_launch", *arguments], env=self.settings | env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip

    def starting(self, within_s: float) -> subprocess.Popen[str]:
        """A `start` with both containers running, whose head never says more."""
        self.registry({"reg.example/glm:1": {"layers": ["a"], "plugin": "p", "trouble":
                                             "head:silent"}})  # fmt: skip
        process = self.popen("start")
        deadline = time.monotonic() + within_s
        while len(self.calls("docker", "run", "--detach")) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        return process

    def calls(self, *words: str) -> list[list[str]]:
        """Noted calls whose program and first words are these, on any node."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        found = [json.loads(line) for line in lines]
        return [call for call in found if tuple(call[1 : 1 + len(words)]) == words]

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)

    def containers(self) -> dict[str, list[str]]:
        return {name: sorted(path.stem for path in (self[name] / "containers").glob("*.json"))
                for name in self.names}  # fmt: skip

    def sent(self) -> list[str]:
        log = self.folder / "sent"
        return log.read_text().splitlines() if log.exists() else []

    def put_image(self, node: str, name: str, **image: object) -> None:
        folder = self[node] / "images"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name.replace('/', '_')}.json"
        path.write_text(json.dumps(GOOD | image | {"name": name}))

    def everything_written(self) -> str:
        """All text that a command left anywhere, the key file apart."""
        found = []
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.suffix != ".key" and path.parent.name != "bin":
                found.append(path.read_text(errors="replace"))
        return "\n".join(found)

    def close(self) -> None:
        for path in self.folder.glob("*/containers/*.json"):
            with suppress(OSError, ProcessLookupError):
                os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)
        time.sleep(0.05)
