"""Keep attention packed.

vLLM's decoder layer builds its attention without a quantisation configuration, because the
checkpoints it was written for store attention in bf16. With an EXL3 checkpoint that packs
attention, loading would stop at the first packed tensor. The decoder layer looks its attention
classes up in its own module at construction; the patch puts subclasses there that hand the
configuration through. With any other configuration the subclasses behave like their parents.
"""

from __future__ import annotations

from glm_exl3.patches.record import Patch

DECODER = "vllm.models.glm5next.common.model:Glm5NextDecoderLayer.__init__"
MLA = "vllm.models.glm5next.common.attention:Glm5NextMLAAttention.__init__"
KDA = "vllm.models.glm5next.common.kda:Glm5NextLinearAttention.__init__"


def apply() -> None:
    """Replace the two attention classes in the model's module."""
    from vllm.models.glm5next.common import model

    from glm_exl3.models.attention import PackedLinearAttention, PackedMLAAttention

    model.Glm5NextMLAAttention = PackedMLAAttention
    model.Glm5NextLinearAttention = PackedLinearAttention


PATCH = Patch(
    id="packed-attention",
    summary="attention layers of glm5next receive the quantisation configuration",
    targets=(DECODER, MLA, KDA),
    stage="model",
    applies_to="==0.33.0",
    fingerprints={
        "0.33.0": {DECODER: "1c30f100a5d68f08", MLA: "6b5b2ae47dc614f9", KDA: "b947424f9a553852"}
    },
    upstream="none: upstream's checkpoints have dense attention",
    remove_when="glm5next passes vllm_config.quant_config to its attention",
    off_switch="GLM_EXL3_PATCH_PACKED_ATTENTION",
    risk="crash: checkpoints with packed attention cannot load without it",
    apply=apply,
)
