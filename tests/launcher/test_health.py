"""What the logs and the canary tell."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
import pytest
import respx

from glm_launch import health
from glm_launch.errors import LaunchFailedError
from glm_launch.health import PHASES, LogWatch
from glm_launch.runner import NodeState

URL = "http://127.0.0.1:9/v1/completions"
ANSWER = {"choices": [{"text": " you"}], "usage": {"completion_tokens": 4}}


@respx.mock
def test_a_completion_is_an_answer_and_carries_the_key() -> None:
    route = respx.post(URL).respond(json=ANSWER)
    assert health.complete("http://127.0.0.1:9", "m", "k", 1) == " you"
    assert route.calls[0].request.headers["Authorization"] == "Bearer k"


@respx.mock
@pytest.mark.parametrize("problem", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow")])
def test_a_server_that_is_not_there_yet_is_no_answer(problem: Exception) -> None:
    respx.post(URL).mock(side_effect=problem)
    assert health.complete("http://127.0.0.1:9", "m", None, 1) is None


@respx.mock
def test_a_server_that_is_busy_starting_is_no_answer() -> None:
    respx.post(URL).respond(503)
    assert health.complete("http://127.0.0.1:9", "m", None, 1) is None


@respx.mock
@pytest.mark.parametrize(
    ("status", "body"),
    [(500, ANSWER), (401, ANSWER), (200, ANSWER | {"usage": {"completion_tokens": 0}})],
)
def test_an_error_or_an_empty_completion_fails(status: int, body: dict) -> None:
    respx.post(URL).respond(status, json=body)
    with pytest.raises(LaunchFailedError, match=f"HTTP {status}"):
        health.complete("http://127.0.0.1:9", "m", None, 1)


def test_phases_follow_the_log_and_never_go_back(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    watch = LogWatch([log, tmp_path / "absent.log"])
    assert PHASES[watch.advance()][0] == "importing the engine"
    log.write_text("INFO Starting to load model x\n")
    assert PHASES[watch.advance()][0] == "reading the weights"
    with log.open("a") as stream:
        stream.write("INFO Application startup comp")
        stream.flush()
        assert PHASES[watch.advance()][0] == "reading the weights"
        stream.write("lete.\n")
    assert PHASES[watch.advance()][0] == "waiting for a first answer"
    log.write_text("INFO Starting to load model x\n")
    assert PHASES[watch.advance()][0] == "waiting for a first answer"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "(Worker) ERROR glm_exl3.format.errors.FormatError: a.safetensors: x.trellis: bad\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "FormatError: a.safetensors: x.trellis: bad",
        ),
        ("ValueError: first\nKeyError: 'second'\n", "ValueError: first"),
        ("WARNING ulimit: OSError: [Errno 24]\nKeyError: 'w2'\n", "KeyError: 'w2'"),
        ("all is well\nKilled\n\n", "Killed"),
        ("", ""),
    ],
)
def test_the_cause_is_the_first_error_of_a_log(tmp_path: Path, log: str, cause: str) -> None:
    path = tmp_path / "rank0.log"
    path.write_text(log)
    assert health.cause(path) == cause


def test_exit_codes_in_words() -> None:
    assert "SIGKILL" in health.describe_exit(-9)
    assert health.describe_exit(-11) == "signal 11"
    assert health.describe_exit(0) == "exit code 0"


def test_what_the_entry_point_or_the_plugin_says_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "ValueError: something on the way\n"
        "glm-exl3: error: plugin differs: node a (rank 0) has 'x', node b (rank 1) has 'y'\n"
        "glm-exl3: error: plugin differs: node a (rank 0) has 'x', node b (rank 1) has 'y'\n"
    )
    assert health.cause(log).startswith("plugin differs: node a")
    assert health.cause(log).count("plugin differs") == 1
    log.write_text(
        "ValueError: layer 3\nglm-exl3: error: the engine ended with 1 after 5 s, unasked\n"
    )
    assert health.cause(log) == "ValueError: layer 3"


@pytest.mark.parametrize(("runtime", "after", "gone"), [
    ("containers", 5.0, False), ("containers", 21.0, True), ("local", 0.0, True),
])  # fmt: skip
def test_a_node_that_does_not_answer_once_is_not_a_rank_that_ended(
    plan, runtime: str, after: float, gone: bool
) -> None:
    now = [0.0]
    waiting = health.Waiting(
        dataclasses.replace(plan, runtime=runtime), lambda: [], health.LogWatch([]),
        lambda *_: None, lambda: None, clock=lambda: now[0],
    )  # fmt: skip
    lost = [NodeState(1, "worker", "n", "lost")]
    assert (health._patient(waiting, lost) == lost) == (runtime == "local")
    now[0] = after
    assert (health._patient(waiting, lost) == lost) == gone
    assert health._patient(waiting, [NodeState(1, "worker", "n", "running")])
    now[0] += 1
    assert (health._patient(waiting, lost) == []) == (runtime != "local")


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, "out of memory"), (-15, "signal 15"), (1, "exit code 1"), (70, "nobody had asked"),
     (78, "the nodes differ"), (137, "out of memory")],
)  # fmt: skip
def test_more_exit_codes_in_words(code: int, said: str) -> None:
    assert said in health.describe_exit(code)
