"""The verbs over nodes from end to end, with programs that pretend: order, rollback, repairs.

tests/lab runs the same over real docker daemons and ssh servers.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from glm_launch.nodes import facts

READING = {"info", "version", "ps", "inspect", "logs"}


def changes(nodes) -> list[list[str]]:
    """Calls of docker and rsync that change something."""
    docker = [call for call in nodes.calls("docker") if call[2] not in READING
              and call[2:4] != ["image", "inspect"]]  # fmt: skip
    return [*docker, *nodes.calls("rsync")]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_start_answer_status_stop_and_a_second_start_sends_nothing(nodes) -> None:
    done = nodes("start")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("sending") < done.stdout.index("copying 4 file(s)")
    started = [call[0] for call in nodes.calls("docker", "run", "--detach")]
    assert started == ["w1", "head"]
    assert len(nodes.sent()) == 4
    status = json.loads(nodes("status", "--json").stdout)
    assert status["answer"]["answered"] is True
    assert [rank["state"] for rank in status["ranks"]] == ["running", "running"]
    assert "Application startup complete" in nodes("logs", "head").stdout
    assert nodes("stop").stdout.endswith("stopped, no container is left\n")
    assert nodes("stop").stdout == "nothing runs\n"
    assert nodes.containers() == {"head": [], "w1": []}
    nodes.forget_calls()
    assert nodes("start").returncode == 0
    assert len(nodes.sent()) == 4
    assert {tuple(call[2:4]) for call in changes(nodes)} == {
        ("run", "--detach"), ("tag", "reg.example/glm:1"),
    }  # fmt: skip


def test_plan_prints_every_command_and_changes_nothing(nodes) -> None:
    done = nodes("plan", VLLM_API_KEY="planted-secret")
    assert done.returncode == 0, done.stderr
    for line in (
        "docker pull --platform linux/amd64", "| ssh", "rsync --archive", "--node-rank 1",
        "-m glm_exl3.doctor", "state/keys/glm-exl3-node0.key",
    ):  # fmt: skip
        assert line in done.stdout
    assert done.stdout.index("start worker rank 1") < done.stdout.index("start head rank 0")
    assert "planted-secret" not in done.stdout
    assert not changes(nodes) and not (nodes.folder / "state").exists()
    told = json.loads(nodes("plan", "--json").stdout)
    assert told["runtime"] == "containers" and told["steps"][-1]["node"].endswith("(10.99.0.1)")


def test_a_worker_that_fails_rolls_everything_back(nodes) -> None:
    nodes.registry({"reg.example/glm:1": {"layers": ["a"], "plugin": "p", "trouble":
                                          "worker:crash"}})  # fmt: skip
    done = nodes("start")
    assert done.returncode == 4
    assert "rank 1 (worker) exited" in done.stderr and "layer 3 has no scales" in done.stderr
    assert nodes.containers() == {"head": [], "w1": []}
    assert not list(nodes.folder.rglob("lease.json"))


def test_ctrl_c_before_ready_rolls_back(nodes) -> None:
    process = nodes.starting(within_s=60)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert nodes.containers() == {"head": [], "w1": []}
    assert not list(nodes.folder.rglob("lease.json"))


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Error response from daemon: denied", "pull-denied"),
        ("write /var/lib/docker: no space left on device", "disk-full"),
        ("dial tcp: lookup reg.example: no such host", "pull-failed"),
    ],
)
def test_a_pull_that_fails_says_why(nodes, said: str, code: str) -> None:
    (nodes["head"] / "trouble").write_text(f"pull\n{said}\n")
    done = nodes("start")
    assert done.returncode == 3 and f"error [{code}]" in done.stderr
    assert said.split(": ")[-1] in done.stderr


def test_an_image_that_nobody_has_is_not_found(nodes) -> None:
    done = nodes("start", IMAGE="reg.example/other:1")
    assert done.returncode == 3 and "error [pull-not-found]" in done.stderr


def test_an_image_that_fails_its_self_check_is_not_shipped(nodes) -> None:
    nodes.registry({"reg.example/glm:1": {"layers": ["a"], "plugin": "p", "broken": True}})
    done = nodes("start")
    assert done.returncode == 3 and "self-check: x: planted" in done.stderr
    assert not nodes.calls("docker", "save") and not nodes.calls("docker", "run", "--detach")
    assert nodes("start", SKIP_OVERLAY_VERIFY="1").returncode == 0
    nodes("stop")


def test_skip_pull_takes_what_is_there_and_nothing_else(nodes) -> None:
    nodes.put_image("head", "reg.example/glm:1")
    done = nodes("start", SKIP_PULL="1")
    assert done.returncode == 3 and "w1 lacks reg.example/glm:1" in done.stderr
    assert not nodes.calls("docker", "pull") and not nodes.calls("docker", "save")
    nodes.put_image("w1", "reg.example/glm:1", plugin="another")
    done = nodes("start", SKIP_PULL="1")
    assert done.returncode == 3 and "(10.99.0.2): plugin" in done.stderr


def test_build_makes_the_image_and_ships_it(nodes) -> None:
    done = nodes("start", BUILD="1", IMAGE="")
    assert done.returncode == 0, done.stderr
    (build,) = nodes.calls("docker", "buildx")
    assert build[-1] == "cpu" and "cpu.tags=glm-exl3:cpu" in build
    plan = nodes("plan", BUILD="1", IMAGE="").stdout
    assert "env BASE_IMAGE=vllm/" in plan and "PLUGIN_LABEL=sources-" in plan
    assert nodes.calls("docker", "save")[0][-1] == "glm-exl3:cpu"
    nodes("stop")


def test_all_findings_come_at_once_also_when_a_node_is_down(nodes) -> None:
    (nodes["w1"] / "down").touch()
    (nodes["head"] / "trouble").write_text("info\nCannot connect to the Docker daemon\n")
    done = nodes("start", SHARED_WEIGHTS="1")
    assert done.returncode == 3
    assert "error [ssh-timeout]: ssh to w1" in done.stderr
    assert "error [docker-unusable]" in done.stderr
    assert not changes(nodes)


def test_only_the_damaged_shard_is_sent_again(nodes) -> None:
    assert nodes("start").returncode == 0
    nodes("stop")
    before = len(nodes.sent())
    flip(nodes["w1"] / "home" / "model" / "model-00002-of-00002.safetensors")
    done = nodes("start", SKIP_SYNC="1")
    assert done.returncode == 3
    assert "is not complete on w1: model-00002-of-00002.safetensors: sha256" in done.stderr
    assert nodes("start").returncode == 0
    assert nodes.sent()[before:] == ["w1 model-00002-of-00002.safetensors"]
    nodes("stop")


def test_damage_on_the_head_refuses_before_anything_starts(nodes) -> None:
    assert nodes("download").returncode == 0
    flip(nodes["head"] / "home" / "model" / "model-00001-of-00002.safetensors")
    done = nodes("start")
    assert done.returncode == 3 and "model-00001-of-00002.safetensors: sha256" in done.stderr
    assert not nodes.calls("docker", "run", "--detach")


def test_download_copies_verifies_and_starts_nothing(nodes) -> None:
    done = nodes("download", "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]
    assert model["files"] == 4 and model["manifest"] == "first hash"
    assert len(nodes.sent()) == 4 and not nodes.calls("docker", "run")


def test_doctor_records_facts_that_can_be_read_again(nodes, tmp_path) -> None:
    record = tmp_path / "kit.json"
    done = nodes("doctor", "--json", "--record", str(record))
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["findings"] == []
    assert [node["address"] for node in told["facts"]["nodes"]] == ["10.99.0.1", "10.99.0.2"]
    value = json.loads(record.read_text())
    assert [facts.read(node).docker.version for node in value["nodes"]] == ["28.1", "28.1"]


def test_doctor_reads_every_byte_when_asked(nodes) -> None:
    assert nodes("download").returncode == 0
    shard = nodes["head"] / "home" / "model" / "model-00001-of-00002.safetensors"
    assert nodes("doctor", "--verify-weights").returncode == 0
    cache = nodes["head"] / "home" / ".cache" / "glm-exl3" / "hashes.json"
    flip(shard)
    entries = json.loads(cache.read_text())
    now = shard.stat()
    entry = entries[f"{now.st_dev}:{now.st_ino}:sha256"]
    entry[:3] = [now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    cache.write_text(json.dumps(entries))
    assert nodes("doctor").returncode == 0
    done = nodes("doctor", "--verify-weights")
    assert done.returncode == 3 and "model-00001-of-00002.safetensors: sha256" in done.stderr


def test_a_restart_that_is_refused_leaves_the_running_launch_alone(nodes) -> None:
    assert nodes("start").returncode == 0
    running = nodes.containers()
    done = nodes("restart", IMAGE="reg.example/none:1")
    assert done.returncode == 3 and nodes.containers() == running
    assert nodes("restart").returncode == 0
    assert nodes.containers() == running
    assert nodes("stop").returncode == 0


def test_one_node_needs_no_ssh_and_no_addresses(nodes) -> None:
    alone = {"WORKER_IP": "", "WORKER_SSH": "", "HEAD_IP": ""}
    assert nodes("start", **alone).returncode == 0
    assert nodes.containers() == {"head": ["glm-exl3-node0"], "w1": []}
    assert not nodes.calls("ssh")
    assert nodes("stop").returncode == 0
