"""One lab of two nodes for all tests here, and a cluster of fake ranks on it.

These tests run when they are asked for (`-m lab`) and in CI: they need root and tests/lab/setup.sh.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import fake_image  # noqa: E402
import lab as lab_module  # noqa: E402
from fakes import Fakes  # noqa: E402
from head import Head  # noqa: E402
from lab import HOME, IMAGE, ROOT, Lab  # noqa: E402

BAD = {"hang": "FAKE_TROUBLE=hang", "crash": "FAKE_TROUBLE=crash-at-start",
       "sick": "GLM_FAKE_DOCTOR=planted-sickness"}  # fmt: skip


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


@pytest.fixture
def fakes(lab, tmp_path) -> Fakes:
    return Fakes(lab, tmp_path / "state")
