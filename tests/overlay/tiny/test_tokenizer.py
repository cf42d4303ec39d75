from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from glm_exl3.ref.tiny.geometry import geometry
from glm_exl3.ref.tiny.tokenizer import (
    CONTROL_ENTRIES,
    TOKENIZER_FILE,
    VISIBLE_ENTRIES,
    token_id,
    train,
    vocabulary,
)

TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))
VOCABULARY_SIZE = geometry().text.vocab_size


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary_fills_the_geometry() -> None:
    assert TOKENIZER.get_vocab_size() == VOCABULARY_SIZE
    assert sorted(vocabulary().values()) == list(range(VOCABULARY_SIZE))


@pytest.mark.parametrize("entry", CONTROL_ENTRIES + VISIBLE_ENTRIES)
def test_an_added_entry_is_one_token(entry: str) -> None:
    assert TOKENIZER.encode(f"a{entry}b").ids.count(token_id(entry)) == 1


def test_tags_survive_and_control_tokens_vanish_when_special_tokens_are_skipped() -> None:
    ids = TOKENIZER.encode("<|user|><think>x</think><tool_call>y</tool_call>").ids
    shown = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert shown == "<think>x</think><tool_call>y</tool_call>"


def test_training_twice_gives_the_same_file_of_the_asked_size() -> None:
    texts = ["a word and another word, and one more", "def word(another): return another"] * 4
    first = train(texts, 300)
    assert first == train(texts, 300)
    size = len(json.loads(first)["model"]["vocab"]) + len(CONTROL_ENTRIES + VISIBLE_ENTRIES)
    assert 288 <= size <= 300
