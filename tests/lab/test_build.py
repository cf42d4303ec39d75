"""What `docker buildx bake` makes of docker/build.hcl, asked from a real buildx."""

from __future__ import annotations

import json

import pytest
from lab import HOME, ROOT, Lab

DIGEST = "sha256:" + "a" * 64


def bake(lab: Lab, *targets: str, **variables: str) -> dict:
    """The targets as buildx understands them; nothing is built."""
    node = lab.nodes[1]
    text = (ROOT / "docker" / "build.hcl").read_text()
    assert node.shell.run(["sh", "-c", f"cat > {HOME}/build.hcl"], stdin=text).ok
    env = [f"{key}={value}" for key, value in variables.items()]
    done = node.shell.run(["env", *env, "docker", "buildx", "bake", "-f", f"{HOME}/build.hcl",
                           "--print", *targets])  # fmt: skip
    assert done.ok, done.err
    return json.loads(done.out)["target"]


@pytest.mark.parametrize("group", ["default", "release"])
def test_the_gpu_image_is_for_both_platforms(lab, group) -> None:
    (target,) = bake(lab, group).values()
    assert target["platforms"] == ["linux/amd64", "linux/arm64"]
    assert (target["target"], target["dockerfile"]) == ("cuda", "Dockerfile")
    assert target["args"]["BASE_IMAGE"] == "vllm/vllm-openai:v0.33.0"
    assert target["args"].get("RELEASE") == ("1" if group == "release" else None)


def test_a_digest_pins_the_base(lab) -> None:
    args = bake(lab, "release", BASE_DIGEST=DIGEST)["cuda-release"]["args"]
    assert args["BASE_IMAGE"] == f"vllm/vllm-openai:v0.33.0@{DIGEST}"
    assert args["BASE_DIGEST"] == DIGEST


def test_the_cpu_image_takes_its_wheels_from_a_named_context(lab) -> None:
    target = bake(lab, "cpu", CPU_BASE_IMAGE="mine:1", WHEELS="elsewhere")["cpu"]
    assert target["args"]["CPU_BASE_IMAGE"] == "mine:1"
    assert target["contexts"] == {"wheels": "elsewhere"}
