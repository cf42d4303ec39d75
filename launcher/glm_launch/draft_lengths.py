"""How many drafts a step verifies, and what vLLM and the plugin are told about it. Pure.

The number is one for the whole batch. Lookup may propose more than DFlash2 drafts; the larger
number is what vLLM knows (`num_speculative_tokens`): look-ahead, KDA states and graphs are sized by
it, and the plugin keeps the drafter at its own. With adaptive k vLLM gets a schedule that names
every number, so that each is captured, and a scheduler that chooses.
"""

from __future__ import annotations

from glm_launch.errors import Finding
from glm_launch.settings import Settings

SCHEDULER = "glm_exl3.spec.adaptive.AdaptiveScheduler"
PLUGINS = ("glm_exl3", "glm_exl3_cpu", "glm_exl3_drafting")
KDA_GROUPS = 3
"""Groups of the KV cache that hold KDA states; each keeps a block per draft and request."""


def drafter_tokens(settings: Settings) -> int:
    """Tokens the model that drafts proposes; 0 without one."""
    return {"dflash": settings.DFLASH_TOKENS, "mtp": settings.MTP_TOKENS}.get(
        settings.SPEC_METHOD, 0
    )


def hybrid(settings: Settings) -> bool:
    """Whether lookup proposes beside DFlash2."""
    return settings.HYBRID_DRAFT and settings.SPEC_METHOD == "dflash"


def adaptive(settings: Settings) -> bool:
    """Whether the number changes from step to step."""
    return settings.ADAPTIVE_K != "off" and settings.SPEC_METHOD != "none"


def verified_tokens(settings: Settings) -> int:
    """The largest number of drafts that a step verifies."""
    own = drafter_tokens(settings)
    return max(own, settings.HYBRID_DRAFT_TOKENS) if hybrid(settings) else own


def configuration(settings: Settings) -> dict[str, object]:
    """What belongs into vLLM's speculative configuration beside method and model."""
    found: dict[str, object] = {"num_speculative_tokens": verified_tokens(settings)}
    if adaptive(settings):
        lengths = sorted(settings.ADAPTIVE_K_SET, reverse=True)
        found["num_speculative_tokens_per_batch_size"] = [
            [requests, requests, length] for requests, length in enumerate(lengths, start=1)
        ]
    return found


def arguments(settings: Settings) -> list[str]:
    """Further arguments of `vllm serve`."""
    return ["--scheduler-cls", SCHEDULER] if adaptive(settings) else []


def environment(settings: Settings) -> dict[str, str]:
    """Variables of every rank. Naming our plugins loads no others; the route asks for it."""
    found = {}
    if hybrid(settings):
        found["GLM_EXL3_HYBRID_DRAFT"] = "1"
        found["GLM_EXL3_DRAFTER_TOKENS"] = str(settings.DFLASH_TOKENS)
    if adaptive(settings):
        found["VLLM_PLUGINS"] = ",".join(PLUGINS)
    return found


def extra_blocks(settings: Settings) -> int:
    """KDA state blocks that one running request keeps because lookup proposes more tokens."""
    return KDA_GROUPS * (verified_tokens(settings) - drafter_tokens(settings))


def notes(settings: Settings) -> tuple[str, ...]:
    """What the plan says about it."""
    blocks = extra_blocks(settings)
    if not blocks:
        return ()
    return (
        f"HYBRID_DRAFT_TOKENS={settings.HYBRID_DRAFT_TOKENS} keeps {blocks} more KDA state blocks "
        f"per request than DFLASH_TOKENS={settings.DFLASH_TOKENS}: "
        f"{blocks * settings.MAX_NUM_SEQS} with MAX_NUM_SEQS={settings.MAX_NUM_SEQS}",
    )


def findings(settings: Settings) -> list[Finding]:
    """Combinations that cannot be served as they are set."""
    found = []
    if settings.HYBRID_DRAFT and settings.SPEC_METHOD != "dflash":
        found.append(
            Finding(
                "hybrid-method",
                f"HYBRID_DRAFT=1 with SPEC_METHOD={settings.SPEC_METHOD}",
                "lookup is built into the DFlash2 speculator; without it the setting does nothing",
                "set SPEC_METHOD=dflash, or leave HYBRID_DRAFT empty",
            )
        )
    if settings.ADAPTIVE_K != "off" and settings.SPEC_METHOD == "none":
        found.append(
            Finding(
                "adaptive-method",
                f"ADAPTIVE_K={settings.ADAPTIVE_K} with SPEC_METHOD=none",
                "nothing is drafted, so there is no number to choose",
                "set SPEC_METHOD=dflash or mtp, or ADAPTIVE_K=off",
            )
        )
    largest = max(settings.ADAPTIVE_K_SET, default=0)
    if adaptive(settings) and largest != verified_tokens(settings):
        found.append(
            Finding(
                "adaptive-set",
                f"ADAPTIVE_K_SET={','.join(map(str, settings.ADAPTIVE_K_SET))} where "
                f"{verified_tokens(settings)} tokens are drafted",
                "look-ahead, KDA states and the drafter are sized by the largest number",
                f"let {verified_tokens(settings)} be the largest of the set, or change "
                + {"dflash": "DFLASH_TOKENS or HYBRID_DRAFT_TOKENS"}.get(
                    settings.SPEC_METHOD, "MTP_TOKENS"
                ),
            )
        )
    return found
