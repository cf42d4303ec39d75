"""PID 1 as a real process: its checks, its exit codes, its signals, its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import entrypoint

GRANDCHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c',
    'import os, sys, time\\nif os.fork(): sys.exit(0)\\ntime.sleep(0.1)'])
child.wait()
time.sleep(60)
"""


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_an_engine_that_ends_by_itself_is_exit_70_even_with_code_0(nodes) -> None:
    code, output = ended(nodes(0, sys.executable, "-c", "pass", nodes=1))
    assert code == 70
    assert "ended with 0" in output and "unasked" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_engine_and_the_end_is_asked_for(nodes, wait_for, number) -> None:
    process = nodes(0, nodes=1)
    wait_for(lambda: nodes.state(0)["phase"] == "engine")
    engine = nodes.state(0)["engine_pid"]
    process.send_signal(number)
    assert ended(process)[0] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    assert nodes.state(0)["phase"] == "ended"


def test_a_signal_while_waiting_for_the_others_ends_without_an_engine(nodes, wait_for) -> None:
    process = nodes(0)
    wait_for(lambda: nodes.state(0)["phase"] == "hello")
    process.terminate()
    assert ended(process)[0] == 0
    assert nodes.state(0)["engine_pid"] is None


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_orphans_are_adopted_and_leave_no_zombie(nodes, wait_for) -> None:
    process = nodes(0, sys.executable, "-c", GRANDCHILD, nodes=1)
    wait_for(lambda: nodes.state(0)["phase"] == "engine")
    engine = nodes.state(0)["engine_pid"]

    def children() -> set[int]:
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return {int(pid) for pid in pids if "canary.py" not in command_of(pid)}

    wait_for(lambda: len(children()) == 2)
    wait_for(lambda: children() == {engine})


def test_processes_of_the_engines_group_do_not_outlive_it(nodes, tmp_path) -> None:
    mark = tmp_path / "pid"
    leave = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3); "
        f"open({str(mark)!r}, 'w').write(str(child.pid))"
    )
    assert ended(nodes(0, sys.executable, "-c", leave, nodes=1))[0] == 70
    stat = Path(f"/proc/{mark.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_every_wrong_variable_is_named_before_anything_starts(nodes) -> None:
    process = nodes(
        5, sys.executable, "-c", "print('started')",
        GLM_EXL3_GENERATION="a b", GLM_EXL3_WATCH_PORT="0", GLM_EXL3_HEAD="",
    )  # fmt: skip
    code, output = ended(process)
    assert code == 78
    for name in ("GENERATION", "WATCH_PORT", "HEAD", "NODE_RANK"):
        assert f"GLM_EXL3_{name}=" in output
    assert "started" not in output


def test_an_engine_that_does_not_exist_is_a_wrong_configuration(nodes) -> None:
    code, output = ended(nodes(0, "/no/such/engine", nodes=1))
    assert code == 78
    assert "/no/such/engine cannot be started" in output


def test_the_key_comes_from_a_file_and_reaches_the_engine_only(nodes, tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("planted-secret\n")
    show = "import os; print('has', len(os.environ['VLLM_API_KEY']))"
    process = nodes(0, sys.executable, "-c", show, nodes=1, VLLM_API_KEY_FILE=str(key))
    _, output = ended(process)
    assert "has 14" in output
    assert "planted-secret" not in output
    assert "planted-secret" not in str(nodes.state(0))


@pytest.mark.parametrize("content", ["", "two words", None])
def test_a_bad_key_file_is_refused_without_showing_it(nodes, tmp_path, content) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    code, output = ended(nodes(0, nodes=1, VLLM_API_KEY_FILE=str(key)))
    assert code == 78
    assert "VLLM_API_KEY_FILE" in output
    assert "two words" not in output


def test_what_belongs_to_one_node_is_not_compared() -> None:
    head = [
        "vllm",
        "serve",
        "m",
        "--host",
        "0.0.0.0",
        "--port=1",
        "--node-rank",
        "0",
        "--seed",
        "1",
    ]
    worker = ["vllm", "serve", "m", "--headless", "--node-rank", "1", "--seed", "1"]
    expected = ("vllm", "serve", "m", "--seed", "1")
    assert entrypoint.shared_arguments(head) == entrypoint.shared_arguments(worker) == expected
    compared = entrypoint.shared_environment({
        "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0", "VLLM_HOST_IP": "10.0.0.1", "PATH": "/bin",
        "VLLM_API_KEY": "planted-secret", "HF_HUB_OFFLINE": "1",
    })  # fmt: skip
    assert compared == (("HF_HUB_OFFLINE", "1"), ("NCCL_DEBUG", "INFO"))
