"""Settings of everything that changes weights or activations; all of it is off unless set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from glm_exl3.format.donor import parse_layers, show_layers
from glm_launch.settings_field import setting

ALPHA_THAT_BREAKS = 2.5


def _layers(text: str) -> str:
    return show_layers(parse_layers(text))


Layers = Annotated[str, AfterValidator(_layers)]
Repository = Annotated[str, Field(pattern=r"^([\w.-]+/[\w.-]+)?$")]
Sha256 = Annotated[str, Field(pattern=r"^([0-9A-Fa-f]{64})?$")]
Place = Annotated[str, Field(pattern=r"^[^\s,\"]*$")]


class EditSettings(BaseModel):
    """The part of `Settings` that ablit/README.md and docs/edits.md explain."""

    ABLIT: bool = setting(
        False, "Edit output projections in memory. ablit/README.md tells what that does.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    ABLIT_METHOD: Literal["auto", "transplant", "proj"] = setting(
        "auto", "transplant: a donor's tensors; proj: a direction is taken out; auto: transplant, "
        "or an error.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    ABLIT_LAYERS: Layers = setting("15-45", "Layers to edit.", "Weight edits", "all ranks")
    ABLIT_ALPHA: float = setting(
        3.0, "Strength of proj; 1 takes the component out, more turns it round.",
        "Weight edits", "all ranks", ge=-16, le=16,
    )  # fmt: skip
    ABLIT_DIRECTION: Place = setting(
        "dealign", "Direction of proj: a safetensors file, or a name under which "
        "./start.sh ablit direction keeps one.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    ABLIT_INCLUDE_MTP: bool = setting(
        True, "Edit the MTP block, too, where ABLIT_LAYERS has it.", "Weight edits", "all ranks"
    )
    ABLIT_DONOR: Repository = setting(
        "", "Hub repository of the donor; only some of its tensors are fetched.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    ABLIT_DONOR_REVISION: Annotated[str, Field(pattern=r"^[\w./-]*$")] = setting(
        "", "Commit of the donor, 40 digits.", "Weight edits", "all ranks"
    )
    ABLIT_FINGERPRINT: Place = setting(
        "", "JSON file with the published relative change of each layer; empty: none is known.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    STEER_VECTOR: Place = setting(
        "", "GGUF file of projections of the residual streams; empty: no steering.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    STEER_SHA256: Sha256 = setting(
        "", "SHA-256 that this file must have; empty: that of the first rank's file.",
        "Weight edits", "all ranks",
    )  # fmt: skip
    STEER_ALPHA: float = setting(
        0.0, "Strength of the projections; 0: that of the file.",
        "Weight edits", "all ranks", ge=-16, le=16,
    )  # fmt: skip
    STEER_LAYERS: Layers = setting(
        "1-44", "Layers whose output is projected.", "Weight edits", "all ranks"
    )
    STEER_FORCE: bool = setting(
        False, f"Allow a strength from {ALPHA_THAT_BREAKS} on, where the model is known to break.",
        "Weight edits", "all ranks",
    )  # fmt: skip
