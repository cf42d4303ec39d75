"""The hybrid speculator without an engine: when it is built, and how wide the drafter stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.patches import speculation


def config(method: str = "dflash", architecture: str = "DFlash2DraftModel", **more: Any) -> Any:
    drafter = SimpleNamespace(
        architectures=[architecture], hf_config=SimpleNamespace(block_size=more.get("block", 8))
    )
    return SimpleNamespace(
        method=method, draft_model_config=drafter,
        num_speculative_tokens=more.get("tokens", 7),
        num_speculative_tokens_per_batch_size=[[1, 1, 7]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "block", "wanted", "own"), [(7, 8, 0, 7), (15, 8, 0, 7), (15, 8, 4, 4), (4, 8, 0, 4)]
)
def test_the_drafter_keeps_its_own_number(tokens: int, block: int, wanted: int, own: int) -> None:
    from glm_exl3.spec.hybrid import narrowed, own_tokens

    speculation_config = config(tokens=tokens, block=block)
    assert own_tokens(speculation_config, wanted) == own
    whole = SimpleNamespace(speculative_config=speculation_config)
    narrow = narrowed(whole, own).speculative_config
    assert narrow.num_speculative_tokens == own
    assert narrow.num_speculative_tokens_per_batch_size is None
    assert speculation_config.num_speculative_tokens == tokens


@pytest.mark.parametrize(("tokens", "wanted"), [(15, 8), (4, 5)])
def test_more_than_its_block_or_the_step_holds_is_refused(tokens: int, wanted: int) -> None:
    from glm_exl3.spec.hybrid import own_tokens

    with pytest.raises(GlmExl3Error, match="GLM_EXL3_DRAFTER_TOKENS"):
        own_tokens(config(tokens=tokens), wanted)


@pytest.mark.parametrize(
    ("knob", "speculative"),
    [("0", config()), ("1", config(method="mtp")), ("1", config(architecture="DFlashDraftModel"))],
)
def test_everything_but_hybrid_drafting_goes_to_vllm(
    knob: str, speculative: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_EXL3_HYBRID_DRAFT", knob)
    calls: list[tuple[Any, ...]] = []
    wrapped = speculation.with_hybrid(lambda *given: calls.append(given))
    whole = SimpleNamespace(speculative_config=speculative)
    wrapped(whole, "device", "states")
    assert calls == [(whole, "device", "states")]


def test_a_dflash2_drafter_gets_the_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm_exl3.spec import hybrid

    monkeypatch.setenv("GLM_EXL3_HYBRID_DRAFT", "1")
    monkeypatch.setattr(hybrid, "HybridSpeculator", lambda *given: given)
    wrapped = speculation.with_hybrid(lambda *given: pytest.fail("the original was called"))
    whole = SimpleNamespace(speculative_config=config())
    assert wrapped(whole, "device", "states") == (whole, "device", "states")
