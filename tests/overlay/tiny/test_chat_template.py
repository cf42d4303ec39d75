from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm_exl3.ref.tiny.tokenizer import TEMPLATE_FILE

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(Path(TEMPLATE_FILE).read_text(encoding="utf-8"))
    return template.render(messages=messages, **variables)


def test_thinking_is_on_unless_switched_off() -> None:
    turn = "[gMASK]<sop><|user|>Hi<|assistant|>"
    assert render([USER], add_generation_prompt=True) == f"{turn}<think>"
    assert render([USER], add_generation_prompt=True, enable_thinking=True) == f"{turn}<think>"
    assert render([USER], add_generation_prompt=True, enable_thinking=False) == f"{turn}</think>"


def test_without_a_generation_prompt_the_text_ends_with_the_last_turn() -> None:
    assert render([USER]) == "[gMASK]<sop><|user|>Hi"


def test_turns_keep_their_order_and_old_thoughts_are_dropped() -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        USER,
        {"role": "assistant", "content": "Hello.", "reasoning_content": "greet"},
        {"role": "user", "content": "Again"},
    ]
    assert render(messages) == (
        "[gMASK]<sop><|system|>Be short.<|user|>Hi<|assistant|></think>Hello.<|user|>Again"
    )


def test_thoughts_behind_the_last_user_turn_are_kept() -> None:
    thought = {"role": "assistant", "content": "Hello.", "reasoning_content": "greet"}
    inline = {"role": "assistant", "content": "<think>greet</think>Hello."}
    expected = "[gMASK]<sop><|user|>Hi<|assistant|><think>greet</think>Hello."
    assert render([USER, thought]) == expected
    assert render([USER, inline]) == expected


def test_tools_are_listed_and_calls_have_the_documented_form() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Graz", "days": 3}}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
    ]
    text = render(messages, tools=[TOOL], add_generation_prompt=True)
    assert text.index("<tools>") < text.index('"name": "weather"') < text.index("</tools>")
    assert (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Graz</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<|observation|><tool_response>rain</tool_response><tool_response>sun</tool_response>"
        "<|assistant|><think>"
    ) in text


@pytest.mark.parametrize("kind", ["image", "video"])
def test_parts_of_a_message_are_joined(kind: str) -> None:
    content = [{"type": "text", "text": "See"}, {"type": f"{kind}_url"}]
    assert render([{"role": "user", "content": content}]).endswith(
        f"<|user|>See<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>"
    )
