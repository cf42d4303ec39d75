"""Download from a hub stub and copy with rsync, interrupted anywhere, damaged in every way.

Tests that need rsync itself are marked `lab`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from glm_launch.errors import RefusedError
from glm_launch.nodes import manifest as manifests
from glm_launch.nodes import weights
from glm_launch.nodes.manifest import Manifest
from glm_launch.nodes.ssh import LocalShell, SshShell
from glm_launch.nodes.weights import Policy, Source, Store

ROOT = Path(__file__).parents[3]
STUB = ROOT / "tests" / "lab" / "hub_stub.py"
SHARDS = 4
SHARD_BYTES = 300_000
PULL = """
import sys
from pathlib import Path
from glm_launch.nodes.weights import Policy, Source, Store, ensure
endpoint, hub, folder = sys.argv[1:4]
ensure(Source("lab/tiny", endpoint=endpoint),
       Store(Path(hub), Path(folder), str(Path(folder) / "hashes.json")), Policy())
"""


@dataclass
class Hub:
    """The stub, and a store that downloads from it."""

    endpoint: str
    files: Path
    store: Store

    def control(self, **trouble: int) -> None:
        data = json.dumps(trouble).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/control", data)).read()

    def seen(self) -> dict:
        return json.load(urllib.request.urlopen(f"{self.endpoint}/control"))

    def source(self, **more: str) -> Source:
        return Source(**({"repo": "lab/tiny", "endpoint": self.endpoint} | more))

    def pull(self) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        env |= {"PYTHONPATH": str(ROOT / "launcher"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", PULL, self.endpoint, str(self.store.hub),
             str(self.store.manifests)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def model(self) -> weights.Model:
        known = Manifest.load(self.store.manifest_path("lab/tiny", "main"))
        assert known is not None
        root = self.store.repo_folder("lab/tiny")
        return weights.Model(root / "snapshots" / known.revision, root, known)

    def problems(self) -> set[str]:
        model = self.model()
        done = manifests.verify(model.manifest, str(model.folder), self.store.hashes)
        return {problem.name for problem in done.problems}


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    noise = random.Random(1)
    for number in range(SHARDS):
        (folder / f"model-{number}.safetensors").write_bytes(noise.randbytes(SHARD_BYTES))
    (folder / "config.json").write_text('{"architectures": ["Tiny"]}')
    (folder / "README.md").write_text("not needed")
    (folder / "weights.bin").write_bytes(b"pickle" * 500)
    return folder


@pytest.fixture
def hub(tmp_path, content, monkeypatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    files = tmp_path / "files"
    shutil.copytree(content, files)
    port = tmp_path / "port"
    process = subprocess.Popen([sys.executable, str(STUB), str(files), str(port)])
    deadline = time.monotonic() + 20
    while not (port.exists() and port.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    store = Store(tmp_path / "cache", tmp_path / "state", str(tmp_path / "state" / "hashes.json"))
    yield Hub(f"http://127.0.0.1:{port.read_text()}", files, store)
    process.kill()
    process.wait()


def refusal(source: Source, store: Store, policy: Policy | None = None) -> str:
    with pytest.raises(RefusedError) as caught:
        weights.ensure(source, store, policy or Policy())
    return " ".join(f"{finding.code} {finding.seen}" for finding in caught.value.findings)


def flip(path: Path, offset: int = 1000) -> None:
    target = path.resolve()
    data = bytearray(target.read_bytes())
    data[offset % len(data)] ^= 1 << (offset % 8)
    target.write_bytes(data)


def test_download_verify_and_stay_offline_afterwards(hub) -> None:
    model = weights.ensure(hub.source(), hub.store, Policy())
    names = [entry.name for entry in model.manifest.files]
    assert names == ["config.json", *(f"model-{n}.safetensors" for n in range(SHARDS))]
    assert all((model.folder / name).is_file() for name in names)
    assert not (model.folder / "weights.bin").exists()
    assert model.manifest.origin == "hub"
    hub.control(status=503)
    again = weights.ensure(hub.source(), hub.store, Policy())
    assert again == model
    assert hub.seen()["requests"] == 0


@pytest.mark.parametrize(
    ("trouble", "changes", "said"),
    [
        ({"status": 503}, {}, "hub-error lab/tiny@main: the hub answered HTTP 503"),
        ({"status": 401}, {}, "hub-not-found"),
        ({"status": 403}, {}, "hub-gated"),
        ({"status": 404}, {}, "hub-not-found"),
        ({}, {"revision": "gone"}, "hub-no-revision lab/tiny@gone"),
        ({}, {"endpoint": "http://127.0.0.1:9"}, "hub-unreachable"),
    ],
)
def test_what_the_hub_refuses_is_named(hub, trouble, changes, said) -> None:
    hub.control(**trouble)
    token = "hf_planted_token"
    assert said in (text := refusal(hub.source(token=token, **changes), hub.store))
    assert token not in text


def test_the_fallback_repository_serves_when_the_first_does_not(hub) -> None:
    source = hub.source(repo="lab/gone", fallback="lab/tiny")
    model = weights.ensure(source, hub.store, Policy())
    assert model.manifest.repo == "lab/tiny"
    assert "lab/gone" in refusal(hub.source(repo="lab/gone", fallback="lab/away"), hub.store)


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "grow"])
def test_damage_is_found_and_only_that_file_is_fetched_again(hub, damage) -> None:
    model = weights.ensure(hub.source(), hub.store, Policy())
    victim = model.folder / "model-2.safetensors"
    blob = victim.resolve()
    if damage == "flip":
        flip(victim)
    elif damage == "missing":
        blob.unlink()
    else:
        blob.write_bytes(
            blob.read_bytes()[:-1] if damage == "truncate" else blob.read_bytes() + b"x"
        )
    assert hub.problems() == {"model-2.safetensors"}
    assert "model-2.safetensors" in refusal(hub.source(), hub.store, Policy(skip_download=True))
    hub.control()
    weights.ensure(hub.source(), hub.store, Policy())
    assert set(hub.seen()["sent"]) == {"model-2.safetensors"}
    assert hub.problems() == set()


def test_rot_behind_equal_times_is_found_by_the_full_hash(hub) -> None:
    model = weights.ensure(hub.source(), hub.store, Policy())
    blob = (model.folder / "model-0.safetensors").resolve()
    cache = Path(hub.store.hashes)
    flip(blob)
    entries, now = json.loads(cache.read_text()), blob.stat()
    key = f"{now.st_dev}:{now.st_ino}:sha256"
    entries[key][:3] = [now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    cache.write_text(json.dumps(entries))
    known = (model.manifest, str(model.folder), hub.store.hashes)
    assert manifests.verify(*known).problems == ()
    entries[key][4] -= 31 * manifests.DAY_S
    cache.write_text(json.dumps(entries))
    assert [p.kind for p in manifests.verify(*known).problems] == ["content"]
    cache.write_text(json.dumps(entries))
    assert [p.kind for p in manifests.verify(*known, full=True).problems] == ["content"]


def test_an_unchanged_model_is_not_read_again(hub) -> None:
    model = weights.ensure(hub.source(), hub.store, Policy())
    done = manifests.verify(model.manifest, str(model.folder), hub.store.hashes)
    assert done == manifests.Verified((), 0)
    full = manifests.verify(model.manifest, str(model.folder), hub.store.hashes, full=True)
    assert full.hashed_bytes == model.manifest.bytes


@pytest.mark.slow
def test_a_download_killed_anywhere_never_looks_complete(hub) -> None:
    noise = random.Random(7)
    interrupted = 0
    for _ in range(20):
        hub.control(bytes_per_s=400_000)
        process = hub.pull()
        time.sleep(0.4 + noise.random() * 1.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        path = hub.store.manifest_path("lab/tiny", "main")
        if Manifest.load(path) is None:
            continue
        model = hub.model()
        broken = {
            entry.name for entry in model.manifest.files
            if not (model.folder / entry.name).is_file()
            or (model.folder / entry.name).read_bytes() != (hub.files / entry.name).read_bytes()
        }  # fmt: skip
        assert hub.problems() == broken
        interrupted += bool(broken)
        if not broken:
            shutil.rmtree(hub.store.hub)
    assert interrupted >= 3
    hub.control()
    weights.ensure(hub.source(), hub.store, Policy())
    assert hub.problems() == set()


def test_a_connection_that_is_cut_is_taken_up_again(hub) -> None:
    hub.control(cut_after=100_000)
    said = refusal(hub.source(), hub.store)
    assert "hub-unreachable" in said or "hub-error" in said
    assert hub.problems() != set()
    hub.control()
    weights.ensure(hub.source(), hub.store, Policy())
    assert hub.problems() == set()


def test_a_folder_is_hashed_once_and_watched(tmp_path, content) -> None:
    folder = tmp_path / "model"
    shutil.copytree(content, folder)
    store = Store(tmp_path / "hub", tmp_path / "state", str(tmp_path / "hashes"))
    model = weights.ensure(Source(str(folder)), store, Policy())
    assert model.manifest.origin == "first hash" and model.root == folder
    flip(folder / "model-1.safetensors")
    assert "model-1.safetensors" in refusal(Source(str(folder)), store)
    weights.ensure(Source(str(folder)), store, Policy(refresh=True))


@pytest.fixture
def pair(hub, tmp_path, monkeypatch) -> tuple[weights.Model, LocalShell, str]:
    monkeypatch.setattr(weights, "HASH_CACHE", str(tmp_path / "worker-hashes.json"))
    model = weights.ensure(hub.source(), hub.store, Policy())
    return model, LocalShell("worker"), str(tmp_path / "worker" / "model")


def copies(model: weights.Model, target: str) -> bool:
    folder = Path(target) / model.folder.relative_to(model.root)
    return all(
        (folder / entry.name).is_symlink()
        and (folder / entry.name).read_bytes() == (model.folder / entry.name).read_bytes()
        for entry in model.manifest.files
    )


@pytest.mark.lab
def test_a_copy_keeps_links_and_is_not_sent_twice(pair) -> None:
    model, node, target = pair
    assert weights.sync(model, node, target, Policy()) == SHARDS + 1
    assert copies(model, target)
    assert weights.sync(model, node, target, Policy()) == 0


@pytest.mark.lab
@pytest.mark.parametrize("times", ["new", "old"])
def test_damage_on_a_node_is_repaired_from_the_head(pair, times) -> None:
    model, node, target = pair
    weights.sync(model, node, target, Policy())
    victim = Path(target) / model.folder.relative_to(model.root) / "model-3.safetensors"
    before = victim.stat()
    flip(victim)
    if times == "old":
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(RefusedError, match=r"model-3\.safetensors"):
        weights.sync(model, node, target, Policy(skip_sync=True))
    assert weights.sync(model, node, target, Policy()) == 1
    assert copies(model, target)


@pytest.mark.lab
@pytest.mark.slow
def test_a_copy_killed_anywhere_never_looks_complete(pair, monkeypatch) -> None:
    model, node, target = pair
    noise = random.Random(3)
    argv = [*weights.rsync_argv(model.root, node, target), "--bwlimit=600"]
    names = [n for entry in model.manifest.files for n in weights._with_target(model, entry.name)]
    folder = Path(target) / model.folder.relative_to(model.root)
    interrupted = 0
    for _ in range(20):
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=-3, process_group=0)
        process.stdin.write("".join(f"{name}\0" for name in names).encode())
        process.stdin.close()
        time.sleep(0.05 + noise.random() * 0.9)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        broken = {
            entry.name for entry in model.manifest.files
            if not (folder / entry.name).is_file()
            or (folder / entry.name).read_bytes() != (model.folder / entry.name).read_bytes()
        }  # fmt: skip
        done = manifests.verify(model.manifest, str(folder), weights.HASH_CACHE)
        assert {problem.name for problem in done.problems} == broken
        interrupted += bool(broken)
        if not broken:
            shutil.rmtree(target)
    assert interrupted >= 3
    weights.sync(model, node, target, Policy())
    assert copies(model, target)


@pytest.mark.lab
def test_a_copy_that_fails_says_why(pair, monkeypatch) -> None:
    model, node, _ = pair
    with pytest.raises(RefusedError, match="rsync ended with"):
        weights.sync(model, node, "/proc/nowhere", Policy())
    finding = weights._copy_failed("w", 11, "rsync: write failed: No space left on device (28)")
    assert finding.code == "disk-full"


def test_the_copy_takes_the_fabric_address_and_keeps_the_host_key(tmp_path) -> None:
    node = SshShell("worker", "ops@worker", ("-p", "2222"))
    argv = weights.rsync_argv(tmp_path, node, "/data/m", "10.0.0.2")
    remote = argv[argv.index("-e") + 1]
    assert "HostName=10.0.0.2" in remote and "HostKeyAlias=worker" in remote and "-p 2222" in remote
    assert argv[-1] == "ops@worker:/data/m/"
