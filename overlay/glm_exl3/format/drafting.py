"""Whether a DFlash2 drafter, or the MTP block, goes with a target: judged before weights are read.

One list of rules for the launcher, which refuses a start, and for the plugin, which refuses to
build. What vLLM 0.33 does with a wrong pair: it loads, drafts, and nearly nothing is accepted, or
it stops in a shape error far from the cause. A rule that cannot be judged, because a key is absent
that vLLM does not need, says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import TensorEntry
from glm_exl3.format.layout import TILE

ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel")
REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
REQUIRED_DRAFT = (
    "target_layer_ids",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
"""Keys of config.json and of its `dflash_config` that vLLM reads without a default."""
SLIDING = "sliding_attention"
OTHER_DRAFTER = "use a drafter that was trained for this model"
ORIGINAL_CONFIG = "take config.json from the original drafter"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Pair:
    """A target's text configuration and a drafter's `config.json`, `tokens` drafted a step.

    `tensors` are the drafter's headers, `ranks` the tensor parallelism; both may be unknown.
    """

    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    tokens: int
    ranks: int = 1
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)

    @property
    def dflash(self) -> Mapping[str, Any]:
        found = self.drafter.get("dflash_config")
        return found if isinstance(found, dict) else {}


def problem(code: str, seen: str, why: str, fix: str = OTHER_DRAFTER) -> GlmExl3Error:
    return GlmExl3Error(code=code, seen=seen, why=why, fix=fix)


def dflash_problems(pair: Pair) -> list[GlmExl3Error]:
    """Everything that speaks against the pair; empty when nothing does."""
    foreign = list(_architecture(pair))
    if foreign:
        return foreign
    absent = list(_keys(pair))
    if absent:
        return absent
    rules = (_sizes, _layers, _block, _causality, _mask, _convolutions, _heads, _inputs, _codebooks)
    return [found for rule in rules for found in rule(pair)]


def _architecture(pair: Pair) -> Iterator[GlmExl3Error]:
    names = pair.drafter.get("architectures") or ["nothing"]
    if names[0] not in ARCHITECTURES:
        yield problem(
            "drafter-architecture",
            f"the drafter's architecture is {names[0]}, not {ARCHITECTURES[0]}",
            "only DFlash2 drafters propose whole blocks for this model",
            "set DFLASH_MODEL to a DFlash2 drafter, or SPEC_METHOD=mtp or none",
        )


def _keys(pair: Pair) -> Iterator[GlmExl3Error]:
    missing = [key for key in REQUIRED if key not in pair.drafter]
    missing += [f"dflash_config.{key}" for key in REQUIRED_DRAFT if key not in pair.dflash]
    if missing:
        yield problem(
            "drafter-config-key",
            f"the drafter's config.json lacks {', '.join(missing)}",
            "vLLM 0.33 reads these without a default",
            ORIGINAL_CONFIG,
        )


def _sizes(pair: Pair) -> Iterator[GlmExl3Error]:
    for key, code, why in (
        ("hidden_size", "drafter-hidden", "the drafter reads the target's hidden states"),
        ("vocab_size", "drafter-vocabulary", "both name the same tokens by the same numbers"),
    ):
        ours, theirs = pair.target.get(key), pair.drafter[key]
        if ours is not None and ours != theirs:
            yield problem(
                code,
                f"the drafter's {key} is {theirs}, the target's {ours}",
                f"{why} and uses the target's embedding and head",
            )
    own, vocabulary = pair.drafter.get("draft_vocab_size"), pair.drafter["vocab_size"]
    if own is not None and own != vocabulary:
        yield problem(
            "drafter-vocabulary",
            f"the drafter's draft_vocab_size is {own}, its vocab_size {vocabulary}",
            "the candidate selector indexes its tables with the target's token numbers",
        )


def _layers(pair: Pair) -> Iterator[GlmExl3Error]:
    ids, count = pair.dflash["target_layer_ids"], pair.target.get("num_hidden_layers")
    legal = isinstance(ids, list) and ids and all(type(number) is int for number in ids)
    if not legal or len(set(ids)) < len(ids) or min(ids) < 0:
        yield problem(
            "drafter-layers",
            f"the drafter's target_layer_ids are {ids}",
            "they name the target's layers whose states the drafter reads, each once",
        )
    elif count is not None and max(ids) >= count:
        yield problem(
            "drafter-layers",
            f"the drafter reads layer {max(ids)}, the target has {count} layers",
            "a state that does not exist cannot be read",
        )


def _block(pair: Pair) -> Iterator[GlmExl3Error]:
    block = pair.drafter.get("block_size", pair.dflash.get("block_size"))
    if isinstance(block, int) and pair.tokens > block - 1:
        yield problem(
            "drafter-block",
            f"{pair.tokens} tokens a step, the drafter's block of {block} holds the newest token "
            f"and {block - 1} drafts",
            "it never learned positions beyond its block, so they are hardly ever accepted",
            f"set DFLASH_TOKENS to at most {block - 1}",
        )


def causal_layers(drafter: Mapping[str, Any]) -> list[int]:
    """Layers whose attention vLLM 0.33 would mask inside the block.

    `is_causal` decides, then `dflash_config.causal`, then sliding layers of `layer_types`.
    """
    count = int(drafter["num_hidden_layers"])
    for said in (drafter.get("is_causal"), (drafter.get("dflash_config") or {}).get("causal")):
        if said is not None:
            return list(range(count)) if said else []
    kinds = drafter.get("layer_types") or []
    return [index for index, kind in enumerate(kinds[:count]) if kind == SLIDING]


def _causality(pair: Pair) -> Iterator[GlmExl3Error]:
    masked = causal_layers(pair.drafter)
    if masked:
        yield problem(
            "drafter-causal",
            f"attention inside the block is causal in the drafter's layers {_listed(masked)}",
            "DFlash2 drafts all positions at once, each seeing all: behind a causal mask the later "
            "ones are hardly ever accepted",
            'if the drafter was trained without one, write "is_causal": false into its config.json',
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _mask(pair: Pair) -> Iterator[GlmExl3Error]:
    mask, vocabulary = pair.dflash["mask_token_id"], pair.drafter["vocab_size"]
    if type(mask) is not int or not 0 <= mask < vocabulary:
        yield problem(
            "drafter-mask",
            f"mask_token_id is {mask}, the vocabulary has {vocabulary} tokens",
            "every position to draft is filled with it",
        )
    if pair.dflash.get("sample_from_anchor"):
        yield problem(
            "drafter-anchor",
            "the drafter samples from its anchor",
            "vLLM 0.33 drafts DFlash2 blocks from the masked positions only",
        )


def _convolutions(pair: Pair) -> Iterator[GlmExl3Error]:
    group, hidden = pair.dflash["conv_group_size"], pair.drafter["hidden_size"]
    if type(group) is not int or group < 1 or hidden % group:
        yield problem(
            "drafter-groups",
            f"conv_group_size is {group}, hidden_size {hidden}",
            "a dynamic convolution has whole groups of channels",
            ORIGINAL_CONFIG,
        )


def _heads(pair: Pair) -> Iterator[GlmExl3Error]:
    heads = pair.drafter["num_attention_heads"]
    kv_heads = pair.drafter.get("num_key_value_heads") or heads
    uneven = kv_heads % pair.ranks if kv_heads >= pair.ranks else pair.ranks % kv_heads
    if heads % pair.ranks or uneven:
        yield problem(
            "drafter-heads",
            f"{heads} query and {kv_heads} key/value heads of the drafter over {pair.ranks} ranks",
            "vLLM cuts the drafter over all ranks, by whole heads",
            "use fewer ranks, or SPEC_METHOD=mtp or none",
        )


def _inputs(pair: Pair) -> Iterator[GlmExl3Error]:
    """What `fc` reads: the hidden states of all layers it names, side by side."""
    dense, packed = pair.tensors.get("fc.weight"), pair.tensors.get("fc.trellis")
    if dense is not None and len(dense.shape) == 2:
        have = dense.shape[1]
    elif packed is not None and packed.shape:
        have = packed.shape[0] * TILE
    else:
        return
    ids = pair.dflash["target_layer_ids"]
    layers = len(ids) if isinstance(ids, list) else 0
    want = layers * pair.drafter["hidden_size"]
    if have != want:
        yield problem(
            "drafter-inputs",
            f"the drafter's fc reads {have} features, {layers} layers of "
            f"{pair.drafter['hidden_size']} make {want}",
            "configuration and weights of the drafter do not belong together",
            ORIGINAL_CONFIG,
        )


def _codebooks(pair: Pair) -> Iterator[GlmExl3Error]:
    want = [pair.drafter["vocab_size"], pair.dflash["selector_rank"]]
    for name in ("predecessor_codebook", "successor_codebook"):
        entry = pair.tensors.get(f"candidate_selector.{name}")
        if entry is not None and list(entry.shape) != want:
            yield problem(
                "drafter-codebook",
                f"candidate_selector.{name} is {list(entry.shape)}, the configuration says {want}",
                "the selector looks candidates up by token number",
                ORIGINAL_CONFIG,
            )


def mtp_problems(target: Mapping[str, Any], names: Iterable[str]) -> list[GlmExl3Error]:
    """What speaks against MTP drafting; `names` are the target's tensors, empty when unknown."""
    fix = "take a checkpoint that kept it, or SPEC_METHOD=dflash or none"
    why = "SPEC_METHOD=mtp drafts with the checkpoint's own MTP block"
    if target.get("num_nextn_predict_layers") == 0:
        return [problem("mtp-absent", "the target declares no MTP block", why, fix)]
    layers, known = target.get("num_hidden_layers"), False
    for name in names:
        known = True
        match = _LAYER.search(name)
        if layers is None or (match is not None and int(match[1]) >= layers):
            return []
    if not known:
        return []
    seen = f"the checkpoint has no tensor of layer {layers}, where the MTP block would be"
    return [problem("mtp-absent", seen, why, fix)]


def cache_problem(cache_dtype: str, *, graphs: bool, capability: int | None) -> GlmExl3Error | None:
    """What speaks against this type of the drafter's KV cache.

    `capability` is the major compute capability, None without a GPU. FlashAttention takes FP8 keys
    on Hopper alone; elsewhere vLLM 0.33 falls to FlashInfer, which captures no block without a
    causal mask (on SM12x only with kernels that it would fetch over the network).
    """
    if not cache_dtype.startswith("fp8") or not graphs or capability in (None, 9):
        return None
    return problem(
        "drafter-kv-dtype",
        f"the drafter's KV cache would be {cache_dtype}",
        "the back end that vLLM 0.33 takes for it on this GPU turns the drafter's CUDA graphs off",
        'give the speculative configuration "kv_cache_dtype": "auto", as the launcher does',
    )
