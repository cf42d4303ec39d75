"""How many drafts are verified: what vLLM is told, what the plan says, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch import draft_lengths, kv_view
from glm_launch.kv_view import Card
from glm_launch.settings import Settings

DFLASH = {"SPEC_METHOD": "dflash", "DFLASH_MODEL": "/drafter"}


def settings(**values: object) -> Settings:
    return Settings(**{**DFLASH, **values})


def test_without_the_options_nothing_is_added() -> None:
    plain = settings()
    assert draft_lengths.configuration(plain) == {"num_speculative_tokens": 7}
    assert draft_lengths.arguments(plain) == []
    assert draft_lengths.environment(plain) == {}
    assert draft_lengths.notes(plain) == ()
    assert draft_lengths.findings(plain) == []


def test_a_longer_lookup_sizes_the_step_and_the_plan_says_what_it_costs() -> None:
    longer = settings(HYBRID_DRAFT=True, HYBRID_DRAFT_TOKENS=15, MAX_NUM_SEQS=4)
    assert draft_lengths.configuration(longer) == {"num_speculative_tokens": 15}
    assert draft_lengths.environment(longer)["GLM_EXL3_DRAFTER_TOKENS"] == "7"
    (note,) = draft_lengths.notes(longer)
    assert "24 more KDA state blocks per request" in note
    assert "96 with MAX_NUM_SEQS=4" in note
    assert kv_view.options(longer, Card()).drafts == 15


def test_a_shorter_lookup_costs_nothing() -> None:
    shorter = settings(HYBRID_DRAFT=True, HYBRID_DRAFT_TOKENS=3)
    assert draft_lengths.verified_tokens(shorter) == 7
    assert draft_lengths.notes(shorter) == ()


def test_every_number_of_an_adaptive_set_is_scheduled_and_the_route_is_loaded() -> None:
    adaptive = settings(ADAPTIVE_K="ema", MAX_NUM_SEQS=1)
    assert draft_lengths.configuration(adaptive)["num_speculative_tokens_per_batch_size"] == [
        [1, 1, 7],
        [2, 2, 4],
        [3, 3, 2],
    ]
    assert draft_lengths.arguments(adaptive) == ["--scheduler-cls", draft_lengths.SCHEDULER]
    assert "glm_exl3_drafting" in draft_lengths.environment(adaptive)["VLLM_PLUGINS"].split(",")


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"HYBRID_DRAFT": True, "SPEC_METHOD": "mtp"}, "hybrid-method"),
        ({"HYBRID_DRAFT": True, "SPEC_METHOD": "none"}, "hybrid-method"),
        ({"ADAPTIVE_K": "ema", "SPEC_METHOD": "none"}, "adaptive-method"),
        ({"ADAPTIVE_K": "ema", "ADAPTIVE_K_SET": "2,4"}, "adaptive-set"),
        ({"ADAPTIVE_K": "ema", "ADAPTIVE_K_SET": "2,8"}, "adaptive-set"),
        ({"ADAPTIVE_K": "ema", "SPEC_METHOD": "mtp"}, "adaptive-set"),
        (
            {"ADAPTIVE_K": "ema", "HYBRID_DRAFT": True, "HYBRID_DRAFT_TOKENS": 15},
            "adaptive-set",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, object], code: str) -> None:
    assert [finding.code for finding in draft_lengths.findings(settings(**values))] == [code]


@given(
    st.sampled_from(["dflash", "mtp", "none"]), st.booleans(), st.integers(1, 15),
    st.integers(1, 15), st.integers(1, 8), st.sampled_from(["off", "ema"]),
    st.sets(st.integers(1, 15), min_size=1, max_size=5),
)  # fmt: skip
def test_what_is_accepted_is_consistent(  # one argument per setting
    method: str, hybrid: bool, lookup: int, own: int, mtp: int, adaptive: str, lengths: set[int]
) -> None:
    made = settings(
        SPEC_METHOD=method, HYBRID_DRAFT=hybrid, HYBRID_DRAFT_TOKENS=lookup, DFLASH_TOKENS=own,
        MTP_TOKENS=mtp, ADAPTIVE_K=adaptive, ADAPTIVE_K_SET=",".join(map(str, lengths)),
    )  # fmt: skip
    if draft_lengths.findings(made):
        return
    said = draft_lengths.configuration(made)
    largest = said["num_speculative_tokens"]
    assert largest >= draft_lengths.drafter_tokens(made)
    schedule = said.get("num_speculative_tokens_per_batch_size", [])
    assert {entry[2] for entry in schedule} == (lengths if schedule else set())
    assert all(entry[2] <= largest for entry in schedule)
    assert draft_lengths.extra_blocks(made) >= 0
