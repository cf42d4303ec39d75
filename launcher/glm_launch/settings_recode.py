"""Settings of dense projections in fewer bits; off unless set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from glm_exl3.format.recode import GROUPS, parse_groups
from glm_launch.settings_field import setting


def _groups(text: str) -> str:
    return ",".join(parse_groups(text))


Groups = Annotated[str, AfterValidator(_groups)]
Folder = Annotated[str, Field(pattern=r"^([/~][^\s,\"]*)?$")]


class RecodeSettings(BaseModel):
    """The part of `Settings` that docs/recode.md explains."""

    DENSE_RECODE: Literal["off", "fp8", "int8", "exl3"] = setting(
        "off", "BF16 projections in fewer bits: fp8 or int8 while loading, exl3 after "
        "./start.sh recode. Answers differ slightly from the checkpoint's.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    DENSE_GROUPS: Groups = setting(
        ",".join(GROUPS), "Which of them, separated by commas.", "Weight edits", "all ranks"
    )
    DENSE_BITS: int = setting(
        6, "Bits per weight of DENSE_RECODE=exl3; 7 and 8 have no fast kernel.",
        "Weight edits", "all ranks", ge=4, le=8,
    )  # fmt: skip
    DENSE_CACHE: Folder = setting(
        "", "Folder of what ./start.sh recode makes; empty: beside the weights with RUNTIME=local, "
        "below GLM_STATE_DIR otherwise.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    DENSE_FREED: Literal["kv", "host"] = setting(
        "kv", "Memory that DENSE_RECODE frees: kv gives it to the KV cache, host leaves it free.",
        "Weight edits", "all ranks",
    )  # fmt: skip
