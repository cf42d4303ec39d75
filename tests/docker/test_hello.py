"""Hello between real processes, and the comparison itself."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hello import Hello, differences, encode

HEAD = Hello("g1", 0, 2, "alpha", "p", "m", "d", ("vllm", "serve", "--seed", "1"), (("A", "1"),))


def other(**changes: object) -> Hello:
    return replace(HEAD, node_rank=1, node="beta", **changes)


def fake_plugin(folder: Path, digest: str) -> str:
    """A package that only knows its digest."""
    package = folder / "glm_exl3"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(f"def make_digest():\n    return {digest!r}\n")
    return str(folder)


def results(*processes) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=40)[0] for process in processes]
    return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]


def test_equal_nodes_start_their_engines_whoever_comes_first(nodes, wait_for) -> None:
    for rank in (1, 2, 0):
        nodes(rank, nodes=3)
    wait_for(lambda: all(nodes.state(rank)["phase"] == "engine" for rank in range(3)))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GLM_EXL3_GENERATION": "g2"}, "generation differs"),
        ({"GLM_EXL3_MODEL_MANIFEST": "other"}, "model differs"),
        ({"GLM_EXL3_DRAFTER_MANIFEST": "other"}, "drafter differs"),
        ({"NCCL_DEBUG": "INFO"}, "environment NCCL_DEBUG differs"),
        ({"GLM_EXL3_NODES": "3"}, "nodes differs"),
    ],
)
def test_a_difference_ends_every_node_with_78_and_the_same_reason(nodes, variables, said) -> None:
    head, worker = results(nodes(0), nodes(1, **variables))
    assert head[0] == worker[0] == 78
    for _, output in (head, worker):
        assert said in output
        assert "(rank 0) has" in output and "(rank 1) has" in output
    assert nodes.state(0)["engine_pid"] is None
    assert nodes.state(1)["engine_pid"] is None


def test_other_plugins_are_a_difference(nodes, tmp_path) -> None:
    packages = [fake_plugin(tmp_path / name, f"sources={name}") for name in ("one", "two")]
    done = results(*(nodes(rank, PYTHONPATH=packages[rank]) for rank in (0, 1)))
    for code, output in done:
        assert code == 78
        assert "plugin differs" in output and "sources=one" in output and "sources=two" in output


def test_a_plugin_that_does_not_load_is_named(nodes, tmp_path) -> None:
    package = Path(fake_plugin(tmp_path / "bad", "x")) / "glm_exl3" / "plugin.py"
    package.write_text("raise RuntimeError('unknown vLLM source')\n")
    ((code, output),) = results(nodes(0, PYTHONPATH=str(tmp_path / "bad")))
    assert code == 78
    assert "the plugin does not load" in output and "unknown vLLM source" in output


def test_other_arguments_are_named_by_their_flag(nodes) -> None:
    head = nodes(0, "true", "--max-model-len", "4096", "--port", "1")
    worker = nodes(1, "true", "--max-model-len", "8192", "--headless")
    for code, output in results(head, worker):
        assert code == 78
        assert "arguments --max-model-len differs" in output
        assert "'4096'" in output and "'8192'" in output
        assert "--port" not in output


def test_the_same_rank_twice_is_named(nodes) -> None:
    first, second = nodes(1, nodes=3), nodes(1, nodes=3)
    done = results(nodes(0, nodes=3), first, second)
    assert [code for code, _ in done] == [78, 78, 78]
    assert "says it is 1" in done[0][1]


def test_a_node_that_never_comes_is_named_and_ends_the_others(nodes) -> None:
    worker = nodes(1, nodes=3, GLM_EXL3_HELLO_TIMEOUT_S="2")
    head = nodes(0, nodes=3, GLM_EXL3_HELLO_TIMEOUT_S="2")
    for code, output in results(head, worker):
        assert code == 70
        assert "no hello from rank 2" in output


def test_a_worker_without_a_head_gives_up_with_the_address(nodes) -> None:
    ((code, output),) = results(nodes(1, GLM_EXL3_HELLO_TIMEOUT_S="1"))
    assert code == 70
    assert f"no answer from the head at 127.0.0.1:{nodes.port}" in output


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 70_000, b"{}\n", b""])
def test_whatever_is_not_a_hello_changes_nothing(nodes, wait_for, noise) -> None:
    head = nodes(0)

    def knock() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", nodes.port), timeout=1) as connection:
                connection.sendall(noise)
        except OSError:
            return False
        return True

    wait_for(knock)
    nodes(1)
    wait_for(lambda: nodes.state(0)["phase"] == nodes.state(1)["phase"] == "engine")
    assert head.poll() is None


def test_a_worker_that_was_restarted_may_come_again(nodes, wait_for) -> None:
    nodes(0, nodes=3)
    first = nodes(1, nodes=3)
    wait_for(lambda: nodes.state(1)["phase"] == "hello")
    first.terminate()
    first.wait(10)
    nodes(1, nodes=3)
    nodes(2, nodes=3)
    wait_for(lambda: all(nodes.state(rank)["phase"] == "engine" for rank in range(3)))


def test_the_head_says_that_it_is_alive(nodes, wait_for) -> None:
    hello = other(plugin="absent", model="", drafter="", arguments=("true",), environment=())
    nodes(0, "sleep", "60")
    lines: list[bytes] = []

    def join() -> bool:
        try:
            connection = socket.create_connection(("127.0.0.1", nodes.port), timeout=10)
        except OSError:
            return False
        with connection, connection.makefile("rb") as stream:
            connection.sendall(replace(hello, arguments=("sleep", "60")).line())
            lines.extend(stream.readline() for _ in range(2))
        return True

    wait_for(join)
    assert [json.loads(line)["type"] for line in lines] == ["go", "alive"]


def test_a_hello_survives_its_line() -> None:
    message = json.loads(HEAD.line())
    assert Hello.parse(message) == HEAD
    assert {"arguments_hash", "environment_hash", "protocol"} <= set(message)


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.none()))
def test_a_broken_hello_is_a_value_error(changes) -> None:
    message = json.loads(HEAD.line()) | changes
    try:
        parsed = Hello.parse(json.loads(encode(message)))
    except ValueError:
        return
    assert isinstance(parsed, Hello)


def test_every_difference_is_said_at_once() -> None:
    found = differences([other(generation="g2", plugin="q", environment=(("B", "2"),)), HEAD])
    assert [line.partition(" differs")[0] for line in found] == [
        "generation", "plugin", "environment A", "environment B",
    ]  # fmt: skip
    assert "node alpha (rank 0) has '1', node beta (rank 1) has absent" in found[2]
    assert differences([HEAD, other()]) == ()
    assert os.sep not in "".join(found)
