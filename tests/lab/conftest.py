"""One lab of two nodes for all tests here, and a cluster of fake ranks on it.

These tests run when they are asked for (`-m lab`) and in CI: they need root and tests/lab/setup.sh.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import fake_image  # noqa: E402
import lab as lab_module  # noqa: E402
from head import Head  # noqa: E402
from lab import HOME, IMAGE, ROOT, Lab, Node  # noqa: E402

from glm_launch.lifecycle import Cluster  # noqa: E402
from glm_launch.nodes.docker_cli import Box  # noqa: E402
from glm_launch.nodes.runner import ContainerRunner  # noqa: E402
from glm_launch.plan import LaunchPlan, RankPlan  # noqa: E402
from glm_launch.state import StateStore  # noqa: E402

BAD = {"hang": "FAKE_TROUBLE=hang", "crash": "FAKE_TROUBLE=crash-at-start",
       "sick": "GLM_FAKE_DOCTOR=planted-sickness"}  # fmt: skip
FAKE = ("python3", "/opt/glm-exl3/fakerank.py", "serve", "/model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.lab)
    if "lab" not in config.option.markexpr and not os.environ.get("CI"):
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]
    elif mine and (why := lab_module.refusal()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"the lab cannot run on this machine: {why}"))


@pytest.fixture(scope="session")
def running_lab(tmp_path_factory) -> Iterator[Lab]:
    if not lab_module.ROOTFS.is_dir():
        pytest.fail("the lab is not set up: run tests/lab/setup.sh")
    image = fake_image.make_image(tmp_path_factory.mktemp("image") / "image.tar")
    with lab_module.opened(Path(f"/tmp/glmlab{os.getpid()}"), 2) as lab:
        for node in lab.nodes:
            node.load(image)
        yield lab


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a checkpoint of the served model's kind, 17 MB."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    command = [sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "full", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def lab(running_lab) -> Iterator[Lab]:
    """The lab with the test on its first node's network; no container is left over."""
    with lab_module.at(running_lab.nodes[0]):
        yield running_lab
        for node in running_lab.nodes:
            if left := node.shell.run(["docker", "ps", "-aq"]).out.split():
                node.shell.run(["docker", "rm", "--force", *left])


@pytest.fixture(scope="session")
def moved_in(running_lab, tiny_model) -> Head:
    """The head with checkout and model, and images of it that misbehave."""
    first, second = running_lab.nodes
    head = Head(running_lab, {
        "RUNTIME": "containers", "DEVICE": "cpu", "HEAD_IP": first.fabric,
        "WORKER_IP": second.fabric, "WORKER_SSH": second.name, "MODEL": str(tiny_model),
        "SPEC_METHOD": "none", "IMAGE": IMAGE,
    })  # fmt: skip
    head.move_in()
    first.bring_in(tiny_model)
    for name, variable in BAD.items():
        first.load(name=f"glm-exl3:{name}", ENV=f"PYTHONUNBUFFERED=1 {variable}")
    return head


@pytest.fixture
def head(lab, moved_in, tiny_model) -> Iterator[Head]:
    yield moved_in
    for node in lab.nodes:
        node.shell.run(["rm", "-rf", f"{HOME}/.local", f"{HOME}/.cache", f"{ROOT}/.env"])
    lab.nodes[1].shell.run(["rm", "-rf", str(tiny_model)])


@dataclass
class Fakes:
    """A cluster of fake ranks: `plan` describes it, `cluster` runs it."""

    lab: Lab
    folder: Path
    env: dict[int, dict[str, str]] = field(default_factory=dict)
    extra: dict[int, tuple[str, ...]] = field(default_factory=dict)
    key: str = ""

    @property
    def nodes(self) -> list[Node]:
        return self.lab.nodes

    def plan(self, **changes: object) -> LaunchPlan:
        head = self.nodes[0]
        count = len(self.nodes)
        ranks = []
        for number, node in enumerate(self.nodes):
            argv = [*FAKE, "--nnodes", str(count), "--node-rank", str(number)]
            argv += ["--master-addr", head.fabric]
            argv += ["--headless"] if number else [
                "--port", "8888", "--served-model-name", "fake"]  # fmt: skip
            env = {
                "GLM_EXL3_GENERATION": "g", "GLM_EXL3_NODES": str(count),
                "GLM_EXL3_NODE_RANK": str(number), "GLM_EXL3_HEAD": head.fabric,
                "GLM_EXL3_HELLO_TIMEOUT_S": "30", "VLLM_HOST_IP": node.fabric,
            } | self.env.get(number, {})  # fmt: skip
            secret = ("VLLM_API_KEY",) if self.key and number == 0 else ()
            ranks.append(RankPlan(
                number, "worker" if number else "head", node.name,
                (*argv, *self.extra.get(number, ())), tuple(sorted(env.items())), secret,
            ))  # fmt: skip
        plan = LaunchPlan(
            runtime="containers", model="/model", served_name="fake", drafting="none",
            base_url="http://127.0.0.1:8888", api_host="127.0.0.1", port=8888,
            master_addr=head.fabric, master_port=29521, ranks=tuple(ranks),
            start_order=(*range(1, count), 0), ready_timeout_s=60, stop_grace_s=5,
        )  # fmt: skip
        return replace(plan, **changes)

    @property
    def secrets(self) -> dict[str, str]:
        return {"VLLM_API_KEY": self.key} if self.key else {}

    @property
    def cluster(self) -> Cluster:
        store = StateStore(self.folder)
        shells = {
            node.name: node.shell if node is self.nodes[0] else node.ssh for node in self.nodes
        }
        box = Box(IMAGE, owner="test@lab")
        return Cluster(store, ContainerRunner(store.launches, shells, dict.fromkeys(shells, box)))

    def launch(self, **changes: object) -> Cluster:
        cluster = self.cluster
        cluster.launch(self.plan(**changes), self.secrets, lambda _name, _seconds: None)
        return cluster


@pytest.fixture
def fakes(lab, tmp_path) -> Fakes:
    return Fakes(lab, tmp_path / "state")
