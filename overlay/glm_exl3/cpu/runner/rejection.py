"""Verification of drafts: greedy comparison and rejection sampling.

Replaces `spec_decode.rejection_sampler_utils.rejection_sample`. Greedy rows keep the target's
argmax up to and including the first that differs from its draft. Sampled rows follow Leviathan et
al. (2023): accept with probability min(1, p/q), at the first rejection draw from the normalised
max(p - q, 0), after full acceptance from the target.

What must stay true: a draft of -1 is a placeholder and never accepted; `target_logits` carry the
temperature already, draft logits do not. The uniform of the acceptance test is the murmur stream
with its own domain: the same distribution as on a GPU, not the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_exl3.cpu.runner.sampling import MASK32, gumbel_argmax, murmur32
from glm_exl3.format.errors import GlmExl3Error

ACCEPT_DOMAIN = 0x51ED270B


def rejection_sample(  # noqa: PLR0913, PLR0917 - vLLM's signature
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Sampled tokens `[R, k + 1]` (int64) and how many of each row count (int32)."""
    others["synthetic_conditional_rates"] = synthetic_conditional_rates
    others["use_block_verification"] = use_block_verification
    _refuse(others)
    bounds = cu_num_logits.tolist()
    count = len(bounds) - 1
    sampled = torch.zeros(count, num_speculative_steps + 1, dtype=torch.int64)
    kept = torch.zeros(count, dtype=torch.int32)
    best = target_logits.argmax(-1)
    tokens, greedy = draft_sampled.tolist(), best.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        first, last = bounds[row], bounds[row + 1]
        heat = float(temperature[request])
        if heat == 0.0:
            accepted = 0
            while first + accepted < last - 1 and (
                greedy[first + accepted] == tokens[first + accepted + 1]
            ):
                accepted += 1
            sampled[row, : accepted + 1] = best[first : first + accepted + 1]
        else:
            draft = None if draft_logits is None else draft_logits[request]
            accepted, token = _sample_row(
                target_logits[first:last],
                None if draft is None else draft / heat,
                draft_sampled[first:last],
                pos[first:last],
                seed[request],
                use_fp64,
            )
            sampled[row, :accepted] = draft_sampled[first + 1 : first + 1 + accepted]
            sampled[row, accepted] = token
        kept[row] = accepted + 1
    return sampled, kept


def _refuse(others: dict[str, Any]) -> None:
    named = sorted(
        name
        for name, value in others.items()
        if value is not None
        and value is not False
        and not (name.startswith("fly_") and not others.get("fly_window_size"))
    )
    if named:
        raise GlmExl3Error(
            code="cpu-rejection",
            seen=f"Verification with {', '.join(named)} was asked for.",
            why="The CPU engine has the standard rejection method only.",
            fix="Set the rejection method of the speculative configuration to 'standard'.",
        )


def _sample_row(
    target: Tensor, draft: Tensor | None, tokens: Tensor, pos: Tensor, seed: Tensor, double: bool
) -> tuple[int, Tensor]:
    """Accepted drafts and the token behind them, for one sampled request.

    target `[n, V]`; draft `[k, V]` scaled logits or None for a draft without probabilities.
    """
    width = target.shape[1] if draft is None else min(target.shape[1], draft.shape[1])
    p = torch.log_softmax(target[:, :width].float(), dim=-1)
    q = None if draft is None else torch.log_softmax(draft[:, :width].float(), dim=-1)
    steps = target.shape[0] - 1
    for step in range(steps):
        token = int(tokens[step + 1])
        if token < 0:
            return step, _draw(target[step, :width], pos[step], seed, double)
        log_q = 0.0 if q is None else float(q[step, token])
        if float(p[step, token]) > float(_log_uniform(seed, pos[step])) + log_q:
            continue
        residual = _residual(p[step], None if q is None else q[step], token)
        return step, _draw(residual, pos[step], seed, double)
    return steps, _draw(target[steps, :width], pos[steps], seed, double)


def _log_uniform(seed: Tensor, pos: Tensor) -> Tensor:
    bits = murmur32(seed.long(), pos.long(), torch.zeros((), dtype=torch.int64), ACCEPT_DOMAIN)
    return torch.log((bits.double() + 0.5) / (MASK32 + 1))


def _residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    if q is None:
        residual = p.clone()
        residual[token] = float("-inf")
        return residual
    ratio = torch.exp(q - p)
    return torch.where(ratio < 1.0, p + torch.log1p(-ratio), float("-inf"))


def _draw(logits: Tensor, pos: Tensor, seed: Tensor, double: bool) -> Tensor:
    return gumbel_argmax(
        logits[None],
        torch.arange(logits.shape[0])[None],
        seed.long()[None],
        pos[None],
        torch.ones(1),
        drafting=False,
        scale=False,
        double=double,
    )[0]


def flatten_sampled(
    flat: Tensor, sampled: Tensor, stride: int, num_sampled: Tensor, cu_num_logits: Tensor
) -> None:
    """Kernel `_flatten_sampled_kernel`: sampled tokens at the rows of their logits."""
    starts = cu_num_logits.tolist()
    for row, count in enumerate(num_sampled.tolist()):
        flat[starts[row] : starts[row] + count] = sampled[row, :count]


def gather_draft_sampled(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    prefill_len: Tensor,
) -> tuple[Tensor, Tensor]:
    """Token and position of every logits row; -1 for draft slots that begin inside the prompt."""
    tokens, places = input_ids[logits_indices], positions[logits_indices]
    prompt = prefill_len[expanded_idx_mapping.long()]
    placeholder = (expanded_local_pos > 0) & (places - expanded_local_pos < prompt)
    return tokens.masked_fill(placeholder, -1), places
