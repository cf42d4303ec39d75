"""The OpenAI SDK against head and worker as `start.sh start` brings them up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from service import KEY, MODEL, serving

pytestmark = pytest.mark.engine

QUESTION = [{"role": "user", "content": "Name a colour and say why you like it."}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
# Constructed weights would answer in blanks for ever.
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Oslo", "Porto"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@dataclass
class Served:
    """A running head and worker."""

    client: openai.OpenAI
    base: str

    def running(self) -> float:
        """Requests the engine works on."""
        page = httpx.get(f"{self.base}/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in page
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        )


@pytest.fixture(scope="module")
def served(checkpoints: dict[str, Path], tmp_path_factory) -> Iterator[Served]:
    compact = f"--structured-outputs-config '{json.dumps(COMPACT)}'"
    state = tmp_path_factory.mktemp("state")
    with serving(checkpoints["full"], state, {"EXTRA_ARGS": compact}) as base:
        yield Served(openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0), base)


def ask(served: Served, **changes):
    arguments = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    return served.client.chat.completions.create(**(arguments | changes))


def spoken(message) -> str:
    """Reasoning and content of a message or a delta."""
    return (getattr(message, "reasoning", None) or "") + (message.content or "")


def test_the_model_is_listed_under_its_name(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [MODEL]


def test_chat(served: Served) -> None:
    reply = ask(served)
    assert spoken(reply.choices[0].message)
    assert reply.usage.completion_tokens == 24
    assert reply.choices[0].finish_reason == "length"


def test_a_stream_gives_the_same_text_and_the_usage_at_its_end(served: Served) -> None:
    whole = ask(served)
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    text = "".join(spoken(choice.delta) for chunk in chunks for choice in chunk.choices)
    assert text == spoken(whole.choices[0].message)
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_tool_that_must_be_called_is_called(served: Served) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = ask(served, tools=[WEATHER], tool_choice=choice, max_tokens=200, extra_body=NO_THINKING)
    calls = reply.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather"]
    assert json.loads(calls[0].function.arguments)["town"] in ("Oslo", "Porto")


def test_the_answer_of_a_tool_is_accepted(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert spoken(ask(served, messages=messages, tools=[WEATHER]).choices[0].message)


def test_logprobs_belong_to_the_tokens(served: Served) -> None:
    entries = ask(served, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(entries) == 24
    for entry in entries:
        ranked = [candidate.logprob for candidate in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True) and len(ranked) >= 3
        assert entry.logprob == ranked[0] <= 0


def test_a_json_schema_is_kept(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    reply = ask(served, response_format=schema, max_tokens=200, extra_body=NO_THINKING)
    assert json.loads(reply.choices[0].message.content)["colour"] in ("red", "green")


def test_thinking_can_be_turned_off(served: Served) -> None:
    on, off = ask(served), ask(served, extra_body=NO_THINKING)
    message = off.choices[0].message
    assert message.content and not getattr(message, "reasoning", None)
    assert on.choices[0].message.content != message.content


def test_closing_a_stream_frees_the_engine(served: Served) -> None:
    stream = ask(served, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert served.running() == 1
    stream.close()
    deadline = time.monotonic() + 10
    while served.running():
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.1)
    assert spoken(ask(served).choices[0].message)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "another"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, openai.BadRequestError),
    ],
    ids=["unknown-model", "bad-parameter", "too-long"],
)
def test_errors_are_the_sdk_s_own(served: Served, changes: dict, error: type) -> None:
    with pytest.raises(error):
        ask(served, **changes)


def test_a_wrong_key_is_refused(served: Served) -> None:
    stranger = served.client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
