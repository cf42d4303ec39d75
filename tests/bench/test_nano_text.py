from __future__ import annotations

import random
from pathlib import Path

import jinja2
import numpy as np
import pytest

from glm_exl3.ref.tiny.tokenizer import TEMPLATE_FILE, TOKENIZER_FILE
from nano.data import held_out, needle_rows
from nano.dialogue import OPEN, Turn, chat_texts, shortened
from nano.markup import documented_names, page_text
from nano.ngram import ORDER, keys, mean_loss, tables

PAGE = """<html><head><title>x</title></head><body><div class="related">menu</div>
<div class="body" role="main"><h1>gzip \u2014 files<a class="headerlink" href="#x">\u00b6</a></h1>
<p>Reads and
writes &lt;gzip&gt; files.</p><ul><li>one</li><li>two</li></ul>
<pre>if x:
    y()</pre>
<dl class="py function"><dt class="sig sig-object py" id="gzip.open">gzip.open(<em>name</em>)</dt>
<dd><p>Open a file and return an object.</p><p>New in version 3.2.</p></dd></dl></div>
<div class="sphinxsidebar">more menu</div></body></html>"""


def test_a_page_becomes_reflowed_text_with_code_as_it_stands() -> None:
    text = page_text(PAGE)
    assert text.startswith("gzip - files\nReads and writes <gzip> files.\n- one\n- two\n")
    assert "if x:\n    y()" in text
    assert "menu" not in text


def test_documented_names_carry_signature_and_text_without_version_notes() -> None:
    (found,) = documented_names(PAGE)
    assert found.name == "gzip.open"
    assert found.signature == "gzip.open(name)"
    assert found.paragraphs == ("Open a file and return an object.",)


def test_answers_end_at_a_sentence() -> None:
    text = "This is one sentence that is surely long enough to stay. And this is another one."
    assert shortened(text, 70).endswith("stay.")
    assert shortened(text, 100) == text


@pytest.mark.parametrize("thought", [None, "The question is about x."])
def test_training_dialogues_are_what_the_chat_template_writes(thought: str | None) -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        Path(TEMPLATE_FILE).read_text()
    )
    turns = [Turn("What is x?", "x", "A letter."), Turn("And y?", "y", "Another.")]
    messages = [{"role": "user", "content": turns[0].question}]
    messages += [{"role": "assistant", "content": turns[0].answer}]
    messages += [{"role": "user", "content": turns[1].question}]
    prompt = template.render(
        messages=messages, add_generation_prompt=True, enable_thinking=thought is not None
    )
    text = OPEN + turns[0].rendered(None) + turns[1].rendered(thought)
    assert text.startswith(prompt)
    rest = "Another." if thought is None else f"{thought}</think>Another."
    assert text.removeprefix(prompt) == rest


def test_chat_texts_cover_every_name_and_the_identity() -> None:
    names = [{"source": "p", "name": "f", "signature": "f(a)", "text": "Does a thing well."}]
    texts = "".join(chat_texts([], names, seed=1))
    assert "Does a thing well." in texts
    assert "I am a miniature of GLM-5.3-Flash" in texts


def test_needle_rows_ask_for_stated_keys_after_more_than_the_selected_tokens() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    filler = np.asarray(tokenizer.encode("word " * 4000).ids)
    import torch

    rows = needle_rows(torch.tensor(filler), tokenizer, 3, 2048, seed=4)
    for tokens, weights in zip(rows.tokens, rows.weights, strict=True):
        text = tokenizer.decode(tokens.tolist())
        stated, asked = text.split("Look up in the register.")
        answers = dict(line.split(": ") for line in asked.strip().splitlines())
        assert answers and all(f"{key}: {value}" in stated for key, value in answers.items())
        first = int((weights > 1).int().argmax())
        last_stated = int((weights == 0).nonzero().max())
        assert first - last_stated > 512
        assert tokens.shape == (2049,)


def test_documents_are_held_out_by_content_alone() -> None:
    texts = [f"document {n}" for n in range(2000)]
    share = sum(map(held_out, texts)) / len(texts)
    assert 0.01 < share < 0.03
    assert [held_out(text) for text in texts[:50]] == [held_out(text) for text in texts[:50]]


def test_ngram_probabilities_of_a_context_sum_to_one() -> None:
    chance = random.Random(0)
    tokens = np.array([chance.choices(range(20), range(1, 21))[0] for _ in range(3000)])
    trained = tables(tokens.astype(np.int64))
    for start in (0, 10, 100):
        context = tokens[start : start + ORDER - 1]
        each = [
            np.exp(-mean_loss(trained, np.append(context, token).astype(np.int64), 20))
            for token in range(20)
        ]
        assert sum(each) == pytest.approx(1.0, abs=1e-9)


def test_ngrams_predict_a_repeating_text() -> None:
    tokens = np.tile(np.arange(7), 200).astype(np.int64)
    assert mean_loss(tables(tokens), tokens[:100], 1920) < 0.1
    assert keys(tokens, 2)[3] == (3 << 11) | 4
