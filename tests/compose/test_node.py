"""The compose files are valid, safe, and ask for the container that the launcher starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm_launch.nodes import docker_cli
from glm_launch.nodes.docker_cli import Box

ROOT = Path(__file__).parents[2]
COMPOSE = Path(sys.executable).parent / "docker-compose"
ENV = {
    "PATH": "/usr/bin:/bin", "GLM_IMAGE": "glm-exl3:cuda", "GLM_WEIGHTS": "/models",
    "GLM_COMMAND": "vllm serve /model --seed 1", "GLM_EXL3_GENERATION": "g1",
}  # fmt: skip


def config(*files: str, **env: str) -> dict:
    options = [part for name in ("node", *files) for part in ("-f", f"compose/{name}.yaml")]
    done = subprocess.run(
        [COMPOSE, "--env-file", "/dev/null", *options, "config", "--format", "json"],
        env=ENV | env, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]["node"]


@pytest.mark.parametrize("missing", ["GLM_IMAGE", "GLM_WEIGHTS", "GLM_COMMAND"])
def test_what_has_no_default_is_asked_for(missing) -> None:
    with pytest.raises(AssertionError, match=missing):
        config(**{missing: ""})


@pytest.mark.parametrize("files", [(), ("cpu",), ("rdma",)])
def test_the_node_is_contained(files) -> None:
    node = config(*files)
    assert not node.get("privileged")
    assert node["restart"] == "no"
    assert node["ipc"] == "private" and int(node["shm_size"]) > 0
    assert node["security_opt"] == ["no-new-privileges:true"]
    weights = next(mount for mount in node["volumes"] if mount["target"] == "/model")
    assert weights["read_only"] and not weights["bind"].get("create_host_path")
    assert node.get("cap_add", []) == (["IPC_LOCK"] if files == ("rdma",) else [])
    assert bool(node.get("devices")) is (files == ("rdma",))
    assert bool(node.get("deploy")) is (files != ("cpu",))


def test_an_unset_variable_stays_unset() -> None:
    """An empty NCCL_IB_GID_INDEX would mean index 0."""
    assert config()["environment"]["NCCL_IB_GID_INDEX"] is None
    assert config(NCCL_IB_GID_INDEX="3")["environment"]["NCCL_IB_GID_INDEX"] == "3"


def options(argv: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for flag, value in zip(argv, argv[1:], strict=False):
        if flag.startswith("--"):
            found.setdefault(flag, []).append(value)
    return found


def test_the_launcher_starts_the_same_container(tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("planted-secret")
    node = config("rdma", GLM_API_KEY_FILE=str(key), GLM_STOP_GRACE="45s")
    box = Box("glm-exl3:cuda", (("/models", "/model"),), gpus="all", rdma=True)
    env = tuple((k, v) for k, v in node["environment"].items() if v and k != "VLLM_API_KEY_FILE")
    command = ("vllm", "serve", "/model", "--seed", "1")
    argv = docker_cli.run_argv(box, 0, "g1", command, env, grace_s=45, key_file=str(key))
    asked = options(argv)
    assert argv[-6:] == ["glm-exl3:cuda", *command] and node["command"] == list(command)
    assert asked["--network"] == [node["network_mode"]]
    assert asked["--ipc"] == [node["ipc"]] and asked["--restart"] == [node["restart"]]
    assert asked["--security-opt"] == node["security_opt"]
    assert int(asked["--shm-size"][0].removesuffix("gb")) * 2**30 == int(node["shm_size"])
    assert {u.split("=")[0]: int(u.split("=")[1]) for u in asked["--ulimit"]} == node["ulimits"]
    assert asked["--stop-timeout"] == ["45"] and node["stop_grace_period"] == "45s"
    assert asked["--cap-add"] == node["cap_add"] and asked["--gpus"] == ["all"]
    assert sorted(asked["--env"]) == sorted(
        f"{name}={value}" for name, value in node["environment"].items() if value
    )
    mounts = {tuple(p.split("=")[1] for p in m.split(",")[1:3]) for m in asked["--mount"]}
    assert mounts == {("/models", "/model"), (str(key), "/run/secrets/api-key"),
                      ("glm-exl3-cache", "/cache")}  # fmt: skip
    assert all(",readonly" in m for m in asked["--mount"] if "type=bind" in m)
    assert set(node["labels"]) <= {label.split("=")[0] for label in asked["--label"]}
    assert "--privileged" not in argv and "planted-secret" not in " ".join(argv)


def test_without_a_key_no_file_is_mounted() -> None:
    argv = docker_cli.run_argv(Box("i"), 1, "g", ("true",), (), grace_s=5)
    assert not any("secrets" in part or "API_KEY" in part for part in argv)
    assert "--gpus" not in argv and "--device" not in argv


def test_what_docker_says_about_a_container() -> None:
    state = {"Status": "exited", "ExitCode": 70, "OOMKilled": True, "Pid": 0}
    labels = {"io.glm-exl3.generation": "g1"}
    seen = docker_cli.parse_inspect(json.dumps([{"State": state, "Config": {"Labels": labels}}]))
    assert seen is not None
    assert (seen.status, seen.exit_code, seen.oom, seen.generation) == ("exited", 70, True, "g1")
    assert docker_cli.parse_inspect("[]") is None
    assert docker_cli.parse_inspect("Error: no such object") is None
