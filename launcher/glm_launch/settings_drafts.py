"""Settings of how many tokens are drafted, and of lookup beside the drafter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from glm_launch.parsing import split_list
from glm_launch.settings_field import setting

Length = Annotated[int, Field(ge=1, le=15)]
Lengths = Annotated[tuple[Length, ...], BeforeValidator(split_list)]


class DraftSettings(BaseModel):
    """The part of `Settings` that docs/drafting.md explains under Hybrid and Adaptive k."""

    HYBRID_DRAFT: bool = setting(
        False, "Beside DFlash2, propose what followed the last time the text ended like this.",
        "Drafting", "all ranks",
    )  # fmt: skip
    HYBRID_DRAFT_TOKENS: int = setting(
        7, "Tokens a lookup proposes; if more than DFLASH_TOKENS, each step verifies that many.",
        "Drafting", "all ranks", ge=1, le=15,
    )  # fmt: skip
    ADAPTIVE_K: Literal["off", "ema"] = setting(
        "off", "ema: verify as many drafts per step as lately paid off, of ADAPTIVE_K_SET.",
        "Drafting", "all ranks",
    )  # fmt: skip
    ADAPTIVE_K_SET: Lengths = setting(
        (2, 4, 7), "Numbers of drafts to choose from, each with graphs of its own; the largest is "
        "what is drafted.",
        "Drafting", "all ranks",
    )  # fmt: skip
