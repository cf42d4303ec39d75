"""Sound text passes, each fault is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_bench import coherence
from glm_bench.prompts import PROMPTS

PROSE = (
    "The market opens before the sun does. First come the carts with crates of mackerel, then the "
    "women who sell bread from baskets lined with blue cloth. Nobody hurries, yet within an hour "
    "every stall stands in its place. A boy runs between them with a kettle and calls the price of "
    "tea. When the ferry horn sounds, the gulls lift from the roofs all at once, and for a moment "
    "the whole square looks up. Old Henrik says that one can tell the weather of the week from how "
    "they turn. He has been wrong for forty years, and still they ask him."
)
SOUND = {
    "prose": PROSE,
    "code": Path(coherence.__file__).read_text(),
    "table": "\n".join(f"{n};{n * n};{n**3}" for n in range(1, 61)),
    "json": "\n".join(
        f'{{"id": {n}, "name": "station {n}", "sensors": ["wind", "rain"]}},' for n in range(20)
    ),
    "rule": "# Title\n" + "-" * 80 + "\n" + PROSE,
    "short": "Yes.",
    "empty": "",
}
NOISE = random.Random(1)
FAULTS = {
    "invalid-characters": PROSE + "\ufffd\ufffd",
    "long-run": PROSE + "!" * 60,
    "loop": PROSE[:200] + " and then he said that it was so" * 40,
    "entropy": "".join(chr(NOISE.randrange(33, 0x250)) for _ in range(400)),
    "foreign-script": PROSE[:150] + "市場は太陽よりも早く開く。" * 10,
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_text_has_no_symptom(name: str) -> None:
    assert coherence.inspect(SOUND[name]) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named(kind: str) -> None:
    assert kind in {symptom.kind for symptom in coherence.inspect(FAULTS[kind])}


def test_one_word_for_ever_is_noticed() -> None:
    assert coherence.inspect("no " * 200)


def test_control_characters_are_noticed() -> None:
    assert coherence.inspect("fine\x00text")[0].kind == "invalid-characters"


def test_a_script_of_the_prompt_is_not_foreign() -> None:
    text = FAULTS["foreign-script"]
    told = {symptom.kind for symptom in coherence.inspect(text, prompt="Describe a market.")}
    asked = {symptom.kind for symptom in coherence.inspect(text, prompt="市場はひらく")}
    assert "foreign-script" in told - asked


@pytest.mark.parametrize("prompt", [p for prompts in PROMPTS.values() for p in prompts])
def test_the_prompts_themselves_are_sound(prompt: str) -> None:
    assert coherence.inspect(prompt) == []


@given(st.text())
def test_any_text_is_judged_without_an_error(text: str) -> None:
    for symptom in coherence.inspect(text, text[:5]):
        assert symptom.kind and symptom.seen
