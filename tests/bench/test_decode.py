"""The decode client against a server that answers as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from glm_bench import cli, client, decode, metrics
from glm_bench.client import Endpoint, ServerError
from glm_bench.prompts import KINDS, PROMPTS, prompts_for

WORDS = ("harbour", "boats", "silver", "nets", "gulls", "bread", "tea")


@dataclass
class Script:
    """What the server does, and the requests it saw."""

    tokens_per_chunk: int = 1
    usage: bool = True
    status: int = 200
    garbled: bool = False
    error_inside: bool = False
    drafts: int = 0
    requests: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    script: Script

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.requests.append(body)
        script.keys.append(self.headers["Authorization"])
        self.send_response(script.status)
        self.end_headers()
        if script.status != 200:
            self.wfile.write(b'{"error": "no"}')
            return
        step = script.tokens_per_chunk
        for done in range(step, body["max_tokens"] + 1, step):
            script.drafts += 1
            words = (f"{WORDS[(done + i) % len(WORDS)]}{done + i} " for i in range(step))
            text = "\ufffd" * step if script.garbled else "".join(words)
            where = "reasoning" if done <= 4 else "content"
            event: dict = {"choices": [{"delta": {where: text}}]}
            if script.usage:
                event["usage"] = {"prompt_tokens": 9, "completion_tokens": done}
            self.event(event)
        if script.error_inside:
            self.event({"error": {"message": "engine died"}})
        self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: dict) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(json.dumps({"data": [{"id": "small"}]}).encode())
            return
        drafts = self.script.drafts
        self.wfile.write(page(drafts, drafts * 2, drafts, [drafts, drafts // 2]).encode())

    def log_message(self, *_: object) -> None: ...


def page(drafts: int, tokens: int, accepted: int, positions: list[int]) -> str:
    """A part of vLLM's /metrics."""
    labels = 'engine="0",model_name="small"'
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.79e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(tokens)}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(accepted)}",
        "vllm:num_requests_running 3.0",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {n}.0'
        for i, n in enumerate(positions)
    ]
    return "\n".join(lines)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def endpoint(script: Script) -> Iterator[Endpoint]:
    handler = type("Bound", (Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "small", "planted-secret")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("step", [1, 4])
def test_an_answer_is_taken_in_whole(endpoint, script, step: int, usage: bool) -> None:
    script.tokens_per_chunk, script.usage = step, usage
    thoughts: list[str] = []
    words: list[str] = []
    done = client.stream_chat(
        endpoint,
        [{"role": "user", "content": "x"}],
        max_tokens=40,
        on_text=lambda thought, said: (thoughts.append(thought), words.append(said)),
    )
    assert done.completion_tokens == 40 and done.prompt_tokens == 9
    assert len(done.chunks) == 40 // step
    assert "".join(thoughts) == done.reasoning and done.reasoning
    assert "".join(words) == done.text and done.text
    assert done.decoded_tokens == 40 - (step if usage else 1)
    assert done.finish_reason == "length" and done.ttft_s > 0
    assert sum(done.gaps_s) == pytest.approx(done.decode_s)


def test_speed_is_tokens_after_the_first_chunk_over_their_time() -> None:
    chunks = tuple(client.Chunk(1.0 + i, "x", 4 * (i + 1)) for i in range(5))
    done = client.Completion(chunks, "", "xxxxx", 3, 20, "stop")
    assert (done.ttft_s, done.decode_s, done.decoded_tokens) == (1.0, 4.0, 16)
    assert done.tokens_per_s == 4.0


@pytest.mark.parametrize("status", [400, 401, 500])
def test_an_error_is_told(endpoint, script, status: int) -> None:
    script.status = status
    with pytest.raises(ServerError, match=f"HTTP {status}"):
        client.stream_chat(endpoint, [], max_tokens=4)


def test_an_error_inside_the_stream_is_told(endpoint, script) -> None:
    script.error_inside = True
    with pytest.raises(ServerError, match="engine died"):
        client.stream_chat(endpoint, [], max_tokens=4)


def test_an_empty_answer_and_a_missing_server_are_errors() -> None:
    with pytest.raises(ServerError, match="empty"):
        client.collect(iter([{"choices": [{"delta": {}, "finish_reason": "stop"}]}]), 0.0)
    with pytest.raises(ServerError):
        client.stream_chat(Endpoint("http://127.0.0.1:9/v1", "m"), [], max_tokens=4)


def test_a_report_has_every_run_and_the_acceptance(endpoint, script) -> None:
    seen: list[object] = []
    report = decode.measure(endpoint, "code", runs=3, max_tokens=24, on_run=seen.append)
    assert len(report.runs) == len(seen) == 3
    assert [run.prompt for run in report.runs] == list(PROMPTS["code"][:3])
    assert report.tokens_per_s > 0 and report.machine.cores >= 1
    assert report.drafting is not None
    assert report.drafting.drafts == 72
    assert report.drafting.acceptance == 0.5
    assert report.drafting.acceptance_per_position == (1.0, 0.5)
    assert report.drafting.tokens_per_step == 2.0
    assert len(script.requests) == 4 and script.requests[0]["max_tokens"] < 24
    assert "accepted 50% (by position 100% 50%)" in decode.one_line(report)


def test_without_drafting_there_is_no_acceptance(endpoint, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "read", lambda _endpoint: metrics.DraftCounters())
    report = decode.measure(endpoint, "prose", runs=1, max_tokens=8)
    assert report.drafting is None and "accepted" not in decode.one_line(report)


def test_counters_are_differences_and_engines_are_added() -> None:
    two_engines = page(10, 30, 12, [8, 4]) + "\n" + page(1, 3, 1, [1, 0])
    later = metrics.parse(two_engines)
    assert later == metrics.DraftCounters(11, 33, 13, (9, 4))
    since = later.since(metrics.parse(page(10, 30, 12, [8, 4])))
    assert since == metrics.DraftCounters(1, 3, 1, (1, 0))
    assert metrics.DraftCounters().since(metrics.DraftCounters()).acceptance is None


def test_the_command_prints_json_and_writes_the_file(endpoint, tmp_path: Path, capsys) -> None:
    output = tmp_path / "report.json"
    arguments = ["decode", "--url", endpoint.base_url, "--prompts", "structured", "--runs", "2",
                 "--max-tokens", "48", "--coherence", "--json",
                 "--output", str(output)]  # fmt: skip
    assert cli.run(arguments, environ={"VLLM_API_KEY": "planted-secret"}) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(output.read_text())
    record = json.loads(printed)
    assert (
        record["schema"] == 1 and record["model"] == "small" and record["date"].endswith("+00:00")
    )
    assert "planted-secret" not in printed


def test_the_key_is_sent(endpoint, script) -> None:
    cli.run(["decode", "--url", endpoint.base_url, "--runs", "1", "--max-tokens", "4"],
            environ={"VLLM_API_KEY": "k"})  # fmt: skip
    assert set(script.keys) == {"Bearer k"}


def test_garbled_text_has_its_own_exit_code(endpoint, script, capsys) -> None:
    script.garbled = True
    arguments = ["decode", "--url", endpoint.base_url, "--runs", "1", "--max-tokens", "40"]
    assert cli.run(arguments, environ={}) == 0
    assert cli.run([*arguments, "--coherence"], environ={}) == cli.EXIT_GARBLED
    assert "GARBLED" in capsys.readouterr().out


def test_no_server_is_exit_5(capsys) -> None:
    code = cli.run(["decode", "--url", "http://127.0.0.1:9/v1", "--model", "m"], environ={})
    assert code == cli.EXIT_FAILED and "error:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["encode"], ["decode", "--runs", "0"], ["decode", "-x"]])
def test_wrong_arguments_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_repeat_in_order(kind) -> None:
    assert prompts_for(kind, 6) == [*PROMPTS[kind], PROMPTS[kind][0]]
    assert len(set(PROMPTS[kind])) == 5
