"""Operators, updates and nodes in each other's way: leases, rollback, lost nodes, secrets."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

TWO = "reg.example/glm:2"
SECRETS = {
    "VLLM_API_KEY": "planted-api-key", "HF_TOKEN": "planted-hub-token",
    "GHCR_TOKEN": "planted-registry-token", "GHCR_USER": "somebody",
}  # fmt: skip


def lease(nodes, node: str, until: float) -> Path:
    path = nodes[node] / "home" / ".cache" / "glm-exl3" / "lease.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "owner": "eve@elsewhere", "token": "t", "verb": "start", "since": until - 100,
        "until": until,
    }))  # fmt: skip
    return path


def test_f17_a_lease_of_somebody_else_refuses_and_leaves_none_of_ours(nodes) -> None:
    theirs = lease(nodes, "w1", time.time() + 60)
    done = nodes("start", "--steal")
    assert done.returncode == 3
    assert "error [leased]: w1 is being changed by eve@elsewhere (`start` since" in done.stderr
    assert "runs until" in done.stderr
    assert list(nodes.folder.rglob("lease.json")) == [theirs]
    assert not nodes.calls("docker", "run")


def test_f17_a_lease_that_ran_out_is_taken_over_only_when_asked(nodes) -> None:
    lease(nodes, "w1", time.time() - 1)
    done = nodes("start")
    assert done.returncode == 3 and "--steal takes it over" in done.stderr
    assert nodes("start", "--steal").returncode == 0
    assert not list(nodes.folder.rglob("lease.json"))
    nodes("stop")


def test_f17_a_second_command_on_the_head_is_told_who_is_at_work(nodes, tmp_path) -> None:
    state = Path(nodes.settings["GLM_STATE_DIR"])
    from glm_launch.state import StateStore

    with StateStore(state).lock("download"):
        done = nodes("start")
    assert done.returncode == 3 and "another command is at work: `download` (pid" in done.stderr


def test_f17_a_launcher_that_was_killed_leaves_nothing_in_the_way(nodes) -> None:
    process = nodes.starting(within_s=90)
    process.kill()
    process.communicate(timeout=30)
    assert len(list(nodes.folder.rglob("lease.json"))) == 2
    status = json.loads(nodes("status", "--json").stdout)
    assert status["answer"]["error"] == "abandoned while starting"
    good = {"layers": ["sha256:a"], "plugin": "p1"}
    nodes.registry({TWO: good})
    done = nodes("start", IMAGE=TWO)
    assert done.returncode == 0, done.stderr
    assert "cleaning up launch" in done.stdout
    assert nodes.containers() == {"head": ["glm-exl3-node0"], "w1": ["glm-exl3-node1"]}
    assert not list(nodes.folder.rglob("lease.json"))
    nodes("stop")


def test_f25_rollback_returns_to_the_image_that_answered(nodes) -> None:
    good = {"layers": ["sha256:a"], "plugin": "p1"}
    bad = {"layers": ["sha256:b"], "plugin": "p2", "trouble": "worker:crash"}
    nodes.registry({"reg.example/glm:1": good, TWO: bad})
    assert nodes("start").returncode == 0
    nodes.forget_calls()
    assert nodes("restart", IMAGE=TWO).returncode == 4
    assert nodes.containers() == {"head": [], "w1": []}
    done = nodes("rollback", IMAGE=TWO)
    assert done.returncode == 0, done.stderr
    assert "rolling back to reg.example/glm:1" in done.stdout
    assert "put into .env: IMAGE=glm-exl3:good-" in done.stdout
    status = json.loads(nodes("status", "--json").stdout)
    assert status["answer"]["answered"] is True
    sent = [call[-1] for call in nodes.calls("docker", "save")]
    assert sent == [TWO]
    nodes("stop")


def test_f25_there_may_be_nothing_to_roll_back_to(nodes) -> None:
    done = nodes("rollback")
    assert done.returncode == 3 and "error [nothing-to-roll-back]" in done.stderr
    done = nodes("rollback", IMAGE="", WORKER_IP="", WORKER_SSH="", RUNTIME="local")
    assert done.returncode == 3 and "RUNTIME=local has no image" in done.stderr


def test_stop_goes_on_when_a_node_is_down_and_can_be_repeated(nodes) -> None:
    assert nodes("start").returncode == 0
    down = nodes["w1"] / "down"
    down.touch()
    status = nodes("status")
    assert status.returncode == 5 and "rank 1 (worker) lost" in status.stderr
    done = nodes("stop")
    assert (
        done.returncode == 4
        and "rank 1 on" in done.stderr
        and "could not be stopped" in (done.stderr)
    )
    assert nodes.containers() == {"head": [], "w1": ["glm-exl3-node1"]}
    down.unlink()
    assert nodes("stop").returncode == 0
    assert nodes.containers() == {"head": [], "w1": []}


def test_f14_a_port_that_is_taken_is_named_with_another(nodes) -> None:
    import socket

    with socket.create_server(("127.0.0.1", int(nodes.settings["PORT"]))):
        done = nodes("start")
    assert done.returncode == 3
    assert f"PORT={nodes.settings['PORT']} is taken at 127.0.0.1" in done.stderr
    assert "or set PORT=" in done.stderr


def test_f5_a_path_that_drops_full_packets_is_refused(nodes) -> None:
    (nodes["w1"] / "small-packets").touch()
    done = nodes("doctor")
    assert done.returncode == 3 and "error [mtu-path]" in done.stderr
    assert "with packets of" in done.stderr and "ping -c 2" in done.stderr


def test_f7_what_does_not_fit_is_refused_with_the_sizes(nodes) -> None:
    done = nodes("start", CPU_KV_GIB="512")
    assert done.returncode == 3 and "error [too-little-memory]" in done.stderr
    assert "KV cache 512.0 GiB" in done.stderr and "fix: free" in done.stderr


def test_no_secret_is_in_an_argument_label_log_state_or_output(nodes) -> None:
    record = nodes.folder / "kit.json"
    said = []
    for arguments in (
        ["plan"], ["doctor", "--record", str(record)], ["start"], ["status", "--json"], ["logs",
        "all"], ["stop"],
    ):  # fmt: skip
        done = nodes(*arguments, **SECRETS)
        assert done.returncode == 0, done.stderr
        said += [done.stdout, done.stderr]
        if arguments == ["start"]:
            key = nodes.folder / "state" / "keys" / "glm-exl3-node0.key"
            assert key.read_text() == SECRETS["VLLM_API_KEY"]
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
            assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    (login,) = nodes.folder.rglob("login")
    argv, given = json.loads(login.read_text())
    assert given == SECRETS["GHCR_TOKEN"] and "reg.example" in argv
    login.unlink()
    folder = Path((nodes["head"] / "config-was").read_text())
    assert not folder.exists()
    assert not key.exists()
    everything = "\n".join([*said, nodes.everything_written()])
    assert "glm-exl3-node0" in everything
    assert not [name for name, value in SECRETS.items() if value in everything
                and name != "GHCR_USER"]  # fmt: skip


def test_a_key_is_made_once_for_this_user_only_and_never_shown(nodes) -> None:
    first = nodes("key")
    path = nodes.folder / "state" / "api-key"
    key = path.read_text().strip()
    assert first.returncode == 0 and f"VLLM_API_KEY_FILE={path}" in first.stdout
    assert len(key) >= 43 and key not in first.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = nodes("key")
    assert "is there already" in again.stdout and path.read_text().strip() == key


@pytest.mark.parametrize("verb", ["start", "download"])
def test_an_env_file_is_made_once_and_sets_nothing(nodes, verb) -> None:
    made = Path(nodes.settings["GLM_ENV_FILE"])
    nodes(verb, MODEL="")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    lines = [line for line in made.read_text().splitlines() if line and not line.startswith("#")]
    assert lines and all(line.endswith("=") for line in lines)
    made.write_text("PORT=1\n")
    nodes(verb, MODEL="")
    assert made.read_text() == "PORT=1\n"


def test_an_image_by_digest_is_shipped_under_a_name_of_its_own(nodes) -> None:
    name = "reg.example/glm@sha256:" + "ab" * 32
    nodes.registry({name: {"layers": ["sha256:a"], "plugin": "p1"}})
    done = nodes("start", IMAGE=name)
    assert done.returncode == 0, done.stderr
    assert nodes.calls("docker", "save")[0][-1] == "glm-exl3:pinned-abababababababab"
    nodes("stop")
    nodes.forget_calls()
    assert nodes("start", IMAGE=name).returncode == 0
    assert not nodes.calls("docker", "pull") and not nodes.calls("docker", "save")
    nodes("stop")


def test_a_daemon_that_stops_answering_keeps_the_launch_recorded(nodes) -> None:
    assert nodes("start").returncode == 0
    trouble = nodes["head"] / "trouble"
    trouble.write_text("inspect\nCannot connect to the Docker daemon\n")
    done = nodes("stop")
    assert done.returncode == 4 and "docker does not answer" in done.stderr
    assert nodes.containers() == {"head": ["glm-exl3-node0"], "w1": []}
    trouble.unlink()
    assert nodes("stop").returncode == 0
    assert nodes.containers() == {"head": [], "w1": []}
