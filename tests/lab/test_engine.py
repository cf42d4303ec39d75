"""The real engine in containers over two nodes: head and headless worker, TP 2 on the CPU.

The containers run the Python environment of this checkout, mounted read-only, behind the real
entry point; so the launch path is proven here, not the list of packages of an image.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from lab import ROOT, Lab

from glm_launch.errors import LaunchFailedError
from glm_launch.lifecycle import Cluster
from glm_launch.nodes import images, weights
from glm_launch.nodes.docker_cli import Box
from glm_launch.nodes.runner import ContainerRunner
from glm_launch.nodes.weights import Model, Policy, Source, Store
from glm_launch.plan import LaunchPlan, RankPlan
from glm_launch.state import StateStore

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]
IMAGE = "glm-exl3:engine"
TARGET = "/srv/models/tiny"
ENVIRONMENT = [Path(sys.prefix), ROOT / "overlay"]
if sys.base_prefix != "/usr":
    ENVIRONMENT.append(Path(sys.base_prefix))


def make_engine_image(target: Path) -> Path:
    """System libraries that the environment needs, and the entry point."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    programs = [
        Path(os.path.realpath(sys.executable)),
        Path("/usr/bin/dash"),
        Path("/usr/bin/lscpu"),
    ]
    objects = [*programs, *prefix.rglob("*.so"), *base.glob("lib/python3.*/lib-dynload/*.so")]
    # torch/lib holds objects with a version suffix as well.
    objects += prefix.glob("lib/python3.*/site-packages/torch/lib/*.so*")
    ldd = subprocess.run(["ldd", *map(str, objects)], capture_output=True, text=True).stdout
    words = {word for line in ldd.splitlines() for word in line.split()}
    libraries = sorted(w for w in words if w.startswith(("/lib", "/usr/lib")) and ".so" in w)
    with tarfile.open(target, "w") as tar:
        for name in ("bin", "lib", "lib64"):
            tar.add(f"/{name}", name, recursive=not Path(f"/{name}").is_symlink())
        names = {f"usr/{path.removeprefix('/usr').lstrip('/')}": path for path in libraries}
        names |= {
            str(path).lstrip("/"): str(path) for path in programs if path.is_relative_to("/usr")
        }
        names |= {"usr/bin/sh": "/usr/bin/dash"}
        if base == Path("/usr"):
            names |= {
                f"usr/lib/python3.{sys.version_info[1]}": f"/usr/lib/python3.{sys.version_info[1]}"
            }
        for name, path in names.items():
            tar.add(os.path.realpath(path), name)
        for source in (ROOT / "docker").glob("*.py"):
            tar.add(source, f"opt/glm-exl3/{source.name}")
        passwd = tarfile.TarInfo("etc/passwd")
        text = b"root:x:0:0:root:/tmp:/bin/sh\n"
        passwd.size = len(text)
        tar.addfile(passwd, io.BytesIO(text))
    return target


@pytest.fixture(scope="module")
def engine_image(running_lab, tmp_path_factory) -> str:
    """On the head only: the worker gets it over ssh."""
    tar = make_engine_image(tmp_path_factory.mktemp("engine") / "image.tar")
    head = running_lab.nodes[0]
    head.load(tar, IMAGE, ENTRYPOINT=f'["{sys.executable}", "/opt/glm-exl3/entrypoint.py"]')
    for node in running_lab.nodes:
        node.bring_in(*ENVIRONMENT)
    return IMAGE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    subprocess.run(
        [sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "full", "--out", str(folder)],
        check=True, capture_output=True,
    )  # fmt: skip
    store = Store(folder.parent / "hub", folder.parent / "state", str(folder.parent / "hashes"))
    return weights.ensure(Source(str(folder)), store, Policy())


def plan(lab: Lab, model: Model, salt: str = "") -> LaunchPlan:
    head = lab.nodes[0]
    ranks = []
    for number, node in enumerate(lab.nodes):
        argv = [
            f"{sys.prefix}/bin/vllm", "serve", "/model", "--enforce-eager", "--max-num-seqs", "4",
            "--max-model-len", "1024", "--language-model-only", "--tensor-parallel-size", "2",
            "--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank", str(number),
            "--master-addr", head.fabric, "--master-port", "29521",
        ]  # fmt: skip
        argv += ["--headless"] if number else ["--host", "127.0.0.1", "--port", "8888",
                                               "--served-model-name", "tiny"]  # fmt: skip
        env = {
            "GLM_EXL3_GENERATION": "g", "GLM_EXL3_NODES": "2", "GLM_EXL3_HEAD": head.fabric,
            "GLM_EXL3_NODE_RANK": str(number), "GLM_EXL3_MODEL_MANIFEST": model.manifest.digest,
            "GLM_EXL3_HELLO_TIMEOUT_S": "120", "VLLM_HOST_IP": node.fabric,
            "GLOO_SOCKET_IFNAME": "enp1s0f1np1", "NCCL_SOCKET_IFNAME": "enp1s0f1np1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(number),
            "VLLM_WORKER_MULTIPROC_METHOD": "fork", "XDG_CACHE_HOME": "/cache", "HOME": "/tmp",
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        }  # fmt: skip
        if salt and number:
            env["GLM_EXL3_DIGEST_SALT"] = salt
        role = "worker" if number else "head"
        ranks.append(RankPlan(number, role, node.name, tuple(argv), tuple(sorted(env.items()))))
    return LaunchPlan(
        runtime="containers", model="/model", served_name="tiny", drafting="none",
        base_url="http://127.0.0.1:8888", api_host="127.0.0.1", port=8888,
        master_addr=head.fabric, master_port=29521, ranks=tuple(ranks), start_order=(1, 0),
        ready_timeout_s=400, stop_grace_s=10,
    )  # fmt: skip


@pytest.fixture
def cluster(lab, model, engine_image, tmp_path) -> Iterator[Cluster]:
    head, worker = lab.nodes
    head.bring_in(model.folder)
    box = Box(engine_image, tuple((str(path), str(path)) for path in ENVIRONMENT), owner="test@lab")
    boxes = {
        head.name: replace(box, mounts=(*box.mounts, (str(model.folder), "/model"))),
        worker.name: replace(box, mounts=(*box.mounts, (TARGET, "/model"))),
    }
    store = StateStore(tmp_path / "state")
    shells = {head.name: head.shell, worker.name: worker.ssh}
    cluster = Cluster(store, ContainerRunner(store.launches, shells, boxes))
    yield cluster
    cluster.stop()


def bring(lab: Lab, model: Model) -> tuple[list[str], int]:
    """Image and weights to the worker; what had to be sent."""
    head, worker = lab.nodes
    sent = images.ensure(IMAGE, head.shell, [worker.ssh])
    return sent, weights.sync(model, worker.ssh, TARGET, Policy(), address=worker.fabric)


def test_image_weights_ranks_answer_and_a_second_start_sends_nothing(lab, cluster, model) -> None:
    assert bring(lab, model) == (["node2"], len(model.manifest.files))
    cluster.launch(plan(lab, model), {}, lambda _name, _seconds: None)
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0,
            "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
    reply = httpx.post("http://127.0.0.1:8888/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] > 0
    assert [state.state for state in cluster.observe()] == ["running", "running"]
    assert bring(lab, model) == ([], 0)
    cluster.stop()
    assert all(not node.containers() for node in lab.nodes)


def test_another_plugin_is_refused_before_the_engine_starts(lab, cluster, model) -> None:
    bring(lab, model)
    with pytest.raises(LaunchFailedError) as caught:
        cluster.launch(plan(lab, model, salt="other"), {}, lambda _name, _seconds: None)
    assert "exit code 78" in str(caught.value)
    log = next(cluster.store.launches.glob("*/rank1.log")).read_text()
    assert "plugin differs" in log and "salt=other" in log
    assert "Initializing a V1 LLM engine" not in log
