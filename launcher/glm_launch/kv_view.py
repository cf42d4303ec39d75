"""What the KV cache will cost, said before anything is loaded: `plan --kv`.

Settings and the checkpoint's config.json in, lines or JSON out; no node is asked. The arithmetic is
the plugin's (`glm_exl3.format.kv_plan`). Without a folder to read, the published geometry counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_exl3.format import kv, kv_plan
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import read_object
from glm_launch import draft_lengths
from glm_launch.errors import ConfigurationError, ExitCode, Finding
from glm_launch.session import open_session
from glm_launch.settings import Settings
from glm_launch.ui import Ui

GIB = 2**30
MB = 10**6
STEP_TOKENS = 8192
STEPS_IN_FLIGHT = 2
KDA_LAYERS, MLA_LAYERS, HEADS = 34, 11, 64
PUBLISHED_DRAFTER = kv_plan.Drafter(layers=5, kv_heads=8, head_dim=128, window=2048)
FLASH_KDA = (9, 10, 12)
BLACKWELL = 12
VLLM_ROWS = {
    10: kv.RowLayout("vLLM's fp8", 1, 0, 0),
    12: kv.RowLayout("vLLM's fp8_ds_mla", 1, kv.LATENT, 144),
}
"""Rows of KV_CACHE_DTYPE=auto where they are none of ours; see docs/kv-cache.md."""
FULL_305_BYTES, DRAFTER_BYTES = int(116.6 * GIB), int(1.2 * GIB)
CONTEXT_BYTES, STEP_TOKEN_BYTES = int(1.1 * GIB), 756 << 10
"""What an engine holds beside weights and cache: always, and per token of a step on one rank.

7.0 GiB at 8,192 tokens with the 3.04-bpw checkpoint on one H200 (docs/performance.md, 2026-11-30);
3.2 GiB a rank of two with 4 bits and a BF16 dense part, so two are taken to need half a token each.
"""
UNKNOWN = "unknown: set KV_CACHE_MEMORY_BYTES, or give --gpu-gib"


@dataclass(frozen=True)
class Card:
    """One GPU: its memory in bytes (0: unknown) and compute capability."""

    memory: int = 0
    capability: tuple[int, int] = (9, 0)


@dataclass(frozen=True)
class View:
    """A plan with where its numbers come from."""

    plan: kv_plan.CachePlan
    options: kv_plan.CacheOptions
    source: str
    pool_bytes: int
    pool_source: str
    length: int


def geometry(settings: Settings) -> tuple[kv_plan.CacheGeometry, str]:
    """What the settings' checkpoints store, and which file said so."""
    drafts = settings.SPEC_METHOD == "dflash"
    mtp = settings.SPEC_METHOD == "mtp"
    target = Path(settings.MODEL) / "config.json" if settings.MODEL else None
    draft = (
        Path(settings.DFLASH_MODEL) / "config.json" if drafts and settings.DFLASH_MODEL else None
    )
    drafter = PUBLISHED_DRAFTER if drafts else None
    if target is None or not target.is_file():
        found = kv_plan.CacheGeometry(KDA_LAYERS, MLA_LAYERS + mtp, HEADS, drafter=drafter)
        return found, "the published GLM-5.3-Flash (MODEL is no folder here)"
    config = read_object(draft) if draft is not None and draft.is_file() else None
    found = kv_plan.geometry_of(read_object(target), config, mtp=mtp)
    if drafts and config is None:
        found = kv_plan.with_drafter(found, PUBLISHED_DRAFTER)
    return found, str(target)


def step_tokens(settings: Settings) -> int:
    """Most tokens of one step."""
    return settings.MAX_NUM_BATCHED_TOKENS or STEP_TOKENS


def options(settings: Settings, card: Card) -> kv_plan.CacheOptions:
    """How these settings store it on this kind of GPU."""
    choice = settings.KV_CACHE_DTYPE
    stored = VLLM_ROWS.get(card.capability[0]) if choice == "auto" else None
    return kv_plan.CacheOptions(
        ranks=settings.tensor_parallel,
        drafts=draft_lengths.verified_tokens(settings),
        row=stored or kv.layout_of(choice, card.capability),
        state_bytes=2 if settings.KDA_STATE_DTYPE == "bfloat16" else 4,
        draft_value_bytes=1 if settings.DRAFT_KV_CACHE_DTYPE == "fp8" else 2,
        granule=kv_plan.GRANULE_SM120 if card.capability[0] == BLACKWELL else kv_plan.GRANULE,
        checkpoints=card.capability[0] in FLASH_KDA,
        in_flight_tokens=STEPS_IN_FLIGHT * step_tokens(settings),
    )


def pool_of(settings: Settings, card: Card, model_bytes: int, draft_bytes: int) -> tuple[int, str]:
    """Bytes left for the pool on one rank, and how they came about."""
    if settings.KV_CACHE_MEMORY_BYTES:
        return settings.KV_CACHE_MEMORY_BYTES, "KV_CACHE_MEMORY_BYTES"
    if not card.memory:
        return 0, UNKNOWN
    ranks = settings.tensor_parallel
    weights = -(-(model_bytes + draft_bytes) // ranks)
    reserve = CONTEXT_BYTES + step_tokens(settings) * STEP_TOKEN_BYTES // ranks
    left = int(card.memory * settings.GPU_MEM_UTIL) - weights - reserve
    return left, (
        f"{card.memory / GIB:.0f} GiB x GPU_MEM_UTIL {settings.GPU_MEM_UTIL:g}"
        f" - weights {weights / GIB:.1f} - workspace and context {reserve / GIB:.1f} GiB"
    )


def view(settings: Settings, card: Card, model_bytes: int = 0) -> View:
    """The plan for these settings; raises GlmExl3Error for what cannot be stored."""
    shape, source = geometry(settings)
    chosen = options(settings, card)
    drafter = DRAFTER_BYTES if settings.SPEC_METHOD == "dflash" else 0
    pool, how = pool_of(settings, card, model_bytes or _weights(settings), drafter)
    length = settings.MAX_MODEL_LEN or kv_plan.LENGTHS[-1]
    return View(kv_plan.plan_cache(shape, chosen), chosen, source, pool, how, length)


def least_pool(settings: Settings, card: Card) -> int:
    """Bytes per rank without which vLLM does not start: one request of full length, and a block.

    0 where the checkpoint cannot be judged; `plan --kv` says why.
    """
    try:
        seen = view(settings, card, model_bytes=1)
    except GlmExl3Error:
        return 0
    return seen.plan.request_bytes(seen.length) + seen.plan.block_bytes


def _weights(settings: Settings) -> int:
    folder = Path(settings.MODEL) if settings.MODEL else None
    if folder is None or not folder.is_dir():
        return FULL_305_BYTES
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def in_json(seen: View) -> dict[str, Any]:
    """Everything `lines` says, as data."""
    workspace = kv_plan.indexer_workspace(seen.length)
    return kv_plan.as_json(seen.plan, seen.pool_bytes) | {
        "geometry": seen.source,
        "pool": seen.pool_source,
        "row": seen.options.row.name,
        "max_model_len": seen.length,
        "verdict": verdict(seen),
        "indexer_gather_bytes": workspace,
    }


def lines(seen: View) -> list[str]:
    """The plan for people."""
    plan, chosen = seen.plan, seen.options
    said = [
        f"KV cache per rank, {chosen.ranks} rank(s), {chosen.drafts} drafts, from {seen.source}",
        f"rows      {chosen.row.name}, {chosen.row.row_bytes} bytes per token and MLA layer",
        f"block     {plan.block_tokens} tokens, {plan.block_bytes / MB:.1f} MB: one MLA page must "
        f"cover a KDA state of {plan.state_bytes / MB:.2f} MB, in steps of {chosen.granule} tokens",
        f"width     set by {_widest(plan)}; every block of the pool is this wide",
        f"hits      prefixes are found at multiples of {plan.prefix_unit} tokens",
        f"fixed     {plan.fixed_blocks} blocks, {plan.fixed_bytes / GIB:.2f} GiB per request "
        "before its first token",
        "",
        f"{'group':34}{'layers':>7}{'MB/block':>10}{'fills':>7}  blocks per request",
    ]
    for group in plan.groups:
        held = f"{group.fixed}" if group.fixed else f"1 per {group.token_block} tokens"
        if group.window:
            held = f"at most {group.blocks(seen.length)}"
        said.append(
            f"{group.name:34}{group.layers:>7}{group.bytes / MB:>10.1f}"
            f"{group.bytes / plan.block_bytes:>7.0%}  {held}"
        )
    said += ["", f"{'tokens':>9}{'blocks':>8}{'GiB':>8}{'requests at once':>18}"]
    for tokens in kv_plan.LENGTHS:
        count = (
            f"{plan.concurrency(seen.pool_bytes, tokens):.1f}"
            if seen.pool_source != UNKNOWN
            else "?"
        )
        said.append(
            f"{tokens:>9}{plan.blocks(tokens):>8}{plan.request_bytes(tokens) / GIB:>8.2f}"
            f"{count:>18}"
        )
    return [*said, "", f"pool      {seen.pool_bytes / GIB:.1f} GiB: {seen.pool_source}",
            f"verdict   {verdict(seen)}"]  # fmt: skip


def show(ui: Ui, *, as_json: bool, gpu_gib: float, capability: str) -> int:
    """Print the plan of the cache; nothing is asked of any node."""
    session = open_session(ui)
    seen = view(session.settings, Card(int(gpu_gib * GIB), _capability(capability)))
    for line in [json.dumps(in_json(seen), indent=2)] if as_json else lines(seen):
        ui.line(line)
    return ExitCode.OK


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and (minor or "0").isdigit()):
        raise ConfigurationError(
            Finding(
                "no-capability", f"--gpu {text}", "it says which kernels and rows are used",
                "give a compute capability, such as 8.0 or 12.1",
            )
        )  # fmt: skip
    return int(major), int(minor or 0)


def _widest(plan: kv_plan.CachePlan) -> str:
    return max(plan.groups, key=lambda group: group.bytes).name


def verdict(seen: View) -> str:
    """Whether one request of the asked length fits, or what is short and what would help."""
    needed = seen.plan.request_bytes(seen.length) + seen.plan.block_bytes
    if seen.pool_source == UNKNOWN:
        return f"one request of {seen.length} tokens needs {needed / GIB:.2f} GiB"
    if needed <= seen.pool_bytes:
        return f"one request of {seen.length} tokens fits ({needed / GIB:.2f} GiB)"
    return (
        f"one request of {seen.length} tokens does not fit: {needed / GIB:.2f} GiB needed, "
        f"{(needed - seen.pool_bytes) / GIB:.2f} short; the longest that fits has "
        f"{seen.plan.longest(seen.pool_bytes)} tokens{_advice(seen)}"
    )


def _advice(seen: View) -> str:
    options_ = [
        ("KDA_STATE_DTYPE=bfloat16", seen.options.state_bytes > 2),  # noqa: PLR2004
        ("DRAFT_KV_CACHE_DTYPE=fp8", "draft" in _widest(seen.plan)
         and seen.options.draft_value_bytes > 1),
        ("fewer drafts", seen.options.drafts > 3),  # noqa: PLR2004
    ]  # fmt: skip
    found = [name for name, helps in options_ if helps]
    return f"; what would help: {', '.join(found)}" if found else ""
