"""Every rule about a drafter and its target, one broken thing at a time and at random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format import drafting
from glm_exl3.format.drafting import Pair, cache_problem, dflash_problems, mtp_problems
from glm_exl3.format.headers import TensorEntry

TARGET = {"hidden_size": 256, "vocab_size": 1920, "num_hidden_layers": 4}
DFLASH = {
    "target_layer_ids": [0, 1, 3],
    "mask_token_id": 1889,
    "conv_kernel_size": 3,
    "conv_group_size": 32,
    "selector_rank": 32,
    "selector_top_k": 8,
}
DRAFTER = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 256,
    "vocab_size": 1920,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_size": 8,
    "dflash_config": DFLASH,
}


def tensor(*shape: int) -> TensorEntry:
    return TensorEntry(Path("x"), "BF16", shape, 0, 0)


PAIR = Pair(
    TARGET,
    DRAFTER,
    7,
    2,
    {"fc.weight": tensor(256, 768), "candidate_selector.successor_codebook": tensor(1920, 32)},
)


def broken(drafter: dict[str, Any] | None = None, dflash: dict[str, Any] | None = None, **own: Any):
    changed = DRAFTER | (drafter or {})
    changed["dflash_config"] = DFLASH | (dflash or {})
    return replace(PAIR, drafter=changed, **own)


def codes(pair: Pair) -> list[str]:
    return [found.code for found in dflash_problems(pair)]


def test_a_pair_that_fits_has_no_problem() -> None:
    assert not codes(PAIR)
    assert not codes(replace(PAIR, tensors={}))
    assert not codes(replace(PAIR, tensors={"fc.trellis": tensor(48, 16, 96)}))


@pytest.mark.parametrize(
    ("pair", "code"),
    [
        (broken({"architectures": ["Glm5NextForConditionalGeneration"]}), "drafter-architecture"),
        (broken({"architectures": []}), "drafter-architecture"),
        (broken({"vocab_size": 1921}, tensors={}), "drafter-vocabulary"),
        (broken({"draft_vocab_size": 64}), "drafter-vocabulary"),
        (broken(dflash={"target_layer_ids": [0, 1, 4]}), "drafter-layers"),
        (broken(dflash={"target_layer_ids": [-1, 0, 1]}), "drafter-layers"),
        (broken(dflash={"target_layer_ids": [1, 1, 2]}), "drafter-layers"),
        (broken(tokens=8), "drafter-block"),
        (broken({"is_causal": True}), "drafter-causal"),
        (broken({"layer_types": ["full_attention", "sliding_attention"]}), "drafter-causal"),
        (broken(dflash={"causal": True}), "drafter-causal"),
        (broken(dflash={"mask_token_id": 1920}), "drafter-mask"),
        (broken(dflash={"mask_token_id": None}), "drafter-mask"),
        (broken(dflash={"sample_from_anchor": True}), "drafter-anchor"),
        (broken(dflash={"conv_group_size": 48}), "drafter-groups"),
        (broken(ranks=3), "drafter-heads"),
        (broken(tensors={"fc.weight": tensor(256, 512)}), "drafter-inputs"),
        (broken(tensors={"fc.trellis": tensor(16, 16, 96)}), "drafter-inputs"),
        (
            broken(tensors={"candidate_selector.predecessor_codebook": tensor(100, 32)}),
            "drafter-codebook",
        ),
    ],
)
def test_one_wrong_thing_is_named_alone(pair: Pair, code: str) -> None:
    found = dflash_problems(pair)
    assert {one.code for one in found} == {code}
    assert all(one.seen and one.why and one.fix for one in found)


def test_an_explicit_false_lifts_the_mask_of_sliding_layers() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2}
    assert not codes(broken(sliding | {"is_causal": False}))
    assert not codes(broken(sliding, {"causal": False}))
    assert codes(broken(sliding | {"is_causal": True}, {"causal": False})) == ["drafter-causal"]


@given(st.data())
def test_another_hidden_size_is_always_refused(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20000).filter(lambda n: n != 256))
    assert "drafter-hidden" in codes(broken({"hidden_size": size}))


@given(st.integers(2, 32), st.integers(1, 31))
def test_tokens_fit_the_block_exactly(block: int, tokens: int) -> None:
    refused = "drafter-block" in codes(broken({"block_size": block}, tokens=tokens))
    assert refused == (tokens + 1 > block)


@given(st.sets(st.sampled_from([*drafting.REQUIRED, *drafting.REQUIRED_DRAFT]), min_size=1))
def test_every_missing_key_is_named(keys: set[str]) -> None:
    drafter = {key: value for key, value in DRAFTER.items() if key not in keys}
    drafter["dflash_config"] = {k: v for k, v in DFLASH.items() if k not in keys}
    (found,) = dflash_problems(replace(PAIR, drafter=drafter))
    assert found.code == "drafter-config-key"
    assert all(key in found.seen for key in keys)


def test_mtp_needs_the_tensors_of_its_layer() -> None:
    text = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    own = ["model.language_model.layers.3.mlp.gate.weight", "lm_head.weight"]
    assert not mtp_problems(text, [*own, "model.language_model.layers.4.enorm.weight"])
    assert [found.code for found in mtp_problems(text, own)] == ["mtp-absent"]
    none = text | {"num_nextn_predict_layers": 0}
    assert [found.code for found in mtp_problems(none, ())] == ["mtp-absent"]
    assert not mtp_problems(text, ())


@pytest.mark.parametrize(
    ("dtype", "graphs", "capability", "refused"),
    [
        ("fp8", True, 8, True),
        ("fp8_e4m3", True, 12, True),
        ("fp8", True, 9, False),
        ("fp8", False, 8, False),
        ("fp8", True, None, False),
        ("auto", True, 8, False),
    ],
)
def test_an_fp8_cache_that_turns_graphs_off(
    dtype: str, graphs: bool, capability: int | None, refused: bool
) -> None:
    found = cache_problem(dtype, graphs=graphs, capability=capability)
    assert (found is not None) == refused
