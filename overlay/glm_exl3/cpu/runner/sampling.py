"""Sampling of the second model runner: temperature, Gumbel noise, log-probabilities, masks.

The noise is vLLM's counter-based generator (murmur3 over request seed, position and token), so a
seed means the same here as on a GPU up to the rounding of log.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
DRAFT_SALT = 1 << 30


def _mix(state: Tensor, key: Tensor) -> Tensor:
    key = (key * 0xCC9E2D51) & MASK32
    key = ((key << 15) | (key >> 17)) & MASK32
    key = (key * 0x1B873593) & MASK32
    state = state ^ key
    state = ((state << 13) | (state >> 19)) & MASK32
    return (state * 5 + 0xE6546B64) & MASK32


def murmur32(seed: Tensor, position: Tensor, offset: Tensor, domain: int = 0) -> Tensor:
    """32-bit hash of (seed, position, offset) as int64; arguments broadcast.

    Products of two 32-bit numbers wrap in int64, which leaves their low 32 bits right.
    """
    state = torch.full((), domain, dtype=torch.int64)
    for key in (seed & MASK32, (seed >> 32) & MASK32, position & MASK32, offset & MASK32):
        state = _mix(state, key)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & MASK32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & MASK32
    return state ^ (state >> 16)


def uniform(seed: Tensor, position: Tensor, offset: Tensor, *, double: bool) -> Tensor:
    """Open-interval uniforms, fp32 from 32 bits or fp64 from 53."""
    low = murmur32(seed, position, offset)
    if not double:
        return (low.double() + 0.5).mul(2.0**-32).float()
    high = murmur32(seed, position, offset, domain=0x9E3779B9)
    bits = (high << 21) | (low >> 11)
    return (bits.double() + 0.5).mul(2.0**-53).clamp_max(1.0 - 2.0**-53)


def gumbel_argmax(
    logits: Tensor,
    keys: Tensor,
    seed: Tensor,
    position: Tensor,
    temperature: Tensor,
    *,
    drafting: bool,
    scale: bool,
    double: bool,
) -> Tensor:
    """Index of the Gumbel-max sample per row, or of the maximum where the temperature is 0.

    logits `[n, V]`, keys int64 `[n or 1, V]` (token ids), seed, position, temperature `[n]`.
    """
    hot = temperature != 0
    if not bool(hot.any()):
        return logits.argmax(-1)
    divisor = torch.where(hot, temperature, 1.0)[:, None] if scale else 1.0
    values = logits.float() / divisor
    values = values.double() if double else values
    place = position.long() + (DRAFT_SALT if drafting else 0)
    u = uniform(seed.long()[:, None], place[:, None], keys, double=double)
    noise = -torch.log(-torch.log1p(-u)) if not double else -torch.log(-torch.log(u))
    return torch.where(hot[:, None], values + noise, values).argmax(-1)


def gumbel_sample(  # noqa: PLR0913, PLR0917 - vLLM's signature
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    seed: Tensor,
    pos: Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: Tensor | None = None,
    logits_cache_col: Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: Tensor | None = None,
) -> Tensor:
    """`sample.gumbel.gumbel_sample`: one token per row; drafts also keep their logits."""
    requests = expanded_idx_mapping.long()
    valid = requests >= 0
    safe = requests.clamp_min(0)
    temperatures = torch.where(valid, temperature[safe].float(), 0.0)
    seeds = torch.where(valid, seed[safe], 0)
    if logits_cache is not None and logits_cache_col is not None:
        source = logits if logits_cache_source is None else logits_cache_source
        columns = logits_cache_col.long().expand(requests.shape)
        logits_cache[safe[valid], columns[valid], : logits.shape[1]] = source[valid]
        seeds = seeds ^ (columns << 32)
    return gumbel_argmax(
        logits,
        torch.arange(logits.shape[1])[None],
        seeds,
        pos,
        temperatures,
        drafting=is_drafting,
        scale=apply_temperature,
        double=use_fp64,
    )


def apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """Divide each row by its request's temperature; 0 (greedy) leaves the row alone."""
    values = temperature[expanded_idx_mapping.long()].float()
    logits.div_(torch.where(values == 0, 1.0, values)[:, None])


def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities fp32 `[n, k]` of the given tokens."""
    wide = logits.float()
    return wide.gather(1, token_ids.long()) - torch.logsumexp(wide, dim=-1, keepdim=True)


def ranks(  # noqa: PLR0913, PLR0917 - launch arguments of the kernel
    output: Tensor,
    logits: Tensor,
    logits_stride: int,
    token_ids: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int = 0,  # noqa: N803 - launch argument
) -> None:
    """Kernel `_ranks_kernel`: how many logits of the row are at least the token's."""
    chosen = logits.gather(1, token_ids.long()[:, None])
    output.copy_((logits >= chosen).sum(-1))


def fill_logprob_token_ids(  # noqa: PLR0913, PLR0917 - launch arguments of the kernel
    out_token_ids: Tensor,
    out_token_ids_stride: int,
    out_valid_mask: Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids: Tensor,
    topk_indices: Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping: Tensor,
    num_per_req_token_ids: Tensor,
    per_req_token_ids: Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int = 0,  # noqa: N803 - launch argument
    PADDED_COLS: int = 0,  # noqa: N803 - launch argument
) -> None:
    """Kernel `_fill_logprob_token_ids_kernel`: a request's own ids in place of the best ones."""
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        own = int(num_per_req_token_ids[request])
        chosen = per_req_token_ids[request, :own] if own else topk_indices[row, :NUM_TOPK]
        count = own or NUM_TOPK
        out_token_ids[row, 1 : 1 + count] = chosen[:count].to(out_token_ids.dtype)
        out_valid_mask[row, 1 : 1 + count] = True


def next_power_of_2(value: int) -> int:
    """The smallest power of two not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def apply_min_p(logits: Tensor, expanded_idx_mapping: Tensor, min_p: Tensor) -> None:
    """Mask tokens less likely than `min_p` times the most likely one."""
    share = min_p[expanded_idx_mapping.long()].float()
    threshold = logits.float().amax(-1) + torch.log(share)
    masked = (logits < threshold[:, None]) & (share > 0)[:, None]
    logits.masked_fill_(masked, float("-inf"))


def get_num_nans(logits: Tensor) -> Tensor:
    """NaN logits per row, int32."""
    return torch.isnan(logits).sum(-1).int()


def unpack_bits(packed: Tensor, width: int) -> Tensor:
    """int32 words `[..., W]` to bool `[..., width]`, least significant bit first."""
    shifts = torch.arange(32, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 1).bool().flatten(-2)[..., :width]


def apply_grammar_bitmask(  # noqa: PLR0913, PLR0917 - launch arguments of the kernel
    logits: Tensor,
    logits_stride: int,
    logits_indices: Tensor,
    cu_num_logits: Tensor,
    bitmask: Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int = 1,  # noqa: N803 - launch argument
    BLOCK_SIZE: int = 0,  # noqa: N803 - launch argument
) -> None:
    """Kernel `_apply_grammar_bitmask_kernel`: -inf where the grammar's bit is 0."""
    cumulative = cu_num_logits.tolist()
    for mask, index in enumerate(logits_indices[: bitmask.shape[0]].tolist()):
        request, position = divmod(index, MASK_STRIDE)
        if position >= cumulative[request + 1] - cumulative[request]:
            continue
        allowed = unpack_bits(bitmask[mask], vocab_size)
        logits[cumulative[request] + position, : len(allowed)].masked_fill_(~allowed, float("-inf"))
