"""A model of the hub from the first download to offline starts, through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

STUB = Path(__file__).parents[2] / "lab" / "hub_stub.py"
SHARD = "model-00002-of-00002.safetensors"
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Stub:
    """The hub, its files, and the settings that point at it."""

    process: subprocess.Popen[bytes]
    files: Path
    settings: dict[str, str]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def hub(nodes, tmp_path) -> Iterator[Stub]:
    files, port = tmp_path / "files", tmp_path / "port"
    shutil.copytree(nodes["head"] / "home" / "model", files)
    shutil.rmtree(nodes["head"] / "home" / "model")
    process = subprocess.Popen([sys.executable, str(STUB), str(files), str(port)])
    deadline = time.monotonic() + 30
    while not (port.exists() and port.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stub = Stub(process, files, {
        "MODEL": "lab/tiny", "HF_ENDPOINT": f"http://127.0.0.1:{port.read_text()}",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": "planted-hub-token",
    })  # fmt: skip
    yield stub
    stub.close()


def snapshot(nodes, node: str) -> Path:
    hub = nodes[node] / "home" / ".cache" / "huggingface" / "hub"
    return hub / "models--lab--tiny" / "snapshots" / COMMIT


def test_f24_what_is_complete_starts_without_the_hub(nodes, hub) -> None:
    done = nodes("start", **hub.settings)
    assert done.returncode == 0, done.stderr
    assert "downloading 4 file(s)" in done.stdout
    assert (snapshot(nodes, "w1") / SHARD).is_symlink()
    assert (snapshot(nodes, "w1") / SHARD).read_bytes() == (hub.files / SHARD).read_bytes()
    runs = nodes.calls("docker", "run", "--detach")
    root = "huggingface/hub/models--lab--tiny,target=/models/target,readonly"
    assert all(any(root in part for part in run) for run in runs)
    assert all(f"/models/target/snapshots/{COMMIT}" in run for run in runs)
    nodes("stop")
    hub.close()
    sent = len(nodes.sent())
    done = nodes("start", **hub.settings)
    assert done.returncode == 0, done.stderr
    assert "downloading" not in done.stdout and len(nodes.sent()) == sent
    nodes("stop")
    assert "planted-hub-token" not in done.stdout + done.stderr + nodes.everything_written()


def test_f24_a_hub_that_is_gone_refuses_what_is_not_complete(nodes, hub) -> None:
    hub.close()
    done = nodes("start", **hub.settings)
    assert done.returncode == 3
    assert "error [hub-unreachable]: lab/tiny@main" in done.stderr
    assert not nodes.calls("docker", "pull") and not nodes.calls("docker", "run")


def test_f9_skipping_the_download_skips_no_verification(nodes, hub) -> None:
    assert nodes("download", **hub.settings).returncode == 0
    blob = (snapshot(nodes, "head") / SHARD).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    done = nodes("start", SKIP_DOWNLOAD="1", **hub.settings)
    assert (
        done.returncode == 3 and f"{SHARD}: " in done.stderr and "bytes instead of" in done.stderr
    )
    done = nodes("start", **hub.settings)
    assert done.returncode == 0 and "downloading 1 file(s)" in done.stdout
    nodes("stop")


def test_plan_of_a_model_that_was_never_asked_for_asks_nobody(nodes, hub) -> None:
    hub.close()
    done = nodes("plan", **hub.settings)
    assert done.returncode == 0, done.stderr
    assert "not verified yet" in done.stderr
    assert "/models/target/snapshots/main" in done.stdout
    told = json.loads(nodes("plan", "--json", **hub.settings).stdout)
    assert dict(told["ranks"][0]["env"])["GLM_EXL3_MODEL_MANIFEST"] == ""
